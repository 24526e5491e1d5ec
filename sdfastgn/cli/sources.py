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
        typer.Option(
            "--against",
            help="Wheel or folder of a diffusers release, or ComfyUI's checkout. Shows what changed since.",
        ),
    ] = None,
    comfyui: Annotated[
        Path | None, typer.Option("--comfyui", help="Checkout of ComfyUI, whose methods are listed too.")
    ] = None,
    accept: Annotated[
        bool, typer.Option("--accept", help="Take the unknown code for tested. Read what changed before.")
    ] = False,
) -> None:
    """List the upstream methods that fusions rely upon and whose code was never tested."""
    from sdfastgn.cli import light_imports, terminal

    if context.obj == OWN_PROCESS and comfyui is None:
        light_imports.import_model_classes()
    from sdfastgn.cli.known_sources import print_sources

    with one_line_errors():
        code = print_sources(terminal.console(), against=against, comfyui=comfyui, accept=accept)
    raise typer.Exit(code)
