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

from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

from sdfastgn.kernels.common.declaration import (
    Gradients,
    Operand,
    WantedDtype,
    empty_row_gradients,
    even_rows,
)
from sdfastgn.kernels.common.grad_op import GradOp


class LayerNormGradCall(NamedTuple):
    """The arguments of the op ``sdfastgn::layer_norm_backward``, in its schema's order.

    The last four are the dtypes of the gradients of x, weight, bias and what was added to x along its
    columns; None for each that is not wanted.
    """

    # (..., D)
    dy: Tensor
    dtotal: Tensor | None
    x: Annotated[Tensor, Operand("(..., D)", whole=even_rows)]
    # (...), of the forward
    centre: Tensor
    rstd: Tensor
    # (D,)
    weight: Tensor | None
    eps: float
    dx: WantedDtype
    dweight: WantedDtype
    dbias: WantedDtype
    dadded: WantedDtype


def reference_layer_norm_grads(call: LayerNormGradCall) -> Gradients:
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

    return {
        "x": None if call.dx is None else dx.reshape(x.shape).to(call.dx).contiguous(),
        "weight": summed(dy * xhat, call.dweight),
        "bias": summed(dy, call.dbias),
        "added": summed(dx, call.dadded),
    }


# --- op ---------------------------------------------------------------------------------------------


def _plan(call: LayerNormGradCall) -> Any:
    from sdfastgn.kernels.layer_norm.backward_plans import LayerNormGradPlan  # needs Triton

    return LayerNormGradPlan(call)


LAYER_NORM_BACKWARD = GradOp(
    "layer_norm_backward",
    LayerNormGradCall,
    plan=_plan,
    reference=reference_layer_norm_grads,
    empty=empty_row_gradients,
)
