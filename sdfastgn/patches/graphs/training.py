"""Captures a call with gradients as two CUDA graphs: one of its forward, and one of its backward.

The tensors that the forward saves for the backward are in memory of the graphs, and the next replay of the
forward overwrites them. So after a replay, other calls that need the same graph run eagerly, until the
backward of the replayed call has run or until the result of the replayed call is freed.

The replay of the backward overwrites the saved tensors too: the backward writes its own results over those
that it has already read. So a backward that runs again (``retain_graph=True``) first replays the forward.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from operator import attrgetter
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from sdfastgn.kernels.common.failures import one_line
from sdfastgn.kernels.common.private import copy_each, version_of
from sdfastgn.patches.graphs.arguments import Call, Unsupported, mapped, tensors_in
from sdfastgn.patches.graphs.capture import Backend
from sdfastgn.patches.graphs.watch import Watch
from sdfastgn.patches.lora.adapter_survey import AdapterSurvey

_requires_grad_of = attrgetter("requires_grad")


class Flags(AdapterSurvey):
    """Records which parameters of the model ``root`` require gradients, and notices when this changes.

    Graphs with gradients are invalid after such a change, and if a module has backward hooks.

    Graphs without gradients have an ``AdapterSurvey`` instead, which keeps merged weights of adapters up to
    date. With gradients no weights are merged, so this subclass does nothing for adapters.
    """

    def __init__(self, root: nn.Module) -> None:
        self.layers = []
        self.takes_scale = False
        self._records = []
        self._contents = None
        modules = list(root.modules())
        self._parameters = [p for m in modules for p in m._parameters.values() if p is not None]
        self._flags = list(map(_requires_grad_of, self._parameters))
        self._hooks: list[Any] = [h for m in modules for h in (m._backward_hooks, m._backward_pre_hooks)]
        self.reason = ""

    def has_same_tensors(self) -> bool:
        return list(map(_requires_grad_of, self._parameters)) == self._flags and not any(self._hooks)

    def refresh(self, factor: float = 1.0, compares_later: bool = False) -> bool:
        if any(self._hooks):
            self.reason = "a module has backward hooks"
        elif not self.has_same_tensors():
            self.reason = "other parameters require gradients"
        else:
            return True
        return False


class _Turn:
    """One call whose forward was replayed. ``is_done``: True once the backward of this call has begun."""

    __slots__ = ("__weakref__", "is_done")

    def __init__(self) -> None:
        self.is_done = False


class TrainingGraph:
    """One captured call with gradients: its inputs, and the kernels of its forward and of its backward.

    Args:
        module: the module whose call is captured.
        buffers: memory for the tensors of the call. A buffer requires gradients if its tensor does.
        run: the forward, with ``buffers`` as its arguments.
        backend: captures and replays.
        watch: the state of ``module`` at the capture.

    Raises Unsupported if no output depends on a tensor that requires gradients, or if gradient checkpointing
    cannot be captured.
    """

    gradients: ClassVar[Any] = torch.enable_grad
    # Numbers in attributes, such as the scale of an IP-Adapter, are constants of graphs with gradients. If
    # they were inputs, a call would write new values into memory before it finds out that the backward of the
    # last replay has not run yet. This backward would then read the new values.
    has_factors: ClassVar[bool] = False
    left: list[int]
    kept: Any

    def __init__(
        self, module: nn.Module, buffers: list[Tensor], run: Callable[[], Any], backend: Backend, watch: Watch
    ) -> None:
        self.buffers = buffers
        self._backend = backend
        self._watch = watch
        self._parameters = list(module.parameters())
        self._trained = _trained(module)
        self._places = [place for place, buffer in enumerate(buffers) if buffer.requires_grad]
        # The two graphs of a call have a memory pool of their own. In a shared pool, other graphs could
        # overwrite what the forward has saved for the backward.
        pool = backend.new_pool()
        with _aliased(module, self._trained) as trained, _checkpointed(module):
            self._forward = backend.capture(run, pool)
            outputs = tensors_in(self._forward.output)
            self._is_differentiable = list(map(_requires_grad_of, outputs))
            ends = [tensor for tensor in outputs if tensor.requires_grad]
            if not ends:
                raise Unsupported("no output requires a gradient")
            with torch.no_grad(), backend.allocating():
                self._received = list(map(torch.zeros_like, ends))
            wanted = [*trained, *(buffers[place] for place in self._places)]
            self._dependents = _dependents(ends, wanted)
            self._backward = backend.capture(lambda: _gradients(ends, wanted, self._received), pool)
        # Detaches the output from autograd's nodes. A tensor that occurs twice in the output stays one
        # tensor.
        plain = {id(tensor): tensor.detach() for tensor in outputs}
        self._forward.output = mapped(self._forward.output, lambda tensor: plain[id(tensor)])
        self._outputs = list(plain.values())
        # The call whose forward was replayed last. The reference is weak: autograd keeps the call alive as
        # long as its backward may run.
        self._turn: weakref.ref[_Turn] | None = None

    @staticmethod
    def warm_up(module: nn.Module, buffers: list[Tensor], run: Callable[[], Any]) -> None:
        """Run the forward and the backward, so that kernels are compiled and cuDNN has chosen algorithms.

        Raises Unsupported if one of them fails.
        """
        try:
            with _aliased(module, _trained(module)) as trained, _checkpointed(module):
                ends = [tensor for tensor in tensors_in(run()) if tensor.requires_grad]
                wanted = [*trained, *(buffer for buffer in buffers if buffer.requires_grad)]
                if ends:
                    _gradients(ends, wanted, list(map(torch.zeros_like, ends)))
        except (Unsupported, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise Unsupported(f"its forward or backward failed: {one_line(error)}") from error

    def run(self, call: Call, backend: Backend) -> Any:
        """Replay the forward with the arguments of ``call``, and return a copy of its output.

        When autograd gets a gradient of the copy, it replays the captured backward. The caller must hold the
        lock of ``backend``. Raises Unsupported if the backward of the last replay may still run.
        """
        last = None if self._turn is None else self._turn()
        if last is not None and not last.is_done:
            raise Unsupported("the backward of an earlier call has not run")
        arguments: list[Any] = [call.tensors[place] for place in self._places]
        copies = _Replayed.apply(self, call, *self._trained, *arguments)
        copy_of = {id(tensor): copy for tensor, copy in zip(self._outputs, copies, strict=True)}
        return mapped(self._forward.output, lambda tensor: copy_of[id(tensor)])

    def replay_forward(self, call: Call, turn: _Turn) -> list[Tensor]:
        with self._backend.ordered():
            self._turn = weakref.ref(turn)
            call.fill(self.buffers)
            self._forward.replay()
            return [tensor.clone() for tensor in self._outputs]

    def replay_backward(
        self, turn: _Turn, versions: list[int], received: tuple[Tensor | None, ...]
    ) -> list[Tensor | None]:
        """Returns the gradients of the trained parameters, and of the arguments that require gradients.

        May be called several times for one ``turn``.

        Args:
            turn: the replay of the forward to which this backward belongs.
            versions: the versions of all parameters after this replay: how often each was written in place.
            received: the gradient of each output; None for zeros.

        Raises RuntimeError if the forward was replayed again after ``turn``, or if a parameter was written in
        place or got other memory after ``turn``.
        """
        with self._backend.lock, self._backend.ordered():
            if self._turn is None or self._turn() is not turn:
                raise RuntimeError(
                    "sdfastgn: this backward was run before, and the model was called since then; with "
                    'optimize(model, cuda_graphs="auto") it could run again'
                )
            if versions != self.versions() or not self._watch.is_in_place():
                raise RuntimeError(
                    "sdfastgn: a parameter needed for gradient computation has been modified by an inplace "
                    "operation or moved between the call and its backward"
                )
            kept = [grad for grad, is_kept in zip(received, self._is_differentiable, strict=True) if is_kept]
            for place, grad in zip(self._received, kept, strict=True):
                place.zero_() if grad is None else place.copy_(grad)
            if turn.is_done:  # an earlier backward of this call has overwritten what the forward had saved
                self._forward.replay()
            turn.is_done = True
            self._backward.replay()
            # A parameter gets None as its gradient, as from autograd, if no output that has received a
            # gradient depends on the parameter. The graph has computed zeros for such a parameter.
            left_out = {place for place, grad in enumerate(kept) if grad is None}
            grads = self._backward.output
            if left_out:
                pairs = zip(grads, self._dependents, strict=True)
                grads = [None if left_out.issuperset(places) else grad for grad, places in pairs]
            made = [grad for grad in grads if grad is not None]
            copies = list(map(torch.empty_like, made))
            copy_each(copies, made)
        of_each = iter(copies)
        return [None if grad is None else next(of_each) for grad in grads]

    def versions(self) -> list[int]:
        return list(map(version_of, self._parameters))

    def not_differentiable(self, outputs: list[Tensor]) -> list[Tensor]:
        return [t for t, is_kept in zip(outputs, self._is_differentiable, strict=True) if not is_kept]


class _Replayed(torch.autograd.Function):
    """Makes the replay of a ``TrainingGraph`` an operation of autograd.

    The inputs of this operation are the tensors that get gradients: parameters and arguments.
    """

    @staticmethod
    def forward(ctx: Any, graph: TrainingGraph, call: Call, *wanted: Tensor) -> tuple[Tensor, ...]:
        ctx.graph, ctx.turn = graph, _Turn()
        outputs = graph.replay_forward(call, ctx.turn)
        ctx.versions = graph.versions()
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*graph.not_differentiable(outputs))
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *received: Tensor | None) -> tuple[Tensor | None, ...]:
        return (None, None, *ctx.graph.replay_backward(ctx.turn, ctx.versions, received))


@contextmanager
def _aliased(module: nn.Module, parameters: list[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """A context in which new parameters with the same memory replace ``parameters`` in ``module``.

    Yields the new parameters. They are needed because autograd has one node for each parameter, which
    accumulates its gradient. The node remembers the stream on which it was made, and a result of an earlier
    call keeps it alive. If a gradient reached the old node in a capture, autograd would synchronize with the
    earlier stream, and the capture would fail. New parameters have new nodes.
    """
    alias_of = {id(parameter): nn.Parameter(parameter.detach()) for parameter in parameters}
    entries = [
        (each._parameters, name, parameter)
        for each in module.modules()
        for name, parameter in each._parameters.items()
        if id(parameter) in alias_of
    ]
    try:
        for owner, name, parameter in entries:
            owner[name] = alias_of[id(parameter)]
        yield list(alias_of.values())
    finally:
        for owner, name, parameter in entries:
            owner[name] = parameter


def _trained(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


@contextmanager
def _checkpointed(module: nn.Module) -> Iterator[None]:
    """A context in which gradient checkpointing in ``module`` leaves the random generators alone.

    Checkpointing reads and sets their states, so that a block that runs again in the backward draws the same
    numbers. A capture cannot do this, and need not: models that draw random numbers are not captured.
    Raises Unsupported if ``module`` uses other functions for checkpointing than diffusers' or PyTorch's own.
    """
    before = [
        (vars(each), vars(each)["_gradient_checkpointing_func"])
        for each in module.modules()
        if vars(each).get("gradient_checkpointing")
    ]
    try:
        for attributes, function in before:
            attributes["_gradient_checkpointing_func"] = partial(_run_checkpointed, _is_reentrant(function))
        yield
    finally:
        for attributes, function in before:
            attributes["_gradient_checkpointing_func"] = function


def _is_reentrant(function: Any) -> bool:
    """True if ``function`` uses PyTorch's reentrant checkpointing, False if it uses the non-reentrant one."""
    if getattr(function, "__module__", None) == "diffusers.models.modeling_utils":
        return False
    if isinstance(function, partial) and function.func is checkpoint and not function.args:
        options = {**function.keywords}
        is_reentrant = options.pop("use_reentrant", None)
        if is_reentrant is not None and not options:
            return is_reentrant
    raise Unsupported("the function for its gradient checkpointing is unknown")


def _run_checkpointed(is_reentrant: bool, block: Callable[..., Any], *args: Any) -> Any:
    """Run ``block`` and save ``args`` only. The backward runs ``block`` again.

    Reentrant checkpointing runs a whole backward inside of the backward, which ``torch.autograd.grad``
    refuses. So this function always uses non-reentrant checkpointing. Both give the same gradients, with one
    exception: reentrant checkpointing gives none if no argument requires a gradient. This function then does
    the same.
    """
    if is_reentrant and not any(isinstance(arg, Tensor) and arg.requires_grad for arg in args):
        with torch.no_grad():
            return block(*args)
    return checkpoint(block, *args, use_reentrant=False, preserve_rng_state=False)


def _dependents(ends: list[Tensor], wanted: list[Tensor]) -> list[set[int]]:
    """For each tensor of ``wanted``, the indices of the outputs in ``ends`` that were computed from it.

    ``wanted``: the parameters and arguments that get gradients.
    """
    found: dict[int, set[int]] = {id(tensor): set() for tensor in wanted}
    for place, end in enumerate(ends):
        seen: set[Any] = set()
        todo: list[Any] = [torch.autograd.graph.get_gradient_edge(end).node]
        while todo:
            node = todo.pop()
            if node is not None and node not in seen:
                seen.add(node)
                todo += [other for other, _ in node.next_functions]
                leaf = id(getattr(node, "variable", None))
                if leaf in found:
                    found[leaf].add(place)
    return [found[id(tensor)] for tensor in wanted]


def _gradients(ends: list[Tensor], wanted: list[Tensor], received: list[Tensor]) -> tuple[Tensor | None, ...]:
    """The gradients of ``wanted``. ``received``: the gradients of the outputs ``ends``.

    PyTorch runs all backwards of a GPU in one thread of its own. Here this backward runs in the caller's
    thread, because PyTorch's thread may be waiting for the lock that the caller holds.
    """
    with torch.autograd.set_multithreading_enabled(False):
        return torch.autograd.grad(ends, wanted, received, allow_unused=True)
