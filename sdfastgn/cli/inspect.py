"""``sdfastgn inspect``: shows which parts of a model would run fused."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from sdfastgn.cli.app import command
from sdfastgn.cli.errors import one_line_errors
from sdfastgn.cli.options import JsonOption
from sdfastgn.models.configurations import MODELS
from sdfastgn.program import OWN_PROCESS


def _inspected(model: str) -> dict[str, Any]:
    """Loads or builds the model that ``inspect`` reports on. Returns name -> network or pipeline.

    A UNet and a VAE of ``MODELS`` are built on the meta device, which needs no memory. Any other pipeline is
    loaded.
    """
    import torch

    from sdfastgn.models.architectures import build_unet, build_vae

    if model not in MODELS:
        from sdfastgn.models.pipelines import load_pipeline

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
    from sdfastgn.bench import documents
    from sdfastgn.cli import checks, light_imports, terminal

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
