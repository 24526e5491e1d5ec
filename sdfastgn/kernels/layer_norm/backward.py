"""Backward of LayerNorm and of residual add + LayerNorm: the op ``sdfastgn::layer_norm_backward``.

With x of shape (..., D), xhat = (x - mean) * rstd, g = dy * weight, and dtotal the gradient of x from elsewhere (the residual stream):

    dx = rstd * (g - mean_D(g) - xhat * mean_D(g * xhat)) + dtotal
    dweight = sum_rows dy * xhat        dbias = sum_rows dy        dadded = sum_rows dx

On a GPU the kernels of ``layer_norm/backward_kernels.py`` run, from x and what the forward saved: the
mean less the row's first element (``centre``), and rstd. Everywhere else, and for a second derivative, ``reference_layer_norm_grads``,
which takes the statistics of x again.

Source: Ba, Kiros and Hinton, "Layer Normalization", 2016, and the chain rule.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sdfastgn.kernels.common import dispatch
from sdfastgn.kernels.common.double_backward import second_derivative
from sdfastgn.kernels.layer_norm.backward_kernels import launch_layer_norm_grads

__all__ = ["layer_norm_grads", "reference_layer_norm_grads"]

Dtypes = tuple[torch.dtype | None, ...]


def reference_layer_norm_grads(
    dy: Tensor, dtotal: Tensor | None, x: Tensor, weight: Tensor | None, eps: float, dtypes: Dtypes
) -> tuple[Tensor | None, ...]:
    """Gradients of x, weight, bias and what is added to x along its columns in plain PyTorch, in ``dtypes``; None where those are None.

    Every step is a differentiable op, so that a second derivative is right too. Computed in fp32 (fp64 for fp64 input).

    Shapes: dy, dtotal and x (..., D); weight (D,).
    """
    D = x.shape[-1]
    wide = torch.promote_types(x.dtype, torch.float32)
    u, dy = x.to(wide).reshape(-1, D), dy.to(wide).reshape(-1, D)
    # Not var_mean: its gradient is NaN where a row has no spread and eps is 0, and it warns on no elements.
    u = u - u.mean(1, keepdim=True)
    u = u - u.mean(1, keepdim=True)  # what the rounding of the first mean left
    rstd = torch.rsqrt(u.square().mean(1, keepdim=True) + eps)
    xhat = u * rstd
    g = dy if weight is None else dy * weight.to(wide)
    dx = rstd * (g - g.mean(1, keepdim=True) - xhat * (g * xhat).mean(1, keepdim=True))
    if dtotal is not None:
        dx = dx + dtotal.to(wide).reshape(-1, D)
    sums = (dy * xhat if dtypes[1] else None, dy if dtypes[2] else None, dx if dtypes[3] else None)
    return (
        None if dtypes[0] is None else dx.reshape(x.shape).to(dtypes[0]),
        *(None if t is None else t.sum(0).to(dtype) for t, dtype in zip(sums, dtypes[1:], strict=True)),
    )


# --- op -----------------------------------------------------------------------------------------------------------------------

_LIBRARY = torch.library.Library("sdfastgn", "FRAGMENT")
# The result has one tensor for each of dx, dweight, dbias and dadded whose dtype is given, in this order.
_LIBRARY.define(
    "layer_norm_backward(Tensor dy, Tensor? dtotal, Tensor x, Tensor centre, Tensor rstd, Tensor? weight, float eps, "
    "ScalarType? dx, ScalarType? dweight, ScalarType? dbias, ScalarType? dadded) -> Tensor[]"
)


def _backward_impl(
    dy: Tensor,
    dtotal: Tensor | None,
    x: Tensor,
    centre: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    eps: float,
    *dtypes: torch.dtype | None,
) -> list[Tensor]:
    if x.numel() == 0:
        return [t.zero_() for t in _backward_fake(dy, dtotal, x, *dtypes)]
    if dispatch.runs_in_triton(x):
        found = launch_layer_norm_grads(dy, dtotal, x, centre, rstd, weight, dtypes)
    else:
        found = reference_layer_norm_grads(dy, dtotal, x, weight, eps, dtypes)
    return [t.contiguous() for t in found if t is not None]


def _backward_fake(dy: Tensor, dtotal: Tensor | None, x: Tensor, *args: Any) -> list[Tensor]:
    shapes = (x.shape, *[x.shape[-1:]] * 3)
    return [
        x.new_empty(s, dtype=dtype) for s, dtype in zip(shapes, args[-4:], strict=True) if dtype is not None
    ]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    dy, dtotal, x, _, _, weight, ctx.eps, *ctx.dtypes = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(dy, dtotal, x, weight)


_DIFFERENTIABLE = (0, 1, 2, 5)  # dy, dtotal, x, weight


def _double_backward(ctx: Any, dgrads: list[Tensor | None]) -> tuple[Any, ...]:
    """centre and rstd count as what they are, functions of x."""

    def gradients(
        dy: Tensor, dtotal: Tensor | None, x: Tensor, weight: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        return reference_layer_norm_grads(dy, dtotal, x, weight, ctx.eps, tuple(ctx.dtypes))

    needs = [ctx.needs_input_grad[i] for i in _DIFFERENTIABLE]
    d_dy, d_dtotal, dx, d_weight = second_derivative(gradients, ctx.saved_tensors, dgrads, needs)
    return d_dy, d_dtotal, dx, None, None, d_weight, None, None, None, None, None


for _key in ("CPU", "CUDA"):
    _LIBRARY.impl("layer_norm_backward", _backward_impl, _key)
torch.library.register_fake("sdfastgn::layer_norm_backward", _backward_fake, lib=_LIBRARY)
torch.library.register_autograd(
    "sdfastgn::layer_norm_backward", _double_backward, setup_context=_setup_context, lib=_LIBRARY
)


def layer_norm_grads(
    dy: Tensor | None,
    dtotal: Tensor | None,
    x: Tensor,
    centre: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    eps: float,
    dtypes: Dtypes,
) -> tuple[Tensor | None, ...]:
    """Gradients of x, weight, bias and what was added to x along its columns, in ``dtypes``; None where those are None.

    Shapes: dy and dtotal (..., D), or None where no gradient comes from there; x (..., D), centre and rstd (...) of the forward.
    """
    if dy is None:
        if dtotal is None:
            return (None,) * 4
        added = (
            None
            if dtypes[3] is None
            else dtotal.reshape(-1, x.shape[-1]).sum(0, dtype=rstd.dtype).to(dtypes[3])
        )
        return dtotal, None, None, added
    if not any(dtypes):
        return (None,) * 4
    if x.numel() and dispatch.is_plain_inference(x, (dy, dtotal, weight)):
        return launch_layer_norm_grads(dy, dtotal, x, centre, rstd, weight, dtypes)
    found = iter(torch.ops.sdfastgn.layer_norm_backward(dy, dtotal, x, centre, rstd, weight, eps, *dtypes))
    return tuple(None if dtype is None else next(found) for dtype in dtypes)
