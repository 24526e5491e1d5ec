"""Ends a command after an error of the user, such as a bad option."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import typer

from sdfastgn.program import OptionError, program


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """A context in which an OptionError ends the command: it prints one line, and the exit code is 2."""
    try:
        yield
    except OptionError as error:
        typer.echo(f"{program()}: {error}", err=True)
        raise typer.Exit(2) from None
