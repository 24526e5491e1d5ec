"""The commands, ``bench`` to ``demo``, and those of the scripts.

What imports torch is imported inside a command: ``--help`` answers at once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from sdfastgn.bench.models.configurations import MODELS
from sdfastgn.bench.models.variants import PARTS, VARIANTS
from sdfastgn.program import OWN_PROCESS, program

HELP_OPTIONS: dict[str, Any] = {"help_option_names": ["-h", "--help"]}
# Seeds of 64 bits: inputs are drawn from those that follow too.
SEEDS = range(-(2**63), 2**63)

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
StepsOption = Annotated[int, typer.Option("--steps", help="UNet steps of a pipeline")]
SizeOption = Annotated[
    int | None, typer.Option("--size", help="pixels of the square image; what the model was made for")
]


PartOption = Annotated[
    list[str] | None, typer.Option("--part", help=f"{', '.join(PARTS)}; repeat for several")
]
Fp32Option = Annotated[
    bool, typer.Option("--fp32-reference", help="also compare unet and vae with the same weights in fp32")
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


def _seed(value: int) -> int:
    if value not in SEEDS:
        raise typer.BadParameter(f"{value} is not a whole number of 64 bits, from {SEEDS[0]} to {SEEDS[-1]}")
    return value


SeedOption = Annotated[int, typer.Option("--seed", callback=_seed, help="of weights, inputs and noise")]


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
def _one_line_errors() -> Iterator[None]:
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


class _Listing(typer.core.TyperCommand):
    """A command whose help lists registries."""

    def get_help(self, ctx: Any) -> str:
        for option in map(vars, self.params):
            for word, names in _LISTS.items():
                if word in (option.get("help") or ""):
                    option["help"] = option["help"].replace(word, ", ".join(names()))
        return str(super().get_help(ctx))


@app.command(cls=_Listing)
def bench(
    model: ModelOption = None,
    part: PartOption = None,
    size: SizeOption = None,
    batch: Annotated[int | None, typer.Option("--batch", help="2 for unet (guidance), else 1")] = None,
    steps: StepsOption = 30,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    weights: WeightsOption = "random",
    variants: Annotated[str, typer.Option("--variants", help="all, or a list of {variants}")] = "all",
    repeats: Annotated[int | None, typer.Option("--repeats", help="timed calls of each variant")] = None,
    fp32_reference: Fp32Option = False,
    profile: Annotated[bool, typer.Option("--profile", help="also show where the time goes")] = False,
    plot: Annotated[Path | None, typer.Option(help="write the breakdown of --profile as a PNG")] = None,
    json: JsonOption = None,
    seed: SeedOption = 0,
) -> None:
    """Time a UNet step, a VAE decode, a pipeline or a training step, checked against eager first."""
    from sdfastgn.bench import options, session

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
        without = "" if profile else "only --profile has a picture, got {} without it"
        options.png_path("--plot", plot, without)
        options.json_path("--json", json)
        code = session.run_bench(configs, chosen, json=json, plot=plot)
    raise typer.Exit(code)


@app.command(cls=_Listing)
def kernels(
    suite: Annotated[str, typer.Option("--suite", help="one of {suites}")] = "inference",
    shapes: ShapesOption = "all",
    providers: ProvidersOption = None,
    dtype: DtypesOption = None,
    device: DeviceOption = None,
    repeats: Annotated[int | None, typer.Option(help="rounds of a cell; 20 in inference, else 10")] = None,
    json: JsonOption = None,
    plot: Annotated[Path | None, typer.Option(help="write the roofline of inference as a PNG")] = None,
    seed: SeedOption = 0,
) -> None:
    """Time a suite of kernels beside a copy, with a hot and a cold L2, checked against fp64 first."""
    from sdfastgn.bench import options, session

    with _one_line_errors():
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


@app.command()
def inspect(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help=f"{', '.join(MODELS)}, a path, or a Hub id")],
    json: JsonOption = None,
) -> None:
    """Report what would be fused in a model, what not, and why."""
    from sdfastgn.bench import documents, light_imports, options, terminal

    with _one_line_errors():
        options.weights_source("MODEL", model, words=MODELS)
        options.json_path("--json", json)
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


@app.command()
def sources(
    context: typer.Context,
    against: Annotated[
        Path | None, typer.Option("--against", help="a release's wheel or folder: show what changed since")
    ] = None,
) -> None:
    """List the methods of diffusers that the fusions rely upon, and whether they are known."""
    from sdfastgn.bench import light_imports, terminal

    if context.obj == OWN_PROCESS:
        light_imports.import_model_classes()
    from sdfastgn.bench.sources import print_sources

    with _one_line_errors():
        code = print_sources(terminal.console(), against)
    raise typer.Exit(code)


@app.command()
def verify(
    path: Annotated[str, typer.Argument(help="a saved pipeline: a path, or a Hub id")],
    dtype: DtypeOption = None,
    device: DeviceOption = None,
) -> None:
    """Compare each fused part of a pipeline with stock's code; 1 if one is wrong and was put back."""
    import torch

    from sdfastgn import api, verification
    from sdfastgn.bench import options, terminal
    from sdfastgn.bench.models.pipelines import load_pipeline
    from sdfastgn.bench.models.workload import DTYPES
    from sdfastgn.bench.tables import verification as tables

    with _one_line_errors():
        options.weights_source("PATH", path, words=())
        device = options.device_name("--device", device)
        name = dtype or ("fp32" if device == "cpu" else "fp16")
        weights = DTYPES[options.one_of("--dtype", name, DTYPES)]
        pipe = load_pipeline("PATH", path, weights, torch.device(device))
    api.optimize(pipe, cuda_graphs=False)
    found = api.verdicts(pipe)
    out = terminal.console()
    out.print(tables.verification_table(found))
    terminal.print_lines(out, tables.notes(found))
    raise typer.Exit(int(any(v.status == verification.PUT_BACK for v in found)))


@app.command()
def info(device: DeviceOption = None) -> None:
    """Versions, the GPU, and what can run here, with the reasons why the rest cannot."""
    import torch

    from sdfastgn import __version__
    from sdfastgn.bench import environment, options, terminal
    from sdfastgn.bench.kernels.suites import SUITES
    from sdfastgn.versions import never_run

    with _one_line_errors():
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


@app.command()
def demo(
    output: Annotated[Path, typer.Option("--output", help="folder for the picture")] = Path("demo-output"),
) -> None:
    """Draw digits with a small trained pipeline, optimize, compare, restore; needs no GPU and no network."""
    from sdfastgn.bench import options, terminal
    from sdfastgn.bench.demo import PICTURE, run_demo

    with _one_line_errors():
        options.json_path("--output", output / PICTURE)
    raise typer.Exit(run_demo(output, terminal.console()))


@app.command(name="warm-up", hidden=True)
def warm_up(
    model: ModelOption = "sdxl",
    size: SizeOption = None,
    new_size: Annotated[int | None, typer.Option(help="of the UNet steps after the images")] = None,
    steps: StepsOption = 30,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    weights: WeightsOption = "random",
    json: JsonOption = None,
) -> None:
    """Time a pipeline's first images and a new resolution, each way in a process of its own."""
    from sdfastgn.bench import options, session

    with _one_line_errors():
        (config,) = options.bench_configs(
            model=model,
            parts=["pipeline"],
            size=size,
            steps=steps,
            dtype=dtype,
            device=device,
            weights=weights,
            repeats=1,
        )
        new_size = config.size * 3 // 32 * 8 if new_size is None else new_size
        options.image_size("--new-size", new_size)
        options.json_path("--json", json)
        code = session.run_warm_up(config, new_size, json=json)
    raise typer.Exit(code)
