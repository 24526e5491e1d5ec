"""Linear layers' matrix products; within CUDA graphs by whichever algorithm of cuBLASLt is fastest.

PyTorch takes the algorithm that cuBLASLt's model of a GPU puts first, which is up to a third slower than
the best. A rehearsal (``chosen_after``) notes the products of a call and then times, for each, PyTorch's
own and all others that gave the same bits. A graph captured later repeats the fastest. So what a graph
computes is what PyTorch computes, bit for bit.

Only in graphs: the call through ctypes takes the CPU longer than PyTorch's own.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sdfastgn.kernels.common import dispatch, gpu
from sdfastgn.kernels.common.plan_cache import PlanCache
from sdfastgn.kernels.common.private import sleep, switches
from sdfastgn.kernels.product.cublaslt import Algorithm, Refused, Shape, algorithms, multiply

_DTYPES = (torch.float16, torch.bfloat16)
# Rows of x. Products of fewer are a wave of tiles or two, and gained less than the time of choosing.
_FEWEST_ROWS = 1024
# Elements of an output, at most. Larger ones are limited by power, and would need their memory twice.
_MOST_ELEMENTS = 2**26
# Bytes that cuBLASLt assumes each pointer to be a multiple of.
_ALIGNMENT = 256
# Launches that are timed at once, and rounds, of which the fastest counts.
_LAUNCHES, _ROUNDS = 5, 3
# Cycles for which the GPU waits, so that the CPU has enqueued them all: 0.2 ms.
_HEAD_START = 400_000
# Of the best time: slower ones are not timed again.
_NEAR = 1.05
# Of PyTorch's time: a smaller gain may be noise.
_WORTHWHILE = 0.98


class _Kind(NamedTuple):
    """Products that one choice is for. PyTorch's bits depend on its switches."""

    shape: Shape
    device: torch.device
    switches: tuple[object, ...]


# None where PyTorch's own is best.
_chosen: PlanCache[Algorithm | None] = PlanCache()
# Of the thread that rehearses: the products that it has come by, in order.
_noted: contextvars.ContextVar[dict[_Kind, None] | None] = contextvars.ContextVar(
    "sdfastgn_noted_products", default=None
)


def is_choosing() -> bool:
    """True in a rehearsal, and in the capture of a graph: only there ``linear`` is more than PyTorch's."""
    return not torch.compiler.is_compiling() and (
        _noted.get() is not None or (len(_chosen) > 0 and torch.cuda.is_current_stream_capturing())
    )


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``F.linear(x, weight, bias)``: x (..., depth), weight (columns, depth) -> (..., columns)."""
    choice = _choice(x, weight, bias, None)
    if choice is None:
        return F.linear(x, weight, bias)
    out = x.new_empty((*x.shape[:-1], len(weight)))
    multiply(*choice, x, weight, bias, out)
    return out


def add_linear_(total: Tensor, x: Tensor, weight: Tensor) -> None:
    """``total += x @ weight.T`` for total (rows, columns) and x (rows, depth), rounded once."""
    choice = _choice(x, weight, None, total)
    if choice is None:
        total.addmm_(x, weight.t())
    else:
        multiply(*choice, x, weight, None, total)


def _choice(
    x: Tensor, weight: Tensor, bias: Tensor | None, total: Tensor | None
) -> tuple[Shape, Algorithm] | None:
    """What ``multiply`` takes to compute this product; None for PyTorch's own. A rehearsal notes it."""
    kind = _kind_of(x, weight, bias, total) if is_choosing() else None
    if kind is None:
        return None
    noted = _noted.get()
    if noted is not None:
        noted[kind] = None
        return None
    algorithm = _chosen.get(kind)
    return None if algorithm is None else (kind.shape, algorithm)


def _kind_of(x: Tensor, weight: Tensor, bias: Tensor | None, total: Tensor | None) -> _Kind | None:
    """None for what stays with PyTorch, also what it refuses."""
    operands = [t for t in (x, weight, bias, total) if t is not None]
    if weight.dim() != 2 or x.shape[-1:] != weight.shape[1:] or x.numel() == 0:
        return None
    columns, depth = weight.shape
    rows = x.numel() // depth
    fits = (
        dispatch.is_plain_inference(x, (weight, bias, total))
        and x.dtype in _DTYPES
        and all((t.dtype, t.device) == (x.dtype, x.device) for t in operands)
        and all(t.is_contiguous() and t.data_ptr() % _ALIGNMENT == 0 for t in operands)
        and (bias is None or bias.shape == (columns,))
        and (total is None or total.shape == (rows, columns))
        and rows >= _FEWEST_ROWS
        and rows * columns <= _MOST_ELEMENTS
        and gpu.is_current(x.device)
        and not torch.is_autocast_enabled(x.device.type)
    )
    if not fits:
        return None
    shape = Shape(rows, columns, depth, x.dtype, bias is not None, total is not None)
    return _Kind(shape, x.device, tuple(switch() for switch in switches))


@contextmanager
def chosen_after() -> Iterator[None]:
    """Notes the products of the calls inside; at the end times those that this process has not timed yet.

    Of the current device, on its current stream.

    Raises torch.OutOfMemoryError where there is no memory for it; what is left stays PyTorch's.
    """
    noted: dict[_Kind, None] = {}
    token = _noted.set(noted)
    try:
        yield
    finally:
        _noted.reset(token)
    for kind in noted:
        if kind not in _chosen:
            _chosen[kind] = _fastest(kind)


@torch.no_grad()
def _fastest(kind: _Kind) -> Algorithm | None:
    """Of the algorithms with PyTorch's bits the fastest; None if that is PyTorch's own."""
    shape, device = kind.shape, kind.device
    # Not PyTorch's own generator: a user's random numbers stay what they would have been.
    random = partial(
        torch.randn,
        dtype=shape.dtype,
        device=device,
        generator=torch.Generator(device).manual_seed(0),
    )
    x, weight = random(shape.rows, shape.depth), random(shape.columns, shape.depth)
    bias = random(shape.columns) if shape.has_bias else None
    start = random(shape.rows, shape.columns)
    expected, out = start.clone(), start.clone()
    if shape.adds:
        own = partial(out.addmm_, x, weight.t())
        expected.addmm_(x, weight.t())
    else:
        own = partial(F.linear, x, weight, bias)
        expected = F.linear(x, weight, bias)
    ways: list[tuple[Algorithm | None, Callable[[], object]]] = [(None, own)]
    for algorithm in algorithms(shape, device):
        try:
            multiply(shape, algorithm, x, weight, bias, out.copy_(start))
        except Refused:
            continue
        if torch.equal(out, expected):
            ways.append((algorithm, partial(multiply, shape, algorithm, x, weight, bias, out)))
    times = [_microseconds(way) for _, way in ways]
    for _ in range(_ROUNDS - 1):
        # Most are far off at once. PyTorch's own, the first, is what the best is compared with.
        near = [i for i, time in enumerate(times) if i == 0 or time < _NEAR * min(times)]
        for i in near:
            times[i] = min(times[i], _microseconds(ways[i][1]))
    best = times.index(min(times))
    return ways[best][0] if times[best] < _WORTHWHILE * times[0] else None


def _microseconds(way: Callable[[], object]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    sleep(_HEAD_START)
    begin.record()
    for _ in range(_LAUNCHES):
        way()
    end.record()
    end.synchronize()
    return 1e3 * begin.elapsed_time(end) / _LAUNCHES
