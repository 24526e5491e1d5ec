"""diffusers' autoencoder of Cosmos: fewer passes around convolutions, and wavelets as a matrix product.

The model has pairs of convolutions: one over space, then one over time, which puts copies of the first frame
before its input. Each norm normalizes every frame by itself. Differences from stock:

- A norm and its SiLU are one pass. The convolution over space after them is 2-D, with frames as images.
- One kernel (``pad_frames``) adds the bias of the convolution over space, upsamples, puts copies of the first
  frame before the result, and writes it as the input of the convolution over time. In a residual block, the
  bias of the convolution over time is added by the next norm or by the sum with the residual.
- A 1x1x1 convolution in fp16 or bf16 is a matrix product. Attention within a frame runs as in
  ``attention.py``.
- Stock computes the Haar wavelets of a video with 14 grouped convolutions for each factor of 2. Here they are
  one matrix product, with a matrix of zeros, ones and minus ones.

All of this runs only for inference without gradients, autocast, compilers and traces. Otherwise, and if a
layer has hooks, an adapter or another dtype, stock's forward runs. The convolutions that it calls are still
fused one by one.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
import torch.nn.functional as F
from diffusers.models.autoencoders import autoencoder_kl_cosmos as cosmos
from torch import Tensor, nn

from sdfastgn.kernels.attention.wide_heads import attend
from sdfastgn.kernels.common.layout import is_channels_last, laid_out
from sdfastgn.kernels.group_norm.op import group_norm
from sdfastgn.kernels.pad_frames.op import pad_frames
from sdfastgn.kernels.product.op import linear
from sdfastgn.patches.layers.group_norm import FusedGroupNorm
from sdfastgn.patches.layers.packing import packed
from sdfastgn.patches.layers.video import add_into, channels_into, images_of, is_plain_inference, video_of
from sdfastgn.patches.swap.fusion import ClassSwap, drops_nothing, is_unhooked
from sdfastgn.patches.swap.tested_sources import tested

# --- what may run fused -----------------------------------------------------------------------------


def _is_plain_conv(conv: Any, x: Tensor, C: int) -> bool:
    """True if ``conv`` can run fused on an input of C channels, in the dtype and on the device of x.

    A call must only pad as upstream does and run PyTorch's convolution, without hooks or replaced methods.
    """
    return (
        type(conv) in (cosmos.CosmosCausalConv3d, FusedCosmosCausalConv3d)
        and is_unhooked(conv)
        and "_conv_forward" not in vars(conv)
        and (conv.padding_mode, conv.padding, conv.in_channels) == ("zeros", (0, 0, 0), C)
        and conv.pad_mode == "constant"
        and conv.temporal_pad >= 0
        and len(set(conv.spatial_pad)) == 1
        and (conv.weight.dtype, conv.weight.device) == (x.dtype, x.device)
    )


def _is_plain_projection(projection: Any, x: Tensor, C: int) -> bool:
    """True if ``projection`` can run fused on C channels.

    A call must only run its convolution over space and then its convolution over time. ``_is_plain_conv``
    must be true for both convolutions.
    """
    if type(projection) not in (cosmos.CosmosConvProjection3d, FusedCosmosConvProjection3d):
        return False
    space, time = projection.conv_s, projection.conv_t
    return (
        is_unhooked(projection)
        and _is_plain_conv(space, x, C)
        and _is_plain_conv(time, x, space.out_channels)
        and (space.kernel_size[0], space.stride[0], space.temporal_pad) == (1, 1, 0)
    )


def _is_plain_norm(norm: Any, x: Tensor, C: int) -> bool:
    """True if ``norm`` can run fused: a call only runs PyTorch's GroupNorm with one group on each frame.

    The norm must be for C channels, with parameters in the dtype of x.
    """
    if type(norm) is not cosmos.CosmosCausalGroupNorm or not is_unhooked(norm):
        return False
    inner = norm.norm
    return (
        type(inner) in (nn.GroupNorm, FusedGroupNorm)
        and is_unhooked(inner)
        and (norm.num_groups, inner.num_groups, inner.num_channels) == (1, 1, C)
        and (inner.weight is None or inner.weight.dtype == x.dtype)
    )


# --- helpers of the fused forwards ------------------------------------------------------------------


def _norm(norm: Any, images: Tensor, activation: str, shift: Tensor | None = None) -> Tensor:
    """Normalizes each image of images + shift, and applies the activation. images: (N, C, H, W)."""
    inner = norm.norm
    return group_norm(images, 1, inner.weight, inner.bias, inner.eps, activation, shift=shift)


def _conv_2d(conv: Any, images: Tensor, bias: Tensor | None) -> Tensor:
    """Applies ``conv``, a 3-D convolution of kernel size 1 along time, to images (N, C, H, W).

    The result is channels-last. ``bias``: (C_out,), the convolution's bias, or None if it is not to be added.
    """
    pad, where = conv.spatial_pad[0], (conv.dilation[1:], conv.groups)
    y = F.conv2d(images, conv.weight[:, :, 0], bias, conv.stride[1:], pad, *where)
    # Needed on a CPU, where a convolution may return a channels-first result for a channels-last input.
    return laid_out(y, channels_last=True)


def _convolve(
    conv: Any,
    x: Tensor,
    *,
    front: int | None = None,
    shift: Tensor | None = None,
    upsample: tuple[int, int, int] = (1, 1, 1),
    has_bias: bool = True,
) -> tuple[Tensor, Tensor]:
    """Returns (``conv(u)``, u), channels-last, where u is x + shift, upsampled.

    Args:
        conv: a convolution, for which ``_is_plain_conv`` is true.
        x: (N, C, T, H, W), channels-last.
        front: number of copies of the first frame that ``conv`` reads before u. None: stock's number.
        shift, upsample: as in ``pad_frames``.
        has_bias: False if the next kernel adds the bias of ``conv``.
    """
    bias = conv.bias if has_bias else None
    front = conv.temporal_pad if front is None else front
    frames = x
    if front or shift is not None or upsample != (1, 1, 1):
        frames, _ = pad_frames(x, front=front, mode="replicate", shift=shift, upsample=upsample)
    read = frames[:, :, front:]
    pad, sizes = conv.spatial_pad[0], (conv.kernel_size, conv.stride, conv.groups)
    if sizes == ((1, 1, 1), (1, 1, 1), 1) and not pad and x.dtype in (torch.float16, torch.bfloat16):
        return linear(frames.movedim(1, -1), conv.weight.flatten(1), bias).movedim(-1, 1), read
    if conv.kernel_size[0] == conv.stride[0] == 1 and not front:
        return video_of(_conv_2d(conv, images_of(frames), bias), x.shape[0]), read
    where = conv.stride, (0, pad, pad), conv.dilation, conv.groups
    return laid_out(F.conv3d(frames, conv.weight, bias, *where), channels_last=True), read


def _project(
    projection: Any, x: Tensor, norm: Any = None, *, shift: Tensor | None = None, has_bias: bool = True
) -> Tensor:
    """Returns ``projection(silu(norm(x + shift)))``, or ``projection(x)`` if ``norm`` is None.

    x and the result are channels-last. ``has_bias``: False if the next kernel adds the bias of the
    convolution over time.
    """
    images = images_of(x)
    if norm is not None:
        images = _norm(norm, images, "silu", shift)
    h = video_of(_conv_2d(projection.conv_s, images, None), x.shape[0])
    return _convolve(projection.conv_t, h, shift=projection.conv_s.bias, has_bias=has_bias)[0]


class FusedCosmosCausalConv3d(cosmos.CosmosCausalConv3d):
    """``CosmosCausalConv3d``. x (N, C, T, H, W). The result has the layout of x."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        x = hidden_states
        if not (is_plain_inference(x) and _is_plain_conv(self, x, x.shape[1])):
            return super().forward(x)
        y, _ = _convolve(self, laid_out(x, channels_last=True))
        return y if is_channels_last(x) else y.contiguous()


class FusedCosmosConvProjection3d(cosmos.CosmosConvProjection3d):
    """``CosmosConvProjection3d``. x (N, C, T, H, W) -> (N, C_out, T, H, W), channels-last."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        x = hidden_states
        if not (is_plain_inference(x) and _is_plain_projection(self, x, x.shape[1])):
            return super().forward(x)
        return _project(self, laid_out(x, channels_last=True))


class FusedCosmosResnetBlock3d(cosmos.CosmosResnetBlock3d):
    """``CosmosResnetBlock3d``. x (N, C, T, H, W) -> (N, C_out, T, H, W), channels-last."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        x = hidden_states
        if not (is_plain_inference(x) and self._runs_fused(x)):
            return super().forward(x)
        x = residual = laid_out(x, channels_last=True)
        if type(self.conv_shortcut) is not nn.Identity:
            residual, _ = _convolve(self.conv_shortcut, x)
        h = _project(self.conv1, x, self.norm1, has_bias=False)
        h = _project(self.conv2, h, self.norm2, shift=self.conv1.conv_t.bias, has_bias=False)
        return add_into(h, residual, self.conv2.conv_t.bias)

    def _runs_fused(self, x: Tensor) -> bool:
        if not drops_nothing(self.dropout):
            return False
        C, shortcut = x.shape[1], self.conv_shortcut
        if not (type(shortcut) is nn.Identity and is_unhooked(shortcut)) and not _is_plain_conv(
            shortcut, x, C
        ):
            return False
        if not (_is_plain_norm(self.norm1, x, C) and _is_plain_projection(self.conv1, x, C)):
            return False
        C_out = self.conv1.conv_t.out_channels
        return _is_plain_norm(self.norm2, x, C_out) and _is_plain_projection(self.conv2, x, C_out)


class FusedCosmosUpsample3d(cosmos.CosmosUpsample3d):
    """``CosmosUpsample3d``. x (N, C, T, H, W) -> (N, C, T', H', W'), channels-last. T' is T or 2 T - 1."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        x, convs = hidden_states, _convolutions(self)
        if not (convs and is_plain_inference(x) and all(_is_plain_conv(c, x, x.shape[1]) for c in convs)):
            return super().forward(x)
        x = laid_out(x, channels_last=True)
        if self.temporal_upsample:
            y, read = _convolve(self.conv1, x, upsample=(2, 1, 1), has_bias=False)
            x = add_into(y, read, self.conv1.bias)
        if self.spatial_upsample:
            y, read = _convolve(self.conv2, x, upsample=(1, 2, 2), has_bias=False)
            x = add_into(y, read, self.conv2.bias)
        return _convolve(self.conv3, x)[0]


class FusedCosmosDownsample3d(cosmos.CosmosDownsample3d):
    """``CosmosDownsample3d``. x (N, C, T, H, W) -> (N, C, T', H', W'), channels-last."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        x, convs = hidden_states, _convolutions(self)
        is_even = not self.spatial_downsample or x.shape[3] % 2 == x.shape[4] % 2 == 0
        if not (
            convs
            and is_even
            and is_plain_inference(x)
            and all(_is_plain_conv(c, x, x.shape[1]) for c in convs)
        ):
            return super().forward(x)
        x = laid_out(x, channels_last=True)
        if self.spatial_downsample:
            # The convolution reads x with one row of zeros below and one column of zeros at the right. The
            # means of 2 x 2 pixels are computed without these zeros.
            padded = laid_out(F.pad(images_of(x), (0, 1, 0, 1)), channels_last=True)
            y = video_of(_conv_2d(self.conv1, padded, self.conv1.bias), x.shape[0])
            x = y.add_(packed(x, (1, 2, 2)).mean((4, 5, 6)).movedim(-1, 1))
        if self.temporal_downsample:
            # Stock puts one copy of the first frame before x. Then the convolution puts ``temporal_pad`` more
            # copies before it.
            front = self.conv2.temporal_pad + 1
            y, _ = _convolve(self.conv2, x, front=front)
            pairs, _ = pad_frames(x, front=1, mode="replicate")
            pairs = pairs[:, :, : 2 * y.shape[2]]
            x = y.add_(packed(pairs, (2, 1, 1)).mean((4, 5, 6)).movedim(-1, 1))
        return _convolve(self.conv3, x)[0]


def _convolutions(resample: Any) -> list[Any]:
    return [c for c in (resample.conv1, resample.conv2, resample.conv3) if type(c) is not nn.Identity]


class FusedCosmosCausalAttention(cosmos.CosmosCausalAttention):
    """``CosmosCausalAttention``. x (N, C, T, H, W) -> the same.

    Only attention within a frame is fused. For attention over frames, stock's forward runs.
    """

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = hidden_states
        convs = self.to_q, self.to_k, self.to_v, self.to_out[0]
        if not (
            attention_mask is None
            and type(self.processor) is cosmos.CosmosSpatialAttentionProcessor2_0
            and is_plain_inference(x)
            and _is_plain_norm(self.norm, x, x.shape[1])
            and all(_is_plain_conv(conv, x, x.shape[1]) for conv in convs)
            and drops_nothing(self.to_out[1])
        ):
            return super().forward(x, attention_mask)
        x = laid_out(x, channels_last=True)
        normed = video_of(_norm(self.norm, images_of(x), "identity"), x.shape[0])

        def heads(conv: Any) -> Tensor:
            rows = images_of(_convolve(conv, normed)[0]).movedim(1, -1).flatten(1, 2)  # (N T, H W, C)
            return rows.unflatten(2, (self.num_attention_heads, -1)).transpose(1, 2)

        y = attend(*map(heads, convs[:3])).transpose(1, 2).flatten(2).unflatten(1, x.shape[3:])
        y = laid_out(video_of(y.movedim(-1, 1), x.shape[0]), channels_last=True)
        return add_into(_convolve(self.to_out[0], y)[0], x, None)


# --- wavelets ---------------------------------------------------------------------------------------


# Nothing is removed from this cache, because CUDA graphs read the matrices.
@functools.cache
def _haar(C: int, levels: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns the matrix of a Haar wavelet transform, (8^levels C, 8^levels C), with entries 0, 1 and -1.

    The transform takes cells of 2^levels frames, rows and columns. Columns of the matrix are numbered by
    (frame, row, column, channel) within a cell. Rows are numbered by (bands of the coarsest level, ..., bands
    of the finest level, channel). The inverse is the transpose times 8^-levels.
    """
    low_high = torch.tensor([[1.0, 1.0], [1.0, -1.0]], device="cpu")
    # Axes: band along time, along height and along width, then frame, row and column within a 2 x 2 x 2 cell.
    level = torch.einsum("at,bh,cw->abcthw", low_high, low_high, low_high)
    found = torch.eye(C, device="cpu").reshape(1, C, 1, 1, 1, C)
    for _ in range(levels):
        bands, _, side = found.shape[:3]
        found = torch.einsum("abcthw,mzTHWy->abcmztThHwWy", level, found)
        found = found.reshape(8 * bands, C, *[2 * side] * 3, C)
    return found.reshape(8**levels * C, -1).to(device, dtype)


def _levels(module: Any) -> int | None:
    """Returns the number of levels of the wavelet transform in a patch embedding or in its inverse.

    None if it is no Haar wavelet transform.
    """
    levels = int(math.log2(module.patch_size))
    return levels if module.patch_method == "haar" and 2**levels == module.patch_size else None


class FusedCosmosPatchEmbed3d(cosmos.CosmosPatchEmbed3d):
    """``CosmosPatchEmbed3d``. x (N, C, T, H, W) -> (N, p^3 C, T', H / p, W / p), channels-last."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        x, levels, p = hidden_states, _levels(self), self.patch_size
        if not (
            levels
            and is_plain_inference(x)
            and ((x.shape[2] - 1) % p, x.shape[3] % p, x.shape[4] % p) == (0, 0, 0)
        ):
            return super().forward(x)
        whole = torch.cat((x[:, :, :1].expand(-1, -1, p - 1, -1, -1), x), 2)
        rows = packed(whole, (p, p, p)).flatten(4)
        bands = _haar(x.shape[1], levels, x.dtype, x.device) * 8.0**-levels
        return linear(rows, bands, None).movedim(-1, 1)


class FusedCosmosUnpatcher3d(cosmos.CosmosUnpatcher3d):
    """``CosmosUnpatcher3d``. x (N, p^3 C, T, H, W) -> (N, C, p T - p + 1, p H, p W)."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        x, levels, p = hidden_states, _levels(self), self.patch_size
        if not (levels and is_plain_inference(x) and x.shape[1] % p**3 == 0):
            return super().forward(x)
        C = x.shape[1] // p**3
        places = linear(x.movedim(1, -1), _haar(C, levels, x.dtype, x.device).T.contiguous(), None)
        cells = places.unflatten(-1, (p, p, p, C)).permute(0, 7, 1, 4, 2, 5, 3, 6)
        return cells.flatten(6, 7).flatten(4, 5).flatten(2, 3)[:, :, p - 1 :]


# --- encoder and decoder ----------------------------------------------------------------------------


def _leaves_fused(half: Any, x: Tensor) -> bool:
    """True if the last layers of an encoder or decoder can run fused: the norm, SiLU and two convolutions."""
    C = channels_into(half.conv_out, "conv_s")
    return _is_plain_norm(half.norm_out, x, C) and _is_plain_projection(half.conv_out, x, C)


class FusedCosmosEncoder3d(cosmos.CosmosEncoder3d):
    """``CosmosEncoder3d``. Videos (N, 3, T, H, W) -> (N, C, T', H', W'), channels-first."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        x = hidden_states
        if not (is_plain_inference(x) and _leaves_fused(self, x)):
            return super().forward(x)
        x = self.conv_in(self.patch_embed(x))
        for block in self.down_blocks:
            x = block(x)
        x = laid_out(self.mid_block(x), channels_last=True)
        return _project(self.conv_out, x, self.norm_out).contiguous()


class FusedCosmosDecoder3d(cosmos.CosmosDecoder3d):
    """``CosmosDecoder3d``. Latents (N, C, T, H, W) -> videos (N, 3, T', H', W')."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        x = hidden_states
        if not (is_plain_inference(x) and _leaves_fused(self, x)):
            return super().forward(x)
        x = self.mid_block(self.conv_in(x))
        for block in self.up_blocks:
            x = block(x)
        x = laid_out(x, channels_last=True)
        return self.unpatch_embed(_project(self.conv_out, x, self.norm_out))


# --- fusions ----------------------------------------------------------------------------------------

_PARTS = tuple(
    tested(cls, "__init__", "forward")
    for cls in (cosmos.CosmosCausalConv3d, cosmos.CosmosConvProjection3d, cosmos.CosmosCausalGroupNorm)
)


def _fusion(name: str, fused: Any, methods: tuple[str, ...] = ()) -> ClassSwap:
    """The fusion of a fused class, whose base is the stock class.

    ``methods``: methods that the fused class replaces, besides ``forward``.
    """
    stock = fused.__bases__[0]
    own = tested(stock, "__init__", "forward", *methods)
    sources = (own, *(part for part in _PARTS if part.cls is not stock))
    return ClassSwap(f"cosmos_{name}", stock, fused, sources=sources)


_ATTENTION = tested(cosmos.CosmosSpatialAttentionProcessor2_0, "__call__")
FUSIONS: tuple[ClassSwap, ...] = (
    _fusion("conv", FusedCosmosCausalConv3d),
    _fusion("projection", FusedCosmosConvProjection3d),
    _fusion("resnet_block", FusedCosmosResnetBlock3d),
    _fusion("upsample", FusedCosmosUpsample3d),
    _fusion("downsample", FusedCosmosDownsample3d),
    _fusion("attention", FusedCosmosCausalAttention),
    _fusion("patch_embed", FusedCosmosPatchEmbed3d, methods=("_haar", "_dwt")),
    _fusion("unpatcher", FusedCosmosUnpatcher3d, methods=("_ihaar", "_idwt")),
    _fusion("encoder", FusedCosmosEncoder3d),
    _fusion("decoder", FusedCosmosDecoder3d),
)
