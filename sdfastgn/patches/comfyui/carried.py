"""ComfyUI's causal convolutions that carry frames from one chunk of a video to the next.

ComfyUI computes a video in chunks. Each convolution appends the last two frames that it has read, with their
borders, to a list (``conv_carry_out``). For the next chunk this list is ``conv_carry_in``, and the
convolution takes its frames from there. ``convolve`` appends the same frames as stock's code, so fused blocks
and blocks that run stock's code can be mixed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import comfy.ops
from comfy.ldm.modules.diffusionmodules import model as comfy_model
from torch import Tensor

from sdfastgn.kernels.attention.wide_heads import attend
from sdfastgn.kernels.pad_frames.op import Norm, pad_frames
from sdfastgn.patches.comfyui.layers import reason_to_cast
from sdfastgn.patches.layers.video import in_channels_last, is_plain_conv3d, is_product, product_of
from sdfastgn.patches.swap.fusion import is_unhooked
from sdfastgn.patches.swap.tested_sources import tested, unknown_source

_ops: Any = comfy.ops
Conv3d: Any = _ops.disable_weight_init.Conv3d
# Older releases of ComfyUI have no ``CarriedConv3d``. In these releases, the blocks that now contain it have
# other code. So the fusions that use this file fuse no block there.
CarriedConv3d: Any = getattr(comfy_model, "CarriedConv3d", ())
# Number of frames that each convolution appends to ``conv_carry_out``.
_CARRIED = 2
# Code of ComfyUI on which the fusions of these convolutions rely. A fusion is applied only if the installed
# version of this code was tested.
SOURCES = (
    *([tested(CarriedConv3d, "__init__", "forward")] if CarriedConv3d else []),
    tested(comfy_model, "conv_carry_causal_3d"),
    tested(Conv3d, "forward", "_conv_forward"),
)


def is_plain(conv: Any, x: Tensor, C: int, size: int) -> bool:
    """True if a call of ``conv`` for ``x`` runs ComfyUI's 3-D convolution and nothing else.

    The convolution must have C input channels, a kernel of ``size``^3, stride 1 and no padding.
    """
    return (
        is_plain_conv3d(conv, x, C, Conv3d)
        and (conv.kernel_size, conv.stride, conv.padding) == ((size,) * 3, (1, 1, 1), (0, 0, 0))
        and reason_to_cast(conv) is None
    )


def is_plain_wrapper(conv: Any, x: Tensor, C: int, size: int = 3) -> bool:
    return type(conv) is CarriedConv3d and is_unhooked(conv) and is_plain(conv.conv, x, C, size)


def fits(carried: Any, i: int, x: Tensor, C: int) -> bool:
    """True if the frames in ``carried[i]``, a ``conv_carry_in``, can be put before x, or if it is None.

    ``carried[i]`` must have C channels, and x's batch size, dtype and device. Its height and width must be
    x's, plus a border of one pixel on each side.
    """
    if carried is None:
        return True
    N, _, _, H, W = x.shape
    return (
        len(carried) > i
        and tuple(carried[i].shape) == (N, C, _CARRIED, H + 2, W + 2)
        and (carried[i].dtype, carried[i].device) == (x.dtype, x.device)
    )


def pointwise(conv: Any, x: Tensor, bias: Tensor | None) -> Tensor:
    """Runs a 1x1x1 convolution. x and the result are channels-last."""
    if is_product(conv, x):
        return product_of(conv, x, bias)
    return in_channels_last(conv._conv_forward(x, conv.weight, bias))


def convolve(
    wrapper: Any,
    x: Tensor,
    carry_in: Any = None,
    carry_out: Any = None,
    *,
    shift: Tensor | None = None,
    norm: Norm | None = None,
    has_bias: bool = True,
) -> Tensor:
    """Puts the frames of ``carry_in`` before norm(x + shift), and convolves. The result is channels-last.

    Args:
        wrapper: a ``CarriedConv3d``, for which ``is_plain_wrapper`` is true.
        x: (N, C, T, H, W).
        carry_in: a list, whose first entry has the frames before x and is removed; or None.
        carry_out: a list to which the last two frames of the convolution's input are appended; or None.
        shift, norm: as in ``pad_frames``.
        has_bias: False if the next kernel adds the bias.
    """
    conv = wrapper.conv
    cache = None if carry_in is None else carry_in.pop(0)[..., 1:-1, 1:-1]
    where: Any = {"front": _CARRIED, "border": (1, 1), "mode": "replicate"}
    frames, _ = pad_frames(in_channels_last(x), cache, shift=shift, norm=norm, **where)
    if carry_out is not None:
        carry_out.append(frames[:, :, -_CARRIED:].clone())
    return in_channels_last(conv._conv_forward(frames, conv.weight, conv.bias if has_bias else None))


def attended(block: Any, normed: Tensor) -> Tensor:
    """Runs the attention of an ``AttnBlock`` without its norm, its last layer and its sum.

    ``normed``: the result of the norm, (N, C, T, H, W), channels-last. So is this function's result. Each
    position attends to all positions of all frames.
    """
    # shape of each: (N, 1, T * H * W, C)
    q, k, v = (
        pointwise(layer, normed, layer.bias).movedim(1, -1).flatten(1, 3)[:, None]
        for layer in (block.q, block.k, block.v)
    )
    return attend(q, k, v)[:, 0].unflatten(1, normed.shape[2:]).movedim(-1, 1)


# --- chunks of a video ------------------------------------------------------------------------------


def chunks_of(x: Tensor, step: int) -> list[Tensor]:
    """The chunks of a video x (N, C, T, H, W) in which stock's encoder runs.

    The first chunk has one frame. Each later chunk has ``2 * step`` frames, and the last may have ``step``.
    ``step``: number of frames that become one frame of latents. As in stock, the last frames are left out if
    they are too few for a frame of latents.
    """
    chunks = [x[:, :, :1]]
    if x.shape[2] > step:
        chunks += x[:, :, 1 : 1 + (x.shape[2] - 1) // step * step].split(2 * step, 2)
    return chunks


def with_carries(chunks: Sequence[Tensor]) -> Iterator[tuple[Tensor, Any, Any]]:
    """Yields (chunk, ``conv_carry_in``, ``conv_carry_out``) for each chunk, as stock passes them."""
    carry_in: Any = None
    for i, chunk in enumerate(chunks):
        carry_out: Any = None if i == len(chunks) - 1 else []
        yield chunk, carry_in, carry_out
        carry_in = carry_out


def run_stages(stages: Iterable[Any], y: Tensor, carry_in: Any, carry_out: Any) -> Tensor:
    """Runs the blocks and the resampling of each stage of an encoder or a decoder for one chunk y."""
    for stage in stages:
        for block in stage.block:
            y = block(y, None, carry_in, carry_out)
        for name in ("downsample", "upsample"):
            if hasattr(stage, name):
                y = getattr(stage, name)(y, carry_in, carry_out)
    return y


# --- why stock's code must run ----------------------------------------------------------------------


def reason_to_skip(block: Any) -> str | None:
    """Why ``block``, a part of an autoencoder for videos, must run stock's code; None if it can be fused."""
    own = (conv for conv in block.modules() if isinstance(conv, Conv3d))
    return unknown_source(*SOURCES) or next(filter(None, map(reason_to_cast, own)), None)


def reason_to_skip_ends(half: Any) -> str | None:
    """``reason_to_skip`` for the first and the last convolution of ``half``, an encoder or a decoder."""
    return reason_to_skip(half.conv_in) or reason_to_skip(half.conv_out)
