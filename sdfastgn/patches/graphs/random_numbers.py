"""Finds out whether a forward draws random numbers: such a model gets no CUDA graph.

The check restores the states of PyTorch's random generators. So the user's next random numbers are the same
as without graphs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sdfastgn.kernels.common.failures import one_line
from sdfastgn.patches.graphs.arguments import Unsupported


class _DrawsError(Exception):
    """Raised when an operation is about to draw random numbers."""


class _Guard(TorchDispatchMode):
    """A mode in which an operation that would draw random numbers raises ``_DrawsError`` instead."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags and not _has_no_dropout(func, args, kwargs):
            raise _DrawsError
        return func(*args, **kwargs)


def _has_no_dropout(func: Any, args: Any, kwargs: Any) -> bool:
    """True for a call of attention with dropout 0.

    PyTorch tags the operation as one that draws random numbers, but with dropout 0 it draws none.
    """
    for position, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":
            p = args[position] if position < len(args) else kwargs.get("dropout_p", argument.default_value)
            return not p
    return False


def _states(device: torch.device | None) -> list[Tensor]:
    """The states of PyTorch's default generators: of the CPU, and of ``device`` if it is a GPU.

    Reading the states does not wait for the GPU.
    """
    states = [torch.get_rng_state()]
    if device is not None and device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return states


@contextlib.contextmanager
def undrawn(device: torch.device | None, call: Callable[[], object]) -> Iterator[None]:
    """A context for code that runs ``call``. At its end, it checks whether ``call`` drew random numbers.

    If PyTorch's default generators have the same states as before, none were drawn from them. Otherwise
    either ``call`` or another thread drew some. To find out, ``call`` runs once more, and is stopped before
    it draws. If it would draw, the generators get their former states again, and Unsupported is raised. If
    not, another thread drew the numbers, and the generators stay as they are.
    """
    before = _states(device)
    try:
        yield
    except Exception:
        _check(before, device, call)
        raise
    _check(before, device, call)


def _check(before: list[Tensor], device: torch.device | None, call: Callable[[], object]) -> None:
    if all(map(torch.equal, _states(device), before)):
        return
    try:
        with _Guard():
            call()
    except _DrawsError:
        torch.set_rng_state(before[0])
        for state in before[1:]:
            torch.cuda.set_rng_state(state, device)  # type: ignore[arg-type]
        raise Unsupported("its forward draws random numbers") from None
    except Exception as error:
        raise Unsupported(f"its forward may draw random numbers: {one_line(error)}") from error
