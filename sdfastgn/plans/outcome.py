"""Records what a call returns and changes besides computing tensors, and repeats it for later calls.

A plan runs the kernels of a traced call, and computes tensors only. The model's own code returns tensors
inside of tuples, dicts or objects. Some models also change lists and dicts among their arguments: decoders of
videos, for example, keep the last frames of each convolution in a list for the next call. The attributes in
which modules keep tensors between calls (``state.py``) are passed to a call as such a dict.

An ``Outcome`` is made while a call is traced. It records the structure of the result, and the changes of
lists and dicts. For later calls of the same kind it repeats both with the tensors that the plan has computed.
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
    """A placeholder in a recorded result for a tensor of the arguments, whose index is ``place``."""

    place: int


class _Made(NamedTuple):
    """A placeholder in a recorded result for a tensor that the plan computes, whose index is ``place``."""

    place: int


class _Container(NamedTuple):
    """A placeholder in a recorded result for a list or dict of the arguments, whose index is ``place``."""

    place: int


class Output(NamedTuple):
    """Describes an output of diffusers, such as ``DecoderOutput``: its dataclass, and its fields."""

    kind: type
    fields: dict[str, Any]


# *Marks*: the classes of the placeholders in a recorded result. In a later call, each placeholder is replaced
# by a tensor, list or dict of that call.
MARKS = (_Given, _Made, _Container)


class _Known(NamedTuple):
    """The tensors, lists and dicts of one call that replace the placeholders in a recorded result."""

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
    """Records the result of one traced call, and the changes that the call makes in lists and dicts.

    Make the object before the call, and call ``finish`` when the call has returned.

    Args:
        args, kwargs: the arguments of the call.
        tensors: the tensors among the arguments.
    """

    def __init__(self, args: Sequence[Any], kwargs: dict[str, Any], tensors: Sequence[Any]) -> None:
        self._given = {id(t): i for i, t in enumerate(tensors)}
        self._containers = _containers_in(args, kwargs)
        self._places = {id(each): i for i, each in enumerate(self._containers)}
        self._before = [_items(each) for each in self._containers]
        self._result: Any = None
        self._returns_containers = False
        # For each list or dict of the arguments that the call changes: (its index, what it contains when the
        # call has returned).
        self._changes: list[tuple[int, Any]] = []

    def finish(self, result: Any) -> list[Tensor]:
        """Record ``result``, and what the call has changed in lists and dicts among its arguments.

        Returns the tensors that a plan of the call must compute. Raises Untraceable if the result has an
        object that cannot be recorded, for instance of a class of the user.
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
        # From here on this ``Outcome`` refers to none of the call's tensors.
        del self._given, self._containers, self._places, self._before, self._made, self._tensors
        return computed

    @property
    def recorded(self) -> tuple[Any, Any, list[int], bool]:
        """What ``finish`` has recorded: data that can be written to a file.

        It has no tensors. In their places it has placeholders: objects of the classes ``MARKS``.
        """
        return self._result, self._changes, self._returned, self._returns_containers

    @classmethod
    def of(cls, recorded: Sequence[Any]) -> Outcome:
        """Make an ``Outcome`` from the data that the property ``recorded`` of another one has returned."""
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
        # Plans compute images channels-last. The results are made contiguous, because those of the model's
        # own code are, and pipelines may rely on that.
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
        """Finds the tensors in lists and dicts of a later call that the call will replace by new ones.

        Such a tensor can be freed as soon as the plan has read it. Returns (list or dict, index or key there,
        index in ``tensors``) for each of them that occurs only once among the arguments, and that the call
        neither returns nor keeps.
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
        """The indices of the arguments' tensors that the call returns, or leaves in lists and dicts."""
        return {*_given_in([self._result, self._changes])}

    def _taken(self, value: Any) -> Any:
        """Copy ``value`` without its tensors.

        A placeholder (``MARKS``) replaces each tensor, and each list or dict that is also an argument.
        """
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
        if dataclasses.is_dataclass(kind) and isinstance(value, dict):  # ``value`` is an output of diffusers
            names = [field.name for field in dataclasses.fields(kind)]
            return Output(kind, {name: self._taken(getattr(value, name)) for name in names})
        raise Untraceable(f"it returns or keeps a {kind.__name__}")


def _items_of(part: Any) -> Iterable[Any]:
    """The items of a list, tuple or dict, or the fields of an ``Output``. Numbers, for example, have none."""
    if type(part) is Output:
        return part.fields.values()
    if type(part) is dict:
        return part.values()
    return part if type(part) in (list, tuple) else ()


def _given_in(part: Any) -> Iterator[int]:
    """Finds which tensors of the arguments occur in ``part`` of a recorded result. Yields their indices.

    In place of each such tensor, ``part`` has a placeholder ``_Given``.
    """
    if type(part) is _Given:
        yield part.place
    for item in _items_of(part):
        yield from _given_in(item)


def _returned(part: Any, is_inside: bool = False) -> Iterator[int]:
    """Finds which of the plan's tensors occur in ``part`` of a recorded result. Yields their indices.

    In place of each such tensor, ``part`` has a placeholder ``_Made``. Tensors in a dict inside of the result
    are left out, because such a dict is a cache for the model's next call.
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
