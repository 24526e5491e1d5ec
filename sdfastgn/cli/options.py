"""The options that commands share."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

from sdfastgn.models.configurations import DTYPES, MODELS, SEEDS

# The values of the option --dtype in words, for help texts.
DTYPE_WORDS = f"{', '.join(DTYPES)}, or torch's name such as float16"
ModelOption = Annotated[
    str | None,
    typer.Option("--model", help=f"Model: {', '.join(MODELS)}.", show_default="as in --weights, or tiny"),
]
DtypeOption = Annotated[
    str | None,
    typer.Option(
        "--dtype",
        help=f"Data type: {DTYPE_WORDS}.",
        show_default="fp16 on a GPU, fp32 on the CPU",
    ),
]
DeviceOption = Annotated[
    str | None,
    typer.Option(
        "--device", help="Device: cuda, cuda:N or cpu.", show_default="cuda if there is a GPU, else cpu"
    ),
]
JsonOption = Annotated[Path | None, typer.Option("--json", help="Also write all results to this file.")]
HtmlOption = Annotated[Path | None, typer.Option("--html", help="Also write one HTML page to this file.")]
WeightsOption = Annotated[str, typer.Option("--weights", help="Weights: random, a path, or a Hub id.")]
StepsOption = Annotated[
    int | None, typer.Option("--steps", help="Denoising steps of a pipeline.", show_default="30")
]
SizeOption = Annotated[
    int | None,
    typer.Option("--size", help="Width and height of the image in pixels.", show_default="the model's own"),
]
SchedulerOption = Annotated[
    str | None,
    typer.Option(
        "--scheduler",
        help="Scheduler of a pipeline: a class in diffusers, such as EulerDiscreteScheduler.",
        show_default="the model's own",
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
