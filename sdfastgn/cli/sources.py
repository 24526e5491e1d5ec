"""``sdfastgn sources``: lists methods of diffusers and ComfyUI whose installed code was never tested."""

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
            help="Earlier release: a wheel, a folder or a checkout of diffusers, or a checkout of ComfyUI. "
            "Shows what changed since then.",
        ),
    ] = None,
    comfyui: Annotated[
        Path | None, typer.Option("--comfyui", help="Checkout of ComfyUI. Its methods are listed too.")
    ] = None,
    accept: Annotated[
        bool, typer.Option("--accept", help="Mark the unknown code as tested. First read what changed.")
    ] = False,
) -> None:
    """List methods of diffusers and ComfyUI that sdfastgn relies on, if their code was never tested."""
    from sdfastgn.cli import light_imports, terminal

    if context.obj == OWN_PROCESS and comfyui is None:
        light_imports.import_model_classes()
    from sdfastgn.cli.known_sources import print_sources

    with one_line_errors():
        code = print_sources(terminal.console(), against=against, comfyui=comfyui, accept=accept)
    raise typer.Exit(code)
