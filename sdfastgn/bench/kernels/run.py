"""Times the operations of a benchmark suite with a hot and a cold L2 cache, if their outputs are right.

An output is right if it is close to the output of the same operation in fp64.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sdfastgn.bench import timing
from sdfastgn.bench.documents import FAILED, OK, UNAVAILABLE, WRONG
from sdfastgn.bench.environment import check_kernels_ran
from sdfastgn.bench.images import relative_error
from sdfastgn.bench.kernels.suite import (
    BACKWARD,
    COPY,
    DIFFERENTIATED,
    FORWARD,
    GRADIENT_BOUNDS,
    TRAINING,
    Call,
    KernelConfig,
    KernelRow,
    Operation,
    Provider,
    Shape,
    Suite,
    shape_text,
)
from sdfastgn.kernels.common.failures import one_line
from sdfastgn.models.architectures import DTYPES

Tensors = tuple[Tensor, ...]

# Maximum number of elements of a shape that is timed on a CPU.
CPU_MAX_ELEMENTS = 2**22
# A time is measured over a round, which is a number of equal calls. All calls of a round together should move
# at most this number of bytes, so that rounds of large shapes are short.
ROUND_BYTES = 2**31
# On a CPU, the number of calls in a round is ``CPU_CALLS``, and the maximum number of rounds is
# ``CPU_REPEATS``. Both are small, because times on a CPU only show that the code runs.
CPU_CALLS = CPU_REPEATS = 3


@dataclass
class _Inputs:
    """The inputs of one call of an operation. The call runs the operation's forward, its backward, or both.

    Attributes:
        operands: the arguments of the forward.
        grads: the gradients of the outputs, if the backward runs.
        recorded: CUDA stream -> (leaves, outputs) of a forward on this stream, from which all timed backwards
            start. Empty unless the backward is timed without its forward.
    """

    operands: Tensors
    grads: Tensors = ()
    recorded: dict[int, tuple[Tensors, Tensors]] = field(default_factory=dict)

    def clone(self) -> _Inputs:
        return _Inputs(tuple(t.clone() for t in self.operands), tuple(t.clone() for t in self.grads))


def _tuple(outputs: Any) -> Tensors:
    return outputs if isinstance(outputs, tuple) else (outputs,)


def _record(call: Call, operands: Tensors) -> tuple[Tensors, Tensors]:
    """Run a forward that autograd records. Returns (leaves, outputs).

    The leaves are new tensors, made from ``operands`` in each call: autograd remembers the stream on which a
    leaf was first used. Leaves of an earlier call on another stream would break the capture of a CUDA graph.
    """
    leaves = tuple(t.detach().requires_grad_() for t in operands)
    with torch.enable_grad():
        return leaves, _tuple(call(*leaves))


def _run(pass_name: str, call: Call, inputs: _Inputs) -> Tensors:
    """Run a forward, a backward, or a forward and its backward, as ``pass_name`` says.

    Returns the outputs of a forward, or the gradients of the operands if the backward runs.
    """
    if pass_name == FORWARD:
        return _tuple(call(*inputs.operands))
    # Autograd runs a backward on the stream of its forward. To capture the backward alone in a CUDA graph,
    # its forward must have run on the stream of the capture. So there is a forward for each stream.
    stream = torch.cuda.current_stream().cuda_stream if inputs.operands[0].is_cuda else 0
    is_backward_alone = pass_name == BACKWARD
    recorded = inputs.recorded.get(stream) if is_backward_alone else None
    leaves, outputs = recorded or _record(call, inputs.operands)
    if pass_name == TRAINING:
        return tuple(output.detach() for output in outputs)
    if is_backward_alone:
        inputs.recorded[stream] = leaves, outputs
    return torch.autograd.grad(outputs, leaves, inputs.grads, retain_graph=is_backward_alone)


def _laid_out(t: Tensor, channels_last: bool) -> Tensor:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return t.contiguous(memory_format=formats[t.dim()]) if channels_last and t.dim() in formats else t


class _Case:
    """One operation on one shape: random operands, random gradients of the outputs, and results in fp64."""

    def __init__(self, operation: Operation, shape: Shape, config: KernelConfig) -> None:
        device, dtype = config.torch_device, DTYPES[config.dtype]
        generator = torch.Generator(device).manual_seed(config.seed)

        def draw(size: Sequence[int]) -> Tensor:
            return torch.randn(tuple(size), generator=generator, device=device)

        self._operation, self._config, self._elements = operation, config, math.prod(shape)
        sizes = operation.sizes(shape)
        self._operands = tuple(
            draw(size).to(torch.float32 if name in operation.full else dtype) for name, size in sizes.items()
        )
        self._operands[0].mul_(1.5).add_(0.5)
        leaves, outputs = _record(operation.reference, tuple(t.double() for t in self._operands))
        self._gradient_names = [f"d{name}" for name in sizes]
        self._truth = {name: out.detach() for name, out in zip(operation.outputs, outputs, strict=True)}
        self._grads: Tensors = ()
        if any(pass_name in DIFFERENTIATED for pass_name in operation.passes):
            self._grads = tuple(draw(output.shape).to(dtype) for output in outputs)
            gradients = torch.autograd.grad(outputs, leaves, tuple(t.double() for t in self._grads))
            self._truth.update(zip(self._gradient_names, gradients, strict=True))
        self._last: tuple[Provider, Call] | None = None

    def _built(self, provider: Provider, operands: Tensors) -> Call:
        # The function of a provider (an implementation) is built once for all passes (forward and backward),
        # because torch.compile takes seconds to build a function.
        if self._last is None or self._last[0] is not provider:
            self._last = provider, provider.build(*operands)
        return self._last[1]

    def _outputs(self, pass_name: str, call: Call, inputs: _Inputs) -> dict[str, Tensor]:
        """Run a pass, such as a backward. Returns name -> tensor for the operation's outputs and gradients.

        The tensors are compared with the results in fp64. Gradients are left out if the pass computes none.
        """
        timed = _run(pass_name, call, inputs)
        names = self._operation.outputs
        if pass_name not in DIFFERENTIATED:
            return dict(zip(names, timed, strict=True))
        outputs = _run(TRAINING, call, inputs)
        return dict(zip((*names, *self._gradient_names), (*outputs, *timed), strict=True))

    def _judge(self, row: KernelRow, outputs: dict[str, Tensor]) -> None:
        """Set the errors of ``row`` against fp64. If one is too large, set status and reason too."""
        errors = {name: relative_error(output, self._truth[name]) for name, output in outputs.items()}
        row.errors = {name: error for name, error in errors.items() if math.isfinite(error)}
        row.error = max(errors.values()) if len(row.errors) == len(errors) else None
        for name, error in errors.items():
            bounds = self._operation.bounds if name in self._operation.outputs else GRADIENT_BOUNDS
            bound = bounds[self._config.dtype]
            # An error of NaN is rejected: ``nan <= bound`` is false, as is ``nan > bound``.
            if row.status == OK and not error <= bound:
                row.status = WRONG
                row.reason = f"relative error of {name} {error:.3g} against fp64 is above {bound:g}"

    def measure(self, row: KernelRow, provider: Provider, pass_name: str, suite: Suite) -> None:
        """Set the errors of ``row`` against fp64. If all are small enough, set the row's times too."""
        device, repeats = self._config.torch_device, self._config.repeats
        operands = tuple(_laid_out(t, provider.channels_last) for t in self._operands)
        call = self._built(provider, operands)
        first = _Inputs(operands)
        if pass_name in DIFFERENTIATED:
            layouts = zip(_run(TRAINING, call, first), self._grads, strict=True)
            first.grads = tuple(torch.empty_like(y).copy_(dy) for y, dy in layouts)
        self._judge(row, self._outputs(pass_name, call, first))
        if row.status != OK:
            return
        if provider.is_ours:
            check_kernels_ran(device)
        moved = self._operation.moved_tensors(pass_name) * self._elements * operands[0].element_size()
        timed = functools.partial(_run, pass_name, call)
        sets, calls, repeats = 2, CPU_CALLS, min(repeats, CPU_REPEATS)
        if device.type == "cuda":
            seconds, _ = timing.time_once(lambda: timed(first), device)
            sets, repeats = timing.cold_sets(moved), self._config.repeats
            calls = calls_a_round(moved, seconds, suite.round_seconds)
        inputs = [first, *(first.clone() for _ in range(sets - 1))]
        row.hot_us, row.cold_us = (
            timing.time_kernel(timed, inputs, device, cold=cold, calls=calls, repeats=repeats)
            for cold in (False, True)
        )
        row.hot_gbps, row.cold_gbps = moved / 1e3 / row.hot_us, moved / 1e3 / row.cold_us
        if device.type == "cuda" and suite.is_inference:
            row.cpu_us = timing.time_host(lambda: call(*operands), device)


def calls_a_round(moved: int, seconds: float, round_seconds: float) -> int:
    """Return the number of calls in a round, between 2 and 100.

    ``moved``: bytes that one call moves. ``seconds``: time of one call. ``round_seconds``: time that a round
    should take at most.
    """
    by_traffic = max(5, min(100, ROUND_BYTES // moved))
    return min(by_traffic, max(2, int(round_seconds / seconds)))


def _unavailable(provider: Provider, shape: Shape, config: KernelConfig) -> str | None:
    """Why ``provider`` (an implementation) cannot be timed on ``shape``, in one line; None if it can."""
    reason = provider.reason(config.torch_device)
    if reason is not None or config.torch_device.type == "cuda":
        return reason
    if not config.wall_clock:
        return "kernel times need an NVIDIA GPU; --device cpu times small shapes on the wall clock"
    elements = math.prod(shape)
    return f"{elements:,} elements are too many for the CPU" if elements > CPU_MAX_ELEMENTS else None


@contextlib.contextmanager
def _measuring(device: torch.device) -> Iterator[None]:
    """A context for all measurements: sets the current device and the global switches, turns autograd off."""
    with timing.device_scope(device), timing.global_switches(), torch.no_grad():
        timing.spin_up(device)
        if device.type != "cuda":
            yield
            return
        # Each capture of a CUDA graph calls ``gc.collect``. ``gc.freeze`` excludes all present objects from
        # it, which saves a third of a second for each capture.
        gc.collect()
        gc.freeze()
        try:
            yield
        finally:
            gc.unfreeze()


def run(
    suite: Suite,
    config: KernelConfig,
    *,
    on_cell: Callable[[str], object] = lambda cell: None,
    on_row: Callable[[KernelRow], object] = lambda row: None,
    on_shape: Callable[[list[KernelRow]], object] = lambda rows: None,
) -> list[KernelRow]:
    """Time every provider of the config in every task of the suite, on every shape of the config.

    A provider is an implementation, and a task is a pass of an operation, such as its backward. A plain copy
    of the first operand (the provider ``COPY``) is always timed too, because each row gets the ratio of its
    time to the copy's time.

    Args:
        on_cell: called before each measurement with a text of shape and provider.
        on_row: called with each row as soon as it is measured. The row has no ratios yet.
        on_shape: called after each shape with the rows of all shapes so far. These rows have ratios.
    """
    rows: list[KernelRow] = []
    with _measuring(config.torch_device):
        for shape in config.shapes:
            case: tuple[Operation, _Case] | None = None  # the operation that is timed now, and its tensors
            first = len(rows)
            for operation, provider, pass_name in suite.cells_of(config.providers):
                on_cell(f"{shape_text(shape)} {provider.name}")
                row = KernelRow(shape, provider.name, OK, task=operation.label(pass_name))
                if (reason := _unavailable(provider, shape, config)) is not None:
                    row.status, row.reason = UNAVAILABLE, reason
                else:
                    try:
                        if case is None or case[0] is not operation:
                            case = None
                            case = operation, _Case(operation, shape, config)
                        case[1].measure(row, provider, pass_name, suite)
                    except Exception as error:  # the run goes on after an error, whose text is in the row
                        row.status, row.reason = FAILED, one_line(error)
                rows.append(row)
                on_row(row)
            case = None
            if config.torch_device.type == "cuda":
                torch.cuda.empty_cache()
            _add_ratios(rows[first:])
            on_shape(rows)
    return rows


def _add_ratios(rows: Sequence[KernelRow]) -> None:
    """Set the ratios of each row: its times divided by a plain copy's times. All rows have the same shape."""
    copy = next((row for row in rows if row.provider == COPY and row.status == OK), None)
    for row in rows:
        if copy is not None and row.hot_us and row.cold_us and copy.hot_us and copy.cold_us:
            row.hot_ratio, row.cold_ratio = row.hot_us / copy.hot_us, row.cold_us / copy.cold_us
