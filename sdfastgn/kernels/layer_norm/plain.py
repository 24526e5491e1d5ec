"""PyTorch's LayerNorm, made accurate for inputs whose mean is far larger than their deviation.

``common/far_mean.py`` finds these inputs and explains the rounding error.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sdfastgn.kernels.common.far_mean import is_far
from sdfastgn.kernels.layer_norm.backward import LayerNormGradCall, reference_layer_norm_grads


def plain_layer_norm(u: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Computes LayerNorm of ``u`` over its last dimension.

    Call this function only if no tool traces or transforms the call (``dispatch.is_untraced``).

    Args:
        u: (..., D), any floating dtype and layout.
        weight, bias: (D,) in the dtype of u, or None.

    Returns:
        (..., D), contiguous, in the dtype of u.
    """
    return _LayerNorm.apply(
        u.contiguous(), *(None if t is None else t.contiguous() for t in (weight, bias)), eps
    )


class _LayerNorm(torch.autograd.Function):
    """PyTorch's LayerNorm and its first derivative.

    Higher derivatives are computed through ``reference_layer_norm_grads``, because in PyTorch 2.13 the fourth
    and higher derivatives of PyTorch's own LayerNorm are wrong.
    """

    @staticmethod
    def forward(ctx: Any, u: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
        y, mean, rstd = torch.native_layer_norm(u, u.shape[-1:], weight, bias, eps)
        centre = mean if is_far(u, mean, rstd) else None
        if centre is not None:
            y, mean, rstd = torch.native_layer_norm(u - centre, u.shape[-1:], weight, bias, eps)
        ctx.eps, ctx.dtypes = eps, tuple(None if t is None else t.dtype for t in (u, weight, bias))
        ctx.save_for_backward(u, weight, bias, mean, rstd, centre)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        u, weight, bias, mean, rstd, centre = ctx.saved_tensors
        wanted = ctx.needs_input_grad[:3]
        if torch.is_grad_enabled():
            dx, dweight, dbias = (
                dtype if want else None for dtype, want in zip(ctx.dtypes, wanted, strict=True)
            )
            call = LayerNormGradCall(
                dy, None, u, mean, rstd, weight, ctx.eps, dx, dweight, dbias, dadded=None
            )
            grads = reference_layer_norm_grads(call)
            return *map(grads.get, ("x", "weight", "bias")), None
        u = u if centre is None else u - centre
        return *torch.ops.aten.native_layer_norm_backward(
            dy.contiguous(), u, u.shape[-1:], mean, rstd, weight, bias, wanted
        ), None
