"""``sdfastgn verify``: compares each fused part of a pipeline with stock's code."""

from __future__ import annotations

from typing import Annotated

import typer

from sdfastgn.cli.app import command
from sdfastgn.cli.errors import one_line_errors
from sdfastgn.cli.options import DeviceOption, DtypeOption


@command()
def verify(
    path: Annotated[str, typer.Argument(help="Saved pipeline: a path, or a Hub id.")],
    dtype: DtypeOption = None,
    device: DeviceOption = None,
) -> None:
    """Compare each fused part of a pipeline with stock's code. The exit code is 1 if a part is wrong."""
    import torch

    from sdfastgn import api, verification
    from sdfastgn.cli import checks, loading, terminal
    from sdfastgn.cli import verdicts as tables
    from sdfastgn.models.architectures import DTYPES
    from sdfastgn.models.pipelines import load_pipeline

    with one_line_errors():
        checks.weights_source("PATH", path, words=())
        device = loading.device_name("--device", device)
        weights = DTYPES[loading.dtype_name("--dtype", dtype, device)]
        pipe = load_pipeline("PATH", path, weights, torch.device(device))
    api.optimize(pipe, cuda_graphs=False)
    found = api.verdicts(pipe)
    out = terminal.console()
    out.print(tables.verification_table(found))
    terminal.print_lines(out, tables.notes(found))
    raise typer.Exit(int(any(v.status == verification.PUT_BACK for v in found)))
