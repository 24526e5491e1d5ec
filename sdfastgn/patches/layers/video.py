"""What fusions for videos, and spatial norms of images, share: checks, operands of norms, and layouts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sdfastgn.kernels.common import dispatch
from sdfastgn.kernels.common.layout import is_channels_last, laid_out
from sdfastgn.kernels.pad_frames.op import GroupNorm, modulation_times
from sdfastgn.patches.layers.group_norm import FusedGroupNorm
from sdfastgn.patches.layers.statistics import take_statistics
from sdfastgn.patches.swap.fusion import activation_of, is_unhooked


def is_plain_inference(x: Tensor, dim: int = 5) -> bool:
    """True if the kernels can run on x: its dtype and device fit, it has ``dim`` axes and is not empty, and
    gradients, compilers, traces, dispatch modes and autocast are off.

    ``dim`` is 5 for videos (N, C, T, H, W) and 4 for images (N, C, H, W).
    """
    return (
        not torch.compiler.is_compiling()
        and not torch.is_grad_enabled()
        and dispatch.is_untraced(x, ())
        and (x.dim(), x.numel() > 0) == (dim, True)
        and dispatch.has_kernels(x)
        and not torch.is_autocast_enabled(x.device.type)
    )


def can_fuse(norm: Any, act: nn.Module, x: Tensor, C: int) -> bool:
    """True if a kernel can compute ``act(norm(u))`` for a tensor u of C channels in the dtype of x.

    ``norm`` must be a GroupNorm with parameters in this dtype, ``act`` an activation that the kernels
    compute. Neither may have hooks.
    """
    return (
        type(norm) in (nn.GroupNorm, FusedGroupNorm)
        and norm.num_channels == C
        and (norm.weight is None or norm.weight.dtype == x.dtype)
        and activation_of(act) is not None
        and is_unhooked(norm)
        and is_unhooked(act)
    )


def norm_operands(norm: Any, act: nn.Module, x: Tensor, *, is_shifted: bool = False) -> GroupNorm:
    """Returns the operands with which ``pad_frames`` computes ``act(norm(x))``.

    ``is_shifted``: True if the kernel adds a bias to x before the norm. Then statistics that were stored for
    x are not used, because the norm needs statistics of the sum.
    """
    statistics = None if is_shifted else take_statistics(x)
    activation = activation_of(act) or "identity"
    return GroupNorm(int(norm.num_groups), norm.weight, norm.bias, float(norm.eps), activation, statistics)


def is_upsampled_exactly(modulation: Sequence[int], x: Sequence[int]) -> bool:
    """True if ``pad_frames`` upsamples a modulation to the size of x as PyTorch does, bit by bit.

    Both shapes are (N, C, T, H, W). To find the nearest neighbor, PyTorch multiplies positions with a rounded
    factor. If sizes differ by a power of 2, this is exact. Otherwise PyTorch may find another neighbor than
    the kernel.
    """
    found = modulation_times(x, modulation)
    return found is not None and all(times & (times - 1) == 0 for times in found[0])


def in_channels_last(x: Tensor) -> Tensor:
    """Returns x itself if it is channels-last, else a channels-last copy.

    Returning the same object keeps the statistics that are stored for it.
    """
    return x if is_channels_last(x) else laid_out(x, channels_last=True)
