"""Plan, check everything, then apply; and the exact way back.

Knows modules and the registry, no model.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from sdfastgn.patches.core import channels_last
from sdfastgn.patches.core.adapters import adapter_reason
from sdfastgn.patches.core.fusion import ClassSwap, Fusion, is_over_fused, restore_class
from sdfastgn.patches.core.left_alone import reason_to_leave
from sdfastgn.patches.fusions import batch_norm
from sdfastgn.patches.pipeline.object_fusion import ObjectFusion
from sdfastgn.patches.registry import ASKED_FUSIONS, FUSIONS, OBJECT_FUSIONS
from sdfastgn.patches.shared.packed_weights import unpack

__all__ = [
    "Finding",
    "apply",
    "apply_parts",
    "has_fusions",
    "inspect",
    "inspect_parts",
    "needs_change",
    "parts_ever_of",
    "parts_of",
    "put_back",
    "take_back",
    "undo",
    "undo_parts",
]

# Modules that were put back, and why. Not in their ``__dict__``: a stock module has nothing of ours.
_put_back: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
# Changed part -> (path, pipeline), so that a part that was replaced since can still be restored.
_found_at: weakref.WeakKeyDictionary[Any, tuple[str, weakref.ref[Any]]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Finding:
    """One (module, fusion) pair: ``fused``, ``fusable`` by optimize, or ``skipped`` with a ``reason``.

    ``module`` is a plain object where the rule is one of ``OBJECT_FUSIONS``.
    """

    path: str
    module: Any
    fusion: Fusion | ObjectFusion
    status: str
    reason: str = ""


def inspect(root: nn.Module, prefix: str = "", asked: Collection[str] = ()) -> list[Finding]:
    """What each fusion of the registry says about each module below ``root``. Changes nothing.

    Layers that a fusion leaves as they are because of an adapter follow the module that they are in.

    ``asked``: names of ``ASKED_FUSIONS``; one that is applied to any module counts as asked for.
    """
    fusions = [*FUSIONS]
    for name, fusion in ASKED_FUSIONS.items():
        if name in asked or any(map(fusion.is_applied, root.modules())):
            fusions.append(fusion)
    findings = []
    reason = reason_to_leave(root)
    for path, module in root.named_modules(prefix=prefix):
        for fusion in fusions:
            if fusion.claims(module):
                finding = _finding(path, module, fusion, reason)
                findings.append(finding)
                if finding.status != "skipped" and isinstance(fusion, ClassSwap):
                    findings += _adapted(path, module, fusion)
    return findings


def parts_of(obj: Any) -> dict[str, Any]:
    """What a pipeline consists of besides modules, by attribute; ``"pipeline"`` is itself."""
    if isinstance(obj, nn.Module):
        return {}
    parts = {**obj.components, "image_processor": getattr(obj, "image_processor", None), "pipeline": obj}
    return {name: part for name, part in parts.items() if not isinstance(part, nn.Module)}


def parts_ever_of(obj: Any) -> list[tuple[str, Any]]:
    """(path, part) of ``parts_of(obj)`` and of those that were exchanged after ``apply_parts``."""
    now = parts_of(obj)
    ids = set(map(id, now.values()))
    # ``keyrefs`` is one step of the interpreter: other threads may add some meanwhile.
    changed = [part for ref in _found_at.keyrefs() if (part := ref()) is not None]
    then = [(_found_at[part][0], part) for part in changed if _found_at[part][1]() is obj]
    return [*now.items(), *((path, part) for path, part in then if id(part) not in ids)]


def inspect_parts(parts: dict[str, Any]) -> list[Finding]:
    """The same of a pipeline's ``parts`` that are no modules, each object once."""
    found: dict[int, Finding] = {}
    for path, part in parts.items():
        for rule in OBJECT_FUSIONS:
            if id(part) not in found and rule.claims(part):
                found[id(part)] = _finding(path, part, rule)
    return list(found.values())


def has_fusions(root: nn.Module, asked: Collection[str] = ()) -> bool:
    """True if there is anything below ``root`` that a fusion is about, one of ``asked`` included, or if
    it is optimized.
    """
    fusions = (*FUSIONS, *(ASKED_FUSIONS[name] for name in asked))
    return channels_last.is_applied(root) or any(
        fusion.claims(module) for module in root.modules() for fusion in fusions
    )


def needs_change(root: nn.Module, findings: list[Finding]) -> bool:
    """True if ``apply`` would change anything."""
    return any(f.status == "fusable" for f in findings) or not channels_last.is_complete(root)


def apply(root: nn.Module, findings: list[Finding]) -> None:
    """Carry out the ``fusable`` ones of ``inspect(root)`` and make the convolutions channels-last."""
    for fusion in (*FUSIONS, *ASKED_FUSIONS.values()):
        for finding in findings:
            if finding.fusion is not fusion or finding.status != "fusable":
                continue
            if not fusion.is_applied(finding.module):  # it may be in another root as well
                fusion.apply(finding.module)
    channels_last.apply(root)


def take_back(root: nn.Module, findings: list[Finding], laid_out: Collection[nn.Module]) -> None:
    """Undo what ``apply`` did for ``findings``, and nothing that was there before.

    Args:
        root: the model.
        findings: ``inspect(root)`` before ``apply``.
        laid_out: ``channels_last.laid_out(root)`` before ``apply``.
    """
    for fusion in reversed((*FUSIONS, *ASKED_FUSIONS.values())):
        for finding in findings:
            if finding.fusion is fusion and finding.status == "fusable" and fusion.is_applied(finding.module):
                fusion.undo(finding.module)
                _forget(finding.module)
    for module in root.modules():
        if module not in laid_out:
            channels_last.restore(module)


def apply_parts(findings: list[Finding], pipeline: Any) -> None:
    """Carry out the ``fusable`` ones of ``inspect_parts``."""
    for finding in findings:
        if finding.status == "fusable":
            finding.fusion.apply(finding.module)
        with contextlib.suppress(TypeError):  # not every class allows weak references
            _found_at[finding.module] = finding.path, weakref.ref(pipeline)


def put_back(findings: list[Finding], reason: str) -> None:
    """Undo these of one module, which are skipped for ``reason`` from then on, until ``undo``."""
    for finding in findings:
        finding.fusion.undo(finding.module)
        _put_back[finding.module] = reason


def undo_parts(parts: Iterable[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Every one of ``parts``, (path, part), as before ``apply_parts``.

    Returns what ``undo`` does.
    """
    left = []
    for path, part in parts:
        for rule in OBJECT_FUSIONS:
            rule.undo(part)
        if any(rule.is_over_applied(part) for rule in OBJECT_FUSIONS):
            left.append((path, part))
    return left


def _finding(
    path: str, module: Any, fusion: Fusion | ObjectFusion, reason_to_leave: str | None = None
) -> Finding:
    """``reason_to_leave``: why nothing in its model may be fused, or None."""
    if fusion.is_applied(module):
        return Finding(path, module, fusion, "fused")
    was_wrong = _put_back.get(module) if isinstance(module, nn.Module) else None
    reason = reason_to_leave or was_wrong or fusion.reason_to_skip(module)
    return Finding(path, module, fusion, "skipped" if reason else "fusable", reason or "")


def _adapted(path: str, module: nn.Module, fusion: ClassSwap) -> Iterator[Finding]:
    """The layers of ``module`` that ``fusion`` leaves as they are, because an adapter is around them."""
    for name in fusion.layers:
        layer: Any = module
        for part in name.split("."):
            layer = getattr(layer, part, None)
        reason = adapter_reason(layer)
        if reason is not None:
            yield Finding(f"{path}.{name}" if path else name, layer, fusion, "skipped", reason)


def undo(root: nn.Module, prefix: str = "") -> list[tuple[str, Any]]:
    """Everything below ``root`` as it was before ``apply``; nothing to do on a stock model.

    Returns (path, module) of what could not be undone: other code has put a class of its own over the
    fused one. Once that code has taken it away, ``undo`` finds the fused one.
    """
    for fusion in reversed((*FUSIONS, *ASKED_FUSIONS.values())):
        for module in root.modules():
            if fusion.is_applied(module):
                fusion.undo(module)
    for module in root.modules():
        restore_class(module)  # other code has moved it to where its fusion does not look
        channels_last.restore(module)
        _forget(module)
    return [(path, module) for path, module in root.named_modules(prefix=prefix) if is_over_fused(module)]


def _forget(module: nn.Module) -> None:
    """Drop what is kept for a module that was fused."""
    _put_back.pop(module, None)
    unpack(module)
    batch_norm.forget(module)
