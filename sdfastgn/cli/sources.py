"""``sdfastgn sources``: whether the fusions know the code of this diffusers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sdfastgn.cli.app import command
from sdfastgn.cli.errors import one_line_errors
from sdfastgn.program import OWN_PROCESS


@command()
def sources(
    context: typer.Context,
    against: Annotated[
        Path | None,
        typer.Option("--against", help="Wheel or folder of a diffusers release. Shows what changed since."),
    ] = None,
) -> None:
    """List the methods of diffusers that the fusions rely upon, and whether their code was tested."""
    from sdfastgn.cli import light_imports, terminal

    if context.obj == OWN_PROCESS:
        light_imports.import_model_classes()
    from sdfastgn.cli.known_sources import print_sources

    with one_line_errors():
        code = print_sources(terminal.console(), against)
    raise typer.Exit(code)
