"""Computes parts of transformer blocks, for the fusions of diffusers and of ComfyUI.

The parts are LayerNorm with the residual add before it, and the feed-forward network with GEGLU.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from sdfastgn.kernels.common import dispatch
from sdfastgn.kernels.common.e4m3 import E4M3
from sdfastgn.kernels.geglu.op import geglu
from sdfastgn.kernels.layer_norm.grouped import Groups, grouped_layer_norm
from sdfastgn.kernels.layer_norm.op import add_layer_norm, layer_norm
from sdfastgn.kernels.product.op import add_linear_, linear
from sdfastgn.patches.fp8 import models as fp8
from sdfastgn.patches.fp8 import product as fp8_product
from sdfastgn.patches.layers.linear import parameters_of_plain
from sdfastgn.patches.layers.rounding import rounded
from sdfastgn.patches.lora.merging import plain_layer
from sdfastgn.patches.lora.wrappers import wrapped_layer
from sdfastgn.patches.swap.fusion import (
    dropped_out,
    drops_nothing,
    is_unhooked,
    layer_of,
    parameters_of,
    stock_class,
)

# In training a norm runs in the kernel only if its input has at least this many elements. For fewer elements
# the kernel saves less time on the GPU than it costs on the CPU: its autograd node is written in Python and
# takes 0.1 to 0.3 ms on the host of an H200. PyTorch's own norm takes 0.05 ms there.
_TRAINING_ELEMENTS = 2**24


def linear_geglu(layer: Any, x: Tensor) -> Tensor:
    """Computes ``a * gelu(b)``, where a and b are the halves of ``layer(x)``.

    If ``layer`` is a plain ``nn.Linear``, the kernel that computes GELU also adds the layer's bias.
    """
    layer = plain_layer(layer)
    parameters = parameters_of_plain(layer)
    if parameters is None:
        return geglu(layer(x))
    weight, bias = parameters
    return geglu(linear(x, weight), bias)


def _can_fuse(layer: nn.Module, x: Tensor) -> bool:
    return (
        type(layer) is nn.LayerNorm
        and layer.normalized_shape == x.shape[-1:]
        and is_unhooked(layer)
        and (x.numel() >= _TRAINING_ELEMENTS or not torch.is_grad_enabled())
    )


def norm(layer: Any, x: Tensor, quantizer: Tensor | None = None) -> Tensor:
    """Computes ``layer(x)`` for a LayerNorm ``layer`` and x (N, tokens, C), in the kernel if possible.

    ``quantizer``: an fp32 tensor with a scale (``kernels/common/e4m3.py``). If it is given, the kernel writes
    the result divided by this scale, in FP8 (E4M3).
    """
    if not _can_fuse(layer, x):
        return layer(x)
    return layer_norm(x, *parameters_of(layer), layer.eps, quantizer=quantizer)


def add_norm(
    layer: Any, x: Tensor, residual: Tensor, quantizer: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Computes (layer(x + residual), x + residual) for a LayerNorm ``layer``, in one kernel if possible.

    ``quantizer``: an fp32 tensor with a scale (``kernels/common/e4m3.py``). If it is given, the kernel writes
    the first result divided by this scale, in FP8 (E4M3).
    """
    # The kernel needs x and the residual in one dtype and shape. Dtypes may differ under autocast or after
    # attention in fp32. Then PyTorch computes the sum and the norm.
    if x.dtype == residual.dtype and x.shape == residual.shape and _can_fuse(layer, x):
        return add_layer_norm(x, residual, *parameters_of(layer), layer.eps, quantizer=quantizer)
    total = x + residual
    return layer(total), total


def is_plain_norm(layer: Any) -> bool:
    """True if ``layer`` is an ``nn.LayerNorm`` without hooks."""
    return type(layer) is nn.LayerNorm and is_unhooked(layer)


def grouped_norm(
    layer: Any, x: Tensor, groups: Groups, residual: Tensor | None = None, *, total_bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Computes the LayerNorm ``layer`` of u = x + residual + ``groups.added``.

    Returns (LayerNorm(u) + ``groups.position``, u + ``total_bias``). ``Groups`` says which rows get which
    vector of ``added`` and ``position``. ``is_plain_norm(layer)`` must be True.
    """
    weight, bias = parameters_of(layer)
    return grouped_layer_norm(x, weight, bias, layer.eps, groups, residual=residual, total_bias=total_bias)


def add_feed_forward(
    ff: Any,
    layers: list[Any] | None,
    layer: Any,
    x: Tensor,
    residual: Tensor | None,
    groups: Groups | None = None,
    readers: Sequence[Any] | None = None,
) -> Tensor:
    """Returns total + ff(layer(total)), where total is x + residual and ``layer`` is a LayerNorm.

    Args:
        ff: the feed-forward network.
        layers: the layers that ``ff`` calls one after the other; None if ``ff`` does anything else.
        layer: the norm before the network.
        x, residual: (N, tokens, C). residual may be None if there are ``groups``.
        groups: vectors that are also added to the total, or None. If they are given,
            ``is_plain_norm(layer)`` must be True.
        readers: the layers that read the result of ``layer``. If all of them cast it to autocast's dtype,
            ``layer`` writes this dtype (``rounding.py``). None if the readers are not known.
    """
    own_layers = layers
    if layers is not None:
        layers = [*layers[:-1], plain_layer(layers[-1])]
    if not _adds_in_product(layers, layer, x, residual):
        if groups is not None:
            h, total = grouped_norm(layer, x, groups, residual)
        else:
            h, total = rounded(add_norm, layer, x, residual, readers=readers)
        return ff(h) + total
    *others, last = layers
    weight, bias = parameters_of(last)
    products = _products_of(own_layers) if fp8.is_used() and groups is None else None
    if products is not None and residual is not None:
        return _add_in_e4m3(products, layers, layer, x, residual)
    # Only this function refers to the new tensor ``total``, so it can be overwritten below.
    if groups is not None:
        h, total = grouped_norm(layer, x, groups, residual, total_bias=bias)
    else:
        norm_of_sum = *parameters_of(layer), layer.eps
        h, total = add_layer_norm(x, residual, *norm_of_sum, total_bias=bias)  # type: ignore[arg-type]
    for module in others:
        h = dropped_out(module, h)
    # If a layer has a hook or was replaced, h may have another dtype or shape than usual. The sum in place
    # neither promotes dtypes nor broadcasts shapes, but PyTorch's sum does.
    if h.dtype != total.dtype or h.shape[:-1] != total.shape[:-1]:
        return linear(h, weight) + total
    add_linear_(total.view(-1, total.shape[-1]), h.reshape(-1, h.shape[-1]), weight)
    return total


def _products_of(layers: list[Any] | None) -> list[fp8_product.ProductCall | None] | None:
    """The FP8 (E4M3) matrix products of GEGLU's linear layer and of the last linear layer.

    A layer without an FP8 product has None instead. The result is None if neither layer has one. ``layers``:
    the layers that a feed-forward network calls one after the other.
    """
    weights = feed_forward_weights(layers)
    if weights is None:
        return None
    found = [fp8.product_of(owner, [weight]) for owner, weight in weights]
    return None if found == [None, None] else found


def feed_forward_weights(
    layers: list[Any] | None, *, without_adapters: bool = False
) -> list[tuple[Any, Tensor]] | None:
    """Returns (layer, weight) for each of the two linear layers in a feed-forward network with GEGLU.

    None if the network does more in inference than GEGLU and one linear layer, or if one of the two linear
    layers is not plain. For a layer with adapters, the layer inside of peft's wrapper is returned.

    ``without_adapters``: True returns the own weight of such a layer, False its merged weight.
    """
    # The import is not at the top of the file, because users of ComfyUI may not have diffusers. With ComfyUI
    # this function is not called.
    from diffusers.models.activations import GEGLU

    if layers is None or len(layers) < 2 or stock_class(layers[0]) is not GEGLU or not is_unhooked(layers[0]):
        return None
    first, *others, last = layers
    is_plain = all(map(drops_nothing, others))
    linears = [layer_of(first, "proj"), last]
    run = map(wrapped_layer if without_adapters else plain_layer, linears)
    parameters = [found for found in map(parameters_of_plain, run) if found is not None]
    if not is_plain or len(parameters) < len(linears):
        return None
    return [(wrapped_layer(own), weight) for own, (weight, _) in zip(linears, parameters, strict=True)]


def _add_in_e4m3(
    products: list[fp8_product.ProductCall | None],
    layers: list[Any],
    layer: Any,
    x: Tensor,
    residual: Tensor,
) -> Tensor:
    """Computes ``add_feed_forward`` with the matrix ``products`` of its linear layers in FP8 (E4M3).

    In its first calls a product runs in the model's dtype, to learn a scale for its input.
    """
    first, last = plain_layer(layer_of(layers[0], "proj")), layers[-1]
    (weight, bias), (last_weight, last_bias) = parameters_of(first), parameters_of(last)
    up, down = products
    norm_of_sum = *parameters_of(layer), layer.eps
    h, total = fp8_product.written(
        up, partial(add_layer_norm, x, residual, *norm_of_sum, total_bias=last_bias)
    )
    h = fp8_product.linear(up, h, weight)
    h = fp8_product.written(down, partial(geglu, h, bias))
    if down is not None:
        if h.dtype is E4M3:
            down.add_(total, h)
            return total
        down.learn(h, [last_weight])
    add_linear_(total.view(-1, total.shape[-1]), h.view(-1, h.shape[-1]), last_weight)
    return total


def _adds_in_product(
    layers: list[Any] | None, layer: Any, x: Tensor, residual: Tensor | None
) -> TypeGuard[list[Any]]:
    """True if the last of ``layers``, of a feed-forward, can add its product in place to x + residual.

    ``layers``: None if the feed-forward is not fused. ``layer``: the LayerNorm whose kernel writes the sum
    x + residual.
    """
    if layers is None:
        return False
    last = layers[-1]
    parameters = parameters_of_plain(last)
    if parameters is None or not _can_fuse(layer, x):
        return False
    weight, bias = parameters
    return (
        (residual is None or (residual.shape, residual.dtype) == (x.shape, x.dtype))
        and x.dtype is weight.dtype
        and last.out_features == x.shape[-1]
        and dispatch.is_plain_inference(x, (residual, *parameters_of(layer), weight, bias))
        and not dispatch.is_autocast(x)
    )
