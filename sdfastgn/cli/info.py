"""``sdfastgn info``: shows versions, the GPU, and what can run on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from sdfastgn.bench.variants import VARIANTS, is_ours
from sdfastgn.cli.app import command
from sdfastgn.cli.errors import one_line_errors
from sdfastgn.cli.options import DeviceOption

if TYPE_CHECKING:  # torch is imported only for types, because its import takes seconds
    import torch


@command()
def info(
    device: DeviceOption = None,
    every: Annotated[
        bool,
        typer.Option("--all", help="Also show what each variant of bench and each implementation needs."),
    ] = False,
) -> None:
    """Show versions, the GPU, and whether kernels can run here. Gives a reason if they cannot.

    On a GPU it launches a small kernel, to find out whether kernels can run.
    """
    import torch

    from sdfastgn import __version__
    from sdfastgn.bench import environment
    from sdfastgn.cli import loading, terminal
    from sdfastgn.versions import never_run

    with one_line_errors():
        where = torch.device(loading.device_name("--device", device))
    facts = environment.environment(where)
    out = terminal.console()
    out.print(f"sdfastgn {__version__}, Python {facts['python']}, {facts['machine']}")
    out.print(f"GPU: {facts['gpu'] or 'none that torch can use'}, driver: {facts['driver'] or 'none'}")
    packages = {**facts["packages"], "cuDNN": _cudnn()}
    for name in ("torch", "cuDNN", "triton", "diffusers", "transformers", "accelerate", "peft"):
        version = packages[name]
        note = never_run(name, version) if version else None
        out.print(f"{name}: {version or 'not installed'}{f' ({note})' if note else ''}", markup=False)
    why_none = environment.kernels_reason(where)
    runs = "yes" if why_none is None else f"no, {why_none}; calls run in plain PyTorch"
    out.print(f"kernels of sdfastgn on {where}: {runs}", markup=False)
    for line in _competitors(where, why_none) if every else ():
        out.print(line, markup=False)


def _cudnn() -> str | None:
    """The version of torch's cuDNN, such as 9.10.2; None if torch has none."""
    import torch

    number = torch.backends.cudnn.version()
    if number is None:
        return None
    # From cuDNN 9 on, the number has one digit more: 91002 is 9.10.2, and 8902 is 8.9.2.
    major, rest = divmod(number, 10_000 if number >= 90_000 else 1_000)
    return f"{major}.{rest // 100}.{rest % 100}"


def _competitors(where: torch.device, why_none: str | None) -> Iterator[str]:
    """Yields a line for each variant of ``sdfastgn bench`` and each implementation of ``sdfastgn kernels``.

    A line says whether the variant (a way to run a model) or the implementation of an operation can run here.

    ``why_none``: why sdfastgn's kernels cannot run on ``where``; None if they can.
    """
    from sdfastgn.bench.kernels.suites import SUITES

    providers = {name: each for suite in SUITES.values() for name, each in suite.providers.items()}
    rows = {f"variant {name}": (each.available(where), is_ours(name)) for name, each in VARIANTS.items()}
    rows |= {f"kernel {name}": (each.reason(where), each.is_ours) for name, each in providers.items()}
    for name, (reason, needs_kernels) in rows.items():
        runs = "without kernels" if needs_kernels and why_none is not None else "yes"
        yield f"{name}: {reason or runs}"
