"""Steps for images (N, C, H, W) and videos (N, C, T, H, W): pads, convolutions, norms and sums.

A step is a function that nodes of a rewritten graph call. The results of these steps are channels-last.
Several steps also return *statistics*: sums of their result from which a GroupNorm after them gets mean and
variance.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sdfastgn.kernels.channel_norm import op as channel_norm_op
from sdfastgn.kernels.common import dispatch
from sdfastgn.kernels.common.activations import ACTIVATIONS
from sdfastgn.kernels.common.layout import empty_laid_out, is_channels_last, is_dense, laid_out, writable
from sdfastgn.kernels.convolution import windows
from sdfastgn.kernels.group_norm import op as group_norm_op
from sdfastgn.kernels.pad_frames import op as pad_frames_op
from sdfastgn.kernels.product import op as product_op
from sdfastgn.kernels.statistics import op as statistics_op
from sdfastgn.kernels.upsample import conv as upsample_op
from sdfastgn.kernels.upsample import nearest as nearest_op
from sdfastgn.plans.run.steps.views import cat

aten = torch.ops.aten


# ---- pads and sizes


_PADS = {
    ("replicate", 4): aten.replication_pad2d.default,
    ("replicate", 5): aten.replication_pad3d.default,
    ("reflect", 4): aten.reflection_pad2d.default,
    ("reflect", 5): aten.reflection_pad3d.default,
}


def pad(x: Tensor, pads: Sequence[int], mode: str, value: float) -> Tensor:
    """Pads all spatial axes. ``pads``: as for ``F.pad``. ``mode``: "constant", "replicate" or "reflect"."""
    if mode == "constant" and is_channels_last(x) and min(pads) >= 0:
        return padded_cat((x,), 2, pads, value)
    if mode == "constant":
        return aten.constant_pad_nd.default(x, pads, value)
    if x.dim() == 5 and x.is_floating_point():
        left, right, top, bottom, front, back = pads
        has_mode = mode == "replicate" or front == back == 0
        if has_mode and left == right and top == bottom:
            return frames(x, None, front, back, (top, left), mode)[0]
    return _PADS[mode, x.dim()](x, pads)


def padded_cat(parts: Sequence[Tensor], dim: int, pads: Sequence[int], value: float) -> Tensor:
    """Concatenates ``parts`` along ``dim`` and adds ``value`` around the result, which is channels-last.

    Each part is copied once. ``pads``: as for ``F.pad``, without negative numbers.
    """
    shape = list(parts[0].shape)
    shape[dim] = sum(part.shape[dim] for part in parts)
    around = {len(shape) - 1 - i: (pads[2 * i], pads[2 * i + 1]) for i in range(len(pads) // 2)}
    y = inner = empty_laid_out(
        parts[0], [s + sum(around.get(axis, ())) for axis, s in enumerate(shape)], channels_last=True
    )
    for axis, (before, after) in around.items():
        inner.narrow(axis, 0, before).fill_(value)
        inner.narrow(axis, before + shape[axis], after).fill_(value)
        inner = inner.narrow(axis, before, shape[axis])
    at = 0
    for part in parts:
        inner.narrow(dim, at, part.shape[dim]).copy_(part)
        at += part.shape[dim]
    return y


def mean_windows(x: Tensor, dim: int, size: int) -> Tensor:
    """Computes the mean of each ``size`` successive elements along ``dim``. Channels-last if x is."""
    shape = (*x.shape[:dim], x.shape[dim] // size, *x.shape[dim + 1 :])
    y = empty_laid_out(x, shape, channels_last=x.dim() > 3 and x.stride(1) == 1)
    return aten.mean.out(x.unflatten(dim, (-1, size)), [dim + 1], out=y)


def upsample(x: Tensor, times: Sequence[int], first_once: bool) -> Tensor:
    """Repeats each element along the spatial axes, as often as ``times`` says for each axis.

    ``first_once``: True if frame 0 of a video is not repeated along time.
    """
    if tuple(times) == (2, 2):
        return nearest_op.upsample_nearest_2x(_in_channels_last(x))
    if first_once or (x.dim() == 5 and times[0] == 1):
        x = _in_channels_last(x)
        return pad_frames_op.pad_frames(x, upsample=tuple(times))[0]  # type: ignore[arg-type]
    size = [s * t for s, t in zip(x.shape[2:], times, strict=True)]
    nearest = aten.upsample_nearest2d if x.dim() == 4 else aten.upsample_nearest3d
    return _in_channels_last(nearest.default(x, size))


# ---- convolutions


def conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Tensor:
    """Computes a convolution of images or videos. The arguments are those of ``aten.convolution``."""
    where = stride, padding, dilation, transposed, output_padding, groups
    return _in_channels_last(aten.convolution.default(_in_channels_last(x), weight, bias, *where))


def conv_relu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    residual: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    """Computes ``relu(convolution(x) + bias + residual)`` of 16-bit images, if possible in one cuDNN call."""
    where = stride, padding, dilation, groups
    x = _in_channels_last(x)
    if not _cudnn_computes_relu(x):
        h = conv(x, weight, None, stride, padding, dilation, False, [0, 0], groups)
        if residual is None:
            return add_bias_(h, bias, False, "relu")[0]
        return add(h, residual, bias, 1.0, False, "relu")[0]
    if residual is None:
        return _in_channels_last(aten.cudnn_convolution_relu.default(x, weight, bias, *where))
    residual = _in_channels_last(residual)
    y = aten.cudnn_convolution_add_relu.default(x, weight, residual, 1.0, bias, *where)
    return _in_channels_last(y)


def _cudnn_computes_relu(x: Tensor) -> bool:
    is_deterministic = torch.backends.cudnn.deterministic or torch.are_deterministic_algorithms_enabled()
    is_usable = x.is_cuda and x.numel() > 0 and torch.backends.cudnn.enabled and not is_deterministic
    return is_usable and hasattr(aten, "cudnn_convolution_add_relu")


def conv_windows(
    x: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> Tensor:
    """Computes a 3-D convolution as a 2-D one.

    x is a result of ``frames``, a function of this file that was called with the argument ``window``. It has
    put the frames of each window of the convolution side by side as channels.
    """
    where = tuple(stride[1:]), tuple(padding[1:]), tuple(dilation[1:])
    return windows.convolve_windows(x, weight, None, *where)  # type: ignore[arg-type]


def conv_last_slice(
    x: Tensor,
    weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    """Computes a 3-D convolution of one frame that only frames of zeros precede, as a 2-D convolution.

    Only the last slice of the weight along time matters, because the others are multiplied by zeros.
    """
    where = stride[1:], padding[1:], dilation[1:], False, [0, 0], groups
    image = _in_channels_last(_in_channels_last(x)[:, :, 0])
    return _in_channels_last(aten.convolution.default(image, weight[:, :, -1], None, *where)).unsqueeze(2)


def pointwise_conv(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Computes a convolution with a 1x1 kernel as a matrix product."""
    return product_op.linear(_in_channels_last(x).movedim(1, -1), weight.flatten(1), bias).movedim(-1, 1)


def upsample_conv(x: Tensor, weight: Tensor, bias: Tensor | None, emits: bool) -> tuple[Tensor, Any]:
    """Computes a 3x3 convolution of x after nearest upsampling by two.

    Returns the result, and sums of it from which a GroupNorm gets mean and variance. The sums are None if
    ``emits`` is False, or if the kernel that runs does not compute them.
    """
    x = _in_channels_last(x)
    if upsample_op.runs_in_phases(x, weight):
        try:
            return upsample_op.convolve_phases(x, weight, bias, with_statistics=emits)
        except dispatch.KernelError:
            pass
    large = nearest_op.upsample_nearest_2x(x)
    y = aten.convolution.default(large, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    return add_bias_(_in_channels_last(y), bias, emits)


def nested_filters(outer: Tensor, inner: Tensor) -> Tensor:
    """Joins the filters of two convolutions whose windows do not overlap to those of one convolution.

    outer (a, b * C, *K), inner (b, C, *k) -> (a * b, C, *(K * k)). Filter i * b + j of channel c is
    ``outer[i, j * C + c]``, in which each element is replaced by the element times ``inner[j, c]``.
    """
    a, (b, C, *small) = outer.shape[0], inner.shape
    split = [size for K in outer.shape[2:] for size in (K, 1)]
    parts = [size for k in small for size in (1, k)]
    y = outer.reshape(a, b, C, *split) * inner.reshape(b, C, *parts)
    return y.reshape(a * b, C, *(K * k for K, k in zip(outer.shape[2:], small, strict=True)))


def matrix_of_cells(filters: Tensor, scale: float, dtype: torch.dtype, transposed: bool) -> Tensor:
    """Makes the matrix that computes a convolution whose windows (cells) do not overlap.

    ``filters``: (r, C, *cell), where a cell has P positions. The matrix is (r * C, P * C). Row i * C + c has
    ``scale * filters[i, c]`` in the columns p * C + c, and zeros elsewhere. If ``transposed`` is True, the
    result is the transposed matrix (P * C, r * C), which computes the transposed convolution.
    """
    r, C = filters.shape[:2]
    values = filters.reshape(r, C, -1) * scale
    P = values.shape[2]
    y = aten.new_zeros.default(values, [P, C, r, C] if transposed else [r, C, P, C], dtype=dtype)
    y.diagonal(0, 1, 3).copy_(values.permute(2, 0, 1) if transposed else values.transpose(1, 2))
    return y.view(y.shape[0] * C, -1)


# ---- norms


class Group(NamedTuple):
    """The arguments of a GroupNorm that the step ``frames`` computes besides padding.

    Attributes:
        groups, weight, bias, eps, activation: as for ``group_norm``.
        statistics: sums from which the norm gets mean and variance; None if the kernel must compute them.
        modulation: a small tensor with a factor and an offset for each channel, which is upsampled to the
            input; or None.
        framewise: True if each frame is normalized by itself.
        pads_first: True if mean and variance include the frames that the pad repeats.
    """

    groups: int
    weight: Any
    bias: Any
    eps: float
    activation: str
    statistics: Any = None
    modulation: Any = None
    framewise: bool = False
    pads_first: bool = False


class Channel(NamedTuple):
    """The arguments of a norm over the channels of each position, which ``frames`` computes before padding.

    ``channel_norm`` has the same arguments.
    """

    weight: Any
    bias: Any
    scale: float
    eps: float
    activation: str
    added: float


def group_norm(
    x: Tensor,
    groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    activation: str,
    shift: Tensor | None,
    statistics: Any,
    framewise: bool,
    ada_scale: Tensor | None = None,
    ada_shift: Tensor | None = None,
) -> Tensor:
    """Computes ``activation(group_norm(x + shift) * (1 + ada_scale) + ada_shift)``.

    ``framewise``: True normalizes each frame of a video by itself. ``ada_scale`` and ``ada_shift`` then have
    values for each frame.
    ``statistics``: sums of each sample, or of each frame of each sample, from which the norm gets mean and
    variance. If they are None, or do not fit, the kernel computes them.
    """
    images = _in_channels_last(x).transpose(1, 2).flatten(0, 1) if framewise else x
    statistics = _statistics_of(statistics, len(images), math.prod(images.shape[2:]))
    after = {"ada_scale": ada_scale, "ada_shift": ada_shift, "statistics": statistics}
    y = group_norm_op.group_norm(images, groups, weight, bias, eps, activation, shift=shift, **after)
    return y.unflatten(0, (x.shape[0], x.shape[2])).transpose(1, 2) if framewise else y


def modulated_norm(
    x: Tensor,
    groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    activation: str,
    modulation: Tensor,
) -> Tensor:
    """Computes ``activation(group_norm(x) * factor + offset)``, where factor and offset differ by position.

    ``modulation``: a small image or video with the channels of the factor, then those of the offset. The
    kernel upsamples it to the size of x.
    """
    norm = Group(groups, weight, bias, eps, activation, None, _in_channels_last(_as_video(modulation)))
    return frames(_as_video(x), norm=norm)[0].view(x.shape)


def channel_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    scale: float,
    eps: float,
    activation: str,
    added: float,
    shift: Tensor | None = None,
) -> Tensor:
    """Computes the norm over the channels of each position of x + shift.

    It is ``activation(u / max(sqrt(sum of squares + added), eps) * scale * weight + bias)`` with u = x +
    shift.
    """
    if not added and shift is None:
        return channel_norm_op.channel_norm(x, weight, bias, scale, eps, activation)
    norm = Channel(weight, bias, scale, eps, activation, added)
    return frames(_as_video(x), norm=norm, shift=shift)[0].view(x.shape)


def frames(
    x: Tensor,
    cache: Tensor | None = None,
    front: int = 0,
    back: int = 0,
    border: Sequence[int] = (0, 0),
    mode: str = "zeros",
    keep: int = 0,
    shift: Tensor | None = None,
    norm: Group | Channel | None = None,
    times: Sequence[int] = (1, 1, 1),
    window: int = 1,
) -> tuple[Tensor, Tensor | None]:
    """Normalizes, upsamples and pads the frames of a video x (N, C, T, H, W) in one pass.

    Returns the padded frames, and a copy of the last ``keep`` ones without borders. The copy is None if
    ``keep`` is 0. The function ``pad_frames`` in ``kernels/pad_frames`` explains the arguments. ``times`` is
    its ``upsample``, and ``Group`` and ``Channel`` stand for its norms.
    """
    x, operands = _in_channels_last(x), None
    if isinstance(norm, Group) and norm.pads_first:
        norm = norm._replace(statistics=_padded_statistics(norm.statistics, x, front, back))
        if norm.statistics is None:  # the norm's kernel cannot count padded values, so x is padded before
            x = pad_frames_op.pad_frames(x, front=front, back=back, mode=mode)[0]
            front, back, norm = 0, 0, norm._replace(pads_first=False)
    elif isinstance(norm, Group):
        T, H, W = x.shape[2:]
        each = (len(x) * T, H * W) if norm.framewise else (len(x), T * H * W)
        norm = norm._replace(statistics=_statistics_of(norm.statistics, *each))
    if norm is not None:
        kind = pad_frames_op.GroupNorm if isinstance(norm, Group) else pad_frames_op.Norm
        operands = kind(*norm)
    return pad_frames_op.pad_frames(
        x,
        None if cache is None else _in_channels_last(cache),
        front=front,
        back=back,
        border=tuple(border),  # type: ignore[arg-type]
        mode=mode,
        keep=keep,
        shift=shift,
        norm=operands,
        upsample=tuple(times),  # type: ignore[arg-type]
        window=window,
    )


def _statistics_of(statistics: Any, samples: int, positions: int) -> Any:
    """Turns statistics of each frame into statistics of each sample, for a GroupNorm.

    Statistics are sums over chunks of positions. ``samples``: number of samples. ``positions``: number of
    positions of a sample. Statistics that are of samples already are returned as they are. Returns None if
    the chunks of a frame differ in size.
    """
    if statistics is None or statistics.shape[1] == samples:
        return statistics
    frames = statistics.shape[1] // samples
    if positions // frames % statistics.shape[2]:
        return None
    return statistics.unflatten(1, (samples, frames)).flatten(2, 3)


def _padded_statistics(statistics: Any, x: Tensor, front: int, back: int) -> Any:
    """Computes sums for mean and variance of x, padded with copies of its first and last frame.

    ``front``, ``back``: the numbers of copies. ``statistics``: the sums of each frame of x. If it is None,
    they are computed here. Returns None if a GroupNorm's kernel could not use the result.
    """
    N, _, T, H, W = x.shape
    if statistics is None:
        statistics = statistics_op.channel_statistics(x.movedim(2, 1).flatten(0, 1))
    each = statistics.unflatten(1, (N, T))
    first, last = each[:, :, :1], each[:, :, -1:]
    padded = aten.cat.default([*[first] * front, each, *[last] * back], 2).flatten(1, 2)
    return _statistics_of(padded, N, (front + T + back) * H * W)


# ---- sums


def add(
    h: Tensor,
    residual: Tensor,
    bias: Tensor | None,
    divisor: float,
    emits: bool,
    activation: str = "identity",
) -> tuple[Tensor, Any]:
    """Computes ``activation((h + residual + bias) / divisor)``.

    Returns the result, and sums of it from which a GroupNorm gets mean and variance. The sums are None if
    ``emits`` is False, or if this package's kernel cannot run.
    """
    if is_channels_last(residual) and not is_channels_last(h):
        h, residual = residual, h
    if h.numel() and dispatch.is_plain_inference(h, (residual, bias)) and is_dense(h):
        try:
            return statistics_op.add_kernel(
                h, _alike(residual, h), bias, float(1 / divisor), emits=emits, activation=activation
            )
        except dispatch.KernelError:
            pass
    y = (h if bias is None else h + _per_channel(bias, h)) + residual
    return ACTIVATIONS[activation](y if divisor == 1 else y / divisor), None


def blend(
    h: Tensor, residual: Tensor, bias: Tensor | None, kept: Tensor, scale: Tensor, emits: bool
) -> tuple[Tensor, Any]:
    """Computes ``kept * residual + scale * (h + bias)``.

    Returns the result, and sums of it from which a GroupNorm gets mean and variance. The sums are None if
    ``emits`` is False, or if this package's kernel cannot run.
    ``kept``, ``scale``: (N,), one number for each sample.
    """
    factors = aten.stack.default([kept, scale])
    if h.numel() and dispatch.is_plain_inference(h, (residual, bias, factors)) and is_dense(h):
        try:
            return statistics_op.add_kernel(
                h, _alike(residual, h), bias, 1.0, emits=emits, factors=factors.float()
            )
        except dispatch.KernelError:
            pass
    y = h if bias is None else h + _per_channel(bias, h)
    kept, scale = factors.to(h.dtype).view(2, -1, *[1] * (h.dim() - 1))
    return kept * residual + scale * y, None


def add_views(a: Tensor, b: Tensor, shape: Sequence[int]) -> Tensor:
    """Computes ``(a + b).reshape(shape)`` in one pass over the elements. The result is channels-last.

    The reshape may only join neighboring axes.
    """
    y = empty_laid_out(a, shape, channels_last=True)
    aten.add.out(a, b, out=y.view(a.shape))
    return y


def add_bias_(
    h: Tensor, bias: Tensor | None, emits: bool, activation: str = "identity"
) -> tuple[Tensor, Any]:
    """Computes ``activation(h + bias)`` and writes it over h.

    Returns the result, and sums of it from which a GroupNorm gets mean and variance. The sums are None if
    ``emits`` is False, or if this package's kernel cannot run.
    """
    if bias is None:
        return ACTIVATIONS[activation](h), None
    if h.numel() and dispatch.is_plain_inference(h, (bias,)) and is_dense(h):
        try:
            return statistics_op.add_kernel(h, None, bias, 1.0, emits=emits, out=h, activation=activation)
        except dispatch.KernelError:
            pass
    return ACTIVATIONS[activation](writable(h).add_(_per_channel(bias, h))), None


def cat_two(a: Tensor, b: Tensor, emits: bool) -> tuple[Tensor, Any]:
    """Concatenates a and b along the channels.

    Returns the result, and sums of it from which a GroupNorm gets mean and variance. The sums are None if
    ``emits`` is False, or if this package's kernel cannot run.
    """
    if (
        a.numel()
        and b.numel()
        and dispatch.is_plain_inference(a, (b,))
        and is_channels_last(a)
        and is_channels_last(b)
    ):
        try:
            return statistics_op.cat_kernel(a, b, emits=emits)
        except dispatch.KernelError:
            pass
    return cat((a, b), 1), None


def _in_channels_last(x: Tensor) -> Tensor:
    return x if is_channels_last(x) else laid_out(x, channels_last=True)


def _as_video(x: Tensor) -> Tensor:
    """Returns x as a view (N, C, T, H, W). An image becomes a video of one frame."""
    return x.view(*x.shape[:2], *[1] * (5 - x.dim()), *x.shape[2:])


def _per_channel(bias: Tensor, h: Tensor) -> Tensor:
    return bias.to(h.dtype).view(*bias.shape, *[1] * (h.dim() - 2))


def _alike(x: Tensor, h: Tensor) -> Tensor:
    """Returns x with the strides of h. It is a view if strides differ only along axes of one element."""
    if x.stride() == h.stride():
        return x
    if all(s == 1 or a == b for s, a, b in zip(h.shape, h.stride(), x.stride(), strict=True)):
        return x.as_strided(h.shape, h.stride())
    return torch.empty_like(h).copy_(x)
