"""Gradients of ``channel_norm`` in plain PyTorch: the reference of ``sdfastgn::channel_norm_backward``.

With z as in ``channel_norm/op.py``, n = max(||x||, eps), xhat = x / n, dz the gradient of z and
g = dz * weight * scale, where sum_C is a sum over channels, and sum_rows a sum over all positions of all
samples:

    dx = (g - xhat * sum_C(g * xhat)) / n        or g / n if ||x|| < eps
    dweight = sum_rows dz * xhat * scale         dbias = sum_rows dz

On a GPU the kernels of ``channel_norm/backward_kernels.py`` run. They compute ||x|| from x again, because the
forward does not save it. Everywhere else, if the channels of a position do not fit into registers, and for
second derivatives, ``reference_channel_norm_grads`` runs.

Source: the chain rule.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sdfastgn.kernels.common.activations import ACTIVATION_GRADS
from sdfastgn.kernels.common.declaration import Gradients
from sdfastgn.kernels.common.layout import laid_out


def scaled(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, scale: float, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes ||x||, xhat = x / max(||x||, eps) and z = xhat * scale * weight + bias for each position.

    ||x|| is the Euclidean norm of the channels of a position, of shape (N, 1, *spatial). xhat and z have the
    shape of x, (N, C, *spatial). All three are fp32, or fp64 for fp64 input.
    """
    u = x.to(torch.promote_types(x.dtype, torch.float32))
    norm = torch.linalg.vector_norm(u, dim=1, keepdim=True)
    xhat = u / norm.clamp_min(eps)
    z = xhat * scale
    z = z if weight is None else z * _per_channel(weight, u)
    return norm, xhat, z if bias is None else z + _per_channel(bias, u)


def _per_channel(t: Tensor, u: Tensor) -> Tensor:
    return t.to(u.dtype).reshape(-1, *[1] * (u.dim() - 2))


def reference_channel_norm_grads(call: Any) -> Gradients:
    """Computes the gradients in plain PyTorch, in fp32, or in fp64 for fp64 input.

    Args:
        call: its fields are dy (N, C, *spatial), the arguments of ``ChannelNormCall``, and which gradients
            are wanted (``dx``, ``dweight`` and ``dbias``).

    Every step is a differentiable op, so second derivatives are right too. The gradient of x is
    channels-last.
    """
    x, weight = call.x, call.weight
    norm, xhat, z = scaled(x, weight, call.bias, call.scale, call.eps)
    dz = ACTIVATION_GRADS[call.activation](call.dy.to(z.dtype), z)
    g = dz * call.scale
    g = g if weight is None else g * _per_channel(weight, z)
    along = torch.where(norm < call.eps, 0.0, (g * xhat).sum(1, keepdim=True))
    dx = (g - xhat * along) / norm.clamp_min(call.eps)

    def summed(t: Tensor, like: Tensor | None) -> Tensor | None:
        return None if like is None else t.sum([0, *range(2, t.dim())]).to(like.dtype)

    return {
        "x": laid_out(dx.to(x.dtype), channels_last=True) if call.dx else None,
        "weight": summed(dz * xhat * call.scale, weight) if call.dweight else None,
        "bias": summed(dz, call.bias) if call.dbias else None,
    }
