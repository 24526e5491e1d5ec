"""Computes the middle of a residual block: its first convolution, time embedding, norm and activation.

The bias of the convolution has one number for each channel. The projected time embedding has one number for
each sample and channel. One small kernel (``act_linear``) computes their sum: it applies the activation to
the embedding, projects it, and adds the bias. The kernel of the norm then adds this sum while it reads its
input, which saves two passes over the tensor. The fusions for diffusers and for ComfyUI both use this file.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sdfastgn.patches.layers.convolution import is_plain_conv
from sdfastgn.patches.layers.group_norm import fused_activation, fused_norm, norm_act
from sdfastgn.patches.layers.linear import fused_linear, linear_of
from sdfastgn.patches.lora.merging import plain_layer
from sdfastgn.patches.swap.fusion import parameters_of


class Embedding(NamedTuple):
    """A time embedding, and how a residual block of C channels uses it.

    Attributes:
        value: (N, K); None if there is no embedding.
        linear: the layer that projects ``value`` to (N, C), or to (N, 2C) if ``scales`` is True. None if
            ``value`` is used as it is.
        act: the activation that is applied before the projection; None if there is none.
        scales: False if the projected embedding is added before the norm. True if its first half, plus one,
            multiplies the norm's result, and its second half is added to the product.
    """

    value: Tensor | None = None
    linear: Any = None
    act: nn.Module | None = None
    scales: bool = False


NO_EMBEDDING = Embedding()


def conv_norm_act(
    h: Tensor,
    conv: Any,
    norm: Any,
    act: nn.Module,
    C: int,
    embedding: Embedding = NO_EMBEDDING,
    reader: Any = None,
) -> Tensor:
    """Computes ``act(norm(conv(h) + embedding))``, or ``act(norm(conv(h)) * (1 + scale) + shift)``.

    The second form is for an ``embedding`` whose ``scales`` is True: scale and shift are the halves of the
    projected embedding. Without an embedding the result is ``act(norm(conv(h)))``.

    Args:
        h: (N, C_in, *spatial).
        conv: the block's first convolution.
        norm: the norm after it.
        act: the activation after the norm.
        C: number of output channels of ``conv``.
        embedding: the time embedding.
        reader: the only layer that reads the result; None if other code may read the result. If this layer
            would cast the result to autocast's dtype, the norm may write this dtype (``rounding.py``).
    """
    N, scales = h.shape[0], embedding.scales
    conv = plain_layer(conv)
    name = fused_activation(norm, act)
    # cuDNN adds the bias of a convolution in a separate pass. The norm's kernel adds it at no cost.
    can_move = name is not None and is_plain_conv(conv)
    weight, bias = parameters_of(conv) if can_move else (None, None)
    temb, has_bias = _project(embedding, h, bias)
    fits = temb is None or (
        embedding.linear is not None  # an embedding that is not projected may have any shape: PyTorch adds it
        and temb.dtype == h.dtype
        and tuple(temb.shape) == (N, 2 * C if scales else C)
    )
    if not fits or name is None:
        return _unfused(conv(h), norm, act, embedding, temb)
    operands: dict[str, Tensor | None] = {}
    if scales and temb is not None:
        operands["ada_scale"], operands["ada_shift"] = torch.chunk(temb, 2, dim=1)
    else:
        operands["shift"] = temb
    if bias is None:
        h = conv(h)
    else:
        h = conv._conv_forward(h, weight, None)
        if not has_bias:
            shift = operands.get("shift")
            operands["shift"] = bias if shift is None else shift + bias
    return fused_norm(norm, h, name, reader, operands)


def _project(embedding: Embedding, h: Tensor, bias: Tensor | None) -> tuple[Tensor | None, bool]:
    """Returns (projected time embedding, True if ``bias`` was added to it).

    ``bias``: the bias of the convolution, or None. It is added if one kernel can project the embedding and
    add the bias. For this, the embedding must have the dtype and batch size of ``h``, the input of the
    convolution.
    """
    temb, linear, act, scales = embedding
    if linear is None:
        return temb, False
    if (
        bias is not None
        and temb is not None
        and not scales
        and (temb.dtype, temb.shape[0]) == (h.dtype, h.shape[0])
    ):
        shift = fused_linear(linear, act, temb, bias)
        if shift is not None:
            return shift, True
    return linear_of(linear, act, temb), False


def _unfused(h: Tensor, norm: Any, act: nn.Module, embedding: Embedding, temb: Tensor | None) -> Tensor:
    if temb is not None and embedding.linear is not None:
        temb = temb[:, :, None, None]
    if embedding.scales and temb is not None:
        ada_scale, ada_shift = torch.chunk(temb, 2, dim=1)
        return act(norm(h) * (1 + ada_scale) + ada_shift)
    return norm_act(norm, act, h if temb is None else h + temb)
