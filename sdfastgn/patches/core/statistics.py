"""Statistics that a tensor's producer had in registers, for the next GroupNorm; and these producers.

A block's last sum writes the tensor that the next block normalizes. Where that pays, the sum's kernel
computes the statistics too (``statistics/op.py``) and ``store_statistics`` keeps them under the tensor;
the norm that gets the same tensor takes them out. Producer and norm do not know each other: whatever
happens in between, the norm finds valid statistics or none.

They are kept beside the tensor, because attributes of a tensor go into pickles, ``torch.save`` and
deepcopies. They go with the tensor, or when they are taken. They are valid as long as the tensor is the
same object at the same address with the same version, which every write counts up, through views too.
Writes through ``x.data`` are not counted; diffusers makes none to what flows between its blocks.
Inference tensors have no version, so nothing is stored for them. Within a capture only statistics that
were stored in it are taken: a replay would read those of the captured call's tensor.
"""

from __future__ import annotations

import functools
import math
import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sdfastgn.kernels.common import dispatch, gpu
from sdfastgn.kernels.common.layout import is_channels_last, is_dense
from sdfastgn.kernels.statistics.config import statistics_pay
from sdfastgn.kernels.statistics.op import add_kernel, cat_kernel

__all__ = ["add", "add_bias", "cat", "emits", "store_statistics", "take_statistics"]


class _Key(weakref.ref[Tensor]):
    """Reference to a tensor that knows its id when the tensor is gone."""

    __slots__ = ("id",)
    id: int


class _Entry(NamedTuple):
    key: _Key
    state: tuple[Any, ...]  # of the tensor; must not have changed
    statistics: Tensor


# By the id of a tensor. torch's WeakTensorKeyDictionary takes 20 times as long.
_stored: dict[int, _Entry] = {}


def _forget(key: _Key) -> None:
    entry = _stored.get(key.id)
    if entry is not None and entry.key is key:
        del _stored[key.id]


def _state_of(x: Tensor) -> tuple[Any, ...]:
    """Changes when ``x`` is written to, or when its kernels are no longer ordered after the earlier ones."""
    capturing = x.is_cuda and torch.cuda.is_current_stream_capturing()
    return x._version, x.data_ptr(), x.shape, gpu.current_stream(x.device), capturing


def store_statistics(x: Tensor, statistics: Tensor) -> Tensor:
    """Keep the ``statistics`` of ``x``, (2, N, P, C) fp32, and return ``x``. Only where ``emits`` is true."""
    key = _Key(x, _forget)
    key.id = id(x)
    _stored[key.id] = _Entry(key, _state_of(x), statistics)
    return x


def take_statistics(x: Tensor) -> Tensor | None:
    """The statistics of ``x`` if they were stored and are still valid, else None. A second call gets None."""
    if torch.compiler.is_compiling() or id(x) not in _stored:
        return None
    entry = _stored.pop(id(x), None)
    if entry is None or entry.key() is not x or x.requires_grad or not dispatch.is_plain(x, ()):
        return None
    return entry.statistics if entry.state == _state_of(x) else None


def emits(C: int, HW: int) -> bool:
    """True if the producer of a tensor of C channels and HW positions should store its statistics."""
    return statistics_pay(C, HW) and not torch.is_inference_mode_enabled()


def add(x: Tensor, residual: Tensor, bias: Tensor | None = None, divisor: float = 1.0) -> Tensor:
    """(x + residual + bias) / divisor, in plain inference on a GPU in one kernel that stores the statistics.

    Args:
        x, residual: (N, C, *spatial).
        bias: (C,) or None: of the convolution that made x, which left it to this sum.
    """
    if dispatch.is_plain_inference(x, (residual, bias)) and _fits(x, bias) and _is_alike(x, residual):
        try:
            y, statistics = add_kernel(
                x, residual, bias, float(1 / divisor), emits=emits(x.shape[1], math.prod(x.shape[2:]))
            )
        except dispatch.KernelError:
            return add(x, residual, bias, divisor)
        return y if statistics is None else store_statistics(y, statistics)
    total = _with_bias(x, bias) + residual
    return total if divisor == 1 else total / divisor


def add_bias(x: Tensor, bias: Tensor | None) -> Tensor:
    """x + bias for (N, C, *spatial) and (C,) or None. May write to x, a convolution's result.

    In plain inference on a GPU in a kernel that hands the statistics over.
    """
    if bias is None or not (dispatch.is_plain_inference(x, (bias,)) and _fits(x, bias) and is_dense(x)):
        return _with_bias(x, bias)
    try:
        y, statistics = add_kernel(x, None, bias, 1.0, emits=emits(x.shape[1], math.prod(x.shape[2:])), out=x)
    except dispatch.KernelError:
        return add_bias(x, bias)
    return y if statistics is None else store_statistics(y, statistics)


def _with_bias(x: Tensor, bias: Tensor | None) -> Tensor:
    return x if bias is None else x + bias.to(x.dtype).view(-1, *[1] * (x.dim() - 2))


def _fits(x: Tensor, bias: Tensor | None) -> bool:
    return x.numel() > 0 and (bias is None or (bias.device == x.device and bias.shape == x.shape[1:2]))


def _is_alike(x: Tensor, y: Tensor) -> bool:
    return x.dtype == y.dtype and x.device == y.device and x.shape == y.shape and x.stride() == y.stride()


def cat(a: Tensor, b: Tensor) -> Tensor:
    """torch.cat((a, b), dim=1) of (N, C, *spatial).

    If they are channels-last, in plain inference on a GPU in a kernel that hands the statistics
    over.
    """
    if not (dispatch.is_plain_inference(a, (b,)) and _join(a, b)):
        return torch.cat((a, b), dim=1)
    try:
        y, statistics = cat_kernel(a, b, emits=emits(a.shape[1] + b.shape[1], math.prod(a.shape[2:])))
    except dispatch.KernelError:
        return cat(a, b)
    return y if statistics is None else store_statistics(y, statistics)


def _join(a: Tensor, b: Tensor) -> bool:
    same = (a.dtype, a.device, a.shape[0], a.shape[2:]) == (b.dtype, b.device, b.shape[0], b.shape[2:])
    return same and _are_channels_last(a.shape, a.stride(), b.shape, b.stride())


@functools.lru_cache(maxsize=1024)
def _are_channels_last(
    a: tuple[int, ...], a_stride: tuple[int, ...], b: tuple[int, ...], b_stride: tuple[int, ...]
) -> bool:
    """True for two channels-last tensors that are not empty. Cached: it takes as long as a launch."""
    tensors = [torch.empty_strided(*layout, device="meta") for layout in ((a, a_stride), (b, b_stride))]
    return all(is_channels_last(t) and t.numel() > 0 for t in tensors)
