"""Backward of BatchNorm + residual + activation: the op ``sdfastgn::batch_norm_backward``.

With x, z, y as in ``batch_norm/op.py``, dz the gradient of the activation's argument, xhat = (x -
mean) / sqrt(var + eps), and M the number of values of a channel:

    dbias = sum dz        dweight = sum dz * xhat        dresidual = dz
    dx = weight / sqrt(var + eps) * (dz - dbias / M - xhat * dweight / M)

Where mean and var were given, the last two terms fall away. On a GPU the kernels of
``batch_norm/backward_kernels.py`` run, everywhere else, and for a second derivative,
``reference_batch_norm_grads``, which takes the moments of the batch again.

Source: Ioffe and Szegedy, "Batch Normalization", 2015, and the chain rule.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sdfastgn.kernels.batch_norm.backward_plans import (
    BatchNormGradCall,
    BatchNormGrads,
    Shared,
    launch_batch_norm_grads,
)
from sdfastgn.kernels.batch_norm.plain import centered, per_channel
from sdfastgn.kernels.common.activations import ACTIVATION_GRADS
from sdfastgn.kernels.common.grad_op import GradOp
from sdfastgn.kernels.common.layout import dense_is_channels_last, empty_dense_like, laid_out

__all__ = ["BATCH_NORM_BACKWARD", "reference_batch_norm_grads"]


def reference_batch_norm_grads(call: BatchNormGradCall, shared: Shared | None = None) -> BatchNormGrads:
    """Gradients in plain PyTorch. The gradient of x has the strides of x if x is without gaps."""
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
    return BatchNormGrads(
        dx,
        dweight.to(weight.dtype) if call.dweight and weight is not None else None,
        dbias.to(call.bias.dtype) if call.dbias and call.bias is not None else None,
        laid_out(dz.to(residual.dtype), dense_is_channels_last(x))
        if call.dresidual and residual is not None
        else None,
    )


# --- op ---------------------------------------------------------------------------------------------


def _empty(call: BatchNormGradCall) -> tuple[Tensor | None, ...]:
    x, residual = call.x, call.residual
    return (
        empty_dense_like(x, x.dtype),
        *(None if t is None else t.new_empty(t.shape) for t in (call.weight, call.bias)),
        None if residual is None else empty_dense_like(x, residual.dtype),
    )


BATCH_NORM_BACKWARD = GradOp(
    # The last four: which gradients are wanted.
    "batch_norm_backward(Tensor dy, Tensor x, Tensor mean, Tensor var, Tensor? weight, Tensor? bias, "
    "Tensor? residual, float eps, str activation, bool training, bool dx, bool dweight, bool dbias, "
    "bool dresidual) -> Tensor[]",
    BatchNormGradCall,
    BatchNormGrads,
    launch=launch_batch_norm_grads,
    reference=reference_batch_norm_grads,
    empty=_empty,
)
