"""Rows in E4M3, an 8-bit float dtype, and one scale for each row. ``common/e4m3.py`` explains E4M3.

Formula, in fp32, for each row of x (B, S, D):

    scale = max(largest magnitude of activation(row) / 448, 2^-126)
    y = activation(row) / scale               rounded to E4M3

NaN and infinities become NaN, and do not count for the scale. So such a value spoils only its own row. A row
of a second tensor, with another activation, can follow each row of x, or multiply it. The result has one
scale, the smallest with which all values are in the range. So it needs no values of earlier calls, and no
room for larger ones.

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

# The smallest normal number of fp32. It is the scale of rows without values, whose reciprocal is finite.
_LEAST = 2.0**-126


class QuantizeRowsCall(NamedTuple):
    """The arguments of ``quantize_rows``."""

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
    """True if there are elements, and the rows fit into registers and can be numbered by int32."""
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
    """Computes rows in E4M3, and a scale for each: a row is about its scale times what is returned.

    Args:
        x: (B, S, K).
        activation: a key of ``ACTIVATIONS``, which is applied to x first.
        second: (B, S, L), in the dtype of x, or None. Each row continues with its row.
        second_activation: the same for ``second``.
        multiplies: True to multiply x and ``second``, with L = K, after their activations.

    Returns:
        y: (B, S, K + L), or (B, S, K) with ``multiplies``; contiguous, in E4M3.
        scales: (B, S), contiguous, fp32. No scale is 0.

    Dtypes: x is fp16, bf16, fp32 or fp64. fp64 runs in plain PyTorch, in fp32.
    Layout: any. A tensor is copied first if its rows are not contiguous.
    Grad: none. Call it only where no gradient is wanted.
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
