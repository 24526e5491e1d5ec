"""Caches launch plans. A *plan* says which kernels an op launches, with which grids and constants.

A plan is made once for each *kind* of call and then kept. Two calls are of the same kind if the shapes,
strides, dtypes and devices of their tensors are equal, and all other arguments are equal and of equal types.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from operator import itemgetter
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from sdfastgn.kernels.common import dispatch
from sdfastgn.kernels.common.declaration import NUMBERS, arguments_of, fields_of, gaps_of, without_gaps

# Maximum number of entries of a cache of launch plans. Without a limit, the cache of a server would grow
# forever if requests keep bringing new shapes.
_MAX_PLANS = 4096
# Types of those arguments of an op that are not tensors.
_VALUES = frozenset((type(None), int, float, bool, str, torch.dtype))
Value = TypeVar("Value")


class PlanCache(dict[tuple[Any, ...], Value]):
    """A dictionary with at most ``_MAX_PLANS`` entries. A full one is emptied before an entry is added."""

    def __setitem__(self, key: tuple[Any, ...], plan: Value) -> None:
        if len(self) >= _MAX_PLANS:
            self.clear()
        super().__setitem__(key, plan)


def plan_key(arguments: Iterable[Any], *more: Any) -> tuple[Any, ...]:
    """Returns the key of a call in a ``PlanCache``. Calls that can use the same launches have equal keys.

    For each tensor, the key has its shape, strides, dtype and device. Other arguments are in the key as they
    are. ``more``: further values of the key.
    """
    return (
        *[t if type(t) in _VALUES else (t.shape, t.stride(), t.dtype, t.device) for t in arguments],
        *more,
    )


class Plan(Protocol):
    """The launches of an op for calls with equal shapes, strides, dtypes, devices and other arguments.

    ``run`` only takes calls with valid arguments. Their tensors must not be empty, and must have layouts that
    kernels can read.
    """

    def run(self, call: Any) -> Any:
        """Launch the kernels, and return the results that the caller gets."""


class SavingPlan(Plan, Protocol):
    """The launches of an op with a backward, which may need results that the caller does not get."""

    def run_and_save(self, call: Any) -> Any:
        """Launch the kernels, and return all results of the op, including those for the backward."""


def named(place: str) -> Callable[[Any], Any]:
    """Returns a function ``call -> Plan`` that makes an instance of the class at ``place``.

    ``place``: module and class, such as "sdfastgn.kernels.geglu.plans:GegluPlan". The module is imported only
    when the returned function is called. The reasons are that the module needs Triton, and that it imports
    the op's module, which calls ``named``.
    """
    module, _, name = place.partition(":")
    return lambda call: getattr(importlib.import_module(module), name)(call)


class Plans:
    """The plans of one op: the launches of its kernels, in a cache.

    Args:
        op: the op's name, for warnings and reports.
        arguments: the declaration of the op's arguments.
        make: function ``call -> Plan``. It only gets calls whose tensors have layouts that kernels can read.
    """

    def __init__(self, op: str, arguments: Any, make: Callable[[Any], Any]) -> None:
        self._op, self._make = op, make
        self.made: PlanCache[Any] = PlanCache()
        # Fields of the declaration with a default are not in the op's schema, and hold tensors or None. So
        # the cache's key treats them as tensors.
        values = [f.place for f in arguments_of(arguments) if not f.is_tensor]
        numbers = [f.place for f in arguments_of(arguments) if f.kind in NUMBERS]
        places = [f.place for f in fields_of(arguments) if f.place not in values]
        self.tensors, self._values, self._numbers = picker(places), picker(values), picker(numbers)

    def key(self, call: Any, tensors: tuple[Tensor | None, ...], saves: bool = True) -> tuple[Any, ...]:
        """Returns the key of ``call`` in the cache of plans.

        ``tensors``: the tensors of ``call``, from ``self.tensors(call)``. ``saves``: True if the plan must
        also return the results that only the backward needs (``run_and_save``).
        """
        # ``is_contiguous`` takes less CPU time than ``stride``, and ``get_device`` less than ``device``.
        # The strides of a contiguous tensor follow from its shape, except for axes with one element. Their
        # stride may be any number, and does not matter.
        return (
            *[
                None if t is None else (t.shape, t.is_contiguous() or t.stride(), t.dtype, t.get_device())
                for t in tensors
            ],
            *self._values(call),
            # The key has the types of the numbers, because 1 == 1.0 == True. Without the types, a call with
            # an invalid number would find the plan of a call with a valid number. The arguments of a call
            # that finds a plan are not checked.
            *map(type, self._numbers(call)),
            saves,
        )

    def of(self, call: Any, saves: bool = True) -> Any:
        """Returns the plan for ``call``, from the cache or newly made.

        The arguments must be valid and not empty. Raises ``KernelError`` if there is no plan yet, and the
        op's kernels are turned off on the GPU of the call.
        """
        key = self.key(call, self.tensors(call), saves)
        plan = self.made.get(key)
        if plan is None:
            if dispatch.is_op_off(self._op, self._first(call)):
                raise dispatch.KernelError(f"the kernels of {self._op} are off")
            gaps = gaps_of(call)
            plan = _CopyingPlan(self.of(without_gaps(call, gaps), saves), gaps) if gaps else self._make(call)
            self.made[key] = plan
        return plan

    def run(
        self,
        name: str,
        call: Any,
        check: Callable[[str, Any], object],
        has_kernel: Callable[[Any], bool],
    ) -> Any:
        """Runs ``call`` by the kernels of an op without a backward, and returns the results.

        Returns None if plain PyTorch must compute the results. Then the arguments have been checked.

        Args:
            name: the full name of the op, for errors.
            check: function ``(name, call)`` that raises an error for invalid arguments.
            has_kernel: function ``call -> bool``. It gets valid arguments, and returns False if no kernel
                takes them.
        """
        if dispatch.is_plain_inference(call[0], call):
            try:
                # A plan says how to launch the kernels. It is made and cached only for valid arguments. So if
                # a plan is found, the arguments are valid, and need no check.
                plan = self.made.get(self.key(call, self.tensors(call)))
                if plan is None:
                    check(name, call)
                    if has_kernel(call):
                        plan = self.of(call)
                if plan is not None:
                    return plan.run(call)
            except dispatch.KernelError as error:
                self.turn_off(call, error)
            # If an argument is a number instead of a tensor, or a tensor without strides or memory, ``key``
            # raises an error that does not help the user. ``check`` then raises one that names the argument.
            except (AttributeError, RuntimeError, TypeError):
                check(name, call)
                raise
        check(name, call)
        return None

    def turn_off(self, call: Any, error: dispatch.KernelError) -> None:
        """Turn the op's kernels off on the GPU of ``call``, whose plan has raised ``error``."""
        dispatch.turn_op_off(self._op, self._first(call), error)
        # The cached plans are deleted, because a call that finds its plan does not check whether the kernels
        # are off. Without a plan, a call calls ``of``, which raises KernelError from now on.
        self.made.clear()

    def _first(self, call: Any) -> Tensor:
        return next(t for t in self.tensors(call) if t is not None)


class _CopyingPlan:
    """A launch plan for calls with operands whose memory layout kernels cannot read.

    It copies these operands, and runs the plan for calls with the layout of the copies.
    """

    __slots__ = ("_gaps", "_plan")

    def __init__(self, plan: Any, gaps: Any) -> None:
        self._plan, self._gaps = plan, gaps

    def run(self, call: Any) -> Any:
        return self._plan.run(without_gaps(call, self._gaps))

    def run_and_save(self, call: Any) -> Any:
        return self._plan.run_and_save(without_gaps(call, self._gaps))


def picker(places: list[int]) -> Callable[[Any], tuple[Any, ...]]:
    """Returns a function that takes the arguments of a call and returns those with the indices ``places``."""
    if not places:
        return lambda call: ()
    return itemgetter(*places) if len(places) > 1 else lambda call: (call[places[0]],)
