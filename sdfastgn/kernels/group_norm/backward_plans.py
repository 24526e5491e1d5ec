"""The launches of GroupNorm's backward: which kernels run, their grids and constants, their scratch memory.

The kernels are in ``backward_kernels.py``, ``walk_kernels.py`` and ``parameter_kernels.py``.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sdfastgn.kernels.common import gpu
from sdfastgn.kernels.common.declaration import Gradients, empty_gradients, gradients_of
from sdfastgn.kernels.common.launch import Launch
from sdfastgn.kernels.common.layout import is_channels_last
from sdfastgn.kernels.common.sizes import ceil_div, row_factor, tile_constants
from sdfastgn.kernels.common.sums import SUM_WARPS, column_sum_block
from sdfastgn.kernels.group_norm import backward_kernels as kernels
from sdfastgn.kernels.group_norm import parameter_kernels, walk_kernels
from sdfastgn.kernels.group_norm.config import (
    ApplyConfig,
    SmallConfig,
    WalkConfig,
    apply_config,
    launch_config,
    merge_config,
    parameter_config,
    parameter_rows,
    walk_config,
)
from sdfastgn.kernels.group_norm.plans import ALIGNED, pairs_of, strides_of
from sdfastgn.kernels.statistics.config import StatisticsConfig
from sdfastgn.kernels.statistics.kernels import is_even

# Number of planes of the table that ``merge_sums_kernel`` writes and ``apply_grad_kernel`` reads: scale,
# offset, slope, level and centre.
_TABLE_ROWS = 5
# Names of the operands that have gradients, in the order of the kernels' pointers.
_GRADIENTS = ("x", "weight", "bias", "shift", "ada_scale", "ada_shift")
# Number of operands that have gradients, without x.
_PARAMETERS = 5
# Warps of a program of ``parameter_grad_kernel``.
_PARAMETER_WARPS = 4


class Sizes(NamedTuple):
    """The sizes and layouts of a call of GroupNorm's backward.

    Attributes:
        CG: channels of a group.
        channels_last, dy_last: True if x, or dy, is channels-last.
        pdl: True if kernels use programmatic dependent launch.
        shift_grad: True if the gradient of the shift is wanted.
    """

    N: int
    C: int
    HW: int
    CG: int
    channels_last: bool
    dy_last: bool
    pdl: bool
    strides: dict[str, int]  # row strides of shift, ada_scale and ada_shift
    shift_grad: bool

    @classmethod
    def of(cls, call: Any) -> Sizes:
        x, C = call.x, call.x.shape[1]
        return cls(
            x.shape[0],
            C,
            math.prod(x.shape[2:]),
            C // call.num_groups,
            is_channels_last(x),
            call.tokens or is_channels_last(call.dy),
            gpu.has_programmatic_launch(x.device),
            strides_of(call),
            call.dshift,
        )


class GroupNormGradPlan:
    """The launches of GroupNorm's backward for calls with equal shapes, strides, dtypes and options.

    The calls must also want the same gradients.

    dx and the totals, which are sums for the gradients of the other operands, come from one launch or from
    three. ``backward_kernels.py`` explains these ways to launch:

    - ``single``: one launch. A program holds a group in registers, or reads its group twice (``WalkConfig``);
    - ``sums``, ``merge`` and, if dx is wanted, ``apply``: three launches, called the split way.

    The gradients of the operands other than x come from ``apply`` or, if there is none, from ``parameters``.
    If samples are many, each program of ``parameters`` sums only a part of the samples, and ``parts_sum``
    adds up the parts.

    Attributes:
        of_batches: one None for each pointer of ``single`` that only BatchNorm uses.
        scratch: number of fp32 values in the memory that the kernels share. This memory holds the totals. In
            the split way it also holds the sums of chunks and the table.
        totals: where the totals start in the scratch memory.
        plane: number of values of each plane of the totals and of the table: N * C, rounded up to a multiple
            of ``ALIGNED``.
        part_plane: number of values of a plane of (parts, C) sums, rounded up in the same way. Each gradient
            has one such plane.
        rows: for weight, bias, shift, ada_scale and ada_shift, True if it has one row for each sample.
        wanted: names of the operands whose gradients are wanted.
    """

    __slots__ = (
        "apply", "merge", "of_batches", "parameters", "part_plane", "parts_sum", "plane", "rows", "scratch",
        "single", "sums", "totals", "wanted",
    )  # fmt: skip

    def __init__(self, call: Any) -> None:
        x = call.x
        sizes = Sizes.of(call)
        self.wanted = tuple(name for name in gradients_of(type(call)) if getattr(call, f"d{name}"))
        self.plane = _aligned(sizes.N * sizes.C)
        self.totals, self.scratch = 0, (2 + call.dshift) * self.plane
        self.single: Launch | None = None
        self.of_batches: tuple[None, ...] = ()
        self.apply: Launch | None = None
        self.parameters: Launch | None = None
        self.parts_sum: Launch | None = None
        sms = gpu.num_sms(x.device)
        shape = (sizes.N, sizes.C, sizes.HW, call.num_groups, sizes.channels_last, sms)
        config = launch_config(*shape, backward=True)
        walk = None
        if not isinstance(config, SmallConfig) and call.dx and sizes.dy_last == sizes.channels_last:
            walk = walk_config(*shape, gpu.l2_bytes(x.device), x.element_size(), call.activation, call.dshift)
        if isinstance(config, SmallConfig):
            self.single = small_grad_launch(call, sizes, config, self.plane)
            self.of_batches = (None,) * 4
        elif walk is not None:
            self.single = self._plan_walk(call, sizes, walk)
        else:
            self.sums = sums_launch(call, sizes, config.statistics, config.statistics.chunks)
            self.merge = self._plan_merge(call, sizes, config.statistics.chunks)
        self._plan_rest(call, sizes, sms)

    def _plan_rest(self, call: Any, sizes: Sizes, sms: int) -> None:
        """Prepares the launch that computes the gradients of all operands but x.

        If there is no ``single`` launch and dx is wanted, this launch is ``apply``, which also computes dx.
        Otherwise it is ``parameters``.
        """
        N, C, HW = sizes.N, sizes.C, sizes.HW
        block_n, block_c = parameter_config(N, C)
        programs = ceil_div(C, block_c) if any(name != "x" for name in self.wanted) else 0
        operands = {"SHIFT_ROWS": call.shift, "SCALE_ROWS": call.ada_scale, "OFFSET_ROWS": call.ada_shift}
        rows = {name: t is not None and t.dim() == 2 and t.shape[0] == N for name, t in operands.items()}
        self.rows = (False, False, *rows.values())
        parameters = {
            "ada_scale_stride": sizes.strides["ada_scale_stride"], "N": N, "totals_offset": self.totals,
            "plane": self.plane, "C": C, "BLOCK_N": block_n, **rows,
        }  # fmt: skip
        if self.single is None and call.dx:
            parameters |= {"BLOCK_PARAMETERS": block_c, "PARAMETER_PROGRAMS": programs}
            blocks = apply_config(N, C, HW, sizes.channels_last, sms, backward=True)
            self.apply = self._plan_apply(call, sizes, blocks, parameters)
        elif programs:
            part_rows = parameter_rows(N, C, sms)
            parts = ceil_div(N, part_rows)
            self.parameters = Launch(
                parameter_kernels.parameter_grad_kernel, programs * parts, _PARAMETER_WARPS,
                pdl=sizes.pdl, rows=part_rows, BLOCK_C=block_c, **parameters,
            )  # fmt: skip
            if parts > 1:
                self.part_plane = _aligned(parts * C)
                self.parts_sum = self._plan_parts_sum(sizes, parts)

    def _plan_parts_sum(self, sizes: Sizes, parts: int) -> Launch:
        """Prepares the launch that adds up the partial sums of the gradients of all operands but x.

        The launch has one program for each of these five operands and each block of channels.
        """
        block_p, block_c = column_sum_block(parts, sizes.C)
        return Launch(
            parameter_kernels.parameter_sum_kernel, _PARAMETERS * ceil_div(sizes.C, block_c), SUM_WARPS,
            pdl=sizes.pdl, parts=parts, plane=self.part_plane, C=sizes.C, BLOCK_P=block_p, BLOCK_C=block_c,
        )  # fmt: skip

    def _plan_walk(self, call: Any, sizes: Sizes, config: WalkConfig) -> Launch:
        """Prepares the launch of ``walk_grad_kernel``: one program for each group reads x and dy twice."""
        return Launch(
            walk_kernels.walk_grad_kernel, sizes.N * call.num_groups, config.num_warps,
            pdl=sizes.pdl, **_reading(call, sizes), plane=self.plane,
            PAIRS=sizes.channels_last and pairs_of(call, config.block_c),
            HW_FACTOR=row_factor(sizes.channels_last, sizes.HW),
            BLOCK_HW=config.block_hw, KEPT_HW=config.kept_hw, BLOCK_C=config.block_c,
        )  # fmt: skip

    def _plan_merge(self, call: Any, sizes: Sizes, chunks: int) -> Launch:
        """Prepares the launch that adds up the sums of chunks. Sets ``self.totals`` and ``self.scratch``.

        The launch has one program for each group, or for several groups of one channel.
        """
        N, C = sizes.N, sizes.C
        sums = 2 + call.dshift
        self.totals = _aligned(sums * N * chunks * C)
        table = self.totals + sums * self.plane
        self.scratch = table + _TABLE_ROWS * self.plane
        tile = merge_config(chunks, C, call.num_groups, backward=True)
        return Launch(
            kernels.merge_sums_kernel, N * ceil_div(C, tile.channels), tile.num_warps,
            pdl=sizes.pdl, **sizes.strides, HW=sizes.HW, C=C, CG=sizes.CG, SHIFT_GRAD=call.dshift,
            chunks=chunks, plane=N * chunks * C, totals_offset=self.totals, table_offset=table,
            table_plane=self.plane, CHANNELS=tile.channels, EACH_CHANNEL=tile.each_channel,
            LOOP=chunks > tile.block_p, BLOCK_P=tile.block_p, BLOCK_C=tile.block_c,
        )  # fmt: skip

    def _plan_apply(self, call: Any, sizes: Sizes, blocks: ApplyConfig, parameters: dict[str, Any]) -> Launch:
        """Prepares the launch of ``apply_grad_kernel``.

        The first programs compute the gradients of the operands other than x. Each other program computes dx
        of one tile.
        """
        N, C, HW = sizes.N, sizes.C, sizes.HW
        programs = N * ceil_div(C, blocks.block_c) * ceil_div(HW, blocks.block_hw)
        return Launch(
            kernels.apply_grad_kernel, programs + parameters["PARAMETER_PROGRAMS"], blocks.num_warps,
            pdl=sizes.pdl, **parameters, HW=HW, table_offset=self.scratch - _TABLE_ROWS * self.plane,
            CHANNELS_LAST=sizes.channels_last, DY_LAST=sizes.dy_last, ACTIVATION=call.activation,
            PAIRS=sizes.channels_last and pairs_of(call, blocks.block_c),
            AHEAD=gpu.reads_ahead(call.x.device),
            EVEN=C % blocks.block_c == 0 and HW % blocks.block_hw == 0,
            HW_FACTOR=row_factor(sizes.channels_last and sizes.dy_last, HW),
            BLOCK_HW=blocks.block_hw, BLOCK_C=blocks.block_c,
        )  # fmt: skip

    def run(self, call: Any) -> Gradients:
        """Launches the kernels, and returns the wanted gradients."""
        grads = empty_gradients(call, self.wanted)
        with gpu.on_device(call.x.device):
            self._launch(call, *map(grads.get, _GRADIENTS))
        return grads

    def _launch(self, call: Any, dx: Tensor | None, *parameter_grads: Tensor | None) -> None:
        """Launches the kernels on the current device, which must be the device of ``call.x``."""
        dy, x, mean, rstd, weight, bias, shift, ada_scale, ada_shift, *_ = call
        stream = gpu.current_stream(x)
        scratch = torch.empty(self.scratch, dtype=torch.float32, device=x.device)
        operands = (mean, rstd, weight, bias, shift, ada_scale, ada_shift)
        if self.single is not None:
            totals = scratch if self.parameters else None
            self.single(stream, x, dy, dx, totals, *operands, *self.of_batches)
        else:
            self.sums(stream, x, dy, scratch, *operands, None, None)
            self.merge(stream, scratch, *operands)
        if self.apply is not None:
            self.apply(stream, x, dy, dx, scratch, weight, bias, ada_scale, *parameter_grads)
        elif self.parameters is not None and self.parts_sum is None:
            self.parameters(stream, scratch, weight, bias, ada_scale, *parameter_grads)
        elif self.parameters is not None and self.parts_sum is not None:
            partials = torch.empty((_PARAMETERS, self.part_plane), dtype=torch.float32, device=x.device)
            sums = [None if rows else grad for grad, rows in zip(parameter_grads, self.rows, strict=True)]
            targets = [
                grad if total is None else part
                for grad, total, part in zip(parameter_grads, sums, partials, strict=True)
            ]
            self.parameters(stream, scratch, weight, bias, ada_scale, *targets)
            self.parts_sum(stream, partials, *sums)


def small_grad_launch(
    call: Any,
    sizes: Sizes,
    config: SmallConfig,
    plane: int,
    image: int | None = None,
    eps: float | None = None,
    in_eval: bool = False,
) -> Launch:
    """The launch of ``small_grad_kernel``. A program computes one group, or several groups of one channel.

    Args:
        plane: number of elements of each plane of ``totals``, the kernel's sums (``backward_kernels.py``).
        image, eps, in_eval: BatchNorm's constants ``IMAGE``, ``EPS`` and ``IN_EVAL`` of the kernel.
    """
    return Launch(
        kernels.small_grad_kernel, sizes.N * ceil_div(sizes.C, config.channels), config.num_warps,
        pdl=sizes.pdl, **_reading(call, sizes), DY_LAST=sizes.dy_last, plane=plane,
        CHANNELS=config.channels, EACH_CHANNEL=config.each_channel, PAIRS=pairs_of(call, config.block),
        IMAGE=image, EPS=eps, IN_EVAL=in_eval, **tile_constants(config),
    )  # fmt: skip


def sums_launch(
    call: Any,
    sizes: Sizes,
    config: StatisticsConfig,
    chunks: int,
    channels: int | None = None,
    eps: float | None = None,
) -> Launch:
    """The launch of ``sums_kernel``, which computes the backward's sums of each chunk of positions.

    If x is channels-last, there is one warp for each chunk and block of channels. If x is channels-first,
    there is one warp for each chunk and channel.

    Args:
        chunks: number of sums of each kind that are stored for each channel of a sample. If ``config`` has
            more chunks than this, a program adds up the sums of its warps before it stores them.
        channels, eps: BatchNorm's constants ``CHANNELS`` and ``EPS`` of ``sums_kernel``.
    """
    N, C, HW = sizes.N, sizes.C, sizes.HW
    return Launch(
        kernels.sums_kernel, config.programs(N, C, sizes.channels_last), config.num_warps,
        pdl=sizes.pdl, **_reading(call, sizes), DY_LAST=sizes.dy_last,
        rows=config.rows, chunks=config.chunks, plane=N * chunks * C,
        PAIRS=pairs_of(call, config.block), EVEN=is_even(config, C, HW, sizes.channels_last),
        LOOP=config.rows > config.tile_rows, CHANNELS=channels, EPS=eps, ADDED=chunks < config.chunks,
        HW_FACTOR=row_factor(sizes.channels_last, HW, config.rows), **tile_constants(config),
    )  # fmt: skip


def _aligned(values: int) -> int:
    """Returns ``values`` rounded up to a multiple of ``ALIGNED``."""
    return ceil_div(values, ALIGNED) * ALIGNED


def _reading(call: Any, sizes: Sizes) -> dict[str, Any]:
    """The arguments that ``small_grad_kernel``, ``walk_grad_kernel`` and ``sums_kernel`` have in common."""
    return {
        **sizes.strides,
        "HW": sizes.HW,
        "C": sizes.C,
        "CG": sizes.CG,
        "ACTIVATION": call.activation,
        "SHIFT_GRAD": sizes.shift_grad,
        "CHANNELS_LAST": sizes.channels_last,
    }
