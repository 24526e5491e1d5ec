"""``Plan`` runs the rewritten graph of a traced call for other tensors of the same shapes.

A plan calls kernels and PyTorch's ops, and none of the model's Python. It looks up parameters and buffers by
name in each call. So it sees every change of them: writes, ``.data = ...``,
``load_state_dict(assign=True)`` and moves.

Constants are computed once, at the first call. A constant is a value that depends on no argument, no
parameter and no random number. It may depend on a tensor on the CPU that is neither an argument nor a
parameter, such as a table that the model's code copies to the GPU in each call. If somebody writes into such
a table, the constants are outdated, and ``is_current`` returns False.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx import Node
from torch.utils import _pytree as pytree

from sdfastgn.kernels.common.compile_ahead import rehearse, without_rehearsal
from sdfastgn.kernels.common.private import any_autocast
from sdfastgn.kernels.product import packed
from sdfastgn.plans.run import steps
from sdfastgn.plans.run.aliases import base, is_view, writes_over
from sdfastgn.plans.run.slices import Slices
from sdfastgn.plans.run.traffic import Step, memory, steps_of, table
from sdfastgn.plans.trace.refusals import DRAWN, is_random
from sdfastgn.plans.trace.traced import Traced

aten = torch.ops.aten
# Bytes (256 MB). A larger value is computed in each call, although it is constant: keeping it between calls
# would take too much memory. The largest useful constants are tables of positions, of a few MB.
_MOST_FOLDED = 1 << 28
# Where a parameter or buffer is: the module's dict ``_parameters`` or ``_buffers``, and the name in it.
_Place = tuple[dict[str, Any], str]
_CopyOf = Callable[[dict[str, Any], str], list[Tensor]]


class Plan:
    """Runs ``graph``, the rewritten graph of the call ``traced``. The plan changes and keeps ``graph``.

    The nodes of the graph are *steps*: calls of this package's kernels, or of PyTorch's ops. A plan refers to
    the parameters of the model, but to none of its modules, so it keeps the model in no reference cycle. A
    CUDA graph that was captured from a plan reads the plan's constants, so the plan must outlive it. Several
    threads may call a plan at once.

    ``copy_of``: a function (``_parameters`` dict of a module, name) -> [weight in E4M3, its scales]. E4M3 is
    an 8-bit float dtype. The plan reads the two tensors in each call. If it is None, weights are quantized in
    each call.

    Attributes:
        graph: the graph. Its placeholders are ``parameters``, then ``others``, ``copies``, the constants and
            the tensors of the call. Parameters and others that no step reads are left out. It has no
            ``get_attr`` nodes.
        parameters: for each parameter or buffer, the dict of its module that has it, and its name there.
        others: tensors that are neither arguments nor parameters, for instance in closures. Those from which
            only constants are computed are left out.
        copies: for each tensor that ``copy_of`` returns, the list that has it, and its index there.
        slices: how the samples of a large batch are divided. None if the graph computes the whole call.
        steps: a record of each step, with its shape and the bytes that it reads and writes.
        writes: True if a run writes into arguments, parameters or others.
        draws: True if a run draws random numbers.
        copies_from_cpu: True if a run copies tensors from the CPU to another device.
    """

    def __init__(self, traced: Traced, graph: fx.Graph, copy_of: _CopyOf | None = None) -> None:
        self._spec, self._out_spec = traced.spec, traced.out_spec
        placeholders = [n for n in graph.nodes if n.op == "placeholder"]
        count = len(traced.parameters), len(traced.parameters) + len(traced.others)
        where = {
            n: (getattr(module, kind), name)
            for n, (module, kind, name) in zip(placeholders[: count[0]], traced.parameters, strict=True)
        }
        inputs = placeholders[count[1] :]
        self.copies = [] if copy_of is None else _split_copies(graph, where, copy_of, inputs)
        read = {n: place for n, place in where.items() if _is_read(n)}
        self.parameters = list(read.values())
        pairs = zip(placeholders[count[0] : count[1]], traced.others, strict=True)
        others = {n: t for n, t in pairs if _is_read(n)}
        self.slices: Slices | None = traced.slices
        shapes = [n.meta["shape"] for n in inputs]
        if self.slices is not None:
            shapes = list(map(self.slices.whole, shapes, self.slices.inputs))
        self._inputs = [(s, n.meta["dtype"], n.meta["device"]) for s, n in zip(shapes, inputs, strict=True)]
        written = {n.args[0] for n in graph.nodes if n.target is aten.copy_.default}
        first_input = inputs[0] if inputs else None
        tables = [n for n, t in others.items() if n not in written and _is_table(t, inputs)]
        self._fold, tables = _split_constants(traced.graph, graph, first_input, tables)
        self._tables = [others[n] for n in tables]
        self._versions = [t._version for t in self._tables]
        self._constants: list[Tensor] = []
        others = {n: t for n, t in others.items() if _is_read(n)}
        self.others = list(others.values())
        self._written = [i for i, n in enumerate(inputs) if n in written]
        self._held_written = [i for i, n in enumerate([*read, *others]) if n in written]
        self._lock = threading.Lock()
        self._rows = _rows_of_products(graph, read)
        graph.owning_module = None  # the graph's module is not needed: there are no ``get_attr`` nodes
        self.graph = graph
        self.steps: list[Step] = steps_of(graph)
        self.writes = bool(written)
        self.draws = any(n.target in DRAWN for n in graph.nodes)
        self.copies_from_cpu = any(map(_copies_from_cpu, graph.nodes))

    def is_current(self) -> bool:
        """False if code has written into a tensor on the CPU from which constants were computed."""
        return [t._version for t in self._tables] == self._versions

    @functools.cached_property
    def _forward(self) -> Callable[..., list[Any]]:
        """A Python function that runs the graph.

        It is made only when it is needed, because that takes 0.08 s for a UNet. The generated
        code of ``Baked`` does not need it.
        """
        return fx.GraphModule({}, self.graph).forward

    def __call__(self, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Computes the traced call for other tensors. The result has the structure of the traced result.

        Arguments that are no tensors, such as numbers, are ignored. The plan uses their values in the trace.

        Raises ValueError if the arguments have another structure than the traced ones, if a tensor has
        another shape, dtype or device, or if the call writes into a tensor that shares memory with another.
        """
        leaves, spec = pytree.tree_flatten((args, kwargs or {}))
        if spec != self._spec:
            raise ValueError(f"Plan: the arguments must have the structure {self._spec}, got {spec}")
        inputs = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        self._check(inputs)
        if self.writes:
            self.check_written(inputs)
        return pytree.tree_unflatten(self.run(inputs), self._out_spec)

    def run(self, inputs: Sequence[Tensor]) -> list[Any]:
        """Computes the flat list of results from the tensors among the arguments, without any checks."""
        if self.slices is not None:
            return self.slices.run(self.run_slice, inputs)
        return self.run_slice(inputs)

    def run_slice(self, inputs: Sequence[Tensor]) -> list[Any]:
        """Does what ``run`` does for one slice of the samples. A call without slices counts as one slice."""
        with torch.no_grad(), without_autocast():
            return self._forward(*self.operands(inputs))

    @property
    def runs(self) -> int:
        """How often the graph runs in one call: the number of slices, or 1."""
        return 1 if self.slices is None else self.slices.number

    @property
    def given(self) -> tuple[list[Node], list[Node]]:
        """The placeholders of ``graph`` that are constants, and those that are tensors of the call."""
        placeholders = [n for n in self.graph.nodes if n.op == "placeholder"]
        end = len(placeholders) - len(self._inputs)
        held = len(self.parameters) + len(self.others) + len(self.copies)
        return placeholders[held:end], placeholders[end:]

    def with_graph(self, graph: fx.Graph) -> Plan:
        """Makes a plan like this one from another ``graph``, which may have further placeholders at the end.

        The two plans share their constants. Values of the further placeholders are passed to ``run`` after
        the tensors of the call.
        """
        if self._fold is not None:
            self._compute_constants()
        other = copy.copy(self)
        vars(other).pop("_forward", None)
        other.graph, other.steps = graph, steps_of(graph)
        return other

    def compile_ahead(self, inputs: Sequence[Tensor], device: torch.device) -> None:
        """Compiles the kernels of the plan in parallel threads. The first run would compile them one by one.

        This method runs all steps once, with meaningless results. So call it only if the plan neither writes
        into arguments nor draws random numbers.
        """
        given = inputs if self.slices is None else self.slices.slice(inputs, 0)
        rehearse(lambda: self.run_slice(given), device)

    def operands(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Returns the present values of the placeholders of ``graph``, in order."""
        if self._fold is not None:
            self._compute_constants()
        held = (held[name] for held, name in self.parameters)
        copies = (copy[i] for copy, i in self.copies)
        return [*held, *self.others, *copies, *self._constants, *inputs]

    def pack(self) -> None:
        """Moves weights of linear layers with the same input side by side, so that one product can read them.

        Weights that another plan has moved already stay where they are. Call it again after the model was
        moved. ``kernels/product/packed.py`` says when it may be called, and its ``unpack`` undoes it.
        """
        for rows in self._rows:
            parts = [[held[name] for held, name in row] for row in rows]
            if not any(packed.are_packed([part for row in parts for part in row])):
                packed.pack(*parts)

    def __str__(self) -> str:
        """A table of the steps, then the totals, and the ops for which this package has no kernel."""
        text = table(self.steps)
        return text if self.runs == 1 else f"{text}\nrun {self.runs} times, for a part of the samples each"

    def _check(self, inputs: Sequence[Tensor]) -> None:
        if len(inputs) != len(self._inputs):
            raise ValueError(f"Plan: the call must have {len(self._inputs)} tensors, got {len(inputs)}")
        for i, (x, wanted) in enumerate(zip(inputs, self._inputs, strict=True)):
            found = tuple(x.shape), x.dtype, x.device
            if found != wanted:
                raise ValueError(
                    f"Plan: tensor {i} of the call must be {_text(*wanted)}, got {_text(*found)}"
                )

    def check_written(self, inputs: Sequence[Tensor]) -> None:
        """Raises ValueError if the call writes into memory that an input shares with another tensor."""
        given = [_memory(x) for x in inputs]
        held = [_memory(x) for x in (*(held[name] for held, name in self.parameters), *self.others)]
        written = {held[i] for i in self._held_written}
        for i, x in enumerate(inputs):
            is_shared = i in self._written and (given.count(given[i]) > 1 or given[i] in held)
            if x.numel() and (is_shared or given[i] in written):
                raise ValueError(f"Plan: tensor {i} of the call shares memory that the call writes into")

    def _compute_constants(self) -> None:
        with self._lock:
            if self._fold is None:  # another thread has computed the constants while this one waited
                return
            if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
                raise RuntimeError("Plan: the first call must not be inside the capture of a CUDA graph")
            with torch.inference_mode(False), torch.no_grad(), without_autocast(), without_rehearsal():
                self._constants = self._fold(*self._tables)
            for device in {t.device for t in self._constants if t.is_cuda}:
                # Wait until the GPU has computed the constants. Other threads may read them in other streams,
                # which do not wait for this one.
                torch.cuda.current_stream(device).synchronize()
            self._fold = None


def _memory(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _is_read(n: Node) -> bool:
    """True if a node reads the placeholder ``n``. Otherwise removes ``n`` from the graph."""
    if not n.users:
        n.graph.erase_node(n)
        return False
    return True


def _is_table(t: Tensor, inputs: Sequence[Node]) -> bool:
    """True if constants may be computed from ``t``: it is on the CPU, and the call's tensors are not.

    It must also have a version counter, so that writes into it are noticed.
    """
    is_elsewhere = bool(inputs) and all(n.meta["device"].type != "cpu" for n in inputs)
    return is_elsewhere and t.device.type == "cpu" and not t.is_inference()


def _copies_from_cpu(n: Node) -> bool:
    if n.op != "call_function" or "device" not in n.meta or n.meta["device"].type == "cpu":
        return False
    return any(
        a.meta["device"].type == "cpu" and (a.meta["shape"] or n.target is aten._to_copy.default)
        for a in n.all_input_nodes
        if "device" in a.meta
    )


def _rows_of_products(graph: fx.Graph, parameters: dict[Node, _Place]) -> list[list[list[_Place]]]:
    """For each call of ``steps.linears``, returns the parameters that one product can read side by side.

    They are [weights] or [weights, biases].
    """
    found = []
    for n in graph.nodes:
        rows: Any = [row for row in n.args[1:] if row] if n.target is steps.linears else []
        if rows and all(p in parameters for row in rows for p in row):
            found.append([[parameters[p] for p in row] for row in rows])
    return found


def _split_copies(
    graph: fx.Graph, parameters: dict[Node, _Place], copy_of: _CopyOf, inputs: Sequence[Node]
) -> list[tuple[list[Tensor], int]]:
    """Replaces nodes that quantize a parameter by placeholders for its copy in E4M3, which ``copy_of`` finds.

    The placeholders stand before ``inputs``. Returns for each of them a list that ``copy_of`` has returned,
    and the index of the item that is the placeholder's value.
    """
    found: list[tuple[list[Tensor], int]] = []
    after = inputs[0] if inputs else next(n for n in graph.nodes if n.op != "placeholder")
    for n in list(graph.nodes):
        if n.target is not steps.quantize_weight or n.args[0] not in parameters:
            continue
        copy = copy_of(*parameters[n.args[0]])
        for item in list(n.users):
            with graph.inserting_before(after):
                own = graph.placeholder(f"copy_{len(found)}")
            own.meta = dict(item.meta)
            item.replace_all_uses_with(own)
            graph.erase_node(item)
            found.append((copy, item.args[1]))
        graph.erase_node(n)
    return found


def _split_constants(
    root: fx.GraphModule, graph: fx.Graph, first_input: Node | None, tables: list[Node]
) -> tuple[Callable[..., list[Tensor]] | None, list[Node]]:
    """Replaces the constants in ``graph`` by placeholders, which stand before ``first_input``.

    ``tables``: placeholders of tensors on the CPU from which constants may be computed. Returns the function
    that computes the constants (None if there are none), and a list of the ``tables`` that it reads.
    """
    constants = _guarded(graph, _constants(graph, tables))
    own = fx.Graph()
    copies: dict[Node, Node] = {}
    for n in constants:
        copies[n] = own.node_copy(n, copies.__getitem__)
    read = [n for n in constants if n.op != "placeholder" and any(u not in constants for u in n.users)]
    own.output([copies[n] for n in read])
    after = first_input or next(n for n in graph.nodes if n.op != "placeholder")
    for i, n in enumerate(read):
        with graph.inserting_before(after):
            constant = graph.placeholder(f"constant_{i}")
        constant.meta = dict(n.meta)
        n.replace_all_uses_with(constant, delete_user_cb=lambda user: user not in constants)
    for n in reversed(constants):
        if n.op != "placeholder":
            graph.erase_node(n)
    return fx.GraphModule(root, own).forward if read else None, [n for n in tables if n in copies]


def _constants(graph: fx.Graph, tables: list[Node]) -> list[Node]:
    """Lists the constants of ``graph``, and the placeholders in ``tables`` from which they are computed."""
    found: dict[Node, None] = dict.fromkeys(tables)
    for n in graph.nodes:
        is_folded = (
            n.op == "call_function"
            and bool(n.meta)
            and all(a in found for a in n.all_input_nodes)
            and not is_random(n.target)
            and memory(n) <= _MOST_FOLDED
        )
        if n.op == "get_attr" or is_folded:
            found[n] = None
    # A constant that ``expand`` makes is kept before the expand, without repeated elements. The plan expands
    # it in each call, as a view.
    for n in reversed(found.copy()):
        if n.target is steps.expand and not any(u in found for u in n.users):
            del found[n]
    for n in tables:
        if not any(u in found for u in n.users):
            del found[n]
    return [n for n in found if not _is_overwritten(n, found)]


def _is_overwritten(n: Node, constants: dict[Node, None]) -> bool:
    """True if ``n`` makes a tensor that its readers overwrite.

    Such a tensor is no constant: it would have to be copied in each call, and making it again is faster.
    """
    is_made = n.op == "call_function" and not n.all_input_nodes
    return is_made and all(writes_over(u) and u.args[0] is n and u not in constants for u in n.users)


def _guarded(graph: fx.Graph, constants: list[Node]) -> list[Node]:
    """Inserts a copy of each value that a step of ``graph`` would write over although it must not change.

    Such values are constants, parameters, arguments of the call, and values that are read later. Constants
    that the call returns are copied too. Returns ``constants``, and the copies from which only constants are
    computed.
    """
    found, last = set(constants), _last_readers(graph)
    for i, n in enumerate(list(graph.nodes)):
        for a in _exposed(n, i, found, last):
            with graph.inserting_before(n):
                copy = graph.call_function(steps.copy, (a,))
            copy.meta = dict(a.meta)
            n.replace_input_with(a, copy)
            if n in found:
                found.add(copy)
    return [n for n in graph.nodes if n in found]


def _exposed(n: Node, i: int, constants: set[Node], last: dict[Node, int]) -> list[Node]:
    """Lists the arguments that must be copied before ``n``, node ``i`` of its graph, reads them.

    If ``n`` is the output, these are the constants in it: callers may write over the results of a call. A
    node that writes over its first argument needs a copy of it if the argument's memory must not change. This
    is memory of a constant, of a parameter, of an argument of the call, or of a value that is read later.

    ``last``: for each node with memory, the index of its last reader.
    """
    if n.op == "output":
        return [a for a in n.all_input_nodes if base(a) in constants]
    if not writes_over(n) or n.target is aten.copy_.default:
        return []
    written: Any = n.args[0]
    memory_of = base(written)
    is_kept = memory_of in constants or memory_of.op == "placeholder" or last[memory_of] > i
    return [written] if is_kept else []


def _last_readers(graph: fx.Graph) -> dict[Node, int]:
    """For each node that is no view, the index of the last node that reads it, directly or through views."""
    last: dict[Node, int] = {}
    for i, n in enumerate(graph.nodes):
        if not is_view(n):
            last.update({base(a): i for a in n.all_input_nodes})
    return last


@contextlib.contextmanager
def without_autocast() -> Iterator[None]:
    """A context without autocast: the casts that autocast made during the trace are nodes of the graph."""
    if not any_autocast():
        yield
        return
    with contextlib.ExitStack() as off:
        for kind in ("cuda", "cpu"):
            off.enter_context(torch.autocast(kind, enabled=False))
        yield


def _text(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> str:
    return f"{dtype}{list(shape)} on {device}"
