"""Rotary embeddings: pairs of neighboring elements of each row are rotated by an angle.

Formula, for x (A, B, C, D) and tables that broadcast to it, all operands fp32:

    y[2i] = x[2i] * cos[2i] - x[2i + 1] * sin[2i]
    y[2i + 1] = x[2i + 1] * cos[2i + 1] + x[2i] * sin[2i + 1]

A table with D / 2 columns has one number for each pair. On a GPU the kernel of ``rotate/kernels.py`` runs.
Everywhere else, and if gradients are wanted, ``reference_rotate`` runs.

Source: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021.
"""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

from sdfastgn.kernels.common import dispatch
from sdfastgn.kernels.common.checks import check_device, check_input
from sdfastgn.kernels.common.declaration import Operand, checks_of
from sdfastgn.kernels.common.plan_cache import Plans
from sdfastgn.kernels.common.sizes import MAX_OFFSET, next_power_of_2

__all__ = ["RotateCall", "fits", "reference_rotate", "rotate"]

# Maximum length of a row, padded to a power of 2, that a program keeps in registers.
_MAX_ROW = 8192


def _with_dense_rows(t: Tensor, call: Any) -> Tensor:
    """``t``, or a contiguous copy if the elements of a row are not neighbors in memory."""
    return t if t.stride(-1) == 1 else t.contiguous()


class RotateCall(NamedTuple):
    """The arguments of ``rotate``."""

    x: Annotated[Tensor, Operand("(A, B, C, D)", whole=_with_dense_rows)]
    cos: Annotated[Tensor, Operand(whole=None)]
    sin: Annotated[Tensor, Operand(whole=None)]


def fits(D: int) -> bool:
    """True if the kernel can rotate rows of ``D`` elements."""
    return D % 2 == 0 and D > 0 and next_power_of_2(D) <= _MAX_ROW


def reference_rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Computes ``rotate`` in plain PyTorch, in fp32 or fp64, for calls that the kernel cannot run."""
    wide = torch.promote_types(x.dtype, torch.float32)
    D = x.shape[-1]
    cos, sin = (t.to(wide).repeat_interleave(D // t.shape[-1], -1) for t in (cos, sin))
    u = x.to(wide)
    a, b = u.unflatten(-1, (D // 2, 2)).unbind(-1)
    turned = torch.stack((-b, a), -1).flatten(-2)
    return (u * cos + turned * sin).to(x.dtype).contiguous()


# --- launch -----------------------------------------------------------------------------------------


def _plan(call: RotateCall) -> Any:
    from sdfastgn.kernels.rotate.plans import RotatePlan  # needs Triton

    return RotatePlan(call)


_plans = Plans("rotate", RotateCall, _plan)
_NAME = f"{__name__}.rotate"


# --- public function ------------------------------------------------------------------------------


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates pairs of neighboring elements of each row of x.

    Args:
        x: (A, B, C, D) with even D. For example (samples, tokens, heads, channels of a head).
        cos, sin: (A or 1, B or 1, C or 1, D or D / 2). Both have the same last size.

    Shapes: the output has the shape of x.
    Dtypes: x is fp16, bf16, fp32 or fp64. fp64 runs in plain PyTorch. The tables may have any of the four
        dtypes. The output has the dtype of x.
    Layout: any. x is copied first if its rows are not contiguous. The output is contiguous.
    Grad: calls that want gradients, the transforms of torch.func and forward-mode AD run in plain PyTorch.
    Raises:
        TypeError: a tensor is not strided or has another dtype.
        ValueError: a shape or a device does not fit.
    """
    call = RotateCall(x, cos, sin)
    if dispatch.is_plain_inference(x, call):
        try:
            # Plans are made and cached only for valid arguments. So if a plan is found, the arguments are
            # valid, and need no check.
            plan = _plans.made.get(_plans.key(call, _plans.tensors(call)))
            if plan is None:
                _check(_NAME, call)
                if 0 < x.numel() <= MAX_OFFSET * x.shape[-1] and fits(x.shape[-1]):
                    plan = _plans.of(call)
            if plan is not None:
                return plan.run(call)
        except dispatch.KernelError as error:
            _plans.turn_off(call, error)
        # ``_plans.key`` raises an error that does not help the user if an argument is a number instead of a
        # tensor, or a tensor without strides or memory. ``_check`` names the argument.
        except (AttributeError, RuntimeError):
            _check(_NAME, call)
            raise
    _check(_NAME, call)
    return reference_rotate(x, cos, sin)


def _check_tables(name: str, call: RotateCall) -> None:
    x = call.x
    if x.dim() != 4 or x.shape[-1] % 2:
        raise ValueError(f"{name}: x must be (A, B, C, D) with even D, got shape {tuple(x.shape)}")
    for label in ("cos", "sin"):
        t = getattr(call, label)
        check_input(name, label, t)
        is_aligned = t.dim() == 4 and all(a in (1, b) for a, b in zip(t.shape[:3], x.shape, strict=False))
        if not is_aligned or t.shape[-1] not in (x.shape[-1], x.shape[-1] // 2):
            wanted = "(A or 1, B or 1, C or 1, D or D / 2)"
            raise ValueError(
                f"{name}: {label} must be {wanted} for x of shape {tuple(x.shape)}, got {tuple(t.shape)}"
            )
        check_device(name, label, t, x)
    if call.cos.shape[-1] != call.sin.shape[-1]:
        sizes = call.cos.shape[-1], call.sin.shape[-1]
        raise ValueError(f"{name}: cos and sin must have the same last size, got {sizes[0]} and {sizes[1]}")


_check = checks_of(RotateCall, _check_tables)
