"""The VAEs of Stable Diffusion and Flux: decode a large image in strips, as if it were in one piece.

After ``enable_tiling`` stock decodes a large latent in overlapping tiles. Each norm takes the mean and
variance of its tile, so neighboring tiles get different colors, which stock blends where tiles overlap. Here
each norm takes the mean and variance of the whole image (``strips.py``), so there are no seams.

``conv_in`` and the middle block run on the whole image, because attention in the middle block needs all
positions. The maps after them are larger. A map stays in memory if it fits into about the memory that stock
would take (``_held_bytes``). All other maps are computed again whenever strips of them are needed
(docs/adr/0023-tiled-decode.md).

``tiled_decode`` is replaced in the ``__dict__`` of the instance. Its class stays the same, because
``save_pretrained`` writes the name of this class and pipelines look it up.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from diffusers.models.autoencoders.vae import Decoder, DecoderOutput
from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.unets.unet_2d_blocks import UpDecoderBlock2D
from diffusers.models.upsampling import Upsample2D
from torch import Tensor, nn

from sdfastgn.kernels.common import dispatch
from sdfastgn.kernels.common.private import has_any_global_hook, is_tracing
from sdfastgn.patches.core.channels_last import enter, leave
from sdfastgn.patches.core.class_forward import has_foreign_forward
from sdfastgn.patches.core.convolution import keeps_size
from sdfastgn.patches.core.fusion import activation_of, foreign_class, is_about, stock_class
from sdfastgn.patches.core.instance_entries import InstanceEntry, guard, unguard
from sdfastgn.patches.core.merged_adapters import plain_layer
from sdfastgn.patches.core.tested_sources import tested, unknown_source
from sdfastgn.patches.fusions.conv_norm_out import arm, disarm
from sdfastgn.patches.fusions.strips import Held, Layer, Out, Resnet, Upsample, hold, write

try:
    from diffusers.models.autoencoders.autoencoder_kl_flux2 import AutoencoderKLFlux2
except ImportError:  # a diffusers before Flux2
    AutoencoderKLFlux2 = AutoencoderKL

__all__ = ["FUSION"]

# Classes with the same ``_decode`` and ``tiled_decode``.
_VAES: tuple[type[nn.Module], ...] = tuple(dict.fromkeys((AutoencoderKL, AutoencoderKLFlux2)))
# Bytes that the feature maps in memory may take together. For an image of 2048^2 pixels in 16 bits this is
# enough to keep a map of each resolution of Stable Diffusion's decoder, together with the map that it is
# computed from.
MOST_BYTES = 1792 * 1024**2
# The maps may take more than MOST_BYTES if other steps take more anyway. The last layers of a tile of stock
# need three maps of the tile's largest size: the input of a norm, its result, and the result of the
# activation. Attention in the middle block needs eight maps of its size. Seven of them may be maps here, and
# the memory of one is left for strips.
MAPS_OF_A_TILE = 3
MAPS_OF_ATTENTION = 7
# A strip of the widest map takes about 1 / STRIPS of the bytes that all maps in memory may take together
# (``_held_bytes``). Two or three such strips exist at a time.
STRIPS = 14

_ENTRY = "tiled_decode"
_OWN_HOOKS = (enter, leave, arm, disarm)


class _TiledDecode(InstanceEntry):
    """Replaces the ``tiled_decode`` of one VAE."""

    __slots__ = ()

    def __call__(self, z: Tensor, return_dict: bool = True) -> Any:
        """Decode latents z (N, C, H, W). The image is (N, 3, 8 H, 8 W) for a decoder of four blocks."""
        vae: Any = self.module
        if not _runs_in_strips(vae, z):
            return type(vae).tiled_decode(vae, z, return_dict=return_dict)
        image = _decode(vae, z)
        return DecoderOutput(sample=image) if return_dict else (image,)


def _runs_in_strips(vae: Any, z: Tensor) -> bool:
    return (
        not (torch.compiler.is_compiling() or torch.is_grad_enabled())
        and z.dim() == 4
        and z.numel() > 0
        and dispatch.has_kernels(z)
        and not (is_tracing() or dispatch.is_transformed())
        and not torch.is_autocast_enabled("cuda")
        and not has_any_global_hook()
        and _why_not(vae) is None
        and _why_not_now(vae) is None
    )


def _decode(vae: Any, z: Tensor) -> Tensor:
    decoder = vae.decoder
    N, _, H, W = z.shape
    shape = N, plain_layer(decoder.conv_out).out_channels, H * _scale(decoder), W * _scale(decoder)
    image = torch.empty(shape, dtype=_dtype(decoder), device=z.device)
    for latent, out in zip(z.split(1), image.split(1), strict=True):
        write(_layers(vae, latent), out)
    return image


def _layers(vae: Any, latent: Tensor) -> Out:
    """Builds the chain of layers that decodes ``latent`` (1, C, H, W), and returns the last layer.

    It also computes the statistics of all norms, and the maps that stay in memory. ``rows`` of the last layer
    then computes rows of the image.
    """
    x = _middle(vae, latent)
    most = _held_bytes(vae, x)
    layer: Layer = Held(x, most // STRIPS)
    # Nothing but ``layer`` may refer to a map in memory. Then a map is freed as soon as ``layer`` starts at a
    # later one.
    del x
    modules = list(_modules(vae.decoder))
    for module, after in zip(modules, [*modules[1:], None], strict=True):
        following = _layer(module, layer)
        if isinstance(layer, Held) and following.row_bytes * following.shape[1] <= layer.strip_bytes:
            layer = Held(following.whole(layer.x), layer.strip_bytes)
            continue
        following.learn()
        layer = following
        if _can_hold(following, after, most):
            layer = hold(following, is_normalized=not isinstance(after, Upsample2D))
    end = Out(vae.decoder, layer)
    end.learn()
    return end


def _layer(module: Any, source: Layer) -> Resnet | Upsample:
    return Upsample(module, source) if isinstance(module, Upsample2D) else Resnet(module, source)


def _can_hold(layer: Resnet | Upsample, after: Any, most: int) -> bool:
    """True if the result of ``layer`` may be written to memory.

    It must fit into ``most`` bytes together with the map from which the chain of ``layer`` starts. The result
    of an upsampling is large. If the next layer has another number of channels, the result of the upsampling
    must also fit together with the next result. Otherwise no later map would fit, and all later layers would
    start at this large map.

    ``after``: the module after ``layer``; None if ``layer`` is the last one.
    """
    if layer.source is layer.anchor and layer.source.shape == layer.shape:
        return True  # the result is written over the map that the layer reads, and takes no memory
    if isinstance(layer, Upsample) and after is not None:
        following = _layer(after, layer)
        if following.shape != layer.shape and layer.nbytes + following.nbytes > most:
            return False
    return layer.anchor.nbytes + layer.nbytes <= most


def _middle(vae: Any, latent: Tensor) -> Tensor:
    """Computes the result of the middle block for ``latent`` (1, C, H, W), in the dtype of the up blocks."""
    decoder = vae.decoder
    if vae.post_quant_conv is not None:
        latent = vae.post_quant_conv(latent)
    x = decoder.mid_block(decoder.conv_in(latent), None)
    # In some releases of diffusers the layers up to here may have another dtype than the up blocks, so x is
    # converted to the dtype of the up blocks.
    return x.to(_dtype(decoder))


def _held_bytes(vae: Any, x: Tensor) -> int:
    """Bytes that all maps in memory may take together. x (1, C, H, W): the middle block's result."""
    side = vae.tile_latent_min_size * _scale(vae.decoder)
    of_tile = vae.decoder.up_blocks[-1].resnets[0].in_channels * side**2 * x.element_size()
    return max(MOST_BYTES, MAPS_OF_A_TILE * of_tile, MAPS_OF_ATTENTION * x.nbytes)


def _scale(decoder: Any) -> int:
    """Height of an image divided by that of its latent."""
    return 2 ** sum(isinstance(module, Upsample2D) for module in _modules(decoder))


def _dtype(decoder: Any) -> torch.dtype:
    return next(decoder.up_blocks.parameters()).dtype


def _modules(decoder: Any) -> Iterator[Any]:
    """The layers of all up blocks, in the order in which they run."""
    for block in decoder.up_blocks:
        yield from block.resnets
        yield from block.upsamplers or ()


# --- conditions for strips ----------------------------------------------------------------------------


def _why_not(vae: Any) -> str | None:
    """Why the layers of ``vae`` can never run in strips; None if they can.

    The reason lies in the classes and settings of the layers. ``_why_not_now`` checks training mode and
    hooks.
    """
    decoder = vae.decoder
    if stock_class(decoder) is not Decoder:
        return f"its decoder is a {type(decoder).__name__}"
    for block in decoder.up_blocks:
        if type(block) is not UpDecoderBlock2D:
            return f"its decoder has a {type(block).__name__}"
    norms, acts, convs = [decoder.conv_norm_out], [decoder.conv_act], [decoder.conv_out]
    for module in _modules(decoder):
        if stock_class(module) is ResnetBlock2D and _is_plain_resnet(module):
            norms += [module.norm1, module.norm2]
            acts.append(module.nonlinearity)
            convs += [module.conv1, module.conv2]
        elif stock_class(module) is Upsample2D and _is_plain_upsample(module):
            convs.append(module.conv)
        else:
            return f"its decoder has a {type(module).__name__} with other settings"
    if any(stock_class(norm) is not nn.GroupNorm for norm in norms):
        return "its decoder has a norm that is no nn.GroupNorm"
    if any(activation_of(act, stock_class(act)) is None for act in acts):
        return "its decoder has an activation that has no fused form"
    if not all(map(_is_plain_conv, convs)):
        return "its decoder has a convolution that is no 3 x 3 nn.Conv2d with a border of zeros"
    return None


def _is_plain_resnet(block: Any) -> bool:
    return (
        (block.upsample, block.downsample, block.time_emb_proj) == (None, None, None)
        and block.time_embedding_norm != "scale_shift"
        and (block.conv_shortcut is None or plain_layer(block.conv_shortcut).kernel_size == (1, 1))
    )


def _is_plain_upsample(module: Any) -> bool:
    doubles = module.interpolate and module.norm is None
    return doubles and module.use_conv and module.name == "conv" and not module.use_conv_transpose


def _is_plain_conv(conv: Any) -> bool:
    conv = plain_layer(conv)
    is_conv = type(conv) is nn.Conv2d and "_conv_forward" not in vars(conv)
    return is_conv and conv.groups == 1 and keeps_size(conv)


def _why_not_now(vae: Any) -> str | None:
    """Why stock's tiles run until the state of ``vae`` changes, such as "it is in training mode".

    None if there is no such reason.
    """
    if vae.training:
        return "it is in training mode"
    for path, module in vae.decoder.named_modules(prefix="decoder"):
        hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        if any(hook not in _OWN_HOOKS for hook in hooks):
            return f"{path} has a hook, and would run in strips"
        if has_foreign_forward(module) and not isinstance(vars(module)["forward"], InstanceEntry):
            return f"other code replaced the forward of {path}"
    return None


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
