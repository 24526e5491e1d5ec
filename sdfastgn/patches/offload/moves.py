"""Notices when a module moves to another device or dtype: ``Moves`` replaces its method ``_apply``.

``.to()``, ``.half()`` and similar methods call ``_apply`` to move or convert a module's tensors. ``Moves``
does this faster if the module is an offloaded model (``offloaded.py``). It also tells the objects that run
the module's calls as CUDA graphs, or as rewritten traces, about each move.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor, nn

from sdfastgn.patches.offload.offloaded import forget, moving
from sdfastgn.patches.swap.class_forward import MethodEntry
from sdfastgn.patches.swap.instance_entries import InstanceEntry, guard, unguard


class Moves(InstanceEntry):
    """Replaces the method ``_apply`` of its module, which ``.to()`` and similar methods call.

    It runs the original method, with faster copies if the module is offloaded. Then it calls ``moved`` of
    each object of sdfastgn that replaces a method of the module or of a submodule, such as a ``forward`` with
    CUDA graphs. With ``recurse=False`` it only runs the original method.
    """

    __slots__ = ()

    def __call__(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        module = self.module
        if not recurse:
            return type(module)._apply(module, fn, recurse)
        with moving(module, fn) as move:
            type(module)._apply(module, move)
            self.arrange(module)
        for each in module.modules():
            for entry in MethodEntry.all_of(each):
                entry.moved()
        return module

    def arrange(self, module: nn.Module) -> None:
        """Called after the original ``_apply`` has run. A subclass may change the layout of weights here."""


def follow_moves(entry: InstanceEntry) -> None:
    """Let ``entry`` replace the method ``_apply`` of its module, which ``.to()`` and ``.half()`` call."""
    vars(entry.module)["_apply"] = entry
    guard(entry.module)


def stop_following(module: nn.Module, kind: type[InstanceEntry]) -> None:
    """Let ``module`` run its own ``_apply`` again, if an object of exactly the class ``kind`` replaces it."""
    if type(vars(module).get("_apply")) is kind:
        del vars(module)["_apply"]
        unguard(module)
        # ``forget`` frees the main memory that is kept for weights of ``module``. Later moves, which would
        # free this memory, are not noticed any more.
        forget(module)


def follow(module: nn.Module) -> None:
    """Let a ``Moves`` replace the method ``_apply`` of ``module``, unless something else already does."""
    if "_apply" not in vars(module):
        follow_moves(Moves(module))


def unfollow(module: nn.Module) -> None:
    """Let ``module`` run its own ``_apply`` again, if a ``Moves`` replaces it.

    If an object of a subclass of ``Moves`` replaces it, this function does nothing.
    """
    stop_following(module, Moves)


def is_followed(module: nn.Module) -> bool:
    """True if a ``Moves``, or an entry of a subclass, replaces the method ``_apply`` of ``module``."""
    return isinstance(vars(module).get("_apply"), Moves)


def followed_in(modules: Iterable[nn.Module]) -> frozenset[nn.Module]:
    """The modules among ``modules`` whose method ``_apply`` a ``Moves`` replaces, to notice their moves."""
    return frozenset(filter(is_followed, modules))
