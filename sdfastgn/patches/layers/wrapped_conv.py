"""Fused classes of modules that pad a video and call an ``nn.Conv3d``, such as HunyuanVideo15CausalConv3d.

These modules pad with frames before the first frame and with a border around each frame. Most repeat the
nearest element; some pad with zeros. The fused classes pad with the kernel ``pad_frames``.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from sdfastgn.kernels.common.layout import is_channels_last
from sdfastgn.kernels.pad_frames.op import GroupNorm, Norm, pad_frames
from sdfastgn.patches.layers.video import (
    convolve_padded,
    in_channels_last,
    is_plain_conv3d,
    is_plain_inference,
)
from sdfastgn.patches.swap.fusion import is_unhooked

# Stock and fused classes of modules that pad a video and call an ``nn.Conv3d``. Files such as
# ``hunyuan_video_15.py`` add the classes of their model.
WRAPPERS: set[type[nn.Module]] = set()
# ``pad_mode`` of a convolution -> the mode of ``pad_frames``.
_MODES = {"replicate": "replicate", "constant": "zeros"}


def is_plain_wrapper(conv: Any, x: Tensor, C: int) -> bool:
    """True if ``conv`` can run fused on an input of C channels, in the dtype and on the device of x.

    A call must only pad as upstream does and run PyTorch's convolution, without hooks or replaced methods.
    """
    if type(conv) not in WRAPPERS or not is_unhooked(conv):
        return False
    return is_plain_conv3d(conv.conv, x, C) and conv.pad_mode in _MODES


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
    """Computes norm(x + shift), upsamples it and applies ``conv``. The result is channels-last.

    Args:
        conv: a causal convolution, for which ``is_plain_wrapper`` is true.
        x: (N, C, T, H, W).
        shift, norm, upsample: as in ``pad_frames``.
        has_bias: False if the next kernel adds the bias of ``conv``.
        emits: True if a GroupNorm reads the result next. Then the statistics of the result are stored for
            it, where that saves time.
    """
    w, _, h, _, front, _ = conv.time_causal_padding
    frames = in_channels_last(x)
    if norm is not None or shift is not None or upsample != (1, 1, 1) or w or h or front:
        where: Any = {"front": front, "border": (h, w), "mode": _MODES[conv.pad_mode]}
        frames, _ = pad_frames(frames, shift=shift, norm=norm, upsample=upsample, **where)
    return convolve_padded(conv.conv, frames, conv.conv.bias if has_bias else None, emits=emits)


class FusedWrapper(nn.Module):
    """Base class of the fused classes of modules that pad a video and call an ``nn.Conv3d``.

    The other base of each fused class is the stock class.

    x (N, C, T, H, W). The result has the layout of x.
    """

    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        x = hidden_states
        if not (is_plain_inference(x) and is_plain_wrapper(self, x, x.shape[1])):
            return super().forward(x)
        y = convolve(self, x)
        return y if is_channels_last(x) else y.contiguous()
