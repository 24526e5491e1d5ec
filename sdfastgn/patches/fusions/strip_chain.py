"""Decodes an image in strips. Decides which feature maps stay in memory, and which decoders are supported.

``conv_in`` and the middle block run on the whole image, because attention in the middle block needs all
positions. The feature maps after the middle block are larger. There is a limit for the memory of feature maps
(``_held_bytes``): the memory that diffusers takes for a tile, or that attention in the middle block takes,
but at least 1.75 GiB. A feature map stays in memory if it fits into this limit. Strips of all other feature
maps are computed again whenever they are needed (docs/adr/0023-tiled-decode.md).

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

# Number of bytes that the feature maps in memory may take together. For an image of 2048^2 pixels in 16 bits
# this is enough to keep a feature map of each resolution of Stable Diffusion's decoder, together with the
# feature map from which it is computed.
MOST_BYTES = 1792 * 1024**2
# The feature maps in memory may take more than MOST_BYTES in two cases, in which more memory is needed
# anyway: - In diffusers' own tiled decode, the last layers of a tile need three feature maps of the largest
# size: the input of a norm, its result, and the result of the activation. So three such maps may stay in
# memory. - Attention in the middle block, which runs before the strips, needs eight tensors of the size of
# the middle block's result. So seven such tensors may stay in memory. The memory of the eighth is for strips.
MAPS_OF_A_TILE = 3
MAPS_OF_ATTENTION = 7
# A strip of the widest feature map takes about 1 / STRIPS of the bytes that all feature maps in memory may
# take together. At any time two or three such strips exist.
STRIPS = 14


class Parts(NamedTuple):
    """The layers of a decoder after the middle block, in the order in which they run."""

    layers: tuple[ResnetParts | UpsampleParts, ...]
    out: OutParts


def scale_of(parts: Parts) -> int:
    """Height of an image divided by the height of the middle block's result.

    Each upsampling among the layers of ``parts`` doubles the height.
    """
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
        out: gets the image. It has the dtype and device of the middle block's result.
        tile: number of positions of the middle block's result in one tile, if diffusers or ComfyUI decoded in
            tiles.
        after_layer: called after each of the layers, and at the end: ``len(parts.layers) + 1`` times.
    """
    write(_chain(parts, middle, tile, after_layer), out)
    after_layer()


def _chain(parts: Parts, middle: Callable[[], Tensor], tile: int, after_layer: Callable[[], object]) -> Out:
    """Prepares the layers of a decoder for one image, and returns the last one. Arguments: as of ``decode``.

    This function also computes the statistics of all norms, and the feature maps that stay in memory. The
    method ``rows`` of the last layer then computes rows of the image.
    """
    x = middle()
    most = _held_bytes(parts, x, tile)
    layer: Layer = Held(x, most // STRIPS)
    # With ``x`` deleted, only ``layer`` refers to the feature map in memory. So the map is freed as soon as
    # ``layer`` is replaced by a layer that reads a later feature map in memory.
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

    If ``layer`` reads a feature map in memory of the same shape, the result is written over this feature map.
    That takes no more memory, so it is always possible. Any other result must fit into ``most`` bytes
    together with ``layer.anchor``, the feature map in memory from which the result is computed.

    There is a further condition for an upsampling, whose result is large. If the next layer's result has
    another shape, it cannot be written over the result of the upsampling. Then both results must fit into
    ``most`` bytes together. Otherwise no later feature map would fit beside the result of the upsampling.

    ``after``: the modules of the layer after ``layer``; None if ``layer`` is the last one.
    """
    if layer.source is layer.anchor and layer.source.shape == layer.shape:
        return True  # the result overwrites the layer's input, and takes no further memory
    if isinstance(layer, Upsample) and after is not None:
        following = _layer(after, layer)
        if following.shape != layer.shape and layer.nbytes + following.nbytes > most:
            return False
    return layer.anchor.nbytes + layer.nbytes <= most


def _held_bytes(parts: Parts, x: Tensor, tile: int) -> int:
    """Number of bytes that all feature maps in memory may take together.

    x (1, C, H, W): the middle block's result. ``tile``: number of positions of x in a tile of diffusers' or
    ComfyUI's tiled decode.
    """
    layer: Layer = Held(x, 0)
    widest = layer.nbytes
    for part in parts.layers:
        layer = _layer(part, layer)
        widest = max(widest, layer.nbytes)
    of_tile = widest * tile // (x.shape[2] * x.shape[3])
    return max(MOST_BYTES, MAPS_OF_A_TILE * of_tile, MAPS_OF_ATTENTION * x.nbytes)


# --- when a decoder may run in strips -----------------------------------------------------------------


def runs_now(z: Tensor) -> bool:
    """True if a call at this moment may decode latents z (N, C, H, W) in strips of the image."""
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
    """Why the layers of a decoder can never run in strips; None if they can.

    The reason lies in the classes and settings of the modules. Hooks and adapters are checked in each call,
    by ``reason_now`` and ``reason_of_adapters``, because users add and remove them at any time.

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
    """Returns all 3 x 3 convolutions of a decoder after its middle block.

    A convolution with a LoRA is returned as peft's LoRA layer around it.
    """
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
    """Says which adapter prevents a decode in strips, so that diffusers decodes in tiles; None if none.

    A decode in strips reads the weights of convolutions. So the adapter of a convolution, such as a LoRA,
    must be merged into the weight.
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
    """Merges the adapters of all 3 x 3 convolutions in ``parts`` into weights.

    Returns True if all of them are merged. Returns False if one cannot be merged in this call, so that peft's
    forward must run.
    """
    wrappers = [conv for conv in _convolutions(parts) if _inner(conv) is not conv]
    # If an adapter has no merged weight yet, for instance a LoRA that was added after ``optimize``, merge it
    # now.
    if any(map(waits, wrappers)):
        adopt(decoder)
    return not any(plain_layer(conv) is conv for conv in wrappers)


def reason_now(decoder: nn.Module, *own_hooks: Any) -> str | None:
    """Why ``decoder`` cannot run in strips in its present state, such as "it is in training mode".

    None if it can. A hook is a reason, because the hook would run in each strip. Two kinds of hooks are
    allowed: sdfastgn's hooks that make tensors channels-last, and the hooks in ``own_hooks``.
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
