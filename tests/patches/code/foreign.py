"""Code as another package would put it into PyTorch's or diffusers' place."""

import contextlib
import types

from diffusers.models import attention, attention_processor, resnet
from torch import nn
from torch.nn import functional as F

# Code that SD1.5's UNet runs: (class or Python module, name of the function in it).
OF_UNETS = [
    (F, "scaled_dot_product_attention"),
    (attention_processor.AttnProcessor2_0, "__call__"),
    (attention_processor.Attention, "forward"),
    (attention.BasicTransformerBlock, "forward"),
    (resnet.ResnetBlock2D, "forward"),
    (nn.Linear, "forward"),
    (nn.Conv2d, "forward"),
    (nn.Conv2d, "_conv_forward"),
    (nn.GroupNorm, "forward"),
    (nn.LayerNorm, "forward"),
    (F, "group_norm"),
    (F, "interpolate"),
]


def of_package(function, name="sageattention.core"):
    """``function`` as if it were written in the Python module ``name``."""
    namespace = {**function.__globals__, "__name__": name}
    made = types.FunctionType(function.__code__, namespace, function.__name__, None, function.__closure__)
    made.__qualname__ = function.__name__
    return made


def halved(stock):
    """``stock`` with another result."""

    def replacement(*args, **kwargs):
        return stock(*args, **kwargs) * 0.5

    return of_package(replacement)


@contextlib.contextmanager
def replaced(holder, name, new=halved):
    """A context in which ``new(stock)`` stands in the place of the function ``name`` of ``holder``."""
    stock = vars(holder)[name]
    setattr(holder, name, new(stock))
    try:
        yield
    finally:
        setattr(holder, name, stock)


_SAGE = halved(F.scaled_dot_product_attention)


def sage():
    """A context in which another attention is on, always the same function, as with SageAttention."""
    return replaced(F, "scaled_dot_product_attention", lambda stock: _SAGE)
