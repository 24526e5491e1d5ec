"""No graph for a model that draws random numbers, and none of the user's are drawn to find that out."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sdfastgn.patches.graphs.arguments import Unsupported

__all__ = ["undrawn"]


class _DrawsError(Exception):
    """An operation would draw next."""


class _Guard(TorchDispatchMode):
    """Stops this thread before its first random number."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags and _has_dropout(func, args, kwargs):
            raise _DrawsError
        return func(*args, **kwargs)


def _has_dropout(func: Any, args: Any, kwargs: Any) -> bool:
    """False for an attention without dropout; true for anything that has no ``dropout_p``."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":
            given = (
                args[position] if position < len(args) else kwargs.get("dropout_p", argument.default_value)
            )
            return bool(given)
    return True


def _states(device: torch.device | None) -> list[Tensor]:
    """The states of PyTorch's default generators, on the CPU. Nothing waits for the device."""
    states = [torch.get_rng_state()]
    if device is not None and device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return states


@contextlib.contextmanager
def undrawn(device: torch.device | None, call: Callable[[], object]) -> Iterator[None]:
    """For a body that makes ``call``, in whatever way: afterwards it has drawn no random numbers.

    Raises Unsupported if it had to be undone. What other threads draw in the meantime is left alone:
    numbers count as drawn by ``call`` only if another one, which is stopped in time, draws as well.
    """
    before, failure = _states(device), None
    try:
        yield
    except Exception as error:
        failure = error
    if not all(map(torch.equal, _states(device), before)):
        try:
            with _Guard():
                call()
        except _DrawsError as error:
            torch.set_rng_state(before[0])
            for state in before[1:]:
                torch.cuda.set_rng_state(state, device)  # type: ignore[arg-type]
            raise Unsupported("its forward draws random numbers") from error
        except Exception as error:
            failure = failure or error
    if failure is not None:
        raise failure
