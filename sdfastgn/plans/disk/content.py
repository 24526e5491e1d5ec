"""Writes the graph of a plan, and the structure of its call's result, as JSON, and reads them back.

A plan is the graph of a traced call, rewritten to kernels. Numbers, texts and None are written as JSON's own
values. Every other value is a list that begins with a word, such as ``["dtype", "float32"]``. Functions are
written by name. Only ops of aten and functions of ``plans/run/steps``, which call this package's kernels,
have names in a file. So a file can run nothing else. A file has no weights. Its tensors are small constants,
which the model's code made from numbers.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import operator
import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._ops import OpOverload
from torch.fx import Node
from torch.utils import _pytree as pytree

from sdfastgn.kernels.common.private import schema_of
from sdfastgn.plans.outcome import MARKS, Outcome, Output
from sdfastgn.plans.run import steps
from sdfastgn.plans.run.slices import Slices
from sdfastgn.plans.trace.traced import Traced

# Bytes (1 MB). A plan is not kept on disk if its constants together are larger.
_MOST_CONSTANTS = 1 << 20
_PLAIN = (type(None), bool, int, float, str)
_STEPS = {
    name: step
    for name, step in vars(steps).items()
    if isinstance(step, FunctionType) and step.__module__.startswith(steps.__name__)
}
_RECORDS = {kind.__name__: kind for kind in (steps.Group, steps.Channel, Slices, *MARKS)}
# Values of these types are written by their names in ``torch``, such as "float16". The key is the word that
# stands before the name in the file.
_NAMED = {"dtype": torch.dtype, "format": torch.memory_format, "layout": torch.layout}


class Unwritable(Exception):  # noqa: N818  # callers catch it: the plan is not kept on disk
    """The plan contains a value that cannot be written as JSON."""


def text_of(model: nn.Module, traced: Traced, graph: fx.Graph, outcome: Outcome) -> str:
    """Returns the JSON text of a plan: of ``graph``, the rewritten graph of the call ``traced`` of ``model``.

    ``outcome``: the structure of the call's result. Raises Unwritable if a value has no form in JSON.
    """
    if traced.others:
        raise Unwritable("a tensor from elsewhere")
    paths = {module: path for path, module in model.named_modules()}
    nodes = list(graph.nodes)
    numbers = {n: i for i, n in enumerate(nodes)}
    metas: dict[Any, int] = {}
    constants = {n.target: getattr(traced.graph, n.target) for n in nodes if n.op == "get_attr"}
    if sum(t.numel() * t.element_size() for t in constants.values()) > _MOST_CONSTANTS:
        raise Unwritable("large constants")

    def row(n: Node) -> list[Any]:
        target = _name_of(n.target) if n.op == "call_function" else n.target
        arguments = [_written(a, numbers) for a in (n.args, n.kwargs)]
        return [n.op, target, *arguments, _meta_of(n, metas)]

    rows = [row(n) for n in nodes]
    content = {
        "parameters": [[paths[module], kind, name] for module, kind, name in traced.parameters],
        "constants": {name: _bytes_of(t) for name, t in constants.items()},
        "meta": [_written(meta, {}) for meta in metas],
        "nodes": rows,
        "outcome": _written(outcome.recorded, {}),
        "slices": _written(traced.slices, {}),
    }
    return json.dumps(content, separators=(",", ":"))


def read(text: str, model: nn.Module, tensors: list[Tensor]) -> tuple[Traced, fx.Graph, Outcome]:
    """Reads the JSON text of a plan. Returns the trace, the rewritten graph and the structure of the result.

    ``tensors``: all tensors among the call's arguments. Raises an exception of any class if ``text_of`` did
    not write the text for this model.
    """
    content = json.loads(text)
    root, graph = fx.GraphModule({}, fx.Graph()), fx.Graph()
    nodes: list[Node] = []
    for name, made in content["constants"].items():
        root.register_buffer(name, _tensor_of(*made))
    metas = [_read(meta, []) for meta in content["meta"]]
    for op, target, args, kwargs, meta in content["nodes"]:
        what = _named(*target) if op == "call_function" else target
        n = graph.create_node(op, what, _read(args, nodes), _read(kwargs, nodes))
        if meta is not None:
            shape, dtype, device = metas[meta]
            n.meta = {"shape": shape, "dtype": dtype, "device": device}
        nodes.append(n)
    modules = dict(model.named_modules())
    parameters = [(modules[path], kind, name) for path, kind, name in content["parameters"]]
    spec = pytree.tree_flatten((tuple(tensors), {}))[1]
    out_spec = pytree.tree_flatten([0] * len(nodes[-1].args[0]))[1]
    traced = Traced(root, parameters, [], spec, out_spec, _read(content["slices"], []))
    return traced, graph, Outcome.of(_read(content["outcome"], []))


def _name_of(target: Any) -> list[str]:
    if isinstance(target, OpOverload) and target.namespace == "aten":
        return ["aten", schema_of(target).name.removeprefix("aten::"), target._overloadname]
    if target is operator.getitem:
        return ["item"]
    name = getattr(target, "__name__", "")
    if _STEPS.get(name) is not target:
        raise Unwritable(f"the function {target}")
    return ["step", name]


def _named(kind: str, name: str = "", overload: str = "") -> Callable[..., Any]:
    if kind == "aten":
        return getattr(getattr(torch.ops.aten, name), overload)
    return operator.getitem if kind == "item" else _STEPS[name]


def _meta_of(n: Node, metas: dict[Any, int]) -> int | None:
    if not n.meta:
        return None
    if n.meta.keys() != {"shape", "dtype", "device"}:
        raise Unwritable("unknown facts of a node")
    return metas.setdefault((tuple(n.meta["shape"]), n.meta["dtype"], n.meta["device"]), len(metas))


def _written(value: Any, numbers: dict[Node, int]) -> Any:
    """Turns ``value`` into values of JSON. ``numbers``: for each node of the graph, its index."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if isinstance(value, Node):
        return ["node", numbers[value]]
    if kind is Output:
        where = value.kind.__module__, value.kind.__qualname__
        return ["output", *where, _written(value.fields, numbers)]
    if _RECORDS.get(kind.__name__) is kind:
        return ["record", kind.__name__, *(_written(v, numbers) for v in value)]
    if isinstance(value, (list, tuple, torch.Size)):
        name = "list" if isinstance(value, list) else "tuple"
        return [name, *(_written(v, numbers) for v in value)]
    if isinstance(value, dict):
        return ["dict", *([_written(k, numbers), _written(v, numbers)] for k, v in value.items())]
    if kind is torch.device:
        return ["device", str(value)]
    if kind is complex:
        return ["complex", value.real, value.imag]
    for word, each in _NAMED.items():
        if kind is each:
            return [word, str(value).removeprefix("torch.")]
    raise Unwritable(f"a {kind.__name__}")


def _read(value: Any, nodes: list[Node]) -> Any:
    if not isinstance(value, list):
        return value
    word, *rest = value
    if word == "node":
        return nodes[rest[0]]
    if word in ("list", "tuple"):
        items = [_read(v, nodes) for v in rest]
        return items if word == "list" else tuple(items)
    if word == "dict":
        return {_read(k, nodes): _read(v, nodes) for k, v in rest}
    if word == "record":
        return _RECORDS[rest[0]](*(_read(v, nodes) for v in rest[1:]))
    if word == "output":
        return Output(_output_class(*rest[:2]), _read(rest[2], nodes))
    if word == "device":
        return torch.device(rest[0])
    if word == "complex":
        return complex(*rest)
    found = getattr(torch, rest[0])
    if not isinstance(found, _NAMED[word]):
        raise ValueError(f"torch.{rest[0]} is no {word}")
    return found


def _output_class(module: str, name: str) -> type:
    """Finds a class of outputs of diffusers by its name, without importing anything.

    Raises ValueError if the named object is not a class of dicts and a dataclass, as these outputs are.
    """
    found = getattr(sys.modules[module], name)
    if not (isinstance(found, type) and issubclass(found, dict) and dataclasses.is_dataclass(found)):
        raise ValueError(f"{module}.{name} is no class of outputs")
    return found


def _bytes_of(t: Tensor) -> list[Any]:
    values = t.detach().cpu().contiguous().reshape(-1)
    data = bytes(values.view(torch.uint8).tolist()) if values.numel() else b""
    return [
        base64.b64encode(data).decode(),
        str(t.dtype).removeprefix("torch."),
        list(t.shape),
        str(t.device),
    ]


def _tensor_of(data: str, dtype: str, shape: list[int], device: str) -> Tensor:
    kind = getattr(torch, dtype)
    content = bytearray(base64.b64decode(data, validate=True))
    if not content:
        return torch.empty(shape, dtype=kind, device=device)
    return torch.frombuffer(content, dtype=kind).reshape(shape).to(device)
