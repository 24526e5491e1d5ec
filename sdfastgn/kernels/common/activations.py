"""The activations that follow a normalization, in plain PyTorch.

To add one, give it here a plain form (``ACTIVATIONS``) and the derivative of that (``ACTIVATION_GRADS``),
and in ``common/activation_kernels.py`` a branch in each of ``activate`` and ``activation_grad``. Checks,
error texts, ops and kernels take it from there.

Names are those of the public API. ``gelu`` is the exact (erf) form and ``gelu_tanh`` PyTorch's
``approximate="tanh"``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

# Neighbors in memory that one thread holds, at least, where pairs of them need no exchange.
PAIRED = 8

# --- in PyTorch -------------------------------------------------------------------------------------


def _identity(x: Tensor) -> Tensor:
    return x


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": _identity,
    "relu": F.relu,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": _gelu_tanh,
}


def _silu_grad(dy: Tensor, z: Tensor) -> Tensor:
    s = torch.sigmoid(z)  # aten::silu_backward has no derivative of its own
    return dy * s * (1 + z * (1 - s))


# (gradient of the output, pre-activation) -> gradient of the pre-activation. Each is differentiable
# once more.
ACTIVATION_GRADS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "identity": lambda dy, z: dy,
    "relu": lambda dy, z: torch.ops.aten.threshold_backward(dy, z, 0),
    "silu": _silu_grad,
    "gelu": lambda dy, z: torch.ops.aten.gelu_backward(dy, z),
    "gelu_tanh": lambda dy, z: torch.ops.aten.gelu_backward(dy, z, approximate="tanh"),
}
