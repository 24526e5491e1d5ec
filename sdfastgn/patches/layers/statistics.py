"""Hands the statistics of a tensor from the kernel that writes it to the GroupNorm that reads it.

*Statistics* are the mean and the sum of squared deviations of each channel (``kernels/statistics/op.py``).
The last operation of a block is a sum, and the next block normalizes the sum. Where it saves time, the kernel
that computes the sum also computes the statistics of its result, and ``store_statistics`` stores them. The
GroupNorm that reads the result gets them with ``take_statistics``. Other code may run between the two blocks
and change the tensor; then the norm finds no valid statistics and computes them itself.

Statistics are kept in a table in this file. If they were an attribute of the tensor, deepcopies, pickles and
``torch.save`` would include them. An entry of the table is dropped when it is taken or when its tensor is
freed. An entry is valid while its tensor is the same object with the same address and version counter.
PyTorch increases the version at every write into the tensor or into a view of it. It does not count writes
through ``x.data``, but diffusers never writes to the tensors between blocks in this way. Inference tensors
have no version, so nothing is stored for them. Statistics that were stored before the capture of a CUDA graph
are not valid during the capture, because every replay would read these old statistics.
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


class _Key(weakref.ref[Tensor]):
    """Weak reference to a tensor. It still has the tensor's ``id`` after the tensor was freed."""

    __slots__ = ("id",)
    id: int


class _Entry(NamedTuple):
    key: _Key
    # The state of the tensor (``_state_of``) when its statistics were stored.
    state: tuple[Any, ...]
    statistics: Tensor


# Id of a tensor -> its stored statistics. A lookup in PyTorch's WeakTensorKeyDictionary would take 20 times
# as long.
_stored: dict[int, _Entry] = {}


def _forget(key: _Key) -> None:
    entry = _stored.get(key.id)
    if entry is not None and entry.key is key:
        del _stored[key.id]


def _state_of(x: Tensor) -> tuple[Any, ...]:
    """The state of ``x``. If it has changed since statistics of ``x`` were stored, they are invalid.

    The state changes when ``x`` is written to or gets other memory, when another stream becomes the current
    one, and when a capture begins or ends.
    """
    capturing = x.is_cuda and torch.cuda.is_current_stream_capturing()
    return x._version, x.data_ptr(), x.shape, gpu.current_stream(x), capturing


def store_statistics(x: Tensor, statistics: Tensor) -> Tensor:
    """Keep ``statistics`` of ``x`` for the norm that reads ``x``, and return ``x``.

    Statistics are the mean and the sum of squared deviations of each channel.

    Call this function only if ``emits`` is True for the numbers of channels and positions of ``x``.

    ``statistics``: (2, N, P, C) fp32, where P is the number of parts into which the positions are split.
    """
    key = _Key(x, _forget)
    key.id = id(x)
    _stored[key.id] = _Entry(key, _state_of(x), statistics)
    return x


def take_statistics(x: Tensor) -> Tensor | None:
    """Returns the statistics of x that ``store_statistics`` has stored, and forgets them.

    None if they are missing or outdated.
    """
    if torch.compiler.is_dynamo_compiling() or id(x) not in _stored:
        return None
    entry = _stored.pop(id(x), None)
    if entry is None or entry.key() is not x or x.requires_grad or not dispatch.is_plain(x, ()):
        return None
    return entry.statistics if entry.state == _state_of(x) else None


def emits(C: int, HW: int) -> bool:
    """True if code that writes a tensor of C channels and HW positions saves time by storing its statistics.

    False in inference mode: its tensors have no version counter, which would show that statistics are
    outdated.
    """
    return statistics_pay(C, HW) and not torch.is_inference_mode_enabled()


def add(x: Tensor, residual: Tensor, bias: Tensor | None = None, divisor: float = 1.0) -> Tensor:
    """Returns (x + residual + bias) / divisor.

    On a GPU, without gradients, one kernel computes the sum. If storing statistics saves time (``emits`` in
    this file), it also computes the statistics, which are kept for the GroupNorm that reads the sum.

    Args:
        x, residual: (N, C, *spatial).
        bias: (C,), the bias of the convolution that computed x. None if the convolution has added it.
        divisor: number by which the sum is divided.
    """
    if dispatch.is_plain_inference(x, (residual, bias)) and _fits(x, bias) and _is_alike(x, residual):
        try:
            y, statistics = add_kernel(
                x, residual, bias, float(1 / divisor), emits=emits(x.shape[1], math.prod(x.shape[2:]))
            )
            return y if statistics is None else store_statistics(y, statistics)
        except dispatch.KernelError:
            pass
    total = _with_bias(x, bias) + residual
    return total if divisor == 1 else total / divisor


def blend(
    x: Tensor, residual: Tensor, bias: Tensor | None, factors: Tensor, *, is_normalized: bool = True
) -> Tensor:
    """Returns factors[0] * residual + factors[1] * (x + bias). Each sample has its own two factors.

    On a GPU, without gradients, one kernel computes the result. If storing statistics saves time (``emits``
    in this file), it also computes the statistics, which are kept for the GroupNorm that reads the result.

    Args:
        x, residual: (N, C, *spatial).
        bias: (C,), the bias of the convolution that computed x. None if the convolution has added it.
        factors: (2, N) fp32, contiguous.
        is_normalized: False if no norm reads the result, so that no statistics are needed.
    """
    is_plain = dispatch.is_plain_inference(x, (residual, bias, factors))
    if is_plain and _fits(x, bias) and _is_alike(x, residual) and is_dense(x):
        try:
            counts = is_normalized and emits(x.shape[1], math.prod(x.shape[2:]))
            y, statistics = add_kernel(x, residual, bias, 1.0, factors=factors, emits=counts)
            return y if statistics is None else store_statistics(y, statistics)
        except dispatch.KernelError:
            pass
    kept, scale = factors.view(2, -1, *[1] * (x.dim() - 1)).to(torch.promote_types(x.dtype, torch.float32))
    return (kept * residual + scale * _with_bias(x, bias)).to(x.dtype)


def as_video(x: Tensor, frames: int) -> Tensor:
    """Returns x (N * frames, C, H, W) as a view (N, C, frames, H, W). The view is channels-last if x is.

    If statistics of x are stored for the norm that reads x, they are stored for the view instead.
    """
    statistics = take_statistics(x)
    video = x.unflatten(0, (-1, frames)).transpose(1, 2)
    if statistics is None:
        return video
    # ``statistics`` has values for each chunk of positions of each image. The chunks of all frames are the
    # chunks of the video, which must all have the same size. So if the chunks do not divide an image evenly,
    # no statistics are stored for the video.
    _, N, chunks, C = statistics.shape
    if math.prod(x.shape[2:]) % chunks:
        return video
    return store_statistics(video, statistics.view(2, N // frames, frames * chunks, C))


def add_bias(x: Tensor, bias: Tensor | None) -> Tensor:
    """Returns x + bias, where x (N, C, *spatial) is a convolution's result and bias is (C,), (N, C) or None.

    The sum may be written over x. On a GPU, without gradients, one kernel computes the sum. If storing
    statistics saves time (``emits`` in this file), it also computes the statistics, which are kept for the
    GroupNorm that reads the sum.
    """
    if bias is None or not (dispatch.is_plain_inference(x, (bias,)) and _fits(x, bias) and is_dense(x)):
        return _with_bias(x, bias)
    try:
        y, statistics = add_kernel(x, None, bias, 1.0, emits=emits(x.shape[1], math.prod(x.shape[2:])), out=x)
    except dispatch.KernelError:
        return _with_bias(x, bias)
    return y if statistics is None else store_statistics(y, statistics)


def _with_bias(x: Tensor, bias: Tensor | None) -> Tensor:
    return x if bias is None else x + bias.to(x.dtype).view(*bias.shape, *[1] * (x.dim() - 2))


def _fits(x: Tensor, bias: Tensor | None) -> bool:
    fits = bias is None or (bias.device == x.device and bias.shape in (x.shape[1:2], x.shape[:2]))
    return x.numel() > 0 and fits


def _is_alike(x: Tensor, y: Tensor) -> bool:
    return x.dtype == y.dtype and x.device == y.device and x.shape == y.shape and x.stride() == y.stride()


def cat(a: Tensor, b: Tensor) -> Tensor:
    """Returns ``torch.cat((a, b), dim=1)`` for tensors (N, C, *spatial).

    For channels-last tensors on a GPU, without gradients, one kernel copies a and b. If storing statistics
    saves time (``emits`` in this file), it also computes the statistics, which are kept for the GroupNorm
    that reads the result.
    """
    if not (dispatch.is_plain_inference(a, (b,)) and _join(a, b)):
        return torch.cat((a, b), dim=1)
    try:
        y, statistics = cat_kernel(a, b, emits=emits(a.shape[1] + b.shape[1], math.prod(a.shape[2:])))
    except dispatch.KernelError:
        return torch.cat((a, b), dim=1)
    return y if statistics is None else store_statistics(y, statistics)


def _join(a: Tensor, b: Tensor) -> bool:
    same = (a.dtype, a.device, a.shape[0], a.shape[2:]) == (b.dtype, b.device, b.shape[0], b.shape[2:])
    return same and _are_channels_last(a.shape, a.stride(), b.shape, b.stride())


@functools.lru_cache(maxsize=1024)
def _are_channels_last(
    a: tuple[int, ...], a_stride: tuple[int, ...], b: tuple[int, ...], b_stride: tuple[int, ...]
) -> bool:
    """True if two tensors with the given shapes and strides are both channels-last and not empty.

    The result is cached, because the check takes as long as a kernel launch.

    Args:
        a, b: the shapes of the two tensors.
        a_stride, b_stride: their strides.
    """
    tensors = [torch.empty_strided(*layout, device="meta") for layout in ((a, a_stride), (b, b_stride))]
    return all(is_channels_last(t) and t.numel() > 0 for t in tensors)
