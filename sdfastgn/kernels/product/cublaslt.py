"""Matrix products by cuBLASLt, with the algorithm given: the C library that PyTorch has loaded, by ctypes.

cuBLASLt is column-major: a row-major (rows, columns) matrix is to it one of (columns, rows). So
``out = x @ weight.T`` is asked for as ``out.T = weight @ x.T``.

Names and numbers are those of ``cublasLt.h``, the same since CUDA 11.

Source: NVIDIA, cuBLAS documentation, "Using the cuBLASLt API".
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sdfastgn.kernels.common import gpu

_CUDA_TYPES = {torch.float16: 2, torch.bfloat16: 14}  # CUDA_R_16F, CUDA_R_16BF
_FP32 = 0  # CUDA_R_32F, of the numbers that the product is scaled by
_COMPUTE_FP32 = 68  # CUBLAS_COMPUTE_32F
# cublasLtMatmulDescAttributes_t
_TRANSPOSE_A, _EPILOGUE, _BIAS_POINTER = 3, 7, 8
_TRANSPOSED, _ADD_BIAS = 1, 4
_MAX_WORKSPACE = 1  # cublasLtMatmulPreferenceAttributes_t
# Bytes: enough for a counter of tiles, not for the partial sums of a product split along its depth.
_WORKSPACE = 4096
# Algorithms that are asked for. An H200's library knows eight of a product.
_MAX_ALGORITHMS = 16

_Pointer = ctypes.c_void_p


class Shape(NamedTuple):
    """x (rows, depth) times the transpose of weight (columns, depth), contiguous, and what is added."""

    rows: int
    columns: int
    depth: int
    dtype: torch.dtype
    has_bias: bool
    adds: bool  # to what is in the output


class Algorithm(NamedTuple):
    """How a product is computed: cuBLASLt's own description, and the bytes of memory that it needs."""

    description: ctypes.Array[ctypes.c_uint64]
    workspace: int


class Refused(Exception):  # noqa: N818  # of one algorithm: another may do
    """A call that cuBLASLt does not make; the message has its status."""


class _Found(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t"""

    _fields_ = (
        ("description", ctypes.c_uint64 * 8),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


class _Arguments(NamedTuple):
    """What cuBLASLt knows of a product besides the addresses: the operation, and the matrices' layouts."""

    operation: ctypes.c_void_p
    weight: ctypes.c_void_p
    x: ctypes.c_void_p
    out: ctypes.c_void_p


@functools.cache
def _library() -> ctypes.CDLL | None:
    """The library of the CUDA that PyTorch was built for; None where there is none, as on Windows."""
    if torch.version.cuda is None:
        return None
    try:
        return ctypes.CDLL(f"libcublasLt.so.{torch.version.cuda.partition('.')[0]}")
    except OSError:
        return None


def _call(name: str, *arguments: object) -> None:
    status = getattr(_library(), name)(*arguments)
    if status != 0:
        raise Refused(f"sdfastgn: {name} returned {status}")


def _set(kind: str, of: ctypes.c_void_p, attribute: int, value: Any) -> None:
    size = ctypes.c_size_t(ctypes.sizeof(value))
    _call(f"cublasLt{kind}SetAttribute", of, attribute, ctypes.byref(value), size)


@functools.cache
def _handle(device: torch.device) -> ctypes.c_void_p:
    handle = _Pointer()
    with torch.cuda.device(device):
        _call("cublasLtCreate", ctypes.byref(handle))
    return handle


@contextmanager
def _described(shape: Shape, bias: int = 0) -> Iterator[_Arguments]:
    """The arguments of a product; bias: its address. Its own in each call: threads share nothing."""
    made: list[tuple[str, ctypes.c_void_p]] = []

    def make(kind: str, *arguments: object) -> ctypes.c_void_p:
        pointer = _Pointer()
        _call(f"cublasLt{kind}Create", ctypes.byref(pointer), *arguments)
        made.append((kind, pointer))
        return pointer

    def layout(rows: int, columns: int) -> ctypes.c_void_p:
        sizes = ctypes.c_uint64(rows), ctypes.c_uint64(columns), ctypes.c_int64(rows)
        return make("MatrixLayout", _CUDA_TYPES[shape.dtype], *sizes)

    try:
        operation = make("MatmulDesc", _COMPUTE_FP32, _FP32)
        _set("MatmulDesc", operation, _TRANSPOSE_A, ctypes.c_int32(_TRANSPOSED))
        if shape.has_bias:
            _set("MatmulDesc", operation, _EPILOGUE, ctypes.c_uint32(_ADD_BIAS))
            _set("MatmulDesc", operation, _BIAS_POINTER, _Pointer(bias))
        yield _Arguments(
            operation,
            layout(shape.depth, shape.columns),
            layout(shape.depth, shape.rows),
            layout(shape.columns, shape.rows),
        )
    finally:
        for kind, pointer in made:
            _call(f"cublasLt{kind}Destroy", pointer)


def algorithms(shape: Shape, device: torch.device) -> list[Algorithm]:
    """Those that cuBLASLt recommends, best first; none where there is no cuBLASLt."""
    if _library() is None:
        return []
    found, count = (_Found * _MAX_ALGORITHMS)(), ctypes.c_int()
    preference = _Pointer()
    _call("cublasLtMatmulPreferenceCreate", ctypes.byref(preference))
    try:
        _set("MatmulPreference", preference, _MAX_WORKSPACE, ctypes.c_size_t(_WORKSPACE))
        with _described(shape) as given:
            _call(
                "cublasLtMatmulAlgoGetHeuristic",
                _handle(device), *given, given.out, preference, _MAX_ALGORITHMS, found, ctypes.byref(count),
            )  # fmt: skip
    finally:
        _call("cublasLtMatmulPreferenceDestroy", preference)
    return [Algorithm(each.description, each.workspace) for each in found[: count.value] if each.state == 0]


def multiply(
    shape: Shape, algorithm: Algorithm, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor
) -> None:
    """out = x @ weight.T + bias (+ out, if ``shape`` says so), on the current stream of their device.

    That device has to be the current one. Pointers must be multiples of 256, as cuBLASLt assumes.

    Raises Refused.
    """
    one, before = ctypes.c_float(1.0), ctypes.c_float(float(shape.adds))
    workspace = out.new_empty(algorithm.workspace, dtype=torch.uint8)
    target = _Pointer(out.data_ptr())
    with _described(shape, 0 if bias is None else bias.data_ptr()) as given:
        _call(
            "cublasLtMatmul",
            _handle(out.device), given.operation,
            ctypes.byref(one), _Pointer(weight.data_ptr()), given.weight, _Pointer(x.data_ptr()), given.x,
            ctypes.byref(before), target, given.out, target, given.out,
            algorithm.description, _Pointer(workspace.data_ptr()), ctypes.c_size_t(algorithm.workspace),
            _Pointer(gpu.current_stream(out.device)),
        )  # fmt: skip
