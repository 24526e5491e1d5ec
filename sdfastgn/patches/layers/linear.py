"""Makes calls of linear layers faster, in two ways.

While a CUDA graph is captured, ``call_linear`` uses the fastest algorithm for the layer's matrix product.
For an input with few rows, ``fused_linear`` computes the activation that precedes the layer, the matrix
product and the bias in one kernel. Both need a plain ``nn.Linear``, and a call on a GPU without gradients.
Every other layer is simply called.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from sdfastgn.kernels.act_linear.config import has_few_rows
from sdfastgn.kernels.act_linear.op import act_linear
from sdfastgn.kernels.common import dispatch
from sdfastgn.kernels.product.op import linear as product
from sdfastgn.patches.lora.merging import plain_layer
from sdfastgn.patches.swap.fusion import activation_of, is_unhooked, parameters_of


def is_plain_linear(module: nn.Module) -> bool:
    """True if calling ``module`` runs one matrix product, adds its bias and does nothing else.

    False for layers with LoRA, hooks, quantized weights or sharded weights.
    """
    return parameters_of_plain(module) is not None


def parameters_of_plain(module: nn.Module) -> tuple[Tensor, Tensor | None] | None:
    """Returns (weight, bias) of ``module`` if ``is_plain_linear(module)`` is True, else None."""
    if type(module) is not nn.Linear or not is_unhooked(module):
        return None
    found = parameters_of(module)
    return found if type(found[0]) in (Tensor, nn.Parameter) else None


def call_linear(layer: Any, x: Tensor, name: str | None = None) -> Tensor:
    """Computes ``layer(x)``. In a CUDA graph the product runs with the fastest algorithm for its shape.

    If the layer is a plain ``nn.Linear``, the product is computed directly. This takes half the CPU time of a
    call of the layer.

    ``name``: the keyword by which diffusers passes x to the layer; None if it passes x by position.
    """
    layer = plain_layer(layer)
    parameters = None if torch.compiler.is_dynamo_compiling() else parameters_of_plain(layer)
    if parameters is not None:
        return product(x, *parameters)
    return layer(x) if name is None else layer(**{name: x})


def linear_of(linear: Any, act: Any, x: Any) -> Tensor:
    """Computes ``linear(act(x))``, or ``linear(x)`` if act is None, in one kernel if possible."""
    linear = plain_layer(linear)
    y = fused_linear(linear, act, x)
    if y is None:
        y = linear(x if act is None else act(x))
    return y


def fused_linear(linear: Any, act: Any, x: Any, extra_bias: Tensor | None = None) -> Tensor | None:
    """Computes ``linear(act(x)) + extra_bias`` in one kernel, for x (N, K) and extra_bias (C,).

    Returns None if the kernel cannot compute this: for example if gradients are needed, if x has many rows,
    or if ``linear`` or ``act`` is not a plain layer.
    """
    is_dynamo = torch.compiler.is_dynamo_compiling()
    if is_dynamo or type(x) is not Tensor or x.dim() != 2 or not has_few_rows(x.shape[0]):
        return None
    linear = plain_layer(linear)
    name = "identity" if act is None else activation_of(act)
    parameters = parameters_of_plain(linear)
    if name is None or not (act is None or is_unhooked(act)) or parameters is None:
        return None
    weight, bias = parameters
    if not dispatch.is_plain_inference(x, (weight, bias, extra_bias)) or dispatch.is_autocast(x):
        return None
    C, K = weight.shape
    kind = x.dtype, x.device
    misfits = [
        b for b in (bias, extra_bias) if b is not None and (b.shape, b.dtype, b.device) != ((C,), *kind)
    ]
    fits = (
        x.shape[1] == K and weight.is_contiguous() and (weight.dtype, weight.device) == kind and not misfits
    )
    return act_linear(x, weight, bias, name, extra_bias=extra_bias, is_plain=True) if fits else None
