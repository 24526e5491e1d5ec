"""Decodes an image in strips. Decides which feature maps stay in memory, and which decoders can run so.

``conv_in`` and the middle block run on the whole image, because attention in the middle block needs all
positions. The maps after them are larger. There is a limit for the memory of maps (``_held_bytes``): what
stock takes for a tile, or attention in the middle block, but at least 1.75 GiB. A map stays in memory if it
fits into this limit. All other maps are computed again whenever strips of them are needed
(docs/adr/0023-tiled-decode.md).

``fusions/tiled_decode.py`` uses this file for the VAEs of diffusers, and ``comfyui/tiled_decode.py`` for
those of ComfyUI.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sdfastgn.kernels.common import dispatch
from sdfastgn.kernels.common.private import has_any_global_hook, is_tracing
from sdfastgn.patches.fusions.strips import (
    Held,
    Layer,
    Out,
    OutParts,
    Resnet,
    ResnetParts,
    Upsample,
    UpsampleParts,
    hold,
    write,
)
from sdfastgn.patches.layers.convolution import keeps_size
from sdfastgn.patches.layout.channels_last import enter, leave
from sdfastgn.patches.lora.adapters import WRAPPED
from sdfastgn.patches.lora.merging import adopt, is_allowed, plain_layer, waits, why_not
from sdfastgn.patches.swap.class_forward import has_foreign_forward
from sdfastgn.patches.swap.fusion import activation_of, stock_class

# Bytes that the feature maps in memory may take together. For an image of 2048^2 pixels in 16 bits this is
# enough to keep a map of each resolution of Stable Diffusion's decoder, together with the map that it is
# computed from.
MOST_BYTES = 1792 * 1024**2
# The maps in memory may take more than MOST_BYTES in two cases, because this much memory is needed anyway:
# - The last layers of a tile of stock need three maps of the tile's largest size: the input of a norm, its
#   result, and the result of the activation. So the maps may take as much as three such maps.
# - Attention in the middle block, which runs before the strips, needs eight tensors of the size of the middle
#   block's result. So the maps may take as much as seven such tensors. The eighth's memory is for strips.
MAPS_OF_A_TILE = 3
MAPS_OF_ATTENTION = 7
# A strip of the widest map takes about 1 / STRIPS of the bytes that all maps in memory may take together
# (``_held_bytes``). Two or three such strips exist at a time.
STRIPS = 14


class Parts(NamedTuple):
    """The layers of a decoder after the middle block, in the order in which they run."""

    layers: tuple[ResnetParts | UpsampleParts, ...]
    out: OutParts


def scale_of(parts: Parts) -> int:
    """Height of an image divided by the height of the middle block's result."""
    return 2 ** sum(isinstance(layer, UpsampleParts) for layer in parts.layers)


def decode(
    parts: Parts,
    middle: Callable[[], Tensor],
    out: Tensor,
    tile: int,
    after_layer: Callable[[], object] = lambda: None,
) -> None:
    """Decode one image into ``out``, (1, 3, H, W).

    Args:
        parts: the layers after the middle block.
        middle: computes the middle block's result, (1, C, H / scale, W / scale), where ``scale`` is
            ``scale_of(parts)``. Nothing else may refer to this tensor, because its memory is used again.
        out: gets the image. Dtype and device of the middle block's result.
        tile: number of positions of the middle block's result that a tile of stock has.
        after_layer: called after each of the layers, and at the end: ``len(parts.layers) + 1`` times.
    """
    write(_chain(parts, middle, tile, after_layer), out)
    after_layer()


def _chain(parts: Parts, middle: Callable[[], Tensor], tile: int, after_layer: Callable[[], object]) -> Out:
    """Builds the chain of layers for one image, and returns the last layer. Arguments as in ``decode``.

    It also computes the statistics of all norms, and the maps that stay in memory. ``rows`` of the last layer
    then computes rows of the image.
    """
    x = middle()
    most = _held_bytes(parts, x, tile)
    layer: Layer = Held(x, most // STRIPS)
    # Without ``x``, only ``layer`` refers to the map in memory. So the map is freed as soon as ``layer`` is
    # replaced by a layer that starts at a later map.
    del x
    for part, after in zip(parts.layers, [*parts.layers[1:], None], strict=True):
        following = _layer(part, layer)
        if isinstance(layer, Held) and following.row_bytes * following.shape[1] <= layer.strip_bytes:
            layer = Held(following.whole(layer.x), layer.strip_bytes)
        else:
            following.learn()
            layer = following
            if _can_hold(following, after, most):
                layer = hold(following, is_normalized=not isinstance(after, UpsampleParts))
        after_layer()
    end = Out(parts.out, layer)
    end.learn()
    return end


def _layer(part: ResnetParts | UpsampleParts, source: Layer) -> Resnet | Upsample:
    return Upsample(part, source) if isinstance(part, UpsampleParts) else Resnet(part, source)


def _can_hold(layer: Resnet | Upsample, after: ResnetParts | UpsampleParts | None, most: int) -> bool:
    """True if the result of ``layer`` may be written to memory.

    If ``layer`` reads a map in memory of the same shape, the result is written over this map. That takes no
    more memory, so it is always possible. Any other result must fit into ``most`` bytes together with
    ``layer.anchor``, the map in memory from which it is computed.

    There is a further condition for an upsampling, whose result is large. If the next layer's result has
    another shape, it cannot be written over the result of the upsampling. Then both results must fit into
    ``most`` bytes together. Otherwise the result of the upsampling would leave no room for any later map.

    ``after``: the parts of the layer after ``layer``; None if ``layer`` is the last one.
    """
    if layer.source is layer.anchor and layer.source.shape == layer.shape:
        return True  # the result is written over the map that the layer reads, and takes no memory
    if isinstance(layer, Upsample) and after is not None:
        following = _layer(after, layer)
        if following.shape != layer.shape and layer.nbytes + following.nbytes > most:
            return False
    return layer.anchor.nbytes + layer.nbytes <= most


def _held_bytes(parts: Parts, x: Tensor, tile: int) -> int:
    """Bytes that all maps in memory may take together. x (1, C, H, W): the middle block's result."""
    layer: Layer = Held(x, 0)
    widest = layer.nbytes
    for part in parts.layers:
        layer = _layer(part, layer)
        widest = max(widest, layer.nbytes)
    of_tile = widest * tile // (x.shape[2] * x.shape[3])
    return max(MOST_BYTES, MAPS_OF_A_TILE * of_tile, MAPS_OF_ATTENTION * x.nbytes)


# --- conditions for strips ----------------------------------------------------------------------------


def runs_now(z: Tensor) -> bool:
    """True if latents z (N, C, H, W) may be decoded in strips in a call at this moment."""
    return (
        not (torch.compiler.is_compiling() or torch.is_grad_enabled())
        and z.dim() == 4
        and z.numel() > 0
        and dispatch.has_kernels(z)
        and not (is_tracing() or dispatch.is_transformed())
        and not torch.is_autocast_enabled("cuda")
        and not has_any_global_hook()
    )


def reason_to_skip(parts: Parts, class_of: Callable[[Any], type] = stock_class) -> str | None:
    """Why layers with these parts can never run in strips; None if they can.

    The reason lies in the classes and settings of the modules. ``reason_now`` checks training mode and hooks,
    and ``reason_of_adapters`` adapters: users add and remove them at any time.

    ``class_of``: returns the class that a norm, an activation or a convolution has in PyTorch.
    """
    norms, acts, shortcuts = [parts.out.norm], [parts.out.act], []
    for layer in parts.layers:
        if isinstance(layer, UpsampleParts):
            continue
        norms += [layer.norm1, layer.norm2]
        acts.append(layer.act)
        if layer.shortcut is not None:
            shortcuts.append(layer.shortcut)
    if any(class_of(norm) is not nn.GroupNorm for norm in norms):
        return "its decoder has a norm that is no nn.GroupNorm"
    if any(activation_of(act, class_of(act)) is None for act in acts):
        return "its decoder has an activation that has no fused form"
    if not all(_is_plain_conv(_inner(conv), class_of) for conv in _convolutions(parts)):
        return "its decoder has a convolution that is no 3 x 3 nn.Conv2d with a border of zeros"
    if any(_inner(conv).kernel_size != (1, 1) for conv in shortcuts):
        return "its decoder has a shortcut that is no 1 x 1 convolution"
    return None


def _convolutions(parts: Parts) -> list[Any]:
    """The 3 x 3 convolutions of ``parts``, or the wrappers of adapters around them."""
    found = [parts.out.conv]
    for layer in parts.layers:
        found += [layer.conv] if isinstance(layer, UpsampleParts) else [layer.conv1, layer.conv2]
    return found


def _inner(layer: Any) -> Any:
    """The model's own layer, if ``layer`` is the wrapper of an adapter around it; else ``layer`` itself."""
    children = layer._modules
    return next((children[name] for name in WRAPPED if name in children), layer)


def _is_plain_conv(conv: Any, class_of: Callable[[Any], type]) -> bool:
    is_conv = class_of(conv) is nn.Conv2d and "_conv_forward" not in vars(conv)
    return is_conv and conv.groups == 1 and keeps_size(conv)


def reason_of_adapters(vae: nn.Module, parts: Parts) -> str | None:
    """Why stock's tiles run until an adapter changes; None if there is no such reason.

    Strips use the weight of a convolution. So its adapter, such as a LoRA, must be merged into the weight.
    """
    for conv in _convolutions(parts):
        if _inner(conv) is conv:
            continue
        why = why_not(conv) if is_allowed(vae) and is_allowed(conv) else "merge_adapters is False"
        if why is not None:
            path = next(path for path, module in vae.named_modules() if module is conv)
            return f"the adapter of {path} is not merged: {why}"
    return None


def merges_now(decoder: nn.Module, parts: Parts) -> bool:
    """Merges the adapters of all 3 x 3 convolutions. False if peft's code must run for one in this call."""
    wrappers = [conv for conv in _convolutions(parts) if _inner(conv) is not conv]
    if any(map(waits, wrappers)):  # such as a LoRA that was added after ``optimize``
        adopt(decoder)
    return not any(plain_layer(conv) is conv for conv in wrappers)


def reason_now(decoder: nn.Module, *own_hooks: Any) -> str | None:
    """Why stock's tiles run until the state of ``decoder`` changes, such as "it is in training mode".

    None if there is no such reason. A hook is a reason, because it would run in each strip. Two kinds are
    allowed: sdfastgn's hooks that make tensors channels-last, and those in ``own_hooks``.
    """
    if decoder.training:
        return "it is in training mode"
    for path, module in decoder.named_modules(prefix="decoder"):
        hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        if any(hook not in (enter, leave, *own_hooks) for hook in hooks):
            return f"{path} has a hook, and would run in strips"
        if has_foreign_forward(module):
            return f"other code replaced the forward of {path}"
    return None
