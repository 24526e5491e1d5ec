"""Keeps other threads from running a model while it is changed.

``optimize`` and ``restore`` exchange classes and strides module by module. A call that ran meanwhile would
use some modules in the old state and some in the new one. So a change waits until running calls are done,
and new calls wait until the change is done.

A change finds running calls by the frames of ``nn.Module.__call__`` on the stacks of other threads. So calls
need not register, and take no extra time while there is no change. During a change, each module has a gate
in its ``__dict__``, where new calls wait.

Two kinds of call are not noticed: a ``forward`` that is called directly, and a new call of a module that
``module.compile()`` has compiled.
"""

from __future__ import annotations

import gc
import inspect
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

from torch import nn

from sdfastgn.patches.swap.class_forward import MethodEntry

# Maximum number of seconds that a change waits for running calls.
_MAX_WAIT = 30.0
# Seconds between two looks at the stacks of other threads.
_LOOK_EVERY = 0.002
# The key under which a module's ``__dict__`` has its ``_Gate`` during a change.
# ``nn.Module.__call__`` calls the method of this name, and finds the gate before the class's method.
# A hook cannot be the gate: fused code would take it for a hook of the user, and would not fuse the module.
_GATE = "_call_impl"
# The code object of ``nn.Module.__call__``. It never assigns to its variables, so locals are only read from
# frames with this code. If a variable had a new value since an earlier reading, a further reading could free
# the old value. If this were a tensor, other threads could run in the middle of the search.
_CALL = nn.Module.__call__.__code__
# Flags of the code of generators and coroutines. While one of these waits, its frame has no caller, so a
# search from caller to caller ends at this frame.
_SUSPENDABLE = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR

one_at_a_time = threading.RLock()  # a lock that is held while classes or strides of any model are changed
_change: _Change | None = None


class _Change:
    """A change of the classes or strides of ``modules`` that has begun and is not done."""

    def __init__(self, modules: set[nn.Module]) -> None:
        self.owner = threading.get_ident()
        self.modules = modules
        self.done = threading.Event()
        self.waiting: set[int] = set()  # ids of the threads in which calls wait for the end of the change


class _Gate:
    """Replaces ``_call_impl`` of one module during a change. New calls wait here until the change is done.

    ``entry``: the ``_call_impl`` that the module itself had before, or None. ``set_call_entry`` changes it.
    """

    __slots__ = ("entry", "module")

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.entry = vars(module).get(_GATE)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        change, thread = _change, threading.get_ident()
        # A call goes on if it was made inside a running call of a module in ``change.modules``. The change
        # waits for that running call to end, so what it calls must not wait here.
        if change is not None and thread != change.owner and not _inside_a_call(change.modules):
            change.waiting.add(thread)
            change.done.wait()
        if self.entry is not None:
            return self.entry(*args, **kwargs)
        return type(self.module)._call_impl(self.module, *args, **kwargs)


def call_entry(module: nn.Module) -> Any:
    """What replaces ``_call_impl`` of ``module``; None if nothing does.

    A ``_Gate``, which makes new calls wait during a change of the model, does not count.
    """
    entry = vars(module).get(_GATE)
    return entry.entry if type(entry) is _Gate else entry


def set_call_entry(module: nn.Module, entry: Any) -> None:
    """Let ``entry`` replace ``_call_impl`` of ``module``; with None, nothing replaces it any more."""
    present = vars(module).get(_GATE)
    if type(present) is _Gate:
        present.entry = entry
    elif entry is not None:
        vars(module)[_GATE] = entry
    else:
        vars(module).pop(_GATE, None)


@contextmanager
def undisturbed(call: str, roots: Iterable[nn.Module]) -> Iterator[None]:
    """A context inside which no other thread runs a module of ``roots``.

    The caller must hold the lock ``one_at_a_time``. Inside another such context, this context does nothing.

    Args:
        call: the name of the public function that makes the change, for the error.
        roots: the models that are changed.

    Raises RuntimeError, before anything is changed, if a running call does not end within 30 seconds.
    """
    global _change
    if _change is not None or len(sys._current_frames()) == 1:
        yield
        return
    change = _Change(_with_owners({module for root in roots for module in root.modules()}))
    _change = change
    try:
        for module in change.modules:
            vars(module)[_GATE] = _Gate(module)
        _wait_for_others(call, change)
        yield
    finally:
        _change = None
        for module in change.modules:
            gate = vars(module).pop(_GATE, None)
            if type(gate) is _Gate and gate.entry is not None:
                vars(module)[_GATE] = gate.entry
        change.done.set()


def _with_owners(modules: set[nn.Module]) -> set[nn.Module]:
    """Returns ``modules``, and all modules of each model with CUDA graphs that contains one of ``modules``.

    Models whose calls run as plans (rewritten traces of their code) are treated like models with graphs.

    Adding these modules avoids a deadlock. A call of a model with graphs holds the lock of its device, and a
    change needs this lock too. If a call took the lock and then waited at an inner module for the end of the
    change, the call and the change would wait for each other. With the outer model among the modules, its
    calls wait before they take the lock.
    """
    models = [set(owner.modules()) for owner in MethodEntry.owners()]
    return modules.union(*(model for model in models if not model.isdisjoint(modules)))


def _wait_for_others(call: str, change: _Change) -> None:
    deadline = time.monotonic() + _MAX_WAIT
    while (found := _running_elsewhere(change)) is not None:
        if time.monotonic() > deadline:
            thread, module = found
            names = {t.ident: t.name for t in threading.enumerate()}
            raise RuntimeError(
                f"sdfastgn.{call}: thread {names.get(thread, thread)!r} has been running "
                f"{type(module).__name__} for {_MAX_WAIT:g} s. Nothing was changed; try again when it is done"
            )
        # This only pauses the loop: this thread itself sets ``done``, at the end of the change.
        change.done.wait(_LOOK_EVERY)


def _running_elsewhere(change: _Change) -> tuple[int, nn.Module] | None:
    """Returns (thread, module) for a running call of one of the change's modules; None if there is none.

    Calls in the thread that makes the change do not count, and neither do calls that wait at a ``_Gate`` for
    the end of the change.
    """
    was_enabled = gc.isenabled()
    # Garbage collection is off, because it could let other threads run while this thread reads their frames.
    gc.disable()
    try:
        for thread in list(sys._current_frames()):
            if thread != change.owner and thread not in change.waiting:
                module = _called_in(thread, change.modules)
                if module is not None:
                    return thread, module
        return None
    finally:
        if was_enabled:
            gc.enable()


def _called_in(thread: int, modules: set[nn.Module]) -> nn.Module | None:
    """The outermost module of ``modules`` that another thread is calling. None if it is calling none."""
    while True:
        module, last = _called_module(sys._current_frames().get(thread), modules)
        # The thread goes on while its stack is read. If a generator on the stack was suspended meanwhile, the
        # frames below the generator were not found. Then the stack is read again.
        if module is not None or last is None or not last.co_flags & _SUSPENDABLE:
            return module


def _inside_a_call(modules: set[nn.Module]) -> bool:
    """True if the call that has reached a ``_Gate`` was made inside a call of a module of ``modules``."""
    own_call = sys._getframe(2)  # the frame of the call that has reached the gate
    return _called_module(own_call.f_back, modules)[0] is not None


def _called_module(
    frame: FrameType | None, modules: set[nn.Module]
) -> tuple[nn.Module | None, CodeType | None]:
    """Returns (module, code) for the stack of ``frame``.

    ``module``: the outermost one of ``modules`` that is being called; None if none is. ``code``: the code
    object of the outermost frame; None if there is no frame.
    """
    found, last = None, None
    while frame is not None:
        last = frame.f_code
        if last is _CALL and frame.f_locals["self"] in modules:
            found = frame.f_locals["self"]
        frame = frame.f_back
    return found, last
