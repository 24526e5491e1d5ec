"""Tells whether a model is still what was traced: its Python state, and the code that ran.

A plan repeats the Python of its trace. So it depends on all that a CUDA graph of the call depends on, except
on addresses, because a plan looks up parameters by name.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType, MappingProxyType
from typing import Any

import torch
from torch import nn

from sdfastgn.patches.code.stateless import CodeState
from sdfastgn.patches.code.states import States
from sdfastgn.patches.graphs.models import is_harmless
from sdfastgn.patches.graphs.watch import TRUSTED, Watch, reason_of_error
from sdfastgn.patches.lora.adapter_survey import AdapterSurvey
from sdfastgn.plans.trace.traced import Untraceable


class Guard:
    """The state of ``module`` and of its code, as they were when the guard was made.

    Args:
        module: the module. It is not kept alive.
        states, state: the states of the code, and the one in which the guard is made.
        device: the device of the call.
        trusted: packages whose code keeps no state but in tensors and attributes, besides the known ones.
        apart: module -> names of its attributes that the caller compares itself.
        survey: compares the layers with merged adapters; None if there are none.

    Attributes:
        reason: why there can be no plan in this state of the module; None if there can.
    """

    def __init__(
        self,
        module: nn.Module,
        states: States,
        state: int,
        device: torch.device | None,
        trusted: frozenset[str] = frozenset(),
        apart: Mapping[nn.Module, frozenset[str]] = MappingProxyType({}),
        survey: AdapterSurvey | None = None,
    ) -> None:
        self._module = weakref.ref(module)
        self._states, self._state = states, state
        self._code = CodeState(module, TRUSTED | trusted)
        self._watch: Watch | None = None
        self.reason = self._code.reason
        try:
            trusted |= frozenset() if self._code.reason else self._code.packages
            options = {"has_factors": False, "may_move": True, "trusted": trusted, "apart": apart}
            self._watch = Watch(module, is_harmless, device, survey, **options)  # type: ignore[arg-type]
            self.reason = self.reason or self._watch.reason
        except Exception as error:
            # Another thread that begins to ``optimize`` the model also causes one, as it writes into modules.
            self.reason = reason_of_error(error)
        if states.are_too_many:
            self.reason = "other code replaces and puts back what it runs, in too many ways"

    def is_in_state(self) -> bool:
        """True if the code is in the state in which the guard was made."""
        return self._states.look() == self._state

    def same(self) -> bool:
        """True if nothing has changed since the guard was made, neither in the code nor in the module."""
        module = self._module()
        if module is None or self._watch is None or not self.is_in_state():
            return False
        return self._code.same() and self._watch.unchanged(module)

    def names(self) -> list[tuple[str, Any, Any]]:
        """(where, name, value) of all that the code reads by name."""
        entries = self._states.entries(self._state)
        return [*((e.owner, e.name, e.value) for e in entries), *self._code.globals()]

    def functions(self) -> list[FunctionType]:
        """The functions of unknown packages that the code runs."""
        return self._code.functions

    def change(self) -> str:
        """What has changed in the module, in words."""
        module = self._module()
        if module is None or self._watch is None:
            return ""
        return self._code.change() or self._watch.what_changed(module)

    @contextmanager
    def undoing(self) -> Iterator[None]:
        """A context for a trace. What it changes in lists and dicts of code is put back.

        Raises Untraceable if there is such a change.
        """
        with self._code.undoing() as changed:
            yield
        if changed:
            raise Untraceable(f"the call changes {changed[0]}")
