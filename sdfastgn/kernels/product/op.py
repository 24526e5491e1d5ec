"""The matrix products of linear layers. In CUDA graphs they use the fastest algorithm of cuBLASLt.

cuBLASLt has several algorithms for a matrix product. PyTorch uses the one that cuBLASLt recommends first, but
the fastest one can take a third less time. sdfastgn finds and uses it in two steps:

- In a *rehearsal* (``chosen_after``) a model is called once, and the shapes of its products are recorded.
  After the call, each product is timed in PyTorch and with the algorithms that give the same bits as PyTorch.
- When a graph is captured later, each product uses its fastest algorithm. So a graph computes exactly the
  same bits as PyTorch. The only exceptions are sums with a product in E4M3 (``add_linear_e4m3_``)
  and products with a scale for each row (``linear_of_rows``).

Outside of graphs PyTorch's own products run, because a call through ctypes takes more CPU time.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sdfastgn.kernels.common import dispatch, gpu, private
from sdfastgn.kernels.common.e4m3 import E4M3
from sdfastgn.kernels.common.plan_cache import PlanCache
from sdfastgn.kernels.common.private import sleep, switches
from sdfastgn.kernels.common.setting import setting
from sdfastgn.kernels.product.cublaslt import Algorithm, Refused, Shape, algorithms, multiply, prepared
from sdfastgn.kernels.product.e4m3 import row_scaled_product, scaled_product

# An algorithm is chosen only for products in these dtypes and in E4M3. PyTorch computes all others.
_DTYPES = (torch.float16, torch.bfloat16)
# Minimum number of rows of x. For fewer rows, choosing an algorithm takes more time than the algorithm saves.
_FEWEST_ROWS = 1024
# Maximum number of elements of the output. For larger products no algorithm is chosen: their speed is limited
# by the GPU's power, so other algorithms are hardly faster. Also, timing needs memory for further outputs.
_MOST_ELEMENTS = 2**26
# The addresses of all operands must be multiples of this number, because cuBLASLt assumes this. Otherwise
# PyTorch computes the product.
_ALIGNMENT = 256
# Maximum number of algorithms that are tried for a product in fp16 or bf16, in the order in which cuBLASLt
# recommends them. It recommends eight. With five, the products of a step were as fast as with eight for SD1.5
# and SDXL at their usual sizes (H200), and loading the algorithms took half the time.
_MOST_TRIED = 5
# Number of launches of an algorithm in each round of timing. Their mean time is the result of the round.
_LAUNCHES = 5
# Maximum number of rounds of timing of an algorithm. The algorithm's time is the time of its fastest round.
_ROUNDS = 3
# Number of clock cycles (0.1 ms) that the GPU sleeps before each round. Meanwhile the CPU queues the launches
# of the round, so that the GPU then runs them without gaps. If the CPU takes longer, the round is repeated
# with twice the sleep, at most up to ``_LONGEST_HEAD_START``.
_HEAD_START = 200_000
_LONGEST_HEAD_START = 16 * _HEAD_START
# Algorithms that take longer than this multiple of the best time in the first round are not timed again.
_NEAR = 1.05
# Two results whose bits may differ (``_ways_of_e4m3``) count as near if their relative distance is smaller
# than this.
_NEAR_RESULT = 0.01
# An algorithm is only chosen if it takes less than this fraction of PyTorch's time. A smaller gain may be
# noise.
_WORTHWHILE = 0.98


class _Kind(NamedTuple):
    """The properties of a product on which its fastest algorithm depends: the key of the dict ``_chosen``.

    ``switches``: settings of PyTorch that can change the bits of a product's result.
    """

    shape: Shape
    device: torch.device
    switches: tuple[object, ...]


# Maps the ``_Kind`` of a product to its fastest algorithm of cuBLASLt, or to None if PyTorch's own algorithm
# is the fastest.
_chosen: PlanCache[Algorithm | None] = PlanCache()
# Inside the context ``chosen_after`` in this thread: a dict whose keys are the ``_Kind`` of each product that
# was recorded so far. Otherwise None.
_noted: contextvars.ContextVar[dict[_Kind, None] | None] = contextvars.ContextVar(
    "sdfastgn_noted_products", default=None
)


def is_choosing() -> bool:
    """True inside ``chosen_after``, and while a CUDA graph is captured after that context timed products.

    If the result is False, the functions of this file only call PyTorch's products.
    """
    return not torch.compiler.is_dynamo_compiling() and (
        _noted.get() is not None or (len(_chosen) > 0 and torch.cuda.is_current_stream_capturing())
    )


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Computes ``F.linear(x, weight, bias)``.

    In CUDA graphs it uses the fastest algorithm, which ``chosen_after`` has found before the capture.

    Args:
        x: (..., depth).
        weight: (columns, depth).
        bias: (columns,) or None.

    Returns (..., columns). Dtypes, layouts, gradients and errors: as in ``F.linear``.
    """
    choice = _choice(x, weight, bias, None) if is_choosing() else None
    if choice is None:
        return private.linear(x, weight, bias)
    out = x.new_empty((*x.shape[:-1], len(weight)))
    multiply(*choice, x, weight, bias, out)
    return out


def add_linear_(total: Tensor, x: Tensor, weight: Tensor) -> None:
    """Computes ``total += x @ weight.T``, rounded once.

    In CUDA graphs it uses the fastest algorithm, which ``chosen_after`` has found before the capture.

    Args:
        total: (rows, columns), changed in place.
        x: (rows, depth).
        weight: (columns, depth).

    Dtypes, layouts and errors: as in ``Tensor.addmm_``.
    """
    choice = _choice(x, weight, None, total) if is_choosing() else None
    if choice is None:
        total.addmm_(x, weight.t())
    else:
        multiply(*choice, x, weight, None, total)


def linear_e4m3(x: Tensor, weight: Tensor, scales: tuple[Tensor, Tensor], dtype: torch.dtype) -> Tensor:
    """Computes ``(scales[0] * x) @ (scales[1] * weight).T`` for x (..., depth) and weight (columns, depth).

    In CUDA graphs it uses the fastest algorithm, which ``chosen_after`` has found before the capture.

    Returns (..., columns). The other arguments are as in ``scaled_product``, and so are the dtypes.
    """
    rows = x.view(-1, x.shape[-1])
    choice = _choice_of_e4m3(rows, weight, dtype, None) if is_choosing() else None
    if choice is None:
        out = scaled_product(rows, weight, scales, dtype)
    else:
        out = torch.empty((len(rows), len(weight)), dtype=dtype, device=x.device)
        multiply(*choice, rows, weight, None, out, scales)
    return out.view(*x.shape[:-1], len(weight))


def linear_of_rows(
    x: Tensor, weight: Tensor, scales: tuple[Tensor, Tensor], bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Computes ``row_scaled_product`` for x (..., depth) and one scale for each row, ``scales[0]`` (...).

    In CUDA graphs it uses the fastest algorithm, which ``chosen_after`` has found before the capture.

    Returns (..., columns). The other arguments are as in ``row_scaled_product``.
    """
    rows, scales = x.view(-1, x.shape[-1]), (scales[0].view(-1), scales[1])
    choice = _choice_of_e4m3(rows, weight, dtype, None, bias, scales) if is_choosing() else None
    if choice is None:
        out = row_scaled_product(rows, weight, scales, bias, dtype)
    else:
        out = torch.empty((len(rows), len(weight)), dtype=dtype, device=x.device)
        multiply(*choice, rows, weight, bias, out, scales)
    return out.view(*x.shape[:-1], len(weight))


def add_linear_e4m3_(total: Tensor, x: Tensor, weight: Tensor, scales: tuple[Tensor, Tensor]) -> None:
    """Computes ``total += (scales[0] * x) @ (scales[1] * weight).T``.

    In CUDA graphs it uses the fastest algorithm, which ``chosen_after`` has found before the capture, and
    which rounds the result once. Otherwise the product is rounded before it is added.

    Args:
        total: (rows, columns), fp16 or bf16, contiguous, changed in place.
        x, weight, scales: as in ``scaled_product``.
    """
    choice = _choice_of_e4m3(x, weight, total.dtype, total) if is_choosing() else None
    if choice is None:
        _add_product_(total, (x, weight, scales))
    else:
        multiply(*choice, x, weight, None, total, scales)


def _choice(
    x: Tensor, weight: Tensor, bias: Tensor | None, total: Tensor | None
) -> tuple[Shape, Algorithm] | None:
    """Returns the arguments (shape, algorithm) of ``cublaslt.multiply``, or None if PyTorch must multiply.

    Call it only if ``is_choosing()``. Inside the context ``chosen_after`` it records the product and returns
    None. The algorithms of recorded products are timed at the end of the context.
    """
    kind = _kind_of(x, weight, bias, total)
    return None if kind is None else _choice_for(kind)


def _choice_of_e4m3(
    x: Tensor,
    weight: Tensor,
    dtype: torch.dtype,
    total: Tensor | None,
    bias: Tensor | None = None,
    row_scales: Sequence[Tensor] = (),
) -> tuple[Shape, Algorithm] | None:
    """Returns the arguments (shape, algorithm) of ``cublaslt.multiply`` for a product of E4M3 tensors.

    Returns None if PyTorch must multiply. ``row_scales``: the scales, if each row has one.
    """
    (rows, depth), columns = x.shape, len(weight)
    operands = [t for t in (x, weight, total, bias, *row_scales) if t is not None]
    fits = (
        _FEWEST_ROWS <= rows <= _MOST_ELEMENTS // columns
        and all(t.is_contiguous() and t.data_ptr() % _ALIGNMENT == 0 for t in operands)
        and gpu.is_current(x.device)
    )
    has = bias is not None, total is not None, True, bool(row_scales)
    shape = Shape(rows, columns, depth, dtype, *has)
    return _choice_for(_Kind(shape, x.device, ())) if fits else None


def _choice_for(kind: _Kind) -> tuple[Shape, Algorithm] | None:
    noted = _noted.get()
    if noted is not None:
        noted[kind] = None
        return None
    algorithm = _chosen.get(kind)
    return None if algorithm is None else (kind.shape, algorithm)


def _kind_of(x: Tensor, weight: Tensor, bias: Tensor | None, total: Tensor | None) -> _Kind | None:
    """The key of a product in ``_chosen`` (the fastest algorithms), or None if PyTorch must compute it.

    For example, PyTorch computes products in fp32, products with gradients, and products that are too small
    or too large to gain from another algorithm. It also gets invalid arguments, and raises its usual error.
    """
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
    """A context for a call of a model before a CUDA graph is captured. Finds the fastest algorithms.

    It records the products that the functions of this file compute on the current device. At its end it times
    the algorithms of each product, on the current stream, and remembers the fastest. Products that were timed
    before in this process are not timed again.

    Raises:
        torch.OutOfMemoryError: there is no memory for timing. Products that were not timed yet will be
            computed by PyTorch.
    """
    noted: dict[_Kind, None] = {}
    with setting(_noted, noted):
        yield
    for kind in noted:
        if kind not in _chosen:
            _chosen[kind] = _fastest(kind)


@torch.no_grad()
def load_algorithms() -> None:
    """Load the code of the algorithms that ``chosen_after`` will time at its end.

    Call it at the end of that context, while other threads compile kernels. The GPU's driver loads the code
    of an algorithm when the algorithm first runs. This takes longer than timing all algorithms. Algorithms
    cannot be timed while kernels are compiled, because launches that come late would count as slow.
    """
    for kind in _noted.get() or ():
        if kind not in _chosen:
            # ``chosen_after`` raises these errors again.
            with suppress(torch.OutOfMemoryError, Refused), ExitStack() as launches:
                _ways_of(kind, launches)


# An algorithm, or None for the one that PyTorch uses, and a function that computes the product with it.
_Way = tuple[Algorithm | None, Callable[[], object]]


@torch.no_grad()
def _fastest(kind: _Kind) -> Algorithm | None:
    """Times the algorithms that ``_ways_of`` finds, and returns the fastest.

    Returns None if no algorithm is clearly faster than the one that PyTorch uses (``_WORTHWHILE``).
    """
    with ExitStack() as launches:
        ways = _ways_of(kind, launches)
        times = [_microseconds(way) for _, way in ways]
        for _ in range(_ROUNDS - 1):
            # Further rounds time only PyTorch (index 0) and the algorithms whose times are close to the best
            # time.
            near = [i for i, time in enumerate(times) if i == 0 or time < _NEAR * min(times)]
            for i in near:
                times[i] = min(times[i], _microseconds(ways[i][1]))
    best = times.index(min(times))
    return ways[best][0] if times[best] < _WORTHWHILE * times[0] else None


def _ways_of(kind: _Kind, launches: ExitStack) -> list[_Way]:
    """The algorithms for a product, each with a function that runs it. The first is PyTorch's.

    Each algorithm runs once in this function, which loads its code onto the GPU. The functions work until
    ``launches`` is closed, to which the context of each of them is added.
    """
    return _ways_of_e4m3(kind, launches) if kind.shape.is_e4m3 else _ways(kind, launches)


def _random(kind: _Kind) -> Callable[..., Tensor]:
    """Returns a function that makes random tensors: sizes -> tensor."""
    # The random numbers come from a separate generator, so that the user's random numbers do not change.
    generator = torch.Generator(kind.device).manual_seed(0)
    return partial(torch.randn, dtype=kind.shape.dtype, device=kind.device, generator=generator)


def _ways(kind: _Kind, launches: ExitStack) -> list[_Way]:
    """The algorithms for a product of fp16 or bf16 tensors, each with a function that runs it."""
    shape, device = kind.shape, kind.device
    random = _random(kind)
    x, weight = random(shape.rows, shape.depth), random(shape.columns, shape.depth)
    bias = random(shape.columns) if shape.has_bias else None
    start = random(shape.rows, shape.columns)
    expected, out = start.clone(), start.clone()
    if shape.adds:
        own = partial(out.addmm_, x, weight.t())
        expected.addmm_(x, weight.t())
    else:
        own = partial(private.linear, x, weight, bias)
        expected = private.linear(x, weight, bias)
    ways: list[_Way] = [(None, own)]
    for algorithm in algorithms(shape, device)[:_MOST_TRIED]:
        out.copy_(start)
        try:
            launch = launches.enter_context(prepared(shape, algorithm, x, weight, bias, out))
            launch()
        except Refused:
            continue
        if torch.equal(out, expected):
            ways.append((algorithm, launch))
    return ways


def _ways_of_e4m3(kind: _Kind, launches: ExitStack) -> list[_Way]:
    """The algorithms for a product of E4M3 tensors, each with a function that runs it.

    An algorithm of cuBLASLt may give other bits than PyTorch, for two reasons. To add a product to a tensor,
    PyTorch rounds the product and then the sum, and an algorithm rounds only the sum. With a scale for each
    row, PyTorch may have a kernel of its own. So the first algorithm whose result is near PyTorch's decides
    which bits the other algorithms must give.
    """
    shape, device = kind.shape, kind.device
    random = _random(kind)
    x, weight = random(shape.rows, shape.depth).to(E4M3), random(shape.columns, shape.depth).to(E4M3)
    start = random(shape.rows, shape.columns)
    bias = random(shape.columns) if shape.has_bias else None
    # The scales of rows differ, so that the result of an algorithm that uses one scale for all rows is far
    # from PyTorch's.
    sizes = (shape.rows, shape.columns) if shape.has_row_scales else (1, 1)
    scales: Any = tuple(torch.arange(size, dtype=torch.float32, device=device) % 7 + 1 for size in sizes)
    operands = x, weight, scales
    own: Callable[[], Any] = partial(scaled_product, *operands, shape.dtype)
    if shape.has_row_scales:
        own = partial(row_scaled_product, *operands, bias, shape.dtype)
    expected, out = own(), start.clone()
    if shape.adds:
        expected.add_(start)
        own = partial(_add_product_, out, operands)
    ways: list[_Way] = [(None, own)]
    try:
        found = algorithms(shape, device)
    except Refused:
        # cuBLASLt refuses some products of E4M3 tensors, or their addition to a tensor. PyTorch then computes
        # them.
        found = []
    for algorithm in found:
        out.copy_(start)
        try:
            launch = launches.enter_context(prepared(shape, algorithm, x, weight, bias, out, scales))
            launch()
        except Refused:
            continue
        may_differ = shape.adds or shape.has_row_scales
        if may_differ and len(ways) == 1 and _distance(out, expected) < _NEAR_RESULT:
            expected = out.clone()
        if torch.equal(out, expected):
            ways.append((algorithm, launch))
    return ways


def _add_product_(total: Tensor, operands: tuple[Tensor, Tensor, tuple[Tensor, Tensor]]) -> None:
    total.add_(scaled_product(*operands, total.dtype))


def _distance(a: Tensor, b: Tensor) -> float:
    return ((a.float() - b.float()).norm() / b.float().norm()).item()


def _microseconds(way: Callable[[], object]) -> float:
    """Measures the GPU time of ``way()`` in microseconds, as the mean of ``_LAUNCHES`` calls."""
    head_start = _HEAD_START
    while True:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        sleep(head_start)
        begin.record()
        for _ in range(_LAUNCHES):
            way()
        end.record()
        # If the GPU's sleep is over before all launches are queued, the GPU may have waited for launches.
        is_late = begin.query()
        end.synchronize()
        if not is_late or head_start >= _LONGEST_HEAD_START:
            return 1e3 * begin.elapsed_time(end) / _LAUNCHES
        head_start *= 2
