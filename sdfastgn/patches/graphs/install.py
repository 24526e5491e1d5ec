"""Turns CUDA graphs on and off for models of the classes that ``models.py`` lists ("graphable" modules).

``set_mode`` does the same for any module. A module with graphs counts as graphable.

To turn graphs on, ``install`` puts a ``GraphedForward`` under the key "forward" into the module's
``__dict__``. There it replaces the ``forward`` of the class. The class itself stays the same, because
``save_pretrained`` writes its name and pipelines look it up. In some autoencoders the key is the name of
another method (``method_of``), and in offloaded models it is ``_old_forward`` (``place_in``).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from sdfastgn.kernels.common.private import is_compiled
from sdfastgn.patches.code.checked import check_calls, stop_checking
from sdfastgn.patches.graphs.capture import Backend, backend_of
from sdfastgn.patches.graphs.forward import GraphedForward, all_living
from sdfastgn.patches.graphs.models import METHODS, is_graphable, method_of, scratch_of
from sdfastgn.patches.layout.left_alone import reason_of_cudnn
from sdfastgn.patches.offload.moves import follow, unfollow
from sdfastgn.patches.swap.class_forward import (
    class_forward,
    has_foreign_forward,
    is_offloaded_whole,
    replace_kept,
)
from sdfastgn.patches.swap.instance_entries import InstanceEntry, guard, unguard

# The values of ``optimize``'s option ``cuda_graphs``. Only with "training" can calls with gradients become
# graphs.
INFERENCE_MODES = ("auto", True, False)
MODES = ("training", *INFERENCE_MODES)
# Keys in the ``__dict__`` of a module under which a ``GraphedForward`` may be. accelerate's hooks move the
# entry "forward" to "_old_forward".
_PLACES = (*METHODS, "_old_forward")


@dataclass(frozen=True)
class Graphs:
    """What the report says about the graphs of one module.

    Attributes:
        path: the module's dotted path, and ", calls with gradients" if this is about such calls.
        kind: the name of the module's class.
        mode: "auto", "training", "True" or "False", as in ``optimize``.
        captured: number of captures so far.
        alive: number of graphs that exist now.
        replays: number of calls whose result came from a graph.
        dropped: number of graphs dropped so far.
        eager: reason -> number of calls that ran without a graph for this reason; 0 if ``inspect`` has found
            the reason without a call.
        last_change: the last change of the model that made its graphs invalid; empty if there was none.
    """

    path: str
    kind: str
    mode: str
    captured: int
    alive: int
    replays: int
    dropped: int
    eager: dict[str, int]
    last_change: str = ""


def install(root: nn.Module, mode: str | bool, backend: Backend | None = None) -> None:
    """Give every graphable module in ``root`` a ``GraphedForward``, or remove it if ``mode`` is False.

    If a graphable module contains others, only the outermost one gets a ``GraphedForward``: its graphs
    include the calls of the inner ones. A module whose forward other code has replaced gets none, and neither
    does a model that ``optimize`` leaves as it is.
    """
    if mode is not False and reason_of_cudnn(root.modules()) is not None:
        mode = False
    found = [module for _, module in outermost(root)]
    for module in found:
        set_mode(module, mode, backend)
    check_calls(root, list(filter(_compares_calls, found)))


def set_mode(module: nn.Module, mode: str | bool, backend: Backend | None = None) -> None:
    """Give ``module`` a ``GraphedForward``, whatever its class is, or remove it if ``mode`` is False."""
    modules = list(module.modules())
    if mode is not False and method_of(module) == "forward":
        stop_checking(modules)
    for inner in modules:
        if inner is not module and graphed_of(inner) is not None:  # ``optimize(inner)`` was called before
            _take_off(inner)
    graphed = graphed_of(module)
    if mode is False or (graphed is not None and (graphed.mode, backend) != (mode, None)):
        _take_off(module)
        graphed = None
    place = place_in(module)
    if mode is not False and graphed is None and place is not None:
        own, name = place in vars(module), method_of(module)
        vars(module)[place] = GraphedForward(module, mode, backend, own, name, scratch_of(module))
        guard(module)
    # A model with convolutions has an entry that does more (``channels_last.py``).
    if graphed_of(module) is not None:
        follow(module)


def remove(root: nn.Module) -> None:
    """Undo ``install``: remove each ``GraphedForward`` and ``Checked`` in ``root``, and drop its graphs."""
    for _, module in list(outermost(root)):
        set_mode(module, False)
    stop_checking(root.modules())


def sharing(roots: Iterable[nn.Module]) -> list[nn.Module]:
    """The models with a ``GraphedForward`` that contain a module of ``roots``."""
    owners = [owner for graphed in all_living() if (owner := graphed._module()) is not None]
    modules = {module for root in roots for module in root.modules()} if owners else set()
    return [owner for owner in owners if not modules.isdisjoint(owner.modules())]


def wait_for_gpus(roots: Iterable[nn.Module]) -> None:
    """Wait until all streams are idle on all GPUs that have parameters of ``roots``."""
    for device in {parameter.device for root in roots for parameter in root.parameters()}:
        if device.type == "cuda":
            backend = backend_of(device)
            # Synchronizing would break a capture in another thread. A capture holds ``backend.lock``.
            with contextlib.nullcontext() if backend is None else backend.lock:
                torch.cuda.synchronize(device)


def inspect(root: nn.Module, prefix: str = "") -> Iterator[tuple[Graphs, GraphedForward | None]]:
    """Yields (``Graphs``, the ``GraphedForward`` or None) for each graphable module in ``root``.

    A graphable module that another one contains is left out. In mode "training" each module has a second pair
    about its calls with gradients: (``Graphs``, None).
    """
    # ``reason_of_cudnn`` walks through the whole model, so it is called at most once.
    why_left = functools.cache(lambda: reason_of_cudnn(root.modules()))
    for path, module in outermost(root, prefix):
        graphed, kind = graphed_of(module), type(module).__name__
        reasons = {"it is compiled by torch.compile": 0} if is_compiled(module) else {}
        if graphed is not None:
            yield _described(path, kind, str(graphed.mode), graphed, reasons), graphed
            if graphed.training is not None:
                where = f"{path or kind}, calls with gradients"
                yield _described(where, kind, str(graphed.mode), graphed.training, {}), None
        else:
            if place_in(module) is None and not isinstance(vars(module).get("forward"), InstanceEntry):
                reasons[f"other code replaced its {method_of(module)}"] = 0
            elif (reason := why_left()) is not None:
                reasons[reason] = 0
            yield Graphs(path, kind, "False", 0, 0, 0, 0, reasons), None


def _described(path: str, kind: str, mode: str, graphed: GraphedForward, reasons: dict[str, int]) -> Graphs:
    counts = graphed.captured, graphed.alive, graphed.replays, graphed.dropped
    return Graphs(path, kind, mode, *counts, {**reasons, **graphed.eager}, graphed.last_change)


def outermost(root: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yields (path, module) for each graphable module in ``root`` that no other graphable module contains."""
    seen = set()
    todo = [(path, root)]
    while todo:
        path, module = todo.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        if is_graphable(module) or graphed_of(module) is not None:
            yield path, module
        else:
            children = (
                (f"{path}.{name}" if path else name, child) for name, child in module.named_children()
            )
            todo += reversed(list(children))


def place_in(module: nn.Module) -> str | None:
    """The key in the module's ``__dict__`` for what runs its calls; None if other code replaced the method.

    If the whole model is offloaded, accelerate's hook replaces ``forward``, and calls the entry
    ``_old_forward`` after it has moved the weights.
    """
    name = method_of(module)
    if isinstance(vars(module).get(name), InstanceEntry):
        return None
    if not has_foreign_forward(module, name):
        return name
    kept = vars(module).get("_old_forward")
    if name == "forward" and is_offloaded_whole(module) and kept == class_forward(module):
        return "_old_forward"
    return None


def _compares_calls(module: nn.Module) -> bool:
    """True if a ``GraphedForward`` runs all calls of ``module``, so that it compares their code."""
    return graphed_of(module) is not None and method_of(module) == "forward"


def graphed_of(module: nn.Module) -> GraphedForward | None:
    for name in _PLACES:
        value = vars(module).get(name)
        if isinstance(value, GraphedForward):
            return value
    return None


def _take_off(module: Any) -> None:
    name = method_of(module)
    forward = vars(module).get(name)
    if isinstance(forward, GraphedForward) and not forward.replaces_entry:
        delattr(module, name)
    for graphed in GraphedForward.of(module):
        graphed.mode = False  # other code may still call ``graphed``; now it only calls the class's forward
        graphed.clear()
        # A hook of another library may have stored ``graphed`` in order to restore it as the module's forward
        # later. It shall restore the class's forward instead.
        replace_kept(module, graphed, class_forward(module, name))
    unfollow(module)
    unguard(module)
