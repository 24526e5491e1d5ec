"""What a person sees of a run besides tables: notes, progress."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator

from rich.console import Console
from rich.markup import escape
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn
from rich.text import Text

# A file or a pipe has no width: wide enough for a table of many columns in one block.
PIPE_WIDTH = 160


def console() -> Console:
    """Standard output, as wide as the terminal or ``COLUMNS``, or wide enough for any table."""
    out = Console(highlight=False)
    return out if out.is_terminal or "COLUMNS" in os.environ else Console(highlight=False, width=PIPE_WIDTH)


def print_lines(out: Console, lines: Iterable[str]) -> None:
    """What a person reads beside the tables."""
    for line in lines:
        # As text: names of kernels and reasons hold brackets, which are no markup.
        out.print(Text(line, style="dim", overflow="fold"))


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
