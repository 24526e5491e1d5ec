"""What a person sees of a run: tables that fit any width, lines of text, and what is being measured now."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

__all__ = ["Blocks", "console", "print_lines", "step_progress", "watched"]

# A file or a pipe has no width: wide enough for a table of many columns in one block.
PIPE_WIDTH = 160
# Of a table's frame: two spaces and a line for each column, and the line at its end.
COLUMN_FRAME, TABLE_FRAME = 3, 1
# Between two signs of life of a training: redrawn on a terminal, lines of a log elsewhere. A single step is too short for either.
REDRAW_S, LINE_S = 0.2, 10.0


def console() -> Console:
    """Standard output: a terminal, or what ``COLUMNS`` names, as wide as it is, anything else wide enough."""
    out = Console(highlight=False)
    return out if out.is_terminal or "COLUMNS" in os.environ else Console(highlight=False, width=PIPE_WIDTH)


def print_lines(out: Console, lines: Iterable[str]) -> None:
    """Notes below a table. Names of kernels and reasons hold brackets, which are no markup."""
    for line in lines:
        out.print(Text(line, style="dim", overflow="fold"))


def _longest_word(text: str) -> int:
    return max(map(cell_len, text.split()), default=0)


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + COLUMN_FRAME * len(widths) + TABLE_FRAME


@dataclass(frozen=True)
class Blocks:
    """A table that is never cut: columns that find no room stand in a further block below it.

    Attributes:
        left: number of the first columns that are text. They stand in every block.
        means: rows below a rule. A row may be shorter than the header.
    """

    header: Sequence[str]
    body: Sequence[Sequence[str]]
    title: str = ""
    caption: str = ""
    left: int = 1
    means: Sequence[Sequence[str]] = ()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        rows = [*self.body, *self.means]
        columns = [[row[i] for row in rows if i < len(row)] for i in range(len(self.header))]
        full = [max(map(cell_len, (name, *cells))) for name, cells in zip(self.header, columns, strict=True)]
        least = [
            max(_longest_word(name), *map(_longest_word if i < self.left else cell_len, cells), 0)
            for i, (name, cells) in enumerate(zip(self.header, columns, strict=True))
        ]
        # A single cell wider than a line is folded.
        room = options.max_width - _total(least[: self.left]) - COLUMN_FRAME
        least = [*least[: self.left], *(min(width, max(1, room)) for width in least[self.left :])]
        yield Text(self.title, style="italic")
        if _total(full) <= options.max_width:
            yield self._table(range(len(full)), full)
        else:
            for block in self._blocks(least, options.max_width):
                yield self._table(block, self._roomy(block, full, least, options.max_width))
        if self.caption:
            yield Text(self.caption, style="dim italic")

    def _blocks(self, widths: Sequence[int], room: int) -> list[list[int]]:
        shared = list(range(self.left))
        blocks = [shared.copy()]
        for index in range(self.left, len(widths)):
            if len(blocks[-1]) > self.left and _total([widths[i] for i in (*blocks[-1], index)]) > room:
                blocks.append(shared.copy())
            blocks[-1].append(index)
        return blocks

    def _roomy(self, block: Sequence[int], full: Sequence[int], least: Sequence[int], room: int) -> list[int]:
        """Widths in which the text takes what the numbers leave."""
        widths = list(least)
        for index in range(self.left):
            spare = max(0, room - _total([widths[i] for i in block]))
            widths[index] = min(full[index], widths[index] + spare)
        return widths

    def _table(self, block: Sequence[int], widths: Sequence[int]) -> Table:
        table = Table()
        for index in block:
            justify = "left" if index < self.left else "right"
            table.add_column(Text(self.header[index]), justify=justify, width=widths[index], overflow="fold")  # type: ignore[arg-type]
        for rows in (self.body, self.means):
            for row in rows:
                table.add_row(*(Text(row[index] if index < len(row) else "") for index in block))
            table.add_section()
        return table


def _progress() -> Progress:
    # On standard error, so that a redirected standard output holds the tables only.
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    errors = Console(stderr=True, highlight=False)
    return Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal)


@contextlib.contextmanager
def watched(total: int) -> Iterator[tuple[Callable[[str], None], Callable[[str], None]]]:
    """``(on_start, on_done)`` of ``total`` measurements: what runs now and how much is left, and a line for each result.

    ``on_start`` gets a measurement's name, ``on_done`` its line; an empty one is not shown. Without a terminal there are
    the lines alone.
    """
    with _progress() as progress:
        task = progress.add_task("building", total=total)

        def on_done(line: str) -> None:
            if line:
                progress.console.print(Text(line), soft_wrap=True)
            progress.advance(task)

        yield (lambda name: progress.update(task, description=name)), on_done


@contextlib.contextmanager
def step_progress(total: int) -> Iterator[Callable[[str, int], None]]:
    """What trainings of ``total`` steps each call with their name after each step: a bar, or lines where there is no terminal."""
    with _progress() as progress:
        task = progress.add_task("building", total=total)
        shown = time.monotonic()

        def on_step(name: str, step: int) -> None:
            nonlocal shown
            now = time.monotonic()
            if step not in (1, total) and now - shown < (LINE_S if progress.disable else REDRAW_S):
                return
            shown = now
            if progress.disable:
                print(f"{name}: step {step} of {total}", file=sys.stderr)
            progress.update(task, description=name, completed=step)

        yield on_step
