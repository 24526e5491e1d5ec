"""Finds what can be fused in a component of a pipeline, applies the fusions, and undoes them exactly.

A *fusion* makes modules of one class faster, usually by changing their class to a faster subclass. A
*component* is a model, or an object of a pipeline that is no module, such as a scheduler. ``inspect`` changes
nothing. The fusions come from ``registry.py``; this file does not know particular models.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from sdfastgn.patches.code.states import reason_of_code
from sdfastgn.patches.fp8 import models as fp8
from sdfastgn.patches.layers.packed_weights import unpack
from sdfastgn.patches.layout import channels_last
from sdfastgn.patches.layout.left_alone import reason_to_leave
from sdfastgn.patches.lora import merging
from sdfastgn.patches.offload.moves import unfollow
from sdfastgn.patches.pipeline.object_fusion import ObjectFusion
from sdfastgn.patches.registry import ASKED_FUSIONS, FUSIONS, OBJECT_FUSIONS
from sdfastgn.patches.swap.fusion import Fusion, is_over_fused, restore_class

# The modules that got their original code again because a comparison found that they were wrong when fused.
# The value is the reason why the module must not be fused again. This reason is not kept in the module's
# ``__dict__``, because sdfastgn leaves nothing in a module that is not fused.
_put_back: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
# For each model, the names of the fusions that the last call of ``leave_out`` has undone. ``inspect`` ignores
# these fusions.
_left_out: weakref.WeakKeyDictionary[nn.Module, frozenset[str]] = weakref.WeakKeyDictionary()
# For each model, the names of the fusions that are off by default, but that the user has asked for (``ask``).
_asked: weakref.WeakKeyDictionary[nn.Module, frozenset[str]] = weakref.WeakKeyDictionary()
# For each scheduler or other object of a pipeline that ``apply`` changed: the object's path and the pipeline.
# If the pipeline has got another object since then, the old object is found here and can still be restored.
_found_at: weakref.WeakKeyDictionary[Any, tuple[str, weakref.ref[Any]]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Finding:
    """Says whether one fusion was applied to a module, can be applied, or must skip the module.

    Attributes:
        path: the module's dotted path.
        module: the module, or a component that is no module, such as a scheduler.
        fusion: the fusion, which makes modules of one class faster.
        status: "fused", "fusable" or "skipped".
        reason: why the module is skipped; else empty.
    """

    path: str
    module: Any
    fusion: Fusion | ObjectFusion
    status: str
    reason: str = ""


# --- what can be fused ------------------------------------------------------------------------------


def parts_of(obj: Any) -> dict[str, Any]:
    """Returns the objects of the pipeline ``obj`` that are no modules, such as its scheduler, by their names.

    Each object occurs once. ``obj`` itself is included with the name ``"pipeline"``. The dict is empty if
    ``obj`` is a module.
    """
    if isinstance(obj, nn.Module):
        return {}
    parts = {**obj.components, "image_processor": getattr(obj, "image_processor", None), "pipeline": obj}
    others = {name: part for name, part in parts.items() if not isinstance(part, nn.Module)}
    first = {id(part): name for name, part in reversed(others.items())}
    return {name: part for name, part in others.items() if first[id(part)] == name}


def parts_ever_of(obj: Any) -> list[tuple[str, Any]]:
    """Returns (path, object) for the objects of the pipeline ``obj`` that are no modules.

    Objects that ``apply`` has changed, but that the pipeline does not have anymore, are included.
    """
    now = parts_of(obj)
    ids = set(map(id, now.values()))
    # Other threads may add entries to ``_found_at`` during the loop. ``keyrefs`` copies the keys at once.
    changed = [part for ref in _found_at.keyrefs() if (part := ref()) is not None]
    then = [(_found_at[part][0], part) for part in changed if _found_at[part][1]() is obj]
    return [*now.items(), *((path, part) for path, part in then if id(part) not in ids)]


def inspect(component: Any, prefix: str = "") -> list[Finding]:
    """Finds which fusions were or can be applied to ``component`` and the modules in it. Changes nothing.

    Returns a ``Finding`` for each fusion and each module for which the fusion is meant.

    ``component``: a model, or an object of a pipeline that is no module. ``prefix``: its path.
    """
    if isinstance(component, nn.Module):
        return inspect_model(list(component.named_modules(prefix=prefix)))
    rules = [rule for rule in OBJECT_FUSIONS if rule.claims(component)]
    return [_finding(prefix, component, rule) for rule in rules[:1]]


def inspect_model(
    named: list[tuple[str, nn.Module]], asked: Collection[str] = (), left_out: Collection[str] | None = None
) -> list[Finding]:
    """Finds which fusions were or can be applied to the modules of a model. Changes nothing.

    Returns a ``Finding`` for each fusion and each module for which the fusion is meant.

    Args:
        named: (path, module) for all modules of the model; the first module is the model itself.
        asked: names of fusions to consider although they are off by default. Fusions that earlier calls of
            ``ask`` named, or that are already applied in the model, are considered anyway.
        left_out: names of fusions that are not considered. None: those that the last call of ``leave_out``
            for this model named.
    """
    component = named[0][1]
    modules = [module for _, module in named]
    left_out = left_out_of(component) if left_out is None else left_out
    fusions = [fusion for fusion in FUSIONS if fusion.name not in left_out]
    asked = asked_of(component).union(asked)
    for name, fusion in ASKED_FUSIONS.items():
        if name in asked or any(map(fusion.is_applied, modules)):
            fusions.append(fusion)
    findings = []
    reason = reason_to_leave(modules)
    why_now = functools.cache(functools.partial(reason_of_code, component))
    for path, module in named:
        for fusion in fusions:
            if fusion.claims(module):
                finding = _finding(path, module, fusion, reason, why_now)
                findings.append(finding)
                # Some fusions have a method ``skipped_in``, which yields (name, child, reason) of those
                # children of a fused module that stay as they are. The report shall list them as skipped.
                skipped_in = getattr(fusion, "skipped_in", None)
                if skipped_in is not None and finding.status != "skipped":
                    for name, child, why in skipped_in(module):
                        findings.append(
                            Finding(f"{path}.{name}" if path else name, child, fusion, "skipped", why)
                        )
    return findings


def _finding(
    path: str,
    module: Any,
    fusion: Fusion | ObjectFusion,
    reason_to_leave: str | None = None,
    why_now: Callable[[], str | None] = lambda: None,
) -> Finding:
    """Says whether ``module`` is fused by ``fusion``, can be fused, or is skipped, and why.

    Call this only if ``fusion.claims(module)`` is true, which means that the fusion is for such modules.

    Args:
        path: the path of ``module``.
        module: a module, or an object of a pipeline.
        fusion: the fusion.
        reason_to_leave: why nothing in the module's model may be fused; None if modules may be fused.
        why_now: a function that returns why fused modules of the model run their original code now, or None
            if they run fused code.
    """
    if fusion.is_applied(module):
        # Some fusions have a method ``reason_now``. If a fused module runs its original code because of its
        # present state, for example training mode, the method returns this reason.
        reason_now = getattr(fusion, "reason_now", None)
        why_not = why_now() or (None if reason_now is None else reason_now(module))
        return Finding(path, module, fusion, "skipped" if why_not else "fused", why_not or "")
    was_wrong = _put_back.get(module) if isinstance(module, nn.Module) else None
    reason = was_wrong or fusion.reason_to_skip(module) or reason_to_leave
    return Finding(path, module, fusion, "skipped" if reason else "fusable", reason or "")


# --- changes ----------------------------------------------------------------------------------------


def _in_order(component: Any) -> tuple[Any, ...]:
    """The fusions for ``component``, in the order in which they are applied. Undo reverses this order."""
    return (*FUSIONS, *ASKED_FUSIONS.values()) if isinstance(component, nn.Module) else OBJECT_FUSIONS


def needs_change(root: nn.Module, findings: list[Finding]) -> bool:
    """True if ``apply(root, findings)`` would fuse a module or make a convolution channels-last."""
    return any(f.status == "fusable" for f in findings) or not channels_last.is_complete(root)


def apply(component: Any, findings: list[Finding], pipeline: Any = None, *, lays_out: bool = True) -> None:
    """Fuse what is ``fusable`` in ``findings``, and make the convolutions of a model channels-last.

    Args:
        component: a model, or an object of a pipeline that is no module.
        findings: the result of ``inspect(component)``.
        pipeline: the pipeline to which ``component`` belongs.
        lays_out: False leaves the layout of a model's convolutions as it is.
    """
    for fusion in _in_order(component):
        for finding in findings:
            if finding.fusion is not fusion or finding.status != "fusable":
                continue
            # A module that is in two components is already fused when the second component is optimized.
            if not fusion.is_applied(finding.module):
                fusion.apply(finding.module)
    if isinstance(component, nn.Module):
        if lays_out:
            channels_last.apply(component)
        return
    for finding in findings:
        with contextlib.suppress(TypeError):  # some objects cannot be weakly referenced
            _found_at[component] = finding.path, weakref.ref(pipeline)


def ask(roots: Iterable[nn.Module], names: Collection[str]) -> None:
    """Remember that the user has asked for the fusions ``names`` in the models ``roots``.

    ``names`` are added to the names of earlier calls. ``undo`` forgets all of them. Such fusions are off by
    default.
    """
    for root in roots if names else ():
        _asked[root] = asked_of(root).union(names)


def ask_only(root: nn.Module, names: Collection[str]) -> None:
    """Remember that the user has asked for exactly the fusions ``names`` in the model ``root``.

    The names of earlier calls are forgotten.
    """
    _asked.pop(root, None)
    ask([root], names)


def asked_of(root: nn.Module) -> frozenset[str]:
    """Names of the fusions that are off by default, but that the user has asked for in the model ``root``."""
    return _asked.get(root, frozenset())


def leave_out(root: nn.Module, names: Collection[str]) -> None:
    """Undo the fusions ``names`` in the model ``root``. From now on ``inspect`` ignores these fusions.

    All other fusions are considered, even if an earlier call of ``leave_out`` named them.
    """
    for fusion in FUSIONS:
        for module in root.modules() if fusion.name in names else ():
            if fusion.is_applied(module):
                fusion.undo(module)
    _left_out.pop(root, None)
    if names:
        _left_out[root] = frozenset(names)


def left_out_of(root: nn.Module) -> frozenset[str]:
    """Names of the fusions that ``inspect`` ignores in the model ``root``, because of ``leave_out``."""
    return _left_out.get(root, frozenset())


def take_back(component: Any, findings: list[Finding], laid_out: Collection[nn.Module]) -> None:
    """Undo what ``apply`` did for ``findings``. What was fused before ``apply`` stays fused.

    Args:
        component: a model, or an object of a pipeline that is no module.
        findings: what ``inspect(component)`` returned before ``apply``.
        laid_out: the modules whose memory layout was already changed before ``apply``. Empty if
            ``component`` is no module.
    """
    for fusion in reversed(_in_order(component)):
        for finding in findings:
            if finding.fusion is fusion and finding.status == "fusable" and fusion.is_applied(finding.module):
                fusion.undo(finding.module)
                _forget(finding.module)
    if isinstance(component, nn.Module):
        for module in component.modules():
            if module not in laid_out:
                channels_last.restore(module)


def put_back(findings: list[Finding], reason: str) -> None:
    """Give a module its original code again, and do not fuse the module any more.

    Until ``undo`` is called, ``inspect`` lists the module as skipped, with ``reason``. ``findings``: all
    results of ``inspect`` about this module.
    """
    for finding in findings:
        finding.fusion.undo(finding.module)
        _put_back[finding.module] = reason


def undo(component: Any, prefix: str = "") -> list[tuple[str, Any]]:
    """Restore all of ``component`` as it was before ``optimize``. If nothing was changed, nothing happens.

    ``component``: a model, or an object of a pipeline that is no module. ``prefix``: its path.

    Returns (path, module or object) for all that could not be restored, because other code has changed their
    class to a subclass of the fused class. After that code has undone its change, call ``undo`` again.
    """
    if not isinstance(component, nn.Module):
        for rule in OBJECT_FUSIONS:
            rule.undo(component)
        over = any(rule.is_over_applied(component) for rule in OBJECT_FUSIONS)
        return [(prefix, component)] if over else []
    _left_out.pop(component, None)
    _asked.pop(component, None)
    modules = list(component.modules())  # undoing a fusion adds or removes no module
    for fusion in reversed(_in_order(component)):
        for module in modules:
            if fusion.is_applied(module):
                fusion.undo(module)
    for module in modules:
        # Some fusions restore a module through its parent. If other code has replaced the parent,
        # ``fusion.undo`` has missed the module.
        restore_class(module)
        channels_last.restore(module)
        _forget(module)
        unfollow(module)
    return [(path, m) for path, m in component.named_modules(prefix=prefix) if is_over_fused(m)]


def _forget(module: Any) -> None:
    """Deletes what sdfastgn keeps for ``module``: weights that are packed, merged or in FP8.

    Also deletes the reason why the module must not be fused again, if there is one.
    """
    if isinstance(module, nn.Module):
        _put_back.pop(module, None)
        unpack(module)
        merging.leave(module)
        fp8.forget(module)
