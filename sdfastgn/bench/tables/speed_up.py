"""The speed-up of a variant over eager, and whether it is uncertain because the times vary too much.

A variant is a way to run a model, such as with torch.compile. Eager is the variant with the unchanged model.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sdfastgn.bench.documents import OK
from sdfastgn.bench.run import Row
from sdfastgn.bench.variants import label

UNCERTAIN = "?"
# If eager's times before and after a variant differ by more than this factor, the speed-up is uncertain.
_DRIFT = 1.1


@dataclass(frozen=True)
class SpeedUp:
    """The time of eager (the unchanged model) divided by the time of a variant (a way to run the model).

    Attributes:
        value: eager's median time divided by the variant's. If eager was timed before and after the variant,
            the mean of the two medians counts.
        least, most: the lowest and the highest ratio that are possible if each of the two times is between
            its 10th and its 90th percentile.
        drift: the larger of eager's medians before and after the variant, divided by the smaller.
    """

    value: float
    least: float
    most: float
    drift: float = 1.0

    @property
    def is_uncertain(self) -> bool:
        """True if the range ``most - least`` exceeds ``value``, or if eager's time has changed too much."""
        return self.most - self.least > self.value or self.drift > _DRIFT

    @property
    def doubt(self) -> str:
        """Why the speed-up is uncertain, in words."""
        if self.drift > _DRIFT:
            return f"eager's times before and after this variant differ by a factor of {self.drift:.2f}"
        return (
            f"the 10th and 90th percentiles of the times allow {self.least:.2f}x to {self.most:.2f}x, "
            "a range wider than the speed-up itself"
        )

    def __str__(self) -> str:
        return f"{self.value:.2f}x" + UNCERTAIN * self.is_uncertain


def eager_of(rows: Iterable[Row]) -> Row | None:
    """The row of "eager" (the unchanged model); None if there is no such row, or if it has no time."""
    return next((row for row in rows if row.variant == "eager" and row.median_ms), None)


def speed_up(row: Row, eager: Row | None, *, as_graph: bool = False) -> SpeedUp | None:
    """The speed-up of a row's variant over eager. None if eager or the variant has no time.

    ``as_graph``: True for the speed-up of a replay of the row's CUDA graph. A row has no percentiles for
    replays, so ``least`` and ``most`` then depend only on eager's percentiles.
    """
    time = row.graph_ms if as_graph else row.median_ms
    if eager is None or not eager.median_ms or not time:
        return None
    if row is eager and not as_graph:
        return SpeedUp(1.0, 1.0, 1.0)
    fast, slow = (None, None) if as_graph else (row.p10_ms, row.p90_ms)
    around = row.eager_ms or [eager.median_ms]
    least = min(around) * (eager.p10_ms or eager.median_ms) / eager.median_ms / (slow or time)
    most = max(around) * (eager.p90_ms or eager.median_ms) / eager.median_ms / (fast or time)
    return SpeedUp(sum(around) / len(around) / time, least, most, max(around) / min(around))


def uncertain_notes(rows: Sequence[Row]) -> list[str]:
    """A line for each speed-up that a table marks as uncertain."""
    found = [(row.variant, speed_up(row, eager_of(rows))) for row in rows if row.status == OK]
    return [
        f"{label(name)}: {ratio} is uncertain: {ratio.doubt}"
        for name, ratio in found
        if ratio is not None and ratio.is_uncertain
    ]
