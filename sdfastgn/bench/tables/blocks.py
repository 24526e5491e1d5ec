"""A table for terminals of any width."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

# Number of characters that lines and spaces between the cells take: ``COLUMN_FRAME`` for each column, and
# ``TABLE_FRAME`` once for a table.
COLUMN_FRAME, TABLE_FRAME = 3, 1


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + COLUMN_FRAME * len(widths) + TABLE_FRAME


@dataclass(frozen=True)
class Blocks:
    """A table for rich that is never cut off: columns that do not fit follow in further blocks below.

    Attributes:
        body: rows. A row may have fewer cells than the header.
        left: number of columns on the left that are text. They are repeated in every block.
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
            # Names of kernels have brackets, which rich reads as markup in a plain string, but not in a Text.
            yield Text(line, style="dim", overflow="fold")

    def _widths(self, room: int) -> list[int]:
        """Widths of the columns, if the terminal is ``room`` characters wide.

        Text may be broken between words. A number is broken only if it does not fit beside the text columns.
        """
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
