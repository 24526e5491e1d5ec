"""The VAEs of Stable Diffusion and Flux: decode a large image in strips, as if it were in one piece.

After ``enable_tiling`` diffusers decodes a large latent in overlapping tiles. Each norm takes the mean and
variance of its tile, so neighboring tiles get different colors. diffusers blends them where tiles overlap.
Here each norm takes the mean and variance of the whole image (``strips.py``), so there are no seams.
``strip_chain.py`` decides which feature maps stay in memory.

The method ``tiled_decode`` is replaced in the ``__dict__`` of the VAE. The class of the VAE stays the same,
because ``save_pretrained`` writes the name of this class, and pipelines look up the class by its name.
"""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from diffusers.models.autoencoders.vae import Decoder, DecoderOutput
from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.unets.unet_2d_blocks import UpDecoderBlock2D
from diffusers.models.upsampling import Upsample2D
from torch import Tensor, nn

from sdfastgn.patches.fusions import strip_chain
from sdfastgn.patches.fusions.conv_norm_out import arm, disarm
from sdfastgn.patches.fusions.strip_chain import Parts
from sdfastgn.patches.fusions.strips import OutParts, ResnetParts, UpsampleParts
from sdfastgn.patches.lora.merging import plain_layer
from sdfastgn.patches.swap.fusion import foreign_class, is_about, stock_class
from sdfastgn.patches.swap.instance_entries import InstanceEntry, guard, unguard
from sdfastgn.patches.swap.tested_sources import tested, unknown_source

try:
    from diffusers.models.autoencoders.autoencoder_kl_flux2 import AutoencoderKLFlux2
except ImportError:  # diffusers older than Flux 2 lacks this class
    AutoencoderKLFlux2 = AutoencoderKL

# The VAE classes of diffusers that are fused here. Their methods ``_decode`` and ``tiled_decode`` are the
# same.
_VAES: tuple[type[nn.Module], ...] = tuple(dict.fromkeys((AutoencoderKL, AutoencoderKLFlux2)))
_ENTRY = "tiled_decode"


class _TiledDecode(InstanceEntry):
    """Replaces the method ``tiled_decode`` of one VAE by a decode in strips of the image."""

    __slots__ = ()

    def __call__(self, z: Tensor, return_dict: bool = True) -> Any:
        """Decode latents z (N, C, H, W). The image is (N, 3, 8 H, 8 W) for a decoder of four blocks.

        If memory runs out while strips of the image are decoded, diffusers' own tiled decode runs instead,
        because a small tile takes less memory.
        """
        vae: Any = self.module
        if _runs_in_strips(vae, z):
            with contextlib.suppress(torch.OutOfMemoryError):
                image = _decode(vae, z)
                return DecoderOutput(sample=image) if return_dict else (image,)
        return type(vae).tiled_decode(vae, z, return_dict=return_dict)


def _runs_in_strips(vae: Any, z: Tensor) -> bool:
    return (
        strip_chain.runs_now(z)
        and _why_not(vae) is None
        and _why_not_now(vae) is None
        and strip_chain.merges_now(vae.decoder, _parts(vae.decoder))
    )


def _decode(vae: Any, z: Tensor) -> Tensor:
    decoder, parts = vae.decoder, _parts(vae.decoder)
    N, _, H, W = z.shape
    scale = strip_chain.scale_of(parts)
    shape = N, plain_layer(decoder.conv_out).out_channels, H * scale, W * scale
    image = torch.empty(shape, dtype=_dtype(decoder), device=z.device)
    for latent, out in zip(z.split(1), image.split(1), strict=True):
        strip_chain.decode(parts, partial(_middle, vae, latent), out, vae.tile_latent_min_size**2)
    return image


def _middle(vae: Any, latent: Tensor) -> Tensor:
    """Computes the result of the middle block for ``latent`` (1, C, H, W), in the dtype of the up blocks."""
    decoder = vae.decoder
    if vae.post_quant_conv is not None:
        latent = vae.post_quant_conv(latent)
    x = decoder.mid_block(decoder.conv_in(latent), None)
    # In some releases of diffusers the layers before the up blocks may have another dtype than the up blocks.
    # So x is converted to the dtype of the up blocks.
    return x.to(_dtype(decoder))


def _dtype(decoder: Any) -> torch.dtype:
    return next(decoder.up_blocks.parameters()).dtype


def _parts(decoder: Any) -> Parts:
    layers: list[ResnetParts | UpsampleParts] = []
    for block in decoder.up_blocks:
        layers += map(_resnet_parts, block.resnets)
        layers += (UpsampleParts(each.conv, each) for each in block.upsamplers or ())
    return Parts(tuple(layers), OutParts(decoder.conv_norm_out, decoder.conv_act, decoder.conv_out))


def _resnet_parts(block: Any) -> ResnetParts:
    return ResnetParts(
        norm1=block.norm1,
        act=block.nonlinearity,
        conv1=block.conv1,
        norm2=block.norm2,
        conv2=block.conv2,
        shortcut=block.conv_shortcut,
        divisor=block.output_scale_factor,
        whole=partial(block, temb=None),
    )


# --- when a VAE may decode an image in strips ---------------------------------------------------------


def _why_not(vae: Any) -> str | None:
    """Why the decoder of ``vae`` can never run in strips of the image; None if it can.

    The reason lies in the classes and settings of the layers. ``_why_not_now`` checks training mode, hooks
    and adapters.
    """
    decoder = vae.decoder
    if stock_class(decoder) is not Decoder:
        return f"its decoder is a {type(decoder).__name__}"
    for block in decoder.up_blocks:
        if type(block) is not UpDecoderBlock2D:
            return f"its decoder has a {type(block).__name__}"
        for module in (*block.resnets, *(block.upsamplers or ())):
            if not (_is_plain_resnet(module) or _is_plain_upsample(module)):
                return f"its decoder has a {type(module).__name__} with other settings"
    return strip_chain.reason_to_skip(_parts(decoder))


def _is_plain_resnet(block: Any) -> bool:
    return (
        stock_class(block) is ResnetBlock2D
        and (block.upsample, block.downsample, block.time_emb_proj) == (None, None, None)
        and block.time_embedding_norm != "scale_shift"
    )


def _is_plain_upsample(module: Any) -> bool:
    return (
        stock_class(module) is Upsample2D
        and (module.interpolate and module.norm is None and module.use_conv)
        and (module.name == "conv" and not module.use_conv_transpose)
    )


def _why_not_now(vae: Any) -> str | None:
    return strip_chain.reason_now(vae.decoder, arm, disarm) or strip_chain.reason_of_adapters(
        vae, _parts(vae.decoder)
    )


_METHODS = "_decode", "tiled_decode"
_LAYERS = (
    tested(Decoder, "forward"),
    tested(UpDecoderBlock2D, "__init__", "forward"),
    tested(ResnetBlock2D, "__init__", "forward"),
    tested(Upsample2D, "__init__", "forward"),
)


class _TiledDecodeFusion:
    name = "tiled_decode"
    sources = (*(tested(vae, *_METHODS) for vae in _VAES), *_LAYERS)

    def claims(self, module: nn.Module) -> bool:
        return is_about(module, *_VAES)

    def is_applied(self, module: nn.Module) -> bool:
        return isinstance(vars(module).get(_ENTRY), _TiledDecode)

    def reason_to_skip(self, module: nn.Module) -> str | None:
        replaced = [name for name in ("decode", "_decode", _ENTRY) if name in vars(module)]
        return (
            foreign_class(module, *_VAES)
            or (f"other code replaced this instance's {replaced[0]}" if replaced else None)
            or unknown_source(tested(type(module), *_METHODS), *_LAYERS)
            or _why_not(module)
        )

    def reason_now(self, module: nn.Module) -> str | None:
        return _why_not(module) or _why_not_now(module)

    def apply(self, module: nn.Module) -> None:
        vars(module)[_ENTRY] = _TiledDecode(module)
        guard(module)

    def undo(self, module: nn.Module) -> None:
        if self.is_applied(module):
            del vars(module)[_ENTRY]
            unguard(module)


FUSION = _TiledDecodeFusion()
