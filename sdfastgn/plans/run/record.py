"""Records what a plan executes: allocations, ops of aten and kernel launches.

A plan is the rewritten graph of a traced call. Its nodes call *steps*: functions that call kernels or ops.
``record`` runs the graph once, node by node, under one ``TorchDispatchMode``, which sees all ops. Launches of
Triton kernels do not go through PyTorch's dispatcher, so an observer in the launching code sees them. The
result is a flat list of actions.

In the list, a ``Place`` describes a tensor by its memory, shape, strides, offset and dtype. So a view needs
no action: it is another place in the same memory.

Some steps cannot be recorded as single actions. For example, a step may read the value of an element, or a
tensor in memory that no operand has and no action has allocated. Such a step becomes one action, which calls
the whole step. The step does not run a second time for that.
"""

from __future__ import annotations

import collections
import contextlib
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.fx import Node
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from sdfastgn.kernels.common import observers, private
from sdfastgn.plans.run.aliases import writes_over
from sdfastgn.plans.trace.refusals import DRAWN
from sdfastgn.plans.trace.writes import written

aten = torch.ops.aten
_PLAIN = (Tensor, nn.Parameter)
# Ops that consist of other ops, but are recorded as one action. Some ops inside of attention read values of
# tensors, which cannot be recorded.
_WHOLE = (aten.linear.default, aten.scaled_dot_product_attention.default)
_ALLOCATIONS = (
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.empty_strided.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
)
# An op that gives an existing tensor other memory, and the names of all ops that do so, without overloads.
_SWAP = aten.set_.source_Storage_storage_offset
_SWAPS = ("aten::resize_", "aten::resize_as_", "aten::set_")
_INDICES = (torch.int64, torch.int32)
_READS_VALUES = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


class Unrecordable(Exception):  # noqa: N818  # callers catch it, and run the graph node by node
    """Raised if a graph or a call cannot be recorded. The message is the reason."""


class Place(NamedTuple):
    """Describes a tensor by where it lies in memory.

    ``memory``: the index of the memory in ``Recording.memories``. ``offset``: from the start of the memory,
    in elements.
    """

    memory: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


class Memory:
    """A piece of memory in which tensors lie: a storage of PyTorch.

    Operands are the tensors that the graph reads: weights, constants and arguments.

    Attributes:
        device: the device of the memory.
        operand: the index of the first operand that lies in this memory. None if an action allocates it.
        is_input: True if that operand is an argument of the call.
        root: the place of that operand, or of the first tensor in memory that an action allocates.
        start: the address of that operand. 0 if an action allocates the memory.
    """

    __slots__ = ("device", "is_input", "operand", "root", "start")

    def __init__(self, t: Tensor, index: int, operand: int | None = None, is_input: bool = False) -> None:
        self.root = _place(t, index)
        self.device, self.operand, self.is_input = t.device, operand, is_input
        self.start = 0 if operand is None else t.data_ptr()


class Action:
    """One thing that a plan executes: an allocation, a call of an op, or a kernel launch.

    Attributes:
        kind: "allocate", "call" or "launch".
        function: the op or step that is called; the ``Launch`` of a launch; None for an allocation.
        args, kwargs: the arguments, with a ``Place`` instead of each tensor.
        results: what the call returns, with a ``Place`` for the first tensor in each newly allocated memory,
            and None for everything else.
        made: the places in ``results``.
        reads: the indices of all memories in which arguments lie.
        writes: those of these memories that the action writes into.
        is_kept: True if the action must run even if no other action reads its results, because it writes into
            memory or draws random numbers.
    """

    __slots__ = ("args", "function", "is_kept", "kind", "kwargs", "made", "reads", "results", "writes")

    def __init__(self, kind: str, function: Any, args: Any, kwargs: Any, results: Any) -> None:
        self.kind, self.function, self.args, self.kwargs, self.results = kind, function, args, kwargs, results
        self.reads = {place.memory for place in places_in((args, kwargs))}
        self.made = list(places_in(results))
        self.writes: set[int] = set()
        self.is_kept = False


class Recording(NamedTuple):
    """What one run of a graph has executed.

    Operands are the tensors that the graph reads: weights, constants and arguments.

    Attributes:
        actions: the allocations, calls and launches in the order in which they ran.
        memories: all pieces of memory. Those of operands come first.
        operands: the place of each operand.
        inputs: how many operands are arguments of the call. They are the last operands.
        rows: weights may lie side by side, so that one matrix product reads them all
            (``kernels/product/packed.py``). For each place of a tensor that covers such weights: the indices
            of these operands.
        results: what the graph returns. It has the place of each tensor instead of the tensor, or the index
            of an operand that is returned itself.
        left: some steps were recorded as one call. For each reason, the number of such steps.
    """

    actions: list[Action]
    memories: list[Memory]
    operands: list[Place]
    inputs: int
    rows: dict[Place, tuple[int, ...]]
    results: list[Any]
    left: collections.Counter[str]


def record(
    graph: fx.Graph, fixed: Sequence[Tensor], inputs: Sequence[Tensor]
) -> tuple[list[Any], Recording | str]:
    """Runs ``graph`` once, and records what it executes.

    Returns the results of the graph, and the recording or the reason why there is none.

    Args:
        graph: a rewritten graph, as in ``Plan``: placeholders, calls of steps and of ops, and an output with
            a flat list.
        fixed: the values of the first placeholders: parameters, other tensors of the model's code, copies in
            E4M3 and constants.
        inputs: the values of the other placeholders: the tensors among the arguments of the call.

    Raises Unrecordable, before anything has run, if ``inputs`` share memory or are no plain tensors.
    """
    recorder = _Recorder(fixed, inputs)
    with recorder.listening():
        results = list(_run(graph, [*fixed, *inputs], recorder))
    if recorder.failure is not None:
        return results, recorder.failure
    try:
        places = _results(graph, results, recorder)
    except Unrecordable as reason:
        return results, str(reason)
    operands = recorder.operands, len(inputs), recorder.rows
    return results, Recording(recorder.actions, recorder.memories, *operands, places, recorder.left)


def places_in(x: Any) -> Iterator[Place]:
    if isinstance(x, Place):
        yield x
    elif isinstance(x, (tuple, list)):
        for item in x:
            yield from places_in(item)
    elif isinstance(x, dict):
        yield from places_in(list(x.values()))


# ---- the run


def _run(graph: fx.Graph, operands: list[Tensor], recorder: _Recorder) -> list[Any]:
    """Runs the nodes of the graph one by one. Drops each value after its last use."""
    dropped = _dropped(graph)
    values: dict[Node, Any] = {}
    given = iter(operands)
    for n in graph.nodes:
        if n.op == "placeholder":
            values[n] = next(given)
        elif n.op == "output":
            return fx.node.map_arg(n.args[0], values.__getitem__)
        elif n.target is operator.getitem:
            values[n] = values[n.args[0]][n.args[1]]
        else:
            values[n] = recorder.step(n, *fx.node.map_arg((n.args, n.kwargs), values.__getitem__))
        for done in dropped.get(n, ()):
            del values[done]
    raise ValueError("record: the graph has no output")


def _dropped(graph: fx.Graph) -> dict[Node, list[Node]]:
    """For each node, lists the nodes whose values are not needed after it."""
    last = {n: n for n in graph.nodes}
    for n in graph.nodes:
        last.update(dict.fromkeys(n.all_input_nodes, n))
    dropped: dict[Node, list[Node]] = {}
    for n, reader in last.items():
        dropped.setdefault(reader, []).append(n)
    return dropped


def _results(graph: fx.Graph, results: list[Any], recorder: _Recorder) -> list[Any]:
    nodes = next(n for n in reversed(graph.nodes) if n.op == "output").args[0]
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    found: list[Any] = []
    for n, value in zip(nodes, results, strict=True):
        if n in placeholders:
            found.append(placeholders.index(n))
        elif isinstance(n, Node):
            found.append(None if value is None else recorder.place(value))
        else:
            raise Unrecordable(f"the plan returns {n!r}")
    return found


class _Recorder(TorchDispatchMode):
    """Records ops and launches while the context ``listening`` is active.

    ``failure``: why nothing could be recorded; None if it could.
    """

    def __init__(self, fixed: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.actions: list[Action] = []
        self.memories: list[Memory] = []
        # The index of each known storage. Keys are weak references, so that storages can be freed. Addresses
        # would be no good keys: a new storage may get the address of a freed one.
        self.found: dict[StorageWeakRef, int] = {}
        self.left: collections.Counter[str] = collections.Counter()
        self.failure: str | None = None
        self._simple = set(_WHOLE)  # ops that are recorded as one action, and not as the ops inside of them
        self._is_paused = False
        self._reason: str | None = None  # why the node that runs now must be recorded as one call; else None
        for i, t in enumerate((*fixed, *inputs)):
            if type(t) not in _PLAIN or t.layout is not torch.strided or t.is_meta:
                raise Unrecordable(f"an operand is a {type(t).__name__} of layout {t.layout} on {t.device}")
            if _storage(t) not in self.found:
                self._add(t, i, i >= len(fixed))
            elif i >= len(fixed):
                raise Unrecordable("an argument shares its memory with another one, or with a weight")
        self.operands = [self.place(t) for t in (*fixed, *inputs)]
        self.rows: dict[Place, tuple[int, ...]] = {}
        self._starts = {t.data_ptr(): (i, t.nbytes) for i, t in reversed([*enumerate(fixed)]) if t.numel()}

    def _add(self, t: Tensor, operand: int | None = None, is_input: bool = False) -> Place:
        self.found[_storage(t)] = len(self.memories)
        memory = Memory(t, len(self.memories), operand, is_input)
        self.memories.append(memory)
        return memory.root

    def place(self, t: Tensor) -> Place:
        """Describes ``t`` by its place.

        Raises Unrecordable if no operand lies in its memory, and no action has allocated the memory.
        """
        memory = self.found.get(_storage(t)) if type(t) in _PLAIN else None
        if memory is None:
            raise Unrecordable("reads a tensor of unknown origin")
        return _place(t, memory)

    # ---- steps

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        with private.below_autograd(), observers.observed_by(self._launch), self:
            yield

    @contextlib.contextmanager
    def _paused(self) -> Iterator[None]:
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    def step(self, n: Node, args: Any, kwargs: Any) -> Any:
        """Runs node ``n``. Records all that it executes, or else one call of its function."""
        target: Any = n.target
        actions, memories, self._reason = len(self.actions), len(self.memories), self.failure
        result = target(*args, **kwargs)
        if self._reason is None and not self._is_known(result):
            self._reason = "its result is of unknown origin"
        if self._reason is not None and self.failure is None:
            del self.actions[actions:], self.memories[memories:]
            self.found = {storage: i for storage, i in self.found.items() if i < memories}
            name = getattr(target, "__name__", str(target))
            self.left[f"{name}: {self._reason}"] += 1
            try:
                self._note("call", target, args, kwargs, result, [args[0]] if writes_over(n) else [])
            except Unrecordable as reason:
                self.failure = f"{name} {reason}"
        return result

    def _is_known(self, result: Any) -> bool:
        """True if each item of ``result`` is None, or a tensor in memory that the recording already has."""
        return all(t is None or (type(t) in _PLAIN and _storage(t) in self.found) for t in _flat(result))

    def _note(
        self, kind: str, function: Any, args: Any, kwargs: Any, result: Any, written: Sequence[Tensor]
    ) -> None:
        """Records an op or launch that has just run. ``written``: the arguments that it wrote into."""
        with_places = _mapped(args, self.place), _mapped(kwargs, self.place)

        def new(t: Any) -> Place | None:
            if self._is_known(t):
                return None
            if type(t) is not Tensor or t.layout is not torch.strided:
                raise Unrecordable(f"returns a {type(t).__name__}")
            _place(t, 0)  # raises Unrecordable if a ``Place`` cannot describe the tensor
            return self._add(t)

        results = new(result) if isinstance(result, Tensor) else _items(result, new)
        action = Action(kind, function, *with_places, results)
        action.writes = {self.place(t).memory for t in written}
        action.is_kept = bool(action.writes) or function in DRAWN
        self.actions.append(action)

    # ---- what a step executes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._is_paused:
            return func(*args, **kwargs)
        if func not in self._simple:
            if private.is_composite(func):
                with self:
                    return private.run_composite(func, args, kwargs)
            self._simple.add(func)
        if func is _SWAP and self._reason is None:
            with self._paused():
                return self._packed(func(*args, **kwargs))
        self._reason = self._reason or _objection(func, args, kwargs)
        with self._paused():
            if self._reason is not None:
                return func(*args, **kwargs)
            call, result = _called(func, args, kwargs)
        try:
            if _leaves_the_gpu(args, result):
                raise Unrecordable(f"{func.name()} copies to the CPU, where Python can read it")
            targets = _written(func, args, kwargs)
            if func in _ALLOCATIONS and not kwargs.get("pin_memory"):
                self._note("allocate", None, (), {}, result, [])
            elif targets or not self._is_known(result):  # ops that only make views are not recorded
                self._note("call", call, args, kwargs, result, targets)
        except Unrecordable as reason:
            self._reason = f"{func.name()} {reason}"
        return result

    def _packed(self, t: Tensor) -> Tensor:
        """Records which weights lie in the memory that the op ``set_`` has given to the tensor ``t``.

        If it is not exactly the memory of weights side by side, the node must be recorded as one call.
        """
        row: list[int] = []
        at, end = t.data_ptr(), t.data_ptr() + t.nbytes
        while at < end and at in self._starts:
            i, size = self._starts[at]
            row.append(i)
            at += size
        if at != end or not row or not t.is_contiguous():
            self._reason = f"{_SWAP.name()} gives a tensor other memory"
            return t
        if not self._is_known(t):
            self._add(t, row[0])
        self.rows[self.place(t)] = tuple(row)
        return t

    def _launch(self, launch: Any, stream: int, tensors: tuple[Tensor | None, ...]) -> None:
        with self._paused():
            launch(stream, *tensors)
        if self._is_paused or self._reason is not None:
            return
        try:
            self._note("launch", launch, tensors, {}, None, [t for t in tensors if t is not None])
        except Unrecordable as reason:
            self._reason = f"a kernel {reason}"


def _storage(t: Tensor) -> StorageWeakRef:
    return StorageWeakRef(t.untyped_storage())


def _place(t: Tensor, memory: int) -> Place:
    if t.is_conj() or t.is_neg():
        raise Unrecordable("reads a conjugate or negative view")
    return Place(memory, tuple(t.shape), t.stride(), int(t.storage_offset()), t.dtype)


def _called(func: Any, args: Any, kwargs: Any) -> tuple[Callable[..., Any], Any]:
    """Runs the op. Returns the callable for it that takes the least CPU time, and the result."""
    binding = private.binding_of(func)
    if binding is not None:
        with contextlib.suppress(TypeError):
            return binding, binding(*args, **kwargs)
    return func, func(*args, **kwargs)


def _objection(func: Any, args: Any, kwargs: Any) -> str | None:
    """Returns why the op cannot be recorded as an action. None if it can."""
    name = func.name()
    if func is aten.index.Tensor and all(i is None or i.dtype in _INDICES for i in args[1]):
        return None  # the result's shape depends on the values of masks, but not of integer indices
    if any(tag in func.tags for tag in _READS_VALUES):
        return f"{name} reads a value"
    if torch.Tag.nondeterministic_seeded in func.tags and _argument(func, "dropout_p", args, kwargs) != 0:
        return f"{name} draws random numbers"
    return f"{name} gives a tensor other memory" if name.split(".")[0] in _SWAPS else None


def _argument(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """The value of the argument ``name`` of a call of the op. None if the op has no such argument."""
    for i, argument in enumerate(private.schema_of(func).arguments):
        if argument.name == name:
            return args[i] if i < len(args) else kwargs.get(name, argument.default_value)
    return None


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Lists the tensors among the arguments that the op writes into."""
    found = [_argument(func, name, args, kwargs) for _, name, _ in written(func)]
    return [t for t in _flat(found) if isinstance(t, Tensor)]


def _leaves_the_gpu(args: Any, result: Any) -> bool:
    """True if the op copies from the GPU to the CPU: its result is one tensor on the CPU.

    Tuples do not count, because attention returns seeds on the CPU in a tuple.
    """
    is_on_cpu = isinstance(result, Tensor) and result.is_cpu
    return is_on_cpu and any(isinstance(t, Tensor) and not t.is_cpu for t in _flat(args))


def _flat(x: Any) -> Iterator[Any]:
    if isinstance(x, (tuple, list)):
        for item in x:
            yield from _flat(item)
    else:
        yield x


def _items(x: Any, function: Callable[[Any], Any]) -> Any:
    """Applies ``function`` to each item of ``x``, also in nested tuples and lists, which become tuples."""
    return tuple(_items(item, function) for item in x) if isinstance(x, (tuple, list)) else function(x)


def _mapped(x: Any, function: Callable[[Tensor], Any]) -> Any:
    """Copies tuples, lists and dicts in ``x``, and applies ``function`` to each tensor in them."""
    if isinstance(x, Tensor):
        return function(x)
    if isinstance(x, tuple):
        items = [_mapped(item, function) for item in x]
        return type(x)(*items) if hasattr(x, "_fields") else tuple(items)
    if isinstance(x, list):
        return [_mapped(item, function) for item in x]
    return {key: _mapped(value, function) for key, value in x.items()} if isinstance(x, dict) else x
