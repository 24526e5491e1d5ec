"""``sdfastgn kernels``: times single operations of sdfastgn, and other implementations of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from sdfastgn.cli.app import NAMES, command
from sdfastgn.cli.errors import one_line_errors
from sdfastgn.cli.options import DTYPE_WORDS, DeviceOption, JsonOption, SeedOption


def _suites() -> Mapping[str, Any]:
    from sdfastgn.bench.kernels.suites import SUITES

    return SUITES


NAMES["{suites}"] = _suites
NAMES["{providers}"] = lambda: dict.fromkeys(name for each in _suites().values() for name in each.providers)
ShapesOption = Annotated[
    str,
    typer.Option(
        "--shapes", help="Shapes: all, a set of the suite such as unet, or a list such as 2x320x64x64."
    ),
]
ProvidersOption = Annotated[
    str | None,
    typer.Option(
        "--providers",
        help="Implementations: all, or a list of {providers}.",
        show_default="all but inductor, inductor_ndhwc, gnnhwc and apex",
    ),
]
DtypesOption = Annotated[
    str | None,
    typer.Option(
        "--dtype",
        help=f"Data type: {DTYPE_WORDS}, or a list of them.",
        show_default="fp16",
    ),
]


@command()
def kernels(
    suite: Annotated[str, typer.Option("--suite", help="Suite: {suites}.")] = "inference",
    shapes: ShapesOption = "all",
    providers: ProvidersOption = None,
    dtype: DtypesOption = None,
    device: DeviceOption = None,
    repeats: Annotated[
        int | None,
        typer.Option(
            help="Timed rounds of each measurement.", show_default="20 in the suite inference, else 10"
        ),
    ] = None,
    json: JsonOption = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw the roofline of the suite inference as this PNG file.")
    ] = None,
    seed: SeedOption = 0,
) -> None:
    """Time kernels beside a plain copy, with a hot and a cold L2 cache. Checks the outputs first."""
    from sdfastgn.cli import kernel_options, session

    with one_line_errors():
        configs = kernel_options.kernel_configs(
            suite=suite,
            shapes=shapes,
            names=providers,
            dtypes=dtype,
            device=device,
            repeats=repeats,
            seed=seed,
        )
        places = kernel_options.output_paths(configs, json=json, plot=plot)
        runs = zip(configs, places, strict=True)
        codes = [session.run_kernels(config, json=path, plot=picture) for config, (path, picture) in runs]
    raise typer.Exit(max(codes))
