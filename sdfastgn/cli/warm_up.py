"""``sdfastgn warm-up``: compiles a model's kernels before they are needed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sdfastgn.cli.app import command
from sdfastgn.cli.errors import one_line_errors
from sdfastgn.cli.options import DeviceOption, DtypeOption
from sdfastgn.models.configurations import TEXT_TO_IMAGE


@command(name="warm-up")
def warm_up(
    model: Annotated[
        str | None,
        typer.Argument(
            help=f"Model: {', '.join(TEXT_TO_IMAGE)}, a saved pipeline's path, or a Hub id. "
            "Optional with --import."
        ),
    ] = None,
    size: Annotated[
        list[str] | None,
        typer.Option(
            "--size",
            metavar="<str>",
            help="Size of the images, 512 or 768x512 (width first). Repeat the option for several.",
            show_default="the model's own",
        ),
    ] = None,
    batch: Annotated[int, typer.Option("--batch", help="Images per call.")] = 1,
    export: Annotated[
        Path | None,
        typer.Option("--export", metavar="<path>", help="Write the model's compiled kernels to this file."),
    ] = None,
    archive: Annotated[
        Path | None,
        typer.Option(
            "--import", metavar="<path>", help="First add the kernels of a file that --export has written."
        ),
    ] = None,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
) -> None:
    """Compile a model's kernels into Triton's cache, or bring them from a machine with the same GPU."""
    from sdfastgn.cli.kernel_cache import run

    with one_line_errors():
        code = run(
            model=model,
            sizes=size or (),
            batch=batch,
            dtype=dtype,
            device=device,
            export=export,
            archive=archive,
        )
    raise typer.Exit(code)
