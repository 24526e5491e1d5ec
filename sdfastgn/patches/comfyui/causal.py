"""Causal convolutions of videos that are computed in chunks of frames, for Wan's autoencoders.

A causal convolution reads two frames before its chunk: the last frames of the previous
chunk, which a list (``feat_cache``) keeps, or zeros. The attribute ``_padding`` of the convolution has the
padding.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Container
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sdfastgn.kernels.attention.wide_heads import attend
from sdfastgn.kernels.common.layout import laid_out
from sdfastgn.kernels.convolution.windows import convolve_windows
from sdfastgn.kernels.pad_frames.op import Norm, pad_frames
from sdfastgn.kernels.upsample.conv import upsample_conv2d
from sdfastgn.kernels.upsample.nearest import upsample_nearest_2x
from sdfastgn.patches.layers.convolution import pointwise
from sdfastgn.patches.layers.upsampling import convolves_at_low_resolution
from sdfastgn.patches.layers.video import (
    images_of,
    in_channels_last,
    is_faster_in_2d,
    is_product,
    product_of,
    video_of,
)
from sdfastgn.patches.swap.fusion import is_unhooked

# Maximum number of frames of an entry of ``feat_cache``, upstream's CACHE_T.
CACHE_T = 2


def check_cache(module: Any) -> str | None:
    """Why ``module`` is skipped, if upstream keeps another number of frames than ``CACHE_T``; else None."""
    frames = getattr(sys.modules[type(module).__module__], "CACHE_T", None)
    if frames == CACHE_T:
        return None
    return f"its cache has {frames} frames, and sdfastgn was tested with {CACHE_T}"


def padding_of(conv: Any) -> tuple[int, int, int]:
    """Returns the zeros that a causal convolution pads: (frames before its input, rows above and below,
    columns left and right).
    """
    own = conv._padding
    return (own, *conv.padding[1:]) if isinstance(own, int) else (own[4], own[2], own[0])


def is_plain_conv(conv: Any, x: Tensor, kinds: Container[type]) -> bool:
    """True if ``conv`` can run fused, in the dtype and on the device of x.

    A call must only pad as upstream does and run PyTorch's convolution, without hooks or replaced methods.
    ``kinds``: the known classes of causal convolutions.
    """
    return (
        type(conv) in kinds
        and is_unhooked(conv)
        and "_conv_forward" not in vars(conv)
        and conv.padding_mode == "zeros"
        and (conv.weight.dtype, conv.weight.device) == (x.dtype, x.device)
    )


def given(feat_idx: Any) -> tuple[Any, ...]:
    """Returns ``(feat_idx,)`` for stock's forward, or () if ``feat_idx`` was not given."""
    return () if feat_idx is None else (feat_idx,)


def fits(cache: Any, x: Tensor, C: int) -> bool:
    """True if ``cache``, an entry of ``feat_cache``, can be used for a convolution of C channels.

    An entry can be used if it is None, or if it has the dtype, device, batch size, height and width of x, C
    channels, and at most ``CACHE_T`` frames.
    """
    if cache is None:
        return True
    return (
        isinstance(cache, Tensor)
        and (cache.dtype, cache.device) == (x.dtype, x.device)
        and (*cache.shape[:2], *cache.shape[3:]) == (x.shape[0], C, *x.shape[3:])
        and cache.shape[2] <= CACHE_T
    )


def next_fit(feat_cache: Any, feat_idx: Any, x: Tensor, *channels: int) -> bool:
    """True if there is no cache, or if its next entries can be used for convolutions of x.

    ``channels``: for each of these convolutions, the number of its input channels. See ``fits``.
    """
    return feat_cache is None or (
        feat_idx is not None and all(fits(feat_cache[i], x, C) for i, C in enumerate(channels, feat_idx[0]))
    )


def convolve(
    conv: Any,
    x: Tensor,
    cache: Tensor | None = None,
    *,
    keep: int = 0,
    shift: Tensor | None = None,
    norm: Norm | None = None,
    has_bias: bool = True,
    conv3d: Callable[[Any, Tensor, Tensor | None], Tensor] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Returns (``conv(norm(x + shift), cache)``, kept), both channels-last.

    ``kept`` has the last ``keep`` frames that ``conv`` reads, for the next chunk. It is None if ``keep`` is
    0.

    Args:
        conv: a causal convolution. Calling it only pads as upstream does and runs PyTorch's convolution, in
            the dtype and on the device of x.
        x: (N, C, T, H, W).
        cache: the normalized frames before x, at most as many as ``conv`` pads; or None for zeros.
        keep: number of frames of ``kept``.
        shift, norm: as in ``pad_frames``.
        has_bias: False if the next kernel adds the bias of ``conv``.
        conv3d: a function that runs a 3-D convolution, with the padding ``conv.padding``. It is called with
            (conv, frames, bias). None: PyTorch's convolution runs.
    """
    bias = conv.bias if has_bias else None
    front, h, w = padding_of(conv)
    taps, where = conv.kernel_size, (conv.dilation, conv.groups)
    # (rows above and below, columns left and right) of zeros that must be added before ``conv3d`` runs,
    # because ``conv3d`` adds no more than ``conv.padding`` says.
    border = (0, 0) if conv3d is None else (h - conv.padding[1], w - conv.padding[2])
    # True if x is a single frame with only zeros before it. Then only the last slice of the weight along time
    # is multiplied with anything but zeros.
    is_alone = cache is None and (x.shape[2], taps[0], conv.dilation[0]) == (1, front + 1, 1) and keep <= 1
    frames, kept = in_channels_last(x), None
    if is_alone:
        if norm is not None or shift is not None:
            frames, _ = pad_frames(frames, shift=shift, norm=norm)
        if keep:
            kept = frames.clone() if frames is x else frames
    elif norm is not None or shift is not None or front or any(border):
        window = taps[0] if front == taps[0] - 1 and is_faster_in_2d(conv, x) else 1
        frames, kept = pad_frames(
            frames,
            cache if front else None,
            front=front,
            border=border if window == 1 else (0, 0),
            keep=keep,
            shift=shift,
            norm=norm,
            window=window,
        )
        if window > 1:
            y = convolve_windows(frames, conv.weight, bias, conv.stride[1:], (h, w), conv.dilation[1:])
            return y, kept
    if not (w or h or front) and is_product(conv, x):
        return product_of(conv, frames, bias), kept
    if is_alone:
        image, weight = frames[:, :, 0], conv.weight[:, :, -1]
        y = F.conv2d(image, weight, bias, conv.stride[1:], (h, w), conv.dilation[1:], conv.groups)
        return y[:, :, None], kept
    if conv3d is not None:
        return conv3d(conv, frames, bias), kept
    return F.conv3d(frames, conv.weight, bias, conv.stride, (0, h, w), *where), kept


def step(
    conv: Any, x: Tensor, feat_cache: Any, feat_idx: Any, *, keeps_earlier: bool = True, **options: Any
) -> Tensor:
    """Runs ``convolve`` after the frames in the next entry of ``feat_cache``, and then renews the entry.

    ``feat_idx[0]`` is the index of the next entry. If ``feat_cache`` is None, there is no cache.

    Args:
        keeps_earlier: True if, after a chunk of one frame, the new entry also has the frame before the chunk.
        options: further arguments of ``convolve``.
    """
    if feat_cache is None:
        return convolve(conv, x, **options)[0]
    i = feat_idx[0]
    cache = feat_cache[i]
    earlier = cache.shape[2] if keeps_earlier and cache is not None else 0
    y, feat_cache[i] = convolve(conv, x, cache, keep=min(CACHE_T, x.shape[2] + earlier), **options)
    feat_idx[0] += 1
    return y


def pairs_as_frames(y: Tensor, bias: Tensor | None) -> Tensor:
    """Splits the 2 C channels of y + bias into two frames: (N, 2 C, T, H, W) -> (N, C, 2 T, H, W).

    y and the result are channels-last. ``bias``: (2 C,) or None.
    """
    pairs = y.movedim(1, -1).unflatten(-1, (2, -1)).movedim(4, 2)  # (N, T, 2, H, W, C)
    frames = torch.empty(pairs.shape, dtype=y.dtype, device=y.device)
    if bias is None:
        frames.copy_(pairs)
    else:
        torch.add(pairs, bias.view(2, 1, 1, -1), out=frames)
    return frames.flatten(1, 2).movedim(-1, 1)


def is_plain_upsampling(
    block: Any,
    x: Tensor,
    feat_cache: Any,
    feat_idx: Any,
    kinds: Container[type],
    is_plain_time_conv: Callable[[Any, Tensor], bool],
) -> bool:
    """True if ``block``, a ``Resample``, only doubles the size of frames and, in a chunk, their number.

    Args:
        block: in the mode "upsample2d" or "upsample3d".
        kinds: the known classes of ``block.resample[0]``.
        is_plain_time_conv: called with (``block.time_conv``, x).
    """
    if type(block.resample) is not nn.Sequential or not is_unhooked(block.resample):
        return False
    upsample = block.resample[0]
    if type(upsample) not in kinds or not is_unhooked(upsample):
        return False
    if (upsample.scale_factor, upsample.mode, upsample.size) != ((2.0, 2.0), "nearest-exact", None):
        return False
    if block.mode == "upsample2d" or feat_cache is None:
        return True
    if feat_idx is None or not is_plain_time_conv(block.time_conv, x):
        return False
    cache = feat_cache[feat_idx[0]]
    return (isinstance(cache, str) and cache == "Rep") or fits(cache, x, x.shape[1])


def with_new_frames(block: Any, x: Tensor, feat_cache: Any, feat_idx: Any) -> Tensor:
    """Returns x (N, C, T, H, W), or twice its frames if ``block`` doubles them in this chunk; channels-last.

    ``block._twice_the_frames(x, feat_cache, i)`` doubles them, and renews entry ``i`` of ``feat_cache``.
    """
    x = laid_out(x, channels_last=True)
    if block.mode != "upsample3d" or feat_cache is None:
        return x
    i = feat_idx[0]
    feat_idx[0] += 1
    if feat_cache[i] is None:
        # As in upstream, the first chunk's frame is not doubled. The entry "Rep" tells the next call that the
        # first chunk has passed.
        feat_cache[i] = "Rep"
        return x
    return block._twice_the_frames(x, feat_cache, i)


def upsample_and_convolve(conv: Any, x: Tensor) -> Tensor:
    """Upsamples each frame of x by two, and runs the 2-D convolution ``conv``.

    x (N, C, T, H, W) -> (N, C_out, T, 2 H, 2 W), both channels-last.
    """
    images = images_of(x)
    if convolves_at_low_resolution(conv, images):
        return video_of(upsample_conv2d(images, conv.weight, conv.bias), x.shape[0])
    return video_of(conv(upsample_nearest_2x(images)), x.shape[0])


def attend_in_frames(x: Tensor, norm: Any, to_qkv: Any, proj: Any) -> Tensor:
    """Returns x + proj(attention(norm(x))). x (N, C, T, H, W) -> the same; each frame attends to itself.

    ``to_qkv`` and ``proj`` are 1x1 convolutions. ``to_qkv`` computes the channels of queries, keys and
    values, in this order.
    """
    N, _, _, H, W = x.shape
    images = norm(laid_out(images_of(x), channels_last=True))
    q, k, v = pointwise(to_qkv, images).movedim(1, -1).flatten(1, 2)[:, None].chunk(3, -1)
    y = attend(q, k, v)[:, 0].unflatten(1, (H, W)).movedim(-1, 1)
    return video_of(pointwise(proj, y), N) + x
