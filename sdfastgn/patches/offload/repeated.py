"""Repeats a call for which memory was too short, after memory was freed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch


def until_it_fits(
    run: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], free: Callable[[], bool]
) -> Any:
    """``run(*args, **kwargs)``. While there is too little memory, it runs again after each ``free()``.

    ``free``: frees memory; returns False if there is nothing to free, and then the error is raised.
    """
    containers = _contents_of(args, kwargs)
    while True:
        try:
            return run(*args, **kwargs)
        except torch.OutOfMemoryError:
            if not free():
                raise
        _refill(containers)  # the failed call may have changed arguments: diffusers' UNet pops from a list


def _contents_of(*values: Any) -> list[tuple[Any, tuple[Any, ...]]]:
    """Returns (container, its items) for each list, dict and tuple in ``values``, also for nested ones."""
    found: dict[int, tuple[Any, tuple[Any, ...]]] = {}
    todo = list(values)
    while todo:
        value = todo.pop()
        if type(value) in (list, tuple, dict) and id(value) not in found:
            found[id(value)] = (value, tuple(value.items() if type(value) is dict else value))
            todo += value.values() if type(value) is dict else value
    return list(found.values())


def _refill(containers: list[tuple[Any, tuple[Any, ...]]]) -> None:
    """Give each list and dict in place the items that ``_contents_of`` has recorded for it."""
    for value, content in containers:
        if type(value) is list:
            value[:] = content
        elif type(value) is dict:
            value.clear()
            value.update(content)
