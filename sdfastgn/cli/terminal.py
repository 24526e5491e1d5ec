"""Output to the terminal: the console, notes below tables, and a progress bar."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator

from rich.console import Console
from rich.markup import escape
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn
from rich.text import Text

# Characters per line in a file or pipe, which have no width: enough for a table with many columns.
PIPE_WIDTH = 160


def console() -> Console:
    """Standard output. As wide as the terminal or ``COLUMNS``; without these, ``PIPE_WIDTH``."""
    out = Console(highlight=False)
    return out if out.is_terminal or "COLUMNS" in os.environ else Console(highlight=False, width=PIPE_WIDTH)


def print_lines(out: Console, lines: Iterable[str]) -> None:
    """Print notes in a dim style."""
    for line in lines:
        # As Text, because rich would read brackets in names of kernels as markup.
        out.print(Text(line, style="dim", overflow="fold"))


@contextlib.contextmanager
def watched(
    total: int, *, quiet: bool = False
) -> Iterator[tuple[Callable[[str], None], Callable[[str], None]]]:
    """Show a progress bar for ``total`` measurements, and a line after each.

    Yields two functions. Call ``on_start`` with the name of a measurement when it begins, and ``on_done``
    with its line when it ends; an empty line is not shown. Without a terminal there is no bar, and with
    ``quiet`` nothing is shown.
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
