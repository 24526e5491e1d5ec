"""The public verbs: ``optimize``, ``restore``, ``optimized`` and ``report``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from sfastgn.kernels.dispatch import KERNEL_DTYPES
from sfastgn.kernels.tiles import triton
from sfastgn.patches import channels_last, patcher
from sfastgn.patches import cuda_graphs as graphs
from sfastgn.patches.distributed import is_in_ddp
from sfastgn.patches.graphed_forward import is_graphable
from sfastgn.reports import Entry, Report

__all__ = ["optimize", "optimized", "report", "restore"]

T = TypeVar("T")


def optimize(obj: T, *, strict: bool = False, cuda_graphs: Literal["auto"] | bool = "auto") -> T:
    """Make a diffusers pipeline or model channels-last with fused norms, in place; the images stay the same.

    Args:
        obj: a diffusers pipeline (every component with a GroupNorm or with diffusers' transformer blocks or parts of them: UNet, VAE,
            ControlNets, ...; and what the CPU does around them: a scheduler that waits for the GPU at each step without need, PNDM
            and DDIM, the image processor, the pipeline's search for its device) or any ``torch.nn.Module`` tree.
        strict: raise instead of leaving out a module or another part that cannot be changed.
        cuda_graphs: replay calls of UNets, ControlNets, VAEs and CLIP text encoders on a GPU as CUDA graphs. ``"auto"``: a call like
            none before runs as usual, the second of its kind is captured, and those after it are replayed; True: captured at the first;
            False: never. Each change to the model drops its graphs, and what cannot be captured runs as usual; ``report`` says what
            happened and why.

    Returns:
        ``obj`` itself. Instances get subclasses of their classes, by the same names; the classes themselves stay what they are.
        Parameters keep their identity, names and values. A second call changes nothing but ``cuda_graphs`` and parts that are new.
        ``restore`` undoes it exactly, ``report`` tells what was done.

    Without a GPU or Triton the same modules run in plain PyTorch. Every check comes before the first change.

    Raises:
        TypeError: ``obj`` is neither a pipeline nor a module.
        ValueError: ``cuda_graphs`` is none of the three; there is nothing to fuse in it; it is in a DistributedDataParallel, which has
            to be made afterwards; or ``strict`` and something must be skipped (the message says what and why).
    """
    _optimize("optimize", obj, strict, cuda_graphs)
    return obj


def restore(obj: T) -> T:
    """Undo ``optimize`` in place: bit-identical outputs, the same classes, strides and attributes as before. Returns ``obj``.

    A stock pipeline or module is left as it is.

    Raises:
        TypeError: ``obj`` is neither.
        ValueError: it is optimised and in a DistributedDataParallel, which has to be dropped first.
    """
    roots = _roots("restore", obj, required=False)
    _refuse_in_ddp("restore", obj, roots.values())
    for root in roots.values():
        graphs.remove(root)
        patcher.undo(root)
    patcher.undo_parts(_parts(obj).values())
    return obj


@contextmanager
def optimized(obj: T, *, strict: bool = False, cuda_graphs: Literal["auto"] | bool = "auto") -> Iterator[T]:
    """``with sfastgn.optimized(pipe):`` optimised inside, and afterwards as it was.

    A component that was optimised before stays so, and its graphs' mode is again what it was; the others are restored, with those that
    the pipeline got inside.
    """
    before, parts = _optimize("optimized", obj, strict, cuda_graphs)
    kept = {id(f.module): f.module for f in parts if f.status == "fused"}
    try:
        yield obj
    finally:
        _refuse_in_ddp("optimized", obj, [was.root for was in before if was.is_stock])
        # Those that came meanwhile were not there before either.
        _put_back(before, [p for p in (*_parts(obj).values(), *(f.module for f in parts)) if id(p) not in kept])


def report(obj: Any) -> Report:
    """What is fused in ``obj``, what ``optimize`` would fuse, and what is skipped and why. Changes nothing.

    Raises TypeError if ``obj`` is neither a pipeline nor a module.
    """
    roots = _roots("report", obj, required=False)
    findings = [(name or type(root).__name__, f) for name, root in roots.items() for f in patcher.inspect(root, name)]
    findings += [(f.path, f) for f in patcher.inspect_parts(_parts(obj) if roots else {})]
    entries = tuple(
        Entry(component, f.path, f.fusion.name, type(f.module).__name__, f.status, f.reason)
        for component, f in findings
    )
    found = [pair for name, root in roots.items() for pair in graphs.inspect(root, name)]
    pools: dict[int, int] = {}
    for _, graphed in found:
        pools.update(graphed.pool_bytes() if graphed is not None else {})
    return Report(
        entries=entries,
        backend=_backend(list(roots.values())),
        channels_last_weights=sum(channels_last.converted_weights(root) for root in roots.values()),
        layout_copies_removed=sum(e.status == "fused" and e.fusion == "transformer_2d" for e in entries),
        graphs=tuple(state for state, _ in found),
        graph_memory_bytes=sum(pools.values()),
    )


@dataclass(frozen=True)
class _Before:
    """What one component was before ``optimize``; ``modes``: of the modules with graphs."""

    root: nn.Module
    is_stock: bool
    modes: dict[nn.Module, str | bool]


def _before(root: nn.Module, findings: list[patcher.Finding]) -> _Before:
    modes = {
        module: graphed.mode
        for module in root.modules()
        if is_graphable(module)
        for _, graphed in graphs.inspect(module)
        if graphed is not None
    }
    is_fused = any(f.status == "fused" for f in findings)
    return _Before(root, not (is_fused or modes or channels_last.converted_weights(root)), modes)


def _put_back(before: list[_Before], parts: list[Any]) -> None:
    """``parts``: those that are to be stock again."""
    patcher.undo_parts(parts)
    for was in before:
        if was.is_stock:
            graphs.remove(was.root)
            patcher.undo(was.root)
            continue
        for module in was.root.modules():
            if is_graphable(module) and module not in was.modes:
                graphs.remove(module)
        for module, mode in was.modes.items():
            graphs.install(module, mode)


def _optimize(
    call: str, obj: Any, strict: bool, cuda_graphs: str | bool
) -> tuple[list[_Before], list[patcher.Finding]]:
    """Carry it out. Returns what each component was before, and the other parts."""
    # 0 and numpy's False are equal to False and are not it.
    if type(cuda_graphs) not in (bool, str) or cuda_graphs not in graphs.MODES:
        raise ValueError(f'sfastgn.{call}: cuda_graphs={cuda_graphs!r} must be "auto", True or False')
    roots = _roots(call, obj)
    if any(channels_last.unconverted_weights(root) for root in roots.values()) and is_in_ddp(roots.values()):
        raise ValueError(_in_ddp(call, obj, "optimize it before it is wrapped"))
    findings = {name: patcher.inspect(root, name) for name, root in roots.items()}
    parts = patcher.inspect_parts(_parts(obj))
    skipped = [f for found in (*findings.values(), parts) for f in found if f.status == "skipped"]
    if strict and skipped:
        reasons = "; ".join(f"{f.path or type(f.module).__name__} ({f.fusion.name}): {f.reason}" for f in skipped)
        raise ValueError(f"sfastgn.{call}: strict=True and {len(skipped)} parts cannot be fused: {reasons}")
    before = [_before(root, findings[name]) for name, root in roots.items()]
    try:
        for name, root in roots.items():
            patcher.apply(root, findings[name])
        for root in roots.values():
            graphs.install(root, cuda_graphs)
        patcher.apply_parts(parts)
    except BaseException:
        _put_back(before, [f.module for f in parts if f.status == "fusable"])
        raise
    return before, parts


def _refuse_in_ddp(call: str, obj: Any, roots: Iterable[nn.Module]) -> None:
    roots = list(roots)
    if any(channels_last.converted_weights(root) for root in roots) and is_in_ddp(roots):
        raise ValueError(_in_ddp(call, obj, "restore it after the wrapper is gone"))


def _in_ddp(call: str, obj: Any, advice: str) -> str:
    return (
        f"sfastgn.{call}: {type(obj).__name__} is in a DistributedDataParallel, whose buckets need the layout that the weights had "
        f"when it was made; {advice}"
    )


def _roots(call: str, obj: Any, *, required: bool = True) -> dict[str, nn.Module]:
    """Modules to work on by component name ("" for a bare module).

    Each object once, as part of the outermost component that has it; those without anything to fuse left out.
    """
    if isinstance(obj, nn.Module):
        candidates: dict[str, Any] = {"": obj}
    elif isinstance(getattr(obj, "components", None), dict):
        candidates = obj.components
    else:
        raise TypeError(
            f"sfastgn.{call}: expected a diffusers pipeline or a torch.nn.Module, got {type(obj).__name__} {obj!r:.80}"
        )
    roots: dict[str, nn.Module] = {}
    for name, module in candidates.items():
        if (
            isinstance(module, nn.Module)
            and all(module is not r for r in roots.values())
            and (patcher.has_fusions(module) or graphs.has_graphable(module))
        ):
            roots[name] = module
    inner = {id(module) for root in roots.values() for module in root.modules() if module is not root}
    roots = {name: root for name, root in roots.items() if id(root) not in inner}
    if required and not roots:
        raise ValueError(
            f"sfastgn.{call}: no GroupNorm and no part of diffusers' transformer blocks in {type(obj).__name__}, nothing to optimize"
        )
    return roots


def _parts(obj: Any) -> dict[str, Any]:
    """What a pipeline consists of besides modules, by attribute; the pipeline itself is ``"pipeline"``."""
    if isinstance(obj, nn.Module):
        return {}
    parts = {**obj.components, "image_processor": getattr(obj, "image_processor", None), "pipeline": obj}
    return {name: part for name, part in parts.items() if not isinstance(part, nn.Module)}


def _backend(roots: list[nn.Module]) -> str:
    if triton is None:
        return "plain PyTorch (triton is not installed)"
    tensors = [p for root in roots for p in root.parameters()]
    devices = {p.device.type for p in tensors}
    if "cuda" not in devices:
        where = ", ".join(sorted(devices)) or "no device"
        return f"plain PyTorch (weights on {where}, the Triton kernels need an NVIDIA GPU)"
    dtypes = {p.dtype for p in tensors if p.is_cuda and p.is_floating_point()}
    if not dtypes & set(KERNEL_DTYPES):
        return f"plain PyTorch (no kernel for {', '.join(sorted(map(str, dtypes)))})"
    return f"Triton {triton.__version__} on {torch.cuda.get_device_name()}"
