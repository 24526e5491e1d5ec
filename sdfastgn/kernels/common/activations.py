"""The activations that can be fused with a norm or with ``act_linear``, in plain PyTorch.

To add an activation, add its function to ``ACTIVATIONS`` and its derivative to ``ACTIVATION_GRADS``, and
in ``common/activation_kernels.py`` a branch to ``activate`` and one to ``activation_grad``. Checks, ops and
kernels then accept its name, and error texts list the name.

The keys of both dictionaries are the names in the public API. ``gelu`` is the exact (erf) form, ``gelu_tanh``
is PyTorch's ``approximate="tanh"``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

aten = torch.ops.aten

# Minimum number of contiguous elements of a tile for which two neighboring elements share a reciprocal (the
# constant ``PAIRS`` of kernels, see ``activation_kernels.py``). With fewer elements, two neighbors can be in
# different threads, and these threads would have to exchange values.
PAIRED = 8


def _identity(x: Tensor) -> Tensor:
    return x


def _gelu_tanh(x: Tensor) -> Tensor:
    return aten.gelu.default(x, approximate="tanh")


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": _identity,
    "relu": aten.relu.default,
    "silu": aten.silu.default,
    "gelu": aten.gelu.default,
    "gelu_tanh": _gelu_tanh,
    "mish": aten.mish.default,
}


def _silu_grad(dy: Tensor, z: Tensor) -> Tensor:
    # aten::silu_backward is not used here, because it cannot be differentiated again.
    s = torch.sigmoid(z)
    return dy * s * (1 + z * (1 - s))


def _mish_grad(dy: Tensor, z: Tensor) -> Tensor:
    # aten::mish_backward is not used here, because it cannot be differentiated again.
    t = torch.tanh(aten.softplus.default(z))
    return dy * (t + z * torch.sigmoid(z) * (1 - t * t))


# Maps the name of an activation to a function (dy, z) -> dz, where dy is the gradient of activation(z) and dz
# is the gradient of z. Autograd can differentiate each of these functions again.
ACTIVATION_GRADS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "identity": lambda dy, z: dy,
    "relu": lambda dy, z: aten.threshold_backward(dy, z, 0),
    "silu": _silu_grad,
    "gelu": lambda dy, z: aten.gelu_backward(dy, z),
    "gelu_tanh": lambda dy, z: aten.gelu_backward(dy, z, approximate="tanh"),
    "mish": _mish_grad,
}
