"""State between calls: attributes of a model's modules in which a call keeps tensors for later calls.

An example is the cache of a decoder that computes a video in parts. Such attributes are one more argument of
a plan. What the call has set them to is one more result, which is stored in the module.

In a module that keeps a tensor, the plain values and other tensors among its attributes are state too. Flags
such as "this is the first part" are often beside a cache, and other code sets them between calls.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import starmap
from typing import Any

from torch import Tensor, nn

from sdfastgn.patches.graphs.arguments import is_plain

__all__ = ["STATE", "Held", "State"]

# The name of the argument. It is no identifier, because no argument of a method may have it. Reasons begin
# with it.
STATE = "the state of a module"
# How often traces can add attributes to a state. One trace finds all that a call keeps, and another kind of
# call may keep more. Code that keeps each tensor under a new name must not be traced at each call.
_MOST_GROWTHS = 4
# Attributes of all modules, such as the dicts of parameters and hooks. They are no state.
_OF_ALL = frozenset(vars(nn.Module()))

# The dotted path of a module -> the values of its attributes that are state.
Held = dict[str, dict[str, Any]]


def _is_value(value: Any) -> bool:
    return isinstance(value, Tensor) or is_plain(type(value))


def _can_be_state(module: nn.Module, names: set[str]) -> bool:
    """True if these attributes are tensors and plain values, or lists, tuples and dicts of these."""
    todo = [vars(module)[name] for name in names if name in vars(module)]
    while todo:
        value = todo.pop()
        if type(value) in (list, tuple, dict):
            todo += value.values() if type(value) is dict else value
        elif not _is_value(value):
            return False
    return not names & _OF_ALL


class State:
    """The attributes of the modules in a model that are its state. It keeps no module alive.

    Attributes:
        growths: how often ``grown`` has made this state from an empty one.
    """

    def __init__(self, names: Mapping[str, tuple[nn.Module, frozenset[str]]] | None = None, growths: int = 0):
        self._held = {
            path: (weakref.ref(module), tuple(sorted(each))) for path, (module, each) in (names or {}).items()
        }
        self.growths = growths

    def grown(self, root: nn.Module, found: Mapping[nn.Module, set[str]]) -> State | None:
        """This state and the attributes ``found`` of modules in ``root``. None if these can be no state."""
        if self.growths >= _MOST_GROWTHS or not found or not all(starmap(_can_be_state, found.items())):
            return None
        names = self.names()
        for module, each in found.items():
            beside = {n for n, v in vars(module).items() if _is_value(v)} - _OF_ALL
            names[module] = names.get(module, frozenset()) | each | beside
        paths = {module: path for path, module in root.named_modules()}
        return State({paths[module]: (module, each) for module, each in names.items()}, self.growths + 1)

    def names(self) -> dict[nn.Module, frozenset[str]]:
        """Module -> the names of its attributes that are state."""
        found = ((reference(), names) for reference, names in self._held.values())
        return {module: frozenset(names) for module, names in found if module is not None}

    def held(self) -> Held:
        """The present values of the state, in new dicts. Attributes that do not exist are left out."""
        found: Held = {}
        for path, (reference, names) in self._held.items():
            module = reference()
            attributes = {} if module is None else vars(module)
            found[path] = {name: attributes[name] for name in names if name in attributes}
        return found

    def store(self, held: Held) -> None:
        """Give the state the values ``held``."""
        for path, (reference, names) in self._held.items():
            module = reference()
            attributes: dict[str, Any] = {} if module is None else vars(module)
            for name in names:
                if name in held[path]:
                    attributes[name] = held[path][name]
                else:
                    attributes.pop(name, None)

    @contextmanager
    def replaced(self, held: Held) -> Iterator[None]:
        """A context in which the state has the values ``held``. At its end, ``held`` gets the new ones."""
        before = self.held()
        self.store(held)
        try:
            yield
            for path, now in self.held().items():
                held[path].clear()
                held[path].update(now)
        finally:
            self.store(before)
