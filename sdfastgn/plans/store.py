"""The plans of one module, by kind of call, and the kinds of calls that have none."""

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

# Maximum number of plans of one module. Each one is for one kind of call.
MAX_PLANS = 16
# Number of kinds of calls in a row that are traced although no earlier plan was used again. A call with a
# number that is always another one, such as a timestep, would otherwise be traced each time.
_NEW_KINDS = 16
# A plan that was used again within this number of calls is not removed for another. Otherwise each call would
# be a trace if 17 sizes take turns.
_IN_USE = 128
# Maximum number of plans without masks beside one with all masks. A model with two masks has at most 8.
_MOST_UNMASKED = 8


@dataclasses.dataclass(slots=True)
class Made:
    """A plan, the function that runs it, and what its call leaves besides tensors.

    Attributes:
        last_use: number of the call; 0 if it was not used again.
        idle: number of the last calls in a row after which the GPU had nothing left to do.
        masks: the masks of attention that calls may need or not.
        unmasked: which keys the masks show -> the plan for such calls.
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
        has_masks = len(masks) and plan.slices is None  # slices read parts of the masks
        return cls(plan, Baked(plan), outcome, masks=masks if has_masks else None)

    def all(self) -> list[Made]:
        """This plan, and those without masks."""
        return [self, *list(self.unmasked.values())]

    def add_unmasked(self, seen: tuple[str | None, ...], made: Made) -> None:
        if len(self.unmasked) >= _MOST_UNMASKED:
            del self.unmasked[min(self.unmasked, key=lambda kind: self.unmasked[kind].last_use)]
        self.unmasked[seen] = made


class Plans:
    """The plans of one module in one state of its code, by kind of call.

    Attributes:
        guard: compares the module.
        state: what is kept in modules.
        adapters: the layers with adapters.
        refused: kind of call -> why it has no plan, for each of the traces that failed.
        seen: number of calls, with or without a plan.
        new_kinds: how often a trace was wanted since a plan was last used again.
    """

    def __init__(self, guard: Guard, state: State, adapters: Adapters) -> None:
        self.guard, self.state, self.adapters = guard, state, adapters
        self.is_planned_inside = False
        self.made: dict[Any, Made] = {}  # oldest first
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
        """Raise Unsupported if another trace would save no time.

        If kinds of calls hardly repeat, the 32nd, 64th, 128th, ... is traced.
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
