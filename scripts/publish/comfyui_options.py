"""The command-line options that the measurements of ComfyUI share, and the check of the checkouts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

FoldersArgument = Annotated[list[Path], typer.Argument(help="Checkouts of ComfyUI, one for each release.")]
SamplerStepsOption = Annotated[int, typer.Option(help="Steps of the sampler, with guidance.")]


def check_checkouts(folders: list[Path]) -> None:
    """Raises typer.BadParameter if one of ``folders`` is no checkout of ComfyUI."""
    for folder in folders:
        if not (folder / "comfy").is_dir():
            raise typer.BadParameter(f"{str(folder)!r} is no checkout of ComfyUI", param_hint="folders")
