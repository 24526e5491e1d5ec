"""UNets, ControlNets and the halves of autoencoders as CUDA graphs, which replay a call's kernels without the CPU's part of it.

A ``GraphedForward`` in the instance's ``__dict__`` stands before the class's ``forward``. A call is replayed only if a graph was captured
for the same arguments (``graph_call``) and nothing has changed in the model since (``graph_state``). Everything else runs as before, and the
reason is kept for the report. It has to be the instance's ``forward``: a subclass would change the class name that ``save_pretrained`` writes.
"""

from __future__ import annotations

import types
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as nn_module

from sfastgn.kernels.dispatch import is_transformed
from sfastgn.patches import channels_last
from sfastgn.patches.graph_backend import Backend, Handle, backend_of
from sfastgn.patches.graph_call import Call, Unsupported, clone_of, global_state, static_copy
from sfastgn.patches.graph_state import Watch

__all__ = ["MODES", "GraphedForward", "Graphs", "inspect", "install", "is_graphable", "remove"]

MODES = ("auto", True, False)
MAX_GRAPHS = 8
_MAX_REMEMBERED = 64
_MAX_PAUSE = 32

# Exact classes by full name (so that diffusers is not imported for a model without it) -> numbers that their forwards make tensors of.
_TIMESTEP = {"timestep": 1}
_GRAPHABLE: dict[str, dict[str, int]] = {
    "diffusers.models.unets.unet_2d.UNet2DModel": _TIMESTEP,
    "diffusers.models.unets.unet_2d_condition.UNet2DConditionModel": _TIMESTEP,
    "diffusers.models.controlnets.controlnet.ControlNetModel": _TIMESTEP,
    "diffusers.models.autoencoders.vae.Encoder": {},
    "diffusers.models.autoencoders.vae.Decoder": {},
}


class _Graph:
    """One captured call: memory for what goes in, what comes out, and the way to run it."""

    def __init__(self, buffers: list[torch.Tensor], handle: Handle) -> None:
        self.buffers, self.handle, self.output = buffers, handle, static_copy(handle.output)

    def run(self, call: Call, backend: Backend) -> Any:
        with backend.ordered():
            call.fill(self.buffers)
            self.handle.replay()
            return clone_of(self.output)


@dataclass(frozen=True)
class Graphs:
    """What has become of one module's calls. ``eager``: reason -> calls that ran without a graph for it."""

    path: str
    kind: str
    mode: str
    captured: int
    alive: int
    replays: int
    dropped: int
    eager: dict[str, int]


# To find those that other code has wrapped: a forward put over ours keeps calling it.
_living: weakref.WeakSet[GraphedForward] = weakref.WeakSet()


class GraphedForward:
    """Stands for the ``forward`` of one instance. Copies and pickles begin without graphs.

    Args:
        module: the instance; referred to weakly, because it owns this object.
        mode: ``"auto"`` captures at the second call of a kind, True at the first.
        backend: what captures, for tests; else that of the device of the arguments.
    """

    # No __dict__: functools.update_wrapper (accelerate's hooks use it) would copy it into the wrapper.
    __slots__ = (
        "__weakref__", "_backend", "_graphs", "_module", "_patience", "_pause", "_refused", "_replays_of_watch", "_seen", "_used_backend",
        "_watch", "captured", "dropped", "eager", "mode", "replays",
    )  # fmt: skip

    def __init__(self, module: nn.Module, mode: str | bool = "auto", backend: Backend | None = None) -> None:
        self._module = weakref.ref(module)
        self.mode = mode
        self._backend = backend
        self._used_backend: Backend | None = None
        self._watch: Watch | None = None
        self._graphs: OrderedDict[Any, _Graph] = OrderedDict()
        self._seen: OrderedDict[Any, None] = OrderedDict()
        self._refused: OrderedDict[Any, str] = OrderedDict()
        self._pause = self._patience = self._replays_of_watch = 0
        self.captured = self.replays = self.dropped = 0
        self.eager: Counter[str] = Counter()
        _living.add(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return GraphedForward, (self.module, self.mode)

    def __deepcopy__(self, memo: dict[int, Any]) -> GraphedForward:
        return GraphedForward(memo.get(id(self.module), self.module), self.mode, self._backend)

    @property
    def module(self) -> nn.Module:
        """The instance. Raises ReferenceError when it is gone."""
        module = self._module()
        if module is None:
            raise ReferenceError("sfastgn: the module of this forward is gone")
        return module

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The class's ``forward``; ``inspect.signature`` looks here."""
        return types.MethodType(type(self.module).forward, self.module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self.__wrapped__(*args, **kwargs)
        module = self.module
        try:
            reason = "they are turned off" if self.mode is False else _reason_now(module)
            if reason is None:
                call = Call(args, kwargs, _scalars_of(module) or {})
                backend = self._backend or backend_of(call.device)  # type: ignore[arg-type]
                if backend is None:
                    reason = f"there are no graphs on {call.device}"
                elif backend.is_busy():
                    reason = "the call is being captured by other code"
                else:
                    with backend.lock:
                        graph = self._graph_for(module, call, backend)
                        self.replays += 1
                        self._replays_of_watch += 1
                        return graph.run(call, backend)
        except Unsupported as error:
            reason = str(error)
        self._count(reason or "")
        return type(module).forward(module, *args, **kwargs)

    def clear(self) -> None:
        """Drop all graphs and what is known of the module."""
        if self._graphs and self._used_backend is not None:
            self._used_backend.wait()
        self.dropped += len(self._graphs)
        for memory in (self._graphs, self._seen, self._refused):
            memory.clear()
        self._watch = None

    def pool_bytes(self) -> dict[int, int]:
        """Memory of the backend that holds this module's graphs, by the backend's id: several modules share one."""
        backend = self._used_backend
        return {id(backend): backend.memory()} if backend is not None and self._graphs else {}

    def _count(self, reason: str) -> None:
        self.eager[reason if reason in self.eager or len(self.eager) < _MAX_REMEMBERED else "other reasons"] += 1

    def _graph_for(self, module: nn.Module, call: Call, backend: Backend) -> _Graph:
        """The graph for ``call``, captured now if it is time. Raises Unsupported with the reason for a call without one."""
        if backend is not self._used_backend:
            self.clear()
            self._used_backend = backend
        self._check_state(module)
        key = (call.key, global_state(call.device))  # type: ignore[arg-type]
        graph = self._graphs.get(key)
        if graph is not None:
            self._graphs.move_to_end(key)
            return graph
        if key in self._refused:
            raise Unsupported(self._refused[key])
        if self.mode != True and key not in self._seen:  # noqa: E712  # the mode may be "auto"
            _remember(self._seen, key, None)
            raise Unsupported("first call of its kind")
        while len(self._graphs) >= MAX_GRAPHS:
            backend.wait()
            self._graphs.popitem(last=False)
            self.dropped += 1
        try:
            graph = self._capture(module, call, backend)
        except Unsupported as error:
            _remember(self._refused, key, str(error))
            raise
        self._graphs[key] = graph
        self.captured += 1
        return graph

    def _check_state(self, module: nn.Module) -> None:
        if self._watch is not None and not self._watch.unchanged(module):
            # A model that changes at every call is not looked at for a while: looking costs more than a check.
            self._patience = 0 if self._replays_of_watch else min(2 * self._patience or 1, _MAX_PAUSE)
            self._pause = self._patience
            self.clear()
        if self._pause:
            self._pause -= 1
            raise Unsupported("the model changes too often")
        if self._watch is None:
            self._watch = Watch(module, _HARMLESS)
            self._replays_of_watch = 0
        if self._watch.reason is not None:
            raise Unsupported(self._watch.reason)

    def _capture(self, module: nn.Module, call: Call, backend: Backend) -> _Graph:
        watch, inputs = self._watch, []

        def run() -> Any:
            args, kwargs = call.rebuild(buffers)
            before = _shape_of(args, kwargs)
            with _no_autocast_cache():
                output = type(module).forward(module, *args, **kwargs)
            if _shape_of(args, kwargs) != before:
                raise Unsupported("its forward changes the lists or dicts that it is given")
            return output

        try:
            with backend.ordered(), backend.allocating():
                buffers = call.buffers()
                call.fill(buffers)
            inputs = [b._version for b in buffers] if not torch.is_inference_mode_enabled() else []
        except RuntimeError as error:
            raise Unsupported(f"its arguments cannot be copied: {_first_line(error)}") from error
        with backend.ordered():
            backend.warm_up(run)
        if watch is None or not watch.unchanged(module):
            raise Unsupported("its forward changes the model")
        if inputs and inputs != [b._version for b in buffers]:
            raise Unsupported("its forward writes into its arguments")
        try:
            with backend.ordered():
                graph = _Graph(buffers, backend.capture(run))
        except Unsupported:
            raise
        except Exception as error:
            raise Unsupported(f"capture failed: {type(error).__name__}: {_first_line(error)}") from error
        if not watch.unchanged(module):
            raise Unsupported("its forward changes the model")
        return graph


# What these hooks do is device work, or a hand-off between modules that a replay has no need of.
_HARMLESS: frozenset[Callable[..., Any]] = frozenset((channels_last.enter, channels_last.leave))


def _reason_now(module: nn.Module) -> str | None:
    """Why no call of ``module`` can be replayed in this thread at this moment, whatever its arguments."""
    if torch.is_grad_enabled():
        return "gradients are enabled"
    if module.training:
        return "it is in training mode"
    if torch._C._get_tracing_state() is not None or is_transformed():
        return "the call is traced or transformed"
    if torch._C._len_torch_dispatch_stack() or torch._C._is_torch_function_mode_enabled():
        return "a dispatch or function mode is active"
    if nn_module._has_any_global_hook():
        return "there are global module hooks"
    return None


def _remember(memory: OrderedDict[Any, Any], key: Any, value: Any) -> None:
    memory[key] = value
    if len(memory) > _MAX_REMEMBERED:
        memory.popitem(last=False)


def _shape_of(*values: Any) -> Any:
    """The structure of nested containers, tensors by identity."""
    return [
        _shape_of(*(v.items() if isinstance(v, dict) else v)) if isinstance(v, (list, tuple, dict)) else id(v)
        for v in values
    ]


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0][:200]


@contextmanager
def _no_autocast_cache() -> Iterator[None]:
    """Within a graph autocast casts every weight anew: its cache is emptied with the context, and a replay would read freed memory."""
    enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(enabled)


def _scalars_of(module: nn.Module) -> dict[str, int] | None:
    kind = type(module)
    return _GRAPHABLE.get(f"{kind.__module__}.{kind.__qualname__}")


def is_graphable(module: nn.Module) -> bool:
    """True if ``module`` is of a class whose calls are captured."""
    return _scalars_of(module) is not None


def install(root: nn.Module, mode: str | bool, backend: Backend | None = None) -> None:
    """Give every graphable module below ``root`` a ``GraphedForward``, or take it away where ``mode`` is False."""
    for module in list(root.modules()):
        graphed = _graphed(module)
        if is_graphable(module) and (
            mode is False or (graphed is not None and (graphed.mode, backend) != (mode, None))
        ):
            _take_off(module)
            graphed = None
        if mode is not False and graphed is None and is_graphable(module) and "forward" not in vars(module):
            module.forward = GraphedForward(module, mode, backend)  # type: ignore[assignment]


def remove(root: nn.Module) -> None:
    """Undo ``install``."""
    install(root, False)


def inspect(root: nn.Module, prefix: str = "") -> Iterator[tuple[Graphs, GraphedForward | None]]:
    """The state of every graphable module below ``root``. Changes nothing."""
    for path, module in root.named_modules(prefix=prefix):
        graphed = _graphed(module)
        if graphed is not None:
            yield (
                Graphs(path, type(module).__name__, str(graphed.mode), graphed.captured, len(graphed._graphs), graphed.replays,
                       graphed.dropped, dict(graphed.eager)),
                graphed,
            )  # fmt: skip
        elif is_graphable(module):
            reason = {"other code replaced its forward": 0} if "forward" in vars(module) else {}
            yield Graphs(path, type(module).__name__, "False", 0, 0, 0, 0, reason), None


def _graphed(module: nn.Module) -> GraphedForward | None:
    # accelerate's hooks take what they find as forward for _old_forward, and call or put back that.
    for name in ("forward", "_old_forward"):
        value = vars(module).get(name)
        if isinstance(value, GraphedForward):
            return value
    return None


def _take_off(module: Any) -> None:
    for graphed in list(_living):
        if graphed._module() is module:
            graphed.mode = False
            graphed.clear()
    if isinstance(vars(module).get("forward"), GraphedForward):
        del module.forward
    if isinstance(vars(module).get("_old_forward"), GraphedForward):
        module._old_forward = types.MethodType(type(module).forward, module)
