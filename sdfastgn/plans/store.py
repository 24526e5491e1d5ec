"""Stores the plans of one module, and why some kinds of calls have no plan.

A plan is a traced call as a list of kernel calls. Calls are of one kind if their arguments have equal shapes,
strides, dtypes and devices, and other arguments and settings are equal. They share a plan.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from typing import Any

from sdfastgn.patches.graphs.arguments import Unsupported
from sdfastgn.patches.graphs.policy import MAX_REASONS
from sdfastgn.plans.adapters import Adapters
from sdfastgn.plans.guard import Guard
from sdfastgn.plans.masks import Masks
from sdfastgn.plans.outcome import Outcome
from sdfastgn.plans.run.bake import Baked
from sdfastgn.plans.run.plan import Plan
from sdfastgn.plans.state import State

# Maximum number of plans of one module. Each plan serves calls with the same shapes and settings.
MAX_PLANS = 16
# If this number of calls in a row needed a new trace, and none could use an earlier plan, most further calls
# are not traced. Otherwise a model that gets another number in each call, such as a timestep, would be traced
# in each of its calls.
_NEW_KINDS = 16
# A plan that was used again within this number of calls is not removed to make place for another plan.
# Otherwise each call would be traced if 17 image sizes take turns and only 16 plans are kept.
_IN_USE = 128
# For one kind of call: the maximum number of plans whose attention reads fewer masks than the model's code
# has. Each of two masks may be kept, dropped, or replaced by a number of keys, which makes 8 such plans.
_MOST_UNMASKED = 8


@dataclasses.dataclass(slots=True)
class Made:
    """One plan of a module, and what is needed to use it for calls.

    Attributes:
        plan: the plan.
        baked: runs the plan with less CPU time, as generated Python code.
        outcome: makes the result of a call from the tensors that the plan computes.
        last_use: the number of the module's call that last used the plan again; 0 if the plan was used only
            once.
        idle: in how many calls in a row up to now the GPU was done before Python.
        masks: the attention masks that some calls may not need. None if there are none, or if the plan runs a
            batch in slices.
        unmasked: for each combination of masks that are not needed, the plan that does not read them.
    """

    plan: Plan
    baked: Baked
    outcome: Outcome
    last_use: int = 0
    idle: int = 0
    masks: Masks | None = None
    unmasked: dict[tuple[str | None, ...], Made] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, plan: Plan, outcome: Outcome) -> Made:
        masks = Masks(plan)
        # A plan that runs a batch in slices always reads its attention masks, because each slice reads
        # another part of them.
        has_masks = len(masks) and plan.slices is None
        return cls(plan, Baked(plan), outcome, masks=masks if has_masks else None)

    def all(self) -> list[Made]:
        """Lists this plan, and the plans made from it whose attention reads fewer masks."""
        return [self, *list(self.unmasked.values())]

    def add_unmasked(self, seen: tuple[str | None, ...], made: Made) -> None:
        if len(self.unmasked) >= _MOST_UNMASKED:
            del self.unmasked[min(self.unmasked, key=lambda kind: self.unmasked[kind].last_use)]
        self.unmasked[seen] = made


class Plans:
    """The plans of one module for one state of its code.

    If functions that the code calls are replaced, the module gets another ``Plans``.

    Keys of the dicts are made from a call's arguments and from settings. Calls with equal keys share a plan.

    Attributes:
        guard: compares the module with its state during the traces.
        state: the attributes of modules in which calls keep tensors for later calls.
        adapters: the layers with adapters, such as a LoRA.
        is_planned_inside: True if modules in the module have got plans, because it cannot be traced itself.
        made: for each key, the plan.
        refused: for each key, the reasons why traces of such calls failed, one for each failed trace.
        seen: number of calls so far, with or without a plan.
        new_kinds: number of calls that needed a new trace since a call last used an earlier plan.
    """

    def __init__(self, guard: Guard, state: State, adapters: Adapters) -> None:
        self.guard, self.state, self.adapters = guard, state, adapters
        self.is_planned_inside = False
        self.made: dict[Any, Made] = {}  # key of a call -> its plan, the oldest first
        self.refused: defaultdict[Any, list[str]] = defaultdict(list)
        self.seen = self.new_kinds = 0

    def find(self, key: Any) -> Made | None:
        made = self.made.get(key)
        if made is not None and not made.plan.is_current():
            self.made = {kind: each for kind, each in self.made.items() if each.plan.is_current()}
            return None
        if made is not None:
            made.last_use = self.seen
            self.new_kinds = 0
        return made

    def check_is_worth_it(self) -> None:
        """Raise Unsupported if another trace would probably save no time.

        If calls hardly ever repeat, only the 32nd, 64th, 128th, ... call that has no plan is traced. While
        there are ``MAX_PLANS`` plans, all of them in use, no call is traced.
        """
        self.new_kinds += 1
        if self.new_kinds > _NEW_KINDS and self.new_kinds.bit_count() > 1:
            raise Unsupported("its calls hardly repeat")
        if len(self.made) >= MAX_PLANS and all(map(self._is_in_use, self.made.values())):
            raise Unsupported(f"it has {MAX_PLANS} plans for other kinds of calls, and all are in use")

    def _is_in_use(self, made: Made) -> bool:
        return made.last_use > 0 and self.seen - made.last_use < _IN_USE

    def refuse(self, key: Any, reason: str) -> None:
        if len(self.refused) > MAX_REASONS:
            self.refused.clear()
        self.refused[key].append(reason)

    def add(self, key: Any, made: Made) -> None:
        if len(self.made) >= MAX_PLANS:
            del self.made[min(self.made, key=lambda kind: self.made[kind].last_use)]
        self.made[key] = made
