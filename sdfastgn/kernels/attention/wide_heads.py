"""Attention with heads of more than 256 channels.

``wide_attention`` is the public function. ``attend`` computes the same, without checks of arguments.

Formula, for each sample and head, with q of shape (L, D), k and v of shape (keys, D):

    y = softmax(q k^T * scale) v,  softmax over the keys

Flash kernels keep tiles of queries, keys and values on the chip. Heads with more than 256 channels do not
fit there, and PyTorch's kernel for such heads is slow. With the 512 channels of a VAE's mid block it reaches
130 TFLOP/s on an H200, a fifth of the speed of matrix products. Two matrix products with a softmax between
them are faster, although all scores are written to memory.

The queries are processed in chunks, in order to limit the memory for scores and for weights (the softmax of
the scores). For up to 131072 keys, the scores of a chunk take at most ``_MAX_SCORE_BYTES``
(``attention/config.py``), and its weights take half as much.

On a GPU the kernels of ``attention/wide_heads_kernels.py`` run; that file explains numerics. If they cannot
run or are not faster, PyTorch's ``scaled_dot_product_attention`` runs.

Source: Vaswani et al., "Attention is all you need", 2017; Rabe and Staats, "Self-attention does not
need O(n^2) memory", 2021, for chunks.
"""

from __future__ import annotations

import math
from types import BuiltinFunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sdfastgn.kernels.attention.config import pays
from sdfastgn.kernels.common import dispatch, private
from sdfastgn.kernels.common.checks import as_float, check_device, check_floating
from sdfastgn.kernels.common.private import is_tracing

# Attention runs in chunks of queries only for these dtypes.
_HALVES = (torch.float16, torch.bfloat16)


def reference_wide_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Runs PyTorch's attention, for calls that do not run in chunks of queries.

    q is (N, heads, L, D), k and v are (N, heads, keys, D). Returns (N, heads, L, D).
    """
    y = private.scaled_dot_product_attention(q, k, v, scale=scale)
    # On a GPU, the attention of PyTorch 2.11 returns None if the batch is empty. The result is then a copy of
    # q, which is empty too.
    return q.clone() if y is None else y


# --- the entry points: attend (internal, unchecked) and wide_attention (public) -------------------


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Computes ``scaled_dot_product_attention(q, k, v)``, in chunks of queries if that is faster.

    Args:
        q: (N, heads, L, D).
        k, v: (N, heads, keys, D), the dtype and device of q.

    The arguments are not checked. Returns (N, heads, L, D) in the dtype of q. If other code has replaced
    PyTorch's function, the replacement runs.
    """
    if (
        not is_replaced()
        and runs_in_chunks(q, k, v)
        and ((q.dtype, q.shape[:-2], k.shape) == (k.dtype, k.shape[:-2], v.shape) and q.dtype == v.dtype)
    ):
        return _in_chunks(q, k, v, q.shape[-1] ** -0.5)
    return F.scaled_dot_product_attention(q, k, v)


def is_replaced() -> bool:
    """True if other code, such as SageAttention, has replaced PyTorch's ``scaled_dot_product_attention``."""
    return type(F.scaled_dot_product_attention) is not BuiltinFunctionType


def wide_attention(q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None) -> Tensor:
    """Computes ``softmax(q k^T * scale) v`` for wide heads, without a mask.

    It runs in chunks of queries if all these conditions hold: the dtype is fp16 or bf16; the GPU is NVIDIA's;
    D is a multiple of 8 and larger than 256; there are at least 1024 queries and 1024 keys; autocast does not
    change the dtype; no gradients are wanted; and nothing compiles, traces or transforms the call (as
    torch.func and forward-mode AD do). Otherwise PyTorch's attention runs.

    Args:
        q: (N, heads, L, D), queries.
        k: (N, heads, keys, D), the dtype and device of q.
        v: (N, heads, keys, D), the dtype and device of q.
        scale: positive and finite. By default 1 / sqrt(D).

    Shapes: the output is (N, heads, L, D).
    Dtypes: fp16, bf16, fp32 or fp64, the same for all tensors. The output has this dtype, unless autocast
        chooses another one.
    Layout: any. Tensors are copied first if their channels are not contiguous, or if no view joins the
        dimensions N and heads. The output is contiguous. In three cases it has the layout that PyTorch's
        attention returns: autocast changes the dtype; gradients are wanted; or the call is compiled, traced
        or transformed.
    Grad: q, k and v have gradients, which PyTorch's attention computes.
    Memory: besides the output and copies, about 96 MiB at most for up to 131072 keys. With more keys the
        memory grows in proportion to them.
    Raises:
        TypeError: a tensor is not strided or has another dtype, the dtypes differ, or scale is not a number.
        ValueError: a shape, a device or the scale does not fit.

    Source: Vaswani et al., 2017; Rabe and Staats, 2021;
    torch.nn.functional.scaled_dot_product_attention for the interface.
    """
    _check(q, k, v)
    scale = q.shape[-1] ** -0.5 if scale is None else _as_scale(scale)
    if runs_in_chunks(q, k, v):
        return _in_chunks(q, k, v, scale)
    y = reference_wide_attention(q, k, v, scale)
    return y.contiguous() if dispatch.is_plain_inference(q, (k, v)) and not _is_cast(q) else y


def runs_in_chunks(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """True if attention in chunks of queries can run and is faster than PyTorch's attention."""
    return (
        not torch.compiler.is_dynamo_compiling()
        and not is_tracing()  # under torch.jit.trace, sizes are tensors and cannot decide anything
        and torch.version.hip is None  # on AMD, ``torch.bmm`` may refuse fp32 results of 16-bit matrices
        # ``pays`` comes before the slower checks. It is False for heads of at most 256 channels, which UNets
        # usually have. So UNets go on to PyTorch's attention without the slower checks.
        and pays(q.shape[-2], k.shape[-2], q.shape[-1])
        and q.dtype in _HALVES
        and q.numel() > 0
        and not dispatch.is_op_off("wide_attention", q)
        and dispatch.is_plain_inference(q, (k, v))
        and not _is_cast(q)
    )


def _in_chunks(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    # ``wide_heads_kernels.py`` is imported only here, because it needs Triton.
    from sdfastgn.kernels.attention.wide_heads_kernels import launch_wide_attention

    try:
        return launch_wide_attention(q, k, v, scale)
    except dispatch.KernelError:
        return reference_wide_attention(q, k, v, scale)


def _is_cast(q: Tensor) -> bool:
    """True if autocast changes the dtype of ``q``. Then PyTorch's attention must run."""
    kind = q.device.type
    return torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) != q.dtype


_NAME = f"{__name__}.wide_attention"


def _check(q: Any, k: Any, v: Any) -> None:
    """Check all arguments of ``wide_attention`` except ``scale``."""
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
    """Returns ``scale`` as a float. Raises ValueError if it is not positive and finite."""
    value = as_float(_NAME, "scale", scale)
    if not 0 < value < math.inf:
        raise ValueError(f"{_NAME}: scale must be positive and finite, got {scale!r}")
    return value
