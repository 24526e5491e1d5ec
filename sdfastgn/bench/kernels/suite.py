"""The classes that describe a suite of kernel benchmarks: providers, operations, configs and rows.

The suites are in ``suites.py``. A provider that only copies the first operand (``COPY``) is timed as well.
GB/s and the ideal ratio to its time are computed from the number of tensors that a pass must read or write.
Only tensors of the input's size are counted: ``Operation.tensors`` for a forward (usually two: x and y),
three for a backward (x, dy and dx), and the sum of both for a forward with its backward.
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

# The name of the provider that only copies the first operand. All times are compared with its time. Its task
# has the same name.
COPY = "copy"
# Names of sdfastgn's providers begin with this word. Other providers (except the copy) are called peers.
OURS = "sdfastgn"
# The default suite.
INFERENCE = "inference"

# The passes that can be timed. "forward in training" is a forward that autograd records.
FORWARD, TRAINING, BACKWARD, BOTH = "forward", "forward in training", "backward", "forward + backward"
DIFFERENTIATED = (BACKWARD, BOTH)

# Maximum relative error of an output against fp64, by dtype. Rounding once makes an error of 3e-4 in fp16 and
# 2e-3 in bf16. stable-fast computes statistics in fp16, which adds an error of the same size.
ERROR_BOUNDS = {"fp16": 5e-3, "bf16": 4e-2, "fp32": 1e-4}
# Maximum relative error of a gradient against fp64, by dtype. These bounds are higher than the bounds of
# outputs. In 16 bits, eager rounds further tensors to the input's dtype: mean and rstd, and the argument of
# the activation. In fp32, the gradients of weight and bias are sums of up to 10^7 terms.
GRADIENT_BOUNDS = {"fp16": 1e-2, "bf16": 8e-2, "fp32": 1e-3}


@dataclass(frozen=True)
class Provider:
    """One implementation of an operation.

    Attributes:
        build: called with operands. Returns the function that is timed, for operands of the same sizes.
        reason: returns None if the provider can run on the given device, else the reason in one line.
        channels_last: True if the provider gets channels-last operands.
        by_default: True if the provider runs when the user names no providers.
    """

    name: str
    build: Callable[..., Call]
    reason: Callable[[torch.device], str | None] = lambda device: None
    channels_last: bool = True
    by_default: bool = True

    @property
    def is_ours(self) -> bool:
        """True if the provider runs kernels of sdfastgn."""
        return self.name.startswith(OURS) or self.name.endswith("_with_statistics")


# ---- functions that make providers


def inductor(call: Call, name: str = "inductor", *, channels_last: bool = True) -> Provider:
    """A provider that runs ``call`` with torch.compile.

    The provider only runs if the user names it, because compiling takes seconds.
    """

    def build(*operands: Tensor) -> Call:
        import torch._functorch.config as config

        # Without a reset for each shape, torch.compile would reach its limit of recompilations, and run the
        # tenth shape eagerly.
        torch.compiler.reset()
        # A backward that is timed without its forward gets the same saved tensors in all calls.
        # So it must not overwrite them, as compiled backwards do by default.
        return config.patch(donated_buffer=False)(torch.compile(call, dynamic=False))

    return Provider(name, build, compile_reason, channels_last, by_default=False)


def fixed(name: str, call: Call, *, channels_last: bool = True) -> Provider:
    """A provider that runs ``call`` itself, without a preparation."""
    return Provider(name, lambda *operands: call, channels_last=channels_last)


def both_layouts(name: str, call: Call, *suffixes: str) -> tuple[Provider, Provider]:
    """Two providers that run ``call``: one with channels-first operands, one with channels-last operands.

    ``suffixes``: the ends of their names, after ``name`` and "_"; by default ``nchw`` and ``nhwc``.
    """
    standard, channels_last = suffixes or ("nchw", "nhwc")
    return fixed(f"{name}_{standard}", call, channels_last=False), fixed(f"{name}_{channels_last}", call)


def rivals(reference: Call, ours: Call, *, layouts: bool = True) -> tuple[Provider, ...]:
    """Providers of one operation: eager PyTorch, sdfastgn (``ours``) and torch.compile.

    ``layouts``: True if eager PyTorch runs in both layouts, as two providers.
    """
    eager = both_layouts("eager", reference) if layouts else (fixed("eager", reference),)
    return (*eager, fixed("sdfastgn", ours), inductor(reference))


def per_channel(shape: Shape, *more: str, axis: int = 1) -> dict[str, Shape]:
    """Returns name -> size for the operands x, weight, bias and ``more``.

    All operands except x have one value per channel. ``axis``: the axis of the channels.
    """
    return {"x": shape, **dict.fromkeys(("weight", "bias", *more), (shape[axis],))}


# ---- suites


@dataclass(frozen=True, eq=False)
class Operation:
    """A computation that several providers implement.

    Attributes:
        sizes: called with a shape of the suite. Returns name -> size of each operand, in the order in which a
            call takes them.
        reference: the computation in plain PyTorch, for operands of any dtype.
        providers: its implementations.
        passes: the passes that are timed.
        task: the beginning of a row's task, before the name of the pass. Empty if a row's task is only the
            name of the pass.
        outputs: names of the outputs.
        tensors: number of tensors of the input's size that a forward has to read or write.
        bounds: dtype -> maximum relative error of an output against fp64.
        full: names of operands that are fp32 in every config.
        baseline: name of the provider with which the last of ``providers`` is compared. It is only set for
            operations in a suite's ``extras``.
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
        """The task of a row: ``self.task`` and the name of the pass. For the copy it is only "copy"."""
        return self.task if self.task == COPY else ", ".join(filter(None, (self.task, pass_name)))

    def moved_tensors(self, pass_name: str) -> int:
        return {BACKWARD: 3, BOTH: self.tensors + 3}.get(pass_name, self.tensors)


@dataclass(frozen=True)
class Suite:
    """A set of measurements that are shown as one table: ``sdfastgn kernels --suite NAME``.

    Attributes:
        axes: names of a shape's axes, such as "NxCxHxW".
        shape_sets: name -> shapes, for ``--shapes``. Every suite has a set named ``all``.
        operations: what is measured. A copy of the first operand is measured as well.
        baseline: name of the provider with which speed-ups compare.
        extras: operations without competitors. A second table compares them with their ``baseline``.
        dtype: the default of ``--dtype``.
        divisor: number by which the second axis of a shape must be divisible.
        repeats: the default of ``--repeats``, the number of timed rounds of each measurement.
        round_seconds: maximum duration of a round.
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
        """True if this is the suite ``inference``.

        Only this suite also measures CPU time, and only its results have a picture.
        """
        return self.name == INFERENCE

    @property
    def kind(self) -> str:
        """The ``kind`` of this suite's runs in their JSON."""
        return "kernels" if self.is_inference else f"kernels_{self.name}"

    @property
    def every(self) -> tuple[Operation, ...]:
        """All operations of the suite.

        The first is the copy, which reads and writes the first operand once.
        """
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
        """Task -> lowest possible ratio of its time to the time of the copy, if memory limits the speed."""
        return {
            operation.label(pass_name): operation.moved_tensors(pass_name) / 2
            for operation in self.operations
            for pass_name in operation.passes
        }

    def gate(self, dtype: str) -> str:
        """Describes the maximum relative errors in words, for tables."""
        own = [f"of {op.task} {op.bounds[dtype]:g}" for op in self.every if op.bounds is not ERROR_BOUNDS]
        if any(pass_name in DIFFERENTIATED for op in self.every for pass_name in op.passes):
            own.append(f"of gradients {GRADIENT_BOUNDS[dtype]:g}")
        return ", ".join([f"{ERROR_BOUNDS[dtype]:g}", *own])

    def cells_of(self, names: Iterable[str]) -> list[tuple[Operation, Provider, str]]:
        """Returns (operation, provider, pass) of each measurement on a shape, for the providers in ``names``.

        The copy comes first, even if ``names`` does not contain it.
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
    """The settings of a run of a suite: what is timed, in which dtype, and on which device.

    ``wall_clock``: True if the device may be a CPU. Times on a CPU include the cost of launches, and are not
    measured with cold caches.
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
        hot_us: microseconds of a call whose operands are in the L2 cache.
        cold_us: microseconds of a call whose operands are not in the L2 cache.
        hot_gbps, cold_gbps: number of bytes that a call must move at least, divided by ``hot_us`` and by
            ``cold_us``, in GB/s.
        hot_ratio, cold_ratio: ``hot_us`` and ``cold_us`` divided by the same times of the provider "copy".
        error: the largest relative error of all outputs and gradients; None if an error is not finite.
        cpu_us: microseconds that the CPU needs for a call that runs on a GPU. Only the suite "inference"
            measures it.
        errors: name of an output or gradient -> its relative error against fp64, if it is finite.
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
    """The rows of a run's JSON.

    Rows in old files have no task. Their task follows from the provider's name.
    """
    tasks = {provider.name: op.label(op.passes[0]) for op in suite.every for provider in op.providers}
    competing = suite.operations[0].label(suite.operations[0].passes[0])
    return [
        KernelRow(**{"task": tasks.get(row["provider"], competing), **row, "shape": tuple(row["shape"])})
        for row in content["rows"]
    ]


def shape_text(shape: Iterable[int]) -> str:
    """A shape as text, such as ``2x320x64x64``."""
    return "x".join(map(str, shape))
