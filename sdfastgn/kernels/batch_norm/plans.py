"""How ``batch_norm`` is launched: which of ``batch_norm/kernels.py`` run, and in what memory."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sdfastgn.kernels.batch_norm import kernels
from sdfastgn.kernels.batch_norm.config import (
    Rows,
    SmallConfig,
    as_rows,
    merge_config,
    position_factor,
    small_config,
)
from sdfastgn.kernels.batch_norm.op import BatchNormCall
from sdfastgn.kernels.batch_norm.plain import empty_moments
from sdfastgn.kernels.common import gpu
from sdfastgn.kernels.common.activations import PAIRED
from sdfastgn.kernels.common.launch import Launch
from sdfastgn.kernels.common.layout import dense, dense_is_channels_last
from sdfastgn.kernels.common.plan_cache import PlanCache, plan_key
from sdfastgn.kernels.common.sizes import ceil_div, row_factor, tile_constants
from sdfastgn.kernels.group_norm.config import ApplyConfig, apply_config
from sdfastgn.kernels.statistics.kernels import StatisticsLaunch


def rows_of(x: Tensor) -> Rows:
    """Of ``dense(x)``."""
    return as_rows(x.shape[0], x.shape[1], math.prod(x.shape[2:]), dense_is_channels_last(x))


class Moments:
    """Mean and variance of each channel of x, on its way through two launches."""

    __slots__ = ("C", "_merge", "_statistics")

    def __init__(self, x: Tensor, momentum: float = 0.0) -> None:
        rows, pdl = rows_of(x), gpu.has_programmatic_launch(x.device)
        self.C = x.shape[1]
        self._statistics = StatisticsLaunch(x.new_empty(()).expand(rows.shape), rows.channels_last)
        chunks, together = self._statistics.chunks, rows.width // self.C
        partials = rows.samples * chunks * together
        block_p, block_c, num_warps = merge_config(partials, self.C)
        positions = x.numel() // self.C
        self._merge = Launch(
            kernels.batch_merge_kernel, ceil_div(self.C, block_c), num_warps, pdl=pdl,
            HW=rows.rows, rows=ceil_div(rows.rows, chunks), chunks=chunks,
            partials=partials, plane=partials * self.C, positions=positions, momentum=momentum,
            C=self.C, TOGETHER=together, EXACT=x.dtype == torch.float32, LOOP=partials > block_p,
            BLOCK_P=block_p, BLOCK_C=block_c,
        )  # fmt: skip

    def on_stream(
        self, stream: int, x: Tensor, running_mean: Tensor | None = None, running_var: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """(mean, var) of ``x``, which has no gaps, on ``stream`` of the current device."""
        statistics = torch.empty(self._statistics.shape, dtype=torch.float32, device=x.device)
        mean, var = empty_moments(x, self.C)
        self._statistics.on_stream(stream, x, statistics)
        self._merge(stream, statistics, mean, var, running_mean, running_var)
        return mean, var


_moments: PlanCache[Moments] = PlanCache()


def launch_moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """(mean, var) of each channel of ``x``, which is not empty, by Triton kernels."""
    key = plan_key((x,))
    found = _moments.get(key)
    if found is None:
        found = _moments[key] = Moments(x)
    with gpu.on_device(x.device):
        return found.on_stream(gpu.current_stream(x.device), dense(x))


class BatchNormPlan:
    """The launches of one kind of call: ``small``, or ``moments`` and ``apply``, or ``apply`` alone."""

    __slots__ = ("apply", "moments", "small")

    def __init__(self, call: BatchNormCall) -> None:
        x = call.x
        rows, is_given = rows_of(x), call.mean is not None
        self.small: Launch | None = None
        self.moments: Moments | None = None
        config = small_config(rows, x.shape[1], gpu.num_sms(x.device))
        if config is not None and not is_given:
            self.small = _small(call, rows, config)
            return
        if not is_given:
            self.moments = Moments(x, call.momentum)
        blocks = apply_config(*rows.shape, rows.channels_last, gpu.num_sms(x.device))
        self.apply = _apply(call, rows, blocks)

    def run(self, call: BatchNormCall) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """(y, and the batch's mean and var where they are taken)."""
        stream = gpu.stream_on(call.x.device)
        if stream is None:
            with torch.cuda.device(call.x.device):
                return self.run(call)
        x, weight, bias, residual, mean, var, *_ = call
        y = torch.empty_like(x)
        running = (call.running_mean, call.running_var)
        if self.small is not None:
            mean, var = empty_moments(x, x.shape[1])
            self.small(stream, x, residual, y, mean, var, weight, bias, *running)
            return y, mean, var
        if self.moments is not None:
            mean, var = self.moments.on_stream(stream, x, *running)
        self.apply(stream, x, residual, y, mean, var, weight, bias)
        return (y, None, None) if self.moments is None else (y, mean, var)

    def run_and_save(self, call: BatchNormCall) -> tuple[Tensor, Tensor, Tensor]:
        y, mean, var = self.run(call)
        return (y, *empty_moments(y, 0)) if mean is None or var is None else (y, mean, var)


def _small(call: BatchNormCall, rows: Rows, config: SmallConfig) -> Launch:
    x, C = call.x, call.x.shape[1]
    return Launch(
        kernels.batch_small_kernel, ceil_div(C, config.block), config.num_warps,
        pdl=gpu.has_programmatic_launch(x.device),
        HW=rows.rows, positions=x.numel() // C, eps=call.eps, momentum=call.momentum, C=C,
        CHANNELS_LAST=rows.channels_last, ACTIVATION=call.activation, PAIRS=pairs_of(x, config.block),
        HW_FACTOR=position_factor(rows), **tile_constants(config),
    )  # fmt: skip


def _apply(call: BatchNormCall, rows: Rows, blocks: ApplyConfig) -> Launch:
    x = call.x
    programs = rows.samples * ceil_div(rows.width, blocks.block_c) * ceil_div(rows.rows, blocks.block_hw)
    return Launch(
        kernels.batch_apply_kernel, programs, blocks.num_warps, pdl=gpu.has_programmatic_launch(x.device),
        HW=rows.rows, eps=call.eps, C=x.shape[1], WIDTH=rows.width, CHANNELS_LAST=rows.channels_last,
        ACTIVATION=call.activation, PAIRS=rows.channels_last and pairs_of(x, blocks.block_c),
        EVEN=rows.width % blocks.block_c == 0 and rows.rows % blocks.block_hw == 0,
        AHEAD=call.mean is None and gpu.reads_ahead(x.device),
        HW_FACTOR=row_factor(rows.channels_last, rows.rows),
        BLOCK_HW=blocks.block_hw, BLOCK_C=blocks.block_c,
    )  # fmt: skip


def pairs_of(x: Tensor, block: int) -> bool:
    """Whether neighbors may share an instruction of their activation."""
    return x.dtype != torch.float32 and block >= PAIRED


class FirstRun(BatchNormPlan):
    """A plan until it has run once, and all its kernels are compiled.

    Running averages are updated by one kernel, and the next may be one that cannot be compiled. The
    call is then made again, and would update them again. So the first run updates copies.
    """

    __slots__ = ()

    def run(self, call: BatchNormCall) -> tuple[Tensor, Tensor | None, Tensor | None]:
        mean, var = call.running_mean, call.running_var
        if mean is None or var is None:
            return super().run(call)
        copies = mean.clone(), var.clone()
        results = super().run(call._replace(running_mean=copies[0], running_var=copies[1]))
        mean.copy_(copies[0])
        var.copy_(copies[1])
        self.__class__ = BatchNormPlan  # type: ignore[assignment]
        return results
