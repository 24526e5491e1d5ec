"""The state of a pipeline's component before ``optimize``, and how to return to it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn

from sdfastgn.patches import fp8_option, patcher
from sdfastgn.patches.fp8 import models as fp8
from sdfastgn.patches.graphs import install as graphs
from sdfastgn.patches.graphs.models import is_graphable
from sdfastgn.patches.layout import channels_last
from sdfastgn.patches.lora import merged_adapters
from sdfastgn.patches.offload.moves import follow, followed_in, unfollow
from sdfastgn.patches.swap.exclusive import call_entry
from sdfastgn.plans import install as plans

__all__ = ["Options", "Snapshot", "may_change", "put_back", "take"]


@dataclass(frozen=True)
class Options:
    """The options of ``optimize`` and ``optimized``. The docstring of ``optimize`` explains each of them."""

    strict: bool = False
    cuda_graphs: Literal["auto", "training"] | bool = "auto"
    missing_ok: bool = False
    verify: bool = False
    fold_batch_norm: bool = False
    merge_adapters: bool = True
    exact_tiling: bool = True
    precision: Literal["fp8"] | None = None
    plans: bool = True
    trust: Sequence[str] = ()

    @property
    def asked(self) -> tuple[str, ...]:
        """Names of the fusions that are off by default (``ASKED_FUSIONS``) and that these options turn on."""
        return ("batch_norm",) if self.fold_batch_norm else ()

    @property
    def left_out(self) -> tuple[str, ...]:
        """Names of the fusions that these options turn off."""
        return () if self.exact_tiling else ("tiled_decode",)


@dataclass(frozen=True)
class Snapshot:
    """The state of one component before ``optimize``, from which ``put_back`` restores it.

    ``is_stock``: True if sdfastgn had changed nothing in the component. ``modes``: module whose calls run as
    CUDA graphs -> its option ``cuda_graphs``. ``findings``: what ``patcher.inspect`` found in the component.
    ``laid_out``: the modules whose layout sdfastgn had changed. ``followed``: the modules whose method
    ``_apply`` a ``Moves`` had replaced (``moves.py``). ``in_fp8``: the models in the component that had
    matrix products in FP8, with these products. ``unmerged``: the modules that had ``merge_adapters=False``.
    ``asked`` and ``left_out``: names of the fusions that were turned on and off. ``trusted``: the packages
    that plans of the component trusted; None if it had no plans. ``leaving``: findings of
    applied fusions that ``patcher.leave_out`` undoes.
    """

    name: str
    component: Any
    findings: list[patcher.Finding]
    is_stock: bool
    modes: dict[nn.Module, str | bool]
    laid_out: set[nn.Module]
    followed: frozenset[nn.Module] = frozenset()
    in_fp8: dict[nn.Module, fp8.Kept] = field(default_factory=dict)
    unmerged: frozenset[nn.Module] = frozenset()
    asked: frozenset[str] = frozenset()
    left_out: frozenset[str] = frozenset()
    leaving: tuple[patcher.Finding, ...] = ()
    trusted: frozenset[str] | None = None


def take(name: str, component: Any, options: Options) -> Snapshot:
    """The present state of ``component``, a model or a part of a pipeline. ``name``: its path."""
    findings = patcher.inspect(component, name, options.asked, options.left_out)
    is_stock = not any(f.status == "fused" for f in findings)
    if not isinstance(component, nn.Module):
        return Snapshot(name, component, findings, is_stock, {}, set())
    modes = {
        module: graphed.mode
        for module in component.modules()
        if (graphed := graphs.graphed_of(module)) is not None
    }
    modules = list(component.modules())
    followed = followed_in(modules)
    trusted = plans.trusted_in(modules)
    is_stock = is_stock and not (modes or followed or channels_last.is_applied(component))
    is_stock = is_stock and trusted is None and call_entry(component) is None
    laid_out = channels_last.laid_out(modules)
    unmerged = frozenset(module for module in modules if not merged_adapters.is_allowed(module))
    left_out = patcher.left_out_of(component)
    names = left_out.union(options.left_out)
    every = patcher.inspect(component, name, left_out=()) if names else []
    leaving = tuple(f for f in every if f.fusion.name in names and f.fusion.is_applied(f.module))
    kept = followed, fp8.kept_in(modules), unmerged, patcher.asked_of(component), left_out, leaving, trusted
    return Snapshot(name, component, findings, is_stock, modes, laid_out, *kept)


def may_change(was: Snapshot, options: Options, has_parts: bool) -> bool:
    """True if ``optimize`` may change fusions, layout, merged weights or FP8 of ``was.component``, a model.

    ``has_parts``: False if only its adapters may be merged.

    Some changes do not count, because they are safe while other threads run the model: modes of CUDA graphs,
    fusions that are left out, and the replacement of ``_apply`` (``moves.follow``).
    """
    if merged_adapters.must_release(was.component, options.merge_adapters):
        return True
    return has_parts and (
        options.verify
        or patcher.needs_change(was.component, was.findings)
        or fp8_option.may_change(was.component, options.precision)
    )


def put_back(before: list[Snapshot], followed: Iterable[nn.Module]) -> list[tuple[str, Any]]:
    """Give each component the state that it had before ``optimize``.

    ``followed``: the models without a snapshot that are followed since then.

    Returns (path, module or part of a pipeline) for all that could not be restored.
    """
    left = []
    for was in before:
        is_model = isinstance(was.component, nn.Module)
        if was.is_stock:
            if is_model:
                plans.remove(was.component)
                graphs.remove(was.component)
            left += patcher.undo(was.component, was.name)
            continue
        patcher.take_back(was.component, was.findings, was.laid_out)
        if is_model:
            _allow_merging_as(was)
            patcher.ask_only(was.component, was.asked)
            patcher.leave_out(was.component, was.left_out)
            for finding in was.leaving:
                if not finding.fusion.is_applied(finding.module):
                    finding.fusion.apply(finding.module)
            fp8_option.put_back(was.component, was.in_fp8)
        former = plans.take_off(was.component) if is_model else ()
        for module in was.component.modules() if is_model else ():
            is_graphed = is_graphable(module) or graphs.graphed_of(module) is not None
            if is_graphed and module not in was.modes:
                graphs.remove(module)
        for module, mode in was.modes.items():
            graphs.install(module, mode)
        if is_model:
            mode = was.modes.get(was.component, False)
            trusted = was.trusted or frozenset()
            plans.install(was.component, was.trusted is not None, trusted, mode, former=former)
        for module in was.component.modules() if is_model else ():
            (follow if module in was.followed else unfollow)(module)
    for model in followed:
        unfollow(model)
    return left


def _allow_merging_as(was: Snapshot) -> None:
    # A module comes before the modules in it, for which ``allow`` also decides.
    for module in was.component.modules():
        if merged_adapters.is_allowed(module) == (module in was.unmerged):
            merged_adapters.allow(module, module not in was.unmerged)
