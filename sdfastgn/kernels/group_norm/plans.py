"""How ``group_norm`` is launched: which of ``group_norm/kernels.py`` run, and in what memory."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from sdfastgn.kernels.common import gpu
from sdfastgn.kernels.common.activations import PAIRED
from sdfastgn.kernels.common.launch import Launch
from sdfastgn.kernels.common.layout import is_channels_last
from sdfastgn.kernels.common.sizes import ceil_div, row_factor, tile_constants, vector_width
from sdfastgn.kernels.group_norm import kernels
from sdfastgn.kernels.group_norm.config import (
    MergeConfig,
    SmallConfig,
    apply_config,
    launch_config,
    merge_config,
)
from sdfastgn.kernels.group_norm.op import GroupNormCall, empty_saved
from sdfastgn.kernels.statistics.kernels import StatisticsLaunch

# fp32 values: every part of the scratch memory starts at a multiple of 256 bytes.
ALIGNED = 64


class GroupNormPlan:
    """The launches of one kind of call: ``small``, or ``statistics``, ``merge`` and ``apply``.

    ``of_batches``: pointers of ``small`` that only BatchNorm has.
    ``scratch``: fp32 values that pass between the latter.
    """

    __slots__ = ("apply", "merge", "of_batches", "scratch", "small", "statistics", "tokens")

    def __init__(self, call: GroupNormCall) -> None:
        x = call.x
        N, C = x.shape[:2]
        HW = math.prod(x.shape[2:])
        self.tokens = (N, HW, C) if call.tokens else None
        self.small: Launch | None = None
        channels_last = is_channels_last(x)
        config = launch_config(
            N, C, HW, call.num_groups, channels_last, gpu.num_sms(x.device), itemsize=x.element_size()
        )
        if isinstance(config, SmallConfig) and call.statistics is None:
            self.small = small_launch(call, config, HW, channels_last)
            self.of_batches = (None,) * 3 if config.each_channel else ()
        else:
            self._plan_split(call, HW, channels_last)

    def _plan_split(self, call: GroupNormCall, HW: int, channels_last: bool) -> None:
        x = call.x
        N, C = x.shape[:2]
        self.statistics: StatisticsLaunch | None = None
        if call.statistics is None:
            self.statistics = StatisticsLaunch(x, channels_last)
            chunks = self.statistics.chunks
        else:
            chunks = call.statistics.shape[2]
        # The statistics come first in the scratch memory, unless they are given, then the table of
        # scales and offsets.
        plane, table_plane = N * chunks * C, ceil_div(N * C, ALIGNED) * ALIGNED
        table = ceil_div(2 * plane, ALIGNED) * ALIGNED if call.statistics is None else 0
        folds = x.dtype != torch.float32
        self.scratch = table + (2 if folds else 3) * table_plane
        memory = {"table_offset": table, "table_plane": table_plane}
        self.merge = merge_launch(call, HW, chunks, merge_config(chunks, C, call.num_groups), memory)
        self.apply = _apply(call, HW, channels_last, memory)

    def run_and_save(self, call: GroupNormCall) -> tuple[Tensor, Tensor, Tensor]:
        mean, rstd = empty_saved(call), empty_saved(call)
        return self.run(call, mean, rstd), mean, rstd

    def run(self, call: GroupNormCall, mean: Tensor | None = None, rstd: Tensor | None = None) -> Tensor:
        """Also fills ``mean`` and ``rstd``, both or none of them."""
        stream = gpu.stream_on(call.x.device)
        if stream is None:
            with torch.cuda.device(call.x.device):
                return self.run(call, mean, rstd)
        x, _, weight, bias, _, _, shift, ada_scale, ada_shift, statistics, _, out_dtype = call
        if self.tokens is not None:
            y = torch.empty(self.tokens, dtype=out_dtype or x.dtype, device=x.device)
        else:
            y = torch.empty_like(x, dtype=out_dtype)
        if self.small is not None:
            operands = weight, bias, shift, ada_scale, ada_shift
            self.small(stream, x, y, mean, rstd, *operands, *self.of_batches)
            return y
        scratch = torch.empty(self.scratch, dtype=torch.float32, device=x.device)
        if self.statistics is not None:
            statistics = scratch
            self.statistics.on_stream(stream, x, statistics)
        # Without a shift any memory: norms with and without one share a kernel.
        shift = weight if shift is None else shift
        self.merge(stream, statistics, scratch, mean, rstd, weight, bias, shift, ada_scale, ada_shift)
        self.apply(stream, x, y, scratch)
        return y


def small_launch(
    call: GroupNormCall,
    config: SmallConfig,
    HW: int,
    channels_last: bool,
    image: int | None = None,
    momentum: float | None = None,
) -> Launch:
    """One program for each group, or for some neighboring channels that are groups of their own.

    ``image``, ``momentum``: BatchNorm's, as in ``channels_kernel``.
    """
    N, C = call.x.shape[:2]
    more: dict[str, Any] = {"IMAGE": image, "MOMENTUM": momentum}
    if not config.each_channel:
        more = {
            "CHANNELS_LAST": channels_last, "OUT_LAST": channels_last or call.tokens,
            "TAIL": config.tail, "TAIL_LANES": config.tail_lanes, "TAIL_STEPS": config.tail_steps,
        }  # fmt: skip
    return Launch(
        kernels.channels_kernel if config.each_channel else kernels.small_kernel,
        N * ceil_div(C, config.channels), config.num_warps, pdl=gpu.has_programmatic_launch(call.x.device),
        **strides_of(call), C=C, CHANNELS=config.channels, HW=HW, eps=call.eps,
        ACTIVATION=call.activation, PAIRS=pairs_of(call, config.block),
        **more, **tile_constants(config),
    )  # fmt: skip


def merge_launch(
    call: GroupNormCall, HW: int, chunks: int, tile: MergeConfig, memory: dict[str, int]
) -> Launch:
    """One program for each group, or for some channels that are groups of their own."""
    N, C = call.x.shape[:2]
    parts = ceil_div(C, tile.channels)
    return Launch(
        kernels.merge_kernel, N * parts, tile.num_warps, pdl=gpu.has_programmatic_launch(call.x.device),
        shifted=int(call.shift is not None), **strides_of(call), eps=call.eps,
        C=C, CHANNELS=tile.channels, parts=parts, EACH_CHANNEL=tile.each_channel,
        HW=HW, chunks=chunks, rows=ceil_div(HW, chunks), plane=N * chunks * C,
        complete=int(call.statistics is None), **memory, FOLD=call.x.dtype != torch.float32,
        EXACT=(call.out_dtype or call.x.dtype) == torch.float32, LOOP=tile.is_full or chunks > tile.block_p,
        C_FACTOR=vector_width(4, C, tile.channels), BLOCK_P=tile.block_p, BLOCK_C=tile.block_c,
    )  # fmt: skip


def _apply(call: GroupNormCall, HW: int, channels_last: bool, memory: dict[str, int]) -> Launch:
    """One program for each tile of positions and channels."""
    N, C = call.x.shape[:2]
    blocks = apply_config(N, C, HW, channels_last, gpu.num_sms(call.x.device))
    folds = call.x.dtype != torch.float32
    out_last = channels_last or call.tokens
    # A norm without activation shares SiLU's kernel where tiles are few; where they are many, a
    # program more a multiprocessor counts, and a branch takes registers.
    optional = blocks.few and call.activation in ("identity", "silu")
    programs = N * ceil_div(C, blocks.block_c) * ceil_div(HW, blocks.block_hw)
    return Launch(
        kernels.apply_kernel, programs, blocks.num_warps, pdl=gpu.has_programmatic_launch(call.x.device),
        C=C, HW=HW, CHANNELS_LAST=channels_last, OUT_LAST=out_last, **memory,
        activates=int(call.activation != "identity"), OPTIONAL=optional,
        ACTIVATION="silu" if optional else call.activation,
        PAIRS=folds and channels_last and blocks.block_c >= PAIRED, FOLD=folds,
        EVEN=C % blocks.block_c == 0 and HW % blocks.block_hw == 0,
        AHEAD=gpu.reads_ahead(call.x.device),
        C_FACTOR=vector_width(call.x.itemsize, C), HW_FACTOR=row_factor(channels_last and out_last, HW),
        BLOCK_HW=blocks.block_hw, BLOCK_C=blocks.block_c,
    )  # fmt: skip


def pairs_of(call: Any, block: int) -> bool:
    """True if two of the ``block`` neighbors of a tile may share an instruction of their activation."""
    return bool(call.x.dtype != torch.float32 and block >= PAIRED)


def row_stride(operand: Tensor | None) -> int:
    """Elements from a sample's row to the next; 0 where one serves all samples."""
    if operand is None or operand.dim() == 1 or operand.shape[0] == 1:
        return 0
    return operand.stride(0)


def strides_of(call: GroupNormCall) -> dict[str, int]:
    return {f"{name}_stride": row_stride(getattr(call, name)) for name in ("shift", "ada_scale", "ada_shift")}
