"""The launches of the backward of ``batch_norm``, and the memory that they need."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sdfastgn.kernels.batch_norm import kernels
from sdfastgn.kernels.batch_norm.backward import BatchNormGradCall, Shared
from sdfastgn.kernels.batch_norm.config import MERGED_AT_ONCE, Rows, merge_config, small_config
from sdfastgn.kernels.batch_norm.plans import NO_OPERANDS, rows_of, tiles_of
from sdfastgn.kernels.common import gpu
from sdfastgn.kernels.common.declaration import Gradients, gaps_of, without_gaps
from sdfastgn.kernels.common.launch import Launch
from sdfastgn.kernels.common.plan_cache import PlanCache, plan_key
from sdfastgn.kernels.common.sizes import ceil_div
from sdfastgn.kernels.group_norm.backward_plans import Sizes, small_grad_launch, sums_launch
from sdfastgn.kernels.group_norm.config import apply_config
from sdfastgn.kernels.statistics.config import statistics_config


class BatchNormGradPlan:
    """The launches of BatchNorm's backward for calls with equal shapes, strides, dtypes and options.

    There is either one launch, ``small``, or there are up to three launches: ``sums``, ``merge`` and
    ``apply``. A launch is left out if the wanted gradients do not need it.

    dz is the gradient of the activation's argument. It is also the gradient of the residual. xhat is the
    normalized x.

    Attributes:
        small: the launch that computes everything, or None.
        sums: the launch that stores dz if it is wanted, and the sums of dz and of dz * xhat over each chunk
            of positions. None if neither dz nor the sums are needed.
        merge: the launch that adds up the sums of all chunks. None if the sums are not needed.
        apply: the launch that computes dx. None if dx is not wanted.
        partials: how many sums of dz (and as many of dz * xhat) ``sums`` stores for each channel.
        reads_dz: True if ``apply`` reads dz instead of dy and the residual.
    """

    __slots__ = ("apply", "merge", "partials", "reads_dz", "small", "sums")

    def __init__(self, call: BatchNormGradCall, count: int | None = None) -> None:
        """Prepares the launches of BatchNorm's backward for calls like ``call``.

        ``count``: number of values of a channel in all processes. None if one process has the whole batch.
        """
        x = call.x
        C = x.shape[1]
        rows = rows_of(x)
        self.small: Launch | None = None
        self.sums: Launch | None = None
        self.merge: Launch | None = None
        self.apply: Launch | None = None
        # dz, the gradient of the residual, is stored in the residual's dtype. If this dtype cannot hold all
        # values of the dtype of x, the stored dz is not exact enough for dx. Then ``apply`` computes dz
        # again, from dy and the residual.
        residual = call.residual
        self.reads_dz = (
            call.dresidual
            and residual is not None
            and torch.promote_types(x.dtype, residual.dtype) == residual.dtype
        )
        needs_sums = call.dweight or call.dbias or (call.dx and call.training)
        sms = gpu.num_sms(x.device)
        sizes = _sizes(call, rows)
        small = small_config(rows, C, sms, backward=True)
        if small is not None and count is None and (needs_sums or call.dresidual):
            # GroupNorm's kernel gets the whole batch as one sample, declared as channels-last. If x is
            # channels-first, the kernel also gets the number of positions of an image as the constant
            # ``IMAGE``, and computes channels-first offsets with it.
            sizes = sizes._replace(N=1, C=C, HW=x.numel() // C, channels_last=True, dy_last=True)
            self.small = small_grad_launch(
                call, sizes, small, 0, rows.image, call.eps, in_eval=not call.training
            )
            return
        if needs_sums or call.dresidual:
            config = statistics_config(*rows.shape, rows.channels_last, sms, kind="backward")
            chunks = config.chunks
            if rows.channels_last and chunks * rows.width // C > MERGED_AT_ONCE:
                chunks = ceil_div(chunks, config.num_warps)
            self.partials = rows.samples * chunks * rows.width // C
            self.sums = sums_launch(call, sizes, config, chunks, channels=C, eps=call.eps)
        if needs_sums:
            self.merge = _merge(call, self.partials)
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
        """Fills ``dx`` and ``dz``, the gradients of x and of the residual. The device of x must be current.

        Returns dweight and dbias (C,) in fp32, or None for both if no kernel computes them.
        """
        dy, x, mean, var, weight, bias, residual, *_ = call
        stream = gpu.current_stream(x)
        operands = mean, var, weight, bias
        of_groups = *operands, *NO_OPERANDS, residual, dz
        dweight = dbias = None
        if self.small is not None or self.merge is not None:
            dweight, dbias = (x.new_empty(x.shape[1], dtype=torch.float32) for _ in range(2))
        if self.small is not None:
            self.small(stream, x, dy, dx, None, *of_groups, dweight, dbias)
            return dweight, dbias
        if self.sums is not None:
            sums = x.new_empty((2, self.partials, x.shape[1]), dtype=torch.float32)
            self.sums(stream, x, dy, sums, *of_groups)
            if self.merge is not None:
                self.merge(stream, sums, dweight, dbias)
        if self.apply is not None:
            sums_of = (dweight, dbias) if call.training else (None, None)
            if shared is not None and dweight is not None and dbias is not None:
                sums_of = shared.total(dweight, dbias)
            read = (dz, None) if self.reads_dz else (dy, residual)
            self.apply(stream, x, *read, dx, *sums_of, *operands)
        return dweight, dbias


def _sizes(call: BatchNormGradCall, rows: Rows) -> Sizes:
    """The sizes from which launches of GroupNorm's kernels are prepared. Each channel is a group."""
    last, pdl = rows.channels_last, gpu.has_programmatic_launch(call.x.device)
    no_strides = {f"{name}_stride": 0 for name in ("shift", "ada_scale", "ada_shift")}
    return Sizes(*rows.shape, 1, last, last, pdl, no_strides, shift_grad=False)


def _merge(call: BatchNormGradCall, partials: int) -> Launch:
    C = call.x.shape[1]
    tile = merge_config(partials, C)
    return Launch(
        kernels.batch_merge_sums_kernel, 2 * ceil_div(C, tile.channels), tile.num_warps,
        pdl=gpu.has_programmatic_launch(call.x.device),
        partials=partials, C=C, BLOCK_P=tile.block_p, BLOCK_C=tile.block_c,
    )  # fmt: skip


def _apply(call: BatchNormGradCall, rows: Rows, count: int, *, behind: bool, reads_dz: bool) -> Launch:
    """The launch that computes dx.

    ``count``: number of values of a channel. ``behind``: True if ``sums_kernel`` runs before this launch.
    ``reads_dz``: True if the launch reads dz, the gradient of the activation's argument, instead of dy and
    the residual.
    """
    blocks = apply_config(*rows.shape, rows.channels_last, gpu.num_sms(call.x.device), backward=True)
    tiles, reading = tiles_of(call, rows, blocks)
    return Launch(
        kernels.batch_apply_grad_kernel, tiles, blocks.num_warps, **reading,
        positions=count, ACTIVATION="identity" if reads_dz else call.activation,
        AHEAD=behind and not reads_dz and gpu.reads_ahead(call.x.device),
    )  # fmt: skip


_plans: PlanCache[BatchNormGradPlan] = PlanCache()


def launch_shared_grads(call: BatchNormGradCall, shared: Shared) -> Gradients:
    """Computes by Triton kernels the gradients for this process's part of a batch.

    Several processes have one part each, and share the statistics of the batch. x must not be empty.
    """
    call = without_gaps(call, gaps_of(call))
    key = plan_key(call, shared.positions)
    plan = _plans.get(key)
    if plan is None:
        plan = _plans[key] = BatchNormGradPlan(call, shared.positions)
    return plan.run(call, shared)
