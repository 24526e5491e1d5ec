"""``sdfastgn plan``: prints a network's plan, the list of kernels into which its own code is rewritten."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sdfastgn.cli import checks
from sdfastgn.cli.app import command
from sdfastgn.cli.errors import one_line_errors
from sdfastgn.cli.options import DTYPE_WORDS, JsonOption, SizeOption
from sdfastgn.models.configurations import MODELS, VIDEO_NETWORKS
from sdfastgn.program import OWN_PROCESS, counted

if TYPE_CHECKING:  # imported only for types, because these modules import torch, which takes seconds
    from sdfastgn.bench.workload import BenchConfig
    from sdfastgn.plans.preview import CallPlan

# A kind of GPU, as the option --gpu names it -> the name of this kind in the output.
_GPUS = {"hopper": "a Hopper GPU (H100, H200)", "other": "a GPU that is no Hopper GPU"}
_PARTS = ("unet", "vae")
ModelArgument = Annotated[
    str,
    typer.Argument(
        help=f"Model: {', '.join(MODELS)}. Or single networks of other models: {', '.join(VIDEO_NETWORKS)}."
    ),
]
PlanPartOption = Annotated[
    str | None,
    typer.Option(
        "--part",
        help="What is called: unet (a step) or vae (a decode).",
        show_default="unet, or vae if the model has no unet",
    ),
]
BatchOption = Annotated[
    int | None,
    typer.Option(
        "--batch", help="Images or videos per call.", show_default="2 for a UNet with guidance, else 1"
    ),
]
PlanDtypeOption = Annotated[
    str | None,
    typer.Option(
        "--dtype",
        help=f"Data type: {DTYPE_WORDS}.",
        show_default="fp16, or bf16 for models that are used in bf16",
    ),
]
GpuOption = Annotated[
    str, typer.Option("--gpu", help=f"Kind of GPU that would run the steps: {', '.join(_GPUS)}.")
]


def _check(model: str, part: str | None, batch: int | None, dtype: str | None, gpu: str) -> tuple[str, str]:
    """Check the command's options without torch. Returns the part of the model and the dtype."""
    checks.one_of("MODEL", model, (*MODELS, *VIDEO_NETWORKS))
    checks.one_of("--gpu", gpu, _GPUS)
    networks = VIDEO_NETWORKS.get(model, {})
    parts = list(networks or _PARTS)
    part = checks.one_of("--part", parts[0] if part is None else part, parts)
    if batch is not None:
        checks.positive("--batch", batch)
    own = networks[part].dtype if networks else "fp16"
    return part, checks.dtype_word("--dtype", own if dtype is None else dtype)


def _title(config: BenchConfig, gpu_kind: str) -> str:
    frames = [] if config.frames is None or config.frames == 1 else [config.frames]
    size = " x ".join(map(str, [*frames, config.size, config.width or config.size]))
    where = f"batch {config.batch}, {config.dtype}, on {_GPUS[gpu_kind]}"
    return f"{config.model} {config.part}, {size}, {where}"


def _call_title(found: CallPlan) -> str:
    name = f"{found.path}: {found.kind}" if found.path else found.kind
    times = f"trace {found.trace_s:.2f} s, rewrite {found.rewrite_s:.2f} s"
    return f"{name}, {counted(found.calls, 'call')}" + (f", {times}" if found.plan is not None else "")


def _document(config: BenchConfig, gpu: str, gets_plans: bool, found: Sequence[CallPlan]) -> dict[str, Any]:
    names = ("model", "part", "dtype", "batch", "frames", "size", "width")
    settings = {name: getattr(config, name) for name in names}
    return {**settings, "gpu": gpu, "gets_plans": gets_plans, "calls": [each.to_dict() for each in found]}


def _notes(found: Sequence[CallPlan], gets_plans: bool, gpu_kind: str) -> list[str]:
    notes = []
    if not gets_plans:
        notes.append(
            "optimize gives this model no plans, because it has fused blocks or CUDA graphs instead: "
            "these would be the steps of its stock code"
        )
    if stars := sum(sum(each.is_guess) for each in found):
        (other,) = set(_GPUS) - {gpu_kind}
        notes.append(f"* {counted(stars, 'step')} would be others on {_GPUS[other]}: see --gpu {other}")
    return notes


@command()
def plan(
    context: typer.Context,
    model: ModelArgument,
    part: PlanPartOption = None,
    size: SizeOption = None,
    batch: BatchOption = None,
    dtype: PlanDtypeOption = None,
    gpu: GpuOption = "hopper",
    json: JsonOption = None,
) -> None:
    """Print a model's plan: its own code as a list of kernels and operators. Needs no GPU and no weights."""
    with one_line_errors():
        part, dtype = _check(model, part, batch, dtype, gpu)
        checks.file_path("--json", json)
        from sdfastgn.bench import documents
        from sdfastgn.bench.workload import build_workload
        from sdfastgn.cli import bench_options, light_imports, terminal

        (config,) = bench_options.bench_configs(
            model=model, parts=[part], size=size, batch=batch, dtype=dtype, device="cpu"
        )
        config = replace(config, device="meta")
        if context.obj == OWN_PROCESS:
            light_imports.import_model_classes()
        from sdfastgn.plans.install import gets_plans
        from sdfastgn.plans.preview import plans_of

        workload = build_workload(config)
        is_planned = gets_plans(workload.target)
        found = plans_of(workload.target, workload.call, gpu)
        out = terminal.console()
        out.print(_title(config, gpu), style="bold", markup=False)
        for each in found:
            out.print(f"\n{_call_title(each)}", style="bold", markup=False)
            out.print(str(each), markup=False, soft_wrap=True)  # ``soft_wrap``: rich breaks no lines
        terminal.print_lines(out, _notes(found, is_planned, gpu))
        if json is not None:
            documents.write_json(json, _document(config, gpu, is_planned, found))
            terminal.print_lines(out, [f"wrote {json}"])
    raise typer.Exit(int(any(each.plan is None for each in found)))
