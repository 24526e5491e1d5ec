"""The command line's app, the options that commands share, and how their errors end."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from sdfastgn.bench.models.configurations import DTYPES, MODELS, PROMPT, SEEDS
from sdfastgn.bench.models.presets import PRESETS
from sdfastgn.bench.models.variants import PARTS, VARIANTS
from sdfastgn.program import program

HELP_OPTIONS: dict[str, Any] = {"help_option_names": ["-h", "--help"]}


# ---- help: each option is a sentence, with its default at the end


def _suites() -> Mapping[str, Any]:
    from sdfastgn.bench.kernels.suites import SUITES

    return SUITES


# What stands for a registry's names in help texts, filled in when shown: suites import torch.
_LISTS: dict[str, Callable[[], Iterable[str]]] = {
    "{variants}": lambda: VARIANTS,
    "{suites}": _suites,
    "{providers}": lambda: dict.fromkeys(name for each in _suites().values() for name in each.providers),
}


def _complete_help(parameter: Any, context: Any) -> None:
    """Fills registries' names into a parameter's help, and ends it with the default, if there is one.

    A default that is computed is told in the words of ``show_default``.
    """
    if getattr(parameter, "is_flag", False):
        parameter.metavar = ""  # it takes no value
    text = getattr(parameter, "help", None)
    if not text:
        return
    for word, names in _LISTS.items():
        if word in text:
            text = text.replace(word, ", ".join(names()))
    value, words = parameter.get_default(context), parameter.show_default
    if isinstance(value, bool):  # a script may set a flag
        value = "on" if value else ""
    elif isinstance(value, list | tuple):
        value = ", ".join(map(str, value))
    elif value is None:
        value = words if isinstance(words, str) else ""
    parameter.show_default = False  # typer would show it in brackets
    parameter.help = text if value == "" else f"{text.removesuffix('.')} (default: {value})."


class Command(typer.core.TyperCommand):
    def get_help(self, ctx: Any) -> str:
        for parameter in self.get_params(ctx):
            _complete_help(parameter, ctx)
        return str(super().get_help(ctx))


class Group(typer.core.TyperGroup):
    def get_help(self, ctx: Any) -> str:
        for parameter in self.get_params(ctx):
            _complete_help(parameter, ctx)
        return str(super().get_help(ctx))


app = typer.Typer(
    cls=Group,
    help="Make Stable Diffusion in diffusers faster, and measure by how much.",
    context_settings=HELP_OPTIONS,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
command = functools.partial(app.command, cls=Command)

# ---- options that commands share

ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model", help=f"Model: {', '.join(MODELS)}.", show_default="the one of --weights, or tiny"
    ),
]
DtypeOption = Annotated[
    str | None,
    typer.Option(
        "--dtype", help=f"Data type: {', '.join(DTYPES)}.", show_default="fp16 on a GPU, fp32 on the CPU"
    ),
]
DeviceOption = Annotated[
    str | None,
    typer.Option(
        "--device", help="Device: cuda, cuda:N or cpu.", show_default="cuda where there is a GPU, else cpu"
    ),
]
JsonOption = Annotated[Path | None, typer.Option("--json", help="Also write all results to this file.")]
WeightsOption = Annotated[str, typer.Option("--weights", help="Weights: random, a path, or a Hub id.")]
StepsOption = Annotated[
    int | None, typer.Option("--steps", help="Denoising steps of a pipeline.", show_default="30")
]
EveryStepsOption = Annotated[
    str | None,
    typer.Option("--steps", help="Denoising steps of a pipeline, or a list such as 1,4.", show_default="30"),
]
BatchesOption = Annotated[
    str | None,
    typer.Option(
        "--batch",
        help="Images a call, or a list such as 1,8.",
        show_default="2 for a UNet with guidance, else 1",
    ),
]
SizeOption = Annotated[
    int | None,
    typer.Option("--size", help="Width and height of the image in pixels.", show_default="the model's own"),
]
PresetOption = Annotated[
    str | None,
    typer.Option(
        "--preset", help=f"Settings of published benchmarks, with their numbers: {', '.join(PRESETS)}."
    ),
]
SchedulerOption = Annotated[
    str | None,
    typer.Option(
        "--scheduler",
        help="Scheduler of a pipeline, a class of diffusers such as EulerDiscreteScheduler.",
        show_default="the model's own",
    ),
]
PromptOption = Annotated[
    str | None, typer.Option("--prompt", help="Prompt of a pipeline.", show_default=PROMPT)
]
VariantsOption = Annotated[str, typer.Option("--variants", help="Variants: all, or a list of {variants}.")]
RepeatsOption = Annotated[
    int | None,
    typer.Option(
        "--repeats", help="Timed calls of each variant.", show_default="2 to 50, by part and device"
    ),
]
BreakdownOption = Annotated[
    Path | None, typer.Option("--plot", help="Draw the breakdown of --profile as this PNG file.")
]
HtmlOption = Annotated[Path | None, typer.Option("--html", help="Also write one HTML page to this file.")]
PartOption = Annotated[
    list[str] | None,
    typer.Option(
        "--part",
        metavar="<str>",
        help=f"What is timed: {', '.join(PARTS)}. Repeat for several.",
        show_default="unet, or the preset's",
    ),
]
ProfileOption = Annotated[
    bool,
    typer.Option(
        "--profile", help="Also show where the time goes. A pipeline is profiled only if it is the only part."
    ),
]
Fp32Option = Annotated[
    bool, typer.Option("--fp32-reference", help="Also compare with the same weights in fp32.")
]
ShapesOption = Annotated[
    str,
    typer.Option(
        "--shapes", help="Shapes: all, one of the suite's sets such as unet, or a list such as 2x320x64x64."
    ),
]
ProvidersOption = Annotated[
    str | None,
    typer.Option(
        "--providers",
        help="Implementations: all, or a list of {providers}.",
        show_default="all but those of inductor",
    ),
]
DtypesOption = Annotated[
    str | None,
    typer.Option(
        "--dtype",
        help=f"Data type: {', '.join(DTYPES)}, or a list of them.",
        show_default="fp16; fp32 in the suite issue_28201",
    ),
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
    float | None,
    typer.Option(
        "--guidance", callback=checked_guidance, help="Guidance scale of a pipeline.", show_default="7.5"
    ),
]
SeedOption = Annotated[
    int, typer.Option("--seed", callback=checked_seed, help="Seed of weights, inputs and noise.")
]


def _version(asked: bool) -> None:
    if asked:
        from sdfastgn import __version__

        typer.echo(f"sdfastgn {__version__}")
        raise typer.Exit


@app.callback()
def options_of_all(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """Bad options and weights that cannot be loaded end in one line and exit code 2."""
    from sdfastgn.program import OptionError

    try:
        yield
    except OptionError as error:
        typer.echo(f"{program()}: {error}", err=True)
        raise typer.Exit(2) from None
