"""Rotary embeddings: pairs of elements of each row are rotated, after a norm of the row.

Formula, for x (A, B, C, D) and tables cos and sin that broadcast to x, all computed in fp32:

    z = x / sqrt(mean(x^2) + eps) * weight + bias        rounded to the dtype of x; without a norm, z is x
    y[2i] = z[2i] * cos[2i] - z[2i + 1] * sin[2i]
    y[2i + 1] = z[2i + 1] * cos[2i + 1] + z[2i] * sin[2i + 1]

With ``halves``, the elements i and i + D / 2 are a pair instead of 2i and 2i + 1. A table with D / 2 columns
has one number for each pair. If there is no table sin, the table cos has cosine and sine of each pair in
turns. Without tables, y is z. y may be a part of a larger tensor. If the norm is a LayerNorm, the mean of
each row is subtracted from x first.

On a GPU the kernel of ``rotate/kernels.py`` runs. Everywhere else, and if gradients are wanted,
``reference_rotate`` runs.

Source: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021; Zhang and Sennrich,
"Root Mean Square Layer Normalization", 2019.
"""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

from sdfastgn.kernels.common.checks import as_eps, check_device, check_input
from sdfastgn.kernels.common.declaration import Operand, checks_of
from sdfastgn.kernels.common.plan_cache import Plans, named
from sdfastgn.kernels.common.sizes import MAX_OFFSET, next_power_of_2

# Maximum length of a row, rounded up to a power of 2, that a program keeps in registers.
_MAX_ROW = 8192


def _has_dense_rows(t: Tensor) -> bool:
    return t.dim() > 0 and (t.stride(-1) == 1 or t.shape[-1] == 1)


def _with_dense_rows(t: Tensor, call: Any) -> Tensor:
    """Returns ``t``, or a contiguous copy if the elements of a row are not neighbors in memory."""
    return t if _has_dense_rows(t) else t.contiguous()


class RotateCall(NamedTuple):
    """The arguments of the function ``rotate``."""

    x: Annotated[Tensor, Operand("(A, B, C, D)", whole=_with_dense_rows)]
    cos: Annotated[Tensor | None, Operand(whole=None)]
    sin: Annotated[Tensor | None, Operand(whole=None)]
    weight: Annotated[Tensor | None, Operand("(D,)")]
    eps: float
    out: Annotated[Tensor | None, Operand("(A, B, C, D)", whole=None, same_dtype=True)]
    halves: bool
    bias: Annotated[Tensor | None, Operand("(D,)")]
    layer: bool


def fits(D: int) -> bool:
    """True if the kernel can normalize and copy rows of ``D`` elements."""
    return D > 0 and next_power_of_2(D) <= _MAX_ROW


def fits_pairs(D: int) -> bool:
    """True if the kernel can rotate rows of ``D`` elements."""
    return D % 2 == 0 and fits(D)


def reference_rotate(call: RotateCall) -> Tensor:
    """Computes ``rotate`` in plain PyTorch, in fp32 or fp64, for calls that the kernel cannot run."""
    x, cos, sin, weight, eps, _, halves, bias, layer = call
    wide = torch.promote_types(x.dtype, torch.float32)
    D = x.shape[-1]
    if weight is not None or layer:
        u = x.to(wide)
        if layer:
            u = u - u.mean(-1, keepdim=True)
            u = u - u.mean(-1, keepdim=True)  # subtracts the rounding error of the first mean
        u = u * torch.rsqrt(u.square().mean(-1, keepdim=True) + eps)
        u = u if weight is None else u * weight.to(wide)
        x = (u if bias is None else u + bias.to(wide)).to(x.dtype)
    if cos is None:
        return x.contiguous()
    if sin is None:
        cos, sin = cos[..., ::2], cos[..., 1::2]
    pairs, axis = ((2, D // 2), -2) if halves else ((D // 2, 2), -1)
    u = x.to(wide).unflatten(-1, pairs)
    a, b = u.unbind(axis)
    turned = torch.stack((-b, a), axis)
    cos, sin = (
        t.unflatten(-1, pairs) if t.shape[-1] == D else t.unsqueeze(axis)
        for t in (cos.to(wide), sin.to(wide))
    )
    return (u * cos + turned * sin).flatten(-2).to(x.dtype).contiguous()


# --- launch -----------------------------------------------------------------------------------------


def _has_kernel(call: RotateCall) -> bool:
    """True if the kernel can run: x is not empty, rows fit into registers, and int32 can number them."""
    x = call.x
    return 0 < x.numel() <= MAX_OFFSET * x.shape[-1] and fits(x.shape[-1])


_plans = Plans("rotate", RotateCall, named(f"{__package__}.plans:RotatePlan"))
_NAME = f"{__name__}.rotate"


# --- public function ------------------------------------------------------------------------------


def rotate(
    x: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    weight: Tensor | None = None,
    eps: float = 0.0,
    out: Tensor | None = None,
    halves: bool = False,
    bias: Tensor | None = None,
    layer: bool = False,
) -> Tensor:
    """Rotates pairs of elements of each row of x, or of the norm of each row.

    Args:
        x: (A, B, C, D). For example (samples, tokens, heads, channels of a head).
        cos, sin: (A or 1, B or 1, C or 1, D or D / 2), with even D. Both have the same last size. If sin is
            None, cos has D columns: cosine and sine of each pair in turns. If both are None, nothing is
            rotated.
        weight: (D,), the weight of the norm, or None. If weight is None and ``layer`` is False, there is no
            norm.
        eps: a number that is added to the mean of the squares of a row. Without a norm it is not used.
        out: memory for the result instead of new memory, such as a part of a larger tensor. It has the shape
            and dtype of x and contiguous rows, and shares no memory with the other arguments.
        halves: True if a pair is element i of the first half of a row and element i of the second half. False
            if a pair is two neighbors.
        bias: (D,), the bias of the norm, or None.
        layer: True for a LayerNorm, with or without a weight. False for an RMS norm, or for no norm.

    Shapes: the result has the shape of x. It is ``out``, or a new contiguous tensor.

    Dtypes: x is fp16, bf16, fp32 or fp64. fp64 runs in plain PyTorch. cos, sin, weight and bias may have any
        of the four dtypes. The output has the dtype of x.
    Layout: any. x is copied first if its rows are not contiguous.
    Grad: calls that want gradients, the transforms of torch.func and forward-mode AD run in plain PyTorch.
    Raises:
        TypeError: a tensor is not strided or has another dtype, or another argument has the wrong type.
        ValueError: a shape or a device does not fit, the rows of ``out`` are not contiguous, ``halves`` is
            True and there is cos without sin, or there is a bias and no norm.
    """
    if type(eps) is not float:
        eps = as_eps(_NAME, eps)
    call = RotateCall(x, cos, sin, weight, eps, out, halves, bias, layer)
    found = _plans.run(_NAME, call, _check, _has_kernel)
    if found is not None:
        return found
    y = reference_rotate(call)
    if out is not None:
        return out.copy_(y)
    return y.clone() if y is x else y


def _check_tables(name: str, call: RotateCall) -> None:
    x = call.x
    if x.dim() != 4:
        raise ValueError(f"{name}: x must be (A, B, C, D), got shape {tuple(x.shape)}")
    if call.bias is not None and call.weight is None and not call.layer:
        raise ValueError(f"{name}: with a bias, there must be a weight, or layer must be True")
    if call.out is not None and isinstance(call.out, Tensor) and not _has_dense_rows(call.out):
        raise ValueError(f"{name}: the rows of out must be contiguous, got the strides {call.out.stride()}")
    tables = {"cos": call.cos, "sin": call.sin}
    if call.sin is None:  # without sin, cos is None too, or has cosine and sine of each pair
        del tables["sin"]
    if call.cos is call.sin is None:
        return
    if call.halves and call.sin is None:
        raise ValueError(f"{name}: with halves, sin must be a tensor, got None")
    D = x.shape[-1]
    if D % 2:
        raise ValueError(f"{name}: x must be (A, B, C, D) with even D, got shape {tuple(x.shape)}")
    for label, t in tables.items():
        _check_table(name, label, t, x)
    sizes = [t.shape[-1] for t in tables.values() if t is not None]
    if call.sin is None and sizes[0] != D:
        raise ValueError(f"{name}: cos must have {D} columns without sin, got {sizes[0]}")
    if len(set(sizes)) > 1:
        raise ValueError(f"{name}: cos and sin must have the same last size, got {sizes[0]} and {sizes[1]}")


def _check_table(name: str, label: str, t: Any, x: Tensor) -> None:
    check_input(name, label, t)
    D = x.shape[-1]
    is_aligned = t.dim() == 4 and all(a in (1, b) for a, b in zip(t.shape[:3], x.shape, strict=False))
    if not is_aligned or t.shape[-1] not in (D, D // 2):
        wanted = f"(A or 1, B or 1, C or 1, {D} or {D // 2})"
        raise ValueError(
            f"{name}: {label} must be {wanted} for x of shape {tuple(x.shape)}, got {tuple(t.shape)}"
        )
    check_device(name, label, t, x)


_check = checks_of(RotateCall, _check_tables)
