"""``sdfastgn bench``: times a model in stock PyTorch, with sdfastgn, and with competitors of sdfastgn."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sdfastgn.bench.presets import PRESETS
from sdfastgn.bench.variants import EVERY_PART, VARIANTS
from sdfastgn.cli.app import NAMES, command
from sdfastgn.cli.errors import one_line_errors
from sdfastgn.cli.options import (
    DTYPE_WORDS,
    DeviceOption,
    GuidanceOption,
    HtmlOption,
    JsonOption,
    SchedulerOption,
    SeedOption,
    SizeOption,
    WeightsOption,
)
from sdfastgn.models.configurations import MODELS, PROMPT, VIDEO_NETWORKS
from sdfastgn.program import is_main

NAMES["{variants}"] = lambda: VARIANTS
PresetOption = Annotated[
    str | None,
    typer.Option(
        "--preset",
        help=f"Use the settings of a published benchmark, and show its numbers too: {', '.join(PRESETS)}.",
    ),
]
BenchModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        help=f"Model: {', '.join(MODELS)}. Or single networks of other models: "
        + ", ".join(f"{name} ({' or '.join(parts)})" for name, parts in VIDEO_NETWORKS.items())
        + ".",
        show_default="as in --weights, or tiny",
    ),
]
BenchDtypeOption = Annotated[
    str | None,
    typer.Option(
        "--dtype",
        help=f"Data type: {DTYPE_WORDS}.",
        show_default="fp16 on a GPU, bf16 for models that are used in bf16; fp32 on the CPU",
    ),
]
PartOption = Annotated[
    list[str] | None,
    typer.Option(
        "--part",
        metavar="<str>",
        help=f"What to time: {', '.join(EVERY_PART)}. Repeat the option for several.",
        show_default="unet, or vae if the model has no unet, or as in the preset",
    ),
]
BatchesOption = Annotated[
    str | None,
    typer.Option(
        "--batch",
        help="Images or videos per call, or a list such as 1,8.",
        show_default="2 for a UNet with guidance, else 1",
    ),
]
EveryStepsOption = Annotated[
    str | None,
    typer.Option("--steps", help="Denoising steps of a pipeline, or a list such as 1,4.", show_default="30"),
]
PromptOption = Annotated[
    str | None, typer.Option("--prompt", help="Prompt of a pipeline.", show_default=PROMPT)
]
VariantsOption = Annotated[
    str,
    typer.Option(
        "--variants",
        help="Ways to run the model: all (without sdfastgn_no_plans), or a list of {variants}.",
    ),
]
RepeatsOption = Annotated[
    int | None,
    typer.Option(
        "--repeats",
        help="Timed calls of each variant.",
        show_default="2 to 50, depending on part and device",
    ),
]
Fp32Option = Annotated[
    bool, typer.Option("--fp32-reference", help="Also compare the outputs with those in fp32.")
]
LoraRankOption = Annotated[
    int | None,
    typer.Option(
        "--lora-rank",
        metavar="<int>",
        help="A training step trains a LoRA of this rank, and the UNet is frozen. Needs peft.",
        show_default="all parameters are trained",
    ),
]
ProfileOption = Annotated[
    bool,
    typer.Option(
        "--profile", help="Also show where the time goes. A pipeline is profiled only if it is the only part."
    ),
]
BreakdownOption = Annotated[
    Path | None, typer.Option("--plot", help="Draw the breakdown of --profile as this PNG file.")
]


@command()
def bench(
    preset: PresetOption = None,
    model: BenchModelOption = None,
    part: PartOption = None,
    size: SizeOption = None,
    batch: BatchesOption = None,
    steps: EveryStepsOption = None,
    scheduler: SchedulerOption = None,
    guidance: GuidanceOption = None,
    prompt: PromptOption = None,
    dtype: BenchDtypeOption = None,
    device: DeviceOption = None,
    weights: WeightsOption = "random",
    variants: VariantsOption = "all",
    repeats: RepeatsOption = None,
    fp32_reference: Fp32Option = False,
    lora_rank: LoraRankOption = None,
    profile: ProfileOption = False,
    plot: BreakdownOption = None,
    json: JsonOption = None,
    html: HtmlOption = None,
    seed: SeedOption = 0,
) -> None:
    """Time a UNet step, a VAE decode, a pipeline or a training step. Checks the outputs first."""
    from sdfastgn.cli import bench_options, session

    if not is_main():
        json = plot = html = None
    with one_line_errors():
        configs = bench_options.preset_configs(
            preset,
            model=model,
            parts=part or None,
            size=size,
            batch=batch,
            steps=steps,
            scheduler=scheduler,
            guidance=guidance,
            prompt=prompt,
            dtype=dtype,
            device=device,
            weights=weights,
            repeats=repeats,
            seed=seed,
            fp32_reference=fp32_reference,
            lora_rank=lora_rank,
            profile=profile,
        )
        chosen = bench_options.variant_list("--variants", variants)
        bench_options.check_outputs(json=json, html=html, plot=plot, profile=profile)
        raise typer.Exit(session.run_bench(configs, chosen, json=json, plot=plot, html=html))
