"""Lets a plan write down the kernels that a thread launches.

Calls skip PyTorch's dispatcher where they can, and launches always do. So a ``TorchDispatchMode`` does not
see them. A thread that records a plan registers an observer here, which runs each of its launches.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from sdfastgn.kernels.common.private import dispatch_modes

# Called in place of a launch, with the ``Launch``, its stream and its tensors. It must run the launch.
Observer = Callable[[Any, int, "tuple[Tensor | None, ...]"], None]

# Id of a thread -> its observer. Empty unless a plan is being recorded.
observers: dict[int, Observer] = {}


@contextlib.contextmanager
def observed_by(observer: Observer) -> Iterator[None]:
    """A context in which ``observer`` runs the launches of this thread.

    The observer may have a ``TorchDispatchMode`` of its own. If no other mode is active, kernels launch
    directly, as they do without a mode.
    """
    thread = threading.get_ident()
    observers[thread] = observer
    try:
        yield
    finally:
        del observers[thread]


def is_observed() -> bool:
    """True if this thread has an observer, and no ``TorchDispatchMode`` is active but the observer's own."""
    return threading.get_ident() in observers and dispatch_modes() == 1


def observe(launch: Any, stream: int, tensors: tuple[Tensor | None, ...]) -> bool:
    """Lets the observer of this thread run a launch. False if it has none."""
    thread = threading.get_ident()
    observer = observers.pop(thread, None)  # the launch itself must not come here again
    if observer is None:
        return False
    try:
        observer(launch, stream, tensors)
    finally:
        observers[thread] = observer
    return True
