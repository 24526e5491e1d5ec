"""Tells whether a model, and the code that it runs, are still as they were when a call was traced.

A plan is the list of kernel calls that came out of the trace. It stays right only as long as the model's
Python would do the same again. So it depends on all that a CUDA graph of the call depends on. The addresses
of weights are an exception: a plan looks up parameters by name in each call.
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
    """Records ``module`` and the code that it runs, and compares them later with the record.

    Args:
        module: the module. It is not kept alive.
        states: knows which functions that the module calls were replaced by other code, and gives a number to
            each combination of replaced functions.
        state: the number of the present combination.
        device: the device of the call.
        trusted: names of packages whose code keeps state only in tensors and attributes. Packages that
            sdfastgn knows need not be named.
        apart: for each module, the names of attributes that the caller compares itself.
        survey: compares the layers with merged adapters; None if there are none.

    Attributes:
        reason: why the module cannot be traced in its present state; None if it can.
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
            # If another thread begins to ``optimize`` the model, and so writes into its modules meanwhile,
            # looking at the module may fail. Then the module cannot be traced.
            self.reason = reason_of_error(error)
        if states.are_too_many:
            self.reason = "other code replaces and puts back what it runs, in too many ways"

    def is_in_state(self) -> bool:
        """True if the same functions are replaced by other code as when the guard was made."""
        return self._states.look() == self._state

    def same(self) -> bool:
        """True if nothing has changed since the guard was made, neither in the code nor in the module."""
        module = self._module()
        if module is None or self._watch is None or not self.is_in_state():
            return False
        return self._code.same() and self._watch.unchanged(module)

    def names(self) -> list[tuple[str, Any, Any]]:
        """Lists (owner, name, value) for each global and attribute that the code reads by name."""
        entries = self._states.entries(self._state)
        return [*((e.owner, e.name, e.value) for e in entries), *self._code.globals()]

    def functions(self) -> list[FunctionType]:
        """Lists the functions that the code runs and that belong to packages unknown to sdfastgn."""
        return self._code.functions

    def change(self) -> str:
        """Says in words what has changed in the module or its code since the guard was made."""
        module = self._module()
        if module is None or self._watch is None:
            return ""
        return self._code.change() or self._watch.what_changed(module)

    @contextmanager
    def undoing(self) -> Iterator[None]:
        """A context for a trace. It undoes changes in lists and dicts that the traced code reads by name.

        Raises Untraceable at the end if there was such a change, because a plan would not repeat it.
        """
        with self._code.undoing() as changed:
            yield
        if changed:
            raise Untraceable(f"the call changes {changed[0]}")
