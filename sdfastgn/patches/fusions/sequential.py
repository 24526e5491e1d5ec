"""``nn.Sequential``: a GroupNorm and the activation directly after it run as one kernel.

With ``fold_batch_norm``, a BatchNorm2d in eval mode becomes part of the convolution directly before it.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from torch import Tensor, nn

from sdfastgn.kernels.common import dispatch
from sdfastgn.patches.layers.batch_norm import fold_into, foldable, folded_conv, is_folded, unfold
from sdfastgn.patches.layers.group_norm import fused_activation, norm_act
from sdfastgn.patches.swap.class_forward import change_class
from sdfastgn.patches.swap.fusion import ClassSwap, activation_of, foreign_override, restore_class
from sdfastgn.patches.swap.tested_sources import TestedSource


class FusedSequential(nn.Sequential):
    """``nn.Sequential`` that runs pairs of its children together.

    A GroupNorm and the activation after it run as one kernel. A convolution and the ``FoldedBatchNorm2d``
    after it run as one convolution.
    """

    def forward(self, input: Tensor) -> Tensor:
        if not (isinstance(input, Tensor) and dispatch.has_kernels(input)):
            return super().forward(input)
        modules = list(self)
        i = 0
        while i < len(modules):
            first, second = modules[i], modules[i + 1] if i + 1 < len(modules) else None
            if second is not None and fused_activation(first, second):
                input = norm_act(first, second, input)
                i += 2
            elif second is not None and (folded := folded_conv(first, second, input)) is not None:
                input = folded
                i += 2
            else:
                input = first(input)
                i += 1
        return input


def _has_pair(module: nn.Module) -> bool:
    children = (child for child in module._modules.values() if child is not None)
    return any(isinstance(a, nn.GroupNorm) and activation_of(b) is not None for a, b in pairwise(children))


class _Sequential(ClassSwap):
    """The fusion of a GroupNorm and the activation after it in an ``nn.Sequential``.

    A ``FusedSequential`` that only folds BatchNorms belongs to another fusion, ``FOLD_BATCH_NORM``.
    """

    def claims(self, module: nn.Module) -> bool:
        return super().claims(module) and (_has_pair(module) or not is_folded(module))


FUSION = _Sequential("sequential", nn.Sequential, FusedSequential, covers=_has_pair)


class _FoldBatchNorm:
    """Folds the BatchNorm2d children of an ``nn.Sequential`` into the convolutions before them.

    This fusion looks at every module with a BatchNorm2d child. It skips a module that is no
    ``nn.Sequential``, and reports why: only an ``nn.Sequential`` defines the order in which its children run.
    """

    name = "batch_norm"
    sources: tuple[TestedSource, ...] = ()

    def claims(self, module: nn.Module) -> bool:
        return any(isinstance(child, nn.BatchNorm2d) for child in module.children())

    def is_applied(self, module: nn.Module) -> bool:
        return is_folded(module)

    def reason_to_skip(self, module: nn.Module) -> str | None:
        if type(module) not in (nn.Sequential, FusedSequential):
            return f"BatchNorm2d is folded in an nn.Sequential alone, and this is a {type(module).__name__}"
        if not any(True for _ in foldable(module)):
            return "no BatchNorm2d with running averages is directly behind a Conv2d"
        return foreign_override(module)

    def skipped_in(self, module: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
        """Yields (name, norm, reason) of each BatchNorm2d in ``module`` that cannot be folded."""
        fits = set(foldable(module))
        for name, norm in module.named_children():
            if isinstance(norm, nn.BatchNorm2d) and norm not in fits:
                misplaced = "it has no running averages, or is not directly behind a Conv2d that it fits"
                yield name, norm, foreign_override(norm) or misplaced

    def apply(self, module: nn.Module) -> None:
        fold_into(module)
        change_class(module, FusedSequential)

    def undo(self, module: nn.Module) -> None:
        unfold(module)
        if not _has_pair(module):
            restore_class(module)


FOLD_BATCH_NORM = _FoldBatchNorm()
