"""Turns CUDA graphs on and off for models of the classes that ``models.py`` lists ("graphable" modules).

``set_mode`` does the same for any module. A module with graphs counts as graphable.

To turn graphs on, ``install`` puts an object that captures and replays calls, a ``GraphedForward``, under the
key "forward" into the module's ``__dict__``. There it replaces the ``forward`` of the class. The class itself
stays the same, because ``save_pretrained`` writes its name and pipelines look it up. In some autoencoders the
key is the name of another method (``method_of``), and in offloaded models it is ``_old_forward``
(``place_in``).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from sdfastgn.kernels.common.private import is_compiled
from sdfastgn.patches.code.checked import check_calls, stop_checking
from sdfastgn.patches.graphs.capture import Backend, backend_of
from sdfastgn.patches.graphs.forward import GraphedForward
from sdfastgn.patches.graphs.models import is_graphable, method_of, scratch_of
from sdfastgn.patches.layout.left_alone import reason_of_cudnn
from sdfastgn.patches.offload.moves import follow, unfollow
from sdfastgn.patches.swap.class_forward import MethodEntry, place_in

# The values of ``optimize``'s option ``cuda_graphs``. Only with "training" can calls with gradients become
# graphs.
INFERENCE_MODES = ("auto", True, False)
MODES = ("training", *INFERENCE_MODES)


@dataclass(frozen=True)
class Graphs:
    """What ``sdfastgn.report`` says about the CUDA graphs of one module.

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
    """Let the calls of modules in ``root`` become CUDA graphs, or no longer if ``mode`` is False.

    Every module of a class that ``models.py`` lists gets a ``GraphedForward`` in place of its ``forward``. If
    such modules are nested, only the outermost one gets it: the graphs of this one include the calls of the
    inner ones. A module whose forward other code has replaced gets none. If the installed version of cuDNN
    may compute the 3-D convolutions in ``root`` wrongly, no module gets one.
    """
    if mode is not False and reason_of_cudnn(root.modules()) is not None:
        mode = False
    found = [module for _, module in outermost(root)]
    for module in found:
        set_mode(module, mode, backend)
    check_calls(root, list(filter(_compares_calls, found)))


def set_mode(module: nn.Module, mode: str | bool, backend: Backend | None = None) -> None:
    """Let the calls of ``module``, of any class, become CUDA graphs, or no longer if ``mode`` is False."""
    modules = list(module.modules())
    if mode is not False and method_of(module) == "forward":
        stop_checking(modules)
    for inner in modules:
        # The inner module has graphs if ``optimize(inner)`` was called before. They are removed, because the
        # graphs of ``module`` include the calls of the inner module.
        if inner is not module and GraphedForward.of(inner):
            _take_off(inner)
    if mode is False:
        _take_off(module)
        return
    graphed, name = GraphedForward.of(module), method_of(module)
    place = place_in(module, name)
    if graphed is not None:
        graphed.set_mode(mode, backend)
    elif place is not None:
        planned = vars(module).get(place)
        if isinstance(planned, MethodEntry):
            planned.take_off()
        own = place in vars(module)
        GraphedForward(module, mode, backend, own, name, scratch_of(module)).put(place)
    else:
        return
    # ``follow`` replaces the method ``_apply`` of the module, so that the graphs learn when the module is
    # moved. In a model with convolutions, ``channels_last.py`` has replaced ``_apply`` already.
    follow(module)


def remove(root: nn.Module) -> None:
    """Undo ``install``: drop all graphs in ``root``, and let its modules run their own methods again."""
    modules = list(root.modules())
    for module in modules:
        if GraphedForward.all_of(module):
            _take_off(module)
    stop_checking(modules)


def wait_for_gpus(roots: Iterable[nn.Module]) -> None:
    """Wait until all streams are idle on all GPUs that have parameters of ``roots``."""
    for device in {parameter.device for root in roots for parameter in root.parameters()}:
        if device.type == "cuda":
            backend = backend_of(device)
            # Synchronizing would break a capture in another thread. A capture holds ``backend.lock``, so this
            # thread waits for the lock.
            with contextlib.nullcontext() if backend is None else backend.lock:
                torch.cuda.synchronize(device)


def inspect(root: nn.Module, prefix: str = "") -> Iterator[tuple[Graphs, GraphedForward | None]]:
    """Yields a pair for each module in ``root`` that can have CUDA graphs.

    The pair has a description of the module's graphs (``Graphs``), and the object that runs the module's
    calls (a ``GraphedForward``), or None if graphs are off. A module inside of another one that can have
    graphs is left out. In mode "training" each module has a second pair about its calls with gradients:
    (``Graphs``, None).
    """
    # ``reason_of_cudnn`` walks through the whole model, so it is called at most once.
    why_left = functools.cache(lambda: reason_of_cudnn(root.modules()))
    for path, module in outermost(root, prefix):
        graphed, kind = GraphedForward.of(module), type(module).__name__
        reasons = {"it is compiled by torch.compile": 0} if is_compiled(module) else {}
        if graphed is not None:
            yield _described(path, kind, str(graphed.mode), graphed, reasons), graphed
            if graphed.training is not None:
                where = f"{path or kind}, calls with gradients"
                yield _described(where, kind, str(graphed.mode), graphed.training, {}), None
        else:
            name = method_of(module)
            if place_in(module, name) is None:
                reasons[f"other code replaced its {name}"] = 0
            elif (reason := why_left()) is not None:
                reasons[reason] = 0
            yield Graphs(path, kind, "False", 0, 0, 0, 0, reasons), None


def _described(path: str, kind: str, mode: str, graphed: GraphedForward, reasons: dict[str, int]) -> Graphs:
    counts = graphed.captured, graphed.alive, graphed.replays, graphed.dropped
    return Graphs(path, kind, mode, *counts, {**reasons, **graphed.eager}, graphed.last_change)


def outermost(root: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yields (path, module) for each outermost module in ``root`` whose calls may become CUDA graphs."""
    seen = set()
    todo = [(path, root)]
    while todo:
        path, module = todo.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        if is_graphable(module) or GraphedForward.of(module) is not None:
            yield path, module
        else:
            children = (
                (f"{path}.{name}" if path else name, child) for name, child in module.named_children()
            )
            todo += reversed(list(children))


def _compares_calls(module: nn.Module) -> bool:
    """True if a ``GraphedForward`` runs all calls of ``module``.

    Such a ``GraphedForward`` also finds out whether other code has replaced functions that the calls run.
    """
    return GraphedForward.of(module) is not None and method_of(module) == "forward"


def _take_off(module: nn.Module) -> None:
    for graphed in GraphedForward.all_of(module):
        graphed.take_off()
        graphed.clear()
    unfollow(module)
