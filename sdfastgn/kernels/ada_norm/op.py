"""A gated residual sum, its norm, and a modulation of the norm, as transformers with adaptive norms use them.

Formula, for x and branch of shape (B, S, D), with all operands converted to fp32:

    total = x + gate * branch'        rounded to the dtype of x
    y = norm(total) * factor + offset

branch' is the branch or its RMS norm, with or without weight and bias. norm is a LayerNorm or an RMS norm of
each row, with or without weight and bias. In place of the gate there may be tanh(gate), and in place of the
factor 1 + factor. Each operand except x may be missing, and so may both norms. Without a branch, total is x.
``ada_norm_in_e4m3`` writes y in E4M3, with a scale for each row (``quantize_rows/op.py``).

On a GPU the kernel of ``ada_norm/kernels.py`` runs. Everywhere else, for rows that are too long for the
kernel, and if gradients are wanted, ``reference_ada_norm`` runs.

Source: Peebles and Xie, "Scalable Diffusion Models with Transformers", 2022 (adaLN-Zero); Zhang and Sennrich,
"Root Mean Square Layer Normalization", 2019.
"""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

from sdfastgn.kernels.common.checks import check_device, check_input
from sdfastgn.kernels.common.declaration import Operand, Value, checks_of, dense_rows
from sdfastgn.kernels.common.plan_cache import Plans, named
from sdfastgn.kernels.common.sizes import MAX_OFFSET
from sdfastgn.kernels.layer_norm.config import fits_registers
from sdfastgn.kernels.quantize_rows.op import reference_quantize_rows

# Kinds of norms of a row. "none" means that a row is not normalized. If the norm of the sum is "none", y is
# not computed.
_KINDS = ("layer", "rms", "none")


class Norm(NamedTuple):
    """A norm of each row: ``kind`` is "layer" or "rms"; weight and bias are (D,) or None.

    For a branch, ``kind`` may also be "none". Then the branch is only multiplied by the weight, and the bias
    is added. For example, the branch is the output of a linear layer without its bias, and the bias is added
    here.
    """

    kind: str
    weight: Tensor | None = None
    bias: Tensor | None = None
    eps: float = 1e-6


def _check_kind(name: str, kind: Any) -> None:
    if kind not in _KINDS:
        raise ValueError(f"{name}: the kind of a norm must be one of {_KINDS}, got {kind!r}")


_Rows = Annotated[Tensor | None, Operand("(B, S, D)", whole=dense_rows, same_dtype=True)]
_PerRow = Annotated[Tensor | None, Operand(whole=dense_rows)]
_PerColumn = Annotated[Tensor | None, Operand("(D,)")]


class AdaNormCall(NamedTuple):
    """The arguments of ``ada_norm``, with the attributes of the norms as fields of their own."""

    x: Annotated[Tensor, Operand("(B, S, D)", whole=dense_rows)]
    branch: _Rows
    gate: _PerRow
    branch_weight: _PerColumn
    branch_bias: _PerColumn
    weight: _PerColumn
    bias: _PerColumn
    factor: _PerRow
    offset: _PerRow
    normalizes_branch: bool
    branch_eps: float
    kind: Annotated[str, Value(_check_kind)]
    eps: float
    tanh: bool
    plus_one: bool
    keeps_total: bool
    in_e4m3: bool


def reference_ada_norm(call: AdaNormCall) -> tuple[Tensor | None, Tensor | None]:
    """Computes ``ada_norm`` in plain PyTorch, in fp32 or fp64, for calls that the kernel cannot run."""
    x, branch = call.x, call.branch
    wide = torch.promote_types(x.dtype, torch.float32)
    gate, factor, offset = (None if t is None else t.to(wide) for t in (call.gate, call.factor, call.offset))
    total = x
    if branch is not None:
        kind = "rms" if call.normalizes_branch else "none"
        norm = Norm(kind, call.branch_weight, call.branch_bias, call.branch_eps)
        added = _normalized(branch.to(wide), norm)
        if gate is not None:
            added = added * (torch.tanh(gate) if call.tanh else gate)
        total = (x.to(wide) + added).to(x.dtype).contiguous()
    kept = total if branch is not None and call.keeps_total else None
    if call.kind == "none":
        return kept, None
    y = _normalized(total.to(wide), Norm(call.kind, call.weight, call.bias, call.eps))
    if factor is not None:
        y = y * (1 + factor if call.plus_one else factor)
    y = y if offset is None else y + offset
    return kept, y.to(x.dtype).contiguous()


def _normalized(u: Tensor, norm: Norm) -> Tensor:
    if norm.kind == "layer":
        u = u - u.mean(-1, keepdim=True)
        u = u - u.mean(-1, keepdim=True)  # removes the rounding error of the first mean
    y = u if norm.kind == "none" else u * torch.rsqrt(u.square().mean(-1, keepdim=True) + norm.eps)
    y = y if norm.weight is None else y * norm.weight.to(u.dtype)
    return y if norm.bias is None else y + norm.bias.to(u.dtype)


# --- launch -----------------------------------------------------------------------------------------


def _has_kernel(call: AdaNormCall) -> bool:
    """True if the kernel can run: x is not empty, rows fit into registers, and int32 can number them."""
    x = call.x
    return 0 < x.numel() <= MAX_OFFSET * x.shape[-1] and fits_registers(x.shape[-1])


_plans = Plans("ada_norm", AdaNormCall, named(f"{__package__}.plans:AdaNormPlan"))
_NAME = f"{__name__}.ada_norm"


# --- public functions -----------------------------------------------------------------------------


def ada_norm(
    x: Tensor,
    branch: Tensor | None = None,
    gate: Tensor | None = None,
    branch_norm: Norm | None = None,
    norm: Norm | None = None,
    factor: Tensor | None = None,
    offset: Tensor | None = None,
    *,
    tanh: bool = False,
    plus_one: bool = False,
    keeps_total: bool = True,
) -> tuple[Tensor | None, Tensor | None]:
    """Computes ``total = x + gate * branch_norm(branch)`` and ``norm(total) * factor + offset`` in one pass.

    Args:
        x: (B, S, D).
        branch: a tensor of the shape, dtype and device of x, or None for no sum.
        gate: (B or 1, S or 1, D), or None. It multiplies the branch, after ``branch_norm``.
        branch_norm: an RMS norm of the branch, or a Norm of the kind "none", or None.
        norm: a LayerNorm or an RMS norm of the sum, or of x if there is no sum. None: only the sum is
            computed.
        factor, offset: (B or 1, S or 1, D), or None. The result of the norm is multiplied by the factor. Then
            the offset is added.
        tanh: True to use tanh(gate) in place of the gate.
        plus_one: True to use 1 + factor in place of the factor.
        keeps_total: False if the caller needs no total.

    Returns:
        (total, y), both (B, S, D). total is rounded before it is normalized. It is None without a branch, or
        if ``keeps_total`` is False. y is None without a norm.

    Dtypes: x is fp16, bf16, fp32 or fp64. fp64 runs in plain PyTorch. The other tensors may have any of the
        four dtypes. The results have the dtype of x.
    Layout: any. x, branch, gate, factor and offset are copied first if a row is not contiguous. The results
        are contiguous.
    Grad: calls that want gradients, the transforms of torch.func and forward-mode AD run in plain PyTorch.
    Raises:
        TypeError: a tensor is not strided or has another dtype, or another argument has the wrong type.
        ValueError: a shape, a device or the kind of a norm does not fit, or there is nothing to compute.

    Source: torch.nn.functional.layer_norm and rms_norm for the norms.
    """
    call = _call_of(x, branch, gate, branch_norm, norm, factor, offset, tanh, plus_one, keeps_total, False)
    found = _plans.run(_NAME, call, _check, _has_kernel)
    if found is not None:
        return found[:2]
    return reference_ada_norm(call)


def ada_norm_in_e4m3(
    x: Tensor,
    branch: Tensor | None = None,
    gate: Tensor | None = None,
    branch_norm: Norm | None = None,
    norm: Norm | None = None,
    factor: Tensor | None = None,
    offset: Tensor | None = None,
    *,
    tanh: bool = False,
    plus_one: bool = False,
    keeps_total: bool = True,
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Computes ``ada_norm``, and quantizes y to E4M3 with a scale for each row, as ``quantize_rows`` does.

    Arguments and errors are those of ``ada_norm``, but ``norm`` must not be None.

    Returns:
        (total, y, scales): total as in ``ada_norm``; y (B, S, D) in E4M3; scales (B, S) fp32. Each row of y,
        multiplied by its scale, is about the row of y that ``ada_norm`` returns. y and scales are contiguous.
    """
    call = _call_of(x, branch, gate, branch_norm, norm, factor, offset, tanh, plus_one, keeps_total, True)
    found = _plans.run(f"{_NAME}_in_e4m3", call, _check, _has_kernel)
    if found is not None:
        return found
    total, y = reference_ada_norm(call)
    assert y is not None
    return total, *reference_quantize_rows(y)


def _call_of(
    x: Any, branch: Any, gate: Any, branch_norm: Any, norm: Any, factor: Any, offset: Any, *flags: Any
) -> AdaNormCall:
    for label, each in (("branch_norm", branch_norm), ("norm", norm)):
        if each is not None and not isinstance(each, Norm):
            raise TypeError(f"{_NAME}: {label} must be a Norm or None, got {each!r}")
    if branch_norm is not None and branch_norm.kind not in ("rms", "none"):
        raise ValueError(f"{_NAME}: branch_norm must be of the kind 'rms' or 'none', got {branch_norm!r}")
    if norm is not None and norm.kind == "none":
        raise ValueError(f"{_NAME}: norm must be of the kind 'layer' or 'rms', got {norm!r}")
    inner, outer = (each or Norm("none") for each in (branch_norm, norm))
    operands = x, branch, gate, inner.weight, inner.bias, outer.weight, outer.bias, factor, offset
    return AdaNormCall(*operands, inner.kind == "rms", inner.eps, outer.kind, outer.eps, *flags)


def _check_operands(name: str, call: AdaNormCall) -> None:
    x = call.x
    if x.dim() != 3:
        raise ValueError(f"{name}: x must be (B, S, D), got shape {tuple(x.shape)}")
    if call.branch is None and call.kind == "none":
        raise ValueError(f"{name}: there is nothing to compute without a branch and without a norm")
    of_branch = call.gate, call.branch_weight, call.branch_bias
    if call.branch is None and (call.normalizes_branch or any(t is not None for t in of_branch)):
        raise ValueError(f"{name}: gate and branch_norm need a branch")
    if call.kind == "none" and not (call.factor is call.offset is None and call.keeps_total):
        raise ValueError(f"{name}: factor, offset and keeps_total=False need a norm")
    if call.kind == "none" and call.in_e4m3:
        raise ValueError(f"{name}: there must be a norm")
    for label in ("gate", "factor", "offset"):
        t = getattr(call, label)
        if t is None:
            continue
        check_input(name, label, t)
        is_aligned = t.dim() == 3 and t.shape[-1] == x.shape[-1]
        if not is_aligned or any(a not in (1, b) for a, b in zip(t.shape, x.shape, strict=True)):
            wanted = "(B or 1, S or 1, D)"
            raise ValueError(
                f"{name}: {label} must be {wanted} for x of shape {tuple(x.shape)}, got {tuple(t.shape)}"
            )
        check_device(name, label, t, x)


_check = checks_of(AdaNormCall, _check_operands)
