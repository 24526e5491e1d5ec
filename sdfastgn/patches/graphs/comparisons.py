"""Records the state of a model, and later finds out whether the state has changed.

The record of a whole model is a ``Watch`` (``watch.py``). It has an object of each class in this file. Each
class is for one kind of state, and has these methods:

- ``add`` registers a part of the model, such as a dict or a tensor, and a name for messages;
- ``freeze`` records the present values of all registered parts;
- ``same`` is True if all parts still have the recorded values. It runs at each call of the model, so its
  loops run in C;
- ``difference`` returns a sentence that describes the first change, or None if there is none. It runs only
  when a change of the model is put into words.
"""

from __future__ import annotations

import operator
import types
from collections.abc import Callable, Collection
from itertools import chain, islice
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from sdfastgn.kernels.common.private import expiring, is_expired, version_of
from sdfastgn.patches.graphs.changes import Place, changed, difference_of, tensor_in_words

# Python 3.10 has no operator.call, so there a lambda calls the function.
_call: Callable[..., Any] = getattr(operator, "call", lambda function, argument: function(argument))
_data_ptr: Callable[[Tensor], int] = Tensor.data_ptr
_content_of = operator.attrgetter("cell_contents")
_END = object()

# Number of significant decimal digits of floats in messages: more would exceed the precision of fp32.
_FLOAT_DIGITS = 6


class Types:
    """Checks that objects of a model keep their classes."""

    def __init__(self) -> None:
        self._objects: list[Any] = []
        self._names: list[str] = []

    def add(self, value: Any, name: str) -> None:
        self._objects.append(value)
        self._names.append(name)

    def freeze(self) -> None:
        self._types = list(map(type, self._objects))

    def same(self) -> bool:
        return list(map(type, self._objects)) == self._types

    def difference(self) -> str | None:
        for value, name, kind in zip(self._objects, self._names, self._types, strict=True):
            if type(value) is not kind:
                return changed(f"the class of {name}", kind, type(value))
        return None


class _Containers:
    """Base class: keeps the items of several containers in one list, to compare them later."""

    def __init__(self, is_same: Callable[[Any, Any], Any]) -> None:
        self._is_same = is_same
        # For each recorded list, tuple, set or dict, an iterable of its items, which each comparison reads.
        self._items: list[Any] = []
        self._places: list[Place | None] = []

    def add(self, items: Any, place: Place | None) -> None:
        """Record a container.

        Args:
            items: an iterable of the container's items.
            place: names the container in the text that ``difference`` returns. None if ``difference`` must
                skip this container, because another comparison reports its changes.
        """
        self._items.append(items)
        self._places.append(place)

    def freeze(self) -> None:
        self._sizes = list(map(len, self._items))
        self._kept = list(chain.from_iterable(self._items))
        # ``_is_aligned`` is False if another thread changed a container while this method read them all.
        # Then it is not known which item was in which container, and ``difference`` cannot name what changed.
        self._is_aligned = sum(self._sizes) == len(self._kept)

    def difference(self) -> str | None:
        if not self._is_aligned:
            return None
        kept = iter(self._kept)
        for place, size in zip(self._places, self._sizes, strict=True):
            old = list(islice(kept, size))
            found = place.difference(old, self._is_same) if place is not None else None
            if found is not None:
                return found
        return None


class Empty(_Containers):
    """Checks that lists, sets and dicts of a model stay empty."""

    def __init__(self) -> None:
        super().__init__(operator.is_)

    def same(self) -> bool:
        return not any(self._items)


class Identities(_Containers):
    """Checks that the items of a model's lists, tuples, sets and dicts stay the same objects."""

    def __init__(self) -> None:
        super().__init__(operator.is_)

    def freeze(self) -> None:
        super().freeze()
        self._kept.append(_END)

    def same(self) -> bool:
        # ``map`` stops at the end of the shorter list of items, and would miss items that were added or
        # removed at the end. So both lists get the marker _END as their last item.
        now = chain(chain.from_iterable(self._items), (_END,))
        return all(map(operator.is_, now, self._kept))


class Values(_Containers):
    """Checks that the items of a model's lists, tuples, sets and dicts stay equal."""

    def __init__(self) -> None:
        super().__init__(operator.eq)

    def same(self) -> bool:
        return list(chain.from_iterable(self._items)) == self._kept


class Attributes:
    """Checks that the attributes of modules stay equal, and that none is added or removed.

    Args:
        inert: names of attributes that may change.
        plain_dicts: names of attributes that are always plain dicts. Only the classes of other dicts are
            compared.
    """

    def __init__(self, inert: Collection[str], plain_dicts: Collection[str]) -> None:
        self._inert = inert
        self._plain_dicts = plain_dicts
        self._dicts: list[dict[str, Any]] = []
        self._places: list[Place] = []
        self._skipped: list[Collection[str]] = []  # for each module, names of attributes that may change
        self._getters: list[Callable[[Any], Any]] = []
        self._getter_of: dict[tuple[str, ...], Callable[[Any], Any]] = {}
        # ``_holders``: the ``__dict__`` of each module that has attributes that are dicts.
        # ``_dict_getters``: for each holder, a function that returns these dicts.
        self._holders: list[dict[str, Any]] = []
        self._dict_getters: list[Callable[[Any], Any]] = []

    def add(self, place: Place, unwatched: Collection[str] = ()) -> None:
        """Record the attributes of a module, except those that ``unwatched`` names."""
        skipped = (*self._inert, *unwatched) if unwatched else self._inert
        attributes, keys = place.container, _watched(place, skipped)
        self._dicts.append(attributes)
        self._places.append(place)
        self._skipped.append(skipped)
        self._getters.append(self._getter_of.setdefault(keys, operator.itemgetter(*keys)))
        names = [key for key in keys if isinstance(attributes[key], dict) and key not in self._plain_dicts]
        if names:  # itemgetter gets names[0] twice, because with only one name it would return no tuple
            self._holders.append(attributes)
            self._dict_getters.append(operator.itemgetter(names[0], *names))

    def freeze(self) -> None:
        self._lengths = list(map(len, self._dicts))
        self._values = list(map(_call, self._getters, self._dicts))
        self._dict_types = self._types_of_dicts()

    def same(self) -> bool:
        return (
            # Classes of dicts are compared too: equal dicts of different classes may behave differently.
            self._types_of_dicts() == self._dict_types
            and list(map(len, self._dicts)) == self._lengths
            # Each getter returns a tuple with the attributes of one module. A list of the tuples of all
            # modules would start the garbage collector. ``map`` frees each tuple at once.
            and all(map(operator.eq, map(_call, self._getters, self._dicts), self._values))
        )

    def difference(self) -> str | None:
        for place, skipped, values in zip(self._places, self._skipped, self._values, strict=True):
            before = dict.fromkeys(place.keys) | dict(zip(_watched(place, skipped), values, strict=True))
            now = {name: None if name in skipped else value for name, value in place.container.items()}
            found = difference_of(place, before, now, _is_equal)
            if found is not None:
                return found
        return None

    def _types_of_dicts(self) -> list[type]:
        return list(map(type, chain.from_iterable(map(_call, self._dict_getters, self._holders))))


def _watched(place: Place, skipped: Collection[str]) -> tuple[str, ...]:
    return tuple(key for key in place.keys if key not in skipped)


def _is_equal(old: Any, new: Any) -> Any:
    return old == new and (type(old) is type(new) or not isinstance(old, dict))


class Cells:
    """Checks that variables in closures keep the same objects as their values."""

    def __init__(self) -> None:
        self._cells: list[types.CellType] = []
        self._names: list[str] = []

    def add(self, cell: types.CellType, name: str) -> None:
        self._cells.append(cell)
        self._names.append(name)

    def freeze(self) -> None:
        self._contents = list(map(_content_of, self._cells))

    def same(self) -> bool:
        return all(map(operator.is_, map(_content_of, self._cells), self._contents))

    def difference(self) -> str | None:
        for cell, name, old in zip(self._cells, self._names, self._contents, strict=True):
            if cell.cell_contents is not old:
                where = name.rpartition(".__closure__")[0]
                return changed(f"a variable in the closure of {where}", old, cell.cell_contents)
        return None


class _Tensors:
    """Base class: keeps the tensors that a subclass compares, and their names for messages."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self._names: list[str] = []

    def add(self, tensor: Tensor, name: str) -> None:
        self.tensors.append(tensor)
        self._names.append(name)

    def clear(self) -> None:
        self.tensors.clear()
        self._names.clear()


class Memory(_Tensors):
    """Checks that tensors stay at their addresses.

    The recorded memory is not kept alive, so that a model that moves to another device can free it. After
    that, new memory may have the old address. So ``same`` also checks, with weak references, that the
    recorded storages still exist.
    """

    def freeze(self) -> None:
        self._pointers = list(map(_data_ptr, self.tensors))
        self._storages = [StorageWeakRef(tensor.untyped_storage()) for tensor in self.tensors]
        self._storage_ids = list(map(expiring, self._storages))

    def addresses(self) -> frozenset[int]:
        return frozenset(self._pointers)

    def is_in_place(self) -> bool:
        return list(map(_data_ptr, self.tensors)) == self._pointers

    def same(self) -> bool:
        return not any(map(is_expired, self._storage_ids)) and self.is_in_place()

    def difference(self) -> str | None:
        for tensor, name, pointer, storage in zip(
            self.tensors, self._names, self._pointers, self._storage_ids, strict=True
        ):
            if is_expired(storage) or tensor.data_ptr() != pointer:
                return f"{tensor_in_words(name)} has other memory (.to or param.data = ...)"
        return None


class Kinds(_Tensors):
    """Checks that tensors keep their shapes, strides, dtypes and devices. Their memory may change."""

    def freeze(self) -> None:
        self._kinds = list(map(_kind_of, self.tensors))

    def addresses(self) -> frozenset[int]:
        return frozenset()  # the memory of these tensors may change

    def is_in_place(self) -> bool:
        return True

    def same(self) -> bool:
        return list(map(_kind_of, self.tensors)) == self._kinds

    def difference(self) -> str | None:
        for tensor, name, old in zip(self.tensors, self._names, self._kinds, strict=True):
            if (new := _kind_of(tensor)) != old:
                return changed(f"shape, strides, dtype or device of {tensor_in_words(name)}", old, new)
        return None


def _kind_of(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


class Numbers(_Tensors):
    """Checks that small tensors on the CPU keep their values."""

    def freeze(self) -> None:
        self._values = list(map(Tensor.tolist, self.tensors))

    def same(self) -> bool:
        return list(map(Tensor.tolist, self.tensors)) == self._values

    def difference(self) -> str | None:
        for tensor, name, old in zip(self.tensors, self._names, self._values, strict=True):
            new = tensor.tolist()
            if new != old:
                return changed(name, _rounded(old), _rounded(new))
        return None


def _rounded(value: Any) -> Any:
    return float(f"{value:.{_FLOAT_DIGITS}g}") if isinstance(value, float) else value


class Writes(_Tensors):
    """Checks that nothing was written into tensors on the CPU. PyTorch counts the writes in ``_version``."""

    def freeze(self) -> None:
        self._versions = list(map(version_of, self.tensors))

    def same(self) -> bool:
        return list(map(version_of, self.tensors)) == self._versions

    def difference(self) -> str | None:
        for tensor, name, version in zip(self.tensors, self._names, self._versions, strict=True):
            if tensor._version != version:
                return f"{tensor_in_words(name)} was written into"
        return None
