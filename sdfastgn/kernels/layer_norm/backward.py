"""Backward of LayerNorm and of residual add + LayerNorm: the op ``sdfastgn::layer_norm_backward``.

With x of shape (..., D), xhat = (x - mean) * rstd, g = dy * weight, and dtotal the gradient of x
from elsewhere (the residual stream):

    dx = rstd * (g - mean_D(g) - xhat * mean_D(g * xhat)) + dtotal
    dweight = sum_rows dy * xhat        dbias = sum_rows dy        dadded = sum_rows dx

On a GPU the kernels of ``layer_norm/backward_kernels.py`` run, from x and what the forward saved: the
mean (``centre``, in one of the two forms of ``layer_norm/kernels.py``) and rstd. Everywhere else, and
for a second derivative, ``reference_layer_norm_grads``, which takes the statistics of x again.

Source: Ba, Kiros and Hinton, "Layer Normalization", 2016, and the chain rule.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sdfastgn.kernels.common.grad_op import GradOp
from sdfastgn.kernels.layer_norm.backward_plans import (
    LayerNormGradCall,
    LayerNormGrads,
    launch_layer_norm_grads,
)

__all__ = ["LAYER_NORM_BACKWARD", "reference_layer_norm_grads"]


def reference_layer_norm_grads(call: LayerNormGradCall) -> LayerNormGrads:
    """Gradients in plain PyTorch, computed in fp32 (fp64 for fp64 input).

    Every step is a differentiable op, so that a second derivative is right too.
    """
    x, weight, dtotal = call.x, call.weight, call.dtotal
    D = x.shape[-1]
    wide = torch.promote_types(x.dtype, torch.float32)
    u, dy = x.to(wide).reshape(-1, D), call.dy.to(wide).reshape(-1, D)
    # Not var_mean: its gradient is NaN where a row has no spread and eps is 0, and it warns on no elements.
    u = u - u.mean(1, keepdim=True)
    u = u - u.mean(1, keepdim=True)  # what the rounding of the first mean left
    rstd = torch.rsqrt(u.square().mean(1, keepdim=True) + call.eps)
    xhat = u * rstd
    g = dy if weight is None else dy * weight.to(wide)
    dx = rstd * (g - g.mean(1, keepdim=True) - xhat * (g * xhat).mean(1, keepdim=True))
    if dtotal is not None:
        dx = dx + dtotal.to(wide).reshape(-1, D)

    def summed(t: Tensor, dtype: torch.dtype | None) -> Tensor | None:
        return None if dtype is None else t.sum(0).to(dtype)

    return LayerNormGrads(
        None if call.dx is None else dx.reshape(x.shape).to(call.dx).contiguous(),
        summed(dy * xhat, call.dweight),
        summed(dy, call.dbias),
        summed(dx, call.dadded),
    )


# --- op ---------------------------------------------------------------------------------------------


def _empty(call: LayerNormGradCall) -> tuple[Tensor, ...]:
    shapes = (call.x.shape, *[call.x.shape[-1:]] * 3)
    return tuple(
        call.x.new_empty(shape, dtype=dtype) for shape, dtype in zip(shapes, call.wanted(), strict=True)
    )


LAYER_NORM_BACKWARD = GradOp(
    # The last four: dtypes of the gradients that are wanted.
    "layer_norm_backward(Tensor dy, Tensor? dtotal, Tensor x, Tensor centre, Tensor rstd, Tensor? weight, "
    "float eps, ScalarType? dx, ScalarType? dweight, ScalarType? dbias, ScalarType? dadded) -> Tensor[]",
    LayerNormGradCall,
    LayerNormGrads,
    launch=launch_layer_norm_grads,
    reference=reference_layer_norm_grads,
    empty=_empty,
)
