"""Turns in-place ops into ops without writes, as the graph of a trace needs them.

For an in-place op, this file finds the op that returns the same values as a new tensor. For a write into a
view of a tensor, it finds the op that computes the new value of the whole tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from sdfastgn.kernels.common.private import schema_of
from sdfastgn.plans.trace.refusals import refuse
from sdfastgn.plans.trace.tensors import Metadata, Step

aten = torch.ops.aten
# Ops that change the shape, strides or memory of a tensor in place, and not just its values. Calls with such
# ops are not traced.
_RESHAPERS = {
    "resize_",
    "resize_as_",
    "set_",
    "unsqueeze_",
    "squeeze_",
    "transpose_",
    "t_",
    "swapaxes_",
    "swapdims_",
    "as_strided_",
    "rename_",
}


def _writes(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


@functools.cache
def written(op: Any) -> tuple[tuple[int, str, bool], ...]:
    """Lists (position, name, True if keyword-only) for each argument that ``op`` writes into."""
    arguments = schema_of(op).arguments
    return tuple((i, a.name, a.kwarg_only) for i, a in enumerate(arguments) if _writes(a))


@functools.cache
def functional_form(op: Any) -> Any:
    """Returns the op that computes what ``op`` writes, but as a new tensor. None if there is none.

    The returned op takes the same arguments, except ``out``. For example, ``aten.add_.Tensor`` gives
    ``aten.add.Tensor``.
    """
    schema = schema_of(op)
    namespace, _, name = schema.name.partition("::")
    if namespace != "aten" or name in _RESHAPERS:
        return None
    targets = written(op)
    is_out = all(is_keyword for _, _, is_keyword in targets)
    if not is_out:
        if len(targets) != 1 or targets[0][0] != 0 or not name.endswith("_"):
            return None
        name = name[:-1]
    packet = getattr(aten, name, None)
    for overload in packet.overloads() if packet is not None else ():
        found = getattr(packet, overload)
        other = schema_of(found)
        returns = [str(r.type) for r in other.returns]
        if (
            not other.is_mutable
            and _arguments(other) == _arguments(schema)
            and returns == ["Tensor"] * len(targets)
        ):
            return found
    return None


def _arguments(schema: Any) -> list[tuple[str, str]]:
    return [(a.name, str(a.type)) for a in schema.arguments if not (a.kwarg_only and _writes(a))]


# ---- the new value of a tensor after a write into a view of it

_Inverse = Callable[[Step, fx.Node, Metadata, fx.Node], tuple[Any, tuple[Any, ...]]]


def inverse(step: Step, before: fx.Node, m: Metadata, v: fx.Node) -> tuple[Any, tuple[Any, ...]]:
    """Returns (op, arguments) that compute the new value of a tensor after a write into a view of it.

    Args:
        step: the op that makes the view from the tensor.
        before: the tensor's value before the write.
        m: the tensor's metadata.
        v: the value that was written into the whole view.
    """
    found = _INVERSES.get(step.op)
    if found is None:
        refuse(f"the call writes through {step.op}")
    return found(step, before, m, v)


def _reshaped(step: Step, before: fx.Node, m: Metadata, v: fx.Node) -> tuple[Any, tuple[Any, ...]]:
    return aten.view.default, (v, m.shape)


def _permuted(step: Step, before: fx.Node, m: Metadata, v: fx.Node) -> tuple[Any, tuple[Any, ...]]:
    dims = [d % len(m.shape) for d in step.args[0]]
    return aten.permute.default, (v, [dims.index(i) for i in range(len(dims))])


def _expanded(step: Step, before: fx.Node, m: Metadata, v: fx.Node) -> tuple[Any, tuple[Any, ...]]:
    if step.result.shape != m.shape:
        refuse("the call writes into an expanded tensor")
    return aten.view.default, (v, m.shape)


def _again(op: Any) -> _Inverse:
    """Makes a function that computes a tensor from a new value of its view, by calling ``op`` on the view.

    ``op`` undoes the op that makes the view. ``transpose``, for example, undoes itself.
    """
    return lambda step, before, m, v: (op, (v, *step.args))


def _scattered(op: Any) -> _Inverse:
    return lambda step, before, m, v: (op, (before, v, *step.args))


_INVERSES: dict[Any, _Inverse] = {
    **dict.fromkeys(
        (
            aten.view.default,
            aten.unsqueeze.default,
            aten.squeeze.default,
            aten.squeeze.dim,
            aten.squeeze.dims,
        ),
        _reshaped,
    ),
    aten.permute.default: _permuted,
    aten.transpose.int: _again(aten.transpose.int),
    aten.t.default: _again(aten.t.default),
    aten.conj_physical.default: _again(aten.conj_physical.default),
    aten.neg.default: _again(aten.neg.default),
    aten.slice.Tensor: _scattered(aten.slice_scatter.default),
    aten.select.int: _scattered(aten.select_scatter.default),
    aten.diagonal.default: _scattered(aten.diagonal_scatter.default),
    aten.expand.default: _expanded,
    aten.view_as_real.default: _again(aten.view_as_complex.default),
    aten.view_as_complex.default: _again(aten.view_as_real.default),
}
