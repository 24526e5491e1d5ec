"""The benchmark's variants: ways to run one stock model. Each is an entry of ``VARIANTS``.

A variant is applied in place to a model or pipeline and undone afterwards, so that all of them run
the same weights, and SDXL is in memory once.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import shutil
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from sdfastgn.bench import stable_fast
from sdfastgn.program import counted

if TYPE_CHECKING:  # the command line's help names the variants, and answers before torch could be imported
    import torch
    from torch import nn

# What the harness times, and by their names in a pipeline the modules that a variant prepares.
PARTS = ("unet", "vae", "pipeline", "train")
TIMED_MODULES = ("", "unet", "vae")


@dataclass(frozen=True)
class Variant:
    """One way to run a model.

    Attributes:
        name, label: what the command line and the JSON, and what tables call it.
        available: None where it can run on the device, else the reason why not, in one line.
        apply: makes a target (an nn.Module, or a pipeline) run the variant's way; gets the part
            too, and a stack for what takes back that which a :class:`Snapshot` cannot see.
        describe: what the variant did to a prepared target, for the table's note.
        replays_graph: it replays CUDA graphs itself, so its calls cannot be captured.
        graphs_stand_alone: each of these graphs may be replayed by itself. Others may read memory that
            another graph has used since: an index in it is then out of range.
    """

    name: str
    label: str
    available: Callable[[torch.device], str | None]
    apply: Callable[[Any, str, contextlib.ExitStack], object]
    describe: Callable[[Any], str] = lambda target: ""
    replays_graph: bool = False
    graphs_stand_alone: bool = False


@contextlib.contextmanager
def prepared(variant: Variant, target: Any, part: str) -> Iterator[None]:
    """``target`` as ``variant`` runs it; stock again afterwards, whatever raises."""
    from sdfastgn.bench.snapshot import Snapshot

    with contextlib.ExitStack() as undo:
        undo.callback(Snapshot(target).restore)
        variant.apply(target, part, undo)
        yield


def _always(device: torch.device) -> str | None:
    return None


def _timed_modules(target: Any) -> list[nn.Module]:
    from sdfastgn.bench.snapshot import modules_of

    return [module for name, module in modules_of(target).items() if name in TIMED_MODULES]


def _eager(target: Any, part: str, undo: contextlib.ExitStack) -> None:
    """Stock as it is."""


def _channels_last(target: Any, part: str, undo: contextlib.ExitStack) -> None:
    import torch

    for module in _timed_modules(target):
        # mypy: missing in torch's stubs.
        module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def _sdfastgn(
    target: Any, part: str, undo: contextlib.ExitStack, cuda_graphs: Literal["auto"] | bool = "auto"
) -> None:
    import sdfastgn

    sdfastgn.optimize(target, cuda_graphs=cuda_graphs)
    # Undone in reverse: stock again, then the question.
    undo.callback(_check_kernels_ran, target)
    undo.callback(sdfastgn.restore, target)


def _check_kernels_ran(target: Any) -> None:
    from sdfastgn.bench.environment import check_kernels_ran

    for device in {p.device for module in _timed_modules(target) for p in module.parameters()}:
        check_kernels_ran(device)


_sdfastgn_eager = functools.partial(_sdfastgn, cuda_graphs=False)


def _describe_sdfastgn(target: Any) -> str:
    import sdfastgn

    report = sdfastgn.report(target)
    fused = f"{len(report.fused)} fused, {len(report.skipped)} skipped"
    graphs = sum(graphs.alive for graphs in report.graphs)
    if graphs:
        return f"{fused}, {counted(graphs, 'CUDA graph')} in {report.graph_memory_bytes / 2**20:.0f} MiB"
    reasons = dict.fromkeys(reason for graphs in report.graphs for reason in graphs.eager)
    return f"{fused}, no CUDA graph: {'; '.join(reasons)}" if reasons else fused


def compile_reason(device: torch.device) -> str | None:
    """Why torch.compile cannot run on the device; None where it can."""
    if device.type == "cuda":
        found = importlib.util.find_spec("triton")
        return None if found else "torch.compile needs triton on CUDA; it is not installed"
    compilers = ((sysconfig.get_config_var("CXX") or "g++").split()[0], "g++")
    return None if any(map(shutil.which, compilers)) else "torch.compile needs a C++ compiler on the CPU"


def _compiled(target: Any, part: str, undo: contextlib.ExitStack, mode: str | None = None) -> None:
    from torch import nn

    dynamo = importlib.import_module("torch._dynamo")
    dynamo.reset()
    undo.callback(dynamo.reset)
    for module in _timed_modules(target):
        # A VAE is used through decode(), which module.compile() does not reach.
        decoder = getattr(module, "decoder", None)
        (decoder if isinstance(decoder, nn.Module) else module).compile(mode=mode)


_compiled_graphs = functools.partial(_compiled, mode="reduce-overhead")


def _sdfastgn_compiled(target: Any, part: str, undo: contextlib.ExitStack) -> None:
    _sdfastgn_eager(target, part, undo)
    _compiled(target, part, undo)


def _stable_fast(target: Any, part: str, undo: contextlib.ExitStack) -> None:
    if part == "train":
        raise RuntimeError("stable-fast traces inference, and has no backward")
    undo.enter_context(stable_fast.launch_functions())
    stable_fast.compile_target(target, part)


# Each is also timed under a CUDA graph, in a column of its own, unless it replays graphs itself.
_EVERY = (
    Variant("eager", "eager", _always, _eager),
    Variant("channels_last", "channels_last", _always, _channels_last),
    Variant(
        "sdfastgn",
        "sdfastgn",
        _always,
        _sdfastgn,
        _describe_sdfastgn,
        replays_graph=True,
        graphs_stand_alone=True,
    ),
    Variant("sdfastgn_eager", "sdfastgn without graphs", _always, _sdfastgn_eager, _describe_sdfastgn),
    Variant("compile", "torch.compile", compile_reason, _compiled),
    Variant(
        "compile_graphs",
        "torch.compile reduce-overhead",
        compile_reason,
        _compiled_graphs,
        replays_graph=True,
    ),
    Variant(
        "sdfastgn_compile", "sdfastgn + torch.compile", compile_reason, _sdfastgn_compiled, _describe_sdfastgn
    ),
    # Last, because its import changes the process.
    Variant("stable_fast", "stable-fast", stable_fast.reason, _stable_fast, replays_graph=True),
)
VARIANTS: dict[str, Variant] = {variant.name: variant for variant in _EVERY}


def label(name: str) -> str:
    """What tables call a variant; the name of one that the registry no longer has."""
    return VARIANTS[name].label if name in VARIANTS else name
