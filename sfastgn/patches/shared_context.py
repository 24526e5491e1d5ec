"""One matrix product for the keys and values of all cross-attentions that read the same tensor in one call of a model.

Every cross-attention of a UNet is given the same encoder_hidden_states, a prompt's 77 tokens. A product over so few rows is bound by
reading its weights and by its launch: SDXL's 70 products of 154 x 2048 x 2560 are 70 launches, together they are one that reads the same
weights at the speed of memory. So the weights of all lie side by side (``packing.py``, by whose rules they stay what they are), the first
attention that is called computes for all, and each takes its columns.

Nothing can be stale, because nothing outlives the call: hooks on the model (``cross_attention.py``) begin and end it. Weights may be
written to between two calls with the same tensor, as pipelines pass the same prompt at each step; the next call computes anew. Within a
call a slice is given out once, to the attention that it was computed for, if that still has the same plain layers with the same
parameters in the same versions, and if the tensor is the same object with the same version, on the same stream, and as much in a capture.
Whoever gets nothing runs a product of its own; so does every call that is not the whole model's, as of one of its blocks.

There is one product a call, of the first tensor that comes; another's would be computed for a few. It is given up as soon as all have taken
their slices, and else with the call. If any of the attentions is not what it was (LoRA, hooks, moved, replaced), there is none.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sfastgn.kernels.dispatch import is_untraced, wants_gradient
from sfastgn.patches.packing import joined, pack_together, plain_parameters
from sfastgn.patches.statistics import state_of

__all__ = [
    "begin_call",
    "dissolve",
    "end_call",
    "form_groups",
    "groups_of",
    "pack_group_behind",
    "pack_groups",
    "pays",
    "take",
]

_MAX_ROWS = 1024
# In one call: of a capture that fails, of a run to warm up, and of the capture after it. A bound for who writes to the tensor.
_MAX_PRODUCTS = 3


def pays(rows: int, members: int) -> bool:
    """True if one product of ``rows`` rows should be computed for ``members`` attentions.

    Few rows are few tiles, and the weights are most of what is read. Many fill a GPU one product at a time, and leave much to be kept.
    """
    return members > 1 and 0 < rows <= _MAX_ROWS


class _Group:
    """Attentions of one model, with keys and values of the same number of input channels, in the order of the model's modules."""

    __slots__ = ("__weakref__", "_kind", "_members")

    def __init__(self, members: Sequence[nn.Module]) -> None:
        self._kind = type(members[0])
        self._members = [weakref.ref(member) for member in members]

    def __len__(self) -> int:
        return len(self._members)

    def members(self) -> list[Any] | None:
        """All of them; None if one is gone, or is no longer fused."""
        found = [reference() for reference in self._members]
        return found if all(type(member) is self._kind for member in found) else None

    def pack(self) -> None:
        """Puts the weights of all side by side, if they are all in one place."""
        members = self.members()
        if members is not None:
            pack_together(members, _linears(members))

    def ends_with(self, attention: nn.Module) -> bool:
        return self._members[-1]() is attention

    def product(self, context: Tensor) -> _Product | None:
        """Keys and values of ``context`` for all, or None if that is not what calling each comes to, or not of use."""
        if context.dim() != 3 or not pays(context.shape[0] * context.shape[1], len(self)) or context.is_inference():
            return None
        members = self.members()
        found = None if members is None else plain_parameters(_linears(members))
        if members is None or found is None or torch.is_autocast_enabled(context.device.type):
            return None
        params = (*found[0], *found[1])
        if (context.dtype, context.shape[-1]) != (params[0].dtype, params[0].shape[-1]):
            return None
        if wants_gradient(context, params) or not is_untraced(context, params):
            return None
        together = joined(members[0], *found)
        return None if together is None else _Product(context, F.linear(context, *together), members, found)


class _Product:
    """What was computed of ``context``, until all of it is taken. It keeps the context alive: no other has its id."""

    def __init__(
        self, context: Tensor, output: Tensor, members: list[Any], found: tuple[list[Tensor], list[Tensor]]
    ) -> None:
        self._context, self._state = context, _state_of(context)
        self._output: Tensor | None = output
        # Attention -> its parameters, what must not have changed in them, and its columns.
        self._rest: dict[Any, tuple[list[Tensor], list[Any], int, int]] = {}
        weights, biases = found
        end = 0
        for i, member in enumerate(members):
            pair = slice(2 * i, 2 * i + 2)
            params = [*weights[pair], *biases[pair]]
            start, end = end, end + sum(weight.shape[0] for weight in weights[pair])
            self._rest[member] = params, list(map(_stamp, params)), start, end

    def is_over(self, context: Tensor) -> bool:
        """True if nobody will take anything: all have, or the context has changed, or runs on another stream or in another capture."""
        return self._output is None or (context is self._context and _state_of(context) != self._state)

    def take(self, member: Any, context: Tensor) -> Tensor | None:
        if context is not self._context:
            return None
        place = self._rest.pop(member, None)
        output = self._output
        if not self._rest:
            self._output = None
        found = plain_parameters((member.to_k, member.to_v))
        if place is None or output is None or found is None or torch.is_autocast_enabled(context.device.type):
            return None
        params, stamps, start, end = place
        now = (*found[0], *found[1])
        if len(now) != len(params) or not all(a is b for a, b in zip(now, params, strict=True)):
            return None
        if list(map(_stamp, now)) != stamps or wants_gradient(context, now) or not is_untraced(context, now):
            return None
        return output[..., start:end]


def _state_of(context: Tensor) -> tuple[Any, ...]:
    return *state_of(context), torch.is_inference_mode_enabled()


def _stamp(parameter: Tensor) -> tuple[Any, ...]:
    return parameter._version, parameter.data_ptr(), parameter.dtype


def _linears(members: Iterable[Any]) -> list[nn.Module]:
    return [linear for member in members for linear in (member.to_k, member.to_v)]


# By model, and by attention. In no __dict__: nothing to copy, pickle or take away again.
_groups: weakref.WeakKeyDictionary[nn.Module, tuple[_Group, ...]] = weakref.WeakKeyDictionary()
_group_of: weakref.WeakKeyDictionary[nn.Module, _Group] = weakref.WeakKeyDictionary()


def groups_of(model: nn.Module) -> tuple[_Group, ...] | None:
    """What ``form_groups`` has made of ``model``; None before, as for a copy."""
    return _groups.get(model)


def form_groups(model: nn.Module, attentions: Iterable[Any]) -> None:
    """Remembers which of ``attentions``, parts of ``model``, may share a product. Nothing is moved."""
    by_channels: dict[Any, list[Any]] = {}
    for attention in attentions:
        # Where queries read as many channels, they may read the same tensor, and be in one product with keys and values.
        channels, own = (getattr(linear, "in_features", None) for linear in (attention.to_k, attention.to_q))
        if channels != own:
            by_channels.setdefault((type(attention), channels), []).append(attention)
    found = tuple(_Group(members) for members in by_channels.values() if len(members) > 1)
    _groups[model] = found
    for group in found:
        _group_of.update((member, group) for member in group.members() or ())


def dissolve(model: nn.Module) -> None:
    """Forgets the groups of ``model``; each attention's weights stay where they are."""
    for group in _groups.pop(model, ()):
        for member in group.members() or ():
            _group_of.pop(member, None)


def pack_groups(model: nn.Module) -> None:
    """Puts the weights of each group side by side, where that is possible. Not in a call."""
    for group in _groups.get(model, ()):
        group.pack()


def pack_group_behind(attention: nn.Module) -> None:
    """The same when ``attention`` has moved, if it is the last of a group: when a model moves, all others have moved then."""
    group = _group_of.get(attention)
    if group is not None and group.ends_with(attention):
        group.pack()


# --- calls ---------------------------------------------------------------------------------------------------------------------


class _Call:
    """One call of a model, from its pre-hook to its hook."""

    def __init__(self, model: nn.Module, groups: tuple[_Group, ...]) -> None:
        self.model = weakref.ref(model)
        self.groups = groups
        self.products: dict[_Group, tuple[_Product | None, int]] = {}  # the last one, and how many there were


class _Running(threading.local):
    """The call that began last in this thread. Only one: a call within a call ends the sharing in the outer one."""

    call: _Call | None = None


_running = _Running()


def begin_call(model: nn.Module) -> None:
    """From here on attentions of ``model`` share, in this thread. What a call that was broken off has left goes."""
    # With gradients, some layers may be run again by checkpoints, outside of the call: their products have to be the same.
    groups = None if torch.is_grad_enabled() else _groups.get(model)
    _running.call = _Call(model, groups) if groups else None


def end_call(model: nn.Module) -> None:
    if _running.call is not None and _running.call.model() is model:
        _running.call = None


def take(attention: nn.Module, context: Tensor) -> Tensor | None:
    """Keys and values of ``context``, (N, S, both), as ``attention`` computes them; None if it has to by itself.

    Shapes: context (N, S, C). Layout: columns of a wider tensor, not to be written to.
    """
    call = _running.call
    if call is None:
        return None
    group = _group_of.get(attention)
    if group is None or group not in call.groups:
        return None
    product, made = call.products.get(group, (None, 0))
    # A forward that runs more than once in a call, to warm up and to be captured, gets a product each time.
    if made == 0 or (product is not None and product.is_over(context)):
        product = group.product(context) if made < _MAX_PRODUCTS else None
        call.products[group] = product, made + 1
    return None if product is None else product.take(attention, context)
