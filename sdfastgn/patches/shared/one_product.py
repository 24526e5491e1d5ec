"""One matrix product for all parts of a model that read the same tensor in one call of it.

Every cross-attention of a UNet makes keys and values of the same prompt, every ResNet block projects the same time embedding. A product
over so few rows is bound by reading its weights and by its launch: SDXL's 70 products of 154 x 2048 x 2560 are 70 launches, together
they are one that reads the same weights at the speed of memory. So the weights of all lie side by side, by the
rules of ``packed_weights.py``. The first part that is called computes for all, and each takes its columns.

Nothing can be stale, because nothing outlives the call: hooks on the model begin and end it, after exceptions too (a call that
KeyboardInterrupt breaks off ends when the thread's next one begins, or with the model). Weights may be written to between two calls
with the same tensor, as pipelines pass the same prompt at each step; the next call computes anew. Within a call a slice is given out once,
to the part that it was computed for, if that still has the same plain layers with the same parameters in the same versions, and if the
tensor is the same object with the same version, on the same stream, and as much in a capture. Whoever gets nothing computes by itself; so
does every call that is not the whole model's, as of one of its blocks.

Of each group (kind, width, activation) there is one product a call, of the first tensor that comes; another's would be computed for a few.
A forward that runs again within the call (a part that has taken its slice asks once more) gets one of its own. It is given up as soon as
all have taken their slices, and else with the call. If any of the parts is not what it was (LoRA, hooks, moved, replaced), there is
none.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from sdfastgn.kernels.common import dispatch
from sdfastgn.patches.core.hand_over import state_of
from sdfastgn.patches.shared.packed_weights import Columns, joined, pack_together

__all__ = ["Kind", "Sharing", "begin_call", "end_call"]

# In one call: of a capture that fails, of a run to warm up, and of the capture after it. A bound for who writes to the tensor.
_MAX_PRODUCTS = 3


class Kind(Protocol):
    """What the parts are, and what they compute of the tensor."""

    def key(self, part: Any) -> Any:
        """Hashable: parts with the same may share; None for one that cannot. Asked when groups are formed."""

    def columns(self, key: Any, parts: Sequence[Any]) -> Columns | None:
        """Parameters that are to lie side by side: lists with equally many of each part, in its order, weights (C, K) first.

        None if one of the parts is not plain, or is now something else than ``key`` says. Asked at each call: has to be quick.
        """

    def pays(self, x: Tensor, parts: int) -> bool:
        """True if one product of ``x`` should be computed for so many parts."""

    def product(self, x: Tensor, together: Sequence[Any], part: Any) -> Tensor:
        """What all compute, side by side: (..., sum of C). ``together``: of each list all as one tensor, None for an empty one."""


class _Group:
    """Parts of one model with one key, in the order of the model's modules."""

    __slots__ = ("__weakref__", "_members", "_type", "key", "kind", "model")

    def __init__(self, kind: Kind, key: Any, model: nn.Module, members: Sequence[nn.Module]) -> None:
        self.kind, self.key, self.model, self._type = kind, key, weakref.ref(model), type(members[0])
        self._members = [weakref.ref(member) for member in members]

    def __len__(self) -> int:
        return len(self._members)

    def members(self) -> list[Any]:
        """Those that are not gone."""
        return [member for reference in self._members if (member := reference()) is not None]

    def columns(self, members: Sequence[Any]) -> Columns | None:
        """The parameters of ``members``; None if one is no longer fused, or they may not share."""
        return self.kind.columns(self.key, members) if all(type(m) is self._type for m in members) else None

    def whole(self) -> tuple[list[Any], Columns] | None:
        """All members and their parameters; None if one is gone, or they may not share."""
        members = self.members()
        columns = self.columns(members) if len(members) == len(self) else None
        return None if columns is None else (members, columns)

    def pack(self) -> None:
        """Puts the weights of all side by side, if they are all in one place."""
        whole = self.whole()
        if whole is not None:
            pack_together(*whole)

    def ends_with(self, member: nn.Module) -> bool:
        return self._members[-1]() is member

    def product(self, x: Tensor) -> _Product | None:
        """What all make of ``x``, or None if that is not what calling each comes to, or not of use."""
        if x.is_inference() or not self.kind.pays(x, len(self)):
            return None
        whole = self.whole()
        if whole is None or torch.is_autocast_enabled(x.device.type):
            return None
        members, columns = whole
        params = [parameter for column in columns for parameter in column]
        if (x.dtype, x.shape[-1]) != (params[0].dtype, params[0].shape[-1]):
            return None
        if dispatch.wants_gradient(x, tuple(params)) or not dispatch.is_untraced(x, tuple(params)):
            return None
        together = joined(members[0], *columns)
        return None if together is None else _Product(self, x, together, members, columns)


class _Product:
    """What was computed of ``x``, until all of it is taken. It keeps x alive: no other has its id."""

    def __init__(
        self, group: _Group, x: Tensor, together: Sequence[Any], members: list[Any], columns: Columns
    ) -> None:
        self._group, self._x, self._state = group, x, _state_of(x)
        self._output: Tensor | None = group.kind.product(x, together, members[0])
        # Part -> its parameters, what must not have changed in them, and its columns.
        self._rest: dict[Any, tuple[list[Tensor], list[Any], int, int]] = {}
        end = 0
        for i, member in enumerate(members):
            own = [
                column[i * each : (i + 1) * each]
                for column in columns
                if (each := len(column) // len(members))
            ]
            params = [parameter for column in own for parameter in column]
            start, end = end, end + sum(weight.shape[0] for weight in own[0])
            self._rest[member] = params, list(map(_stamp, params)), start, end

    def is_over(self, member: Any, x: Tensor) -> bool:
        """True if nobody will take anything, or the forward runs again: all have, or ``member`` has, or x or where it runs has changed."""
        return (
            self._output is None or member not in self._rest or (x is self._x and _state_of(x) != self._state)
        )

    def take(self, member: Any, x: Tensor) -> Tensor | None:
        if x is not self._x:
            return None
        place = self._rest.pop(member, None)
        output = self._output
        if not self._rest:
            self._output = None
        columns = self._group.columns((member,))
        if place is None or output is None or columns is None or torch.is_autocast_enabled(x.device.type):
            return None
        params, stamps, start, end = place
        now = [parameter for column in columns for parameter in column]
        if len(now) != len(params) or not all(a is b for a, b in zip(now, params, strict=True)):
            return None
        if (
            list(map(_stamp, now)) != stamps
            or dispatch.wants_gradient(x, tuple(now))
            or not dispatch.is_untraced(x, tuple(now))
        ):
            return None
        return output[..., start:end]


def _state_of(x: Tensor) -> tuple[Any, ...]:
    return *state_of(x), torch.is_inference_mode_enabled()


def _stamp(parameter: Tensor) -> tuple[Any, ...]:
    return parameter._version, parameter.data_ptr(), parameter.dtype


class Sharing:
    """Everything of one kind that is shared, in all models. In no ``__dict__``: nothing to copy, pickle or take away again."""

    def __init__(self, kind: Kind) -> None:
        self._kind = kind
        self._groups: weakref.WeakKeyDictionary[nn.Module, tuple[_Group, ...]] = weakref.WeakKeyDictionary()
        self._group_of: weakref.WeakKeyDictionary[nn.Module, _Group] = weakref.WeakKeyDictionary()

    def groups_of(self, model: nn.Module) -> tuple[_Group, ...] | None:
        """What ``form`` has made of ``model``; None before, as for a copy."""
        return self._groups.get(model)

    def form(self, model: nn.Module, parts: Iterable[Any]) -> None:
        """Remembers which of ``parts``, modules below ``model``, may share a product. Nothing is moved."""
        by_key: dict[Any, list[Any]] = {}
        for part in parts:
            key = self._kind.key(part)
            if key is not None:
                by_key.setdefault(key, []).append(part)
        found = tuple(
            _Group(self._kind, key, model, parts) for key, parts in by_key.items() if len(parts) > 1
        )
        self._groups[model] = found
        for group in found:
            self._group_of.update((member, group) for member in group.members())

    def dissolve(self, model: nn.Module) -> None:
        """Forgets the groups of ``model``; each part's weights stay where they are."""
        for group in self._groups.pop(model, ()):
            for member in group.members():
                self._group_of.pop(member, None)

    def pack(self, model: nn.Module) -> None:
        """Puts the weights of each group of ``model`` side by side, where that is possible. Not in a call."""
        for group in self._groups.get(model, ()):
            group.pack()

    def pack_behind(self, part: nn.Module) -> None:
        """The same when ``part`` has moved, if it is the last of a group: when a model moves, all others have moved then."""
        group = self._group_of.get(part)
        if group is not None and group.ends_with(part):
            group.pack()

    def pack_again(self, part: nn.Module) -> None:
        """The same when ``part`` was restored alone and is fused again."""
        group = self._group_of.get(part)
        if group is not None:
            group.pack()

    def take(self, part: nn.Module, x: Tensor) -> Tensor | None:
        """What ``part`` computes of ``x``; None if it has to by itself.

        Shapes: x (..., K), result (..., C). Layout: columns of a wider tensor, not to be written to.
        """
        call = _running.call
        if call is None:
            return None
        group = self._group_of.get(part)
        if group is None or group.model() is not call.model():
            return None
        product, made = call.products.get(group, (None, 0))
        # A forward that runs more than once in a call, to warm up and to be captured, gets a product each time.
        if made == 0 or (product is not None and product.is_over(part, x)):
            product = group.product(x) if made < _MAX_PRODUCTS else None
            call.products[group] = product, made + 1
        return None if product is None else product.take(part, x)


# --- calls ---------------------------------------------------------------------------------------------------------------------


class _Call:
    """One call of a model, from its pre-hook to its hook."""

    def __init__(self, model: nn.Module) -> None:
        products: dict[_Group, tuple[_Product | None, int]] = {}  # the last one, and how many there were
        self.products = products
        # A call that KeyboardInterrupt has broken off, which no hook runs after, keeps no weights of a model that is gone.
        self.model = weakref.ref(model, lambda _: products.clear())


class _Running(threading.local):
    """The call that began last in this thread. Only one: a call within a call ends the sharing in the outer one."""

    call: _Call | None = None


_running = _Running()


def begin_call(model: nn.Module) -> None:
    """From here on parts of ``model`` share, in this thread. What a call that was broken off has left goes."""
    # With gradients, some layers may be run again by checkpoints, outside of the call: their products have to be the same.
    _running.call = None if torch.is_grad_enabled() else _Call(model)


def end_call(model: nn.Module) -> None:
    if _running.call is not None and _running.call.model() is model:
        _running.call = None
