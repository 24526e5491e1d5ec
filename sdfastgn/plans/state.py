"""State between calls: attributes of a model's modules in which a call keeps tensors for later calls.

An example is the cache of a decoder that computes a video in parts. A plan, which runs the kernels of a
traced call, gets the values of such attributes as one more argument. It returns their new values as one more
result, which is then stored in the modules.

If one attribute of a module keeps a tensor, then all other tensors and plain values, such as numbers and
strings, among the module's attributes count as state too. Flags such as "this is the first part" are often
beside a cache, and other code sets them between calls.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import starmap
from typing import Any

from torch import Tensor, nn

from sdfastgn.patches.graphs.arguments import is_plain

# The name of the keyword argument by which a plan gets the tensors that modules keep between calls. It has
# spaces, so that no real argument of a method can have the same name. Messages that say why a call has no
# plan contain it.
STATE = "the state of a module"
# How many traces of one model may find new attributes in which calls keep tensors. One trace finds all
# attributes that its call sets, and another kind of call may set more. Without a limit, a model that keeps
# each tensor under a new name would be traced in each call.
_MOST_GROWTHS = 4
# Attributes that every ``nn.Module`` has, such as the dicts of parameters and hooks. Calls keep no tensors
# for later calls in them, so they never count as state.
_OF_ALL = frozenset(vars(nn.Module()))

# Dotted path of a module in which calls keep tensors -> {name: value} of the attributes that count as state.
Held = dict[str, dict[str, Any]]


def _is_value(value: Any) -> bool:
    return isinstance(value, Tensor) or is_plain(type(value))


def _can_be_state(module: nn.Module, names: set[str]) -> bool:
    """True if the attributes ``names`` hold tensors and plain values, or lists, tuples and dicts of them."""
    todo = [vars(module)[name] for name in names if name in vars(module)]
    while todo:
        value = todo.pop()
        if type(value) in (list, tuple, dict):
            todo += value.values() if type(value) is dict else value
        elif not _is_value(value):
            return False
    return not names & _OF_ALL


class State:
    """Lists the attributes of a model's modules in which calls keep tensors for later calls.

    It reads and sets their values. It keeps no module alive.

    Attributes:
        growths: how many traces have added attributes to this list.
    """

    def __init__(self, names: Mapping[str, tuple[nn.Module, frozenset[str]]] | None = None, growths: int = 0):
        self._held = {
            path: (weakref.ref(module), tuple(sorted(each))) for path, (module, each) in (names or {}).items()
        }
        self.growths = growths

    def grown(self, root: nn.Module, found: Mapping[nn.Module, set[str]]) -> State | None:
        """Return a ``State`` that lists the attributes of this one, and those in ``found``.

        ``found``: for modules in ``root``, the names of attributes in which a traced call has kept tensors.

        Returns None if one of the new attributes holds an object that cannot be passed as an argument, or if
        traces have added attributes too often.
        """
        if self.growths >= _MOST_GROWTHS or not found or not all(starmap(_can_be_state, found.items())):
            return None
        names = self.names()
        for module, each in found.items():
            beside = {n for n, v in vars(module).items() if _is_value(v)} - _OF_ALL
            names[module] = names.get(module, frozenset()) | each | beside
        paths = {module: path for path, module in root.named_modules()}
        return State({paths[module]: (module, each) for module, each in names.items()}, self.growths + 1)

    def names(self) -> dict[nn.Module, frozenset[str]]:
        """For each module in which calls keep tensors, the names of the listed attributes."""
        found = ((reference(), names) for reference, names in self._held.values())
        return {module: frozenset(names) for module, names in found if module is not None}

    def held(self) -> Held:
        """The present values of the listed attributes, in new dicts. Missing attributes are left out."""
        found: Held = {}
        for path, (reference, names) in self._held.items():
            module = reference()
            attributes = {} if module is None else vars(module)
            found[path] = {name: attributes[name] for name in names if name in attributes}
        return found

    def store(self, held: Held) -> None:
        """Set the listed attributes to the values ``held``. Delete those that ``held`` does not have."""
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
        """A context in which the listed attributes have the values ``held``.

        At its end, the values that code has given them meanwhile are put into ``held``, and the attributes
        get back the values from before the context.
        """
        before = self.held()
        self.store(held)
        try:
            yield
            for path, now in self.held().items():
                held[path].clear()
                held[path].update(now)
        finally:
            self.store(before)
