"""The command line's app, the options that commands share, and how their errors end."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from sdfastgn.bench.models.configurations import MODELS, SEEDS
from sdfastgn.bench.models.presets import PRESETS
from sdfastgn.bench.models.variants import PARTS, VARIANTS
from sdfastgn.program import program

HELP_OPTIONS: dict[str, Any] = {"help_option_names": ["-h", "--help"]}

app = typer.Typer(
    help="Make Stable Diffusion in diffusers faster, and measure by how much.",
    context_settings=HELP_OPTIONS,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

ModelOption = Annotated[
    str | None, typer.Option("--model", help=f"{', '.join(MODELS)}; what --weights are, or tiny")
]
DtypeOption = Annotated[
    str | None, typer.Option("--dtype", help="fp16, bf16 or fp32; fp16 on a GPU, fp32 on the CPU")
]
DeviceOption = Annotated[
    str | None, typer.Option("--device", help="cuda, cuda:N or cpu; cuda where there is a GPU")
]
JsonOption = Annotated[Path | None, typer.Option("--json", help="also write everything to this file")]
WeightsOption = Annotated[str, typer.Option("--weights", help="random, a path, or a Hub id")]
StepsOption = Annotated[int | None, typer.Option("--steps", help="UNet steps of a pipeline; 30")]
EveryStepsOption = Annotated[
    str | None, typer.Option("--steps", help="UNet steps of a pipeline, or a list such as 1,4; 30")
]
BatchesOption = Annotated[
    str | None, typer.Option("--batch", help="2 for unet (guidance), else 1; or a list such as 1,8")
]
SizeOption = Annotated[
    int | None, typer.Option("--size", help="pixels of the square image; what the model was made for")
]
PresetOption = Annotated[
    str | None, typer.Option("--preset", help=f"settings of others: {', '.join(PRESETS)}")
]
SchedulerOption = Annotated[
    str | None, typer.Option("--scheduler", help="of a pipeline, a class of diffusers; the model's own")
]
HtmlOption = Annotated[Path | None, typer.Option("--html", help="also write one page to this file")]
PartOption = Annotated[
    list[str] | None, typer.Option("--part", help=f"{', '.join(PARTS)}; repeat for several")
]
ProfileOption = Annotated[
    bool, typer.Option("--profile", help="also show where the time goes; of a pipeline, if alone")
]
Fp32Option = Annotated[
    bool, typer.Option("--fp32-reference", help="also compare with the same weights in fp32")
]
ShapesOption = Annotated[
    str, typer.Option("--shapes", help="all, a set of the suite such as unet, or a list such as NxCxHxW,...")
]
ProvidersOption = Annotated[
    str | None, typer.Option("--providers", help="all, or a list of {providers}; all but inductor")
]
DtypesOption = Annotated[
    str | None, typer.Option("--dtype", help="fp16, bf16, fp32, or a list; fp16, for issue_28201 fp32")
]


def checked_seed(value: int) -> int:
    if value not in SEEDS:
        raise typer.BadParameter(f"{value} is not a whole number of 64 bits, from {SEEDS[0]} to {SEEDS[-1]}")
    return value


def checked_guidance(value: float | None) -> float | None:
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is not finite")
    return value


GuidanceOption = Annotated[
    float | None, typer.Option("--guidance", callback=checked_guidance, help="of a pipeline; 7.5")
]
SeedOption = Annotated[
    int, typer.Option("--seed", callback=checked_seed, help="of weights, inputs and noise")
]


def _version(asked: bool) -> None:
    if asked:
        from sdfastgn import __version__

        typer.echo(f"sdfastgn {__version__}")
        raise typer.Exit


@app.callback()
def options_of_all(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="print the version")
    ] = False,
) -> None:
    pass


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """Bad options and weights that cannot be loaded end in one line and exit code 2."""
    from sdfastgn.bench.documents import OptionError

    try:
        yield
    except OptionError as error:
        typer.echo(f"{program()}: {error}", err=True)
        raise typer.Exit(2) from None


def _suites() -> Mapping[str, Any]:
    from sdfastgn.bench.kernels.suites import SUITES

    return SUITES


# What stands for a registry's names in help texts, filled in when shown: suites import torch.
_LISTS: dict[str, Callable[[], Iterable[str]]] = {
    "{variants}": lambda: VARIANTS,
    "{suites}": _suites,
    "{providers}": lambda: dict.fromkeys(name for each in _suites().values() for name in each.providers),
}


class Listing(typer.core.TyperCommand):
    """A command whose help lists registries."""

    def get_help(self, ctx: Any) -> str:
        for option in map(vars, self.params):
            for word, names in _LISTS.items():
                if word in (option.get("help") or ""):
                    option["help"] = option["help"].replace(word, ", ".join(names()))
        return str(super().get_help(ctx))
