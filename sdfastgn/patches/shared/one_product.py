"""One matrix product for the keys and values of all cross-attentions in one call of a model.

Every cross-attention of a UNet makes keys and values of the same prompt. A product over so few rows
is bound by its launch and by reading its weights: SDXL's 70 products of 154 x 2048 x 2560 are 70
launches; together they are one, which reads the same weights at the speed of memory. So the weights
of all lie side by side, by the rules of ``packed_weights.py``. The first attention that is called
computes for all, and each takes its columns.

Nothing can be stale, because nothing outlives the call. Hooks on the model begin and end it, after
exceptions too; a call that KeyboardInterrupt breaks off ends when the thread's next one begins, or
with the model. Pipelines pass the same prompt at each step, and weights may be written in between:
the next call computes again.

Each attention takes its columns once per call, and only if its layers, parameters, input, stream
and capture state are unchanged. Otherwise it computes by itself; so does every attention that is
called outside of a call of the whole model. There is no product if any attention of the model is
not what it was (LoRA, hooks, moved, replaced). An attention that has taken its columns and asks
again, as when a forward is captured after a warm-up, starts another product. A product is given up
as soon as all have taken their columns, and else with the call.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sdfastgn.patches.core.statistics import state_of
from sdfastgn.patches.shared.packed_weights import (
    Parameters,
    is_one_product,
    joined,
    pack_together,
    plain_parameters,
)

__all__ = ["begin_call", "dissolve", "end_call", "form", "is_formed", "pack", "pack_after_move", "take"]

# Above this number of rows the weights are not most of what is read, and the result is large.
_MAX_ROWS = 1024
# Products in one call: one to warm up, one of a capture that fails, one of the capture after it.
_MAX_PRODUCTS = 3


class _Group:
    """The cross-attentions of one model that may share a product, in the order of its modules."""

    __slots__ = ("__weakref__", "_attentions", "_type", "model")

    def __init__(self, model: nn.Module, attentions: Sequence[nn.Module]) -> None:
        self.model = weakref.ref(model)
        self._attentions = [weakref.ref(attention) for attention in attentions]
        self._type = type(attentions[0])

    def attentions(self) -> list[Any]:
        """Those that are not gone."""
        return [attention for reference in self._attentions if (attention := reference()) is not None]

    def parameters(self, attentions: Sequence[Any]) -> Parameters | None:
        """Those of to_k and to_v of ``attentions``; None if one is no longer fused, or not plain."""
        if any(type(attention) is not self._type for attention in attentions):
            return None
        return plain_parameters(linear for a in attentions for linear in (a.to_k, a.to_v))

    def whole(self) -> tuple[list[Any], Parameters] | None:
        """All attentions and their parameters; None if they may not share."""
        attentions = self.attentions()
        is_whole = len(attentions) == len(self._attentions)
        parameters = self.parameters(attentions) if is_whole else None
        return None if parameters is None else (attentions, parameters)

    def pack(self) -> None:
        """Put the weights of all side by side, if they are all in one place."""
        whole = self.whole()
        if whole is not None:
            pack_together(*whole)

    def ends_with(self, attention: nn.Module) -> bool:
        return self._attentions[-1]() is attention

    def product(self, x: Tensor) -> _Product | None:
        """Keys and values of all; None if that is not what calling each comes to, or of no use."""
        if x.is_inference() or x.dim() != 3 or not 0 < x.shape[0] * x.shape[1] <= _MAX_ROWS:
            return None
        whole = self.whole()
        if whole is None or not is_one_product(x, whole[1]):
            return None
        together = joined(whole[0][0], whole[1])
        return None if together is None else _Product(self, x, F.linear(x, *together), *whole)


class _Share(NamedTuple):
    """One attention's part of a product, and what must not have changed when it is taken."""

    parameters: list[Tensor]
    stamps: list[tuple[Any, ...]]
    start: int
    end: int


class _Product:
    """What was computed of ``x``, until all of it is taken.

    It keeps x alive, so no other tensor gets its id.
    """

    def __init__(
        self, group: _Group, x: Tensor, output: Tensor, attentions: list[Any], parameters: Parameters
    ) -> None:
        self._group, self._x, self._state = group, x, _state_of(x)
        self._output: Tensor | None = output
        self._rest: dict[Any, _Share] = {}
        end = 0
        for i, attention in enumerate(attentions):
            own = [p for part in parameters for p in part[2 * i : 2 * i + 2]]  # of to_k and to_v
            start, end = end, end + sum(weight.shape[0] for weight in own[:2])
            self._rest[attention] = _Share(own, list(map(_stamp, own)), start, end)

    def is_over(self, attention: nn.Module, x: Tensor) -> bool:
        """True if nobody will take anything, or the forward runs again.

        That is: all have taken theirs, or ``attention`` has, or x or where it runs has changed.
        """
        if self._output is None or attention not in self._rest:
            return True
        return x is self._x and _state_of(x) != self._state

    def take(self, attention: nn.Module, x: Tensor) -> Tensor | None:
        if x is not self._x:
            return None
        share, output = self._rest.pop(attention, None), self._output
        if not self._rest:
            self._output = None
        parameters = self._group.parameters((attention,))
        if share is None or output is None or parameters is None or not is_one_product(x, parameters):
            return None
        now = [*parameters.weights, *parameters.biases]
        same = len(now) == len(share.parameters) and all(
            a is b for a, b in zip(now, share.parameters, strict=True)
        )
        return (
            output[..., share.start : share.end] if same and list(map(_stamp, now)) == share.stamps else None
        )


def _state_of(x: Tensor) -> tuple[Any, ...]:
    return *state_of(x), torch.is_inference_mode_enabled()


def _stamp(parameter: Tensor) -> tuple[Any, ...]:
    return parameter._version, parameter.data_ptr(), parameter.dtype


# --- groups: in no ``__dict__``, so there is nothing to copy, pickle or take away again -----------

_groups: weakref.WeakKeyDictionary[nn.Module, _Group | None] = weakref.WeakKeyDictionary()
_group_of: weakref.WeakKeyDictionary[nn.Module, _Group] = weakref.WeakKeyDictionary()


def is_formed(model: nn.Module) -> bool:
    """True after ``form(model)``; false before, as for a copy."""
    return model in _groups


def form(model: nn.Module, attentions: Iterable[Any]) -> None:
    """Remember which of ``attentions``, modules below ``model``, may share a product.

    Moves nothing.
    """
    members = [attention for attention in attentions if _can_share(attention)]
    # A product is of one tensor, which has one width.
    members = [m for m in members if m.to_k.in_features == members[0].to_k.in_features]
    _groups[model] = _Group(model, members) if len(members) > 1 else None
    group = _groups[model]
    if group is not None:
        _group_of.update((member, group) for member in members)


def _can_share(attention: Any) -> bool:
    """False if queries are as wide: they may read the same tensor, and join keys and values themselves.

    A layer that other code has wrapped may have no width at all.
    """
    width = getattr(attention.to_k, "in_features", None)
    return width is not None and width != getattr(attention.to_q, "in_features", None)


def dissolve(model: nn.Module) -> None:
    """Forget the group of ``model``; each attention's weights stay where they are."""
    group = _groups.pop(model, None)
    for attention in () if group is None else group.attentions():
        _group_of.pop(attention, None)


def pack(part: nn.Module) -> None:
    """Put the weights of a model, or of the model of an attention, side by side where possible.

    Not in a call.
    """
    group = _groups.get(part) or _group_of.get(part)
    if group is not None:
        group.pack()


def pack_after_move(attention: nn.Module) -> None:
    """``pack``, if ``attention`` is the last of its model: all others have moved then."""
    group = _group_of.get(attention)
    if group is not None and group.ends_with(attention):
        group.pack()


def take(attention: nn.Module, x: Tensor) -> Tensor | None:
    """Keys and values that ``attention`` makes of ``x``; None if it has to compute them by itself.

    Shapes: x (N, S, C'), result (N, S, 2C), keys first. Layout: columns of a wider tensor, not to
    be written to.
    """
    call, group = _running.call, _group_of.get(attention)
    if call is None or group is None or group.model() is not call.model():
        return None
    if call.count == 0 or (call.product is not None and call.product.is_over(attention, x)):
        call.product = group.product(x) if call.count < _MAX_PRODUCTS else None
        call.count += 1
    return None if call.product is None else call.product.take(attention, x)


# --- calls ----------------------------------------------------------------------------------------


class _Call:
    """One call of a model, from its pre-hook to its hook."""

    def __init__(self, model: nn.Module) -> None:
        self.product: _Product | None = None  # the last one
        self.count = 0  # how many there were
        own = weakref.ref(self)
        # A call that KeyboardInterrupt broke off keeps no weights of a model that is gone.
        self.model = weakref.ref(model, lambda _: _forget_product(own()))


def _forget_product(call: _Call | None) -> None:
    if call is not None:
        call.product = None


class _Running(threading.local):
    """The call that began last in this thread.

    A call within a call ends the sharing in the outer one.
    """

    call: _Call | None = None


_running = _Running()


def begin_call(model: nn.Module) -> None:
    """From here on attentions of ``model`` share, in this thread.

    What a broken-off call left goes.
    """
    # With gradients checkpoints may run layers again outside of the call, with other rounding.
    _running.call = None if torch.is_grad_enabled() else _Call(model)


def end_call(model: nn.Module) -> None:
    if _running.call is not None and _running.call.model() is model:
        _running.call = None
