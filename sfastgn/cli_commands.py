"""The commands: ``bench``, ``kernels``, ``inspect``, ``info``, ``demo``.

Options are plain strings, and all that imports torch is imported inside a command: ``sfastgn --help`` answers at once.
"""

from __future__ import annotations

import contextlib
import json as json_format
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(
    help="Make Stable Diffusion in diffusers faster, and measure by how much.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

ModelOption = Annotated[
    str | None, typer.Option("--model", help="tiny, tiny_xl, sd15 or sdxl; what --weights are, or tiny")
]
DtypeOption = Annotated[str | None, typer.Option("--dtype", help="fp16, bf16 or fp32; fp16 on a GPU, fp32 on the CPU")]
DeviceOption = Annotated[str | None, typer.Option("--device", help="cuda, cuda:N or cpu; cuda where there is a GPU")]
JsonOption = Annotated[Path | None, typer.Option("--json", help="also write everything to this file")]
SeedOption = Annotated[int, typer.Option("--seed", help="of weights, inputs and noise")]


@contextlib.contextmanager
def _one_line_errors() -> Iterator[None]:
    """Bad options, and weights that cannot be loaded, end in one line on standard error and exit code 2."""
    from sfastgn.bench.options import OptionError
    from sfastgn.bench.workloads import WeightsError

    try:
        yield
    except (OptionError, WeightsError) as error:
        typer.echo(f"sfastgn: {error}", err=True)
        raise typer.Exit(2) from None


@app.command()
def bench(
    model: ModelOption = None,
    part: Annotated[
        list[str] | None, typer.Option("--part", help="unet, vae, pipeline, train; repeat for several")
    ] = None,
    size: Annotated[int | None, typer.Option("--size", help="pixels of the square image; 64, 512 or 1024")] = None,
    batch: Annotated[int | None, typer.Option("--batch", help="2 for unet (guidance), else 1")] = None,
    steps: Annotated[int, typer.Option("--steps", help="UNet steps of a pipeline")] = 30,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    weights: Annotated[str, typer.Option("--weights", help="random, a path, or a Hub id")] = "random",
    variants: Annotated[str, typer.Option("--variants", help="comma list, or all")] = "all",
    repeats: Annotated[int | None, typer.Option("--repeats", help="timed calls of each variant")] = None,
    fp32_reference: Annotated[
        bool, typer.Option("--fp32-reference", help="also compare unet and vae with the same weights in fp32")
    ] = False,
    profile: Annotated[
        bool,
        typer.Option("--profile", help="also show where the time goes: convolution, norms, copies, launch gaps, ..."),
    ] = False,
    plot: Annotated[Path | None, typer.Option("--plot", help="write the breakdown of --profile as a PNG")] = None,
    json: JsonOption = None,
    seed: SeedOption = 0,
) -> None:
    """Time a UNet step, a VAE decode, a full pipeline or a training step, each variant checked against eager first."""
    from sfastgn.bench import options, session

    with _one_line_errors():
        configs = options.bench_configs(
            model=model,
            parts=part or ["unet"],
            size=size,
            batch=batch,
            steps=steps,
            dtype=dtype,
            device=device,
            weights=weights,
            repeats=repeats,
            seed=seed,
            fp32_reference=fp32_reference,
            profile=profile,
        )
        chosen = options.variant_list("--variants", variants)
        options.profile_plot_path("--plot", plot, profile)
        options.json_path("--json", json)
        code = session.run_bench(configs, chosen, json=json, plot=plot)
    raise typer.Exit(code)


@app.command()
def kernels(
    suite: Annotated[
        str,
        typer.Option(
            "--suite", help="inference, training, instance_norm, layer_norm, issue_28201, upsample or attention"
        ),
    ] = "inference",
    shapes: Annotated[
        str, typer.Option("--shapes", help="all, a set of the suite (unet, large), or a comma list such as NxCxHxW")
    ] = "all",
    providers: Annotated[
        str | None, typer.Option("--providers", help="comma list, or all; without it all but inductor")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option("--dtype", help="fp16, bf16, fp32, or a comma list; fp16, for issue_28201 fp32")
    ] = None,
    device: DeviceOption = None,
    repeats: Annotated[int | None, typer.Option("--repeats", help="timed rounds of each cell; 20, or 10")] = None,
    json: JsonOption = None,
    plot: Annotated[Path | None, typer.Option("--plot", help="write the roofline as a PNG; inference only")] = None,
    seed: SeedOption = 0,
) -> None:
    """Time kernels beside a copy: GroupNorm+SiLU as in inference, or another suite, some with gradients; L2 hot and cold."""
    from sfastgn.bench import options, session
    from sfastgn.bench.suites import SuiteConfig

    with _one_line_errors():
        configs = options.kernel_configs(
            suite=suite, shapes=shapes, names=providers, dtypes=dtype, device=device, repeats=repeats, seed=seed
        )
        several = len(configs) > 1
        places = [
            (options.for_dtype(plot, config.dtype), options.for_dtype(json, config.dtype)) if several else (plot, json)
            for config in configs
        ]
        for picture, path in places:
            options.plot_path("--plot", picture, suite)
            options.json_path("--json", path)
        code = 0
        for config, (picture, path) in zip(configs, places, strict=True):
            if isinstance(config, SuiteConfig):
                code = max(code, session.run_suite(config, json=path))
            else:
                code = max(code, session.run_kernels(config, json=path, plot=picture))
    raise typer.Exit(code)


def _inspected(model: str) -> dict[str, Any]:
    """What to report on: a known architecture on the meta device, which needs no memory, or a loaded pipeline."""
    import torch

    from sfastgn.bench.architectures import MODELS, build_unet, build_vae
    from sfastgn.bench.workloads import load

    if model not in MODELS:
        return {"pipeline": load("MODEL", model, None, torch.float32, torch.device("cpu"))}
    meta = torch.device("meta")
    return {"unet": build_unet(model, torch.float16, meta), "vae": build_vae(model, torch.float16, meta)}


@app.command()
def inspect(
    model: Annotated[str, typer.Argument(help="tiny, tiny_xl, sd15, sdxl, a path, or a Hub id")],
    json: JsonOption = None,
) -> None:
    """Report what would be fused in a model, what not, and why."""
    from sfastgn import report
    from sfastgn.bench import options, session
    from sfastgn.bench.architectures import MODELS

    with _one_line_errors():
        options.weights_source("MODEL", model, words=tuple(MODELS))
        options.json_path("--json", json)
        targets = _inspected(model)
        reports = {name: report(target) for name, target in targets.items()}
    out = session.console()
    for name, found in reports.items():
        out.print(f"{model}: {name}", style="bold")
        out.print(str(found), markup=False)
    if json is not None:
        json.parent.mkdir(parents=True, exist_ok=True)
        content = {name: found.to_dict() for name, found in reports.items()}
        json.write_text(json_format.dumps(content, indent=1) + "\n", encoding="utf-8")


@app.command()
def info(device: DeviceOption = None) -> None:
    """Versions, the GPU, and what can run here, with the reasons why the rest cannot."""
    import torch
    from rich.table import Table

    from sfastgn import __version__
    from sfastgn.bench import environment, options, providers, session, variants

    with _one_line_errors():
        where = torch.device(options.device_name("--device", device))
    facts = environment.environment(where)
    out = session.console()
    out.print(f"sfastgn {__version__}, Python {facts['python']}, {facts['machine']}")
    out.print(f"GPU: {facts['gpu'] or 'none that torch can use'}, driver: {facts['driver'] or 'none'}")
    for name, version in facts["packages"].items():
        out.print(f"{name}: {version or 'not installed'}")
    table = Table(title=f"on {where}", title_justify="left")
    for column in ("kind", "name", "runs"):
        table.add_column(column)
    for variant in variants.VARIANTS:
        table.add_row("variant", variant.name, variant.available(where) or "yes")
    for provider in providers.PROVIDERS:
        table.add_row("kernel", provider.name, provider.reason(where) or "yes")
    out.print(table)
    if where.type == "cpu":
        out.print("Without a GPU every sfastgn call runs in plain PyTorch, with the same results.")


@app.command()
def demo(
    output: Annotated[Path, typer.Option("--output", help="folder for the images")] = Path("demo-output"),
) -> None:
    """Build a small pipeline, optimise it, compare images, restore it; needs no GPU and no network."""
    from sfastgn.bench import options, session
    from sfastgn.bench.demo import PICTURES, run_demo

    with _one_line_errors():
        options.folder_path("--output", output, PICTURES)
    raise typer.Exit(run_demo(output, session.console()))
