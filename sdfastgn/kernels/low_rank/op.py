"""Weights with the products of adapters added: ``add_low_rank``.

A LoRA layer computes ``weight @ x + scale * b @ (a @ x)``. The same numbers come from one product with
``weight + scale * b @ a``. This op computes that sum for many layers in one launch:

    out = weight + sum over pairs of scale * b @ a

For a convolution, a (rank, C_in, height, width) and b (C_out, rank, 1, 1) are flattened to matrices.

On a GPU the kernel of ``low_rank/kernels.py`` runs. Matrices that it cannot take, and everything on a device
without kernels, are computed by ``reference_add_low_rank``.

Numerics: in fp32, or fp64 for fp64 weights; one rounding at the end.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sdfastgn.kernels.common import dispatch
from sdfastgn.kernels.common.compile_ahead import rehearsal
from sdfastgn.kernels.common.launch import Launch
from sdfastgn.kernels.common.sizes import ceil_div

# Rows and columns of a program's tile.
_TILE = (64, 128)
# Smallest depth of ``tl.dot``, and the depth for larger ranks.
_DEPTHS = (16, 32)
_WARPS = 8
# Offsets in the kernel are int32.
_MOST_ELEMENTS = 2**31 - 1
# Number of sets of tables that are kept on the GPU.
_KEPT_TABLES = 16


class Factors(NamedTuple):
    """One adapter of one layer: a (rank, ...), b (rows, rank, ...), and the factor of their product."""

    a: Tensor
    b: Tensor
    scale: float


class Sum(NamedTuple):
    """``out`` = ``weight`` + the products of ``pairs``. ``out``: memory like that of ``weight``."""

    out: Tensor
    weight: Tensor
    pairs: tuple[Factors, ...]


class _Kind(NamedTuple):
    """Layers that one launch can compute together. ``is_aligned``: as ``ALIGNED`` of the kernel."""

    device: torch.device
    weight: torch.dtype
    a: torch.dtype
    b: torch.dtype
    is_aligned: bool


def reference_add_low_rank(total: Sum) -> None:
    """``add_low_rank`` of one layer in plain PyTorch."""
    dtype = torch.promote_types(total.weight.dtype, torch.float32)
    y = total.weight.to(dtype)
    for a, b, scale in total.pairs:
        product = b.flatten(1).to(dtype) @ a.flatten(1).to(dtype)
        y = y + scale * product.view(y.shape)
    total.out.copy_(y)


def add_low_rank(sums: Sequence[Sum]) -> None:
    """Compute all ``sums``, in one launch for each combination of dtypes.

    Args:
        sums: for each layer its ``out``, its ``weight`` and its ``Factors``. All are on one device.

    Dtypes: fp16, bf16, fp32 or fp64. ``out`` has the dtype, shape and strides of ``weight``; the factors may
    have other dtypes.
    Grad: none. The caller must not want gradients.
    """
    kinds: dict[_Kind, list[tuple[Sum, tuple[int, ...], list[tuple[int, ...]]]]] = {}
    for total in sums:
        numbers = _numbers(total)
        if numbers is None:
            reference_add_low_rank(total)
            continue
        pair = total.pairs[0] if total.pairs else None
        (out, weight, _, columns, _), _ = numbers
        dtype = total.weight.dtype
        kind = _Kind(
            total.weight.device,
            dtype,
            dtype if pair is None else pair.a.dtype,
            dtype if pair is None else pair.b.dtype,
            is_aligned=(out | weight) % 16 == columns % 8 == 0,
        )
        kinds.setdefault(kind, []).append((total, *numbers))
    for kind, found in kinds.items():
        matrices = tuple(row for _, row, _ in found)
        factors = tuple(tuple(rows) for _, _, rows in found)
        scales = [pair.scale for total, _, _ in found for pair in total.pairs]
        tables = _tables(kind, matrices, factors)
        on_gpu = torch.tensor(scales or [0.0], dtype=torch.float32).to(kind.device, non_blocking=True)
        if kind.device.type == "cuda":  # the tables may be freed while the kernel waits in this stream
            for table in tables[1:]:
                table.record_stream(torch.cuda.current_stream(kind.device))
        # In a rehearsal launches are only noted. But the caller takes the sums as written.
        token = rehearsal.set(None)
        try:
            tables.launch.run(tables.tiles, tables.matrices, tables.factors, on_gpu)
        finally:
            rehearsal.reset(token)


class _Tables(NamedTuple):
    """``launch`` and the tables of ``low_rank/kernels.py`` that do not depend on the scales."""

    launch: Launch
    tiles: Tensor
    matrices: Tensor
    factors: Tensor


@functools.lru_cache(maxsize=_KEPT_TABLES)
def _tables(
    kind: _Kind,
    matrices: tuple[tuple[int, ...], ...],
    factors: tuple[tuple[tuple[int, ...], ...], ...],
) -> _Tables:
    """The tables of addresses and sizes on the GPU. They hold numbers only, and keep no memory alive."""
    from sdfastgn.kernels.low_rank.kernels import add_low_rank_kernel

    rows, first = [], 0
    for matrix, pairs in zip(matrices, factors, strict=True):
        rows.append((*matrix, first, len(pairs)))
        first += len(pairs)
    counts = torch.tensor([ceil_div(m[2], _TILE[0]) * ceil_div(m[3], _TILE[1]) for m in matrices])
    of = torch.repeat_interleave(torch.arange(len(matrices)), counts)
    number = torch.arange(len(of)) - (counts.cumsum(0) - counts)[of]
    flat = [pair for pairs in factors for pair in pairs] or [(0,) * 7]
    launch = Launch(
        add_low_rank_kernel, len(of), _WARPS,
        WEIGHT=_triton_dtype(kind.weight), A=_triton_dtype(kind.a), B=_triton_dtype(kind.b),
        DEPTH=_DEPTHS[0] if max(pair[2] for pair in flat) <= _DEPTHS[0] else _DEPTHS[1],
        ROWS=_TILE[0], COLUMNS=_TILE[1], ALIGNED=kind.is_aligned,
    )  # fmt: skip
    return _Tables(
        launch,
        torch.stack((of, number), 1).to(torch.int32).to(kind.device),
        torch.tensor(rows, dtype=torch.int64).to(kind.device),
        torch.tensor(flat, dtype=torch.int64).to(kind.device),
    )


def _triton_dtype(dtype: torch.dtype) -> object:
    import triton.language as tl

    return {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}[dtype]


def _numbers(total: Sum) -> tuple[tuple[int, ...], list[tuple[int, ...]]] | None:
    """(row of the table of matrices without its last two numbers, rows of the table of factors).

    None if the kernel cannot take this layer.
    """
    out, weight, pairs = total
    if not dispatch.runs_in_triton(weight) or (out.dtype, out.stride()) != (weight.dtype, weight.stride()):
        return None
    rows, channels = len(weight), weight.shape[1] if weight.dim() > 1 else 1
    window = weight[0, 0].numel() if weight.dim() > 2 else 1
    columns = channels * window
    if max(weight.numel(), *(t.numel() for pair in pairs for t in pair[:2]), 0) > _MOST_ELEMENTS:
        return None
    is_last = window > 1 and not weight.is_contiguous()
    if is_last and not weight.is_contiguous(memory_format=torch.channels_last):
        return None
    if not (is_last or weight.is_contiguous()):
        return None
    found: list[tuple[int, ...]] = []
    for a, b, _ in pairs:
        strides = _strides(a)
        is_same = (a.dtype, b.dtype) == (pairs[0].a.dtype, pairs[0].b.dtype)
        if strides is None or not is_same or not {a.dtype, b.dtype} <= set(dispatch.KERNEL_DTYPES):
            return None
        if b.flatten(1).stride(1) != 1 and b.shape[1] > 1:
            return None
        rank, channel, place = strides
        inside, outside = (channel, place) if is_last else (place, channel)
        found.append((a.data_ptr(), b.data_ptr(), len(a), rank, inside, outside, b.stride(0)))
    inner = channels if is_last else window
    return (out.data_ptr(), weight.data_ptr(), rows, columns, inner), found


def _strides(a: Tensor) -> tuple[int, int, int] | None:
    """Strides of a (rank, C_in, ...) along rank, input channel and place in the window; None if uneven."""
    window = a[0, 0].numel() if a.dim() > 2 else 1
    if window == 1:
        return a.stride(0), a.stride(1), 0
    if a.is_contiguous():
        return a.stride(0), window, 1
    if a.is_contiguous(memory_format=torch.channels_last):
        return a.stride(0), 1, a.shape[1]
    return None
