"""Folds an ``nn.BatchNorm2d`` in eval mode into the convolution directly before it in an ``nn.Sequential``.

The parameters and the state_dict stay as they are. The folded weight and bias are computed at the first call
and kept in a table in this file. They are computed again if one of the parameters or running averages was
replaced or written to, or if the convolution was replaced and put back.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from itertools import pairwise
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from sdfastgn.kernels.common import dispatch
from sdfastgn.kernels.common.private import expiring, is_expired
from sdfastgn.patches.core.class_forward import change_class
from sdfastgn.patches.core.convolution import is_plain_conv
from sdfastgn.patches.core.fusion import foreign_override, is_unhooked, register_fused, restore_class

__all__ = ["FoldedBatchNorm2d", "fold_into", "foldable", "folded_conv", "forget", "is_folded", "unfold"]


class FoldedBatchNorm2d(nn.BatchNorm2d):
    """``nn.BatchNorm2d`` without changes. The class marks a norm that ``FusedSequential`` may fold."""


register_fused(FoldedBatchNorm2d, nn.BatchNorm2d)


class _Folded(NamedTuple):
    """Weight and bias of a folded convolution, and the tensors from which they were computed (``sources``).

    ``states``: eps, and the address, version and dtype of each source at that time. ``storages``: their
    memory at that time. If a state has changed or memory was freed, the weight and bias are outdated.
    """

    sources: tuple[Tensor | None, ...]
    states: tuple[Any, ...]
    storages: tuple[StorageWeakRef, ...]
    weight: Tensor
    bias: Tensor

    def is_of(self, sources: tuple[Tensor | None, ...], states: tuple[Any, ...]) -> bool:
        """True if weight and bias were computed from the present values of ``sources``."""
        return (
            self.states == states
            and all(map(is_, self.sources, sources))
            and not any(map(is_expired, map(expiring, self.storages)))
        )


# Convolution -> its folded weight and bias. They are not kept in the convolution's ``__dict__``, so that they
# are neither copied nor pickled.
_folded: weakref.WeakKeyDictionary[nn.Module, _Folded] = weakref.WeakKeyDictionary()


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


def forget(conv: nn.Module) -> None:
    """Drop the folded weight and bias of ``conv``, if there are any."""
    _folded.pop(conv, None)


def folded_conv(conv: Any, norm: Any, x: Tensor) -> Tensor | None:
    """Computes ``norm(conv(x))`` as one convolution. None if conv and norm must be called one by one."""
    if type(norm) is not FoldedBatchNorm2d or not is_plain_conv(conv):
        return None
    if norm.training or norm.running_mean is None or norm.running_var is None or x.dim() != 4:
        return None
    made_of = conv.weight, conv.bias, norm.weight, norm.bias, norm.running_mean, norm.running_var
    # ``num_batches_tracked`` shows that the running averages have changed: in training PyTorch writes into
    # them without raising their versions, but it raises the version of ``num_batches_tracked``.
    sources: tuple[Any, ...] = (*made_of, norm.num_batches_tracked)
    if not (is_unhooked(norm) and dispatch.is_untraced(x, sources)):
        return None
    # A CUDA graph must not use a folded weight. If the parameters change after the capture, replays would
    # still use the old folded weight.
    is_captured = x.is_cuda and torch.cuda.is_current_stream_capturing()
    if is_captured or dispatch.wants_gradient(x, sources) or torch.is_autocast_enabled(x.device.type):
        return None
    # PyTorch does not count writes into inference tensors. So a folded weight could be outdated unnoticed.
    if any(t is not None and t.is_inference() for t in sources):
        return None
    states = (norm.eps, *(None if t is None else (t.data_ptr(), t._version, t.dtype) for t in sources))
    found = _folded.get(conv)
    if found is None or not found.is_of(sources, states):
        storages = tuple(StorageWeakRef(t.untyped_storage()) for t in sources if t is not None)
        found = _folded[conv] = _Folded(sources, states, storages, *_fold(norm.eps, *made_of))
    return conv._conv_forward(x, found.weight, found.bias)


@torch.no_grad()
def _fold(
    eps: float, weight: Tensor, bias: Tensor | None, scale: Tensor | None, offset: Tensor | None,
    mean: Tensor, var: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns (weight, bias) of the folded convolution. They are computed in fp64 and rounded once."""
    factor = torch.rsqrt(var.double() + eps)
    factor = factor if scale is None else factor * scale.double()
    shift = -mean.double() if bias is None else bias.double() - mean.double()
    shift = shift * factor if offset is None else shift * factor + offset.double()
    folded = weight.double() * factor.view(-1, 1, 1, 1)
    return folded.to(weight.dtype), shift.to(weight.dtype)
