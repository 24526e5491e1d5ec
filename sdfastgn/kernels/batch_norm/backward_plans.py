"""How gradients of ``batch_norm`` are launched: which of ``backward_kernels.py``, in what memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sdfastgn.kernels.batch_norm import backward_kernels as kernels
from sdfastgn.kernels.batch_norm.backward import BatchNormGradCall, Shared
from sdfastgn.kernels.batch_norm.config import (
    MERGED_AT_ONCE,
    Rows,
    SmallConfig,
    merge_config,
    position_factor,
    small_config,
)
from sdfastgn.kernels.batch_norm.plans import pairs_of, rows_of
from sdfastgn.kernels.common import gpu
from sdfastgn.kernels.common.declaration import Gradients, gaps_of, without_gaps
from sdfastgn.kernels.common.launch import Launch
from sdfastgn.kernels.common.plan_cache import PlanCache, plan_key
from sdfastgn.kernels.common.sizes import ceil_div, row_factor, tile_constants
from sdfastgn.kernels.group_norm.config import apply_config
from sdfastgn.kernels.statistics.config import StatisticsConfig, statistics_config
from sdfastgn.kernels.statistics.kernels import is_even


class BatchNormGradPlan:
    """The launches for one kind of call: ``small``; or ``sums`` and ``merge`` where the sums or dz are
    wanted, and ``apply`` for dx. ``reads_dz``: the last one reads dz instead of dy and the residual.
    """

    __slots__ = ("apply", "chunks", "merge", "plane", "reads_dz", "small", "sums")

    def __init__(self, call: BatchNormGradCall, count: int | None = None) -> None:
        """``count``: values of a channel where more than x decided mean and var."""
        x = call.x
        C = x.shape[1]
        rows = rows_of(x)
        self.small: Launch | None = None
        self.sums: Launch | None = None
        self.merge: Launch | None = None
        self.apply: Launch | None = None
        # dz is stored in the residual's dtype, which may round it more than dx may be rounded.
        residual = call.residual
        self.reads_dz = (
            call.dresidual
            and residual is not None
            and torch.promote_types(x.dtype, residual.dtype) == residual.dtype
        )
        needs_sums = call.dweight or call.dbias or (call.dx and call.training)
        sms = gpu.num_sms(x.device)
        config = small_config(rows, C, sms, backward=True)
        if config is not None and count is None and (needs_sums or call.dresidual):
            self.small = _small(call, rows, config)
            return
        if needs_sums or call.dresidual:
            statistics = statistics_config(*rows.shape, rows.channels_last, sms, kind="backward")
            self.plane = rows.samples * statistics.chunks * rows.width
            added = rows.channels_last and self.plane // C > MERGED_AT_ONCE
            if added:
                self.plane = ceil_div(statistics.chunks, statistics.num_warps) * rows.width
            self.sums = _sums(call, rows, statistics, self.plane, added=added)
        if needs_sums:
            self.merge = _merge(call, self.plane // C)
        if call.dx:
            self.apply = _apply(
                call, rows, count or x.numel() // C, behind=self.sums is not None, reads_dz=self.reads_dz
            )

    def run(self, call: BatchNormGradCall, shared: Shared | None = None) -> Gradients:
        x, weight, bias, residual = call.x, call.weight, call.bias, call.residual
        dx = torch.empty_like(x) if call.dx else None
        dz = torch.empty_like(x, dtype=residual.dtype) if call.dresidual and residual is not None else None
        with gpu.on_device(x.device):
            dweight, dbias = self._launch(call, dx, dz, shared)
        return {
            "x": dx,
            "weight": dweight.to(weight.dtype) if call.dweight and weight is not None else None,
            "bias": dbias.to(bias.dtype) if call.dbias and bias is not None else None,
            "residual": dz,
        }

    def _launch(
        self, call: BatchNormGradCall, dx: Tensor | None, dz: Tensor | None, shared: Shared | None
    ) -> tuple[Any, Any]:
        """Fills ``dx`` and ``dz`` on the current device; returns the sums (dweight, dbias) in fp32."""
        dy, x, mean, var, weight, bias, residual, *_ = call
        stream = gpu.current_stream(x.device)
        operands = mean, var, weight, bias
        dweight = dbias = None
        if self.small is not None or self.merge is not None:
            dweight, dbias = (x.new_empty(x.shape[1], dtype=torch.float32) for _ in range(2))
        if self.small is not None:
            self.small(stream, x, dy, residual, dx, dz, dweight, dbias, *operands)
            return dweight, dbias
        if self.sums is not None:
            sums = x.new_empty(2 * self.plane, dtype=torch.float32)
            self.sums(stream, x, dy, residual, dz, sums, *operands)
            if self.merge is not None:
                self.merge(stream, sums, dweight, dbias)
        if self.apply is not None:
            sums_of = (dweight, dbias) if call.training else (None, None)
            if shared is not None and dweight is not None and dbias is not None:
                sums_of = shared.total(dweight, dbias)
            read = (dz, None) if self.reads_dz else (dy, residual)
            self.apply(stream, x, *read, dx, *sums_of, *operands)
        return dweight, dbias


def _small(call: BatchNormGradCall, rows: Rows, config: SmallConfig) -> Launch:
    x, C = call.x, call.x.shape[1]
    return Launch(
        kernels.batch_small_grad_kernel, ceil_div(C, config.block), config.num_warps,
        pdl=gpu.has_programmatic_launch(x.device),
        HW=rows.rows, positions=x.numel() // C, eps=call.eps, C=C, CHANNELS_LAST=rows.channels_last,
        ACTIVATION=call.activation, TRAINING=call.training, PAIRS=pairs_of(x, config.block),
        HW_FACTOR=position_factor(rows), **tile_constants(config),
    )  # fmt: skip


def _sums(
    call: BatchNormGradCall, rows: Rows, config: StatisticsConfig, plane: int, *, added: bool
) -> Launch:
    x = call.x
    programs = config.programs(rows.samples, rows.width, rows.channels_last)
    return Launch(
        kernels.batch_sums_kernel, programs, config.num_warps, pdl=gpu.has_programmatic_launch(x.device),
        HW=rows.rows, rows=config.rows, chunks=config.chunks, plane=plane, eps=call.eps,
        C=x.shape[1], WIDTH=rows.width, CHANNELS_LAST=rows.channels_last, ACTIVATION=call.activation,
        PAIRS=pairs_of(x, config.block), EVEN=is_even(config, rows.width, rows.rows, rows.channels_last),
        LOOP=config.rows > config.tile_rows, ADDED=added,
        HW_FACTOR=row_factor(rows.channels_last, rows.rows, config.rows), **tile_constants(config),
    )  # fmt: skip


def _merge(call: BatchNormGradCall, partials: int) -> Launch:
    C = call.x.shape[1]
    block_p, block_c, num_warps = merge_config(partials, C)
    return Launch(
        kernels.batch_merge_sums_kernel, 2 * ceil_div(C, block_c), num_warps,
        pdl=gpu.has_programmatic_launch(call.x.device),
        partials=partials, plane=partials * C, C=C, BLOCK_P=block_p, BLOCK_C=block_c,
    )  # fmt: skip


def _apply(call: BatchNormGradCall, rows: Rows, count: int, *, behind: bool, reads_dz: bool) -> Launch:
    """``behind``: the sums kernel ran before. ``reads_dz``: it stored what is read instead of dy."""
    x = call.x
    blocks = apply_config(*rows.shape, rows.channels_last, gpu.num_sms(x.device), backward=True)
    programs = rows.samples * ceil_div(rows.width, blocks.block_c) * ceil_div(rows.rows, blocks.block_hw)
    return Launch(
        kernels.batch_apply_grad_kernel, programs, blocks.num_warps,
        pdl=gpu.has_programmatic_launch(x.device),
        HW=rows.rows, positions=count, eps=call.eps, C=x.shape[1], WIDTH=rows.width,
        CHANNELS_LAST=rows.channels_last, ACTIVATION="identity" if reads_dz else call.activation,
        PAIRS=rows.channels_last and pairs_of(x, blocks.block_c),
        EVEN=rows.width % blocks.block_c == 0 and rows.rows % blocks.block_hw == 0,
        AHEAD=behind and not reads_dz and gpu.reads_ahead(x.device),
        HW_FACTOR=row_factor(rows.channels_last, rows.rows),
        BLOCK_HW=blocks.block_hw, BLOCK_C=blocks.block_c,
    )  # fmt: skip


_plans: PlanCache[BatchNormGradPlan] = PlanCache()


def launch_shared_grads(call: BatchNormGradCall, shared: Shared) -> Gradients:
    """Gradients by Triton kernels, for a batch that several processes share. Arguments are not empty."""
    call = without_gaps(call, gaps_of(call))
    key = plan_key(call, shared.positions)
    plan = _plans.get(key)
    if plan is None:
        plan = _plans[key] = BatchNormGradPlan(call, shared.positions)
    return plan.run(call, shared)
