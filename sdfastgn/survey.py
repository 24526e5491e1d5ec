"""Records what is in a pipeline before ``optimize`` changes it, and returns the pipeline to this state."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from sdfastgn.patches import fp8_option, patcher
from sdfastgn.patches.fp8 import models as fp8
from sdfastgn.patches.graphs import install as graphs
from sdfastgn.patches.graphs.forward import GraphedForward
from sdfastgn.patches.graphs.models import is_graphable
from sdfastgn.patches.layout import channels_last
from sdfastgn.patches.lora import merging
from sdfastgn.patches.lora.adapters import takes_adapters
from sdfastgn.patches.offload.moves import follow, followed_in, unfollow
from sdfastgn.patches.swap.exclusive import call_entry
from sdfastgn.plans import install as plans


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
        """Names of the fusions that are off by default, and that these options of ``optimize`` turn on."""
        return ("batch_norm",) if self.fold_batch_norm else ()

    @property
    def left_out(self) -> tuple[str, ...]:
        """Names of the fusions that these options of ``optimize`` turn off."""
        return () if self.exact_tiling else ("tiled_decode",)


@dataclass(frozen=True)
class Found:
    """What can be optimized in one component of a pipeline, and the state to which ``put_back`` returns.

    Attributes:
        name: the component's path.
        component: a model, or an object of a pipeline that is no module, such as a scheduler.
        findings: a list that says, for each fusion and each module of the fusion's class, whether the fusion
            is applied, can be applied, or must skip the module. Fusions that the options of ``optimize`` turn
            off are not in it.
        is_stock: True if sdfastgn had changed nothing in the component.
    """

    name: str
    component: Any
    findings: list[patcher.Finding]
    is_stock: bool

    @property
    def gets_plans(self) -> bool:
        """True if ``optimize`` lets calls of the component run as plans (traced lists of kernels)."""
        return False


@dataclass(frozen=True)
class FoundModel(Found):
    """What can be optimized in one model of a pipeline, and the state to which ``put_back`` returns.

    Attributes:
        modules: the model and all modules in it.
        devices: the devices of the model's parameters.
        has_fusions: True if the model is optimized, or if there is a fusion for a module in it.
        is_graphable: True if the model is or contains a module whose calls can become CUDA graphs.
        kind: says whether the model gets plans (traced lists of kernels), and whether they make it faster.
        takes_adapters: True if the model has adapters, or can get some.
        modes: for each module whose calls run as CUDA graphs, its option ``cuda_graphs``.
        laid_out: the modules whose memory layout sdfastgn had changed.
        followed: the modules whose moves between devices sdfastgn noticed. A ``Moves`` object had replaced
            their method ``_apply`` (``moves.py``).
        in_fp8: for this model and each model in it, the matrix products that ran in FP8, if there were any.
        unmerged: the modules whose adapters were not merged, because of ``merge_adapters=False``.
        asked, left_out: names of the fusions that the user had turned on and off.
        leaving: the fusions that were applied and that the options of ``optimize`` turn off, with their
            modules.
        trusted: the packages that the option ``trust`` named for the model's plans; None if it had no plans.
    """

    modules: tuple[nn.Module, ...]
    devices: frozenset[torch.device]
    has_fusions: bool
    is_graphable: bool
    kind: plans.Kind
    takes_adapters: bool
    modes: dict[nn.Module, str | bool]
    laid_out: set[nn.Module]
    followed: frozenset[nn.Module]
    in_fp8: dict[nn.Module, fp8.Kept]
    unmerged: frozenset[nn.Module]
    asked: frozenset[str]
    left_out: frozenset[str]
    leaving: tuple[patcher.Finding, ...]
    trusted: frozenset[str] | None

    @property
    def gets_plans(self) -> bool:
        return self.kind.gets_plans


@dataclass(frozen=True)
class Survey:
    """What can be optimized in a pipeline or a model, and the state in which it is now.

    Attributes:
        models: a dict from names to what was found, for all components that are models. If the user has given
            a model and no pipeline, its name is "". A component that occurs twice is listed once. A component
            that is inside of another component is not listed.
        roots: the items of ``models`` with anything to fuse, to capture as CUDA graphs, or to run as plans
            (traced lists of kernels).
        adaptable: the other items of ``models`` that have adapters or can get some.
        parts: what was found in components that are no models; empty if ``roots`` is empty.
    """

    models: dict[str, FoundModel]
    roots: dict[str, FoundModel]
    adaptable: dict[str, FoundModel]
    parts: dict[str, Found]

    @property
    def every(self) -> dict[str, FoundModel]:
        """The models that ``optimize`` changes: ``roots`` and ``adaptable``."""
        return self.roots | self.adaptable


def survey(call: str, obj: Any, options: Options | None = None) -> Survey:
    """Find what can be optimized in ``obj``, a pipeline or a model. Changes nothing.

    ``call``: the name of the public function, for the error. ``options``: the options of ``optimize``;
    None for the options with which each model was optimized.

    Raises TypeError if ``obj`` is neither a pipeline nor a module.
    """
    models = {name: _found_in(name, named, options) for name, named in models_of(call, obj).items()}
    roots = {
        name: found
        for name, found in models.items()
        if found.has_fusions
        or found.is_graphable
        or (found.gets_plans and (options is None or options.plans))
    }
    adaptable = {name: f for name, f in models.items() if name not in roots and f.takes_adapters}
    others = patcher.parts_of(obj) if roots else {}
    return Survey(models, roots, adaptable, {name: _found_in_part(name, it) for name, it in others.items()})


def models_of(call: str, obj: Any) -> dict[str, list[tuple[str, nn.Module]]]:
    """Returns (path, module) for all modules of each model in ``obj``, by the model's name.

    The first module of each list is the model itself. A model inside of another model is left out.

    ``obj``: a pipeline or a model. ``call``: the name of the public function, for the error.

    Raises TypeError if ``obj`` is neither a pipeline nor a module.
    """
    if isinstance(obj, nn.Module):
        return {"": list(obj.named_modules())}
    if not isinstance(getattr(obj, "components", None), dict):
        raise TypeError(
            f"sdfastgn.{call}: expected a diffusers pipeline or a torch.nn.Module, got {type(obj).__name__} "
            + textwrap.shorten(repr(obj), 80, placeholder=" ...")
        )
    first = {id(m): name for name, m in reversed(obj.components.items()) if isinstance(m, nn.Module)}
    models = {name: m for name, m in obj.components.items() if first.get(id(m)) == name}
    walks = {name: list(model.named_modules(prefix=name)) for name, model in models.items()}
    inner = {id(module) for named in walks.values() for _, module in named[1:]}
    return {name: named for name, named in walks.items() if id(named[0][1]) not in inner}


def _found_in_part(name: str, part: Any) -> Found:
    findings = patcher.inspect(part, name)
    return Found(name, part, findings, not any(f.status == "fused" for f in findings))


def _found_in(name: str, named: list[tuple[str, nn.Module]], options: Options | None) -> FoundModel:
    """Finds what can be optimized in a model, and records its present state.

    ``named``: (path, module) for all modules of the model; the first module is the model itself.
    """
    modules = tuple(module for _, module in named)
    root = modules[0]
    left_out = patcher.left_out_of(root)
    turned_off = left_out if options is None else frozenset(options.left_out)
    every = patcher.inspect_model(named, () if options is None else options.asked, left_out=())
    findings = [f for f in every if f.fusion.name not in turned_off]
    laid_out = channels_last.laid_out(modules)
    modes = {m: graphed.mode for m in modules if (graphed := GraphedForward.of(m)) is not None}
    followed, trusted = followed_in(modules), plans.trusted_in(modules)
    is_changed = laid_out or modes or followed or trusted is not None or call_entry(root) is not None
    return FoundModel(
        name=name,
        component=root,
        findings=findings,
        is_stock=not (is_changed or any(f.status == "fused" for f in findings)),
        modules=modules,
        devices=frozenset(p.device for m in modules for p in m._parameters.values() if p is not None),
        has_fusions=bool(every or laid_out),
        is_graphable=bool(modes) or any(map(is_graphable, modules)),
        kind=plans.kind_of(modules, findings),
        takes_adapters=takes_adapters(modules),
        modes=modes,
        laid_out=laid_out,
        followed=followed,
        in_fp8=fp8.kept_in(modules),
        unmerged=frozenset(module for module in modules if not merging.is_allowed(module)),
        asked=patcher.asked_of(root),
        left_out=left_out,
        leaving=tuple(
            f for f in every if f.fusion.name in left_out | turned_off and f.fusion.is_applied(f.module)
        ),
        trusted=trusted,
    )


def may_change(was: FoundModel, options: Options, has_parts: bool) -> bool:
    """True if other threads must not run the model ``was.component`` while ``optimize`` changes it.

    This is so if ``optimize`` may change fusions, layout, merged weights or FP8.

    Other changes are safe while other threads run the model: options of CUDA graphs, fusions that are left
    out, and the replacement of the method ``_apply``.

    ``has_parts``: False if ``optimize`` can do nothing for the model except for merging its adapters.
    """
    if not options.merge_adapters and any(map(merging.is_merged, was.modules)):
        return True
    return has_parts and (
        options.verify
        or options.precision is not None
        or bool(was.in_fp8)
        or patcher.needs_change(was.component, was.findings)
    )


def put_back(before: Iterable[Found], followed: Iterable[nn.Module]) -> list[tuple[str, Any]]:
    """Give each component of a pipeline the state that it had before ``optimize``.

    Returns (path, module or other object of a pipeline) for all that could not be restored.

    ``before``: the components and their states. ``followed``: other models of the pipeline. From now on
    sdfastgn does not notice when these move between devices.
    """
    left = []
    for was in before:
        if not isinstance(was, FoundModel):
            left += _put_back_part(was)
        elif was.is_stock:
            plans.remove(was.component)
            graphs.remove(was.component)
            left += patcher.undo(was.component, was.name)
        else:
            _put_back_model(was)
    for model in followed:
        unfollow(model)
    return left


def _put_back_part(was: Found) -> list[tuple[str, Any]]:
    if was.is_stock:
        return patcher.undo(was.component, was.name)
    patcher.take_back(was.component, was.findings, ())
    return []


def _put_back_model(was: FoundModel) -> None:
    patcher.take_back(was.component, was.findings, was.laid_out)
    _allow_merging_as(was)
    patcher.ask_only(was.component, was.asked)
    patcher.leave_out(was.component, was.left_out)
    for finding in was.leaving:
        if not finding.fusion.is_applied(finding.module):
            finding.fusion.apply(finding.module)
    fp8_option.put_back(was.component, was.in_fp8)
    for module in was.component.modules():
        is_graphed = is_graphable(module) or GraphedForward.of(module) is not None
        if is_graphed and module not in was.modes:
            graphs.remove(module)
    for module, mode in was.modes.items():
        graphs.install(module, mode)
    mode = was.modes.get(was.component, False)
    trusted = was.trusted or frozenset()
    plans.install(was.component, was.trusted is not None, trusted, mode)
    for module in was.component.modules():
        (follow if module in was.followed else unfollow)(module)


def _allow_merging_as(was: FoundModel) -> None:
    # ``allow`` allows or forbids merging in a module and in all modules in it. ``modules()`` yields a module
    # before the modules in it, so each module gets its own state last.
    for module in was.component.modules():
        if merging.is_allowed(module) == (module in was.unmerged):
            merging.allow(module, module not in was.unmerged)
