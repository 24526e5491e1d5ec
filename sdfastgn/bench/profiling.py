"""Breaks down the time of one call into categories of kernels, and the gaps between kernels.

On a GPU a breakdown takes two kinds of recordings with PyTorch's profiler.

1. The plain call is recorded with operators and kernels. This recording shows which operator launches the
   kernels of each name.
2. A replay of the call's CUDA graph is recorded, with kernels only. If the call could not be captured, the
   plain call is recorded instead. The times come from this recording. It has no operators, because recording
   operators would slow the CPU, and because a replay runs none.

``kernel_categories.category`` finds a kernel's category from its name and its operator. If the first
recording has no kernel of this name, the name alone decides.

Categories and launch gaps add up to the time from the start of the first kernel to the end of the last
kernel. If two kernels run at once (on two streams, or by programmatic dependent launch), their common time
counts for the kernel that started first.

On the CPU there is only one kind of recording, and it has operators instead of kernels. The time of
an operator does not include the operators that it calls. The gaps are the time outside of operators, in which
Python runs.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from sdfastgn.bench import timing
from sdfastgn.bench.kernel_categories import (
    ATTENTION,
    CATEGORIES,
    COPIES,
    FLOOR,
    GAPS,
    NORMALIZATION,
    OTHER,
    category,
    operator_category,
)

# Values of ``Breakdown.source``, which says what was recorded.
REPLAY, CALL, CPU = "replay", "call", "CPU operators"
# Length of ``Breakdown.top``, the list of the kernels that took longest.
TOP = 10
# Number of times that ``measure`` records the kernels of a call or replay (on a CPU, the operators). The
# breakdown is made from the recording of median length.
RECORDINGS = 3

# Name of a kernel -> category -> share of the kernel's time that counts for this category. A kernel's shares
# add up to 1. A kernel has several categories if operators of several categories launch it.
Shares = dict[str, dict[str, float]]


@dataclass(frozen=True)
class Breakdown:
    """How the time of one call is divided among the categories of kernels, in milliseconds.

    Attributes:
        source: what was recorded: ``REPLAY`` (a replay of a CUDA graph), ``CALL`` (a plain call) or ``CPU``
            (the operators of a call on the CPU).
        categories: name of a category -> its time. The names are ``CATEGORIES`` and ``"launch gaps"``. The
            times add up to ``total_ms``.
        total_ms: time from the start of the first kernel to the end of the last kernel, in the recording.
        timed_ms: time of the same call or replay without a profiler.
        floor_ms: time of convolution, GEMM and attention. The call would take this long if all other kernels
            and the gaps took no time.
        call_gaps_ms: time of the plain call, measured without a profiler, minus the time of its kernels. None
            on the CPU.
        kernels: number of launches in the recording, including memory copies and fills. On the CPU, number of
            operators.
        top: the ten longest entries. An entry is the sum of all launches of kernels with the same name and
            category: a dict of ``name``, ``category``, ``calls`` and ``ms``.
        other: all entries whose category is ``OTHER``, because no rule fits their kernels.
    """

    source: str
    categories: dict[str, float]
    total_ms: float
    timed_ms: float
    floor_ms: float
    call_gaps_ms: float | None
    kernels: int
    top: list[dict[str, Any]]
    other: list[dict[str, Any]]

    @property
    def floor_share(self) -> float:
        return self.floor_ms / self.total_ms


def _entry(name: str, found: str, microseconds: float, calls: float = 1.0) -> dict[str, Any]:
    """A kernel launch, or the part of it that counts for the category ``found``, as a dict for a breakdown.

    ``calls``: 1 for a whole launch, else the part's share of the launch.
    """
    return {"name": name, "category": found, "calls": calls, "ms": microseconds / 1e3}


def _uncovered_us(events: Iterable[Any]) -> list[float]:
    """For each event, the microseconds in which it runs and no event that started earlier runs.

    ``events`` are sorted by their start.
    """
    covered = -math.inf
    lengths = []
    for time in (event.time_range for event in events):
        lengths.append(max(0.0, time.end - max(time.start, covered)))
        covered = max(covered, time.end)
    return lengths


def _launches(events: Iterable[Any]) -> list[Any]:
    """The ``events`` that are kernels, copies or fills on the device, sorted by their start."""
    # Ranges of record_function also are events on the device, but they are no launches.
    found = [event for event in events if event.device_type.name == "CUDA" and not event.is_user_annotation]
    return sorted(found, key=lambda event: (event.time_range.start, event.time_range.end))


def _operator(event: Any) -> str:
    """The name of the operator that decides the category of ``event``, an operator on the CPU.

    The same operator decides the category of the kernels that ``event`` launches. Usually the operator is
    ``event`` itself. If ``event`` runs inside an attention or norm operator, as ``aten::bmm`` may do, the
    outer operator decides. But a copy counts as a copy, even inside a norm: stock GroupNorm copies its
    channels-last input.
    """
    outer = None if operator_category(event.name) == COPIES else event
    while outer is not None:
        if operator_category(outer.name) in (ATTENTION, NORMALIZATION):
            return str(outer.name)
        outer = outer.cpu_parent
    return str(event.name)


def shares_by_name(events: Iterable[Any]) -> Shares:
    """Compute how each kernel's time is divided among categories, from a recording with operators."""
    sums: Shares = defaultdict(lambda: defaultdict(float))
    for event in events:
        for kernel in event.kernels:
            sums[kernel.name][category(kernel.name, _operator(event))] += kernel.duration
    return {
        name: {found: value / total for found, value in by_category.items()}
        for name, by_category in sums.items()
        if (total := sum(by_category.values())) > 0
    }


def _breakdown(parts: Sequence[dict[str, Any]], events: Sequence[Any], **values: Any) -> Breakdown:
    """Make a breakdown of a call from its ``events`` and ``parts``.

    ``parts``: the entries of the events (results of ``_entry``). An event has several entries if its time
    counts for several categories. ``values``: the fields of Breakdown that cannot be computed from parts and
    events.
    """
    times = [event.time_range for event in events]
    total_ms = (max(time.end for time in times) - min(time.start for time in times)) / 1e3
    sums = dict.fromkeys(CATEGORIES, 0.0)
    joined: dict[tuple[str, str], dict[str, Any]] = {}
    for part in parts:
        sums[part["category"]] += part["ms"]
        entry = joined.setdefault((part["name"], part["category"]), {**part, "calls": 0.0, "ms": 0.0})
        entry["calls"] += part["calls"]
        entry["ms"] += part["ms"]
    longest = [entry for _, entry in sorted(joined.items(), key=lambda item: (-item[1]["ms"], item[0]))]
    listed = [{**entry, "calls": round(entry["calls"], 2)} for entry in longest]
    return Breakdown(
        # Rounding may make the categories' sum slightly larger than the total. Gaps are at least zero.
        categories={**sums, GAPS: max(0.0, total_ms - sum(sums.values()))},
        total_ms=total_ms,
        floor_ms=sum(sums[name] for name in FLOOR),
        kernels=len(events),
        top=listed[:TOP],
        other=[entry for entry in listed if entry["category"] == OTHER],
        **values,
    )


def of_kernels(
    with_operators: Iterable[Any], device_only: Iterable[Any], *, source: str, timed_ms: float, call_ms: float
) -> Breakdown:
    """The breakdown of a call on the GPU.

    Args:
        with_operators: events of the first recording: operators and kernels of the plain call.
        device_only: events of the second recording: only kernels.
        source: what the second recording shows: ``REPLAY`` or ``CALL``.
        timed_ms: time of the replay or call of the second recording, measured without a profiler.
        call_ms: time of the plain call without a profiler.

    Raises RuntimeError if a recording has no kernel, for example because CUPTI is not permitted.
    """
    events = list(with_operators)
    plain, launches = _launches(events), _launches(device_only)
    if not plain or not launches:
        what = "the plain call" if not plain else f"the {source}"
        raise RuntimeError(f"the profiler recorded no kernel of {what}: CUPTI does not work here")
    shares = shares_by_name(events)
    parts = [
        _entry(event.name, found, length * share, share)
        for event, length in zip(launches, _uncovered_us(launches), strict=True)
        for found, share in (shares.get(event.name) or {category(event.name): 1.0}).items()
    ]
    gaps_ms = max(0.0, call_ms - sum(_uncovered_us(plain)) / 1e3)
    return _breakdown(parts, launches, source=source, timed_ms=timed_ms, call_gaps_ms=gaps_ms)


def of_cpu_operators(events: Iterable[Any], *, timed_ms: float) -> Breakdown:
    """The breakdown of a call on the CPU, from the operators of the thread that made the call.

    The time of an operator does not include the operators that it calls. Raises RuntimeError if the recording
    has no operator.
    """
    found = [event for event in events if event.device_type.name == "CPU" and not event.is_async]
    if not found:
        raise RuntimeError("the profiler recorded no operator")
    # The thread that makes the call also runs the first operator. Operators in other threads are not counted.
    thread = min(found, key=lambda event: event.time_range.start).thread
    own = [event for event in found if event.thread == thread]
    parts = [_entry(event.name, category("", _operator(event)), event.self_cpu_time_total) for event in own]
    return _breakdown(parts, own, source=CPU, timed_ms=timed_ms, call_gaps_ms=None)


def _recorded(
    call: Callable[[], object], device: torch.device, activities: Sequence[ProfilerActivity]
) -> Any:
    timing.synchronize(device)
    with profile(activities=activities) as session:
        result = call()
        timing.synchronize(device)
    del result
    return session.events()


def measure(
    call: Callable[[], object],
    replay: Callable[[], object] | None,
    device: torch.device,
    *,
    call_ms: float,
    replay_ms: float | None,
    recordings: int = RECORDINGS,
) -> Breakdown:
    """Record ``call`` or its ``replay`` several times. Returns the breakdown with the median ``total_ms``.

    ``call`` must have run before. On a GPU, ``call`` is recorded once with its operators. Then ``replay``, or
    ``call`` if ``replay`` is None, is recorded without operators. ``call_ms`` and ``replay_ms``: the times of
    ``call`` and ``replay`` without a profiler. Raises RuntimeError if the profiler recorded nothing.
    """
    with timing.device_scope(device):
        if device.type != "cuda":
            runs = [_recorded(call, device, [ProfilerActivity.CPU]) for _ in range(recordings)]
            found = [of_cpu_operators(events, timed_ms=call_ms) for events in runs]
        else:
            plain = _recorded(call, device, [ProfilerActivity.CPU, ProfilerActivity.CUDA])
            what, source, timed_ms = call, CALL, call_ms
            if replay is not None and replay_ms is not None:
                what, source, timed_ms = replay, REPLAY, replay_ms
            runs = [_recorded(what, device, [ProfilerActivity.CUDA]) for _ in range(recordings)]
            found = [
                of_kernels(plain, events, source=source, timed_ms=timed_ms, call_ms=call_ms)
                for events in runs
            ]
    return sorted(found, key=lambda one: one.total_ms)[(len(found) - 1) // 2]
