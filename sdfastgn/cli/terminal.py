"""Output to the terminal: the console, notes below tables, a progress bar, and the time that is left."""

from __future__ import annotations

import contextlib
import datetime
import os
import time
from collections.abc import Callable, Iterable, Iterator

from rich.console import Console
from rich.markup import escape
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn
from rich.text import Text

# Characters per line if the output is a file or a pipe: enough for a table with many columns.
PIPE_WIDTH = 160


def console() -> Console:
    """A console for standard output. Its width is the terminal's, or ``COLUMNS``, or else ``PIPE_WIDTH``."""
    out = Console(highlight=False)
    return out if out.is_terminal or "COLUMNS" in os.environ else Console(highlight=False, width=PIPE_WIDTH)


def print_lines(out: Console, lines: Iterable[str]) -> None:
    """Print notes, such as those below a table, in a dim style."""
    for line in lines:
        # Names of kernels have brackets, which rich reads as markup in a plain string, but not in a Text.
        out.print(Text(line, style="dim", overflow="fold"))


class TimeLeft:
    """Estimates the time until ``total`` images are drawn."""

    def __init__(self, total: int) -> None:
        self.total, self.done = total, 0
        self.first: tuple[int, float] | None = None

    def after(self, count: int) -> str:
        """Call this after each batch, of ``count`` images. Returns a text such as ", ETA 0:20:10".

        The text is empty after the first batch. The first batch also compiles kernels, so its time says
        nothing about the other batches.
        """
        self.done += count
        now = time.monotonic()
        if self.first is None:
            self.first = self.done, now
            return ""
        done, start = self.first
        seconds = (now - start) / (self.done - done) * (self.total - self.done)
        return f", ETA {datetime.timedelta(seconds=round(seconds))}"


@contextlib.contextmanager
def watched(
    total: int, *, quiet: bool = False
) -> Iterator[tuple[Callable[[str], None], Callable[[str], None]]]:
    """Show a progress bar for ``total`` measurements, and a line of text after each measurement.

    Yields the functions ``on_start`` and ``on_done``. Call ``on_start`` with a measurement's name when the
    measurement begins, and ``on_done`` with its line of text when it ends. An empty line is not shown.
    Without a terminal there is no bar, and with ``quiet`` nothing is shown.
    """
    columns = (*Progress.get_default_columns(), MofNCompleteColumn(), TimeElapsedColumn())
    # The bar is on standard error, so that a redirected standard output contains only the tables.
    errors = Console(stderr=True, highlight=False, quiet=quiet)
    shown = Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal)
    with shown as progress:
        task = progress.add_task("building", total=total)

        def on_done(line: str) -> None:
            if line:
                progress.console.print(Text(line), soft_wrap=True)
            progress.advance(task)

        yield (lambda name: progress.update(task, description=escape(name))), on_done
