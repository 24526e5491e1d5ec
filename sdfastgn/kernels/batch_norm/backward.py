"""Gradients of BatchNorm + residual + activation: the op ``sdfastgn::batch_norm_backward``.

With x, z, y as in ``batch_norm/op.py``, dz the gradient of the activation's argument, xhat = (x -
mean) / sqrt(var + eps), and M the number of values of a channel:

    dbias = sum dz        dweight = sum dz * xhat        dresidual = dz
    dx = weight / sqrt(var + eps) * (dz - dbias / M - xhat * dweight / M)

If mean and var are running averages, dx = weight / sqrt(var + eps) * dz. On a GPU the kernels of
``batch_norm/kernels.py`` and of GroupNorm run. Everywhere else, and for second derivatives,
``reference_batch_norm_grads`` runs. If one process has the whole batch, that function computes mean and var
of the batch again.

Source: Ioffe and Szegedy, "Batch Normalization", 2015, and the chain rule.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from sdfastgn.kernels.batch_norm.plain import centered, like_x, per_channel
from sdfastgn.kernels.common.activations import ACTIVATION_GRADS
from sdfastgn.kernels.common.declaration import Gradients, Operand, Wanted, dense
from sdfastgn.kernels.common.grad_op import GradOp
from sdfastgn.kernels.common.layout import dense_is_channels_last, laid_out
from sdfastgn.kernels.common.plan_cache import named

_AsX = Operand(whole=like_x)


class BatchNormGradCall(NamedTuple):
    """The arguments of the op ``sdfastgn::batch_norm_backward``, in its schema's order.

    mean and var are those of the batch if ``training``, else the running averages. If there is no activation,
    the residual is None, because its gradient is then dy, and no other gradient depends on it.
    """

    # dy and x: (N, C, *spatial)
    dy: Annotated[Tensor, _AsX]
    x: Annotated[Tensor, Operand(whole=dense)]
    # mean, var, weight and bias: (C,)
    mean: Tensor
    var: Tensor
    weight: Tensor | None
    bias: Tensor | None
    # residual: (N, C, *spatial)
    residual: Annotated[Tensor | None, _AsX]
    eps: float
    activation: str
    training: bool
    dx: Wanted
    dweight: Wanted
    dbias: Wanted
    dresidual: Wanted


class Shared(NamedTuple):
    """The data from other processes that dx depends on, if several processes share the statistics of a batch.

    Attributes:
        positions: number of values of a channel in all processes.
        total: function that takes dweight and dbias, and returns the sums of both over all processes.
    """

    positions: int
    total: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def reference_batch_norm_grads(call: BatchNormGradCall, shared: Shared | None = None) -> Gradients:
    """Computes the gradients in plain PyTorch, in fp32, or in fp64 for fp64 input.

    The gradient of x has the strides of x if x is channels-first or channels-last.

    Usually mean and var are computed from x again, so that second derivatives are right. The mean and var of
    ``call`` are used instead in two cases: if they are running averages, and if ``shared`` is given, because
    x is then only a part of the batch.
    """
    x, weight, residual = call.x, call.weight, call.residual
    dims = [0, *range(2, x.dim())]
    takes_own = call.training and shared is None
    d, _, var = centered(x, *(None, None) if takes_own else (call.mean, call.var))
    rstd = torch.rsqrt(var + call.eps)
    xhat = d * rstd
    z = xhat if weight is None else xhat * per_channel(weight, x)
    z = z if call.bias is None else z + per_channel(call.bias, x)
    z = z if residual is None else z + residual.to(z.dtype)
    dz = ACTIVATION_GRADS[call.activation](call.dy.to(z.dtype), z)
    dweight, dbias = (dz * xhat).sum(dims), dz.sum(dims)
    dx = None
    if call.dx:
        dx = dz
        if call.training:
            count, (along_x, along_z) = x.numel() // x.shape[1], (dweight, dbias)
            if shared is not None:
                count, (along_x, along_z) = shared.positions, shared.total(dweight, dbias)
            dx = dx - per_channel(along_z / count, x) - xhat * per_channel(along_x / count, x)
        dx = dx * (rstd if weight is None else rstd * per_channel(weight, x))
        dx = laid_out(dx.to(x.dtype), dense_is_channels_last(x))
    dresidual = None
    if call.dresidual and residual is not None:
        dresidual = laid_out(dz.to(residual.dtype), dense_is_channels_last(x))
    return {
        "x": dx,
        "weight": dweight.to(weight.dtype) if call.dweight and weight is not None else None,
        "bias": dbias.to(call.bias.dtype) if call.dbias and call.bias is not None else None,
        "residual": dresidual,
    }


# --- op ---------------------------------------------------------------------------------------------


def _empty(call: BatchNormGradCall, names: tuple[str, ...]) -> Gradients:
    operands = {name: getattr(call, name) for name in names}
    return {
        name: torch.empty_like(call.x if t.dim() > 1 else t, dtype=t.dtype)
        for name, t in operands.items()
        if t is not None
    }


BATCH_NORM_BACKWARD = GradOp(
    "batch_norm_backward",
    BatchNormGradCall,
    plan=named(f"{__package__}.backward_plans:BatchNormGradPlan"),
    reference=reference_batch_norm_grads,
    empty=_empty,
)
