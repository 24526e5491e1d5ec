"""What a call leaves besides tensors: the structure of its result, and lists and dicts that it changed.

The state of modules (``state.py``) is such a dict.

A plan computes tensors only. Upstream's code returns them inside of objects. Some of it also changes lists
and dicts that it was given: decoders of videos, for example, keep the last frames of each convolution in a
list. An ``Outcome`` is recorded in the trace of a call, and repeats both for later calls of the same kind.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sdfastgn.plans.trace.traced import Untraceable

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


class _Given(NamedTuple):
    """Stands for the tensor with the index ``place`` among the tensors of the arguments."""

    place: int


class _Made(NamedTuple):
    """Stands for the tensor with the index ``place`` among the results of the plan."""

    place: int


class _Container(NamedTuple):
    """Stands for the list or dict with the index ``place`` among the lists and dicts of the arguments."""

    place: int


class Output(NamedTuple):
    """Stands for an output of diffusers: an object of the dataclass ``kind``."""

    kind: type
    fields: dict[str, Any]


# Classes of *marks*: each stands for one tensor, list or dict of a later call.
MARKS = (_Given, _Made, _Container)


class _Known(NamedTuple):
    """What the marks of an ``Outcome`` stand for in one call."""

    made: Sequence[Any]
    tensors: Sequence[Any]
    containers: list[Any]

    def put_together(self, part: Any) -> Any:
        kind = type(part)
        if kind is _Made:
            return self.made[part.place]
        if kind is _Given:
            return self.tensors[part.place]
        if kind is _Container:
            return self.containers[part.place]
        if kind is Output:
            return part.kind(**{name: self.put_together(item) for name, item in part.fields.items()})
        if kind in (list, tuple):
            return kind(map(self.put_together, part))
        if kind is dict:
            return {key: self.put_together(item) for key, item in part.items()}
        return part


class Outcome:
    """The outcome of one traced call.

    Args:
        args, kwargs: the arguments that the call has got. Nobody else may have changed them.
        tensors: the tensors among the arguments.

    ``finish`` must be called when the call has returned.
    """

    def __init__(self, args: Sequence[Any], kwargs: dict[str, Any], tensors: Sequence[Any]) -> None:
        self._given = {id(t): i for i, t in enumerate(tensors)}
        self._containers = _containers_in(args, kwargs)
        self._places = {id(each): i for i, each in enumerate(self._containers)}
        self._before = [_items(each) for each in self._containers]
        self._result: Any = None
        self._returns_containers = False
        # (index of a list or dict of the arguments, what it contains after the call)
        self._changes: list[tuple[int, Any]] = []

    def finish(self, result: Any) -> list[Tensor]:
        """Record ``result``, and the changes that the call has made.

        Returns the tensors that a plan of the call must compute. Raises Untraceable for other objects.
        """
        self._tensors: list[Tensor] = []
        self._made: dict[int, _Made] = {}
        self._result = self._taken(result)
        self._returned = sorted(_returned(self._result))
        for place, (each, before) in enumerate(zip(self._containers, self._before, strict=True)):
            now = _items(each)
            if len(now) != len(before) or any(a is not b for a, b in zip(now, before, strict=True)):
                content = dict(each) if isinstance(each, dict) else list(each)
                self._changes.append((place, self._taken(content)))
        computed = self._tensors
        # The marks are all that is kept, and none of the call's tensors.
        del self._given, self._containers, self._places, self._before, self._made, self._tensors
        return computed

    @property
    def recorded(self) -> tuple[Any, Any, list[int], bool]:
        """What ``finish`` has recorded. It has no tensors: marks (``MARKS``) stand for them."""
        return self._result, self._changes, self._returned, self._returns_containers

    @classmethod
    def of(cls, recorded: Sequence[Any]) -> Outcome:
        """The outcome whose ``recorded`` is given."""
        made = cls((), {}, ())
        made.finish(None)
        made._result, made._changes, made._returned, made._returns_containers = recorded
        return made

    def deliver(
        self, made: Sequence[Any], args: Sequence[Any], kwargs: dict[str, Any], tensors: Sequence[Any]
    ) -> Any:
        """Change the lists and dicts of a later call as the traced call did, and return its result.

        Args:
            made: the tensors that the plan has computed.
            args, kwargs: the arguments of the later call.
            tensors: the tensors among them.
        """
        # Stock models return contiguous tensors, and pipelines may rely on that. Steps compute channels-last.
        made = list(made)
        for i in self._returned:
            made[i] = made[i].contiguous()
        has_marks = self._returns_containers or self._changes
        known = _Known(made, tensors, _containers_in(args, kwargs) if has_marks else [])
        result = known.put_together(self._result)
        for place, content in [(place, known.put_together(content)) for place, content in self._changes]:
            container = known.containers[place]
            container.clear()
            (container.update if isinstance(container, dict) else container.extend)(content)
        return result

    def replaced(
        self, args: Sequence[Any], kwargs: dict[str, Any], tensors: Sequence[Any]
    ) -> list[tuple[Any, Any, int]]:
        """The tensors among the arguments of a later call that it will drop from lists and dicts.

        Returns (list or dict, index or key there, index in ``tensors``) of each that nothing else refers to.
        """
        if not self._changes:
            return []
        containers = _containers_in(args, kwargs)
        counts = Counter(map(id, tensors))
        places = {id(t): i for i, t in enumerate(tensors) if counts[id(t)] == 1 and i not in self._kept}
        return [
            (each, key, places[id(value)])
            for each in (containers[place] for place, _ in self._changes)
            for key, value in (each.items() if isinstance(each, dict) else enumerate(each))
            if isinstance(value, Tensor) and id(value) in places
        ]

    @functools.cached_property
    def _kept(self) -> set[int]:
        """The indices of the arguments' tensors that the call returns or leaves in lists and dicts."""
        return {*_given_in([self._result, self._changes])}

    def _taken(self, value: Any) -> Any:
        """``value`` in new containers, with marks for tensors and for containers among the arguments."""
        kind = type(value)
        if isinstance(value, Tensor):
            if id(value) in self._given:
                return _Given(self._given[id(value)])
            if id(value) not in self._made:
                self._made[id(value)] = _Made(len(self._tensors))
                self._tensors.append(value)
            return self._made[id(value)]
        if kind in _PLAIN:
            return value
        if id(value) in self._places:
            self._returns_containers = True
            return _Container(self._places[id(value)])
        if kind in (list, tuple):
            return kind(map(self._taken, value))
        if kind is dict:
            return {key: self._taken(item) for key, item in value.items()}
        if dataclasses.is_dataclass(kind) and isinstance(value, dict):  # an output of diffusers
            names = [field.name for field in dataclasses.fields(kind)]
            return Output(kind, {name: self._taken(getattr(value, name)) for name in names})
        raise Untraceable(f"it returns or keeps a {kind.__name__}")


def _items_of(part: Any) -> Iterable[Any]:
    """The items of a list, tuple, dict or ``Output``. Other values, such as numbers, have none."""
    if type(part) is Output:
        return part.fields.values()
    if type(part) is dict:
        return part.values()
    return part if type(part) in (list, tuple) else ()


def _given_in(part: Any) -> Iterator[int]:
    """The indices of the arguments' tensors that the marks in ``part`` stand for."""
    if type(part) is _Given:
        yield part.place
    for item in _items_of(part):
        yield from _given_in(item)


def _returned(part: Any, is_inside: bool = False) -> Iterator[int]:
    """The indices of the plan's tensors that a call's result ``part`` has.

    Those in a dict inside of the result are left out, because it is a cache for the model's next call.
    """
    if type(part) is _Made:
        yield part.place
    for item in () if is_inside and type(part) is dict else _items_of(part):
        yield from _returned(item, True)


def has_shared_containers(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """True if a list or dict occurs twice in the arguments. Its changes would be seen in both places."""
    found = _containers_in(args, kwargs)
    return len(set(map(id, found))) < len(found)


def _items(container: Any) -> list[Any]:
    if isinstance(container, dict):
        return [part for pair in container.items() for part in pair]
    return list(container)


def _containers_in(args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """All lists and dicts in the arguments, also nested ones, in the order in which they occur."""
    found: list[Any] = []
    todo: list[Any] = [*reversed(list(kwargs.values())), *reversed(args)]
    while todo:
        value = todo.pop()
        kind = type(value)
        if kind in (list, dict):
            found.append(value)
        if kind in (list, dict, tuple):
            todo += reversed(list(value.values() if kind is dict else value))
    return found
