"""Steps for tokens (..., C): linear layers, attention, norms of the last axis, rotary embeddings.

A step is a function that nodes of a rewritten graph call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sdfastgn.kernels.act_linear import op as act_linear_op
from sdfastgn.kernels.ada_norm import op as ada_norm_op
from sdfastgn.kernels.attention import few_keys, over_frames, wide_heads
from sdfastgn.kernels.common.activations import ACTIVATIONS
from sdfastgn.kernels.common.private import scaled_dot_product_attention
from sdfastgn.kernels.geglu import gated as gated_op
from sdfastgn.kernels.layer_norm import grouped
from sdfastgn.kernels.layer_norm import op as layer_norm_op
from sdfastgn.kernels.product import op as product_op
from sdfastgn.kernels.product import packed
from sdfastgn.kernels.quantize_rows import op as quantize_rows_op
from sdfastgn.kernels.rotate import op as rotate_op

aten = torch.ops.aten


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Computes ``x @ weight.T + bias``."""
    return product_op.linear(x, weight, bias)


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Computes a linear layer and the GELU, in tanh form, of its result.

    On a GPU and in 16 bits, one call of cuBLAS computes both.
    """
    is_half = x.dtype == weight.dtype == bias.dtype and x.dtype.itemsize == 2
    if not (x.is_cuda and x.numel() and is_half):
        return ACTIVATIONS["gelu_tanh"](linear(x, weight, bias))
    rows = x.reshape(-1, x.shape[-1])
    y = aten._addmm_activation.default(bias, rows, weight.t(), use_gelu=True)
    return y.view(*x.shape[:-1], len(weight))


def linears(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> Sequence[Tensor]:
    """Computes several linear layers of x. ``biases`` is empty if they have none.

    If the weights lie side by side in memory (``kernels/product/packed.py``), one product computes all.
    """
    weight, bias = packed.joined(weights), packed.joined(biases) if biases else None
    if weight is None or (biases and bias is None):
        return [linear(x, w, biases[i] if biases else None) for i, w in enumerate(weights)]
    return linear(x, weight, bias).split([len(w) for w in weights], -1)


def quantize_rows(
    x: Tensor,
    activation: str = "identity",
    second: Tensor | None = None,
    second_activation: str = "identity",
    multiplies: bool = False,
) -> tuple[Tensor, Tensor]:
    """Quantizes the rows of x (..., K) to E4M3, an 8-bit float dtype. Returns them and a scale for each row.

    Before that it can apply an activation, join x with a second tensor along the last axis, or multiply the
    two: ``kernels/quantize_rows`` explains the arguments. x must have two axes or more.
    """
    parts = _samples_of_rows(x), None if second is None else _samples_of_rows(second)
    y, scales = quantize_rows_op.quantize_rows(parts[0], activation, parts[1], second_activation, multiplies)
    return y.view(*x.shape[:-1], y.shape[-1]), scales.view(x.shape[:-1])


def quantize_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantizes the rows of a weight to E4M3. Returns them and a scale for each row.

    A plan normally replaces this step by a copy of the weight in E4M3 that is made only once.
    """
    return quantize_rows(weight.detach())


def _samples_of_rows(x: Tensor) -> Tensor:
    """Reshapes x (..., K) to (B, S, K), as a view wherever strides allow it."""
    return x.unsqueeze(0) if x.dim() == 2 else x.flatten(0, -3)


def linear_e4m3(
    x: Tensor,
    x_scales: Tensor,
    weight: Tensor,
    weight_scales: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Computes a linear layer whose input and weight are in E4M3, each with a scale for each row.

    ``dtype``: the dtype of the result.
    """
    return product_op.linear_of_rows(x, weight, (x_scales, weight_scales), bias, dtype)


def add_linear_(total: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """Computes ``total + x @ weight.T``, in place if ``total`` is contiguous."""
    if not total.is_contiguous():
        return total + aten.linear.default(x, weight)
    product_op.add_linear_(total.view(-1, total.shape[-1]), x.reshape(-1, x.shape[-1]), weight)
    return total


def act_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, extra: Tensor | None
) -> Tensor:
    """Computes ``linear(activation(x)) + extra`` for few rows. ``extra``: a second bias, or None."""
    return act_linear_op.act_linear(x, weight, bias, activation, extra_bias=extra)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    """Computes what ``aten.scaled_dot_product_attention`` computes, without dropout.

    This package's own kernels run for many samples of few tokens, for heads of more than 256 channels, and
    for few keys.
    """
    is_positive = mask is None and (scale is None or scale > 0)
    if is_positive and (y := over_frames.attend_in_samples(q, k, v, is_causal, scale)) is not None:
        return y
    is_plain = is_positive and not is_causal
    if is_plain and q.dim() == 4 and k.shape == v.shape and k.shape[:2] == q.shape[:2] and q.dtype == v.dtype:
        if wide_heads.runs_in_chunks(q, k, v):
            return wide_heads.wide_attention(q, k, v, scale=scale)
        y = few_keys.attend_to_few(q, k, v, scale) if k.shape[2] <= few_keys.MAX_KEYS else None
        if y is not None:
            return y.unflatten(-1, (q.shape[1], -1)).transpose(1, 2)
    return scaled_dot_product_attention(q, k, v, mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa)


def attention_to_first(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, scale: float | None, enable_gqa: bool
) -> Tensor:
    """Computes attention of all queries to the first ``keys`` keys.

    In the result, the heads of a token always lie side by side in memory. Which kernel runs depends on the
    numbers of keys, and kernels write different layouts. But generated code for a plan (``run/bake.py``) has
    fixed strides.

    ``keys``: integers on the CPU. Either (1,), or, if q, k and v are (N, H, S, D), one for each sample (N,).
    """
    # ``int`` runs an op. So the recording of a plan's ops notices that this step reads a tensor's values.
    # ``tolist`` would run no op.
    counts = [int(n) for n in keys]
    if len({*counts}) > 1:
        samples = zip(*(t.split(1) for t in (q, k, v, keys)), strict=True)
        parts = [attention_to_first(a, b, c, n, scale, enable_gqa).transpose(1, 2) for a, b, c, n in samples]
        return torch.cat(parts).transpose(1, 2)
    k, v = (t[..., : counts[0], :] for t in (k, v))
    y = attention(q, k, v, None, False, scale, enable_gqa)
    return y.transpose(1, 2).contiguous().transpose(1, 2) if y.dim() == 4 else y.contiguous()


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Computes a LayerNorm over the last axis."""
    return layer_norm_op.layer_norm(x, weight, bias, eps)


def add_layer_norm(
    a: Tensor,
    b: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    total_bias: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Returns ``layer_norm(a + b)`` and ``a + b + total_bias``."""
    return layer_norm_op.add_layer_norm(a, b, weight, bias, eps, total_bias=total_bias)


def grouped_layer_norm(
    x: Tensor,
    residual: Tensor | None,
    rows: Tensor,
    period: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    total_bias: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Returns ``layer_norm(u)`` and ``u + total_bias``, where u is x + residual + repeated rows.

    Row i of u is ``x[i] + residual[i] + rows[i // period % len(rows)]``.
    """
    groups = grouped.Groups(period, rows.contiguous())
    parts = x.contiguous(), None if residual is None else residual.contiguous()
    return grouped.grouped_layer_norm(
        parts[0], weight, bias, eps, groups, residual=parts[1], total_bias=total_bias
    )


def ada_norm(
    x: Tensor,
    branch: Tensor | None,
    gate: Tensor | None,
    branch_norm: Sequence[Any] | None,
    norm: Sequence[Any] | None,
    factor: Tensor | None,
    offset: Tensor | None,
    has_tanh: bool,
    adds_one: bool,
    keeps_total: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """Returns ``u = x + gate * branch_norm(branch)`` and ``norm(u) * factor + offset``.

    All tensors but x may be None. ``branch_norm`` and ``norm`` have the fields of ``ada_norm.Norm``. The
    first result is None without a branch, or if ``keeps_total`` is False. The second is None if ``norm`` is.
    """
    inner, outer = (None if n is None else ada_norm_op.Norm(*n) for n in (branch_norm, norm))
    flags = {"tanh": has_tanh, "plus_one": adds_one, "keeps_total": keeps_total}
    return ada_norm_op.ada_norm(x, branch, gate, inner, outer, factor, offset, **flags)


def ada_norm_in_e4m3(
    x: Tensor,
    branch: Tensor | None,
    gate: Tensor | None,
    branch_norm: Sequence[Any] | None,
    norm: Sequence[Any],
    factor: Tensor | None,
    offset: Tensor | None,
    has_tanh: bool,
    adds_one: bool,
    keeps_total: bool,
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Computes what ``ada_norm`` computes, with the norm in E4M3, an 8-bit float dtype.

    Returns the sum, the norm in E4M3, and a scale for each row of the norm.
    """
    inner = None if branch_norm is None else ada_norm_op.Norm(*branch_norm)
    flags = {"tanh": has_tanh, "plus_one": adds_one, "keeps_total": keeps_total}
    outer = ada_norm_op.Norm(*norm)
    return ada_norm_op.ada_norm_in_e4m3(x, branch, gate, inner, outer, factor, offset, **flags)


def rotate(
    x: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    weight: Tensor | None = None,
    eps: float = 0.0,
    halves: bool = False,
    bias: Tensor | None = None,
    layer: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Computes the norm and the rotary embedding of heads x (B, S, H, D), both over the last axis.

    ``kernels/rotate`` explains the arguments. ``cos`` may be a complex table: then it holds cos and sin, and
    ``sin`` is None.
    """
    if cos is not None and cos.is_complex():
        cos = torch.view_as_real(cos.resolve_conj()).flatten(-2)
    return rotate_op.rotate(x, cos, sin, weight, eps, out, halves, bias, layer)


def join_heads(parts: Sequence[Sequence[Any]]) -> Tensor:
    """Computes the norms and rotary embeddings of several groups of tokens, and joins them along the tokens.

    Each part is a tuple of the arguments of ``rotate`` for heads (B, S, H, D).
    """
    B, _, H, D = parts[0][0].shape
    y = parts[0][0].new_empty((B, sum(x.shape[1] for x, *_ in parts), H, D))
    at = 0
    for x, cos, sin, weight, eps, halves, bias, layer in parts:
        rotate(x, cos, sin, weight, eps, halves, bias, layer, y.narrow(1, at, x.shape[1]))
        at += x.shape[1]
    return y


def gated(value: Tensor, gate: Tensor, activation: str) -> Tensor:
    """Computes ``value * activation(gate)``, for channels-last images and videos without a copy."""
    if value.dim() > 3 and value.stride(1) == 1:
        value, gate = value.movedim(1, -1), gate.movedim(1, -1)
        return gated_op.gated(value, gate, activation).movedim(-1, 1)
    return gated_op.gated(value, gate, activation)
