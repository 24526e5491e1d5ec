"""Tells in which state the code of a model is: as its packages wrote it, or with parts that were replaced."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar

from torch import nn

from sdfastgn.kernels.common import dispatch
from sdfastgn.patches.code.guard import Guard
from sdfastgn.patches.code.replaced import ignored, replaced_in

__all__ = ["MAX_STATES", "States", "is_checked", "reason_of_code"]

# Maximum number of states of one model's code that are told apart. Code that switches an attention on and off
# within each image has two.
MAX_STATES = 4

# True inside of a call whose code was compared.
_is_checked: ContextVar[bool] = ContextVar("sdfastgn_is_checked", default=False)
# Module -> the states in which the code of its calls was seen.
_states_of: weakref.WeakKeyDictionary[nn.Module, States] = weakref.WeakKeyDictionary()


class _State:
    """One state of the code on which calls of ``root`` depend.

    ``before``: a state in which no code was replaced, or None.

    Attributes:
        replaced: names of the code in this state that fused forwards would ignore.
    """

    def __init__(self, root: nn.Module, before: _State | None = None) -> None:
        self.guard = Guard(root)
        self.replaced = replaced_in(self.guard.entries)
        if before is not None:
            self.replaced += [*ignored(before.guard.changed()), *before.guard.changed_inside()]

    def see(self, root: nn.Module) -> None:
        """Add what ``root`` depends on now."""
        self.guard.see(root)
        self.replaced += [name for name in replaced_in(self.guard.entries) if name not in self.replaced]


class States:
    """The states in which the code of calls of ``root`` was seen. ``root`` is not kept alive.

    Attributes:
        now: index of the state that was seen last; ``MAX_STATES`` for each state after the first four.
        are_too_many: True if there were more than four states.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = weakref.ref(root)
        self._states: list[_State] = []
        self._changing = threading.RLock()
        self.now = 0
        self.are_too_many = False
        _states_of[root] = self

    def same(self) -> bool:
        """True if the code is still in the state ``now``."""
        now = self.now
        return now < len(self._states) and self._states[now].guard.same()

    def last(self) -> int:
        """The index of the state that was seen last. The first call looks for it."""
        return self.now if self._states else self.look()

    def look(self) -> int:
        """Find out in which state the code is, and return its index."""
        if not self.same():
            with self._changing:
                self.now = self._find()
        return self.now

    def see(self) -> None:
        """Add what the model depends on now, for instance after its processors were exchanged."""
        root = self._root()
        with self._changing:
            if root is not None and self.now < len(self._states):
                self._states[self.now].see(root)

    @property
    def replaced(self) -> list[str]:
        """Names of the code that is replaced in the state ``now``, and that fused forwards would ignore."""
        now = self.now
        return self._states[now].replaced if now < len(self._states) else ["other code"]

    def change(self) -> str:
        """What was replaced since the state ``now`` was seen; empty if nothing was."""
        guard = self._states[self.now].guard if self.now < len(self._states) else None
        if guard is None:
            return ""
        return next((entry.words for entry in guard.changed()), "") or next(guard.changed_inside(), "")

    @contextmanager
    def running(self) -> Iterator[None]:
        """A context for a call in the state ``now``: if code was replaced, the model runs stock's code."""
        token = _is_checked.set(True)
        try:
            with dispatch.stock_code() if self.replaced else nullcontext():
                yield
        finally:
            _is_checked.reset(token)

    def _find(self) -> int:
        for index, state in enumerate(self._states):
            if state.guard.same():
                return index
        root = self._root()
        if root is None or len(self._states) == MAX_STATES:
            self.are_too_many = True
            return MAX_STATES
        unchanged = next((state for state in self._states if not state.replaced), None)
        self._states.append(_State(root, unchanged))
        return len(self._states) - 1


def is_checked() -> bool:
    """True inside of a call whose code was compared: calls in it need not compare theirs."""
    return _is_checked.get()


def reason_of_code(root: nn.Module) -> str | None:
    """Why modules in ``root`` run stock's code now: parts of it were replaced. None if none were."""
    replaced = []
    for states in filter(None, map(_states_of.get, root.modules())):
        states.look()
        replaced += states.replaced
    names = list(dict.fromkeys(replaced or _State(root).replaced))
    if not names:
        return None
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"other code has replaced {names[0]}{more}"
