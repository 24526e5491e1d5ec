"""Launch plans by everything that they depend on but the data.

``plans.get(key)`` finds a plan that was made from valid arguments.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

import torch

__all__ = ["PlanCache", "plan_key"]

# Plans kept: a server that sees ever new shapes must not leak.
_MAX_PLANS = 4096
# Types of arguments other than tensors.
_VALUES = frozenset((type(None), int, float, bool, str, torch.dtype))
Plan = TypeVar("Plan")


class PlanCache(dict[tuple[Any, ...], Plan]):
    """A dictionary that starts over when it is full."""

    def __setitem__(self, key: tuple[Any, ...], plan: Plan) -> None:
        if len(self) >= _MAX_PLANS:
            self.clear()
        super().__setitem__(key, plan)


def plan_key(arguments: Iterable[Any], *more: Any) -> tuple[Any, ...]:
    """Hashable summary of a call: shape, strides, dtype and device of tensors, other values as they are."""
    return (
        *[t if type(t) in _VALUES else (t.shape, t.stride(), t.dtype, t.device) for t in arguments],
        *more,
    )
