"""Fusions for the blocks of ComfyUI's image autoencoders (SD 1.5, SD 2, SDXL, SD3, Flux).

The fused classes of the encoder and the decoder turn inference mode off, so that norms can use the mean and
variance that were stored for their input (``inference_mode.py``). A tiled decode runs the fused decoder in
strips of the image (``tiled_decode.py``). The activation after the last norm stays a separate pass: ComfyUI's
``forward`` calls a function for the activation, so there is no module that could be replaced.

ComfyUI uses some of these classes in autoencoders for videos, too. There they are not fused. Such an
autoencoder runs as a plan instead: a traced list of kernels that replaces the Python of its forward.
"""

from __future__ import annotations

from typing import Any

from comfy.ldm.modules.diffusionmodules import model as comfy_model
from comfy.ldm.modules.diffusionmodules.model import (
    AttnBlock,
    Decoder,
    Encoder,
    ResnetBlock,
    Upsample,
)
from torch import Tensor, nn

from sdfastgn.kernels.attention.wide_heads import attend
from sdfastgn.kernels.common import dispatch
from sdfastgn.kernels.common.layout import is_channels_last
from sdfastgn.patches.comfyui import tiled_decode
from sdfastgn.patches.comfyui.inference_mode import outside_inference_mode
from sdfastgn.patches.comfyui.layers import prepared
from sdfastgn.patches.layers.convolution import conv_without_bias, pointwise
from sdfastgn.patches.layers.group_norm import norm_act
from sdfastgn.patches.layers.residual import conv_norm_act
from sdfastgn.patches.layers.statistics import add
from sdfastgn.patches.layers.upsampling import conv_of_upsampled
from sdfastgn.patches.swap.fusion import ClassSwap
from sdfastgn.patches.swap.tested_sources import tested


class FusedResnetBlock(ResnetBlock):
    """``ResnetBlock`` with fused norms. Images x (N, C, H, W) -> (N, C_out, H, W)."""

    def forward(self, x: Tensor, temb: Tensor | None = None, *carried: Any) -> Tensor:
        is_usual = temb is None and not any(part is not None for part in carried)
        if not (is_usual and dispatch.has_kernels(x)):
            return super().forward(x, temb, *carried)
        h = norm_act(prepared(self.norm1, x), self.swish, x)
        conv1, norm2 = prepared(self.conv1, h), prepared(self.norm2, h)
        h = conv_norm_act(h, conv1, norm2, self.swish, self.out_channels)
        h, bias = conv_without_bias(prepared(self.conv2, h), self.dropout(h))
        if self.in_channels != self.out_channels:
            shortcut = self.conv_shortcut if self.use_conv_shortcut else self.nin_shortcut
            x = pointwise(prepared(shortcut, x), x)
        return add(h, x, bias)


class FusedAttnBlock(AttnBlock):
    """``AttnBlock``: attention over all pixels with one wide head. x and the result: images (N, C, H, W)."""

    def forward(self, x: Tensor) -> Tensor:
        # If ComfyUI has chosen xformers or sliced attention, ComfyUI's forward runs.
        is_plain = self.optimized_attention is comfy_model.pytorch_attention
        if not (is_plain and dispatch.has_kernels(x) and x.dim() == 4):
            return super().forward(x)
        h = prepared(self.norm, x)(x)
        q, k, v = (_to_tokens(pointwise(prepared(conv, h), h)) for conv in (self.q, self.k, self.v))
        N, _, H, W = x.shape
        h = attend(q, k, v).reshape(N, H, W, -1).permute(0, 3, 1, 2)
        return add(pointwise(prepared(self.proj_out, h), h), x)


def _to_tokens(image: Tensor) -> Tensor:
    """The pixels of ``image`` as tokens of one head: (N, C, H, W) -> (N, 1, H * W, C)."""
    return image.permute(0, 2, 3, 1).flatten(1, 2).unsqueeze(1)


class FusedUpsample(Upsample):
    """``Upsample`` by two: upsampling and its convolution run together. x (N, C, H, W) -> (N, C, 2H, 2W)."""

    def forward(self, x: Tensor, *carried: Any) -> Tensor:
        is_usual = x.dim() == 4 and dispatch.has_kernels(x)
        if not (is_usual and is_channels_last(x)):
            return super().forward(x, *carried)
        return conv_of_upsampled(prepared(self.conv, x), x)


class FusedEncoder(Encoder):
    """``Encoder`` that runs outside of PyTorch's inference mode.

    The reason: norms can then use the mean and variance stored for their input (``inference_mode.py``). x (N,
    3, H, W) -> (N, latent channels, H / 8, W / 8).
    """

    def forward(self, x: Tensor) -> Tensor:
        with outside_inference_mode():
            return super().forward(x)


class FusedDecoder(Decoder):
    """``Decoder`` that runs outside of PyTorch's inference mode.

    The reason: norms can then use the mean and variance stored for their input (``inference_mode.py``). In a
    tiled decode the decoder runs in strips of the image (``tiled_decode.py``). z (N, latent channels, H, W)
    -> (N, 3, 8 H, 8 W).
    """

    def forward(self, z: Tensor, **kwargs: Any) -> Tensor:
        with outside_inference_mode():
            image = tiled_decode.in_strips(self, z)
            return super().forward(z, **kwargs) if image is None else image


def _is_image_block(block: Any) -> bool:
    return isinstance(block.conv1, nn.Conv2d)


def _is_image_conv(block: Any) -> bool:
    """True if the block upsamples an image by two and then convolves it."""
    is_double = getattr(block, "scale_factor", 2.0) == 2.0
    return bool(block.with_conv and isinstance(block.conv, nn.Conv2d) and is_double)


def _is_image_attention(block: Any) -> bool:
    return isinstance(block.q, nn.Conv2d)


def _is_image_model(model: Any) -> bool:
    return isinstance(model.conv_in, nn.Conv2d)


BLOCKS = (
    ClassSwap(
        "comfyui_resnet_block",
        ResnetBlock,
        FusedResnetBlock,
        sources=(tested(ResnetBlock, "__init__", "forward"),),
        covers=_is_image_block,
    ),
    ClassSwap(
        "comfyui_attn_block",
        AttnBlock,
        FusedAttnBlock,
        sources=(
            tested(AttnBlock, "__init__", "forward"),
            tested(comfy_model, "pytorch_attention"),
        ),
        covers=_is_image_attention,
    ),
    ClassSwap(
        "comfyui_vae_upsample",
        Upsample,
        FusedUpsample,
        sources=(
            tested(Upsample, "__init__", "forward"),
            tested(comfy_model, "interpolate_up"),
        ),
        covers=_is_image_conv,
    ),
    ClassSwap(
        "comfyui_encoder",
        Encoder,
        FusedEncoder,
        sources=(tested(Encoder, "forward"),),
        covers=_is_image_model,
    ),
    ClassSwap(
        "comfyui_decoder",
        Decoder,
        FusedDecoder,
        sources=(tested(Decoder, "forward"),),
        covers=_is_image_model,
    ),
)
