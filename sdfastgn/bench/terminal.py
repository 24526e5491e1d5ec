"""What a person sees of a run: tables that fit any width, notes, progress."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.markup import escape
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

# A file or a pipe has no width: wide enough for a table of many columns in one block.
PIPE_WIDTH = 160
# Characters that a table's frame takes: for each column, and at its end.
COLUMN_FRAME, TABLE_FRAME = 3, 1


def console() -> Console:
    """Standard output, as wide as the terminal or ``COLUMNS``, or wide enough for any table."""
    out = Console(highlight=False)
    return out if out.is_terminal or "COLUMNS" in os.environ else Console(highlight=False, width=PIPE_WIDTH)


def print_lines(out: Console, lines: Iterable[str]) -> None:
    """What a person reads beside the tables."""
    for line in lines:
        out.print(_note(line))


def _note(line: str) -> Text:
    """A dim line. Names of kernels and reasons hold brackets, which are no markup."""
    return Text(line, style="dim", overflow="fold")


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + COLUMN_FRAME * len(widths) + TABLE_FRAME


@dataclass(frozen=True)
class Blocks:
    """A table that is never cut: columns that find no room stand in a further block below it.

    Attributes:
        body: rows, which may be shorter than the header.
        left: number of the first columns that are text. They stand in every block.
        notes: lines below the table.
    """

    header: Sequence[str]
    body: Sequence[Sequence[str]]
    title: str = ""
    caption: str = ""
    left: int = 1
    notes: Sequence[str] = ()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        widths = self._widths(options.max_width)
        yield Text(self.title, style="italic")
        shared = list(range(self.left))
        block = shared.copy()
        for index in range(self.left, len(widths)):
            if len(block) > self.left and _total([widths[i] for i in (*block, index)]) > options.max_width:
                yield self._table(block, widths)
                block = shared.copy()
            block.append(index)
        yield self._table(block, widths)
        if self.caption:
            yield Text(self.caption, style="dim italic")
        for line in self.notes:
            yield _note(line)

    def _widths(self, room: int) -> list[int]:
        """Of the columns. Text is folded between words, numbers where a cell is wider than a line."""
        rows = [self.header, *self.body]
        columns = [[row[i] for row in rows if i < len(row)] for i in range(len(self.header))]
        widths = [max(map(cell_len, column)) for column in columns]
        if _total(widths) <= room:
            return widths
        words = [max(map(cell_len, " ".join(column).split())) for column in columns[: self.left]]
        share = room // (2 * self.left)
        texts = [max(word, min(width, share)) for word, width in zip(words, widths, strict=False)]
        room = max(1, room - _total(texts) - COLUMN_FRAME)
        numbers = [max(map(cell_len, (*name.split(), *cells))) for name, *cells in columns[self.left :]]
        return [*texts, *(min(number, room) for number in numbers)]

    def _table(self, block: Sequence[int], widths: Sequence[int]) -> Table:
        table = Table()
        for index in block:
            name = Text(self.header[index])
            justify: Literal["left", "right"] = "left" if index < self.left else "right"
            table.add_column(name, justify=justify, width=widths[index], overflow="fold")
        for row in self.body:
            table.add_row(*(Text(row[index] if index < len(row) else "") for index in block))
        return table


@contextlib.contextmanager
def watched(
    total: int, *, quiet: bool = False
) -> Iterator[tuple[Callable[[str], None], Callable[[str], None]]]:
    """``(on_start, on_done)`` of ``total`` measurements, for a progress bar and a line each.

    ``on_start`` gets a measurement's name, ``on_done`` its line; an empty one is not shown. Without
    a terminal there are the lines alone, and nothing if ``quiet``.
    """
    columns = (*Progress.get_default_columns(), MofNCompleteColumn(), TimeElapsedColumn())
    # On standard error, so that a redirected standard output holds the tables only.
    errors = Console(stderr=True, highlight=False, quiet=quiet)
    shown = Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal)
    with shown as progress:
        task = progress.add_task("building", total=total)

        def on_done(line: str) -> None:
            if line:
                progress.console.print(Text(line), soft_wrap=True)
            progress.advance(task)

        yield (lambda name: progress.update(task, description=escape(name))), on_done
