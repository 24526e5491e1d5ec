"""A causal 3-D convolution that is wrapped by a module which pads: HunyuanVideo's, and its copies.

The convolution reads its input behind frames and within a border, all copies of the nearest element.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sdfastgn.kernels.common.layout import is_channels_last, laid_out
from sdfastgn.kernels.pad_frames.op import GroupNorm, Norm, pad_frames
from sdfastgn.kernels.product.op import linear
from sdfastgn.patches.core.fusion import is_unhooked
from sdfastgn.patches.core.statistics import add_bias
from sdfastgn.patches.fusions.video import is_plain_inference

__all__ = ["WRAPPERS", "FusedWrapper", "convolve", "is_plain_wrapper"]

# Stock and fused classes. The files of their fusions add them.
WRAPPERS: set[type[nn.Module]] = set()
# ``pad_mode`` of a convolution -> the mode of ``pad_frames``.
_MODES = {"replicate": "replicate", "constant": "zeros"}


def is_plain_wrapper(conv: Any, x: Tensor, C: int) -> bool:
    """True if a call of ``conv`` on C channels is upstream's padding and PyTorch's convolution, in the dtype
    and on the device of x.
    """
    if type(conv) not in WRAPPERS or not is_unhooked(conv):
        return False
    inner = conv.conv
    return (
        type(inner) is nn.Conv3d
        and is_unhooked(inner)
        and "_conv_forward" not in vars(inner)
        and (inner.padding_mode, type(inner.padding), inner.in_channels) == ("zeros", tuple, C)
        and (inner.weight.dtype, inner.weight.device) == (x.dtype, x.device)
        and conv.pad_mode in _MODES
    )


def convolve(
    conv: Any,
    x: Tensor,
    *,
    shift: Tensor | None = None,
    norm: Norm | GroupNorm | None = None,
    upsample: tuple[int, int, int] = (1, 1, 1),
    has_bias: bool = True,
    emits: bool = False,
) -> Tensor:
    """``conv`` of norm(x + shift), upsampled; channels-last.

    Args:
        conv: a causal convolution, for which ``is_plain_wrapper`` is true.
        x: (N, C, T, H, W).
        shift, norm, upsample: as in ``pad_frames``.
        has_bias: False: the bias of ``conv`` is left to the next kernel.
        emits: True: a GroupNorm reads the result next, so its statistics are stored where that saves time.
    """
    inner = conv.conv
    bias = inner.bias if has_bias else None
    w, _, h, _, front, _ = conv.time_causal_padding
    sizes = inner.kernel_size, inner.stride, inner.padding, inner.groups
    is_product = sizes == ((1, 1, 1), (1, 1, 1), (0, 0, 0), 1) and x.dtype in (torch.float16, torch.bfloat16)
    frames = x if is_channels_last(x) else laid_out(x, channels_last=True)
    if norm is not None or shift is not None or upsample != (1, 1, 1) or w or h or front:
        padding: Any = {"front": front, "border": (h, w), "mode": _MODES[conv.pad_mode]}
        frames, _ = pad_frames(frames, shift=shift, norm=norm, upsample=upsample, **padding)
    if is_product:
        return linear(frames.movedim(1, -1), inner.weight.flatten(1), bias).movedim(-1, 1)
    where = inner.stride, inner.padding, inner.dilation, inner.groups
    y = F.conv3d(frames, inner.weight, None if emits else bias, *where)
    # Convolutions of a CPU may return another layout.
    y = y if is_channels_last(y) else laid_out(y, channels_last=True)
    return add_bias(y, bias) if emits else y


class FusedWrapper(nn.Module):
    """A wrapped convolution; it stands before a stock class among the bases of a fused class.

    x (N, C, T, H, W); the result lies as x.
    """

    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        x = hidden_states
        if not (is_plain_inference(x) and is_plain_wrapper(self, x, x.shape[1])):
            return super().forward(x)
        y = convolve(self, x)
        return y if is_channels_last(x) else y.contiguous()
