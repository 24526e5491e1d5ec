"""The commands, ``bench`` to ``warm-up``. ``cli_scripts`` has those of the scripts.

What imports torch is imported inside a command: ``--help`` answers at once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from sdfastgn.bench.models.configurations import MODELS
from sdfastgn.bench.models.variants import VARIANTS
from sdfastgn.cli_options import (
    BatchesOption,
    BreakdownOption,
    DeviceOption,
    DtypeOption,
    DtypesOption,
    EveryStepsOption,
    Fp32Option,
    GuidanceOption,
    HtmlOption,
    JsonOption,
    ModelOption,
    PartOption,
    PresetOption,
    ProfileOption,
    PromptOption,
    ProvidersOption,
    RepeatsOption,
    SchedulerOption,
    SeedOption,
    ShapesOption,
    SizeOption,
    StepsOption,
    VariantsOption,
    WeightsOption,
    checked_seed,
    command,
    one_line_errors,
)
from sdfastgn.program import OWN_PROCESS


@command()
def bench(
    preset: PresetOption = None,
    model: ModelOption = None,
    part: PartOption = None,
    size: SizeOption = None,
    batch: BatchesOption = None,
    steps: EveryStepsOption = None,
    scheduler: SchedulerOption = None,
    guidance: GuidanceOption = None,
    prompt: PromptOption = None,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    weights: WeightsOption = "random",
    variants: VariantsOption = "all",
    repeats: RepeatsOption = None,
    fp32_reference: Fp32Option = False,
    profile: ProfileOption = False,
    plot: BreakdownOption = None,
    json: JsonOption = None,
    html: HtmlOption = None,
    seed: SeedOption = 0,
) -> None:
    """Time a UNet step, a VAE decode, a pipeline or a training step. Outputs are checked first."""
    from sdfastgn.bench import checks, documents, options, processes, session

    if not processes.is_main():
        json = plot = html = None
    with one_line_errors():
        configs = options.preset_configs(
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
            profile=profile,
        )
        chosen = options.variant_list("--variants", variants)
        options.png_path("--plot", plot, "" if profile else "only --profile has a picture, got {} without it")
        images = json and html and documents.images_path(json)
        checks.file_paths({"--json": json, "--json's images": images, "--html": html, "--plot": plot})
        raise typer.Exit(session.run_bench(configs, chosen, json=json, plot=plot, html=html))


@command()
def generate(
    model: Annotated[str, typer.Option(help="Saved text-to-image pipeline: a path, or a Hub id.")],
    prompts: Annotated[
        Path,
        typer.Option(
            help="Text file with a prompt a line, or .jsonl file with an object of settings a line."
        ),
    ],
    out: Annotated[str, typer.Option(help="Folder for the images. The image of line 12 is 00012.png.")],
    negative_prompt: Annotated[
        str | None, typer.Option(help="Negative prompt of lines without one of their own.")
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Most images that are drawn in one call.")] = 1,
    width: Annotated[
        int | None, typer.Option(help="Width of the images in pixels.", show_default="the model's own")
    ] = None,
    height: Annotated[
        int | None, typer.Option(help="Height of the images in pixels.", show_default="the model's own")
    ] = None,
    steps: StepsOption = 30,
    guidance: GuidanceOption = 7.5,
    seed: Annotated[
        int, typer.Option(callback=checked_seed, help="The seed of line 12 is this number plus 12.")
    ] = 0,
    variant: Annotated[str | None, typer.Option(help="Variant of the model's files, such as fp16.")] = None,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    stock: Annotated[bool, typer.Option("--stock", help="Draw without sdfastgn.optimize.")] = False,
) -> None:
    """Draw an image for each line of a file. Under accelerate launch or torchrun all GPUs take part."""
    from sdfastgn.bench import checks
    from sdfastgn.prompts import checked_job

    line: dict[str, Any] = {"negative_prompt": negative_prompt, "width": width, "height": height}
    line |= {"steps": steps, "guidance": guidance, "seed": seed}
    files: dict[str, Any] = {"model": model, "prompts": prompts, "out": out, "settings": line}
    with one_line_errors():
        checks.device_word("--device", device)
        job = checked_job(**files, batch_size=batch_size, variant=variant, dtype=dtype, stock=stock)
        from sdfastgn.generate import run  # torch and diffusers: seconds, after the checks

        code = run(job, device)
    raise typer.Exit(code)


@command()
def report(
    results: Annotated[
        list[Path],
        typer.Argument(help="JSON files of bench or kernels. Several are compared with the first."),
    ],
    html: HtmlOption = None,
) -> None:
    """Show results that --json wrote, compare several, or write them as a page."""
    from sdfastgn.bench import checks, documents, session

    with one_line_errors():
        checks.file_paths({"--html": html}, read=[*results, *map(documents.images_path, results)])
        session.show_results(results, html=html)


@command()
def kernels(
    suite: Annotated[str, typer.Option("--suite", help="Suite: {suites}.")] = "inference",
    shapes: ShapesOption = "all",
    providers: ProvidersOption = None,
    dtype: DtypesOption = None,
    device: DeviceOption = None,
    repeats: Annotated[
        int | None,
        typer.Option(help="Timed rounds of each cell.", show_default="20 in the suite inference, else 10"),
    ] = None,
    json: JsonOption = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw the roofline of the suite inference as this PNG file.")
    ] = None,
    seed: SeedOption = 0,
) -> None:
    """Time kernels beside a plain copy, with a hot and a cold L2 cache. Outputs are checked first."""
    from sdfastgn.bench import options, session

    with one_line_errors():
        configs = options.kernel_configs(
            suite=suite,
            shapes=shapes,
            names=providers,
            dtypes=dtype,
            device=device,
            repeats=repeats,
            seed=seed,
        )
        places = options.kernel_places(configs, json=json, plot=plot)
        runs = zip(configs, places, strict=True)
        codes = [session.run_kernels(config, json=path, plot=picture) for config, (path, picture) in runs]
    raise typer.Exit(max(codes))


def _inspected(model: str) -> dict[str, Any]:
    """A known architecture on the meta device, which needs no memory, or a loaded pipeline."""
    import torch

    from sdfastgn.bench.models.architectures import build_unet, build_vae

    if model not in MODELS:
        from sdfastgn.bench.models.pipelines import load_pipeline

        return {"pipeline": load_pipeline("MODEL", model, torch.float32, "cpu")}
    meta = torch.device("meta")
    return {"unet": build_unet(model, torch.float16, meta), "vae": build_vae(model, torch.float16, meta)}


@command()
def inspect(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help=f"Model: {', '.join(MODELS)}, a path, or a Hub id.")],
    json: JsonOption = None,
) -> None:
    """Report what would be fused in a model, what would not, and why."""
    from sdfastgn.bench import checks, documents, light_imports, terminal

    with one_line_errors():
        checks.weights_source("MODEL", model, words=MODELS)
        checks.file_path("--json", json)
        if context.obj == OWN_PROCESS and model in MODELS:
            light_imports.import_model_classes()
        from sdfastgn import report

        reports = {name: report(target) for name, target in _inspected(model).items()}
    out = terminal.console()
    for name, found in reports.items():
        out.print(f"{model}: {name}", style="bold")
        out.print(found.details(), markup=False)
    if json is not None:
        documents.write_json(json, {name: found.to_dict() for name, found in reports.items()})


@command()
def sources(
    context: typer.Context,
    against: Annotated[
        Path | None,
        typer.Option(
            "--against",
            help="Wheel or folder of a diffusers release, or ComfyUI's checkout. Shows what changed since.",
        ),
    ] = None,
    comfyui: Annotated[
        Path | None, typer.Option("--comfyui", help="Checkout of ComfyUI, whose methods are listed too.")
    ] = None,
    accept: Annotated[
        bool, typer.Option("--accept", help="Take the unknown code for tested. Read what changed before.")
    ] = False,
) -> None:
    """List the upstream methods that fusions rely upon and whose code was never tested."""
    from sdfastgn.bench import light_imports, terminal

    if context.obj == OWN_PROCESS and comfyui is None:
        light_imports.import_model_classes()
    from sdfastgn.bench.sources import print_sources

    with one_line_errors():
        code = print_sources(terminal.console(), against=against, comfyui=comfyui, accept=accept)
    raise typer.Exit(code)


@command()
def verify(
    path: Annotated[str, typer.Argument(help="Saved pipeline: a path, or a Hub id.")],
    dtype: DtypeOption = None,
    device: DeviceOption = None,
) -> None:
    """Compare each fused part of a pipeline with stock's code. The exit code is 1 if one is wrong."""
    import torch

    from sdfastgn import api, verification
    from sdfastgn.bench import checks, options, terminal
    from sdfastgn.bench.models.pipelines import load_pipeline
    from sdfastgn.bench.models.workload import DTYPES
    from sdfastgn.bench.tables import verification as tables

    with one_line_errors():
        checks.weights_source("PATH", path, words=())
        device = options.device_name("--device", device)
        weights = DTYPES[options.dtype_name("--dtype", dtype, device)]
        pipe = load_pipeline("PATH", path, weights, torch.device(device))
    api.optimize(pipe, cuda_graphs=False)
    found = api.verdicts(pipe)
    out = terminal.console()
    out.print(tables.verification_table(found))
    terminal.print_lines(out, tables.notes(found))
    raise typer.Exit(int(any(v.status == verification.PUT_BACK for v in found)))


@command()
def info(device: DeviceOption = None) -> None:
    """Show versions, the GPU, and what can run here, with the reasons why the rest cannot."""
    import torch

    from sdfastgn import __version__
    from sdfastgn.bench import environment, options, terminal
    from sdfastgn.bench.kernels.suites import SUITES
    from sdfastgn.versions import never_run

    with one_line_errors():
        where = torch.device(options.device_name("--device", device))
    facts = environment.environment(where)
    providers = {name: each for suite in SUITES.values() for name, each in suite.providers.items()}
    out = terminal.console()
    out.print(f"sdfastgn {__version__}, Python {facts['python']}, {facts['machine']}")
    out.print(f"GPU: {facts['gpu'] or 'none that torch can use'}, driver: {facts['driver'] or 'none'}")
    for name, version in facts["packages"].items():
        out.print(f"{name}: {version or 'not installed'}")
        if version and (note := never_run(name, version)):
            out.print(f"  {note}", markup=False)
    out.print(f"runs on {where}:", style="bold")
    reasons = {f"variant {each.name}": each.available(where) for each in VARIANTS.values()}
    reasons |= {f"kernel {name}": each.reason(where) for name, each in providers.items()}
    for name, reason in reasons.items():
        out.print(f"{name}: {reason or 'yes'}", markup=False)
    if where.type == "cpu":
        out.print("Without a GPU every sdfastgn call runs in plain PyTorch, with the same results.")


@command()
def demo(
    output: Annotated[str, typer.Option("--output", help="Folder for the picture.")] = "demo-output",
) -> None:
    """Draw digits with a small trained pipeline, stock and optimized. Needs no GPU and no network."""
    from sdfastgn.bench import checks, terminal
    from sdfastgn.bench.demo import PICTURE, run_demo

    with one_line_errors():
        folder = checks.folder("--output", output)
        checks.made_folder("--output", folder, PICTURE)
    raise typer.Exit(run_demo(folder, terminal.console()))


@command(name="warm-up")
def warm_up(
    model: Annotated[
        str, typer.Argument(help=f"Model: {', '.join(MODELS)}, a saved pipeline's path, or a Hub id.")
    ],
    size: Annotated[
        list[str] | None,
        typer.Option(
            "--size",
            metavar="<str>",
            help="Size of the images, 512 or 768x512 (width first). Repeat for several.",
            show_default="the model's own",
        ),
    ] = None,
    batch: Annotated[int, typer.Option("--batch", help="Images a call.")] = 1,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
) -> None:
    """Compile a model's kernels into Triton's cache, which a container can bring along."""
    from sdfastgn.warm_up import run

    with one_line_errors():
        code = run(model=model, sizes=size or (), batch=batch, dtype=dtype, device=device)
    raise typer.Exit(code)
