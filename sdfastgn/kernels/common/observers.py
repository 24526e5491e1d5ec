"""Lets other code record the Triton kernels that a thread launches.

``sdfastgn/plans`` traces a model's forward to a graph. It records one run of the graph as a list of PyTorch's
ops and kernel launches. A ``TorchDispatchMode`` sees the ops. But it does not see launches, because launches
skip PyTorch's dispatcher. So the recording thread registers an *observer* here: a function that is called in
place of each launch.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from sdfastgn.kernels.common.private import dispatch_modes

# A function that is called in place of a launch, with the ``Launch``, its stream and its tensors. The
# function must run the launch.
Observer = Callable[[Any, int, "tuple[Tensor | None, ...]"], None]

# Maps the id of a thread to the observer of the thread's launches. Empty unless launches are being recorded.
observers: dict[int, Observer] = {}


@contextlib.contextmanager
def observed_by(observer: Observer) -> Iterator[None]:
    """A context in which ``observer`` is called in place of each launch of this thread, and runs the launch.

    The code that uses this context may also activate one ``TorchDispatchMode``, to record PyTorch's ops. As
    long as no other mode is active, kernels are still launched directly, without PyTorch's dispatcher.
    """
    thread = threading.get_ident()
    observers[thread] = observer
    try:
        yield
    finally:
        del observers[thread]


def is_observed() -> bool:
    """True if this thread's launches are recorded, and no ``TorchDispatchMode`` but the recorder's is active.

    The recorder is the code that has called ``observed_by``.
    """
    return threading.get_ident() in observers and dispatch_modes() == 1


def observe(launch: Any, stream: int, tensors: tuple[Tensor | None, ...]) -> bool:
    """Lets the observer of this thread run a launch. Returns False if this thread has no observer."""
    thread = threading.get_ident()
    # The observer is removed for the moment, because it runs the launch, which calls this function again.
    observer = observers.pop(thread, None)
    if observer is None:
        return False
    try:
        observer(launch, stream, tensors)
    finally:
        observers[thread] = observer
    return True
