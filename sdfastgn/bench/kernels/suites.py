"""Suites of the kernel table besides inference: operations x passes x providers on shapes, one row for each.

An *operation* is a function of tensors with an fp64 truth; a *pass* is what is timed of it: the forward, the backward, both. The
suites themselves, one registry entry per provider, are in ``norm_suites.py``. How one cell is checked and timed is in ``cells.py``.

GB/s and the ideal ratio to the copy count the tensors of x's size that a pass has to move: a forward two (x, y), a backward three
(x, dy, dx), both together five.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from sdfastgn.bench import timing
from sdfastgn.bench.documents import OK
from sdfastgn.bench.kernels import cells
from sdfastgn.bench.kernels.cells import KernelConfig, KernelRow, Shape, Work, geometric_mean, shape_text
from sdfastgn.bench.kernels.providers import COPY, YARDSTICK, Call, Provider
from sdfastgn.bench.kernels.run import ERROR_BOUNDS
from sdfastgn.bench.models.workload import DTYPES

# The forward without and with autograd recording it: an implementation may save more, or take another way, in training.
FORWARD, TRAINING, BACKWARD, BOTH = "forward", "forward in training", "backward", "forward + backward"
DIFFERENTIATED = (BACKWARD, BOTH)

# Gradients see two roundings more than outputs: eager keeps mean, rstd and the activation's argument in the input's dtype. Those of
# weight and bias are sums of up to 10^7 terms in fp32.
GRADIENT_BOUNDS = {"fp16": 1e-2, "bf16": 8e-2, "fp32": 1e-3}

Tensors = tuple[Tensor, ...]


@dataclass(frozen=True)
class Operation:
    """What providers of one task compute.

    Attributes:
        task: the ``task`` of its providers, and what a row's task begins with unless it is empty.
        sizes: of the operands by name, in the order in which a call takes them, for a shape of the suite. The first is x.
        reference: the same in plain PyTorch, for operands of any dtype.
        passes: what is timed of it.
        outputs: names of what it returns.
        tensors: of x's size that a forward has to move.
        bounds: largest relative error of an output by dtype.
    """

    task: str
    sizes: Callable[[Shape], dict[str, tuple[int, ...]]]
    reference: Call
    passes: tuple[str, ...]
    outputs: tuple[str, ...] = ("y",)
    tensors: int = 2
    bounds: Mapping[str, float] = field(default_factory=lambda: ERROR_BOUNDS)

    def label(self, what: str) -> str:
        """A row's task: the pass, after the operation's own name where it has one. A copy is a copy."""
        if self.task == COPY:
            return COPY
        return f"{self.task}, {what}" if self.task else what

    def moved_tensors(self, what: str) -> int:
        return {BACKWARD: 3, BOTH: self.tensors + 3}.get(what, self.tensors)


@dataclass(frozen=True)
class Suite:
    """A table of its own: ``sdfastgn kernels --suite NAME``.

    Attributes:
        title: above the table.
        axes: of a shape, as ``"N x C x H x W"``.
        shape_sets: names that ``--shapes`` knows, ``all`` among them.
        fits: whether a shape with the right number of axes can be run.
        rule: what ``fits`` asks for, in words; empty where every shape can be run.
        operations: the first is the copy.
        providers: one entry for each operation and implementation.
        ours: names of this package's providers.
        baseline: the provider that speed-ups are over.
        dtype: where the user names none.
    """

    name: str
    title: str
    axes: str
    shape_sets: dict[str, tuple[Shape, ...]]
    operations: tuple[Operation, ...]
    providers: tuple[Provider, ...]
    ours: tuple[str, ...]
    baseline: str
    dtype: str = "fp16"
    fits: Callable[[Shape], bool] = lambda shape: True
    rule: str = ""

    @property
    def kind(self) -> str:
        """Of the JSON of a run."""
        return f"kernels_{self.name}"

    @property
    def provider_names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(provider.name for provider in self.providers))

    @property
    def peers(self) -> tuple[str, ...]:
        return tuple(name for name in self.provider_names if name not in (YARDSTICK, *self.ours))

    @property
    def ideals(self) -> dict[str, float]:
        """Least ratio to the copy by task, where the memory is the limit."""
        return {
            operation.label(what): operation.moved_tensors(what) / 2
            for operation in self.operations
            for what in operation.passes
            if operation.task != COPY
        }

    def gate(self, dtype: str) -> str:
        """The largest errors that are let through, in words."""
        others = [
            f"of {op.task} {op.bounds[dtype]:g}" for op in self.operations if op.bounds is not ERROR_BOUNDS
        ]
        return ", ".join([f"{ERROR_BOUNDS[dtype]:g}", *others, f"of gradients {GRADIENT_BOUNDS[dtype]:g}"])

    def cells_of(self, names: Iterable[str]) -> list[tuple[Operation, Provider, str]]:
        """What is measured on each shape: operation, provider and pass. The copy comes first, also where it is not named."""
        chosen = {YARDSTICK, *names}
        return [
            (operation, provider, what)
            for operation in self.operations
            for provider in self.providers
            if provider.task == operation.task and provider.name in chosen
            for what in operation.passes
        ]


@dataclass(frozen=True)
class SuiteConfig(KernelConfig):
    """A :class:`KernelConfig` of the suite with this name. It has many cells, so that each gets less time."""

    suite: str = ""

    round_seconds: ClassVar[float] = 0.02


@dataclass
class SuiteRow(KernelRow):
    """A :class:`KernelRow` of one task. ``error`` is the largest of ``errors``, which has one for each output and gradient."""

    task: str = ""
    errors: dict[str, float] = field(default_factory=dict)

    def judge(self, errors: dict[str, float]) -> None:
        super().judge(errors)
        self.errors = {name: error for name, error in errors.items() if math.isfinite(error)}


# ---- one cell


@dataclass
class _Inputs:
    """What one call gets. ``recorded``: leaves and outputs of forwards whose backwards are timed alone, by CUDA stream."""

    operands: Tensors
    grads: Tensors = ()
    recorded: dict[int, tuple[Tensors, Tensors]] = field(default_factory=dict)

    def clone(self) -> _Inputs:
        operands, grads = (tuple(t.clone() for t in tensors) for tensors in (self.operands, self.grads))
        return _Inputs(operands, grads)


def _tuple(outputs: Any) -> Tensors:
    return outputs if isinstance(outputs, tuple) else (outputs,)


def _record(call: Call, operands: Tensors) -> tuple[Tensors, Tensors]:
    """Leaves and outputs of a forward that autograd records.

    The leaves are new at each call: autograd remembers the stream on which a leaf was first used, and a leaf of the warm-up, on
    another stream, would break the capture of a CUDA graph.
    """
    leaves = tuple(t.detach().requires_grad_() for t in operands)
    with torch.enable_grad():
        return leaves, _tuple(call(*leaves))


def _gradients(call: Call, inputs: _Inputs) -> Tensors:
    leaves, outputs = _record(call, inputs.operands)
    return torch.autograd.grad(outputs, leaves, inputs.grads)


def _backward(call: Call, inputs: _Inputs) -> Tensors:
    # A backward runs on the stream of its forward, so that the capture needs one recorded on the capturing stream: the warm-up's.
    stream = torch.cuda.current_stream().cuda_stream if inputs.operands[0].is_cuda else 0
    if stream not in inputs.recorded:
        inputs.recorded[stream] = _record(call, inputs.operands)
    leaves, outputs = inputs.recorded[stream]
    return torch.autograd.grad(outputs, leaves, inputs.grads, retain_graph=True)


def _forward(call: Call, inputs: _Inputs) -> Tensors:
    return _tuple(call(*inputs.operands))


def _training_forward(call: Call, inputs: _Inputs) -> Tensors:
    return tuple(output.detach() for output in _record(call, inputs.operands)[1])


_CALLS: dict[str, Callable[[Call, _Inputs], Tensors]] = {
    FORWARD: _forward,
    TRAINING: _training_forward,
    BACKWARD: _backward,
    BOTH: _gradients,
}


def _laid_out(t: Tensor, channels_last: bool) -> Tensor:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return t.contiguous(memory_format=formats.get(t.dim(), torch.contiguous_format)) if channels_last else t


class _Case:
    """One operation on one shape: operands, gradients of the outputs, and the fp64 truth of outputs and gradients."""

    def __init__(self, operation: Operation, shape: Shape, config: KernelConfig) -> None:
        device, dtype = config.torch_device, DTYPES[config.dtype]
        generator = torch.Generator(device).manual_seed(config.seed)

        def draw(size: Sequence[int]) -> Tensor:
            return torch.randn(tuple(size), generator=generator, device=device)

        self.operation, self.dtype = operation, config.dtype
        self._sizes = operation.sizes(shape)
        self._operands = tuple(draw(size).to(dtype) for size in self._sizes.values())
        self._operands[0].mul_(1.5).add_(0.5)
        leaves, outputs = _record(operation.reference, tuple(t.double() for t in self._operands))
        self.truth = {name: output.detach() for name, output in zip(operation.outputs, outputs, strict=True)}
        self._grads: Tensors = ()
        if any(what in DIFFERENTIATED for what in operation.passes):
            self._grads = tuple(draw(output.shape).to(dtype) for output in outputs)
            gradients = torch.autograd.grad(outputs, leaves, tuple(t.double() for t in self._grads))
            self.truth.update(zip(self._gradient_names(), gradients, strict=True))
        self._built: tuple[Provider, Call] | None = None

    def _gradient_names(self) -> list[str]:
        return [f"d{name}" for name in self._sizes]

    def _call(self, provider: Provider, operands: Tensors) -> Call:
        # All passes of one provider share one: compiling takes seconds.
        if self._built is None or self._built[0] is not provider:
            self._built = provider, provider.build(*operands)
        return self._built[1]

    def _outputs(self, what: str, call: Call, inputs: _Inputs) -> dict[str, Tensor]:
        """What ``what`` is judged by: its outputs, and its gradients if it has any."""
        timed = _CALLS[what](call, inputs)
        if what not in DIFFERENTIATED:
            return dict(zip(self.operation.outputs, timed, strict=True))
        outputs = _training_forward(call, inputs)
        names = (*self.operation.outputs, *self._gradient_names())
        return dict(zip(names, (*outputs, *timed), strict=True))

    def work(self, provider: Provider, what: str) -> Work:
        operands = tuple(_laid_out(t, provider.channels_last) for t in self._operands)
        call = self._call(provider, operands)
        first = _Inputs(operands)
        if what in DIFFERENTIATED:
            layouts = _training_forward(call, first)
            first.grads = tuple(
                torch.empty_like(y).copy_(dy) for y, dy in zip(layouts, self._grads, strict=True)
            )
        x = operands[0]
        moved = self.operation.moved_tensors(what) * x.numel() * x.element_size()
        count = timing.cold_sets(moved) if x.is_cuda else 2
        return Work(
            outputs=lambda: self._outputs(what, call, first),
            truth=self.truth,
            bounds={
                name: (self.operation.bounds if name in self.operation.outputs else GRADIENT_BOUNDS)[
                    self.dtype
                ]
                for name in self.truth
            },
            call=functools.partial(_CALLS[what], call),
            inputs=[first, *(first.clone() for _ in range(count - 1))],
            moved=moved,
        )


def _work(case: Callable[[], _Case], provider: Provider, what: str) -> Work:
    return case().work(provider, what)


def run(
    suite: Suite,
    config: KernelConfig,
    *,
    on_cell: Callable[[Shape, str], object] = lambda shape, name: None,
    on_row: Callable[[SuiteRow], object] = lambda row: None,
) -> list[SuiteRow]:
    """Times every provider of the config on every shape and pass, as :func:`sdfastgn.bench.kernels.run.run` does."""
    rows: list[SuiteRow] = []
    with cells.measuring(config.torch_device):
        for shape in config.shapes:
            cases: dict[str, Callable[[], _Case]] = {}
            for operation, provider, what in suite.cells_of(config.providers):
                on_cell(shape, provider.name)
                if operation.task not in cases:
                    # One operation's data at a time, built for the first provider that can run.
                    cases = {
                        operation.task: functools.cache(functools.partial(_Case, operation, shape, config))
                    }
                row = SuiteRow(shape, provider.name, OK, task=operation.label(what))
                reason = cells.unavailable(provider, shape, config)
                rows.append(cells.attempt(row, reason, config, _work, cases[operation.task], provider, what))
                on_row(row)
            del cases
            cells.free(config.torch_device)
    cells.add_ratios(rows)
    return rows


# ---- what rows say


def lines(rows: Iterable[SuiteRow]) -> dict[tuple[Shape, str], dict[str, SuiteRow]]:
    """Rows of each shape and task by provider; the copy is in every line of its shape and has none of its own."""
    rows = list(rows)
    copies = {row.shape: row for row in rows if row.provider == YARDSTICK}
    found: dict[tuple[Shape, str], dict[str, SuiteRow]] = {}
    for row in rows:
        if row.provider != YARDSTICK:
            start = {YARDSTICK: copies[row.shape]} if row.shape in copies else {}
            found.setdefault((row.shape, row.task), start)[row.provider] = row
    return found


def ratio(line: dict[str, SuiteRow], name: str, over: str | None, *, cold: bool = False) -> float | None:
    """Time of ``name`` over that of ``over``; None where one of the two is missing."""
    times = [line[key].microseconds(cold) if key in line else None for key in (name, over or "")]
    return times[0] / times[1] if times[0] and times[1] else None


def best_peer(suite: Suite, line: dict[str, SuiteRow], *, cold: bool = False) -> str | None:
    """The fastest correct provider that is neither the copy nor ours, on whichever layout; None where there is none."""
    row = cells.fastest(line.values(), suite.peers, cold=cold)
    return row.provider if row else None


def is_lost(suite: Suite, line: dict[str, SuiteRow], name: str, *, cold: bool = False) -> bool:
    """Whether a peer is faster than our ``name``, or has a time where that was measured and has none."""
    peer = best_peer(suite, line, cold=cold)
    if peer is None or name not in line:
        return False
    to_peer = ratio(line, name, peer, cold=cold)
    return to_peer is None or to_peer > 1


def means(
    suite: Suite, rows: Sequence[SuiteRow], over: str
) -> dict[str, dict[str, dict[str, dict[str, Any]]]]:
    """Geometric means of time over that of ``over``, by set of shapes, task and provider, each with its number of shapes."""
    found: dict[str, dict[str, dict[str, dict[str, Any]]]] = {}
    for set_name, shapes in suite.shape_sets.items():
        collected: dict[tuple[str, str], list[tuple[float, float]]] = {}
        for (shape, task), line in lines(rows).items():
            for name in line if shape in shapes else ():
                hot, cold = ratio(line, name, over), ratio(line, name, over, cold=True)
                if hot and cold:
                    collected.setdefault((task, name), []).append((hot, cold))
        for (task, name), pairs in collected.items():
            hot_mean, cold_mean = (geometric_mean(values) for values in zip(*pairs, strict=True))
            entry = {"hot": hot_mean, "cold": cold_mean, "shapes": len(pairs)}
            found.setdefault(set_name, {}).setdefault(task, {})[name] = entry
    return found


def summary(suite: Suite, rows: Sequence[SuiteRow]) -> dict[str, Any]:
    """Means, cells in which a peer is faster, and our ratio to the best peer, as JSON-ready data."""
    found = lines(rows)
    lost = {
        label: [
            [shape_text(shape), task, name]
            for (shape, task), line in found.items()
            for name in suite.ours
            if is_lost(suite, line, name, cold=cold)
        ]
        for label, cold in (("hot", False), ("cold", True))
    }
    to_peer: dict[str, dict[str, dict[str, list[float | None]]]] = {}
    for (shape, task), line in found.items():
        for name in suite.ours:
            pair = [ratio(line, name, best_peer(suite, line, cold=cold), cold=cold) for cold in (False, True)]
            if any(pair):
                to_peer.setdefault(name, {}).setdefault(task, {})[shape_text(shape)] = pair
    return {
        "ideal_ratio_to_copy": suite.ideals,
        "geometric_mean_of_ratio_to_copy": means(suite, rows, YARDSTICK),
        f"geometric_mean_of_ratio_to_{suite.baseline}": means(suite, rows, suite.baseline),
        "slower_than_best_peer": lost,
        "ratio_to_best_peer": to_peer,
    }
