"""The launches of ``group_norm``: which kernels run, their grids and constants, and their scratch memory.

The kernels are in ``group_norm/kernels.py``, their configurations in ``group_norm/config.py``.
"""

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

# Each part of the scratch memory starts at a multiple of this number of fp32 values: 256 bytes.
ALIGNED = 64


class TablePlan:
    """The launches that compute a scale and an offset for each sample and channel, and write them to a table.

    These are a launch of the statistics kernel, unless the call gives the statistics, and a launch of
    ``merge_kernel``. ``group_norm/kernels.py`` explains the table.

    Attributes:
        scratch: number of fp32 values in the memory that ``run`` returns.
        memory: the kernels' arguments ``table_offset`` and ``table_plane``, which say where the table is in
            this memory.
    """

    __slots__ = ("memory", "merge", "scratch", "statistics")

    def __init__(self, call: GroupNormCall, HW: int, channels_last: bool) -> None:
        x = call.x
        N, C = x.shape[:2]
        self.statistics: StatisticsLaunch | None = None
        if call.statistics is None:
            self.statistics = StatisticsLaunch(x, channels_last)
            chunks = self.statistics.chunks
        else:
            chunks = call.statistics.shape[2]
        # The scratch memory has two parts: the statistics, unless the caller gives these, and the table.
        plane, table_plane = N * chunks * C, ceil_div(N * C, ALIGNED) * ALIGNED
        table = ceil_div(2 * plane, ALIGNED) * ALIGNED if call.statistics is None else 0
        folds = x.dtype != torch.float32
        self.scratch = table + (2 if folds else 3) * table_plane
        self.memory = {"table_offset": table, "table_plane": table_plane}
        self.merge = merge_launch(call, HW, chunks, merge_config(chunks, C, call.num_groups), self.memory)

    def run(
        self, stream: int, call: GroupNormCall, mean: Tensor | None = None, rstd: Tensor | None = None
    ) -> Tensor:
        """Launches the kernels, and returns the memory with the table.

        Also fills ``mean`` and ``rstd`` with mean and 1 / deviation of each group, if they are not None.
        """
        x, _, weight, bias, _, _, shift, ada_scale, ada_shift, statistics, _, _ = call
        scratch = torch.empty(self.scratch, dtype=torch.float32, device=x.device)
        if self.statistics is not None:
            statistics = scratch
            self.statistics.on_stream(stream, x, statistics)
        # Without a shift, ``merge_kernel`` gets the weight's pointer in place of the shift's, and does not
        # read through it, because its argument ``shifted`` is 0. So norms with and without a shift share one
        # compiled kernel, if they have a weight.
        shift = weight if shift is None else shift
        self.merge(stream, statistics, scratch, mean, rstd, weight, bias, shift, ada_scale, ada_shift)
        return scratch


class GroupNormPlan:
    """The launches of ``group_norm`` for calls with equal shapes, strides, dtypes and options.

    There is either one launch, ``small``, or the launches of ``table``, which compute scales and offsets, and
    after them ``apply``, which computes y.

    Attributes:
        of_batches: what ``small`` gets for the pointers that only BatchNorm uses: a None for each of them.
        tokens: (N, HW, C), the shape of y if the call wants y as tokens. Otherwise None.
    """

    __slots__ = ("apply", "of_batches", "small", "table", "tokens")

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
            self.table = TablePlan(call, HW, channels_last)
            self.apply = _apply(call, HW, channels_last, self.table.memory)

    def run_and_save(self, call: GroupNormCall) -> tuple[Tensor, Tensor, Tensor]:
        """Launches the kernels, and returns y and, for the backward, mean and 1 / deviation of each group."""
        mean, rstd = empty_saved(call), empty_saved(call)
        return self.run(call, mean, rstd), mean, rstd

    def run(self, call: GroupNormCall, mean: Tensor | None = None, rstd: Tensor | None = None) -> Tensor:
        """Launches the kernels, and returns y.

        Also fills ``mean`` and ``rstd`` (N, G) with mean and 1 / deviation of each group, unless they are
        None.
        """
        stream = gpu.stream_of(call.x)
        if stream is None:
            with torch.cuda.device(call.x.device):
                return self.run(call, mean, rstd)
        x, out_dtype = call.x, call.out_dtype
        if self.tokens is not None:
            y = torch.empty(self.tokens, dtype=out_dtype or x.dtype, device=x.device)
        elif out_dtype is None:
            y = torch.empty_like(x)  # with ``dtype``, ``empty_like`` takes 1.5 times as much CPU time
        else:
            y = torch.empty_like(x, dtype=out_dtype)
        if self.small is not None:
            # Without a shift, ``small_kernel`` gets the weight's pointer in place of the shift's, and does
            # not read through it, because its argument ``shifted`` is 0. So norms with and without a shift
            # share one compiled kernel, if they have a weight. ``channels_kernel`` (``of_batches`` is not
            # empty) has no argument ``shifted``, so it gets the shift or None.
            is_small_kernel = not self.of_batches
            shift = call.weight if call.shift is None and is_small_kernel else call.shift
            of_channels = call.weight, call.bias, shift, call.ada_scale, call.ada_shift
            self.small(stream, x, y, mean, rstd, *of_channels, *self.of_batches)
            return y
        self.apply(stream, x, y, self.table.run(stream, call, mean, rstd))
        return y


def small_launch(
    call: GroupNormCall,
    config: SmallConfig,
    HW: int,
    channels_last: bool,
    image: int | None = None,
    momentum: float | None = None,
) -> Launch:
    """The single launch for small groups. A program normalizes one group of one sample.

    If each channel is a group and x is channels-last, a program normalizes several groups.

    ``image``, ``momentum``: BatchNorm's constants ``IMAGE`` and ``MOMENTUM`` of ``channels_kernel``.
    """
    N, C = call.x.shape[:2]
    more: dict[str, Any] = {"IMAGE": image, "MOMENTUM": momentum, "ACTIVATION": call.activation}
    if not config.each_channel:
        more = {
            "CHANNELS_LAST": channels_last, "OUT_LAST": channels_last or call.tokens,
            "TAIL": config.tail, "TAIL_LANES": config.tail_lanes, "TAIL_STEPS": config.tail_steps,
            "shifted": int(call.shift is not None), **activation_of(call, optional=True),
        }  # fmt: skip
    return Launch(
        kernels.channels_kernel if config.each_channel else kernels.small_kernel,
        N * ceil_div(C, config.channels), config.num_warps, pdl=gpu.has_programmatic_launch(call.x.device),
        **strides_of(call), C=C, CHANNELS=config.channels, HW=HW, eps=call.eps,
        PAIRS=pairs_of(call, config.block), **more, **tile_constants(config),
    )  # fmt: skip


def merge_launch(
    call: GroupNormCall, HW: int, chunks: int, tile: MergeConfig, memory: dict[str, int]
) -> Launch:
    """The launch of ``merge_kernel``. A program merges one group, or several groups of one channel each.

    ``memory``: the numbers ``table_offset`` and ``table_plane`` of ``merge_kernel``.
    """
    N, C = call.x.shape[:2]
    parts = ceil_div(C, tile.channels)
    return Launch(
        kernels.merge_kernel, N * parts, tile.num_warps, pdl=gpu.has_programmatic_launch(call.x.device),
        shifted=int(call.shift is not None), **strides_of(call), eps=call.eps,
        C=C, CHANNELS=tile.channels, parts=parts, EACH_CHANNEL=tile.each_channel,
        HW=HW, chunks=chunks, rows=ceil_div(HW, chunks), plane=N * chunks * C,
        complete=int(call.statistics is None), **memory, FOLD=call.x.dtype != torch.float32,
        EXACT=(call.out_dtype or call.x.dtype) == torch.float32, LOOP=tile.is_full or chunks > tile.block_p,
        # C_FACTOR is a divisor of C and CHANNELS that the compiler knows. It is at most 2. If it could be 4,
        # groups of 20 channels and groups of 30 would need two compiled kernels. Loads of four channels at
        # once are no faster than loads of two.
        C_FACTOR=math.gcd(2, C, tile.channels), BLOCK_P=tile.block_p, BLOCK_C=tile.block_c,
    )  # fmt: skip


def _apply(call: GroupNormCall, HW: int, channels_last: bool, memory: dict[str, int]) -> Launch:
    """The launch of ``apply_kernel``. It has one program for each tile of positions and channels."""
    N, C = call.x.shape[:2]
    blocks = apply_config(N, C, HW, channels_last, gpu.num_sms(call.x.device))
    folds = call.x.dtype != torch.float32
    out_last = channels_last or call.tokens
    programs = N * ceil_div(C, blocks.block_c) * ceil_div(HW, blocks.block_hw)
    return Launch(
        kernels.apply_kernel, programs, blocks.num_warps, pdl=gpu.has_programmatic_launch(call.x.device),
        C=C, HW=HW, CHANNELS_LAST=channels_last, OUT_LAST=out_last, **memory,
        # Only in launches with few tiles does the kernel decide at run time whether it applies the activation
        # (argument ``activates``). The branch takes registers, so one program fewer fits on each
        # multiprocessor. That would make launches with many tiles slower.
        **activation_of(call, optional=blocks.few),
        PAIRS=folds and channels_last and blocks.block_c >= PAIRED, FOLD=folds,
        EVEN=C % blocks.block_c == 0 and HW % blocks.block_hw == 0,
        AHEAD=gpu.reads_ahead(call.x.device),
        C_FACTOR=vector_width(call.x.itemsize, C), HW_FACTOR=row_factor(channels_last and out_last, HW),
        BLOCK_HW=blocks.block_hw, BLOCK_C=blocks.block_c,
    )  # fmt: skip


def activation_of(call: GroupNormCall, *, optional: bool) -> dict[str, Any]:
    """Returns the kernels' arguments ``ACTIVATION``, ``OPTIONAL`` and ``activates``.

    If ``optional`` is True, norms without activation and norms with SiLU share one compiled kernel, which
    branches on ``activates``. In all other cases the kernel applies ``ACTIVATION`` without a branch.
    """
    shares = optional and call.activation in ("identity", "silu")
    return {
        "ACTIVATION": "silu" if shares else call.activation,
        "OPTIONAL": shares,
        "activates": int(call.activation != "identity"),
    }


def pairs_of(call: Any, block: int) -> bool:
    """The kernels' constant ``PAIRS``: True if the sigmoids of two neighbors are computed with one division.

    ``block``: number of contiguous elements in a tile. The result is False if this number is below
    ``PAIRED``, or if x is fp32.
    """
    return bool(call.x.dtype != torch.float32 and block >= PAIRED)


def row_stride(operand: Tensor | None) -> int:
    """Elements between the rows of ``operand`` (N, C), or 0 if all samples share one row."""
    if operand is None or operand.dim() == 1 or operand.shape[0] == 1:
        return 0
    return operand.stride(0)


def strides_of(call: GroupNormCall) -> dict[str, int]:
    """The kernels' arguments ``shift_stride``, ``ada_scale_stride`` and ``ada_shift_stride``, by name."""
    return {f"{name}_stride": row_stride(getattr(call, name)) for name in ("shift", "ada_scale", "ada_shift")}
