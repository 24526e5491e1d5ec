"""ComfyUI's tiled decode of images (SD 1.5, SD 2, SDXL, SD3, Flux): strips of the image instead of tiles.

The node VAE Decode (Tiled) calls the VAE's ``decode_tiled_``. The node VAE Decode calls it too, if a decode
without tiles has run out of memory. ComfyUI decodes the image three times in tiles of different shapes, and
averages the results. Each norm takes the mean and variance of its tile, so tiles get different colors. Here
the decoder runs in horizontal strips of the image. Each norm takes the mean and variance of the whole image
(``fusions/strips.py``), so there are no seams.

``image_of`` calls the autoencoder's own ``decode``, and the decoder in the autoencoder runs in strips of the
image (``in_strips``). If the autoencoder is not fused at the moment, ComfyUI's tiles are decoded
(``fused_vae.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple

import comfy.sd
import comfy.utils
import torch
from comfy.ldm.models.autoencoder import AutoencoderKL, AutoencodingEngine
from comfy.ldm.modules.diffusionmodules import model as comfy_model
from comfy.ldm.modules.diffusionmodules.model import Decoder, ResnetBlock, Upsample
from torch import Tensor, nn

from sdfastgn.kernels.common.setting import setting
from sdfastgn.patches.comfyui.layers import plain_class, reason_to_cast
from sdfastgn.patches.fusions import strip_chain
from sdfastgn.patches.fusions.strip_chain import Parts
from sdfastgn.patches.fusions.strips import OutParts, ResnetParts, UpsampleParts
from sdfastgn.patches.swap.fusion import ClassSwap, stock_class
from sdfastgn.patches.swap.tested_sources import tested


class _Request(NamedTuple):
    """Tells a decoder to run in strips of the image, and how.

    Attributes:
        share: the fraction of the image that the largest of ComfyUI's tiles covers, from 0 to 1.
        after_layer: called after each layer of the decoder, to show the progress.
    """

    share: float
    after_layer: Callable[[], object]


# A ``_Request`` while this thread runs a tiled decode: decoders then run in strips of the image. Otherwise
# None: decoders run on whole images.
_request: ContextVar[_Request | None] = ContextVar("_request", default=None)


def in_strips(decoder: Any, z: Tensor) -> Tensor | None:
    """Decodes the latent z (1, C, H, W) in strips of the image, if a tiled decode has called ``decoder``.

    Returns None if the call does not come from a tiled decode.
    """
    request = _request.get()
    if request is None:
        return None
    parts = _parts(decoder)
    H, W = z.shape[2:]
    scale = strip_chain.scale_of(parts)
    image = z.new_empty(1, decoder.conv_out.out_channels, H * scale, W * scale)
    tile = round(request.share * H * W)
    strip_chain.decode(parts, partial(_middle, decoder, z), image, tile, request.after_layer)
    return image


def _middle(decoder: Any, z: Tensor) -> Tensor:
    mid = decoder.mid
    return mid.block_2(mid.attn_1(mid.block_1(decoder.conv_in(z))))


def _parts(decoder: Any) -> Parts:
    layers: list[ResnetParts | UpsampleParts] = []
    for i, up in reversed(list(enumerate(decoder.up))):
        layers += map(_resnet_parts, up.block)
        if i > 0:
            layers.append(UpsampleParts(up.upsample.conv, up.upsample))
    # The decoder calls a function for its last SiLU, but ``OutParts`` needs a module. So a new ``nn.SiLU`` is
    # made.
    return Parts(tuple(layers), OutParts(decoder.norm_out, nn.SiLU(), decoder.conv_out))


def _resnet_parts(block: Any) -> ResnetParts:
    return ResnetParts(
        norm1=block.norm1,
        act=block.swish,
        conv1=block.conv1,
        norm2=block.norm2,
        conv2=block.conv2,
        shortcut=None if block.in_channels == block.out_channels else block.nin_shortcut,
        divisor=1.0,
        whole=block,
    )


def image_of(
    vae: Any, samples: Tensor, tile_x: int = 64, tile_y: int = 64, overlap: int = 16
) -> Tensor | None:
    """Decodes ``samples`` (N, C, H, W) in strips: (N, 3, 8 H, 8 W) in fp32 for a decoder of four levels.

    Returns None if that is not possible, or if memory runs out.

    ``tile_x`` and ``tile_y``: width and height of a tile of ComfyUI, in positions of the latent.
    """
    model, image = vae.first_stage_model, None
    latents = samples.to(vae.vae_dtype).to(vae.device)
    if not _runs_in_strips(model, latents):
        return None
    H, W = latents.shape[2:]
    sizes = (tile_y, tile_x), (2 * tile_y, tile_x // 2), (tile_y // 2, 2 * tile_x)
    share = max(min(h, H) * min(w, W) for h, w in sizes) / (H * W)
    steps = len(_parts(model.decoder).layers) + 1
    bar = comfy.utils.ProgressBar(steps * len(latents))
    try:
        with setting(_request, _Request(share, partial(bar.update, 1))):
            for i, latent in enumerate(latents.split(1)):
                found = model.decode(latent)
                if image is None:  # ``image`` gets PyTorch's default dtype, as in ComfyUI
                    image = torch.empty((len(latents), *found.shape[1:]), device=vae.output_device)
                image[i] = found[0]
    except torch.OutOfMemoryError:
        return None
    return vae.process_output(image)


# --- when an autoencoder may decode in strips ---------------------------------------------------------


def _runs_in_strips(model: Any, latents: Tensor) -> bool:
    return (
        # The decoder must be fused, because only the fused decoder calls ``in_strips``.
        stock_class(model.decoder) is not type(model.decoder)
        and strip_chain.runs_now(latents)
        and "decode" not in vars(model)
        and _why_not(model) is None
        and strip_chain.reason_now(model.decoder) is None
    )


def _is_image_model(stock: type[nn.Module], model: Any) -> bool:
    """True if ``model`` is an autoencoder for images of the class ``stock``, fused or not."""
    is_known = stock_class(model) is stock and stock_class(model.decoder) is Decoder
    return is_known and isinstance(model.decoder.conv_in, nn.Conv2d)


def _why_not(model: Any) -> str | None:
    """Why the decoder of ``model`` cannot run in strips of an image; None if it can.

    The answer depends on how ComfyUI has loaded the weights, so it is for the present state of ``model``.
    """
    decoder = model.decoder
    if decoder.tanh_out:
        return "its decoder ends with tanh"
    for i, up in enumerate(decoder.up):
        if len(up.attn) > 0:
            return "its decoder has attention after the middle block"
        for block in up.block:
            if stock_class(block) is not ResnetBlock or block.use_conv_shortcut:
                return f"its decoder has a {type(block).__name__} with other settings"
        if i > 0 and not _doubles(up.upsample):
            return f"its decoder has a {type(up.upsample).__name__} with other settings"
    casts = next(filter(None, map(reason_to_cast, decoder.modules())), None)
    return casts or strip_chain.reason_to_skip(_parts(decoder), plain_class)


def _doubles(upsample: Any) -> bool:
    is_known = stock_class(upsample) is Upsample and upsample.with_conv
    return bool(is_known and getattr(upsample, "scale_factor", 2.0) == 2.0)


class FusedAutoencoderKL(AutoencoderKL):
    """``AutoencoderKL`` for images whose decoder may run in strips."""


class FusedAutoencodingEngine(AutoencodingEngine):
    """``AutoencodingEngine`` for images whose decoder may run in strips."""


_SOURCES = (
    tested(comfy.sd.VAE, "decode_tiled_"),
    tested(Decoder, "forward"),
    tested(ResnetBlock, "__init__", "forward"),
    tested(Upsample, "__init__", "forward"),
    tested(comfy_model, "interpolate_up"),
)
AUTOENCODERS: tuple[ClassSwap, ...] = tuple(
    ClassSwap(
        "comfyui_tiled_decode",
        stock,
        fused,
        sources=(*_SOURCES, tested(stock, "decode")),
        check=_why_not,
        covers=partial(_is_image_model, stock),
    )
    for stock, fused in (
        (AutoencoderKL, FusedAutoencoderKL),
        (AutoencodingEngine, FusedAutoencodingEngine),
    )
)
