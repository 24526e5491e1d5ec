"""Gradients of LayerNorm and of residual add + LayerNorm: the op ``sdfastgn::layer_norm_backward``.

Here x (..., D) is the tensor that was normalized: in ``add_layer_norm``, the sum with the residual. dtotal is
the gradient of the second result of ``add_layer_norm``. With xhat = (x - mean) * rstd and g = dy * weight,
where mean_D is a mean over each row:

    dx = rstd * (g - mean_D(g) - xhat * mean_D(g * xhat)) + dtotal
    dweight = sum_rows dy * xhat        dbias = sum_rows dy        dadded = sum_rows dx

dx is the gradient of both x and the residual. dadded is the gradient of add_bias.

On a GPU the kernels of ``layer_norm/backward_kernels.py`` run. They use ``centre`` and ``rstd``, which the
forward has saved (``layer_norm/kernels.py``). Everywhere else, and for second derivatives,
``reference_layer_norm_grads`` runs. That function computes mean and rstd from x again.

Source: Ba, Kiros and Hinton, "Layer Normalization", 2016, and the chain rule.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

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
from sdfastgn.kernels.common.plan_cache import named


class LayerNormGradCall(NamedTuple):
    """The arguments of the op ``sdfastgn::layer_norm_backward``, in its schema's order.

    The last four fields are the dtypes of the gradients of x, weight, bias and add_bias. Such a field is None
    if the gradient is not wanted.
    """

    # dy, dtotal and x are (..., D)
    dy: Tensor
    dtotal: Tensor | None
    x: Annotated[Tensor, Operand("(..., D)", whole=even_rows)]
    # centre and rstd are (...). The forward has saved them: the mean and 1 / deviation of each row.
    centre: Tensor
    rstd: Tensor
    # weight is (D,)
    weight: Tensor | None
    eps: float
    dx: WantedDtype
    dweight: WantedDtype
    dbias: WantedDtype
    dadded: WantedDtype


def reference_layer_norm_grads(call: LayerNormGradCall) -> Gradients:
    """Computes the gradients in plain PyTorch, in fp32, or in fp64 for fp64 input.

    Returns the wanted gradients in the dtypes that ``call`` gives. The gradient of x has the shape of x. The
    gradients of weight, bias and add_bias are (D,). The gradient of add_bias has the key "added". Every step
    can be differentiated, so second derivatives are right.
    """
    x, weight, dtotal = call.x, call.weight, call.dtotal
    D = x.shape[-1]
    wide = torch.promote_types(x.dtype, torch.float32)
    u, dy = x.to(wide).reshape(-1, D), call.dy.to(wide).reshape(-1, D)
    # torch.var_mean is not used, because its gradient is NaN if all values of a row are equal and eps is 0.
    # It also warns if x is empty.
    u = u - u.mean(1, keepdim=True)
    u = u - u.mean(1, keepdim=True)  # subtracts the rounding error of the first mean
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


LAYER_NORM_BACKWARD = GradOp(
    "layer_norm_backward",
    LayerNormGradCall,
    plan=named(f"{__package__}.backward_plans:LayerNormGradPlan"),
    reference=reference_layer_norm_grads,
    empty=empty_row_gradients,
)
