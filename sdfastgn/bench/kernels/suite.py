"""The classes that describe a suite of kernel benchmarks: providers, operations, configs and rows.

The suites are in ``suites.py``. Each suite also times a copy of the first operand (the provider ``COPY``).
A pass is a forward, a backward, or a forward with its backward. Its GB/s, and its ideal time as a multiple of
the copy's time, are computed from the number of tensors that the pass must read or write. Only tensors of the
input's size are counted: ``Operation.tensors`` for a forward (usually two: x and y), three for a backward (x,
dy and dx), and the sum of both numbers for a forward with its backward.
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

# The name of the provider (implementation) that only copies the first operand, and the name of its task. All
# times are compared with the copy's time.
COPY = "copy"
# In a suite's ``operations``, the names of sdfastgn's providers (implementations) begin with this word. All
# other providers except the copy are called peers.
OURS = "sdfastgn"
# Name of the suite that ``sdfastgn kernels`` times if the user names no suite.
INFERENCE = "inference"

# The passes that can be timed. "forward in training" is a forward that autograd records. The passes in
# ``DIFFERENTIATED`` compute gradients.
FORWARD, TRAINING, BACKWARD, BOTH = "forward", "forward in training", "backward", "forward + backward"
DIFFERENTIATED = (BACKWARD, BOTH)

# Maximum relative error of an output against fp64, by dtype. Rounding once makes an error of 3e-4 in fp16 and
# 2e-3 in bf16. stable-fast computes statistics in fp16, which adds an error of the same size.
ERROR_BOUNDS = {"fp16": 5e-3, "bf16": 4e-2, "fp32": 1e-4}
# Maximum relative error of a gradient against fp64, by dtype. These bounds are higher than those of outputs:
# in fp16 and bf16, eager's backward reads more tensors that were rounded to 16 bits (mean, rstd and the
# argument of the activation), and in fp32 the gradients of weight and bias are sums of up to 10^7 terms.
GRADIENT_BOUNDS = {"fp16": 1e-2, "bf16": 8e-2, "fp32": 1e-3}


@dataclass(frozen=True)
class Provider:
    """One implementation of an operation.

    Attributes:
        build: called with operands. Returns the function that is timed: it takes operands of the same sizes.
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
        """True if this implementation runs kernels of sdfastgn."""
        return self.name.startswith(OURS) or self.name.endswith("_with_statistics")


# ---- functions that make providers


def inductor(call: Call, name: str = "inductor") -> Provider:
    """A provider (implementation) that runs ``call`` with torch.compile, on channels-last operands.

    It is not timed by default, because compiling takes seconds. The user must name it.
    """

    def build(*operands: Tensor) -> Call:
        import torch._functorch.config as config

        # torch.compile limits the number of recompilations, and then runs further shapes eagerly. The reset
        # for each shape lets it start to count anew.
        torch.compiler.reset()
        # By default a compiled backward may overwrite the tensors that the forward saved ("donated buffers").
        # Here it must not: a backward that is timed without its forward reads the same saved tensors in all
        # calls.
        return config.patch(donated_buffer=False)(torch.compile(call, dynamic=False))

    return Provider(name, build, compile_reason, channels_last=True, by_default=False)


def fixed(name: str, call: Call, *, channels_last: bool = True) -> Provider:
    """A provider (implementation) whose ``build`` returns ``call``, whatever the sizes of the operands."""
    return Provider(name, lambda *operands: call, channels_last=channels_last)


def both_layouts(name: str, call: Call, *suffixes: str) -> tuple[Provider, Provider]:
    """Two providers (implementations) of ``call``: for channels-first and for channels-last operands.

    ``suffixes``: the ends of their names, after ``name`` and "_"; by default ``nchw`` and ``nhwc``.
    """
    standard, channels_last = suffixes or ("nchw", "nhwc")
    return fixed(f"{name}_{standard}", call, channels_last=False), fixed(f"{name}_{channels_last}", call)


def rivals(reference: Call, ours: Call, *, layouts: bool = True) -> tuple[Provider, ...]:
    """Providers (implementations) of one operation: eager PyTorch, sdfastgn (``ours``) and torch.compile.

    ``layouts``: True if eager PyTorch runs in both layouts, as two providers.
    """
    eager = both_layouts("eager", reference) if layouts else (fixed("eager", reference),)
    return (*eager, fixed("sdfastgn", ours), inductor(reference))


def per_channel(shape: Shape, *more: str, axis: int = 1) -> dict[str, Shape]:
    """Returns name of an operand -> its size, for the operands x, weight, bias and those named in ``more``.

    x has the size ``shape``. All others have one value per channel. ``axis``: the axis of the channels.
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
        passes: the passes (forward, backward and so on) that are timed.
        task: the beginning of a row's task, before the name of the pass. Empty if a row's task is only the
            name of the pass.
        outputs: names of the outputs.
        tensors: number of tensors of the input's size that a forward has to read or write.
        bounds: dtype -> maximum relative error of an output against fp64.
        full: names of operands that are in fp32 whatever the dtype of the run.
        baseline: only for operations in a suite's ``extras``: name of a provider. A table divides the time of
            the last of ``providers`` by the time of this provider.
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
        """The name of a row's task: ``self.task`` and the name of the pass. The copy's task is "copy"."""
        return self.task if self.task == COPY else ", ".join(filter(None, (self.task, pass_name)))

    def moved_tensors(self, pass_name: str) -> int:
        return {BACKWARD: 3, BOTH: self.tensors + 3}.get(pass_name, self.tensors)


@dataclass(frozen=True)
class Suite:
    """The operations and shapes that ``sdfastgn kernels --suite NAME`` times and shows as a table.

    Attributes:
        axes: names of a shape's axes, such as "NxCxHxW".
        shape_sets: name -> shapes, for ``--shapes``. Every suite has a set named ``all``.
        operations: what is measured. A copy of the first operand is measured as well.
        baseline: name of a provider. Tables divide times by the times of this provider, and by the copy's.
        extras: operations without competitors. They have a table of their own, which compares each with its
            ``Operation.baseline``.
        divisor: number that must divide the second axis of a shape, such as GroupNorm's number of groups.
        repeats: the default of ``--repeats``. A measurement is the median of this number of rounds of calls.
        round_seconds: time in seconds that a round of calls should take at most.
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
        """The value of the field ``kind`` in the JSON of this suite's runs."""
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
        """For each task, the lowest possible ratio of its time to a copy's, if memory limits the speed.

        The copy reads and writes the first operand once. A task is a pass of an operation.
        """
        return {
            operation.label(pass_name): operation.moved_tensors(pass_name) / 2
            for operation in self.operations
            for pass_name in operation.passes
        }

    def gate(self, dtype: str) -> str:
        """A text for tables: the allowed relative errors. A provider with a larger error is not timed.

        The first number is the bound for outputs. The bounds for gradients, and for operations that have
        other bounds, follow with their names.
        """
        own = [f"of {op.task} {op.bounds[dtype]:g}" for op in self.every if op.bounds is not ERROR_BOUNDS]
        if any(pass_name in DIFFERENTIATED for op in self.every for pass_name in op.passes):
            own.append(f"of gradients {GRADIENT_BOUNDS[dtype]:g}")
        return ", ".join([f"{ERROR_BOUNDS[dtype]:g}", *own])

    def cells_of(self, names: Iterable[str]) -> list[tuple[Operation, Provider, str]]:
        """Returns all (operation, provider, pass) to measure on a shape, for the providers in ``names``.

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
    """The settings of a run of a suite of kernel benchmarks: what is timed, in which dtype, on which device.

    ``wall_clock``: True if the user asked for times on a CPU. These are wall-clock times of whole calls, and
    "cold" times are not taken with cold caches.
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
    """The measurement of one provider (implementation) in one task, such as a backward, on one shape.

    It has times if ``status`` is ok.

    Attributes:
        hot_us: microseconds of a call whose operands are in the L2 cache, if they fit.
        cold_us: microseconds of a call whose operands are not in the L2 cache.
        hot_gbps, cold_gbps: GB/s: the bytes that a call must at least read and write, divided by ``hot_us``
            or by ``cold_us``.
        hot_ratio: ``hot_us`` divided by the ``hot_us`` of the provider ``COPY`` on the same shape.
        cold_ratio: ``cold_us`` divided by the ``cold_us`` of the provider ``COPY`` on the same shape.
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
    """The rows of ``content``, the JSON of a run of ``suite``.

    Rows in files of an older sdfastgn have no task. Such a row gets the task of its provider, or of the
    suite's first operation if the suite does not have the provider any more.
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
