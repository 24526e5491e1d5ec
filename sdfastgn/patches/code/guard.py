"""Compares the code that a model depends on with what it was when it was read.

The comparison asks whether each name still has the value that ``reach.py`` has found: functions, classes,
modules, numbers and flags. It also looks into the functions, because ``f.__code__ = ...`` leaves
the name as it is. The loops run in C: the 535 names of SD1.5's UNet take 0.15 ms on an H200's host.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import nn

from sdfastgn.patches.code.reach import MISSING, Entry, Reach

__all__ = ["Guard"]

_call: Callable[..., Any] = getattr(operator, "call", lambda function, argument: function(argument))
_inside: Callable[[Any], tuple[Any, ...]] = operator.attrgetter("__code__", "__defaults__", "__kwdefaults__")
_content_of = operator.attrgetter("cell_contents")


class Guard:
    """The code on which calls of the model ``root`` depend, as it was when the guard was made."""

    def __init__(self, root: nn.Module) -> None:
        self._reach = Reach()
        self.see(root)

    @property
    def entries(self) -> Iterable[Entry]:
        return self._reach.entries.values()

    def see(self, root: nn.Module) -> None:
        """Add what ``root`` depends on now. The caller has checked that ``same`` is True."""
        before = len(self._reach.entries), len(self._reach.functions)
        self._reach.see_model(root)
        if before != (len(self._reach.entries), len(self._reach.functions)):
            self._freeze()

    def same(self) -> bool:
        """True if no part of the code has been replaced since it was added."""
        try:
            return (
                # A getter returns a tuple with the present values of all names in one namespace. Tuples are
                # compared in C, and equal objects that are not the same count as equal.
                all(map(operator.eq, map(_call, self._getters, self._namespaces), self._values))
                and all(map(_call, self._without, self._missing))
                and list(map(_inside, self._functions)) == self._insides
                and all(map(operator.is_, map(_content_of, self._cells), self._contents))
            )
        except Exception:  # a name was removed, or a user's ``__eq__`` has raised
            return False

    def changed(self) -> Iterator[Entry]:
        """The names that have other values now."""
        for entry in self.entries:
            value = entry.namespace.get(entry.name, MISSING)
            if value is not entry.value and (MISSING in (value, entry.value) or value != entry.value):
                yield entry

    def changed_inside(self) -> Iterator[str]:
        """The functions whose code, defaults or closure is another one now."""
        for function, inside in zip(self._functions, self._insides, strict=True):
            if _inside(function) != inside:
                yield f"the code of {function.__module__}.{function.__qualname__}"
        for cell, function, content in zip(self._cells, self._owners, self._contents, strict=True):
            if _content_of(cell) is not content:
                yield f"a variable in the closure of {function.__module__}.{function.__qualname__}"

    def _freeze(self) -> None:
        groups: defaultdict[int, list[Entry]] = defaultdict(list)
        for entry in self.entries:
            groups[id(entry.holder)].append(entry)
        present = {k: [e for e in entries if e.value is not MISSING] for k, entries in groups.items()}
        absent = {k: [e for e in entries if e.value is MISSING] for k, entries in groups.items()}
        found = [entries for entries in present.values() if entries]
        # The first name is passed twice, because itemgetter of only one name would return no tuple.
        self._getters = [operator.itemgetter(e[0].name, *(each.name for each in e)) for e in found]
        self._namespaces = [entries[0].namespace for entries in found]
        self._values = [(e[0].value, *(each.value for each in e)) for e in found]
        lacking = [entries for entries in absent.values() if entries]
        self._without = [entries[0].namespace.keys().isdisjoint for entries in lacking]
        self._missing = [frozenset(each.name for each in entries) for entries in lacking]
        self._functions = list(self._reach.functions.values())
        self._insides = list(map(_inside, self._functions))
        closures = [(f, cell) for f in self._functions for cell in f.__closure__ or () if _is_set(cell)]
        self._cells = [cell for _, cell in closures]
        self._owners = [function for function, _ in closures]
        self._contents = list(map(_content_of, self._cells))


def _is_set(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True
