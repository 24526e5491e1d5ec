"""Computes several ``act_linear`` of one x by one launch, in a captured CUDA graph.

All ResNet blocks of a UNet project the same time embedding x. Each projection is so small that its launch
takes longer than reading its weight. In a graph, one launch computes them all.

A capture records kernels, but does not run them. So the first call with this x records ``_shared_kernel``,
which reads its work from a *table*: addresses of weights and biases. Each call, also the first, adds its
entries to the table, and gets a part of the kernel's output as its result. After the capture, when all calls
are known, the table is written.

So a later call is computed when the first one would be. This is right if nothing that it reads changes in
between: x was not written since, and weight and biases are constants of the graph. In all other cases the
call launches its own kernel. It also does if its kernel would add up products in another order, so that the
bits of a result are the same either way. On an H200 this concerns x of three rows or more, for weights with
fewer than 1280 rows.

Writes are noticed only if PyTorch counts them (``_version``), which it does not for writes into ``.data``.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Collection, Iterator
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import Tensor

from sdfastgn.kernels.act_linear.config import TileConfig, tile_config
from sdfastgn.kernels.common import dispatch, gpu
from sdfastgn.kernels.common.launch import Launch
from sdfastgn.kernels.common.observers import observers
from sdfastgn.kernels.common.plan_cache import PlanCache
from sdfastgn.kernels.common.setting import setting
from sdfastgn.kernels.common.sizes import vector_width

# Number of columns of a result that one entry of the table describes. A program computes one entry at a time.
_COLUMNS = 8
# Number of elements of an entry.
_ENTRY = 5
# Maximum number of entries of a table. The UNet of SD1.5 needs 2,520 of them.
_MOST_ENTRIES = 4096
# Maximum number of tables of a graph. Each x needs one.
_MOST_TABLES = 2
# Number of programs for each multiprocessor.
_PROGRAMS_PER_SM = 8
# All addresses in a table must be multiples of this number. A thread may load as many bytes at once.
_ALIGNMENT = 16


class Sharing(Protocol):
    """Decides whether calls of ``act_linear`` launch their own kernels."""

    def result(self, call: Any, config: TileConfig) -> Tensor | None:
        """The result of a call of ``act_linear``; None if the call must launch its own kernel.

        ``config``: the configuration of that kernel.
        """


# The ``Sharing`` of this thread; None if all calls launch their own kernels.
current: ContextVar[Sharing | None] = ContextVar("sdfastgn_shared_act_linear", default=None)
# Launches of ``_shared_kernel`` that a capture can use, because their kernels are compiled and loaded.
_ready: PlanCache[tuple[Launch, TileConfig]] = PlanCache()


@contextlib.contextmanager
def rehearsed() -> Iterator[None]:
    """A context for a call of a model. A later capture of this call can share launches."""
    rehearsal = _Rehearsal()
    with setting(current, rehearsal):
        yield
    if _is_recorded():  # then launches only look as if they ran
        return
    for key, (launch, config, x) in rehearsal.launches.items():
        # If the kernel cannot be launched, calls go on launching their own kernels.
        with contextlib.suppress(dispatch.KernelError):
            _launch_idly(launch, x)
            _ready[key] = launch, config


class _Rehearsal:
    """The ``Sharing`` inside ``rehearsed``: it collects the launches that a capture would use."""

    def __init__(self) -> None:
        self.launches: dict[tuple[Any, ...], tuple[Launch, TileConfig, Tensor]] = {}

    def result(self, call: Any, config: TileConfig) -> None:
        x, key = call.x, _key(call)
        if _fits(call) and key not in _ready and key not in self.launches:
            launch, config = _launch(x, call.activation)
            self.launches[key] = launch, config, x
            # In a rehearsal this only compiles the kernel, in parallel with the model's other kernels.
            with contextlib.suppress(dispatch.KernelError):
                _launch_idly(launch, x)


def _key(call: Any) -> tuple[Any, ...]:
    x = call.x
    return x.device, x.shape, x.dtype, call.activation


def _is_recorded() -> bool:
    """True if an observer sees the launches of this thread, for example to make a plan of them."""
    return threading.get_ident() in observers


def _fits(call: Any) -> bool:
    """True if a table can describe ``call``, as it can for the time embeddings of ResNet blocks.

    A call needs two biases. Only ResNet blocks pass two: the second is that of a convolution. Sizes must be
    multiples of ``_COLUMNS``, because results of other sizes might have other bits.
    """
    has_biases = call.bias is not None and call.extra_bias is not None
    is_odd = any(size % _COLUMNS for size in call.weight.shape)
    return has_biases and not is_odd and call.x.data_ptr() % _ALIGNMENT == 0


def _launch(x: Tensor, activation: str) -> tuple[Launch, TileConfig]:
    from sdfastgn.kernels.act_linear import kernels  # imported late: kernels.py needs Triton

    N, K = x.shape
    sms = gpu.num_sms(x.device)
    # With so many columns, ``block_c`` is ``_COLUMNS`` on every GPU.
    config = tile_config(N, _COLUMNS * sms, K, x.itemsize, vector_width(x.itemsize, K), sms)
    launch = Launch(
        kernels._shared_kernel, _PROGRAMS_PER_SM * sms, config.num_warps,
        pdl=gpu.has_programmatic_launch(x.device),
        N=N, ENTRY=_ENTRY, K=K, ACTIVATION=activation, EVEN=config.is_even(K), BLOCK_N=config.block_n,
        BLOCK_C=config.block_c, BLOCK_K=config.block_k, STEPS=config.steps, VECTOR=config.vector,
    )  # fmt: skip
    return launch, config


def _launch_idly(launch: Launch, x: Tensor) -> None:
    """Launch with an empty table, so that nothing is computed."""
    launch.run(x, torch.zeros(1, dtype=torch.int64, device=x.device), x)


class Capture:
    """The ``Sharing`` of the capture of a CUDA graph.

    Make it before the capture begins, because its tables must not be in the memory of the graph, where other
    kernels write. It must live as long as the graph, which reads the tables.

    Args:
        device: the device of the graph.
        constants: addresses of tensors that exist before the capture, and into which captured code does not
            write.
    """

    def __init__(self, device: torch.device, constants: Collection[int]) -> None:
        self._device, self._constants = device, constants
        self._groups: dict[tuple[Any, ...], _Group] = {}
        count = _MOST_TABLES if any(key[0] == device for key in list(_ready)) else 0
        # Each table is a tensor of its own, so that its address is a multiple of ``_ALIGNMENT``.
        size = 1 + _ENTRY * _MOST_ENTRIES
        self._tables = [torch.zeros(size, dtype=torch.int64, device=device) for _ in range(count)]

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """A context for the capture. Its end writes the tables."""
        try:
            with setting(current, self):
                yield
            for group in self._groups.values():
                group.write_table()
            del self._tables[len(self._groups) :]
        finally:
            self._groups, self._constants = {}, ()

    def result(self, call: Any, config: TileConfig) -> Tensor | None:
        x, weight, bias, _, extra_bias = call
        launch, shared_config = _ready.get(_key(call), (None, config))
        operands = weight, bias, extra_bias
        if (
            launch is None
            or not _fits(call)
            or not torch.cuda.is_current_stream_capturing()
            or _is_recorded()
            or x.device != self._device
            or x.is_inference()  # PyTorch does not count writes into it
            or any(operand.dtype is not x.dtype for operand in operands)
            or not all(map(self._is_constant, operands))
            or not _sum_alike(config, shared_config)
        ):
            return None
        key = (*_key(call), id(x), x.data_ptr(), x._version, gpu.current_stream(x))
        group = self._groups.get(key)
        if group is None:
            index = len(self._groups)
            if index == len(self._tables):
                return None
            group = self._groups[key] = _Group(x, launch, self._tables[index])
        return group.add(weight, bias, extra_bias)

    def _is_constant(self, operand: Tensor) -> bool:
        address = operand.data_ptr()
        is_aligned = address % _ALIGNMENT == 0
        return is_aligned and address in self._constants and not operand.is_inference()


def _sum_alike(a: TileConfig, b: TileConfig) -> bool:
    """True if kernels with these configurations add up products in the same order."""
    return (a.block_n, a.block_k, a.num_warps) == (b.block_n, b.block_k, b.num_warps)


class _Group:
    """A launch of ``_shared_kernel``, and the calls that it computes. All of them project ``x`` (N, K)."""

    def __init__(self, x: Tensor, launch: Launch, table: Tensor) -> None:
        self._x = x  # kept alive, so that no other tensor of the capture gets its id or its memory
        self._table = table
        self._entries: list[tuple[int, ...]] = []
        # The output is allocated as a whole before the launch. If a part were allocated later, kernels
        # between might write into the same memory.
        self._y = x.new_empty(len(x) * _COLUMNS * _MOST_ENTRIES)
        launch.run(x, table, self._y)

    def add(self, weight: Tensor, bias: Tensor, extra_bias: Tensor) -> Tensor | None:
        """Let the launch compute one more call, and return its result (N, C). None if the table is full."""
        N, C = len(self._x), len(weight)
        first, count = len(self._entries), C // _COLUMNS
        if first + count > _MOST_ENTRIES:
            return None
        start = N * _COLUMNS * first
        operands = weight, bias, extra_bias
        rows = [(t.data_ptr(), _COLUMNS * t.stride(0) * t.itemsize) for t in operands]
        for i in range(count):
            self._entries.append((*(address + i * step for address, step in rows), start + i * _COLUMNS, C))
        return self._y[start : start + N * C].view(N, C)

    def write_table(self) -> None:
        numbers = [len(self._entries), *(number for entry in self._entries for number in entry)]
        table = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        self._table[: len(numbers)].copy_(table, non_blocking=True)
