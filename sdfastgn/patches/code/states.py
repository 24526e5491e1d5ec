"""Tells in which state the code of a model is: as its packages wrote it, or with parts that were replaced."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar

from torch import nn

from sdfastgn.kernels.common import dispatch
from sdfastgn.kernels.common.setting import setting
from sdfastgn.patches.code.guard import Guard
from sdfastgn.patches.code.reach import Entry
from sdfastgn.patches.code.replaced import ignored, is_counter, replaced_in

# Maximum number of states of one model's code that are told apart. Code that switches an attention on and off
# within each image has two.
MAX_STATES = 4

# True inside of a call whose code was compared.
_is_checked: ContextVar[bool] = ContextVar("sdfastgn_is_checked", default=False)
# Module -> the states in which the code of its calls was seen. They are not kept alive: they may refer to the
# module.
_states_of: weakref.WeakKeyDictionary[nn.Module, weakref.ref[States]] = weakref.WeakKeyDictionary()


def _adapters_of(root: nn.Module | None) -> tuple[str, ...]:
    """The names of peft's adapters in ``root``. With the first one, layers get classes of peft."""
    return tuple(vars(root).get("peft_config") or ()) if root is not None else ()


class _State:
    """One state of the code on which calls of ``root`` depend.

    ``before``: a state in which no code was replaced, or None.

    Attributes:
        replaced: names of the code in this state that fused forwards would ignore.
    """

    def __init__(self, root: nn.Module, before: _State | None = None) -> None:
        self._adapters = _adapters_of(root)
        self.guard = Guard(root)
        self.replaced = replaced_in(self.guard.entries)
        if before is not None:
            self.replaced += [*ignored(before.guard.changed()), *before.guard.changed_inside()]

    def same(self, root: nn.Module | None) -> bool:
        """True if the code is still in this state. Reads the code of adapters that are new in ``root``."""
        if not self.guard.same():
            return False
        if root is not None and self._adapters != _adapters_of(root):
            self.see(root)
        return True

    def see(self, root: nn.Module) -> None:
        """Add what ``root`` depends on now."""
        self._adapters = _adapters_of(root)
        self.guard.see(root)
        self.replaced += [name for name in replaced_in(self.guard.entries) if name not in self.replaced]


class States:
    """The states in which the code of calls of ``root`` was seen. ``root`` is not kept alive.

    A state is named by its index. All states after the first four have the index ``MAX_STATES``.

    Attributes:
        are_too_many: True if there were more than four states.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = weakref.ref(root)
        self._states: list[_State] = []
        self._changing = threading.RLock()
        self._last = 0
        self.are_too_many = False
        _states_of[root] = weakref.ref(self)

    def same(self, index: int) -> bool:
        """True if the code is in the state ``index``."""
        return index < len(self._states) and self._states[index].same(self._root())

    def last(self) -> int:
        """The state that was seen last. The first call looks for it."""
        return self._last if self._states else self.look()

    def seen(self) -> list[str]:
        """``replaced`` of the present state; empty before the first call."""
        return self.replaced(self.look()) if self._states else []

    def look(self) -> int:
        """Find out in which state the code is."""
        if not self.same(self._last):
            with self._changing:
                self._last = self._find()
        return self._last

    def see(self, index: int) -> None:
        """Add what the model depends on now, for instance after its processors were exchanged."""
        root = self._root()
        with self._changing:
            if root is not None and index < len(self._states):
                self._states[index].see(root)

    def replaced(self, index: int) -> list[str]:
        """Names of the code that is replaced in the state ``index``, and that fused forwards would ignore."""
        return self._states[index].replaced if index < len(self._states) else ["other code"]

    def entries(self, index: int) -> list[Entry]:
        """An entry for each name that the code reads in the state ``index``. Empty if it is not kept."""
        return self._states[index].guard.entries if index < len(self._states) else []

    def change(self, index: int) -> str:
        """What was replaced since the state ``index`` was seen, in words."""
        guard = self._states[index].guard if index < len(self._states) else None
        if guard is None:
            return "parts of the code"
        found = [*(entry.words for entry in guard.changed()), *guard.changed_inside()]
        return found[0] if found else "parts of the code"

    def _find(self) -> int:
        root = self._root()
        for index, state in enumerate(self._states):
            if state.same(root):
                return index
        for index, state in enumerate(self._states):
            changed = state.guard.changed()
            if changed and all(map(is_counter, changed)):
                state.guard.forget(changed)
                if state.same(root):
                    return index
        if root is None or len(self._states) == MAX_STATES:
            self.are_too_many = True
            return MAX_STATES
        unchanged = next((state for state in self._states if not state.replaced), None)
        self._states.append(_State(root, unchanged))
        return len(self._states) - 1


@contextmanager
def running(as_stock: bool) -> Iterator[None]:
    """A context for a call whose code was compared. ``as_stock``: in it, the model runs stock's code."""
    with setting(_is_checked, True), dispatch.stock_code() if as_stock else nullcontext():
        yield


def is_checked() -> bool:
    """True inside of a call whose code was compared: calls in it need not compare theirs."""
    return _is_checked.get()


def replaced_in_calls(root: nn.Module) -> list[str]:
    """Names of code that is replaced now, and that calls of modules in ``root`` have run before."""
    found = [ref() for module in root.modules() if (ref := _states_of.get(module)) is not None]
    return [name for states in found if states is not None for name in states.seen()]


def reason_of_code(root: nn.Module) -> str | None:
    """Why modules in ``root`` run stock's code now: parts of it were replaced. None if none were."""
    names = list(dict.fromkeys(replaced_in_calls(root) or _State(root).replaced))
    if not names:
        return None
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"other code has replaced {names[0]}{more}"
