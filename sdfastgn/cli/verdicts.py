"""A table of the results of ``sdfastgn verify``, which compares each fused module with stock's code."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from sdfastgn.bench.tables.blocks import Blocks
from sdfastgn.reports import grouped
from sdfastgn.verification import PUT_BACK, RIGHT, UNVERIFIED, Verdict

_STATUSES = (RIGHT, PUT_BACK, UNVERIFIED)


def verification_table(verdicts: Sequence[Verdict]) -> Blocks:
    """A table with a row for each fusion.

    A row counts the modules with this fusion in three columns: those that were right, those that were wrong
    (they got stock's code back), and those that were not verified. It also has the largest error among these
    modules, and the error of stock's code in the module with the largest error.
    """
    parts: dict[str, list[Verdict]] = defaultdict(list)
    for verdict in verdicts:
        for fusion in verdict.fusions:
            parts[fusion].append(verdict)
    body = [(fusion, *_cells(found)) for fusion, found in parts.items()]
    header = ("fusion", *_STATUSES, "largest error", "stock's there")
    caption = "relative errors against fp32 (fp64 for fp32 weights)"
    return Blocks(header, body, caption=caption)


def _cells(found: list[Verdict]) -> tuple[str, ...]:
    counts = [str(sum(v.status == status for v in found)) for status in _STATUSES]
    measured = [(v.error, v.stock_error) for v in found if v.error is not None]
    # An error of NaN counts as the largest error.
    worst = max(measured, key=lambda pair: (pair[0] != pair[0], pair[0]), default=())
    return (*counts, *(f"{error:.2g}" for error in worst), *(["-"] * (2 - len(worst))))


def notes(verdicts: Sequence[Verdict]) -> Iterator[str]:
    """Yields a line for each reason why modules are wrong or not verified.

    A line has the reason, the number of such modules, and the paths of up to three of them.
    """
    wrong = ((f"{v.status}: {v.reason}", v.path) for v in verdicts if v.status != RIGHT)
    for reason, paths in grouped(wrong).items():
        yield f"{reason} ({len(paths)}: {', '.join(paths[:3])}{', ...' if len(paths) > 3 else ''})"
