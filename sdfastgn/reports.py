"""What ``optimize`` did or would do to a pipeline: as data, in one line, as text and as HTML."""

from __future__ import annotations

import html
import textwrap
from collections import Counter
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sdfastgn.patches.graphs.install import Graphs

__all__ = ["Entry", "Report"]

# Columns of the printed report, so that it is readable in the narrowest usual terminal.
WIDTH = 80
STATUSES = ("fused", "fusable", "skipped")


@dataclass(frozen=True)
class Entry:
    """One module and one fusion. ``path`` is dotted, from the pipeline or the module; ``reason`` is empty unless skipped."""

    component: str
    path: str
    fusion: str
    kind: str
    status: str
    reason: str = ""


@dataclass(frozen=True, repr=False)
class Report:
    """State of a pipeline or module; ``print`` it for all of it.

    ``backend``: what runs the fused calls where the weights are now; empty for weights on the meta device.
    ``channels_last_weights``: convolutions whose weights were laid out anew.
    ``layout_copies_removed``: copies to channels-first that the stock model makes at each call and this one does not.
    ``graphs``: what became of each module whose calls can be CUDA graphs.
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

    def __repr__(self) -> str:
        return f"<sdfastgn report: {self._summary()}, graphs: {self._graph_summary()}; print it for details>"

    def __str__(self) -> str:
        rows = [("component", "fusion", *STATUSES), *self._counts()]
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = [*_wrapped(f"{self._summary()}, graphs: {self._graph_summary()}"), ""]
        rule = len(lines) + 1
        for row in rows:
            cells = [
                cell.ljust(width) if i < 2 else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            ]
            lines.append("  ".join(cells))
        lines.insert(rule, "  ".join("-" * width for width in widths))
        lines.append("")
        for title, more in self._details():
            lines += _wrapped(title)
            for line in more:
                lines += _wrapped(line, "  ")
        return "\n".join(lines).rstrip()

    def _repr_html_(self) -> str:
        """What notebooks show: the printed report as tables."""
        header = "".join(f"<th>{name}</th>" for name in ("component", "fusion", *STATUSES))
        counts = "".join(_html_row(row) for row in self._counts())
        details = "".join(_html_row((title, "; ".join(more))) for title, more in self._details())
        summary = html.escape(f"sdfastgn: {self._summary()}, graphs: {self._graph_summary()}")
        return f"<p><b>{summary}</b></p><table><tr>{header}</tr>{counts}</table><table>{details}</table>"

    def _summary(self) -> str:
        parts = [f"{_parts(self.fused)} fused"] if self.fused else []
        if self.fusable:
            parts.append(f"optimize would fuse {_parts(self.fusable)}")
        return f"{', '.join(parts) or 'nothing to fuse'}, {len(self.skipped)} skipped"

    def _graph_summary(self) -> str:
        alive, replays = (sum(getattr(g, name) for g in self.graphs) for name in ("alive", "replays"))
        return f"{alive} alive, {replays} calls replayed" if alive or replays else "none"

    def _counts(self) -> list[tuple[str, ...]]:
        counts = Counter((e.component, e.fusion, e.status) for e in self.entries)
        pairs = dict.fromkeys((component, fusion) for component, fusion, _ in counts)
        return [(*pair, *(str(counts[*pair, status]) for status in STATUSES)) for pair in pairs]

    def _details(self) -> list[tuple[str, list[str]]]:
        """What stands below the table: lines, each with those that are indented under it."""
        found = [
            (f"skipped: {reason}", [", ".join(paths)]) for reason, paths in self._skipped_by_reason().items()
        ]
        if self.fused:
            counts = (
                f"{self.channels_last_weights}, layout copies removed per call: {self.layout_copies_removed}"
            )
            found.append((f"channels-last weights: {counts}", []))
        if self.backend:
            found.append((f"{'runs in' if self.fused else 'would run in'}: {self.backend}", []))
        for g in self.graphs:
            if g.replays or g.eager:
                eager = [f"{count} calls without: {reason}" for reason, count in g.eager.items()]
                found.append(
                    (f"CUDA graphs of {g.path or g.kind}: {g.alive} alive, {g.replays} calls replayed", eager)
                )
        if self.graph_memory_bytes:
            found.append((f"memory of CUDA graphs: {self.graph_memory_bytes / 2**20:.0f} MiB", []))
        return found

    def _skipped_by_reason(self) -> dict[str, list[str]]:
        groups: dict[str, list[str]] = {}
        for entry in self.skipped:
            groups.setdefault(f"{entry.reason} ({entry.fusion})", []).append(entry.path or entry.kind)
        return groups


def _parts(entries: tuple[Entry, ...]) -> str:
    return f"{len(entries)} part{'' if len(entries) == 1 else 's'}"


def _wrapped(text: str, indent: str = "") -> list[str]:
    # Class names and paths are copied and searched for: they are not broken at a hyphen.
    return textwrap.wrap(
        text, WIDTH, initial_indent=indent, subsequent_indent=f"{indent}  ", break_on_hyphens=False
    )


def _html_row(cells: tuple[str, ...]) -> str:
    return f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in cells)}</tr>"
