"""Plans for parts of a model that cannot be traced as a whole, because a module in it is a boundary.

A boundary is a module with a hook, or a module whose code cannot be traced. The model then runs its own code.
The largest modules in it that contain no module with a hook get plans: their calls are traced, and later ones
run without their Python. If the code of such a module cannot be traced either, the modules in it get plans.
Only modules with convolutions in them are considered.
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
    """Let the largest modules in ``root`` that contain no module with a hook run as plans.

    ``make(module, replaces_entry)`` makes the object that replaces the module's ``forward``.
    ``replaces_entry``: True if ``vars(module)`` has a ``forward`` of other code.
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
