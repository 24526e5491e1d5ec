"""Tells in which *state* the code of a model is: original, or with functions that other code has replaced.

Each set of replaced (monkeypatched) functions, classes and variables is a state of its own.
"""

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

# Maximum number of states of one model's code that are told apart. There are two, for example, if an
# extension replaces a function of the attention and puts it back within each image.
MAX_STATES = 4

# True inside of a module's call that began with a check for replaced functions.
_is_checked: ContextVar[bool] = ContextVar("sdfastgn_is_checked", default=False)
# Module -> weak reference to the states in which the code of its calls was seen. A strong reference could
# keep the module alive, because the states may refer to it.
_states_of: weakref.WeakKeyDictionary[nn.Module, weakref.ref[States]] = weakref.WeakKeyDictionary()


def _adapters_of(root: nn.Module | None) -> tuple[str, ...]:
    """The names of peft's adapters in ``root``. With new adapters, calls of ``root`` may run other code."""
    return tuple(vars(root).get("peft_config") or ()) if root is not None else ()


class _State:
    """The code on which calls of ``root`` depend, as it was when this object was made.

    ``before``: the code as it was when nothing was replaced; None if it was never seen so.

    Attributes:
        replaced: names of the functions that other code had replaced, and whose replacements fused forwards
            would not call.
    """

    def __init__(self, root: nn.Module, before: _State | None = None) -> None:
        self._adapters = _adapters_of(root)
        self.guard = Guard(root)
        self.replaced = replaced_in(self.guard.entries)
        if before is not None:
            self.replaced += [*ignored(before.guard.changed()), *before.guard.changed_inside()]

    def same(self, root: nn.Module | None) -> bool:
        """True if no recorded code has changed. If ``root`` has new adapters, their code is recorded too."""
        if not self.guard.same():
            return False
        if root is not None and self._adapters != _adapters_of(root):
            self.see(root)
        return True

    def see(self, root: nn.Module) -> None:
        """Also record the code on which calls of ``root`` depend now, for instance code of new adapters."""
        self._adapters = _adapters_of(root)
        self.guard.see(root)
        self.replaced += [name for name in replaced_in(self.guard.entries) if name not in self.replaced]


class States:
    """The states in which the code of calls of ``root`` was seen. ``root`` is not kept alive.

    The code gets into another state when other code replaces functions of it, and into an earlier state when
    the functions are put back. A state is named by its index. All states after the first four have the index
    ``MAX_STATES``.

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
        """True if the code that calls of the model run is as it was when the state ``index`` was recorded."""
        return index < len(self._states) and self._states[index].same(self._root())

    def last(self) -> int:
        """The index of the state that was seen last. The first call of this method finds out the state."""
        return self._last if self._states else self.look()

    def seen(self) -> list[str]:
        """Names of functions that are replaced now, and whose replacements fused forwards would not call.

        Empty before the first call of ``root``.
        """
        return self.replaced(self.look()) if self._states else []

    def look(self) -> int:
        """Find out in which state the code is now, and return the index of this state."""
        if not self.same(self._last):
            with self._changing:
                self._last = self._find()
        return self._last

    def see(self, index: int) -> None:
        """Add to the state ``index`` the code on which the model depends now.

        This is needed, for instance, after attention processors were exchanged.
        """
        root = self._root()
        with self._changing:
            if root is not None and index < len(self._states):
                self._states[index].see(root)

    def replaced(self, index: int) -> list[str]:
        """Names of functions replaced in the state ``index``, if fused forwards ignore the replacements."""
        return self._states[index].replaced if index < len(self._states) else ["other code"]

    def entries(self, index: int) -> list[Entry]:
        """An ``Entry`` for each name that the code reads in the state ``index``.

        Empty for ``MAX_STATES``, because states after the first four are not recorded.
        """
        return self._states[index].guard.entries if index < len(self._states) else []

    def change(self, index: int) -> str:
        """Says in words what was replaced since the state ``index`` was seen."""
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
    """A context for the rest of a module's call that began with a check for replaced functions.

    ``as_stock``: True if the call must run without fused blocks, which would ignore replaced functions.
    """
    with setting(_is_checked, True), dispatch.stock_code() if as_stock else nullcontext():
        yield


def is_checked() -> bool:
    """True inside of a module's call that has checked for replaced functions. Inner calls need no check."""
    return _is_checked.get()


def replaced_in_calls(root: nn.Module) -> list[str]:
    """Names of functions that are replaced now, and that earlier calls of modules in ``root`` have run."""
    found = [ref() for module in root.modules() if (ref := _states_of.get(module)) is not None]
    return [name for states in found if states is not None for name in states.seen()]


def reason_of_code(root: nn.Module) -> str | None:
    """Why modules in ``root`` run without fused blocks now: other code has replaced functions that they run.

    None if no function was replaced.
    """
    names = list(dict.fromkeys(replaced_in_calls(root) or _State(root).replaced))
    if not names:
        return None
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"other code has replaced {names[0]}{more}"
