"""``sdfastgn info``: shows versions, the GPU, and what can run on this machine."""

from __future__ import annotations

from sdfastgn.bench.variants import VARIANTS, is_ours
from sdfastgn.cli.app import command
from sdfastgn.cli.errors import one_line_errors
from sdfastgn.cli.options import DeviceOption


@command()
def info(device: DeviceOption = None) -> None:
    """Show versions, the GPU, and what can run here. Gives a reason for everything that cannot.

    On a GPU it launches a small kernel, to find out whether kernels can run.
    """
    import torch

    from sdfastgn import __version__
    from sdfastgn.bench import environment
    from sdfastgn.bench.kernels.suites import SUITES
    from sdfastgn.cli import loading, terminal
    from sdfastgn.versions import never_run

    with one_line_errors():
        where = torch.device(loading.device_name("--device", device))
    facts = environment.environment(where)
    providers = {name: each for suite in SUITES.values() for name, each in suite.providers.items()}
    out = terminal.console()
    out.print(f"sdfastgn {__version__}, Python {facts['python']}, {facts['machine']}")
    out.print(f"GPU: {facts['gpu'] or 'none that torch can use'}, driver: {facts['driver'] or 'none'}")
    for name, version in facts["packages"].items():
        out.print(f"{name}: {version or 'not installed'}")
        if version and (note := never_run(name, version)):
            out.print(f"  {note}", markup=False)
    why_none = environment.kernels_reason(where)
    out.print(f"runs on {where}:", style="bold")
    out.print(f"kernels of sdfastgn: {'yes' if why_none is None else f'no, {why_none}'}", markup=False)
    rows = {f"variant {name}": (each.available(where), is_ours(name)) for name, each in VARIANTS.items()}
    rows |= {f"kernel {name}": (each.reason(where), each.is_ours) for name, each in providers.items()}
    for name, (reason, needs_kernels) in rows.items():
        runs = "without kernels" if needs_kernels and why_none is not None else "yes"
        out.print(f"{name}: {reason or runs}", markup=False)
    if where.type == "cpu":
        out.print("Without a GPU every sdfastgn call runs in plain PyTorch, with the same results.")
