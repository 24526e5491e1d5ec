"""Launch plans, each made once for a kind of call.

A call's kind is everything but the data: shapes, strides, dtypes and devices of its tensors, and its
other arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import itemgetter
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from sdfastgn.kernels.common.declaration import arguments_of, fields_of, gaps_of, without_gaps

# Plans kept: a server that sees ever new shapes must not leak.
_MAX_PLANS = 4096
# Types of arguments other than tensors.
_VALUES = frozenset((type(None), int, float, bool, str, torch.dtype))
Value = TypeVar("Value")


class PlanCache(dict[tuple[Any, ...], Value]):
    """A dictionary that starts over when it is full."""

    def __setitem__(self, key: tuple[Any, ...], plan: Value) -> None:
        if len(self) >= _MAX_PLANS:
            self.clear()
        super().__setitem__(key, plan)


def plan_key(arguments: Iterable[Any], *more: Any) -> tuple[Any, ...]:
    """Hashable summary of a call: shape, strides, dtype and device of tensors, other values as they are."""
    return (
        *[t if type(t) in _VALUES else (t.shape, t.stride(), t.dtype, t.device) for t in arguments],
        *more,
    )


class Plan(Protocol):
    """How one kind of call is launched, on valid arguments that are not empty and have no gaps."""

    def run(self, call: Any) -> Any:
        """What the caller gets."""


class SavingPlan(Plan, Protocol):
    """The plan of an op that has a backward."""

    def run_and_save(self, call: Any) -> Any:
        """All results of the op, those for the backward too."""


class Plans:
    """The plans of one op.

    Args:
        arguments: the declaration of the op's arguments.
        make: ``arguments without gaps -> Plan``.
    """

    def __init__(self, arguments: Any, make: Callable[[Any], Any]) -> None:
        self._make = make
        self.made: PlanCache[Any] = PlanCache()
        # Fields with defaults are tensors, or None.
        values = [f.place for f in arguments_of(arguments) if not f.is_tensor]
        places = [f.place for f in fields_of(arguments) if f.place not in values]
        self.tensors, self._values = picker(places), picker(values)

    def key(self, call: Any, tensors: tuple[Tensor | None, ...], saves: bool = True) -> tuple[Any, ...]:
        """The kind of ``call``, whose ``tensors`` the caller has picked; ``saves``: by ``run_and_save``."""
        return (
            *[None if t is None else (t.shape, t.stride(), t.dtype, t.device) for t in tensors],
            *self._values(call),
            saves,
        )

    def of(self, call: Any, saves: bool = True) -> Any:
        """The plan for ``call``, whose arguments are valid and not empty."""
        key = self.key(call, self.tensors(call), saves)
        plan = self.made.get(key)
        if plan is None:
            gaps = gaps_of(call)
            plan = _CopyingPlan(self.of(without_gaps(call, gaps), saves), gaps) if gaps else self._make(call)
            self.made[key] = plan
        return plan


class _CopyingPlan:
    """The plan for operands with gaps: ``plan``, for copies of them."""

    __slots__ = ("_gaps", "_plan")

    def __init__(self, plan: Any, gaps: Any) -> None:
        self._plan, self._gaps = plan, gaps

    def run(self, call: Any) -> Any:
        return self._plan.run(without_gaps(call, self._gaps))

    def run_and_save(self, call: Any) -> Any:
        return self._plan.run_and_save(without_gaps(call, self._gaps))


def picker(places: list[int]) -> Callable[[Any], tuple[Any, ...]]:
    """``call -> the arguments at these places``."""
    if not places:
        return lambda call: ()
    return itemgetter(*places) if len(places) > 1 else lambda call: (call[places[0]],)
