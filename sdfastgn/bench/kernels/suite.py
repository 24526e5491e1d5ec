"""What a suite of kernel benchmarks consists of: providers, operations, shapes, rows.

The suites themselves are in ``suites.py``. GB/s and the ideal ratio to the copy count the tensors
of the image's size that a pass has to move: a forward two (x and y), a backward three (x, dy and
dx), both together five.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sdfastgn.bench.variants import compile_reason

Shape = tuple[int, ...]
Call = Callable[..., Any]

# The provider that every time is compared with, and its task.
COPY = "copy"
# This package's providers begin with its name; all others but the copy are peers.
OURS = "sdfastgn"
# The suite that runs where the user names none.
INFERENCE = "inference"

# What is timed of an operation. A forward may save more where autograd records it.
FORWARD, TRAINING, BACKWARD, BOTH = "forward", "forward in training", "backward", "forward + backward"
DIFFERENTIATED = (BACKWARD, BOTH)

# Largest relative error of an output against fp64. One rounding costs 3e-4 in fp16 and 2e-3 in
# bf16; fp16 statistics, as stable-fast's, the same again.
ERROR_BOUNDS = {"fp16": 5e-3, "bf16": 4e-2, "fp32": 1e-4}
# The same of a gradient, which sees two roundings more: eager keeps mean, rstd and the activation's
# argument in the input's dtype. Gradients of weight and bias are sums of up to 10^7 terms in fp32.
GRADIENT_BOUNDS = {"fp16": 1e-2, "bf16": 8e-2, "fp32": 1e-3}


@dataclass(frozen=True)
class Provider:
    """One implementation of an operation, given operands in its layout.

    ``build`` takes operands and returns a call of such. ``reason`` is None where it can run on the
    device, else one line. It runs ``by_default`` where the user names no providers.
    """

    name: str
    build: Callable[..., Call]
    reason: Callable[[torch.device], str | None] = lambda device: None
    channels_last: bool = True
    by_default: bool = True

    @property
    def is_ours(self) -> bool:
        """True if this package's kernels are what is timed."""
        return self.name.startswith(OURS) or self.name.endswith("_with_statistics")


# ---- ways to make a provider of a callable


def inductor(call: Call, name: str = "inductor", *, channels_last: bool = True) -> Provider:
    """``call`` under torch.compile. It runs only where it is named: compiling takes seconds."""

    def build(*operands: Tensor) -> Call:
        import torch._functorch.config as config

        # Every shape is a compilation of its own; without a reset the tenth would fall back to eager.
        torch.compiler.reset()
        # A backward that is timed alone needs its forward's saved tensors many times.
        return config.patch(donated_buffer=False)(torch.compile(call, dynamic=False))

    return Provider(name, build, compile_reason, channels_last, by_default=False)


def fixed(name: str, call: Call, *, channels_last: bool = True) -> Provider:
    """A call that needs no preparation."""
    return Provider(name, lambda *operands: call, channels_last=channels_last)


def both_layouts(name: str, call: Call, *suffixes: str) -> tuple[Provider, Provider]:
    """``call`` on the standard layout and channels-last, named by the two suffixes."""
    standard, channels_last = suffixes or ("nchw", "nhwc")
    return fixed(f"{name}_{standard}", call, channels_last=False), fixed(f"{name}_{channels_last}", call)


def rivals(reference: Call, ours: Call, *, layouts: bool = True) -> tuple[Provider, ...]:
    """Eager PyTorch, on both layouts where there are some, ours, and torch.compile."""
    eager = both_layouts("eager", reference) if layouts else (fixed("eager", reference),)
    return (*eager, fixed("sdfastgn", ours), inductor(reference))


def per_channel(shape: Shape, *more: str, axis: int = 1) -> dict[str, Shape]:
    """Sizes of x, and of what has one value a channel: weight, bias and ``more``."""
    return {"x": shape, **dict.fromkeys(("weight", "bias", *more), (shape[axis],))}


# ---- suites


@dataclass(frozen=True, eq=False)
class Operation:
    """What several providers compute.

    Attributes:
        sizes: of the operands by name, in a call's order, for a shape of the suite.
        reference: the same in plain PyTorch, for operands of any dtype.
        task: what a row's task begins with; empty where the pass says it all.
        tensors: of the image's size that a forward has to move.
        bounds: largest relative error of an output by dtype.
        full: names of operands that are fp32, whatever the dtype of the others.
        baseline: of one of a suite's ``extras``, the provider that its last one is compared with.
    """

    sizes: Callable[[Shape], dict[str, Shape]]
    reference: Call
    providers: tuple[Provider, ...]
    passes: tuple[str, ...] = (FORWARD,)
    task: str = ""
    outputs: tuple[str, ...] = ("y",)
    tensors: int = 2
    bounds: Mapping[str, float] = field(default_factory=lambda: ERROR_BOUNDS)
    full: tuple[str, ...] = ()
    baseline: str = ""

    def label(self, what: str) -> str:
        """A row's task: the operation's own name, if it has one, and the pass. A copy is a copy."""
        return self.task if self.task == COPY else ", ".join(filter(None, (self.task, what)))

    def moved_tensors(self, what: str) -> int:
        return {BACKWARD: 3, BOTH: self.tensors + 3}.get(what, self.tensors)


@dataclass(frozen=True)
class Suite:
    """A table of its own: ``sdfastgn kernels --suite NAME``.

    Attributes:
        shape_sets: names that ``--shapes`` knows, ``all`` among them.
        operations: what providers compete in. A copy of the first operand is timed beside them.
        baseline: the provider that speed-ups are over.
        extras: operations without a peer, shown beside their ``baseline`` in another table.
        divisor: of the second axis of every shape that can be run.
        repeats: timed rounds of each cell, where the user names no number.
        round_seconds: how long a round lasts at most. Suites with several passes have many cells.
    """

    name: str
    title: str
    axes: str
    shape_sets: dict[str, tuple[Shape, ...]]
    operations: tuple[Operation, ...]
    baseline: str
    extras: tuple[Operation, ...] = ()
    divisor: int = 1
    repeats: int = 10
    round_seconds: float = 0.02

    @property
    def is_inference(self) -> bool:
        """The CPU's time is taken too, Markdown is brief, and there is a picture."""
        return self.name == INFERENCE

    @property
    def kind(self) -> str:
        """Of the JSON of a run."""
        return "kernels" if self.is_inference else f"kernels_{self.name}"

    @property
    def every(self) -> tuple[Operation, ...]:
        """All operations. The copy, one read and one write of the first operand, comes first."""
        sizes = self.operations[0].sizes
        provider = Provider(COPY, lambda x: lambda x: torch.empty_like(x).copy_(x))
        copy = Operation(
            lambda shape: {"x": next(iter(sizes(shape).values()))}, lambda x: x, (provider,), task=COPY
        )
        return (copy, *self.operations, *self.extras)

    @property
    def providers(self) -> dict[str, Provider]:
        return {provider.name: provider for operation in self.every for provider in operation.providers}

    @property
    def ideals(self) -> dict[str, float]:
        """Least ratio to the copy by task, where the memory is the limit."""
        return {
            operation.label(what): operation.moved_tensors(what) / 2
            for operation in self.operations
            for what in operation.passes
        }

    def gate(self, dtype: str) -> str:
        """The largest errors that are let through, in words."""
        own = [f"of {op.task} {op.bounds[dtype]:g}" for op in self.every if op.bounds is not ERROR_BOUNDS]
        if any(what in DIFFERENTIATED for op in self.every for what in op.passes):
            own.append(f"of gradients {GRADIENT_BOUNDS[dtype]:g}")
        return ", ".join([f"{ERROR_BOUNDS[dtype]:g}", *own])

    def cells_of(self, names: Iterable[str]) -> list[tuple[Operation, Provider, str]]:
        """What is measured on each shape. The copy comes first, named or not."""
        chosen = {COPY, *names}
        return [
            (operation, provider, what)
            for operation in self.every
            for provider in operation.providers
            if provider.name in chosen
            for what in operation.passes
        ]


@dataclass(frozen=True)
class KernelConfig:
    """What to time. On a CPU only with ``wall_clock``: launch cost and caches are in the times."""

    suite: str
    shapes: tuple[Shape, ...]
    providers: tuple[str, ...]
    dtype: str
    device: str
    repeats: int
    seed: int = 0
    wall_clock: bool = False

    @property
    def torch_device(self) -> torch.device:
        return torch.device(self.device)


@dataclass
class KernelRow:
    """One provider in one task on one shape, with times if ``status`` is ok.

    Attributes:
        hot_us, cold_us: microseconds of a call with its operands in L2, and without.
        hot_ratio, cold_ratio: the same over the copy's.
        error: the largest of ``errors``; None where one is not finite.
        cpu_us: what a call costs the CPU, where the suite times that and there is a GPU.
    """

    shape: Shape
    provider: str
    status: str
    reason: str = ""
    hot_us: float | None = None
    cold_us: float | None = None
    hot_gbps: float | None = None
    cold_gbps: float | None = None
    hot_ratio: float | None = None
    cold_ratio: float | None = None
    error: float | None = None
    cpu_us: float | None = None
    task: str = ""
    errors: dict[str, float] = field(default_factory=dict)

    @property
    def times(self) -> tuple[float | None, float | None]:
        return self.hot_us, self.cold_us


def rows_of(suite: Suite, content: Mapping[str, Any]) -> list[KernelRow]:
    """The rows of a run's JSON. In old ones the provider tells the task."""
    tasks = {provider.name: op.label(op.passes[0]) for op in suite.every for provider in op.providers}
    competing = suite.operations[0].label(suite.operations[0].passes[0])
    return [
        KernelRow(**{"task": tasks.get(row["provider"], competing), **row, "shape": tuple(row["shape"])})
        for row in content["rows"]
    ]


def shape_text(shape: Iterable[int]) -> str:
    """``2x320x64x64``."""
    return "x".join(map(str, shape))
