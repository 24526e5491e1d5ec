"""Replaces methods of single modules by entries in their ``__dict__``: a ``forward`` with CUDA graphs, say.

An entry refers to its module. If a shallow copy (``copy.copy``) of the module had the same entry, a call of
the copy would run the original, and would fail once the original is freed. So shallow copies, and the
replicas that ``nn.DataParallel`` makes, get no entries, and run the methods of their class. A deep copy or a
pickle gets new entries, which refer to the copy.

Other code may wrap an entry or take it out of the module, and may put it back later. So some classes register
their entries, and find them by the module.
"""

from __future__ import annotations

import copy
import weakref
from typing import Any, TypeVar

from torch import nn

Entry = TypeVar("Entry", bound="InstanceEntry")
# Module -> {id: object}, for the registered objects in its ``__dict__`` that replace one of its methods.
_registered: weakref.WeakKeyDictionary[nn.Module, weakref.WeakValueDictionary[int, InstanceEntry]] = (
    weakref.WeakKeyDictionary()
)


class InstanceEntry:
    """Base class of objects in a module's ``__dict__`` that replace a method of only this module.

    An example is a ``forward`` with CUDA graphs. The object has only a weak reference to its module.
    """

    __slots__ = ("__weakref__", "_module")

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)

    @property
    def module(self) -> nn.Module:
        """The module that owns this entry. Raises ReferenceError if the module was freed."""
        module = self._module()
        if module is None:
            raise ReferenceError(f"sdfastgn: the module of this {type(self).__name__} is gone")
        return module

    def register(self) -> None:
        """Let ``all_of`` and ``owners`` find this entry as long as the entry and its module exist."""
        _registered.setdefault(self.module, weakref.WeakValueDictionary())[id(self)] = self

    def unregister(self) -> None:
        if self.module in _registered:
            _registered[self.module].pop(id(self), None)

    @classmethod
    def all_of(cls: type[Entry], module: nn.Module) -> list[Entry]:
        """The registered objects of this class that replace methods of ``module``.

        Other code may have wrapped them, or taken them out of the module's ``__dict__``.
        """
        entries = _registered.get(module)
        # ``valuerefs`` copies the dict in one step, because other threads may add entries during the loop.
        refs = () if entries is None else entries.valuerefs()
        return [entry for ref in refs if isinstance(entry := ref(), cls)]

    @classmethod
    def owners(cls) -> list[nn.Module]:
        """All modules in the process of which a registered object of this class replaces a method."""
        modules = [module for ref in _registered.keyrefs() if (module := ref()) is not None]
        return [module for module in modules if cls.all_of(module)]

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.module,)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return type(self)(memo.get(id(self.module), self.module))


def _entries_of(module: nn.Module) -> set[str]:
    """The keys in the ``__dict__`` of ``module`` whose values are an ``InstanceEntry``."""
    return {name for name, value in vars(module).items() if isinstance(value, InstanceEntry)}


class _State(dict[str, Any]):
    """The result of a module's ``__getstate__``: the module's ``__dict__`` without each ``InstanceEntry``.

    An ``InstanceEntry`` replaces a method of only this module. A shallow copy of the module gets the content
    of this dict. Deepcopy and pickle use ``whole``, the complete ``__dict__``.
    """

    def __init__(self, whole: dict[str, Any]) -> None:
        super().__init__({k: v for k, v in whole.items() if not isinstance(v, InstanceEntry)})
        self.whole = whole

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (self.whole,)

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return copy.deepcopy(self.whole, memo)


class _GetState(InstanceEntry):
    """Replaces ``__getstate__`` of its module, so that shallow copies get no ``InstanceEntry``.

    Such an entry replaces a method, and would run the original module when the copy is called.
    """

    __slots__ = ()

    def __call__(self) -> Any:
        module = self.module
        state = type(module).__getstate__(module)
        return _State(state) if type(state) is dict else state


class _Replicate(InstanceEntry):
    """Replaces ``_replicate_for_data_parallel`` of its module, so that replicas get no ``InstanceEntry``.

    Such an entry replaces a method, and would run the original module when the replica is called.
    """

    __slots__ = ()

    def __call__(self) -> nn.Module:
        module = self.module
        replica = type(module)._replicate_for_data_parallel(module)
        for name in _entries_of(replica):
            del vars(replica)[name]
        return replica


# Name of a method that is called when a module is copied -> class of the entry that replaces this method.
GUARDS = {"__getstate__": _GetState, "_replicate_for_data_parallel": _Replicate}


def guard(module: nn.Module) -> None:
    """Replace the methods that copy ``module``, so that shallow copies and replicas get no ``InstanceEntry``.

    An ``InstanceEntry`` replaces a method of the original module only.
    """
    for name, kind in GUARDS.items():
        vars(module).setdefault(name, kind(module))


def unguard(module: nn.Module) -> None:
    """Put back the methods that copy ``module``, which ``guard`` has replaced.

    They stay replaced if ``module`` still has another ``InstanceEntry``, which copies must not get.
    """
    entries = _entries_of(module)
    if entries <= GUARDS.keys():
        for name in entries:
            del vars(module)[name]
