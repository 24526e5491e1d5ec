"""The benchmark's variants: ways to run a model, such as with torch.compile. ``VARIANTS`` has them by name.

A variant is applied to the model or pipeline in place and undone afterwards. So all variants run with the
same weights, and the model is in memory only once.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import itertools
import shutil
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from sdfastgn.bench import stable_fast
from sdfastgn.program import counted

if TYPE_CHECKING:  # torch is imported only for types: the command line's help must not wait for it
    import torch
    from torch import nn

# What can be timed of a model with a UNet: a UNet step, a VAE decode, the whole pipeline, a training step.
PARTS = ("unet", "vae", "pipeline", "train")
# Everything that can be timed: the entries of ``PARTS``, and a step of a transformer.
EVERY_PART = (*PARTS, "transformer")
# Names of the components of a pipeline that torch.compile compiles, and that the variant "channels_last"
# converts. "" stands for a module that is timed without a pipeline.
TIMED_MODULES = ("", "unet", "transformer", "vae")


@dataclass(frozen=True)
class Variant:
    """One way to run a model.

    Attributes:
        name: its name on the command line and in the JSON.
        label: its name in tables.
        available: returns None if the variant can run on the given device, else the reason in one line.
        apply: changes a target (an nn.Module or a pipeline) so that it runs in this way. Called with the
            target, the part, and an ExitStack. To this stack ``apply`` adds functions that undo what a
            ``Snapshot`` cannot restore.
        describe: returns what the variant did to a target, for the table's note.
        replays_graph: True if the variant replays CUDA graphs itself, so its calls cannot be captured.
        graphs_stand_alone: True if each CUDA graph of the variant may be replayed without its other graphs.
            If False, a replay may read memory that another graph has overwritten, for example an index that
            is now out of range.
        is_ready: called with a target. While it returns False, the target is called again before its output
            is compared and timed.
        is_in_all: False if the variant is timed only if the user names it.
        slack: factor by which the output's error may exceed the bound of the correctness gate.
    """

    name: str
    label: str
    available: Callable[[torch.device], str | None]
    apply: Callable[[Any, str, contextlib.ExitStack], object]
    describe: Callable[[Any], str] = lambda target: ""
    replays_graph: bool = False
    graphs_stand_alone: bool = False
    is_ready: Callable[[Any], bool] = lambda target: True
    slack: float = 1.0
    is_in_all: bool = True


@contextlib.contextmanager
def prepared(variant: Variant, target: Any, part: str) -> Iterator[None]:
    """A context in which the model or pipeline ``target`` runs in the way of ``variant``.

    At its end ``target`` is stock (unchanged) again.
    """
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
    """Applies the variant "eager": changes nothing."""


def _channels_last(target: Any, part: str, undo: contextlib.ExitStack) -> None:
    import torch

    # Number of dimensions of a tensor -> its memory format, for the weights of 2-d and 3-d convolutions.
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    for module in _timed_modules(target):
        for tensor in (*module.parameters(), *module.buffers()):
            if tensor.dim() in formats:
                tensor.data = tensor.data.contiguous(memory_format=formats[tensor.dim()])


def _sdfastgn(
    target: Any,
    part: str,
    undo: contextlib.ExitStack,
    *,
    has_graphs: bool = True,
    precision: Literal["fp8"] | None = None,
    has_plans: bool = True,
) -> None:
    import sdfastgn

    graphs: Literal["auto", "training"] = "training" if part == "train" else "auto"
    sdfastgn.optimize(target, cuda_graphs=has_graphs and graphs, precision=precision, plans=has_plans)
    # An ExitStack calls its functions in reverse order. So the model is restored before
    # ``_check_kernels_ran`` is called, which may raise an error.
    undo.callback(_check_kernels_ran, target)
    undo.callback(sdfastgn.restore, target)


def _check_kernels_ran(target: Any) -> None:
    from sdfastgn.bench.environment import check_kernels_ran

    for device in {p.device for module in _timed_modules(target) for p in module.parameters()}:
        check_kernels_ran(device)


_sdfastgn_eager = functools.partial(_sdfastgn, has_graphs=False)
_sdfastgn_fp8 = functools.partial(_sdfastgn, precision="fp8")
_sdfastgn_no_plans = functools.partial(_sdfastgn, has_plans=False)


def _fp8_reason(device: torch.device) -> str | None:
    from sdfastgn.patches.fp8.models import device_reason

    reason = device_reason(device)
    return None if reason is None else f"FP8 is impossible: {reason}"


def _knows_scales(target: Any) -> bool:
    """True if no matrix product of ``target`` still learns the FP8 scale of its input.

    A matrix product learns the scale during its first calls, and still computes in the model's dtype in these
    calls. So such a call shows neither the output nor the time of FP8.
    """
    import sdfastgn

    return not any(found.learning for found in sdfastgn.report(target).fp8)


def _describe_sdfastgn(target: Any) -> str:
    import sdfastgn

    report = sdfastgn.report(target)
    fused = f"{len(report.fused)} fused, {len(report.skipped)} skipped{_describe_plans(report)}"
    graphs = sum(graphs.alive for graphs in report.graphs)
    if graphs:
        return f"{fused}, {counted(graphs, 'CUDA graph')} in {report.graph_memory_bytes / 2**20:.0f} MiB"
    reasons = dict.fromkeys(reason for graphs in report.graphs for reason in graphs.eager)
    return f"{fused}, no CUDA graph: {'; '.join(reasons)}" if reasons else fused


def _describe_plans(report: Any) -> str:
    """Says how many plans (traced and rewritten forwards) ``report`` has, or why it has none.

    The text begins with a comma, because it is appended to a list. It is empty for a model that gets no
    plans.
    """
    planned = [each for each in report.plans if each.is_on]
    plans = sum(each.plans for each in planned)
    if plans:
        return f", {counted(plans, 'plan')}"
    reasons = dict.fromkeys(reason for each in planned for reason in each.own)
    return f", no plan: {'; '.join(reasons)}" if reasons else ""


def compile_reason(device: torch.device) -> str | None:
    """Why torch.compile cannot run on the device; None if it can."""
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
        # ``nn.Module.compile`` compiles only ``forward``, but a VAE is called through ``decode``. So the
        # VAE's ``decoder`` is compiled, whose ``forward`` runs in ``decode``.
        decoder = getattr(module, "decoder", None)
        (decoder if isinstance(decoder, nn.Module) else module).compile(mode=mode)


def _compiled_blocks(target: Any, part: str, undo: contextlib.ExitStack) -> None:
    """Compiles the repeated blocks separately, as diffusers recommends.

    Blocks of the same class share compiled code, so this takes only seconds.
    """
    from torch import nn

    dynamo = importlib.import_module("torch._dynamo")
    dynamo.reset()
    undo.callback(dynamo.reset)
    modules: list[Any] = _timed_modules(target)
    for module in modules:
        if getattr(module, "_repeated_blocks", None):
            module.compile_repeated_blocks()
            continue
        # diffusers does not list the repeated blocks of some models, such as SD3's transformer. Then all
        # blocks in the model's module lists are compiled.
        lists = [each for each in module.children() if isinstance(each, nn.ModuleList)]
        if not any(map(len, lists)):
            raise RuntimeError(f"a {type(module).__name__} has no repeated blocks")
        for block in itertools.chain(*lists):
            block.compile()


def _compiled_channels_last(target: Any, part: str, undo: contextlib.ExitStack) -> None:
    _channels_last(target, part, undo)
    _compiled(target, part, undo)


_compiled_graphs = functools.partial(_compiled, mode="reduce-overhead")


def _sdfastgn_compiled(target: Any, part: str, undo: contextlib.ExitStack) -> None:
    _sdfastgn_eager(target, part, undo)
    _compiled(target, part, undo)


def _stable_fast(target: Any, part: str, undo: contextlib.ExitStack) -> None:
    if part == "train":
        raise RuntimeError("stable-fast traces inference, and has no backward")
    undo.enter_context(stable_fast.launch_functions())
    stable_fast.compile_target(target, part)


# Name of the variant in which sdfastgn computes matrix products in FP8.
FP8 = "sdfastgn_fp8"
# On a GPU, a UNet step or VAE decode of each variant is also timed as one CUDA graph, unless the variant
# replays graphs itself.
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
    Variant(
        FP8,
        "sdfastgn, FP8",
        _fp8_reason,
        _sdfastgn_fp8,
        _describe_sdfastgn,
        replays_graph=True,
        graphs_stand_alone=True,
        is_ready=_knows_scales,
        slack=8.0,  # FP8's relative error is large: 0.096 for a UNet step of SDXL with random weights
    ),
    Variant(
        "sdfastgn_no_plans",
        "sdfastgn without plans",
        _always,
        _sdfastgn_no_plans,
        _describe_sdfastgn,
        replays_graph=True,
        graphs_stand_alone=True,
        is_in_all=False,
    ),
    Variant("sdfastgn_eager", "sdfastgn without graphs", _always, _sdfastgn_eager, _describe_sdfastgn),
    Variant("compile", "torch.compile", compile_reason, _compiled),
    Variant(
        "compile_blocks", "torch.compile, repeated blocks", compile_reason, _compiled_blocks, is_in_all=False
    ),
    Variant("compile_channels_last", "torch.compile, channels_last", compile_reason, _compiled_channels_last),
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
    # stable-fast is the last variant, because its import has side effects on the whole process.
    Variant("stable_fast", "stable-fast", stable_fast.reason, _stable_fast, replays_graph=True),
)
VARIANTS: dict[str, Variant] = {variant.name: variant for variant in _EVERY}


def is_ours(name: str) -> bool:
    """True if the variant ``name`` uses sdfastgn. ``name`` may be a variant of an older sdfastgn."""
    return name.startswith("sdfastgn")


def label(name: str) -> str:
    """A variant's name in tables.

    A result file of an older sdfastgn may name a variant that no longer exists. Then ``name`` itself is
    returned.
    """
    return VARIANTS[name].label if name in VARIANTS else name
