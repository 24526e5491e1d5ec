"""Plans inside of a model that cannot have plans as a whole, because a module in it is a boundary.

A boundary is a module with a hook, or one whose code cannot be traced. Then the model runs its own code, and
the largest modules in it without a boundary inside have plans. Each of them finds out the same about itself:
if its own code cannot be traced, modules in it get plans.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import nn

from sdfastgn.patches.code.checked import entrances
from sdfastgn.patches.graphs.models import is_harmless, method_of
from sdfastgn.patches.lora.adapters import is_adapted
from sdfastgn.patches.swap.class_forward import MethodEntry, has_foreign_forward, place_in

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def plan_inside(root: nn.Module, make: Callable[[nn.Module, bool], MethodEntry]) -> None:
    """Give each of the largest modules in ``root`` that have no boundary inside an entry with plans.

    ``make(module, replaces_entry)`` makes the entry.
    """
    for module in list(_largest(root)):
        if place_in(module, method_of(module)) == "forward" and not MethodEntry.all_of(module):
            make(module, "forward" in vars(module)).put("forward")


def _largest(root: nn.Module) -> Iterator[nn.Module]:
    _, *children = entrances(root)
    for child in children:
        parts = list(child.modules())
        is_layer = is_adapted(child) or len(parts) == 1
        if is_layer or not any(isinstance(part, CONVOLUTIONS) for part in parts):
            continue
        if has_foreign_forward(child) or any(map(_is_hooked, parts[1:])):
            yield from _largest(child)
        else:
            yield child


def _is_hooked(module: nn.Module) -> bool:
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    return has_foreign_forward(module) or not all(map(is_harmless, hooks))
