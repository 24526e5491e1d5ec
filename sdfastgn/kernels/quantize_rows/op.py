"""Quantizes rows to E4M3, an 8-bit float dtype, with one scale for each row: ``quantize_rows``.

Formula, in fp32, for each row of x (B, S, D):

    scale = max(largest magnitude of activation(row) / 448, 2^-126)
    y = activation(row) / scale               rounded to E4M3

448 is the largest number of E4M3, and 2^-126 the smallest normal number of fp32. NaN and infinities become
NaN, and do not count for the scale, so they do not change how the other values of the row are rounded. A row
of a second tensor, with another activation, can follow each row of x, or multiply it. The resulting row then
has a single scale. The scale is computed from the row itself, and does not depend on earlier calls.

On a GPU the kernel of ``quantize_rows/kernels.py`` runs. Everywhere else, and for rows that are too long for
the kernel, ``reference_quantize_rows`` runs.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from sdfastgn.kernels.common.activations import ACTIVATIONS
from sdfastgn.kernels.common.checks import check_activation, check_device, check_input
from sdfastgn.kernels.common.declaration import Operand, Value, checks_of, dense_rows
from sdfastgn.kernels.common.e4m3 import E4M3, LARGEST
from sdfastgn.kernels.common.plan_cache import Plans, named
from sdfastgn.kernels.common.sizes import MAX_OFFSET
from sdfastgn.kernels.layer_norm.config import fits_registers

# The smallest scale: the smallest normal number of fp32. Rows of zeros have this scale. Its reciprocal is
# finite.
_LEAST = 2.0**-126


class QuantizeRowsCall(NamedTuple):
    """The arguments of the function ``quantize_rows``."""

    x: Annotated[Tensor, Operand("(B, S, D)", whole=dense_rows)]
    activation: Annotated[str, Value(check_activation)]
    second: Annotated[Tensor | None, Operand(whole=dense_rows, same_dtype=True)]
    second_activation: Annotated[str, Value(check_activation)]
    multiplies: bool


def reference_quantize_rows(
    x: Tensor,
    activation: str = "identity",
    second: Tensor | None = None,
    second_activation: str = "identity",
    multiplies: bool = False,
) -> tuple[Tensor, Tensor]:
    """Computes ``quantize_rows`` in plain PyTorch, for calls that the kernel cannot run."""
    u = ACTIVATIONS[activation](x.float())
    if second is not None:
        v = ACTIVATIONS[second_activation](second.float())
        u = u * v if multiplies else torch.cat([u, v], -1)
    is_finite = u.isfinite()
    sizes = torch.where(is_finite, u.abs(), 0.0)
    scales = (sizes.amax(-1) / LARGEST if u.numel() else u.new_zeros(u.shape[:-1])).clamp(min=_LEAST)
    y = (u / scales.unsqueeze(-1)).clamp(-LARGEST, LARGEST)
    return torch.where(is_finite, y, torch.nan).to(E4M3).contiguous(), scales


# --- launch -----------------------------------------------------------------------------------------


def _has_kernel(call: QuantizeRowsCall) -> bool:
    """True if the kernel can run: x is not empty, rows fit into registers, and int32 can number them."""
    x, second = call.x, call.second
    columns = x.shape[-1] + (0 if second is None or call.multiplies else second.shape[-1])
    return 0 < x.numel() <= MAX_OFFSET * x.shape[-1] and fits_registers(columns)


_plans = Plans("quantize_rows", QuantizeRowsCall, named(f"{__package__}.plans:QuantizeRowsPlan"))
_NAME = f"{__name__}.quantize_rows"


# --- public function ------------------------------------------------------------------------------


def quantize_rows(
    x: Tensor,
    activation: str = "identity",
    second: Tensor | None = None,
    second_activation: str = "identity",
    multiplies: bool = False,
) -> tuple[Tensor, Tensor]:
    """Quantizes rows to E4M3, an 8-bit float dtype, with one scale for each row.

    The rows of ``scales[..., None] * y`` are about the rows of activation(x).

    Args:
        x: (B, S, K).
        activation: name of the activation that is applied to x first, a key of
            ``sdfastgn.kernels.common.activations.ACTIVATIONS``.
        second: (B, S, L), in the dtype of x, or None. Each row of the result is a row of x, and then the row
            of ``second`` with the same index.
        second_activation: name of the activation that is applied to ``second``.
        multiplies: True to multiply the rows of x and ``second`` instead, after their activations. L is then
            K.

    Returns:
        y: (B, S, K + L), or (B, S, K) with ``multiplies`` or without ``second``; contiguous, in E4M3.
        scales: (B, S), contiguous, fp32. No scale is 0.

    Dtypes: x is fp16, bf16, fp32 or fp64. fp64 runs in plain PyTorch, in fp32.
    Layout: any. A tensor is copied first if its rows are not contiguous.
    Grad: none. Call this function only where no gradient is wanted.
    Raises:
        TypeError: a tensor is not strided or has another dtype.
        ValueError: a shape, a device or an activation does not fit.
    """
    call = QuantizeRowsCall(x, activation, second, second_activation, multiplies)
    found = _plans.run(_NAME, call, _check, _has_kernel)
    return reference_quantize_rows(*call) if found is None else found


def _check_rows(name: str, call: QuantizeRowsCall) -> None:
    x, second = call.x, call.second
    if x.dim() != 3:
        raise ValueError(f"{name}: x must be (B, S, K), got shape {tuple(x.shape)}")
    if second is not None:
        check_input(name, "second", second)
        wanted = "(B, S, K)" if call.multiplies else "(B, S, L)"
        axes = 3 if call.multiplies else 2
        if second.dim() != 3 or second.shape[:axes] != x.shape[:axes]:
            found = f"{tuple(second.shape)} for x of shape {tuple(x.shape)}"
            raise ValueError(f"{name}: second must be {wanted}, got {found}")
        check_device(name, "second", second, x)


_check = checks_of(QuantizeRowsCall, _check_rows)
