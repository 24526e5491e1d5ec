"""Folds a BatchNorm with running averages into the convolution before it: ``fold_batch_norm``.

    factor = scale / sqrt(var + eps)
    folded weight = weight * factor, folded bias = (bias - mean) * factor + offset

On a GPU the kernel of ``fold_kernels.py`` runs, if the weight is contiguous or channels-last and the other
tensors are contiguous, in fp16, bf16 or fp32. Otherwise, or if the kernel cannot be compiled,
``reference_fold`` runs.

Numerics: all arithmetic is fp64. The kernel rounds to fp32 before it rounds to half precision.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sdfastgn.kernels.common import dispatch
from sdfastgn.kernels.common.launch import Launch

# Number of weights that a program of the kernel folds at once.
_BLOCK = 1024
_WARPS = 4


class Folded(NamedTuple):
    """The tensors of a convolution and of the norm after it. All are on one device.

    Attributes:
        weight, bias: parameters of the convolution.
        scale, offset: weight and bias of the norm.
        mean, var: running averages of the norm.
    """

    weight: Tensor
    bias: Tensor | None
    scale: Tensor | None
    offset: Tensor | None
    mean: Tensor
    var: Tensor


@torch.no_grad()
def fold_batch_norm(parts: Folded, eps: float) -> tuple[Tensor, Tensor]:
    """Returns weight and bias of a convolution that computes the given convolution and the norm after it.

    Both have the dtype of the given weight. Grad: none.
    """
    weight, vectors = parts.weight, parts[1:]
    if not (
        dispatch.runs_in_triton(weight)
        and (weight.is_contiguous() or weight.is_contiguous(memory_format=torch.channels_last))
        and all(t is None or (t.dtype in dispatch.KERNEL_DTYPES and t.is_contiguous()) for t in vectors)
    ):
        return reference_fold(parts, eps)
    try:
        return _launched(weight, parts, eps)
    except dispatch.KernelError:
        return reference_fold(parts, eps)


def reference_fold(parts: Folded, eps: float) -> tuple[Tensor, Tensor]:
    """Computes ``fold_batch_norm`` in plain PyTorch."""
    weight, bias, scale, offset, mean, var = parts
    factor = torch.rsqrt(var.double() + eps)
    factor = factor if scale is None else factor * scale.double()
    shift = -mean.double() if bias is None else bias.double() - mean.double()
    shift = shift * factor if offset is None else shift * factor + offset.double()
    folded = weight.double() * factor.view(-1, *(1,) * (weight.dim() - 1))
    return folded.to(weight.dtype), shift.to(weight.dtype)


@dispatch.kernels_of("fold_batch_norm")
def _launched(weight: Tensor, parts: Folded, eps: float) -> tuple[Tensor, Tensor]:
    """Computes ``fold_batch_norm`` by the Triton kernel."""
    folded, shift = torch.empty_like(weight), weight.new_empty(len(weight))
    kinds = tuple(None if t is None else t.dtype for t in parts)
    _launch(kinds, weight.shape, weight.device, eps).run(*parts, folded, shift)
    return folded, shift


@functools.lru_cache(maxsize=1024)
def _launch(kinds: tuple[Any, ...], shape: torch.Size, device: torch.device, eps: float) -> Launch:
    """Prepares the launch of the kernel, once for each combination of dtypes, shape, device and ``eps``.

    ``kinds``: the dtypes of the tensors in ``Folded``, or None for missing tensors.
    """
    from sdfastgn.kernels.batch_norm.fold_kernels import fold_kernel

    return Launch(fold_kernel, shape[0], _WARPS, columns=shape[1:].numel(), eps=eps, BLOCK=_BLOCK)
