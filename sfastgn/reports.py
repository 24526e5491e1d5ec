"""What ``optimize`` did or would do to a pipeline, as data and as a table of text."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sfastgn.patches.cuda_graphs import Graphs

__all__ = ["Entry", "Report"]


@dataclass(frozen=True)
class Entry:
    """One module and one fusion. ``path`` is dotted, from the pipeline or the module; ``reason`` is empty unless skipped."""

    component: str
    path: str
    fusion: str
    kind: str
    status: str
    reason: str = ""


@dataclass(frozen=True)
class Report:
    """State of a pipeline or module. ``backend`` says what runs the fused calls where the weights are now.

    ``channels_last_weights``: convolutions whose weights were laid out anew. ``layout_copies_removed``: copies to channels-first
    that the stock model makes at each call and this one does not. ``graphs``: what became of each module whose calls can be CUDA graphs.
    ``graph_memory_bytes``: GPU memory of all graphs of the process that share a pool with these.
    """

    entries: tuple[Entry, ...]
    backend: str
    channels_last_weights: int
    layout_copies_removed: int
    graphs: tuple[Graphs, ...] = ()
    graph_memory_bytes: int = 0

    @property
    def fused(self) -> tuple[Entry, ...]:
        return tuple(e for e in self.entries if e.status == "fused")

    @property
    def fusable(self) -> tuple[Entry, ...]:
        """What ``optimize`` would fuse and has not yet."""
        return tuple(e for e in self.entries if e.status == "fusable")

    @property
    def skipped(self) -> tuple[Entry, ...]:
        return tuple(e for e in self.entries if e.status == "skipped")

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON-ready data."""
        return asdict(self)

    def __str__(self) -> str:
        counts = Counter((e.component, e.fusion, e.status) for e in self.entries)
        rows: list[tuple[str, ...]] = [("component", "fusion", "fused", "fusable", "skipped")]
        for component, fusion in dict.fromkeys((c, f) for c, f, _ in counts):
            numbers = (str(counts[component, fusion, status]) for status in ("fused", "fusable", "skipped"))
            rows.append((component, fusion, *numbers))
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = ["  ".join(cell.ljust(w) if i < 2 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True)))
                 for row in rows]  # fmt: skip
        lines.insert(1, "  ".join("-" * w for w in widths))
        lines.append(
            f"channels-last weights: {self.channels_last_weights}   layout copies removed per call: {self.layout_copies_removed}"
        )
        lines.append(f"runs in: {self.backend}")
        lines += self._graph_lines()
        for reason, paths in self._skipped_by_reason().items():
            more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
            lines.append(f"skipped: {', '.join(paths[:3])}{more}: {reason}")
        return "\n".join(lines)

    def _graph_lines(self) -> list[str]:
        lines = []
        for g in self.graphs:
            if g.replays or g.eager:
                eager = "; ".join(f"{count} calls without: {reason}" for reason, count in g.eager.items())
                lines.append(
                    f"CUDA graphs of {g.path or g.kind}: {g.alive} alive, {g.replays} calls replayed{'; ' if eager else ''}{eager}"
                )
        if self.graph_memory_bytes:
            lines.append(f"memory of CUDA graphs: {self.graph_memory_bytes / 2**20:.0f} MiB")
        return lines

    def _skipped_by_reason(self) -> dict[str, list[str]]:
        groups: dict[str, list[str]] = {}
        for entry in self.skipped:
            groups.setdefault(f"{entry.reason} ({entry.fusion})", []).append(entry.path)
        return groups
