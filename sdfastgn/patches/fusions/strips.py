"""Runs the layers of a decoder in horizontal strips. Each norm takes the statistics of the whole image.

A *map* is a feature map of one image, (1, C, H, W). A *strip* is a part of a map: some consecutive rows.
Layers form a chain. Each layer reads the map of the layer before it, its *source*. The first source is a
``Held``, a whole map in memory. Of all later maps only strips exist, and only while they are used. If rows of
a layer's result are wanted, the layer asks its source for the rows that they depend on. These are the same
rows (before an upsampling, half as many), and one more row above and below, the *halo*, for each 3 x 3
convolution.

A norm needs the mean and variance (the *moments*) of each channel over the whole map before it can normalize
the first strip. So the method ``learn`` of a layer first passes over all strips, once for each norm of the
layer. Such a pass computes all layers from the map in memory up to the norm again. The function ``hold``
writes the result of a layer into memory, and the layers after it start there. ``hold`` can also compute the
moments of this result, which saves a pass of the next layer. More maps in memory take memory, and fewer take
time.

diffusers and ComfyUI have different names for the same modules. So a named tuple, such as ``ResnetParts``,
says which module does what in a layer.

Source: Chan, Golub and LeVeque, 1979, for the way in which the variances of all strips are combined.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from sdfastgn.kernels.common import dispatch
from sdfastgn.kernels.common.activations import ACTIVATIONS
from sdfastgn.kernels.common.layout import empty_laid_out, is_channels_last
from sdfastgn.kernels.common.sizes import ceil_div
from sdfastgn.kernels.group_norm.op import group_norm
from sdfastgn.kernels.statistics.op import channel_statistics
from sdfastgn.patches.layers.convolution import is_plain_conv, pointwise
from sdfastgn.patches.layers.statistics import add, add_bias, take_statistics
from sdfastgn.patches.lora.merging import plain_layer
from sdfastgn.patches.swap.fusion import activation_of, stock_class

# A feature map of H rows is divided into at most ceil(H / LEAST_ROWS) strips. For each 3 x 3 convolution, the
# rows next to a strip are computed too. With much thinner strips, too many rows would be such extra rows.
LEAST_ROWS = 32


class ResnetParts(NamedTuple):
    """A residual block: (conv2(act(norm2(conv1(act(norm1(x)))))) + shortcut(x)) / divisor.

    Args:
        norm1, act, conv1, norm2, conv2: the modules of the formula. The convolutions are 3 x 3.
        shortcut: a 1 x 1 convolution; None if x itself is added.
        divisor: the number by which the sum is divided.
        whole: a function that computes the block for a whole feature map (1, C, H, W).
    """

    norm1: Any
    act: Any
    conv1: Any
    norm2: Any
    conv2: Any
    shortcut: Any
    divisor: float
    whole: Callable[[Tensor], Tensor]


class UpsampleParts(NamedTuple):
    """An upsampling by two, to the nearest neighbor, and a 3 x 3 convolution after it.

    Args:
        conv: the convolution.
        whole: a function that computes both for some rows of a feature map, or for a whole feature map.
    """

    conv: Any
    whole: Callable[[Tensor], Tensor]


class OutParts(NamedTuple):
    """The end of a decoder: conv(act(norm(x))), with a 3 x 3 convolution."""

    norm: Any
    act: Any
    conv: Any


class Held:
    """A feature map that is wholly in memory. Later layers compute their strips of rows from it.

    Args:
        x: the feature map, (1, C, H, W).
        strip_bytes: number of bytes that a strip should take. A later layer divides this number by its
            ``row_bytes`` to get the number of rows in a strip.
        moments: mean and variance of each channel of x, (2, C); None if they are not known.
    """

    def __init__(self, x: Tensor, strip_bytes: int, moments: Tensor | None = None) -> None:
        self.x, self.strip_bytes, self.moments = x, strip_bytes, moments
        self.shape: tuple[int, int, int] = (x.shape[1], x.shape[2], x.shape[3])
        self.row_bytes = x[0, :, 0].numel() * x.element_size()

    @property
    def anchor(self) -> Held:
        # ``anchor`` is a property: an attribute that refers to its own object would be a cycle of references,
        # and the feature map would stay in memory until a garbage collection.
        return self

    @property
    def nbytes(self) -> int:
        return self.x.nbytes

    def rows(self, top: int, bottom: int) -> Tensor:
        return _rows(self.x, top, bottom)


class _Computed:
    """Base class of the layers that are computed in strips of rows.

    Such a layer does not store its result. Its method ``rows`` computes the rows that the next layer needs.

    Attributes:
        source: what this layer reads: the result of another layer, or a feature map in memory (``Held``).
        anchor: the feature map in memory (``Held``) from which the layers up to this one are computed.
        shape: (C, H, W) of the result.
        row_bytes: one row of the result needs about one row of this layer and of each feature map back to
            the last upsampling, and half as much before each upsampling. This is the largest of these sizes.
        moments: None, because the mean and variance of the result are not known.
    """

    moments = None

    def __init__(self, source: Layer, shape: tuple[int, int, int], row_bytes: int) -> None:
        C, _, W = shape
        self.source, self.shape = source, shape
        self.anchor: Held = source.anchor
        self.strip_bytes: int = source.strip_bytes
        self.row_bytes = max(row_bytes, C * W * self.anchor.x.element_size())

    @property
    def nbytes(self) -> int:
        """Number of bytes that the whole result of this layer would take in memory."""
        C, H, W = self.shape
        return C * H * W * self.anchor.x.element_size()

    def learn(self) -> None:
        """Computes the mean and variance that each norm of this layer needs. Call it once before ``rows``."""

    def rows(self, top: int, bottom: int) -> Tensor:
        """Computes rows ``top`` to ``bottom`` - 1 of this layer's result: (1, C, bottom - top, W)."""
        raise NotImplementedError

    def _moments_of_source(self) -> Tensor:
        known = self.source.moments
        return _moments_of(self.source.rows, self) if known is None else known


Layer: TypeAlias = Held | _Computed


class Resnet(_Computed):
    """A residual block that is computed in strips of rows."""

    def __init__(self, parts: ResnetParts, source: Layer) -> None:
        _, H, W = source.shape
        super().__init__(source, (_channels(parts.conv2), H, W), source.row_bytes)
        self.parts = parts

    def learn(self) -> None:
        self.first = self._moments_of_source()
        self.second = _moments_of(lambda *rows: self._to_second_norm(*rows)[0], self)

    def whole(self, x: Tensor) -> Tensor:
        return self.parts.whole(x)

    def rows(self, top: int, bottom: int) -> Tensor:
        parts = self.parts
        inner = _grown(top, bottom, self.shape[1])
        h, bias, x, first = self._to_second_norm(*inner)
        h = _norm_act(parts.norm2, parts.act, h, self.second, bias)
        h, bias = _conv(parts.conv2, h, inner[0], top, bottom)
        x = _rows(x, top - first, bottom - first)
        if parts.shortcut is not None:
            x = pointwise(parts.shortcut, x)
        return add(h, x, bias, parts.divisor)

    def _to_second_norm(self, top: int, bottom: int) -> tuple[Tensor, Tensor | None, Tensor, int]:
        """Computes the rows ``top`` to ``bottom`` - 1 of conv1's result, which the second norm reads.

        Returns (these rows, conv1's bias or None if the rows include it, the rows of the source that were
        read, number of the first row of the source that was read).
        """
        first, last = _grown(top, bottom, self.shape[1])
        x = self.source.rows(first, last)
        h = _norm_act(self.parts.norm1, self.parts.act, x, self.first)
        return *_conv(self.parts.conv1, h, first, top, bottom), x, first


class Upsample(_Computed):
    """An upsampling and the convolution after it, computed in strips of rows."""

    def __init__(self, parts: UpsampleParts, source: Layer) -> None:
        C, H, W = source.shape
        upsampled = C * 2 * W * source.anchor.x.element_size()
        shape = (_channels(parts.conv), 2 * H, 2 * W)
        super().__init__(source, shape, max(upsampled, ceil_div(source.row_bytes, 2)))
        self.parts = parts

    def whole(self, x: Tensor) -> Tensor:
        return self.parts.whole(x)

    def rows(self, top: int, bottom: int) -> Tensor:
        # The convolution reads the upsampled rows from top - 1 to bottom, both included. ``first`` to
        # ``last`` - 1 are the source's rows from which these are upsampled.
        first, last = max(0, (top - 1) // 2), min(self.source.shape[1], bottom // 2 + 1)
        y = self.parts.whole(self.source.rows(first, last))
        return _rows(y, top - 2 * first, bottom - 2 * first)


class Out(_Computed):
    """The end of a decoder (norm, activation and convolution), computed in strips of rows."""

    def __init__(self, parts: OutParts, source: Layer) -> None:
        _, H, W = source.shape
        super().__init__(source, (_channels(parts.conv), H, W), source.row_bytes)
        self.parts = parts

    def learn(self) -> None:
        self.first = self._moments_of_source()

    def rows(self, top: int, bottom: int) -> Tensor:
        norm, act, conv = self.parts
        first, last = _grown(top, bottom, self.shape[1])
        x = _norm_act(norm, act, self.source.rows(first, last), self.first)
        y, bias = _conv(conv, x, first, top, bottom)
        return add_bias(y, bias)


def _channels(conv: Any) -> int:
    return int(plain_layer(conv).out_channels)


# --- computation of whole feature maps ----------------------------------------------------------------


def hold(layer: _Computed, *, is_normalized: bool) -> Held:
    """Computes the whole result of ``layer`` and returns it as a feature map in memory (``Held``).

    If the layer reads a ``Held`` of the same shape, the result is written over the feature map in that
    ``Held``, which must not be used anymore.

    ``is_normalized``: True if a norm reads the result. Then the mean and variance of the result are computed
    too.
    """
    source, anchor = layer.source, layer.anchor
    if source is anchor and source.shape == layer.shape:
        out = anchor.x
    else:
        out = empty_laid_out(anchor.x, (1, *layer.shape), is_channels_last(anchor.x))
    found: list[tuple[int, Tensor]] = []
    write(layer, out, found if is_normalized else None)
    return Held(out, layer.strip_bytes, _merged(found) if is_normalized else None)


def write(layer: _Computed, out: Tensor, found: list[tuple[int, Tensor]] | None = None) -> None:
    """Writes the result of ``layer`` into ``out`` (1, C, H, W), which may be the tensor that the layer reads.

    ``found``: a list, or None. For each strip of the result, (number of positions, mean and variance of each
    channel) is appended to this list.
    """
    last: tuple[int, int, Tensor] | None = None
    for top, bottom in _strips(layer):
        y = layer.rows(top, bottom)
        if found is not None:
            found.append(_of_strip(y))
        # ``out`` may be the tensor that the layer reads. For its convolutions, this strip also reads rows of
        # the strip above it. So the result of the strip above is written only after this strip was computed.
        if last is not None:
            out[:, :, last[0] : last[1]] = last[2]
        last = top, bottom, y
    if last is not None:
        out[:, :, last[0] : last[1]] = last[2]


def _moments_of(rows: Callable[[int, int], Tensor], layer: _Computed) -> Tensor:
    """Computes mean and variance of each channel of the feature map that a norm of ``layer`` reads.

    Returns mean and variance as one tensor (2, C) fp64.

    ``rows``: a function that gets (top, bottom), and returns the feature map's rows from ``top`` to
    ``bottom`` - 1. ``_strips(layer)`` says for which rows it is called.
    """
    return _merged([_of_strip(rows(top, bottom)) for top, bottom in _strips(layer)])


def _strips(layer: _Computed) -> Iterator[tuple[int, int]]:
    """Yields (first row, row after the last one) of each strip of the result of ``layer``.

    Heights differ by at most one row.
    """
    H = layer.shape[1]
    count = ceil_div(H, max(LEAST_ROWS, layer.strip_bytes // layer.row_bytes))
    for i in range(count):
        yield i * H // count, (i + 1) * H // count


# --- statistics of a feature map ----------------------------------------------------------------------


def _of_strip(y: Tensor) -> tuple[int, Tensor]:
    """Returns (number of positions, mean and variance of each channel) of ``y``, a strip (1, C, rows, W).

    Mean and variance are one tensor (2, C).
    """
    statistics = take_statistics(y)
    if statistics is None:
        statistics = channel_statistics(y)
    HW, chunks = y.shape[2] * y.shape[3], statistics.shape[2]
    size = ceil_div(HW, chunks)
    counts = (HW - size * torch.arange(chunks, device=y.device)).clamp(0, size)
    means, m2 = statistics[:, 0].double()
    return HW, _combined(means, m2, counts.double())


def _merged(strips: list[tuple[int, Tensor]]) -> Tensor:
    """Computes mean and variance of each channel over all strips, (2, C).

    ``strips``: for each strip (number of positions, mean and variance of each channel).
    """
    means, variances = torch.stack([moments for _, moments in strips], 1)
    counts = means.new_tensor([count for count, _ in strips])
    return _combined(means, variances * counts[:, None], counts)


def _combined(means: Tensor, m2: Tensor, counts: Tensor) -> Tensor:
    """Combines the statistics of parts of an image. Returns mean and variance of each channel, (2, C).

    Args:
        means: (parts, C), the mean of each part.
        m2: (parts, C), the sum of squared deviations from the mean of the part.
        counts: (parts,), the number of positions in each part.
    """
    counts = counts[:, None]
    total = counts.sum()
    mean = (means * counts).sum(0) / total
    return torch.stack((mean, (m2 + counts * (means - mean).square()).sum(0) / total))


# --- rows of a feature map ----------------------------------------------------------------------------


def _rows(x: Tensor, top: int, bottom: int) -> Tensor:
    """The rows ``top`` to ``bottom`` - 1 of ``x`` (1, C, H, W), as a view.

    The view has the stride between images that a new tensor of its size would have. This stride does not
    matter for one image, but some kernels require that two tensors have the same strides.
    """
    if (top, bottom) == (0, x.shape[2]):
        return x
    y = x[:, :, top:bottom]
    return y.as_strided(y.shape, (y[0].numel(), *y.stride()[1:]))


def _grown(top: int, bottom: int, H: int) -> tuple[int, int]:
    """The rows that a 3 x 3 convolution reads to compute rows ``top`` to ``bottom`` - 1: (first, last + 1).

    H: height of the image.
    """
    return max(0, top - 1), min(H, bottom + 1)


def _conv(conv: Any, x: Tensor, first: int, top: int, bottom: int) -> tuple[Tensor, Tensor | None]:
    """Computes the rows from ``top`` to ``bottom`` - 1 of the result of ``conv``.

    Returns (these rows, the bias of ``conv`` or None if the rows include it).

    Args:
        conv: a 3 x 3 convolution that pads with zeros.
        x: the rows of the input from the row ``first`` on. They are the wanted rows, one row above and one
            row below. At an edge of the image there is no such row, and zeros take its place.
        first: number of the first row in x.
        top, bottom: the wanted rows of the result.
    """
    conv = plain_layer(conv)
    adds_later = dispatch.runs_in_triton(x) and is_plain_conv(conv) and conv.bias is not None
    has_halo = first < top and bottom < first + x.shape[2]
    y = F.conv2d(x, conv.weight, None if adds_later else conv.bias, padding=(0 if has_halo else 1, 1))
    first = top if has_halo else first
    return _rows(y, top - first, bottom - first), conv.bias if adds_later else None


def _norm_act(norm: Any, act: Any, x: Tensor, moments: Any, bias: Tensor | None = None) -> Tensor:
    """Computes ``act(norm(x + bias))``, where the norm takes the statistics of the whole feature map.

    Args:
        norm: a GroupNorm.
        act: the activation.
        x: some rows of the feature map.
        moments: (2, C), mean and variance of each channel of the whole feature map, before the bias is added.
        bias: (C,), a number for each channel that is added first; None to add nothing.
    """
    mean, variance = moments
    name = activation_of(act, stock_class(act)) or "identity"
    if dispatch.runs_in_triton(x) and not dispatch.is_op_off("group_norm", x):
        # The kernel of ``group_norm`` takes a sum of squared deviations, and divides this sum by the number
        # of positions in x, which has only some rows. So the sum must be ``variance`` times this number of
        # positions.
        m2 = variance * (x.shape[2] * x.shape[3])
        statistics = torch.stack((mean, m2)).float().view(2, 1, 1, -1)
        options: dict[str, Any] = {"shift": bias, "statistics": statistics}
        y = group_norm(x, norm.num_groups, norm.weight, norm.bias, norm.eps, name, **options)
        if not dispatch.is_op_off("group_norm", x):
            # If the kernel could not be compiled, ``group_norm`` has turned it off during this call. Then
            # PyTorch has normalized with the statistics of x alone, and y is computed again below.
            return y
    if bias is not None:
        mean = mean + bias
    means, variances = (t.view(norm.num_groups, -1) for t in (mean, variance))
    of_groups = means.mean(1, keepdim=True)
    variances = (variances + (means - of_groups).square()).mean(1, keepdim=True)
    scale = (variances + norm.eps).rsqrt().expand_as(means).flatten()
    centre = of_groups.expand_as(means).flatten()
    if bias is not None:
        centre = centre - bias
    wide = torch.promote_types(x.dtype, torch.float32)
    if norm.weight is not None:
        scale = scale * norm.weight
    y = (x.to(wide) - centre.to(wide).view(-1, 1, 1)) * scale.to(wide).view(-1, 1, 1)
    if norm.bias is not None:
        y = y + norm.bias.to(wide).view(-1, 1, 1)
    return ACTIVATIONS[name](y).to(x.dtype)
