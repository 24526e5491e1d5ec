"""Says in words how a model has changed, for ``sdfastgn.report``: what changed, its old and new value.

A value is shown only if it is short.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any, NamedTuple

import torch

from sdfastgn.patches.swap.numpy_numbers import is_numpy_constant

# Classes whose values are shown in messages about changes. Values of other classes are not shown, because
# their ``repr`` may run any code.
_SHOWN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.memory_format)
_SHOWN_CONTAINERS = (list, tuple, set, dict)
# Maximum number of characters of a value that is shown in a message.
_MAX_SHOWN = 40


class Place(NamedTuple):
    """A list, tuple, set or dict in the model, and how messages name its items.

    Attributes:
        name: the dotted path of the container. For the dicts in which a module or object keeps its
            parameters, attributes or hooks, it is the path of the module or object.
        kind: the word for an item of the container: "parameter", "buffer", "module", "attribute" or "forward
            hook" in the dicts just named, "LoRA scale" in a LoRA layer's dict of scales, else "item".
        container: the list, tuple, set or dict itself.
        keys: the keys that a dict had when the Place was made; empty for other containers.
    """

    name: str
    kind: str
    container: Any
    keys: tuple[Any, ...]

    def child(self, key: Any) -> str:
        """The path of the item ``key``, for example ``conv_in.weight`` or ``processor.scales[3]``.

        For the scale of a LoRA: "LoRA scale of " and the path of the LoRA's layer.
        """
        if self.kind == "LoRA scale":
            return f"LoRA scale of {self.name.removesuffix('.scaling')}"
        return f"{self.name}[{_shown(key)}]" if self.kind == "item" else joined(self.name, key)

    def difference(self, old: Iterable[Any], is_same: Callable[[Any, Any], Any]) -> str | None:
        """A sentence that says how the container differs from its former items ``old``; None if it does not.

        ``is_same(old_item, new_item)`` compares two items.
        """
        if isinstance(self.container, dict):
            was = dict(zip(self.keys, old, strict=True))
            return difference_of(self, was, dict(dict.items(self.container)), is_same)
        then: Any = list(old)
        now: Any = list(self.container)
        if len(then) == len(now) and all(_holds(is_same, a, b) for a, b in zip(then, now, strict=True)):
            return None
        if isinstance(self.container, set):
            then, now = set(then), set(now)
        before, after = _shown(then), _shown(now)
        if before == after:
            return f"the items of {self.name} changed"
        return f"{self.name} changed from {before} to {after}"

    def noun(self, key: Any) -> str:
        """Words for the item ``key`` of the container, such as "parameter weight of conv_in"."""
        if self.kind in ("item", "LoRA scale"):
            return self.child(key)
        if self.kind == "module":
            return f"module {self.child(key)}"
        owner = self.name or "the model"
        # A hook's key is a number that PyTorch has given. It tells a user nothing, so the text leaves it out.
        return f"{self.kind} {key} of {owner}" if isinstance(key, str) else f"a {self.kind} of {owner}"


def difference_of(
    place: Place, before: dict[Any, Any], now: dict[Any, Any], is_same: Callable[[Any, Any], Any]
) -> str | None:
    """A sentence about the first difference between two states of the dict at ``place``; None if equal.

    ``is_same(old_value, new_value)`` compares two values.
    """
    for key in now:
        if key not in before:
            return f"{place.noun(key)} was added"
    for key in before:
        if key not in now:
            return f"{place.noun(key)} was removed"
    for key, old in before.items():
        if not _holds(is_same, old, now[key]):
            hint = " (load_state_dict(assign=True) or an assignment)" if place.kind == "parameter" else ""
            return changed(place.noun(key), old, now[key]) + hint
    return None


def changed(noun: str, old: Any, new: Any) -> str:
    """The sentence "``noun`` changed from ``old`` to ``new``".

    If the two values look the same as text, the sentence has their classes instead. If the classes are the
    same too, it says that ``noun`` was replaced by another object of this class.
    """
    before, after = _shown(old), _shown(new)
    if before == after and type(old) is not type(new):
        before, after = (f"{type(value).__module__}.{type(value).__qualname__}" for value in (old, new))
    if before == after:
        return f"{noun} was replaced by another {type(new).__name__}"
    return f"{noun} changed from {before} to {after}"


def joined(name: str, key: Any) -> str:
    """The dotted path of the attribute ``key`` of the object at the path ``name``."""
    key = "config" if key == "_internal_dict" else key  # users read ``_internal_dict`` as ``model.config``
    return f"{name}.{key}" if name else str(key)


def tensor_in_words(name: str) -> str:
    """Words for the tensor at the path ``name``: "the weight of conv_in" for ``conv_in.weight``."""
    head, _, last = name.rpartition(".")
    is_attribute = bool(head) and last.isidentifier() and not last.startswith("_") and " " not in name
    return f"the {last} of {head}" if is_attribute else f"the tensor {name}"


def _shown(value: Any) -> str:
    """Returns ``repr(value)`` if it is short and safe to compute, else the name of the value's class.

    Computing it is safe for the classes in ``_SHOWN``, NumPy's numbers, and containers of such values. If
    ``value`` is itself a class, the result is the name of this class.
    """
    if isinstance(value, type):
        return value.__name__
    is_plain = _is_shown(value)
    if type(value) in _SHOWN_CONTAINERS:
        items = chain.from_iterable(value.items()) if type(value) is dict else value
        is_plain = all(map(_is_shown, items))
    text = repr(value) if is_plain else ""
    return text if is_plain and len(text) <= _MAX_SHOWN else type(value).__name__


def _is_shown(value: Any) -> bool:
    return type(value) in _SHOWN or is_numpy_constant(type(value))


def _holds(is_same: Callable[[Any, Any], Any], old: Any, new: Any) -> bool:
    """True if ``old`` is ``new``, or ``is_same(old, new)`` is true. An error in ``is_same`` means False."""
    try:
        return old is new or bool(is_same(old, new))
    except Exception:
        return False
