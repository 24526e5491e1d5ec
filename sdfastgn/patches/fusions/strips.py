"""Layers of a decoder in horizontal strips, with the statistics of the whole image in each norm.

A *layer* here computes any rows of its result from the rows of its source that they depend on: the same rows,
and a halo of one more row above and below for each 3 x 3 convolution. Layers are chained, and the chain ends
at a ``Held``, a feature map in memory. Only strips of all other maps exist, and only while they are used.

A norm needs the mean and variance of each channel over the whole map before it can normalize the first strip.
So ``learn`` first passes over all strips for each norm of its layer. Such a pass computes the chain again,
from the held map up to the norm. ``hold`` writes the result of a chain into memory, and the layers after it
start there. Holding more maps takes memory, and holding fewer takes time.

Each map is of one image, (1, C, H, W).

Source: Chan, Golub and LeVeque, 1979, for the sums of squared deviations of all strips together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from sdfastgn.kernels.common import dispatch
from sdfastgn.kernels.common.activations import ACTIVATIONS
from sdfastgn.kernels.common.layout import empty_laid_out, is_channels_last
from sdfastgn.kernels.common.sizes import ceil_div
from sdfastgn.kernels.group_norm.op import group_norm
from sdfastgn.kernels.statistics.op import channel_statistics
from sdfastgn.patches.core.convolution import is_plain_conv, pointwise
from sdfastgn.patches.core.fusion import activation_of, stock_class
from sdfastgn.patches.core.merged_adapters import plain_layer
from sdfastgn.patches.core.statistics import add, add_bias, take_statistics

__all__ = ["Held", "Layer", "Out", "Resnet", "Upsample", "hold", "write"]

# Minimum number of rows of a strip. Thinner strips would consist mostly of halo.
LEAST_ROWS = 32


class Held:
    """A map in memory.

    Args:
        x: (1, C, H, W).
        strip_bytes: size of the strips in which the layers after it work: that of the largest map in them.
        moments: ``_moments_of`` the map; None if they are not known.
    """

    def __init__(self, x: Tensor, strip_bytes: int, moments: Tensor | None = None) -> None:
        self.x, self.strip_bytes, self.moments = x, strip_bytes, moments
        self.shape: tuple[int, int, int] = (x.shape[1], x.shape[2], x.shape[3])
        self.row_bytes = x[0, :, 0].numel() * x.element_size()

    @property
    def anchor(self) -> Held:
        return self  # no attribute: a cycle of references would keep the map until a garbage collection

    @property
    def nbytes(self) -> int:
        return self.x.nbytes

    def rows(self, top: int, bottom: int) -> Tensor:
        return _rows(self.x, top, bottom)


class _Computed:
    """Base class of the layers that compute their rows.

    Attributes:
        anchor: the ``Held`` at the beginning of the chain.
        shape: (C, H, W) of the result.
        row_bytes: size of the largest map in the chain, per row of the result.
        moments: None, because the moments of the result are not known.
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
        """Size of the whole result, if it were held."""
        C, H, W = self.shape
        return C * H * W * self.anchor.x.element_size()

    def learn(self) -> None:
        """Compute the moments that the layer's norms need. Call it once before ``rows``."""

    def rows(self, top: int, bottom: int) -> Tensor:
        """Rows ``top`` to ``bottom`` of the result, (1, C, bottom - top, W)."""
        raise NotImplementedError

    def _moments_of_source(self) -> Tensor:
        known = self.source.moments
        return _moments_of(self.source.rows, self) if known is None else known


Layer: TypeAlias = Held | _Computed


class Resnet(_Computed):
    """diffusers' ``ResnetBlock2D`` without a time embedding."""

    def __init__(self, block: Any, source: Layer) -> None:
        _, H, W = source.shape
        super().__init__(source, (block.out_channels, H, W), source.row_bytes)
        self.block = block

    def learn(self) -> None:
        self.first = self._moments_of_source()
        self.second = _moments_of(lambda *rows: self._to_second_norm(*rows)[0], self)

    def whole(self, x: Tensor) -> Tensor:
        return self.block(x, None)

    def rows(self, top: int, bottom: int) -> Tensor:
        block = self.block
        inner = _grown(top, bottom, self.shape[1])
        h, bias, x, first = self._to_second_norm(*inner)
        h = _norm_act(block.norm2, block.nonlinearity, h, self.second, bias)
        h, bias = _conv(block.conv2, h, inner[0], top, bottom)
        x = _rows(x, top - first, bottom - first)
        if block.conv_shortcut is not None:
            x = pointwise(block.conv_shortcut, x)
        return add(h, x, bias, block.output_scale_factor)

    def _to_second_norm(self, top: int, bottom: int) -> tuple[Tensor, Tensor | None, Tensor, int]:
        """(rows of conv1's result, its bias if it was not added, the rows of the source, the first of these).

        ``top``, ``bottom``: the rows of conv1's result.
        """
        first, last = _grown(top, bottom, self.shape[1])
        x = self.source.rows(first, last)
        h = _norm_act(self.block.norm1, self.block.nonlinearity, x, self.first)
        return *_conv(self.block.conv1, h, first, top, bottom), x, first


class Upsample(_Computed):
    """diffusers' ``Upsample2D``: nearest neighbor by two, then a 3 x 3 convolution."""

    def __init__(self, module: Any, source: Layer) -> None:
        _, H, W = source.shape
        upsampled = module.channels * 2 * W * source.anchor.x.element_size()
        shape = (module.out_channels, 2 * H, 2 * W)
        super().__init__(source, shape, max(upsampled, ceil_div(source.row_bytes, 2)))
        self.module = module

    def whole(self, x: Tensor) -> Tensor:
        return self.module(x)

    def rows(self, top: int, bottom: int) -> Tensor:
        # The convolution reads the upsampled rows from top - 1 to bottom, both included.
        first, last = max(0, (top - 1) // 2), min(self.source.shape[1], bottom // 2 + 1)
        y = self.module(self.source.rows(first, last))
        return _rows(y, top - 2 * first, bottom - 2 * first)


class Out(_Computed):
    """The end of a ``Decoder``: ``conv_norm_out``, ``conv_act`` and ``conv_out``."""

    def __init__(self, decoder: Any, source: Layer) -> None:
        _, H, W = source.shape
        channels = plain_layer(decoder.conv_out).out_channels
        super().__init__(source, (channels, H, W), source.row_bytes)
        self.decoder = decoder

    def learn(self) -> None:
        self.first = self._moments_of_source()

    def rows(self, top: int, bottom: int) -> Tensor:
        decoder = self.decoder
        first, last = _grown(top, bottom, self.shape[1])
        x = _norm_act(decoder.conv_norm_out, decoder.conv_act, self.source.rows(first, last), self.first)
        y, bias = _conv(decoder.conv_out, x, first, top, bottom)
        return add_bias(y, bias)


# --- whole maps ---------------------------------------------------------------------------------------


def hold(layer: _Computed, *, is_normalized: bool) -> Held:
    """The result of ``layer`` in memory.

    It is written over the layer's source if this is held and has the same shape. The source is then invalid.

    ``is_normalized``: True if a norm reads the result, so that its moments are needed.
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
    """Write the result of ``layer`` into ``out`` (1, C, H, W), which may be the map that the layer reads.

    ``found``: gets ``_of_strip`` of each strip, for ``_merged``. None if no moments are wanted.
    """
    last: tuple[int, int, Tensor] | None = None
    for top, bottom in _strips(layer):
        y = layer.rows(top, bottom)
        if found is not None:
            found.append(_of_strip(y))
        # The halo of this strip is in the strip above, so that one is written only now.
        if last is not None:
            out[:, :, last[0] : last[1]] = last[2]
        last = top, bottom, y
    if last is not None:
        out[:, :, last[0] : last[1]] = last[2]


def _moments_of(rows: Callable[[int, int], Tensor], layer: _Computed) -> Tensor:
    """Mean and variance of each channel of the map of which ``rows`` computes rows: (2, C) fp64.

    ``layer``: its height and the size of its rows divide the map into strips.
    """
    return _merged([_of_strip(rows(top, bottom)) for top, bottom in _strips(layer)])


def _strips(layer: _Computed) -> Iterator[tuple[int, int]]:
    """Yields (top, bottom) of each strip. Their heights differ by at most one row."""
    H = layer.shape[1]
    count = ceil_div(H, max(LEAST_ROWS, layer.strip_bytes // layer.row_bytes))
    for i in range(count):
        yield i * H // count, (i + 1) * H // count


# --- statistics ---------------------------------------------------------------------------------------


def _of_strip(y: Tensor) -> tuple[int, Tensor]:
    """(number of positions, mean and variance of each channel) of ``y`` (1, C, rows, W)."""
    statistics = take_statistics(y)
    if statistics is None:
        statistics = channel_statistics(y)
    HW, chunks = y.shape[2] * y.shape[3], statistics.shape[2]
    size = ceil_div(HW, chunks)
    counts = (HW - size * torch.arange(chunks, device=y.device)).clamp(0, size)
    means, m2 = statistics[:, 0].double()
    return HW, _combined(means, m2, counts.double())


def _merged(strips: list[tuple[int, Tensor]]) -> Tensor:
    """Mean and variance of each channel over all strips. ``strips``: ``_of_strip`` of each."""
    means, variances = torch.stack([moments for _, moments in strips], 1)
    counts = means.new_tensor([count for count, _ in strips])
    return _combined(means, variances * counts[:, None], counts)


def _combined(means: Tensor, m2: Tensor, counts: Tensor) -> Tensor:
    """Mean and variance, (2, C), of all parts together.

    means, m2: (parts, C), mean and sum of squared deviations in each part. counts: (parts,), its positions.
    """
    counts = counts[:, None]
    total = counts.sum()
    mean = (means * counts).sum(0) / total
    return torch.stack((mean, (m2 + counts * (means - mean).square()).sum(0) / total))


# --- rows ---------------------------------------------------------------------------------------------


def _rows(x: Tensor, top: int, bottom: int) -> Tensor:
    """Rows of ``x`` (1, C, H, W), as a view with the strides of a tensor of this size.

    The stride between images does not matter for one image. But kernels compare the strides of two tensors.
    """
    if (top, bottom) == (0, x.shape[2]):
        return x
    y = x[:, :, top:bottom]
    return y.as_strided(y.shape, (y[0].numel(), *y.stride()[1:]))


def _grown(top: int, bottom: int, H: int) -> tuple[int, int]:
    """The rows that a 3 x 3 convolution reads to compute the rows from ``top`` to ``bottom``."""
    return max(0, top - 1), min(H, bottom + 1)


def _conv(conv: Any, x: Tensor, first: int, top: int, bottom: int) -> tuple[Tensor, Tensor | None]:
    """(rows of ``conv(x)``, the bias if it was not added).

    ``x``: the rows of the convolution's input that begin at the row ``first``. At the edges of the image they
    have no halo, and zeros take its place.
    """
    conv = plain_layer(conv)
    adds_later = dispatch.runs_in_triton(x) and is_plain_conv(conv) and conv.bias is not None
    has_halo = first < top and bottom < first + x.shape[2]
    y = F.conv2d(x, conv.weight, None if adds_later else conv.bias, padding=(0 if has_halo else 1, 1))
    first = top if has_halo else first
    return _rows(y, top - first, bottom - first), conv.bias if adds_later else None


def _norm_act(norm: Any, act: Any, x: Tensor, moments: Any, bias: Tensor | None = None) -> Tensor:
    """``act(norm(x + bias))`` with the moments of the whole map of which x is some rows.

    ``moments``: (2, C), mean and variance of each channel without the bias.
    """
    mean, variance = moments
    name = activation_of(act, stock_class(act)) or "identity"
    if dispatch.runs_in_triton(x):
        # The kernel expects the sum of squared deviations of x itself.
        m2 = variance * (x.shape[2] * x.shape[3])
        statistics = torch.stack((mean, m2)).float().view(2, 1, 1, -1)
        options: dict[str, Any] = {"shift": bias, "statistics": statistics}
        y = group_norm(x, norm.num_groups, norm.weight, norm.bias, norm.eps, name, **options)
        if dispatch.runs_in_triton(x):
            return y  # else the kernel was turned off in this call, and PyTorch took the moments of x
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
