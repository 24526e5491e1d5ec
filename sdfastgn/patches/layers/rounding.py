"""Lets norms under autocast write half precision, where the next layers would cast the result anyway.

Under autocast PyTorch's norms return fp32. Each linear layer or convolution that reads such a result casts it
to half precision first. If all readers are such layers, and the norm's input and parameters have half
precision, the norm writes half precision itself. The layers get the same bits, because the result is computed
in fp32 and rounded once in both cases. This saves the pass over the tensor that casts it, and in the backward
the pass that casts its gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from sdfastgn.kernels.common import dispatch
from sdfastgn.patches.layers.convolution import is_plain_conv
from sdfastgn.patches.layers.linear import is_plain_linear
from sdfastgn.patches.lora.wrappers import is_wrapper
from sdfastgn.patches.swap.fusion import is_unhooked, parameters_of

T = TypeVar("T")


def rounded(call: Callable[..., T], norm: Any, x: Tensor, *args: Any, readers: Sequence[Any] | None) -> T:
    """Computes ``call(norm, x, *args)``. Under autocast, the result may have the dtype of x instead of fp32.

    It has the dtype of x if all ``readers`` would cast the result to this dtype.

    Args:
        call: a function that runs ``norm`` and elementwise operations, but no other layer.
        norm: the norm of x, or of a sum with x.
        x: the input.
        readers: the layers that read the result. None if other code may read the result.
    """
    if readers is None or not dispatch.is_autocast(x) or not _is_cast(norm, x, readers):
        return call(norm, x, *args)
    kind = x.device.type
    torch.set_autocast_enabled(kind, False)
    try:
        return call(norm, x, *args)
    finally:
        torch.set_autocast_enabled(kind, True)


def _is_cast(norm: Any, x: Tensor, readers: Sequence[Any]) -> bool:
    """True if x and the parameters of ``norm`` have autocast's dtype, and all ``readers`` cast to it.

    ``norm`` must be a LayerNorm or a fused GroupNorm, without hooks.
    """
    kind = type(norm)
    if torch.compiler.is_compiling() or not (
        kind is nn.LayerNorm or getattr(kind, "norm_alone", None) is kind
    ):
        return False
    dtype = torch.get_autocast_dtype(x.device.type)
    same = all(t is None or t.dtype == dtype for t in (x, *parameters_of(norm)))
    return same and is_unhooked(norm) and all(map(_casts, readers))


def _casts(layer: Any) -> bool:
    return is_plain_linear(layer) or is_plain_conv(layer) or (is_wrapper(layer) and is_unhooked(layer))
