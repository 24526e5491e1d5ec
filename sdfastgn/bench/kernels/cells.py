"""Cells of a kernel table: one provider on one shape, checked against fp64, then timed hot and cold beside a copy.

What is computed, on which shapes and by whom is a *suite*: the inference suite is in ``run.py``, the
others are in ``norm_suites.py``.
"""

from __future__ import annotations

import contextlib
import gc
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch

from sdfastgn.bench import timing
from sdfastgn.bench.documents import FAILED, OK, UNAVAILABLE, WRONG, one_line
from sdfastgn.bench.kernels.providers import YARDSTICK, Provider

Shape = tuple[int, ...]

QUOTED = "quoted"
CPU_MAX_ELEMENTS = 2**22

# Traffic of a round of many calls, so that a round of the largest shape stays short.
ROUND_BYTES = 2**31


@dataclass(frozen=True)
class KernelConfig:
    """What to time. On the CPU only where ``wall_clock`` says that launch cost and caches may be in the times."""

    shapes: tuple[Shape, ...]
    providers: tuple[str, ...]
    dtype: str
    device: str
    repeats: int = 20
    seed: int = 0
    wall_clock: bool = False

    # A round lasts no longer than this: there are providers that take milliseconds.
    round_seconds: ClassVar[float] = 0.05

    @property
    def torch_device(self) -> torch.device:
        return torch.device(self.device)


@dataclass
class KernelRow:
    """One provider on one shape. Times are None unless ``status`` is ``"ok"``; ratios are time over the copy's time.

    ``cpu_us``: what a call costs the CPU, None where there is no GPU. ``status`` is ``"quoted"`` for a time that someone else
    measured.
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

    def microseconds(self, cold: bool) -> float | None:
        return self.cold_us if cold else self.hot_us

    def judge(self, errors: dict[str, float]) -> None:
        """Keeps the largest of the errors by output, or None where one is not finite."""
        self.error = max(errors.values()) if all(map(math.isfinite, errors.values())) else None


Row = TypeVar("Row", bound=KernelRow)


@dataclass(frozen=True)
class Work:
    """What one cell calls, and how it is judged.

    Attributes:
        outputs: one call's results by name, made before anything is timed.
        truth: the same in fp64.
        bounds: largest relative error of each.
        call: what is timed, a function of one of ``inputs``.
        inputs: as many sets as make each call find L2 cold.
        moved: bytes that a call has to move at least.
        host_call: timed on the CPU as well; None where that is not of interest.
    """

    outputs: Callable[[], Mapping[str, torch.Tensor]]
    truth: Mapping[str, torch.Tensor]
    bounds: Mapping[str, float]
    call: Callable[[Any], object]
    inputs: Sequence[Any]
    moved: int
    host_call: Callable[[], object] | None = None


def relative_errors(
    outputs: Mapping[str, torch.Tensor], truth: Mapping[str, torch.Tensor]
) -> dict[str, float]:
    """||output - truth|| / ||truth|| in fp64, by name."""
    errors = {}
    for name, output in outputs.items():
        expected = truth[name].double()
        difference = torch.linalg.vector_norm(output.double() - expected)
        errors[name] = float(difference / torch.linalg.vector_norm(expected))
    return errors


def unavailable(provider: Provider, shape: Shape, config: KernelConfig) -> str | None:
    """Why ``provider`` cannot be timed on ``shape``, in one line; None where it can."""
    reason = provider.reason(config.torch_device)
    if reason is not None or config.torch_device.type == "cuda":
        return reason
    if not config.wall_clock:
        return "kernel times need an NVIDIA GPU; --device cpu times small shapes on the wall clock"
    elements = math.prod(shape)
    return f"{elements:,} elements are too many for the CPU" if elements > CPU_MAX_ELEMENTS else None


def calls_a_round(moved: int, seconds: float, round_seconds: float) -> int:
    """How many calls are timed together, where one moves ``moved`` bytes and takes ``seconds``."""
    by_traffic = max(5, min(100, ROUND_BYTES // moved))
    return min(by_traffic, max(2, int(round_seconds / seconds)))


def _measure(row: KernelRow, work: Work, config: KernelConfig) -> None:
    device = config.torch_device
    errors = relative_errors(work.outputs(), work.truth)
    row.judge(errors)
    for name, error in errors.items():
        if not error <= work.bounds[name]:
            of = f" of {name}" if name else ""
            row.status = WRONG
            row.reason = f"relative error{of} {error:.3g} against fp64 is above {work.bounds[name]:g}"
            return
    calls, repeats = 3, min(config.repeats, 3)
    if device.type == "cuda":
        seconds, _ = timing.time_once(lambda: work.call(work.inputs[0]), device)
        calls = calls_a_round(work.moved, seconds, config.round_seconds)
        repeats = config.repeats
    hot = timing.time_kernel(work.call, work.inputs, device, cold=False, calls=calls, repeats=repeats)
    cold = timing.time_kernel(work.call, work.inputs, device, cold=True, calls=calls, repeats=repeats)
    if device.type == "cuda" and work.host_call is not None:
        row.cpu_us = timing.time_host(work.host_call, device)
    row.status, row.hot_us, row.cold_us = OK, hot, cold
    row.hot_gbps, row.cold_gbps = work.moved / 1e3 / hot, work.moved / 1e3 / cold


def attempt(
    row: Row, reason: str | None, config: KernelConfig, work: Callable[..., Work], *arguments: Any
) -> Row:
    """``row`` with the times of ``work(*arguments)``, or with why there are none: ``reason``, a wrong result, what was raised."""
    if reason is not None:
        row.status, row.reason = UNAVAILABLE, reason
        return row
    try:
        _measure(row, work(*arguments), config)
    except Exception as error:  # a provider that breaks on a shape is a row of the table
        row.status, row.reason = FAILED, one_line(error)
    return row


def add_ratios(rows: Sequence[KernelRow]) -> None:
    """Fills the ratios to the copy on the same shape."""
    yardsticks = {row.shape: row for row in rows if row.provider == YARDSTICK and row.status == OK}
    for row in rows:
        copy = yardsticks.get(row.shape)
        if row.status != OK or copy is None or row.hot_us is None or row.cold_us is None:
            continue
        row.hot_ratio = row.hot_us / copy.hot_us if copy.hot_us else None
        row.cold_ratio = row.cold_us / copy.cold_us if copy.cold_us else None


@contextlib.contextmanager
def _cheap_collections() -> Iterator[None]:
    # Every graph capture runs a full garbage collection, which takes a third of a second once PyTorch's modules are
    # loaded.
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextlib.contextmanager
def measuring(device: torch.device) -> Iterator[None]:
    """Everything that holds for a whole run: the device, the switches of :func:`timing.global_switches`, no gradients."""
    with timing.device_scope(device), timing.global_switches(), torch.no_grad(), _cheap_collections():
        timing.spin_up(device)
        yield


def free(device: torch.device) -> None:
    """Gives the memory of one shape back before the next is built."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def fastest(rows: Iterable[Row], names: Collection[str], *, cold: bool = False) -> Row | None:
    """The row with the least time among the providers in ``names``, quoted ones too; None where there is none."""
    timed = [row for row in rows if row.provider in names and row.status in (OK, QUOTED)]
    return min(timed, key=lambda row: row.microseconds(cold) or math.inf, default=None)


def shape_text(shape: Sequence[int]) -> str:
    """``2x320x64x64``."""
    return "x".join(map(str, shape))


def geometric_mean(values: Sequence[float]) -> float | None:
    return math.exp(math.fsum(map(math.log, values)) / len(values)) if values else None
