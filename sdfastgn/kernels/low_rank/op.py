"""Adds the products of LoRA adapters to weights: ``add_low_rank`` and ``LowRankSums``.

A LoRA layer computes ``weight @ x + scale * b @ (a @ x)``. One product of x with the sum
``weight + scale * b @ a`` gives the same result. ``add_low_rank`` computes such sums for many layers in one
launch if their devices, dtypes and alignments are equal:

    out = weight + sum over pairs of scale * b @ a

For a convolution, a (rank, C_in, height, width) and b (C_out, rank, 1, 1) are flattened to matrices.

On a GPU the kernel of ``low_rank/kernels.py`` runs. Everywhere else, and for layers whose dtypes or strides
the kernel does not support, ``reference_add_low_rank`` runs.

Numerics: all arithmetic is fp32, or fp64 for fp64 weights. The result is rounded once at the end.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sdfastgn.kernels.common import dispatch
from sdfastgn.kernels.common.compile_ahead import without_rehearsal
from sdfastgn.kernels.common.launch import Launch
from sdfastgn.kernels.common.sizes import ceil_div, next_power_of_2

# Numbers of rows and columns of a program's tile.
_TILE = (64, 64)
# Number of ranks that one ``tl.dot`` multiplies.
_DEPTH = 16
# Maximum rank for which the kernel has no loop over blocks of ranks. Without a loop the compiler unrolls the
# products of all ranks, and may copy all their factors to shared memory at once.
# ``_MOST_HALVES`` is the maximum if both factors are fp16 or both are bf16. Then the compiler copies little.
# But for higher ranks it would compile for minutes if the GPU is of the Turing generation.
# ``_MOST_OTHERS`` is the maximum for all other dtypes. Then the compiler copies 512 bytes for each rank: the
# factors of 256 ranks do not fit into the shared memory of an RTX 40 GPU, and the factors of 512 ranks do not
# fit into the shared memory of an H200. Also, the compiler takes 4 seconds for 64 ranks, but 15 for 128.
_MOST_HALVES = 256
_MOST_OTHERS = 64
# Number of ranks in a block, if the kernel has a loop over blocks of ranks. With more, registers spill on
# GPUs of the generations Turing and RDNA 3.
_LOOPED = 32
_WARPS = 4
# Maximum number of elements of a matrix, because offsets in the kernel are int32.
_MOST_ELEMENTS = 2**31 - 1
# Maximum number of launches that ``_tables`` keeps in its cache. Each of them holds tables in GPU memory.
_KEPT_TABLES = 16


class Factors(NamedTuple):
    """The factors of one LoRA adapter of one layer: it adds ``scale * b @ a`` to the layer's weight.

    Shapes: a (rank, ...), b (rows, rank, ...).
    """

    a: Tensor
    b: Tensor
    scale: float


class Sum(NamedTuple):
    """The operands for one layer: out = weight + sum of scale * b @ a over ``pairs``.

    ``out`` must have the shape, dtype, strides and device of ``weight``. The kernel overwrites it.
    """

    out: Tensor
    weight: Tensor
    pairs: tuple[Factors, ...]


class Matrix(NamedTuple):
    """Addresses, sizes and layout of a weight, and of the tensor ``out`` that the merged weight is stored in.

    Attributes:
        row: the start of a row in the kernel's table ``matrices``, which ``low_rank/kernels.py`` describes:
            the addresses of out and weight, the numbers of rows and columns, and the number of values of a
            column's inner index.
        device, dtype: device and dtype of the weight.
        is_last: True if the weight is a channels-last convolution. Its columns then have the input channel as
            the inner index, and the position in the convolution's window as the outer index. False if it is
            the other way round.
    """

    row: tuple[int, ...]
    device: torch.device
    dtype: torch.dtype
    is_last: bool


class Pair(NamedTuple):
    """Addresses, rank and strides of the factors a and b of one LoRA adapter (``pair_of``).

    ``row``: these numbers in the order of a row of the kernel's table ``factors`` (``low_rank/kernels.py``).
    ``dtypes``: the dtypes of a and b.
    """

    row: tuple[int, ...]
    dtypes: tuple[torch.dtype, torch.dtype]


class _Kind(NamedTuple):
    """Properties of a layer. One launch computes all layers for which all these properties are equal.

    ``weight``, ``a``, ``b``: dtypes of the weight and of the factors. ``is_aligned``: True if the addresses
    of weight and out are multiples of 16 bytes, and the number of columns is a multiple of 8.
    """

    device: torch.device
    weight: torch.dtype
    a: torch.dtype
    b: torch.dtype
    is_aligned: bool


def reference_add_low_rank(total: Sum) -> None:
    """Computes ``add_low_rank`` for one layer in plain PyTorch: writes the sum into ``total.out``."""
    dtype = torch.promote_types(total.weight.dtype, torch.float32)
    y = total.weight.to(dtype)
    with torch.autocast(y.device.type, enabled=False):  # autocast is off: it would multiply in half precision
        for a, b, scale in total.pairs:
            product = b.flatten(1).to(dtype) @ a.flatten(1).to(dtype)
            y = y + scale * product.view(y.shape)
    total.out.copy_(y)


def add_low_rank(sums: Sequence[Sum]) -> None:
    """Computes out = weight + sum of scale * b @ a for many layers at once.

    There is one launch for each combination of device, dtypes and alignment among the layers.

    Args:
        sums: the operands of each layer. All tensors of a layer are on the same device. ``out`` is
            overwritten.

    The arguments are not checked.

    Dtypes: fp16, bf16, fp32 or fp64. The factors may have other dtypes than ``weight``.
    Grad: none. The caller must not want gradients.
    """
    LowRankSums(sums).compute([pair.scale for total in sums for pair in total.pairs])


class LowRankSums:
    """Computes the sums of ``add_low_rank`` several times, with the same tensors and other scales.

    The constructor reads addresses, shapes and strides of all tensors. ``compute`` uses them again, which
    saves CPU time. So the tensors must not move in memory, but their values may change.

    ``prepared``: for each sum the result of ``matrix_of`` for its weight, and the results of ``pair_of`` for
    its pairs of factors, if the caller has them already. Otherwise None.
    """

    def __init__(
        self,
        sums: Sequence[Sum],
        prepared: Iterable[tuple[Matrix | None, Sequence[Pair | None]]] | None = None,
    ) -> None:
        self._sums = sums
        # For each sum, the index of its first scale in the list of the scales of all sums.
        self._first = list(itertools.accumulate((len(total.pairs) for total in sums), initial=0))
        kinds: dict[_Kind, list[tuple[int, tuple[int, ...], list[tuple[int, ...]]]]] = {}
        self._by_reference: list[int] = []
        for index, (matrix, pairs) in enumerate(map(_prepared, sums) if prepared is None else prepared):
            rows = [pair.row for pair in pairs if pair is not None]
            if matrix is None or len(rows) < len(pairs) or len({pair.dtypes for pair in pairs}) > 1:  # type: ignore[union-attr]
                self._by_reference.append(index)
                continue
            a, b = pairs[0].dtypes if pairs else (matrix.dtype, matrix.dtype)  # type: ignore[union-attr]
            out, weight, _, columns, _ = matrix.row
            is_aligned = (out | weight) % 16 == columns % 8 == 0
            kind = _Kind(matrix.device, matrix.dtype, a, b, is_aligned)
            kinds.setdefault(kind, []).append((index, matrix.row, rows))
        self._launches = [
            (
                _tables(kind, tuple(row for _, row, _ in found), tuple(tuple(rows) for _, _, rows in found)),
                [index for index, _, _ in found],
            )
            for kind, found in kinds.items()
        ]

    def _places(self, index: int) -> range:
        """The indices, in the list of all scales, of the scales of the sum number ``index``."""
        return range(self._first[index], self._first[index + 1])

    def compute(self, scales: Sequence[float]) -> None:
        """Computes all sums with new scales.

        ``scales``: the scales of all pairs of the first sum, then of the second sum, and so on. They replace
        the scales that the constructor was given.
        """
        by_reference = list(self._by_reference)
        for tables, indices in self._launches:
            chosen = [scales[place] for index in indices for place in self._places(index)]
            try:
                _launch(tables.tiles, tables, chosen or [0.0])
            except dispatch.KernelError:
                by_reference += indices
        for index in by_reference:
            total = self._sums[index]
            new = (scales[place] for place in self._places(index))
            pairs = tuple(Factors(a, b, scale) for (a, b, _), scale in zip(total.pairs, new, strict=True))
            reference_add_low_rank(total._replace(pairs=pairs))


@dispatch.kernels_of("add_low_rank")
def _launch(tiles: Tensor, tables: _Tables, scales: list[float]) -> None:
    device = tiles.device
    on_gpu = torch.tensor(scales, dtype=torch.float32, device="cpu").to(device, non_blocking=True)
    if device.type == "cuda":  # ``record_stream`` keeps freed tables until the kernel has read them
        for table in tables[1:]:
            table.record_stream(torch.cuda.current_stream(device))
    with without_rehearsal():
        tables.launch.run(tiles, tables.matrices, tables.factors, on_gpu)


class _Tables(NamedTuple):
    """A launch of the kernel, and the tables that the kernel reads.

    The table of scales is not included, because the scales change with each call.
    """

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
    """Makes a launch of the kernel, and copies the kernel's tables to the GPU (``low_rank/kernels.py``).

    The arguments have the addresses of tensors, but no references to them. So the cache keeps no weights
    alive.

    Args:
        kind: the device, the dtypes and the alignment that all matrices have in common.
        matrices: for each matrix the first five numbers of the matrix's row in the table ``matrices``.
        factors: for each matrix the rows of the matrix's pairs in the table ``factors``.
    """
    from sdfastgn.kernels.low_rank.kernels import add_low_rank_kernel

    rows, first = [], 0
    for matrix, pairs in zip(matrices, factors, strict=True):
        rows.append((*matrix, first, len(pairs)))
        first += len(pairs)
    tiles = [ceil_div(m[2], _TILE[0]) * ceil_div(m[3], _TILE[1]) for m in matrices]
    counts = torch.tensor(tiles, device="cpu")  # the default device may be a GPU
    of = torch.repeat_interleave(torch.arange(len(matrices), device="cpu"), counts)
    number = torch.arange(len(of), device="cpu") - (counts.cumsum(0) - counts)[of]
    flat = [pair for pairs in factors for pair in pairs] or [(0,) * 7]
    block, loops = rank_blocks(max(pair[2] for pair in flat), kind.a, kind.b)
    launch = Launch(
        add_low_rank_kernel, len(of), _WARPS,
        WEIGHT=_triton_dtype(kind.weight), A=_triton_dtype(kind.a), B=_triton_dtype(kind.b),
        BLOCK=block, DEPTH=_DEPTH, LOOPS=loops,
        ROWS=_TILE[0], COLUMNS=_TILE[1], ALIGNED=kind.is_aligned,
    )  # fmt: skip
    return _Tables(
        launch,
        torch.stack((of, number), 1).to(torch.int32).to(kind.device),
        torch.tensor(rows, dtype=torch.int64, device="cpu").to(kind.device),
        torch.tensor(flat, dtype=torch.int64, device="cpu").to(kind.device),
    )


def rank_blocks(rank: int, a: torch.dtype, b: torch.dtype) -> tuple[int, bool]:
    """Returns the kernel's constants ``BLOCK`` and ``LOOPS`` for pairs with ranks of at most ``rank``.

    These are the number of ranks in a block, and True if the kernel loops over blocks of ranks. ``a``, ``b``:
    the dtypes of the factors.
    """
    most = _MOST_HALVES if a == b != torch.float32 else _MOST_OTHERS
    return (_LOOPED, True) if rank > most else (max(_DEPTH, next_power_of_2(rank)), False)


def _triton_dtype(dtype: torch.dtype) -> object:
    import triton.language as tl

    return {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}[dtype]


def _prepared(total: Sum) -> tuple[Matrix | None, list[Pair | None]]:
    matrix = matrix_of(total.out, total.weight)
    return matrix, [] if matrix is None else [pair_of(a, b, matrix) for a, b, _ in total.pairs]


def matrix_of(out: Tensor, weight: Tensor) -> Matrix | None:
    """Describes a weight for the kernel. Returns None if the kernel does not support the weight."""
    if not dispatch.runs_in_triton(weight) or (out.dtype, out.stride()) != (weight.dtype, weight.stride()):
        return None
    rows, channels = len(weight), weight.shape[1] if weight.dim() > 1 else 1
    window = weight[0, 0].numel() if weight.dim() > 2 else 1
    if weight.numel() > _MOST_ELEMENTS:
        return None
    is_last = window > 1 and not weight.is_contiguous()
    if is_last and not weight.is_contiguous(memory_format=torch.channels_last):
        return None
    if not (is_last or weight.is_contiguous()):
        return None
    inner = channels if is_last else window
    row = out.data_ptr(), weight.data_ptr(), rows, channels * window, inner
    return Matrix(row, weight.device, weight.dtype, is_last)


def pair_of(a: Tensor, b: Tensor, matrix: Matrix) -> Pair | None:
    """Describes for the kernel the factors a and b, whose product is added to the weight ``matrix``.

    Returns None if the kernel does not support these factors.
    """
    strides, dtypes = _strides(a), (a.dtype, b.dtype)
    if strides is None or max(a.numel(), b.numel()) > _MOST_ELEMENTS:
        return None
    if not (a.dtype in dispatch.KERNEL_DTYPES and b.dtype in dispatch.KERNEL_DTYPES):
        return None
    if b.shape[1] > 1 and b.flatten(1).stride(1) != 1:
        return None
    rank, channel, place = strides
    inside, outside = (channel, place) if matrix.is_last else (place, channel)
    return Pair((a.data_ptr(), b.data_ptr(), len(a), rank, inside, outside, b.stride(0)), dtypes)


def _strides(a: Tensor) -> tuple[int, int, int] | None:
    """The strides of ``a`` (rank, C_in, height, width) along rank, input channel, and position in the window.

    The position in the convolution's window is h * width + w. Returns None if ``a`` is neither contiguous nor
    channels-last, because positions may then have no common stride. For a linear layer, ``a`` is (rank, C_in)
    and the last stride is 0.
    """
    window = a[0, 0].numel() if a.dim() > 2 else 1
    if window == 1:
        return a.stride(0), a.stride(1), 0
    if a.is_contiguous():
        return a.stride(0), window, 1
    if a.is_contiguous(memory_format=torch.channels_last):
        return a.stride(0), 1, a.shape[1]
    return None
