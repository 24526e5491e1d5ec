"""Folds an ``nn.BatchNorm2d`` in eval mode into the convolution directly before it in an ``nn.Sequential``.

The parameters and the state_dict stay as they are. Each call folds the present weights. Folded weights from
an earlier call would be outdated if an optimizer or other code had written into a parameter since, and this
could go unnoticed, because PyTorch does not count all writes. Folding reads and writes the weights once. With
most images this takes less time than the norm.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from sdfastgn.kernels.batch_norm.fold import Folded, fold_batch_norm
from sdfastgn.kernels.common import dispatch
from sdfastgn.patches.layers.convolution import is_plain_conv
from sdfastgn.patches.swap.class_forward import change_class
from sdfastgn.patches.swap.fusion import foreign_override, is_unhooked, register_fused, restore_class


class FoldedBatchNorm2d(nn.BatchNorm2d):
    """``nn.BatchNorm2d`` without changes. The class marks a norm that may be folded into a convolution."""


register_fused(FoldedBatchNorm2d, nn.BatchNorm2d)


def foldable(module: nn.Module) -> Iterator[nn.Module]:
    """Yields each BatchNorm2d of a Sequential that can be folded into the convolution directly before it."""
    children = [child for child in module._modules.values() if child is not None]
    for conv, norm in pairwise(children):
        if type(conv) is not nn.Conv2d or type(norm) not in (nn.BatchNorm2d, FoldedBatchNorm2d):
            continue
        fits = conv.out_channels == norm.num_features and conv.padding_mode == "zeros"
        if fits and norm.running_mean is not None and foreign_override(norm) is None:
            yield norm


def is_folded(module: nn.Module) -> bool:
    """True if a child of ``module`` is marked as a norm to fold."""
    return any(type(child) is FoldedBatchNorm2d for child in module.children())


def fold_into(module: nn.Module) -> None:
    """Mark the ``foldable`` norms of ``module``. They are folded when ``module`` is called."""
    for norm in list(foldable(module)):
        change_class(norm, FoldedBatchNorm2d)


def unfold(module: nn.Module) -> None:
    for child in module.children():
        if type(child) is FoldedBatchNorm2d:
            restore_class(child)


def folded_conv(conv: Any, norm: Any, x: Tensor) -> Tensor | None:
    """Computes ``norm(conv(x))`` as one convolution. None if conv and norm must be called one by one."""
    if type(norm) is not FoldedBatchNorm2d or not is_plain_conv(conv):
        return None
    if norm.training or norm.running_mean is None or norm.running_var is None or x.dim() != 4:
        return None
    parts = Folded(conv.weight, conv.bias, norm.weight, norm.bias, norm.running_mean, norm.running_var)
    if not (is_unhooked(norm) and dispatch.is_untraced(x, parts)):
        return None
    if dispatch.wants_gradient(x, parts) or torch.is_autocast_enabled(x.device.type):
        return None
    return conv._conv_forward(x, *fold_batch_norm(parts, norm.eps))
