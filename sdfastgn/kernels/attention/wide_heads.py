"""Attention with heads of more than 256 channels: ``wide_attention``, and ``attend`` without its checks.

Formula, for each sample and head, with q of shape (L, D), k and v of (keys, D):

    y = softmax(q k^T * scale) v,  softmax over the keys

Flash kernels keep tiles of queries, keys and values on the chip, which heads wider than 256
channels leave no room for. What PyTorch runs for those reaches a fifth of what an H200's products
do (130 TFLOP/s with the 512 channels of a VAE's mid block), so that two products with a softmax
between them, in chunks of queries, may move far more memory. Chunks bound that:
``_MAX_SCORE_BYTES`` of ``attention/config.py``, and half as much again for the weights.

Layout and numerics contract: ``attention/wide_heads_kernels.py``. Where the chunks cannot run or do
not pay, PyTorch's ``scaled_dot_product_attention`` does.

Source: Vaswani et al., "Attention is all you need", 2017; Rabe and Staats, "Self-attention does not
need O(n^2) memory", 2021, for chunks.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sdfastgn.kernels.attention.config import pays
from sdfastgn.kernels.common import dispatch
from sdfastgn.kernels.common.checks import as_float, check_device, check_floating

_HALVES = (torch.float16, torch.bfloat16)


def reference_wide_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """PyTorch's own attention: the fallback."""
    y = F.scaled_dot_product_attention(q, k, v, scale=scale)
    # For an empty batch PyTorch 2.11's attention on a GPU returns None.
    return q.clone() if y is None else y


# --- the public functions -------------------------------------------------------------------------


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """``scaled_dot_product_attention(q, k, v)``, in chunks where that is faster, without checks."""
    if _runs_in_chunks(q, k, v) and (
        (q.dtype, q.shape[:-2], k.shape) == (k.dtype, k.shape[:-2], v.shape) and q.dtype == v.dtype
    ):
        return _in_chunks(q, k, v, q.shape[-1] ** -0.5)
    return F.scaled_dot_product_attention(q, k, v)


def wide_attention(q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None) -> Tensor:
    """``softmax(q k^T * scale) v`` of wide heads, without mask: two matrix products a chunk of queries.

    Args:
        q: (N, heads, L, D), queries.
        k: (N, heads, keys, D), with the dtype and on the device of q.
        v: (N, heads, keys, D), likewise.
        scale: positive and finite; 1 / sqrt(D) where None.

    Shapes: the output is (N, heads, L, D).
    Dtypes: fp16, bf16, fp32 or fp64, the same for all. fp16 and bf16 run in chunks. The others, autocast
        to another dtype, whatever chunks would not make faster (D up to 256 or no multiple of 8,
        fewer than 1024 queries or keys), and AMD's GPUs run in PyTorch's attention.
    Layout: any; tensors whose channels are not next to each other are copied first. The output is
        contiguous, but under autocast and where gradients are wanted whatever PyTorch's attention
        gives.
    Grad: with respect to q, k and v, by PyTorch's attention, which is also what the transforms of
    torch.func and forward-mode AD see.
    Memory: 96 MiB beside output and copies for up to 131072 keys, in proportion to them beyond.
    Raises:
        TypeError: a tensor is not dense, or none of these dtypes, or the dtypes differ; scale is no number.
        ValueError: a shape, a device or the scale does not fit.

    Source: Vaswani et al., 2017; Rabe and Staats, 2021;
    torch.nn.functional.scaled_dot_product_attention for the interface.
    """
    _check(q, k, v)
    scale = q.shape[-1] ** -0.5 if scale is None else _as_scale(scale)
    if _runs_in_chunks(q, k, v):
        return _in_chunks(q, k, v, scale)
    y = reference_wide_attention(q, k, v, scale)
    return y.contiguous() if dispatch.is_plain_inference(q, (k, v)) and not _is_cast(q) else y


def _runs_in_chunks(q: Tensor, k: Tensor, v: Tensor) -> bool:
    return (
        not torch.jit.is_tracing()  # where sizes are no numbers
        and torch.version.hip is None  # the products of 16 bits into fp32 are cuBLAS's
        # Sizes first: of a UNet's many attentions none has such heads.
        and pays(q.shape[-2], k.shape[-2], q.shape[-1])
        and q.dtype in _HALVES
        and q.numel() > 0
        and dispatch.is_plain_inference(q, (k, v))
        and not _is_cast(q)
    )


def _in_chunks(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    from sdfastgn.kernels.attention.wide_heads_kernels import launch_wide_attention  # needs Triton

    try:
        return launch_wide_attention(q, k, v, scale)
    except dispatch.KernelError:
        return reference_wide_attention(q, k, v, scale)


def _is_cast(q: Tensor) -> bool:
    """True under autocast to another dtype, which is PyTorch's attention's to follow."""
    kind = q.device.type
    return torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) != q.dtype


_NAME = f"{__name__}.wide_attention"


def _check(q: Any, k: Any, v: Any) -> None:
    for label, t in (("q", q), ("k", k), ("v", v)):
        check_floating(_NAME, label, t)
        if t.dtype != q.dtype:
            raise TypeError(f"{_NAME}: {label} must have the dtype of q, {q.dtype}, got {t.dtype}")
    if q.dim() != 4 or 0 in q.shape[-1:]:
        raise ValueError(f"{_NAME}: q must be (N, heads, L, D), D at least 1, got shape {tuple(q.shape)}")
    N, heads, _, D = q.shape
    if k.dim() != 4 or k.shape[:2] != (N, heads) or k.shape[3] != D or k.shape[2] == 0:
        wanted = f"({N}, {heads}, keys, {D}), keys at least 1"
        raise ValueError(f"{_NAME}: k must be {wanted}, got shape {tuple(k.shape)}")
    if v.shape != k.shape:
        raise ValueError(f"{_NAME}: v must have the shape of k, {tuple(k.shape)}, got {tuple(v.shape)}")
    for label, t in (("k", k), ("v", v)):
        check_device(_NAME, label, t, q, "q")


def _as_scale(scale: Any) -> float:
    value = as_float(_NAME, "scale", scale)
    if not 0 < value < math.inf:
        raise ValueError(f"{_NAME}: scale must be positive and finite, got {scale!r}")
    return value
