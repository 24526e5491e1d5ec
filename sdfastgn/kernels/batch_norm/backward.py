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
    Wanted,
    launch_batch_norm_grads,
)
from sdfastgn.kernels.batch_norm.plain import centered, per_channel
from sdfastgn.kernels.common import dispatch
from sdfastgn.kernels.common.activations import ACTIVATION_GRADS
from sdfastgn.kernels.common.double_backward import derivative_of, save_all
from sdfastgn.kernels.common.layout import dense_is_channels_last, empty_dense_like, laid_out
from sdfastgn.kernels.common.op import Op

__all__ = ["batch_norm_grads", "reference_batch_norm_grads"]


def reference_batch_norm_grads(call: BatchNormGradCall, shared: Shared | None = None) -> BatchNormGrads:
    """Gradients in plain PyTorch. The gradient of x has the strides of x if x is without gaps."""
    x, weight, residual, wanted = call.x, call.weight, call.residual, call.wanted
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
    if wanted.x:
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
        dweight.to(weight.dtype) if wanted.weight and weight is not None else None,
        dbias.to(call.bias.dtype) if wanted.bias and call.bias is not None else None,
        laid_out(dz.to(residual.dtype), dense_is_channels_last(x))
        if wanted.residual and residual is not None
        else None,
    )


# --- op ---------------------------------------------------------------------------------------------


@dispatch.retried
def _run(call: BatchNormGradCall) -> list[Tensor]:
    if call.x.numel() == 0:
        return [grad.zero_() for grad in _fake(call)]
    call = call._replace(wanted=Wanted(*call.wanted))
    grads = launch_batch_norm_grads if dispatch.runs_in_triton(call.x) else reference_batch_norm_grads
    return [grad for grad in grads(call) if grad is not None]


def _fake(call: BatchNormGradCall) -> list[Tensor]:
    x, residual = call.x, call.residual
    found = (
        empty_dense_like(x, x.dtype),
        *(None if t is None else t.new_empty(t.shape) for t in (call.weight, call.bias)),
        None if residual is None else empty_dense_like(x, residual.dtype),
    )
    return [grad for grad, want in zip(found, call.wanted, strict=True) if want and grad is not None]


def _gradients(call: BatchNormGradCall) -> BatchNormGrads:
    return reference_batch_norm_grads(call._replace(wanted=Wanted(*call.wanted)))


_BATCH_NORM_BACKWARD = Op(
    # One tensor for each of x, weight, bias and residual that is wanted, in this order.
    "batch_norm_backward(Tensor dy, Tensor x, Tensor mean, Tensor var, Tensor? weight, Tensor? bias, "
    "Tensor? residual, float eps, str activation, bool training, bool[] wanted) -> Tensor[]",
    BatchNormGradCall,
    _run,
    _fake,
    save=save_all,
    backward=derivative_of(_gradients),
)


@dispatch.retried
def batch_norm_grads(call: BatchNormGradCall) -> BatchNormGrads:
    """The gradients that are wanted, by the kernels where they run."""
    if not any(call.wanted):
        return BatchNormGrads(*[None] * len(call.wanted))
    if dispatch.is_batched(call.dy):
        return reference_batch_norm_grads(call)
    if call.x.numel() and dispatch.is_plain_inference(call.x, call[:-1]):
        return launch_batch_norm_grads(call)
    *arguments, wanted = call
    found = iter(_BATCH_NORM_BACKWARD.through_dispatcher((*arguments, list(wanted))))
    return BatchNormGrads(*(next(found) if want else None for want in wanted))
