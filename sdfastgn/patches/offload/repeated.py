"""Makes a call again, after memory was freed, if there was too little memory for the first attempt."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch


def until_it_fits(
    run: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], free: Callable[[], bool]
) -> Any:
    """Returns ``run(*args, **kwargs)``. If memory runs out, calls ``free()`` and then ``run`` again.

    ``free`` frees memory. If it returns False, there was nothing to free, and the error is raised.
    """
    containers = _contents_of(args, kwargs)
    while True:
        try:
            return run(*args, **kwargs)
        except torch.OutOfMemoryError:
            if not free():
                raise
        # The arguments are restored, because diffusers' UNet, for example, removes items from a list in them.
        _refill(containers)


def _contents_of(*values: Any) -> list[tuple[Any, tuple[Any, ...]]]:
    """Returns (container, its items) for each list, dict and tuple in ``values``, nested ones included."""
    found: dict[int, tuple[Any, tuple[Any, ...]]] = {}
    todo = list(values)
    while todo:
        value = todo.pop()
        if type(value) in (list, tuple, dict) and id(value) not in found:
            found[id(value)] = (value, tuple(value.items() if type(value) is dict else value))
            todo += value.values() if type(value) is dict else value
    return list(found.values())


def _refill(containers: list[tuple[Any, tuple[Any, ...]]]) -> None:
    """Put the items that ``_contents_of`` has recorded back into each list and dict."""
    for value, content in containers:
        if type(value) is list:
            value[:] = content
        elif type(value) is dict:
            value.clear()
            value.update(content)
