"""``sdfastgn warm-up``: compiles a model's kernels before they are needed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, cast

import typer

from sdfastgn.cli import checks
from sdfastgn.cli.app import command
from sdfastgn.cli.errors import one_line_errors
from sdfastgn.cli.options import DeviceOption, DtypeOption
from sdfastgn.models.configurations import TEXT_TO_IMAGE
from sdfastgn.program import OptionError


def _check(model: str | None, archive: Path | None, device: str | None, of_model: dict[str, Any]) -> None:
    """Check the command's options without torch. ``of_model``: options that are only for a given model."""
    if checks.device_word("--device", device) == "cpu":
        raise OptionError("--device: kernels can only be compiled on a CUDA GPU, got 'cpu'")
    if model is None:
        lacks = "give the model whose kernels are compiled"
        given = [option for option, value in of_model.items() if value not in (None, [])]
        if archive is None or given:
            raise OptionError(f"MODEL: {lacks}{f', for {given[0]}' if given else ''}")
        return
    checks.weights_source("MODEL", model, words=TEXT_TO_IMAGE)
    if of_model["--batch"] is not None:
        checks.positive("--batch", of_model["--batch"])
    if of_model["--dtype"] is not None:
        checks.dtype_word("--dtype", of_model["--dtype"])
    checks.file_path("--export", of_model["--export"])


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
    batch: Annotated[int | None, typer.Option("--batch", help="Images per call.", show_default="1")] = None,
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
    with one_line_errors():
        of_model = {"--size": size, "--batch": batch, "--export": export, "--dtype": dtype}
        _check(model, archive, device, of_model)
        # ``kernel_cache`` is imported after the checks of the options, because its import takes seconds.
        from sdfastgn.cli.kernel_cache import add_archive, run

        if model is None:
            add_archive(cast(Path, archive), device)
            return
        code = run(
            model=model,
            sizes=size or (),
            batch=1 if batch is None else batch,
            dtype=dtype,
            device=device,
            export=export,
            archive=archive,
        )
    raise typer.Exit(code)
