"""Traces a call: the model's Python runs once with tensors without memory, and each op becomes a node."""

from __future__ import annotations

import operator
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from sdfastgn.kernels.common import private
from sdfastgn.kernels.common.garbage import without_collections
from sdfastgn.plans.trace import writes
from sdfastgn.plans.trace.fills import FILLS, MOST_NODES, Fill, filled, is_new
from sdfastgn.plans.trace.python_state import ModuleState, shared_state, without_autocast_cache
from sdfastgn.plans.trace.refusals import DRAWN, is_random, is_tracing, noted, reason_of, refuse
from sdfastgn.plans.trace.shapes import Inference, is_guess, surroundings
from sdfastgn.plans.trace.survivors import kept
from sdfastgn.plans.trace.tensors import Memory, Metadata, Step, TracedTensor, make, metadata, metadata_of
from sdfastgn.plans.trace.traced import Traced, Untraceable

aten = torch.ops.aten
_Place = tuple[nn.Module, str, str]
# Types that a call may return besides tensors.
_CONSTANTS = (type(None), int, float, bool, str, torch.dtype, torch.device)


def trace(
    model: nn.Module,
    call: Callable[..., Any],
    *args: Any,
    strides_of: Callable[[nn.Module, Tensor], tuple[int, ...]] | None = None,
    beside: Iterable[nn.Module] = (),
    **kwargs: Any,
) -> Traced:
    """Traces ``call(*args, **kwargs)``, which runs ``model``, and returns its graph.

    Tensors in ``args`` and ``kwargs`` become the inputs of the graph, and all other arguments constants. The
    graph is valid for tensors with the same shapes, strides, dtypes and devices that share no memory with
    each other. Raises Untraceable, with the reason.

    Args:
        model: the model.
        call: a function that runs the model.
        args, kwargs: the arguments of ``call``.
        strides_of: a function (module, parameter) -> the strides that the trace assumes for the parameter.
            They decide the strides of results, and so which results are views. None: the parameter's own
            strides.
        beside: modules that ``call`` runs although they are not in ``model``. Their parameters are treated
            like those of ``model``.
    """
    if is_tracing():
        raise Untraceable("the call runs inside of a trace of another call")
    traced = interrupt = None
    with without_collections(), noted() as reasons:
        tracer = Tracer((model, *beside), strides_of)
        state = ModuleState(model)
        try:
            traced = tracer.traced(call, args, kwargs)
        except Exception as error:
            reasons.append(reason_of(error))
        except BaseException as error:  # such as KeyboardInterrupt: it is raised again below
            interrupt = error
        sets_attributes = not reasons
        reasons += state.restore()
        sets_attributes = sets_attributes and bool(state.changed)
        made = tracer.made
        tracer.let_go()
        reasons += kept(made)
    if interrupt is not None:
        raise interrupt
    if reasons or traced is None:
        raise Untraceable(reasons[0], state.kept(), sets_attributes)
    return traced


def _places(roots: Iterable[nn.Module]) -> dict[int, _Place]:
    """Maps the id of each parameter and buffer in ``roots`` to the place where the tensor occurs first."""
    found: dict[int, _Place] = {}
    for module in chain.from_iterable(root.modules() for root in roots):
        for kind in ("_parameters", "_buffers"):
            for name, t in getattr(module, kind).items():
                if t is not None:
                    found.setdefault(id(t), (module, kind, name))
    return found


def _is_plain(t: Tensor) -> bool:
    return type(t) in (Tensor, nn.Parameter, nn.Buffer) and t.layout is torch.strided


def _geometry(t: Tensor) -> Any:
    return private.storage_of(t), t.shape, t.stride(), t.storage_offset(), t.dtype


class _Source(NamedTuple):
    """A tensor that the trace has not made, such as an argument, and the traced tensor in its place."""

    real: Tensor
    traced: TracedTensor
    placeholder: fx.Node


class Tracer(TorchDispatchMode):
    """A dispatch mode that records the ops of a call as nodes of ``self.module.graph``."""

    def __init__(
        self, roots: Iterable[nn.Module], strides_of: Callable[[nn.Module, Tensor], Any] | None
    ) -> None:
        super().__init__()
        self.strides_of = strides_of
        self.module = fx.GraphModule({}, fx.Graph())
        self.graph = self.module.graph
        self.places = _places(roots)
        self.parameters: list[_Place] = []
        self.others: list[Tensor] = []
        self.sources: list[_Source] = []
        # The id of a tensor that the trace has not made -> (the tensor, the traced tensor in its place).
        self.known: dict[int, tuple[Tensor, TracedTensor]] = {}
        self.by_geometry: dict[Any, Tensor] | None = None
        self.last_parameter: fx.Node | None = None
        self.last_other: fx.Node | None = None
        self.constants = 0
        # For each tensor that the model's code makes from one number: a key of the number and dtype -> the
        # tensor's node and metadata.
        self.numbers: dict[Any, tuple[fx.Node, Metadata]] = {}
        self.number_of: dict[fx.Node, Any] = {}
        # Values of nodes that depend only on numbers in the model's code, as far as they were needed.
        self.values: dict[fx.Node, Any] = {}
        self.made: list[weakref.ref[Tensor]] = []
        self.surroundings = surroundings()
        self.infer = Inference(lambda t: t.metadata if type(t) is TracedTensor else self.outside(t).metadata)

    def traced(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Traced:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        given = [self.add_input(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        args, kwargs = pytree.tree_unflatten(given, spec)
        with torch.no_grad(), without_autocast_cache(), shared_state(), private.below_autograd(), self:
            out = call(*args, **kwargs)
        results, out_spec = pytree.tree_flatten(out)
        nodes = [self.result(r) for r in results]
        self.add_writes()
        self.graph.output(nodes)
        return Traced(self.module, self.parameters, self.others, spec, out_spec)

    def let_go(self) -> None:
        """Drops all references to traced tensors, so that those that nothing else keeps are freed."""
        self.sources.clear()
        self.known.clear()
        self.infer = None  # type: ignore[assignment]

    # ---- tensors

    def new(
        self, m: Metadata, node: fx.Node, base: TracedTensor | None = None, path: tuple[Step, ...] = ()
    ) -> TracedTensor:
        t = make(m, node, base, path)
        self.made.append(weakref.ref(t))
        return t

    def emit(self, op: Any, args: Any, kwargs: Any, m: Metadata) -> fx.Node:
        node = self.graph.create_node("call_function", op, args, kwargs)
        node.meta = dict(m.for_node)
        return node

    def add_input(self, t: Tensor) -> TracedTensor:
        if not _is_plain(t):
            raise Untraceable(f"an argument is a {type(t).__name__} of layout {t.layout}")
        return self.add_placeholder(t, "input", t.stride())

    def add_placeholder(self, t: Tensor, kind: str, stride: tuple[int, ...]) -> TracedTensor:
        node = self.graph.create_node("placeholder", f"{kind}_{len(self.sources)}")
        traced = self.new(metadata(t.shape, stride, t.dtype, t.device), node)
        node.meta = dict(traced.metadata.for_node)
        self.sources.append(_Source(t, traced, node))
        return traced

    def after(self, node: fx.Node | None) -> Any:
        """A context in which new nodes are inserted after ``node``; if it is None, at the graph's start."""
        return self.graph.inserting_after(node) if node is not None else self.graph.inserting_before()

    def outside(self, t: Tensor) -> TracedTensor:
        """Returns the traced tensor that stands for ``t``, a tensor that the trace has not made."""
        found = self.known.get(id(t))
        if found is not None:
            return found[1]
        if not _is_plain(t):
            refuse(f"the call reads a {type(t).__name__} of layout {t.layout}")
        place = self.places.get(id(t))
        owner = self.owner(t) if place is None else None
        if owner is not None:
            traced = self.outside(owner)
        elif place is not None:
            with self.after(self.last_parameter):
                stride = self.strides_of(place[0], t) if self.strides_of else t.stride()
                traced = self.add_placeholder(t, "parameter", stride)
            self.last_parameter = traced.node
            self.parameters.append(place)
        else:
            with self.after(self.last_other or self.last_parameter):
                traced = self.add_placeholder(t, "other", t.stride())
            self.last_other = traced.node
            self.others.append(t)
        self.known[id(t)] = t, traced
        return traced

    def owner(self, t: Tensor) -> Tensor | None:
        """Returns the parameter or buffer of which ``t`` is a view of all elements, as ``parameter.data`` is.

        None if there is none.
        """
        if self.by_geometry is None:
            tensors = (getattr(module, kind)[name] for module, kind, name in self.places.values())
            self.by_geometry = {_geometry(p): p for p in tensors if _is_plain(p)}
        return self.by_geometry.get(_geometry(t))

    def of(self, t: Tensor) -> TracedTensor:
        if type(t) is not TracedTensor:
            return self.outside(t)
        if t.node.graph is not self.graph:
            refuse("the call reads a tensor of an earlier trace")
        return t

    def node_of(self, t: TracedTensor) -> fx.Node:
        """Returns the node that computes what ``t`` contains now, after all writes so far.

        If ``t`` is a view, and its base was written since ``t`` got its node, this method first makes new
        nodes for the view.
        """
        if t.memory is not None and t.memory.is_written:
            refuse("strides decide whether the call writes into a tensor that it reads later")
        base = t.base
        self.write_fills(t.owner)
        if base is not None and t.version != base.version:
            node = base.node
            for step in t.path:
                node = self.emit(step.op, (node, *step.args), step.kwargs, step.result)
            t.node, t.version = node, base.version
        return t.node

    def read(self, args: Any, key: list[Any]) -> list[Any]:
        """Replaces the tensors in ``args`` by nodes.

        Adds to ``key`` everything about the arguments on which the metadata of the op's results depends.
        """
        out: list[Any] = []
        for a in args:
            kind = type(a)
            if kind is int or a is None or kind in (str, torch.dtype, torch.device, torch.memory_format):
                key.append(a)
            elif kind is float or kind is bool or kind is complex or kind is torch.layout:
                key.append((kind, a))
            elif kind is list or kind is tuple:
                key.append("[")
                a = self.read(a, key)
                key.append("]")
            elif isinstance(a, Tensor):
                t = self.of(a)
                key.append(t.metadata)
                a = self.node_of(t)
            elif isinstance(a, torch.Generator):
                refuse("the call draws random numbers")
            else:
                refuse(f"an op has an argument of type {kind.__name__}")
            out.append(a)
        return out

    def read_all(self, op: Any, args: Any, kwargs: Any) -> tuple[list[Any], tuple[Any, ...], dict[str, Any]]:
        key = [op, self.surroundings]
        a = tuple(self.read(args, key))
        if not kwargs:
            return key, a, {}
        key += ["{", *kwargs]
        return key, a, dict(zip(kwargs, self.read(kwargs.values(), key), strict=True))

    # ---- ops

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        handler = _handlers.get(op)
        if handler is None:
            handler = _handlers[op] = _handler(op)
        return handler(self, op, args, kwargs or {})

    def composite(self, op: Any, args: Any, kwargs: Any) -> Any:
        with self:
            return private.run_composite(op, args, kwargs)

    def view_or_copy(self, op: Any, args: Any, kwargs: Any) -> Any:
        """Traces an op such as ``reshape``: strides decide whether its result is a view or a copy."""
        x, out = self.of(args[0]), self.composite(op, args, kwargs)
        if x.memory is None or not x.memory.is_guess or _is_certain(op, x, out, args, kwargs):
            return out
        out = self.alias(op, (out,), {}) if out is x else out
        out.memory = x.memory.of_view_or_copy(is_guess=op is not aten.contiguous.default)
        return out

    def plain(self, op: Any, args: Any, kwargs: Any) -> Any:
        """Makes a node for an op that writes nothing, and whose results have memory of their own."""
        key, a, k = self.read_all(op, args, kwargs)
        found = self.infer(op, key, args, kwargs)
        is_guessed = is_guess(op, args, kwargs)
        if type(found) is Metadata:
            return self.computed(op, a, k, found, is_guessed)
        node = self.graph.create_node("call_function", op, a, k)
        return [
            None if m is None else self.computed(operator.getitem, (node, i), {}, m, is_guessed)
            for i, m in enumerate(found)
        ]

    def computed(self, op: Any, args: Any, kwargs: Any, m: Metadata, is_guessed: bool) -> TracedTensor:
        t = self.new(m, self.emit(op, args, kwargs, m))
        t.memory = Memory() if is_guessed else None
        return t

    def view(self, op: Any, args: Any, kwargs: Any) -> Any:
        x, is_late = args[0], not kwargs and self.may_be_late(args[0])
        if is_late:
            key = [op, self.surroundings, x.metadata]
            a, k = (x.node, *self.read(args[1:], key)), kwargs
        else:
            key, a, k = self.read_all(op, args, kwargs)
        m = self.infer(op, key, args, kwargs, is_view=True)
        if type(m) is not Metadata:
            refuse(f"the call runs {op}, which returns several views")
        if op is aten._reshape_alias.default:
            op, a = aten.view.default, a[:2]
        op = _VALUES_OF.get(op, op)
        x, step = self.of(x), Step(op, a[1:], k, m)
        return self.late(x.owner, (*x.path, step)) if is_late else self.viewed(x, step)

    def late(self, base: TracedTensor, path: tuple[Step, ...]) -> TracedTensor:
        """Makes a view of ``base`` without a node. The node is made when an op reads the view."""
        t = self.new(path[-1].result, base.node, base, path)
        t.version, t.memory = -1, base.memory
        return t

    def viewed(self, x: TracedTensor, step: Step) -> TracedTensor:
        node = self.emit(step.op, (self.node_of(x), *step.args), step.kwargs, step.result)
        t = self.new(step.result, node, x.owner, (*x.path, step))
        t.memory = x.memory
        return t

    def alias(self, op: Any, args: Any, kwargs: Any) -> TracedTensor:
        x = self.of(args[0])
        t = self.new(x.metadata, self.node_of(x), x.owner, x.path)
        t.memory = x.memory
        return t

    def parts(self, op: Any, args: Any, kwargs: Any) -> list[TracedTensor]:
        """Traces ``split``, ``split_with_sizes`` and ``unbind``: makes a node for each result, a view."""
        key, _, _ = self.read_all(op, args, kwargs)
        results = self.infer(op, key, args, kwargs, is_view=False)
        x = self.of(args[0])
        position = 1 if op is aten.unbind.int else 2
        dim = args[position] if len(args) > position else kwargs.get("dim", 0)
        steps, start = [], 0
        for i, m in enumerate(results):
            if op is aten.unbind.int:
                steps.append(Step(aten.select.int, (dim, i), {}, m))
            else:
                end = start + m.shape[dim]
                steps.append(Step(aten.slice.Tensor, (dim, start, end), {}, m))
                start = end
        return [self.viewed(x, step) for step in steps]

    def attention(self, op: Any, args: Any, kwargs: Any) -> Any:
        if (len(args) > 4 and args[4]) or kwargs.get("dropout_p"):
            refuse("the call runs attention with dropout")
        return self.plain(op, args, kwargs)

    def resolved(self, op: Any, args: Any, kwargs: Any) -> Tensor:
        """Traces ``resolve_conj`` or ``resolve_neg``: copies a conjugate or negative view, or returns x."""
        x = self.of(args[0])
        kind = aten.conj_physical.default if op is aten.resolve_conj.default else aten.neg.default
        if sum(step.op is kind for step in x.path) % 2:
            return self.plain(aten.clone.default, (x,), {})
        return args[0]

    def batch_norm(self, op: Any, args: Any, kwargs: Any) -> Any:
        """Traces a batch norm. Refuses a batch norm in training, which writes its running statistics.

        The schema of the op does not declare these writes.
        """
        if args[3] is not None and args[5]:
            refuse("the call runs a batch norm in training")
        return self.plain(op, args, kwargs)

    def cudnn_convolution(self, op: Any, args: Any, kwargs: Any) -> Any:
        """Makes a node of ``aten.convolution`` for cuDNN's convolution, which ComfyUI calls directly."""
        x, weight, padding, stride, dilation, groups, *_ = args
        sizes = stride, padding, dilation, False, [0] * len(stride), groups
        return self.plain(aten.convolution.default, (x, weight, None, *sizes), {})

    def weight_norm(self, op: Any, args: Any, kwargs: Any) -> tuple[Tensor, Tensor]:
        """Traces weight norm as the ops of its definition.

        PyTorch's kernel reads its arguments as if they were contiguous, and tensors in a plan may not be.
        """
        v, g, *rest = args
        dim = rest[0] if rest else kwargs.get("dim", 0)
        kind = torch.float64 if v.dtype is torch.float64 else torch.float32
        with self:
            values = v.to(kind)
            others = [i for i in range(v.dim()) if i != dim % v.dim()]
            norm = values.square().sum(others, keepdim=True).sqrt()
            return (values * (g.to(kind) / norm)).to(v.dtype), norm

    # ---- tensors that the model's code makes from numbers

    def literal(self, op: Any, args: Any, kwargs: Any) -> TracedTensor:
        """Makes ``torch.tensor([...])`` a constant. PyTorch passes the finished tensor to ``lift_fresh``."""
        (t,) = args
        if type(t) is TracedTensor:
            return t
        if t.dim() or t.device.type != "cpu":
            return self.constant(t)
        key = t.dtype, repr(t.item())
        return self.number(key, lambda: self.constant(t), t.item())

    def scalar(self, op: Any, args: Any, kwargs: Any) -> TracedTensor:
        """Traces ``scalar_tensor``, which ``x[...] = number`` calls on all devices but the CPU."""
        key = repr(args[0]), *kwargs.items()
        value = torch.scalar_tensor(args[0], dtype=kwargs.get("dtype"), device="cpu").item()
        return self.number(key, lambda: self.plain(op, args, kwargs), value)

    def number(self, key: Any, make: Callable[[], TracedTensor], value: Any) -> TracedTensor:
        """Returns a tensor that stands for the plain number ``value``. Equal keys share one node.

        ``make``: makes the tensor and its node, if there is none with this ``key``.
        """
        if key not in self.numbers:
            first = make()
            self.numbers[key] = first.node, first.metadata
            self.number_of[first.node] = value
        node, m = self.numbers[key]
        return self.new(m, node)

    def constant(self, t: Tensor) -> TracedTensor:
        name = f"_constant_{self.constants}"
        self.constants += 1
        self.module.register_buffer(name, t)
        node = self.graph.create_node("get_attr", name)
        traced = self.new(metadata_of(t), node)
        node.meta = dict(traced.metadata.for_node)
        self.values[node] = t
        return traced

    def depends_on_values(self, op: Any, args: Any, kwargs: Any) -> Any:
        """Runs an op whose result, or the shape of its result, depends on values of tensors.

        Tensors that the op returns become constants of the graph. Refuses to trace the call if the values
        depend on anything but numbers in the model's code.
        """
        _, a, k = self.read_all(op, args, kwargs)
        a, k = fx.node.map_arg((a, k), self.value)
        out = op(*a, **k)
        if isinstance(out, Tensor):
            return self.constant(out)
        return [self.constant(t) for t in out] if isinstance(out, list | tuple) else out

    def value(self, node: fx.Node) -> Any:
        """Computes the value of a node that depends only on numbers in the model's code.

        Refuses to trace the call if the node depends on anything else.
        """
        stack = [node]
        while stack:
            n = stack[-1]
            waits = [i for i in n.all_input_nodes if i not in self.values]
            if n in self.values or waits:
                stack = [*stack, *waits] if n not in self.values else stack[:-1]
                continue
            if n.op != "call_function":
                refuse("the call reads the value of a tensor, or a shape depends on it")
            _refuse_random(n.target)
            a, k = fx.node.map_arg((n.args, n.kwargs), self.values.__getitem__)
            self.values[n] = n.target(*a, **k)
        return self.values[node]

    def indexed(self, op: Any, args: Any, kwargs: Any) -> Any:
        """Traces ``x[...]`` with tensors as indices. Constant indices take the place of a bool mask.

        How many elements a mask selects depends on its values, so the mask must be known in the trace.
        """
        indices: list[Any] = []
        for i in args[1]:
            if i is not None and i.dtype in (torch.bool, torch.uint8):
                mask = self.value(self.node_of(self.of(i)))
                indices += [self.constant(where.contiguous()) for where in mask.nonzero().unbind(1)]
            else:
                indices.append(i)
        return self.plain(op, (args[0], indices, *args[2:]), kwargs)

    # ---- writes

    def write(self, op: Any, args: Any, kwargs: Any) -> Any:
        if op in FILLS and not kwargs and self.waits(*args):
            return args[0]
        _refuse_random(op)
        functional = writes.functional_form(op)
        if functional is None:
            refuse(f"the call runs {op}, which writes in a way that the trace does not know")
        targets = []
        kwargs = dict(kwargs)
        for position, name, is_keyword in writes.written(op):
            targets.append(kwargs.pop(name) if is_keyword else args[position])
        if functional is aten.copy.default:
            values = [self.copied(self.of(args[0]), args[1])]
        else:
            out = self.plain(functional, args, kwargs)
            values = out if isinstance(out, list) else [out]
        for target, v in zip(targets, values, strict=True):
            self.store(self.of(target), v, op)
        return targets[0] if len(targets) == 1 else targets

    def waits(self, x: Tensor, source: Any = 0, *more: Any) -> bool:
        """Collects a write of ``source`` into x, if ``source`` is a number and x a newly made tensor.

        Collected writes get their nodes when an op reads x. Returns False if this write needs a node now.
        """
        if type(x) is not TracedTensor:
            return False
        base = x.owner
        if base.fills is None or not is_new(base) or x.memory is not None:
            return False
        if type(source) is TracedTensor:
            source = self.number_of.get(source.owner.node)
        if not isinstance(source, int | float):
            return False
        base.fills.append(Fill(x.path, source))
        base.version += 1
        return True

    def may_be_late(self, x: Any) -> bool:
        """True if a view of x should get its node only when an op reads the view.

        This is so if x is made from one number, or if writes into x were collected: then most views of x are
        never read.
        """
        base = x.owner if type(x) is TracedTensor else None
        return base is not None and (bool(base.fills) or base.node in self.number_of)

    def write_fills(self, base: TracedTensor) -> None:
        """Makes nodes, or one constant, from the writes into ``base`` that were collected."""
        if not base.fills:
            return
        fills, base.fills = base.fills, None
        if len(fills) <= MOST_NODES:
            for path, number in fills:
                x = self.late(base, path) if path else base
                self.write(aten.fill_.Scalar, (x, number), {})
            return
        found, device = [self.constant(t) for t in filled(base.node, fills) if t is not None], base.device
        if device.type != "cpu":
            found = [self.plain(aten._to_copy.default, (t,), {"device": device}) for t in found]
        rows, *which = found
        base.node = (self.plain(aten.index_select.default, (rows, 0, *which), {}) if which else rows).node

    def copied(self, t: TracedTensor, source: Tensor) -> TracedTensor:
        """Converts ``source`` to the dtype, shape and device of ``t``, as a write into ``t`` does."""
        x, m = self.of(source), t.metadata
        if x.metadata.dtype is not m.dtype or x.metadata.device != m.device:
            x = self.plain(aten._to_copy.default, (x,), {"dtype": m.dtype, "device": m.device})
        if x.metadata.shape != m.shape:
            x = self.new(m, self.emit(aten.expand.default, (self.node_of(x), m.shape), {}, m))
        return x

    def store(self, t: TracedTensor, v: TracedTensor, op: Any) -> None:
        """Gives ``t`` the value of ``v`` after a write, so that all tensors that share its memory change too.

        If ``t`` is a view, this method also makes nodes for the new value of the view's base.
        """
        if v.metadata.shape != t.metadata.shape:
            refuse(f"the call runs {op}, which changes a shape")
        if v.metadata.dtype is not t.metadata.dtype:
            v = self.plain(aten._to_copy.default, (v,), {"dtype": t.metadata.dtype})
        node = self.node_of(v)
        if t.memory is not None:
            t.memory.write()
        base = t.base
        self.write_fills(t.owner)
        if base is None:
            t.node = node
            t.version += 1
            return
        before, known = [base.node], [base.metadata]
        for step in t.path[:-1]:
            before.append(self.emit(step.op, (before[-1], *step.args), step.kwargs, step.result))
            known.append(step.result)
        of_base = node
        for step, n, m in zip(reversed(t.path), reversed(before), reversed(known), strict=False):
            of_base = self.emit(*writes.inverse(step, n, m, of_base), {}, m)
        base.node = of_base
        base.version += 1
        t.node, t.version = node, base.version

    # ---- the end of a trace

    def result(self, r: Any) -> Any:
        if isinstance(r, Tensor):
            return self.node_of(self.of(r))
        if not isinstance(r, _CONSTANTS):
            raise Untraceable(f"the call returns a {type(r).__name__}")
        return r

    def add_writes(self) -> None:
        """Adds nodes at the end of the graph for the call's writes into arguments, parameters and buffers.

        Each node writes the value that such a tensor has after the call.
        """
        writing = [source for source in self.sources if source.traced.version]
        if not writing:
            return
        shared = Counter(private.storage_of(source.real) for source in self.sources)
        for real, t, placeholder in writing:
            if any(real is other for other in self.others):
                raise Untraceable(
                    "the call writes into a tensor that is no argument and no buffer of the model"
                )
            if shared[private.storage_of(real)] > 1:
                raise Untraceable("the call writes into a tensor that shares its memory with another one")
            self.emit(aten.copy_.default, (placeholder, t.node), {}, t.metadata)


# For each op that makes a lazy conjugate or negative view: the op that computes the values at once. The graph
# has no lazy views.
_VALUES_OF = {
    aten._conj.default: aten.conj_physical.default,
    aten._neg_view.default: aten.neg.default,
}


def _ignored(tracer: Tracer, op: Any, args: Any, kwargs: Any) -> None:
    return None


def _run(tracer: Tracer, op: Any, args: Any, kwargs: Any) -> Any:
    """Runs an op that sets a mark for a profiler. It computes nothing, so it becomes no node."""
    return op(*args, **kwargs)


def _same(tracer: Tracer, op: Any, args: Any, kwargs: Any) -> Any:
    return args[0]


def _refuse_random(op: Any) -> None:
    if is_random(op):
        refuse(f"the call draws random numbers: {op}")


def _random(tracer: Tracer, op: Any, args: Any, kwargs: Any) -> Any:
    if op not in DRAWN:
        _refuse_random(op)
    return tracer.plain(op, args, kwargs)


def _is_certain(op: Any, x: TracedTensor, out: TracedTensor, args: Any, kwargs: Any) -> bool:
    """True if, whatever strides ``x`` has, ``out`` is always a view of ``x``, or always a copy."""
    if op in _CONVERSIONS:
        formats = {a for a in (*args, *kwargs.values()) if isinstance(a, torch.memory_format)}
        return not formats - {torch.preserve_format} or (out.dtype, out.device) != (x.dtype, x.device)
    return op is not aten.contiguous.default and _splits(x.metadata.shape, out.metadata.shape)


def _splits(shape: tuple[int, ...], to: tuple[int, ...]) -> bool:
    """True if a reshape from ``shape`` to ``to`` joins no axes. It is then a view for all strides."""
    if 0 in to:
        return True
    rest = [size for size in to if size > 1]
    for size in shape:
        while size > 1:
            if size % rest[0]:
                return False
            size //= rest.pop(0)
    return True


def _by_strides(tracer: Tracer, op: Any, args: Any, kwargs: Any) -> Any:
    refuse("the call uses as_strided, whose result depends on where values lie in memory")


_CONVERSIONS = {aten.to.device, aten.to.dtype, aten.to.other, aten.to.dtype_layout}
_handlers: dict[Any, Any] = {
    **dict.fromkeys(_CONVERSIONS, Tracer.view_or_copy),
    aten.contiguous.default: Tracer.view_or_copy,
    aten.flatten.using_ints: Tracer.view_or_copy,
    aten.ravel.default: Tracer.view_or_copy,
    aten.reshape.default: Tracer.view_or_copy,
    aten.reshape_as.default: Tracer.view_or_copy,
    aten.linear.default: Tracer.plain,
    aten.layer_norm.default: Tracer.plain,
    aten.group_norm.default: Tracer.plain,
    aten.rms_norm.default: Tracer.plain,
    aten.scaled_dot_product_attention.default: Tracer.attention,
    aten.lift_fresh.default: Tracer.literal,
    aten.scalar_tensor.default: Tracer.scalar,
    aten.detach.default: Tracer.alias,
    aten.alias.default: Tracer.alias,
    aten.detach_.default: _same,
    aten.split.Tensor: Tracer.parts,
    aten.split_with_sizes.default: Tracer.parts,
    aten.unbind.int: Tracer.parts,
    aten.as_strided.default: _by_strides,
    aten.resolve_conj.default: Tracer.resolved,
    aten.resolve_neg.default: Tracer.resolved,
    aten.index.Tensor: Tracer.indexed,
    aten.cudnn_convolution.default: Tracer.cudnn_convolution,
    aten.native_batch_norm.default: Tracer.batch_norm,
    aten.cudnn_batch_norm.default: Tracer.batch_norm,
    aten.miopen_batch_norm.default: Tracer.batch_norm,
    aten._weight_norm_interface.default: Tracer.weight_norm,
    torch.ops.profiler._record_function_enter_new.default: _run,
    torch.ops.profiler._record_function_exit._RecordFunction: _run,
    aten._assert_async.default: _ignored,
    aten._assert_async.msg: _ignored,
    aten._assert_tensor_metadata.default: _ignored,
}


def _handler(op: Any) -> Callable[..., Any]:
    schema = private.schema_of(op)
    if private.is_composite(op):
        return Tracer.composite
    if schema.is_mutable:
        return Tracer.write
    if is_random(op):
        return _random
    if torch.Tag.data_dependent_output in op.tags or torch.Tag.dynamic_output_shape in op.tags:
        return Tracer.depends_on_values
    return Tracer.view if any(r.alias_info is not None for r in schema.returns) else Tracer.plain
