"""BatchNorm in training, with the statistics of the batch of all processes of a group.

Each process computes mean and variance of its samples. One all-gather sends them to all processes, and Chan's
formula merges them. In the backward one all-reduce adds up the two sums that dx depends on. The gradients of
weight and bias are sums over the samples of one process only, as in ``torch.nn.SyncBatchNorm``, because
DistributedDataParallel averages them.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from sdfastgn.kernels.batch_norm.backward import BatchNormGradCall, Shared, reference_batch_norm_grads
from sdfastgn.kernels.batch_norm.op import BATCH_NORM, BatchNormCall, check_share, update_average
from sdfastgn.kernels.batch_norm.plain import centered
from sdfastgn.kernels.common import dispatch
from sdfastgn.kernels.common.declaration import Gradients

# Name of the group of all processes. It may be used before torch.distributed is initialized.
WORLD = "world"


def check_group(name: str, process_group: Any) -> None:
    """Raises ValueError unless ``process_group`` is None, ``WORLD`` or a result of ``dist.new_group``."""
    if process_group is None or (isinstance(process_group, str) and process_group == WORLD):
        return
    if dist.is_available():
        # In processes that are not in the new group, ``dist.new_group`` returns ``NON_GROUP_MEMBER``.
        outside = dist.GroupMember.NON_GROUP_MEMBER
        if process_group == outside or isinstance(process_group, dist.ProcessGroup):
            return
    raise ValueError(f'{name}: process_group must be a group or "{WORLD}", got {process_group!r}')


def group_of(process_group: Any) -> Any:
    """The group whose processes share statistics, or None if this process uses its own statistics.

    The process uses its own statistics if it is alone in the group or not in the group, if ``process_group``
    is None, or if torch.distributed is not initialized.
    """
    if process_group is None or not (dist.is_available() and dist.is_initialized()):
        return None
    group = dist.group.WORLD if process_group == WORLD else process_group
    return group if dist.get_world_size(group) > 1 else None


def _moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Computes mean and variance, (C,), of the samples of this process, or zeros if it has no samples."""
    if x.numel() == 0:
        return x.new_zeros(x.shape[1]), x.new_zeros(x.shape[1])
    if dispatch.runs_in_triton(x):
        from sdfastgn.kernels.batch_norm.plans import launch_moments  # imported late: plans.py needs Triton

        try:
            return launch_moments(x)
        except dispatch.KernelError:
            pass
    _, mean, var = centered(x, None, None)
    return mean.reshape(-1), var.reshape(-1)


def _moments_of_all(x: Tensor, group: Any) -> tuple[Tensor, Tensor, int]:
    """Computes mean, variance and number of values of each channel over all processes of ``group``.

    All processes get the same bits.
    """
    C = x.shape[1]
    mean, var = _moments(x)
    # The number of values is exact in fp64, and the rounding errors of the merge in fp64 are negligible.
    own = torch.cat((mean.double(), var.double(), mean.new_full((1,), x.numel() // C).double()))
    every = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, own, group=group)
    means, variances, counts = torch.stack(every).split((C, C, 1), dim=1)
    total = counts.sum()
    mean = (means * counts).sum(0) / total
    var = ((variances + (means - mean).square()) * counts).sum(0) / total
    dtype = torch.promote_types(x.dtype, torch.float32)
    return mean.to(dtype), var.to(dtype), int(total)


def _total(group: Any, dweight: Tensor, dbias: Tensor) -> tuple[Tensor, Tensor]:
    both = torch.stack((dweight, dbias))
    dist.all_reduce(both, group=group)
    return both[0], both[1]


def _grads(call: BatchNormGradCall, shared: Shared) -> Gradients:
    op, x = "batch_norm_backward", call.x
    if x.numel() and dispatch.runs_in_triton(x) and not dispatch.is_op_off(op, x):
        # ``backward_plans.py`` is imported only here, because it needs Triton.
        from sdfastgn.kernels.batch_norm.backward_plans import launch_shared_grads

        try:
            return launch_shared_grads(call, shared)
        except dispatch.KernelError as error:
            dispatch.turn_op_off(op, x, error)
    return reference_batch_norm_grads(call, shared)


class _InGroup(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Any, bias: Any, residual: Any, call: BatchNormCall, group: Any
    ) -> tuple[Tensor, Tensor, Tensor, int]:
        mean, var, count = _moments_of_all(x, group)
        y, *_ = BATCH_NORM(call._replace(mean=mean, var=var, running_mean=None, running_var=None))
        ctx.group, ctx.count, ctx.settings = group, count, (call.eps, call.activation, True)
        ctx.residual_dtype = None if residual is None else residual.dtype
        ctx.save_for_backward(x, mean, var, weight, bias, None if call.activation == "identity" else residual)
        ctx.mark_non_differentiable(mean, var)
        return y, mean, var, count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, *_: Any) -> tuple[Any, ...]:
        _, weight, bias, residual, *_ = ctx.needs_input_grad
        passes_on = ctx.settings[1] == "identity"
        # dx is computed even if it is not wanted: its computation includes an all-reduce, in which every
        # process must take part.
        wanted = [True, weight, bias, residual and not passes_on]
        shared = Shared(ctx.count, functools.partial(_total, ctx.group))
        grads = _grads(BatchNormGradCall(dy, *ctx.saved_tensors, *ctx.settings, *wanted), shared)
        if residual and passes_on:
            grads["residual"] = dy.to(ctx.residual_dtype)
        return *map(grads.get, ("x", "weight", "bias", "residual")), None, None


@torch.compiler.disable
def normalize_in_group(name: str, call: BatchNormCall, group: Any) -> Tensor:
    """Computes BatchNorm of ``call`` with mean and variance over all processes of ``group``.

    Also updates the running averages of ``call``.
    """
    check_share(name, call)
    y, mean, var, count = _InGroup.apply(call.x, call.weight, call.bias, call.residual, call, group)
    if count > 1:
        update_average(call.running_mean, mean, call.momentum)
        update_average(call.running_var, var * (count / (count - 1)), call.momentum)
    return y
