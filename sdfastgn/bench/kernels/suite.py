"""What a suite of kernel benchmarks consists of: providers, operations, shapes, rows.

The suites themselves are in ``suites.py``. GB/s and the ideal ratio to the copy follow from the number of
tensors of the input's size that a pass has to move. A forward moves two (x and y), a backward three (x, dy
and dx), both together five.
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

# The provider that all times are compared with, and the name of its task.
COPY = "copy"
# Names of sdfastgn's providers begin with this. All others except the copy are peers, that is, competitors.
OURS = "sdfastgn"
# The default suite.
INFERENCE = "inference"

# The passes that can be timed. "forward in training" is recorded by autograd and may save more.
FORWARD, TRAINING, BACKWARD, BOTH = "forward", "forward in training", "backward", "forward + backward"
DIFFERENTIATED = (BACKWARD, BOTH)

# Largest relative error of an output against fp64. One rounding makes an error of 3e-4 in fp16 and 2e-3 in
# bf16. Statistics in fp16, which stable-fast has, make as much again.
ERROR_BOUNDS = {"fp16": 5e-3, "bf16": 4e-2, "fp32": 1e-4}
# Largest relative error of a gradient. There are two more roundings: eager keeps mean, rstd and the
# activation's argument in the input's dtype. Gradients of weight and bias sum up to 10^7 terms in fp32.
GRADIENT_BOUNDS = {"fp16": 1e-2, "bf16": 8e-2, "fp32": 1e-3}


@dataclass(frozen=True)
class Provider:
    """One implementation of an operation.

    Attributes:
        build: called with operands, returns the function that is timed with such operands.
        reason: returns None if it can run on the device, else the reason in one line.
        channels_last: whether it gets channels-last operands.
        by_default: whether it runs if the user names no providers.
    """

    name: str
    build: Callable[..., Call]
    reason: Callable[[torch.device], str | None] = lambda device: None
    channels_last: bool = True
    by_default: bool = True

    @property
    def is_ours(self) -> bool:
        """True if it runs kernels of sdfastgn."""
        return self.name.startswith(OURS) or self.name.endswith("_with_statistics")


# ---- functions that make providers


def inductor(call: Call, name: str = "inductor", *, channels_last: bool = True) -> Provider:
    """``call`` with torch.compile. It only runs if the user names it, because compiling takes seconds."""

    def build(*operands: Tensor) -> Call:
        import torch._functorch.config as config

        # Each shape is compiled anew. Without a reset the tenth one would run eagerly.
        torch.compiler.reset()
        # A backward that is timed alone uses the saved tensors many times, so it must not overwrite them.
        return config.patch(donated_buffer=False)(torch.compile(call, dynamic=False))

    return Provider(name, build, compile_reason, channels_last, by_default=False)


def fixed(name: str, call: Call, *, channels_last: bool = True) -> Provider:
    """A provider whose ``call`` needs no preparation."""
    return Provider(name, lambda *operands: call, channels_last=channels_last)


def both_layouts(name: str, call: Call, *suffixes: str) -> tuple[Provider, Provider]:
    """Two providers of ``call``: with the standard layout, and channels-last. ``suffixes`` name them."""
    standard, channels_last = suffixes or ("nchw", "nhwc")
    return fixed(f"{name}_{standard}", call, channels_last=False), fixed(f"{name}_{channels_last}", call)


def rivals(reference: Call, ours: Call, *, layouts: bool = True) -> tuple[Provider, ...]:
    """Three implementations: eager PyTorch (in both layouts, if there are two), ours, and torch.compile."""
    eager = both_layouts("eager", reference) if layouts else (fixed("eager", reference),)
    return (*eager, fixed("sdfastgn", ours), inductor(reference))


def per_channel(shape: Shape, *more: str, axis: int = 1) -> dict[str, Shape]:
    """Sizes of x and of operands with one value per channel: weight, bias and ``more``."""
    return {"x": shape, **dict.fromkeys(("weight", "bias", *more), (shape[axis],))}


# ---- suites


@dataclass(frozen=True, eq=False)
class Operation:
    """A computation that several providers implement.

    Attributes:
        sizes: called with a shape of the suite. Returns name -> size of the operands, in the order of a call.
        reference: the computation in plain PyTorch, for operands of any dtype.
        providers: its implementations.
        passes: the passes that are timed.
        task: the first part of a row's task; empty if the name of the pass is enough.
        outputs: names of the outputs.
        tensors: number of tensors of the input's size that a forward has to move.
        bounds: dtype -> largest relative error of an output.
        full: names of operands that are always fp32.
        baseline: for one of a suite's ``extras``: the provider that its last provider is compared with.
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

    def label(self, pass_name: str) -> str:
        """The task of a row: ``task`` and the pass. The copy's is only "copy"."""
        return self.task if self.task == COPY else ", ".join(filter(None, (self.task, pass_name)))

    def moved_tensors(self, pass_name: str) -> int:
        return {BACKWARD: 3, BOTH: self.tensors + 3}.get(pass_name, self.tensors)


@dataclass(frozen=True)
class Suite:
    """A set of measurements that are shown as one table: ``sdfastgn kernels --suite NAME``.

    Attributes:
        axes: names of a shape's axes, such as "NxCxHxW".
        shape_sets: name -> shapes, for ``--shapes``. One name is ``all``.
        operations: what is measured. A copy of the first operand is timed beside them.
        baseline: the provider that speed-ups are relative to.
        extras: operations without competitors. Another table shows them beside their ``baseline``.
        dtype: the default of ``--dtype``.
        divisor: the second axis of a shape must be divisible by this.
        repeats: the default of ``--repeats``: timed rounds of each measurement.
        round_seconds: longest duration of a round.
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
        """Whether this is the suite that also measures CPU time and has a picture and a brief page."""
        return self.name == INFERENCE

    @property
    def kind(self) -> str:
        """The ``kind`` in the JSON of a run."""
        return "kernels" if self.is_inference else f"kernels_{self.name}"

    @property
    def every(self) -> tuple[Operation, ...]:
        """All operations. The first is the copy, which reads and writes the first operand once."""
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
        """Task -> lowest possible ratio to the copy, if memory traffic is the limit."""
        return {
            operation.label(pass_name): operation.moved_tensors(pass_name) / 2
            for operation in self.operations
            for pass_name in operation.passes
        }

    def gate(self, dtype: str) -> str:
        """The largest allowed errors, in words."""
        own = [f"of {op.task} {op.bounds[dtype]:g}" for op in self.every if op.bounds is not ERROR_BOUNDS]
        if any(pass_name in DIFFERENTIATED for op in self.every for pass_name in op.passes):
            own.append(f"of gradients {GRADIENT_BOUNDS[dtype]:g}")
        return ", ".join([f"{ERROR_BOUNDS[dtype]:g}", *own])

    def cells_of(self, names: Iterable[str]) -> list[tuple[Operation, Provider, str]]:
        """(operation, provider, pass) for each measurement on a shape, of the providers in ``names``.

        The copy comes first, also if it is not in ``names``.
        """
        chosen = {COPY, *names}
        return [
            (operation, provider, pass_name)
            for operation in self.every
            for provider in operation.providers
            if provider.name in chosen
            for pass_name in operation.passes
        ]


@dataclass(frozen=True)
class KernelConfig:
    """What to time.

    ``wall_clock``: allow a CPU, whose times include the cost of launches and whose caches are not cold.
    """

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
    """The measurement of one provider in one task on one shape. It has times if ``status`` is ok.

    Attributes:
        hot_us, cold_us: microseconds of a call with its operands in L2, and not in L2.
        hot_gbps, cold_gbps: GB/s of the memory traffic that the call needs at least.
        hot_ratio, cold_ratio: the times divided by those of the copy.
        error: the largest of ``errors``; None if one is not finite.
        cpu_us: microseconds that a call takes on the CPU. Only in the suite inference, on a GPU.
        errors: name of an output or gradient -> its relative error.
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
    """The rows of a run's JSON. Old files have no tasks: there the provider's name tells the task."""
    tasks = {provider.name: op.label(op.passes[0]) for op in suite.every for provider in op.providers}
    competing = suite.operations[0].label(suite.operations[0].passes[0])
    return [
        KernelRow(**{"task": tasks.get(row["provider"], competing), **row, "shape": tuple(row["shape"])})
        for row in content["rows"]
    ]


def shape_text(shape: Iterable[int]) -> str:
    """A shape as text, such as ``2x320x64x64``."""
    return "x".join(map(str, shape))
