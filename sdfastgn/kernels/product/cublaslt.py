"""Computes matrix products by a given algorithm of cuBLASLt, a C library that is called through ctypes.

cuBLASLt takes matrices in column-major order. A row-major (rows, columns) matrix has the same values in
memory as a column-major (columns, rows) matrix. So for ``out = x @ weight.T`` cuBLASLt computes ``out.T =
weight @ x.T``.

The values of the constants below are from ``cublasLt.h``. They have not changed since CUDA 11. cuBLASLt
before CUDA 12.9 refuses products of E4M3 matrices (a float dtype of 8 bits) that have a scale for each row.

Source: NVIDIA, cuBLAS documentation, "Using the cuBLASLt API".
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sdfastgn.kernels.common import gpu
from sdfastgn.kernels.common.e4m3 import E4M3

# The numbers by which cuBLASLt names the dtypes of matrices: CUDA_R_16F, CUDA_R_16BF and CUDA_R_8F_E4M3.
_CUDA_TYPES = {torch.float16: 2, torch.bfloat16: 14, E4M3: 28}
# CUDA_R_32F: cuBLASLt's number for fp32, the dtype of alpha and beta in ``out = alpha * product + beta *
# out``.
_FP32 = 0
# CUBLAS_COMPUTE_32F: cuBLASLt's number for sums in fp32.
_COMPUTE_FP32 = 68
# Numbers of the attributes that are set in cuBLASLt's descriptor of a product, from
# cublasLtMatmulDescAttributes_t.
_TRANSPOSE_A, _EPILOGUE, _BIAS_POINTER, _A_SCALE_POINTER, _B_SCALE_POINTER, _FAST_SUMS = 3, 7, 8, 17, 18, 25
_A_SCALE_MODE, _B_SCALE_MODE = 31, 32
# Values of the attributes _TRANSPOSE_A and _EPILOGUE: CUBLAS_OP_T, CUBLASLT_EPILOGUE_BIAS.
_TRANSPOSED, _ADD_BIAS = 1, 4
# Value of the attributes _A_SCALE_MODE and _B_SCALE_MODE: one fp32 scale for each row of x and of the weight,
# CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F.
_SCALES_OF_ROWS = 3
# A placeholder for the addresses of scales in a request for algorithms, which does not read the scales.
# Without addresses cuBLASLt recommends no algorithm that takes a scale for each row.
_SOME_ADDRESS = 256
# Number of the attribute of a request for algorithms that limits an algorithm's scratch memory, from
# cublasLtMatmulPreferenceAttributes_t.
_MAX_WORKSPACE = 1
# Maximum number of bytes of scratch memory of an algorithm. Algorithms that divide the depth into parts
# (split-K) store partial sums and need more memory, so this limit excludes them.
_WORKSPACE = 4096
# Maximum number of algorithms that are requested. On an H200 cuBLASLt recommends eight for a product.
_MAX_ALGORITHMS = 16

# Functions that may take milliseconds. They release Python's global interpreter lock, so that other threads
# run meanwhile. The other functions that this file calls only allocate, set or free a few bytes. They keep
# the lock, because a thread that releases it may wait for milliseconds until it gets the lock back, if other
# threads compile kernels.
_SLOW = ("cublasLtCreate", "cublasLtMatmul", "cublasLtMatmulAlgoGetHeuristic")

_Pointer = ctypes.c_void_p


class Shape(NamedTuple):
    """The sizes, the dtype and the options of a product out = x @ weight.T of contiguous matrices.

    x is (rows, depth), weight is (columns, depth), out is (rows, columns). ``has_bias``: True if a bias
    (columns,) is added. ``adds``: True if the product is added to the old values of ``out``. ``is_e4m3``:
    True if x and weight are in E4M3, a float dtype of 8 bits, and have scales. Then ``dtype`` is the dtype of
    out. ``has_row_scales``: True if each row of x and of weight has a scale, False if each of the two tensors
    has one scale.
    """

    rows: int
    columns: int
    depth: int
    dtype: torch.dtype
    has_bias: bool
    adds: bool
    is_e4m3: bool = False
    has_row_scales: bool = False


class Algorithm(NamedTuple):
    """An algorithm of cuBLASLt: its opaque description, and the bytes of scratch memory that it needs."""

    description: ctypes.Array[ctypes.c_uint64]
    workspace: int


class Refused(Exception):  # noqa: N818  # not an error for callers, which try another algorithm
    """Raised if a call of cuBLASLt fails. The message has the status that cuBLASLt returned."""


class _Found(ctypes.Structure):
    """The C struct ``cublasLtMatmulHeuristicResult_t``: an algorithm that cuBLASLt recommends."""

    _fields_ = (
        ("description", ctypes.c_uint64 * 8),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


class _Arguments(NamedTuple):
    """Pointers to cuBLASLt's descriptors of a product: of its operation, and of its three matrices."""

    operation: ctypes.c_void_p
    weight: ctypes.c_void_p
    x: ctypes.c_void_p
    out: ctypes.c_void_p


@functools.cache
def _library(loader: type[ctypes.CDLL] = ctypes.CDLL) -> ctypes.CDLL | None:
    """The library cuBLASLt of the CUDA version that PyTorch was built for, or None if it is not found.

    On Windows it is never found. ``loader``: ``ctypes.CDLL``, or ``ctypes.PyDLL``, whose calls keep Python's
    global interpreter lock.
    """
    if torch.version.cuda is None:
        return None
    try:
        return loader(f"libcublasLt.so.{torch.version.cuda.partition('.')[0]}")
    except OSError:
        return None


def _call(name: str, *arguments: object) -> None:
    """Calls the function ``name`` of cuBLASLt. Raises ``Refused`` if it returns another status than 0."""
    status = getattr(_library(ctypes.CDLL if name in _SLOW else ctypes.PyDLL), name)(*arguments)
    if status != 0:
        raise Refused(f"sdfastgn: {name} returned {status}")


def _set(kind: str, of: ctypes.c_void_p, attribute: int, value: Any) -> None:
    """Sets an attribute of a descriptor of cuBLASLt to the C value ``value``.

    ``of``: the descriptor. ``kind``: type of the descriptor, as in the names of cuBLASLt's functions, for
    example "MatmulDesc".
    """
    size = ctypes.c_size_t(ctypes.sizeof(value))
    _call(f"cublasLt{kind}SetAttribute", of, attribute, ctypes.byref(value), size)


@functools.cache
def _handle(device: torch.device) -> ctypes.c_void_p:
    """cuBLASLt's handle for ``device``, which is created once and never destroyed."""
    handle = _Pointer()
    with torch.cuda.device(device):
        _call("cublasLtCreate", ctypes.byref(handle))
    return handle


@contextmanager
def _described(shape: Shape, bias: int = 0, scales: tuple[int, int] = (0, 0)) -> Iterator[_Arguments]:
    """A context manager that creates cuBLASLt's descriptors of a product, and destroys them at its exit.

    ``bias``: address of the bias, or 0. ``scales``: addresses of the scales of x and weight, or zeros. Each
    call creates new descriptors, so that threads do not share them.
    """
    made: list[tuple[str, ctypes.c_void_p]] = []

    def make(kind: str, *arguments: object) -> ctypes.c_void_p:
        pointer = _Pointer()
        _call(f"cublasLt{kind}Create", ctypes.byref(pointer), *arguments)
        made.append((kind, pointer))
        return pointer

    def layout(rows: int, columns: int, dtype: torch.dtype) -> ctypes.c_void_p:
        sizes = ctypes.c_uint64(rows), ctypes.c_uint64(columns), ctypes.c_int64(rows)
        return make("MatrixLayout", _CUDA_TYPES[dtype], *sizes)

    try:
        operation = make("MatmulDesc", _COMPUTE_FP32, _FP32)
        _set("MatmulDesc", operation, _TRANSPOSE_A, ctypes.c_int32(_TRANSPOSED))
        if shape.has_bias:
            _set("MatmulDesc", operation, _EPILOGUE, ctypes.c_uint32(_ADD_BIAS))
            _set("MatmulDesc", operation, _BIAS_POINTER, _Pointer(bias))
        if shape.is_e4m3:
            _set("MatmulDesc", operation, _A_SCALE_POINTER, _Pointer(scales[1]))
            _set("MatmulDesc", operation, _B_SCALE_POINTER, _Pointer(scales[0]))
            _set("MatmulDesc", operation, _FAST_SUMS, ctypes.c_int8(1))
        for mode in (_A_SCALE_MODE, _B_SCALE_MODE) if shape.has_row_scales else ():
            _set("MatmulDesc", operation, mode, ctypes.c_int32(_SCALES_OF_ROWS))
        dtype = E4M3 if shape.is_e4m3 else shape.dtype
        yield _Arguments(
            operation,
            layout(shape.depth, shape.columns, dtype),
            layout(shape.depth, shape.rows, dtype),
            layout(shape.columns, shape.rows, shape.dtype),
        )
    finally:
        for kind, pointer in made:
            _call(f"cublasLt{kind}Destroy", pointer)


def algorithms(shape: Shape, device: torch.device) -> list[Algorithm]:
    """The algorithms that cuBLASLt recommends for a product on ``device``, its first choice first.

    The list is empty if the library is not found. Raises ``Refused`` if the library fails.
    """
    if _library() is None:
        return []
    found, count = (_Found * _MAX_ALGORITHMS)(), ctypes.c_int()
    preference = _Pointer()
    _call("cublasLtMatmulPreferenceCreate", ctypes.byref(preference))
    try:
        _set("MatmulPreference", preference, _MAX_WORKSPACE, ctypes.c_size_t(_WORKSPACE))
        with _described(shape, scales=(_SOME_ADDRESS, _SOME_ADDRESS)) as given:
            _call(
                "cublasLtMatmulAlgoGetHeuristic",
                _handle(device), *given, given.out, preference, _MAX_ALGORITHMS, found, ctypes.byref(count),
            )  # fmt: skip
    finally:
        _call("cublasLtMatmulPreferenceDestroy", preference)
    return [Algorithm(each.description, each.workspace) for each in found[: count.value] if each.state == 0]


def multiply(
    shape: Shape,
    algorithm: Algorithm,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    scales: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Computes out = x @ weight.T + bias, or out += x @ weight.T + bias if ``shape.adds``.

    The product runs on the current stream.

    Args:
        shape: sizes, dtype and options. The tensors are not checked against it.
        algorithm: one of ``algorithms(shape, device)``.
        x, weight, bias, out: (rows, depth), (columns, depth), (columns,) or None, and (rows, columns),
            contiguous and on the current device. Their addresses must be multiples of 256, because cuBLASLt
            assumes this.
        scales: None, or the fp32 scales of x and weight if ``shape.is_e4m3``. Each is (1,). If
            ``shape.has_row_scales``, they are (rows,) and (columns,).

    Raises ``Refused`` if cuBLASLt cannot run the algorithm.
    """
    with prepared(shape, algorithm, x, weight, bias, out, scales) as launch:
        launch()


@contextmanager
def prepared(
    shape: Shape,
    algorithm: Algorithm,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    scales: tuple[Tensor, Tensor] | None = None,
) -> Iterator[Callable[[], None]]:
    """A context that yields a function for products with the arguments of ``multiply``.

    The function takes little CPU time, because the descriptors of the product were made before. It runs the
    product on the stream that is current when the context begins, and raises ``Refused`` like ``multiply``.
    """
    one, before = ctypes.c_float(1.0), ctypes.c_float(float(shape.adds))
    workspace = out.new_empty(algorithm.workspace, dtype=torch.uint8)
    target = _Pointer(out.data_ptr())
    scale_x, scale_weight = (0, 0) if scales is None else (scales[0].data_ptr(), scales[1].data_ptr())
    with _described(shape, 0 if bias is None else bias.data_ptr(), (scale_x, scale_weight)) as given:
        yield functools.partial(
            _call, "cublasLtMatmul",
            _handle(out.device), given.operation,
            ctypes.byref(one), _Pointer(weight.data_ptr()), given.weight, _Pointer(x.data_ptr()), given.x,
            ctypes.byref(before), target, given.out, target, given.out,
            algorithm.description, _Pointer(workspace.data_ptr()), ctypes.c_size_t(algorithm.workspace),
            _Pointer(gpu.current_stream(out)),
        )  # fmt: skip
