"""diffusers' autoencoders of LTX-Video and LTX-2: norm, scale, shift, SiLU and padding in one pass.

Both models have almost the same blocks under different names. A causal convolution puts copies of the first
frame before its input. Other convolutions put copies of the first frame before their input, and copies of the
last frame after it. Each frame gets a border of zeros, or in LTX-2's decoder of mirrored elements. One kernel
(``pad_frames``) computes the norm, the scale and shift of the timestep, and SiLU, and writes the padded input
of the convolution.

Further differences from stock:

- In a residual block, the kernel of norm2 adds conv1's bias, and the kernel of the sum adds conv2's bias.
- Upsampling moves channels to positions. Here one pass does that and also adds the bias or the residual. It
  does not write the frames that stock writes and drops.
- A 1x1x1 convolution in fp16 or bf16 is a matrix product.

All of this runs only for inference without gradients, autocast, compilers and traces. Otherwise, and if a
layer has hooks, an adapter or another dtype, or if a timestep is given for several samples, stock's forward
runs. The convolutions that it calls are still fused one by one.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from diffusers.models.autoencoders import autoencoder_kl_ltx as ltx
from diffusers.models.normalization import RMSNorm
from torch import Tensor, nn

from sdfastgn.kernels.common.layout import empty_laid_out, is_channels_last, laid_out
from sdfastgn.kernels.pad_frames.op import Norm, pad_frames
from sdfastgn.kernels.product.op import linear
from sdfastgn.patches.core.fusion import (
    ClassSwap,
    activation_of,
    drops_nothing,
    is_unhooked,
)
from sdfastgn.patches.core.tested_sources import tested
from sdfastgn.patches.fusions.packing import Cell, cells_of
from sdfastgn.patches.fusions.video import (
    activation_reason_of,
    add_into,
    channels_into,
    in_channels_last,
    is_plain_inference,
)

try:
    from diffusers.models.autoencoders import autoencoder_kl_ltx2 as ltx2
except ImportError:  # a diffusers before LTX-2
    ltx2 = None
if not hasattr(ltx2, "LTX2VideoUpsampler3d"):  # diffusers 0.37 has LTX-2 with other names
    ltx2 = None

__all__ = ["FUSIONS"]

# Classes of the causal convolutions of LTX-Video and LTX-2, stock and fused. ``_fusions`` fills the set.
_CONVS: set[type[nn.Module]] = set()
# ``padding_mode`` of the inner ``nn.Conv3d`` -> mode of ``pad_frames``. ``pad_frames`` repeats frames before
# and after the input in both modes. For "zeros" it adds no border around the frames, because the
# ``nn.Conv3d`` adds the border itself. Then the mode only says that frames are repeated.
_MODES = {"zeros": "replicate", "reflect": "reflect"}


# --- what may run fused -----------------------------------------------------------------------------


def _is_plain_conv(conv: Any, x: Tensor, C: int) -> bool:
    """True if ``conv`` can run fused on an input of C channels, in the dtype and on the device of x.

    A call must only pad as upstream does and run PyTorch's convolution, without hooks or replaced methods.
    """
    if type(conv) not in _CONVS or not is_unhooked(conv):
        return False
    inner = conv.conv
    return (
        type(inner) is nn.Conv3d
        and is_unhooked(inner)
        and "_conv_forward" not in vars(inner)
        and inner.padding_mode in _MODES
        and (type(inner.padding), inner.padding[0], inner.in_channels) == (tuple, 0, C)
        and inner.kernel_size == conv.kernel_size
        and (inner.weight.dtype, inner.weight.device) == (x.dtype, x.device)
        and (inner.padding_mode == "zeros" or _is_larger(x, inner.padding))
    )


def _is_larger(x: Tensor, padding: Any) -> bool:
    """True if the frames of x are larger than the borders, so that the borders can mirror them."""
    return all(size > border for size, border in zip(x.shape[3:], padding[1:], strict=True))


def _norm_of(norm: Any, act: Any, C: int, scale: Tensor | None, shift: Tensor | None) -> Norm | None:
    """Returns the operands with which ``pad_frames`` computes ``act(norm(u) * scale + shift)``, for u of C
    channels. None if the kernel cannot compute it.
    """
    activation = activation_of(act)
    if activation is None or not (is_unhooked(act) and is_unhooked(norm)):
        return None
    if type(norm) is RMSNorm:
        if norm.weight is not None or norm.bias is not None:
            return None
    elif ltx2 is None or type(norm) is not ltx2.PerChannelRMSNorm or norm.channel_dim != 1:
        return None
    return Norm(scale, shift, C**0.5, 0.0, activation, C * float(norm.eps))


def _modulation(temb: Tensor, table: Tensor) -> tuple[Tensor, ...]:
    """Returns (shift, 1 + scale, shift, 1 + scale, ...), each (C,), for a batch of one sample.

    temb: (1, n C, 1, 1, 1), the embedding of the timestep. table: (n, C), a parameter that is added to it.
    """
    rows = (temb.flatten().unflatten(0, (len(table), -1)) + table).unbind(0)
    return tuple(1 + row if i % 2 else row for i, row in enumerate(rows))


# --- helpers of the fused forwards ------------------------------------------------------------------


def _convolve(
    conv: Any,
    x: Tensor,
    is_causal: bool,
    *,
    shift: Tensor | None = None,
    norm: Norm | None = None,
    has_bias: bool = True,
) -> Tensor:
    """Returns ``conv(norm(x + shift))``, channels-last.

    Args:
        conv: a convolution, for which ``_is_plain_conv`` is true.
        x: (N, C, T, H, W).
        is_causal: True if ``conv`` pads only before the first frame, not after the last one.
        shift, norm: as in ``pad_frames``.
        has_bias: False if the next kernel adds the bias of ``conv``.
    """
    inner = conv.conv
    bias = inner.bias if has_bias else None
    more = conv.kernel_size[0] - 1
    front, back = (more, 0) if is_causal else (more // 2, more // 2)
    padding = inner.padding
    where: Any = {"front": front, "back": back, "mode": _MODES[inner.padding_mode]}
    if inner.padding_mode != "zeros":
        where["border"], padding = padding[1:], (0, 0, 0)
    sizes = inner.kernel_size, inner.stride, inner.groups
    frames = in_channels_last(x)
    if norm is not None or shift is not None or more or where.get("border", (0, 0)) != (0, 0):
        frames, _ = pad_frames(frames, shift=shift, norm=norm, **where)
    if sizes == ((1, 1, 1), (1, 1, 1), 1) and x.dtype in (torch.float16, torch.bfloat16):
        return linear(frames.movedim(1, -1), inner.weight.flatten(1), bias).movedim(-1, 1)
    y = F.conv3d(frames, inner.weight, bias, inner.stride, padding, inner.dilation, inner.groups)
    # Needed on a CPU, where a convolution may return a channels-first result for a channels-last input.
    return laid_out(y, channels_last=True)


def _unpack(y: Tensor, h: Tensor, more: Tensor, repeats: int, cell: Cell, first: int) -> None:
    """Moves the channels of h and ``more`` to positions, and writes the sum to y (3-D pixel shuffle).

    Each position of h becomes a *cell*: t x h x w positions (frames, rows, columns).

    Args:
        y: (N, C, T (t - first), H h, W w).
        h: (N, C t h w, T, H, W).
        more: (N, (C / repeats) t h w, T, H, W), or a tensor that broadcasts to this shape. Its C / repeats
            channels are added to the first C / repeats channels of y, then to the next ones, and so on.
        cell: (t, h, w).
        first: number of frames at the beginning of each cell that are left out of y.
    """

    def moved(u: Tensor) -> Tensor:
        """(N, C t h w, T, H, W) -> (N, T, t - first, H, h, W, w, C), a view."""
        cells = u.movedim(1, -1).unflatten(-1, (-1, *cell)).permute(0, 1, 5, 2, 6, 3, 7, 4)
        return cells[:, :, first:]

    cells = cells_of(y, (cell[0] - first, *cell[1:])).unflatten(-1, (repeats, -1))
    torch.add(moved(h).unflatten(-1, (repeats, -1)), moved(more)[..., None, :], out=cells)


class _FusedConv(nn.Module):
    """The causal convolutions of LTX-Video and LTX-2. x (N, C, T, H, W). The result has the layout of x."""

    def forward(self: Any, hidden_states: Tensor, *causal: Any, **options: Any) -> Tensor:
        x = hidden_states
        if not (is_plain_inference(x) and _is_plain_conv(self, x, x.shape[1])):
            return super().forward(x, *causal, **options)
        y = _convolve(self, x, _is_causal(self, *causal, **options))
        return y if is_channels_last(x) else y.contiguous()


def _is_causal(conv: Any, causal: bool = True) -> bool:
    """True if ``conv`` pads only before the first frame.

    LTX-Video's convolutions have an attribute ``is_causal``. LTX-2's get an argument ``causal``.
    """
    return bool(getattr(conv, "is_causal", causal))


class _FusedResnetBlock(nn.Module):
    """The ResNet blocks of LTX-Video and LTX-2.

    inputs (N, C, T, H, W) -> (N, C_out, T, H, W), channels-last.
    """

    def forward(
        self: Any,
        inputs: Tensor,
        temb: Tensor | None = None,
        generator: Any = None,
        *causal: Any,
        **options: Any,
    ) -> Tensor:
        x = inputs
        norms = self._norms(x, temb)
        if norms is None:
            return super().forward(x, temb, generator, *causal, **options)
        x = laid_out(x, channels_last=True)
        are_causal = [_is_causal(conv, *causal, **options) for conv in (self.conv1, self.conv2)]
        bias = self.conv1.conv.bias
        has_noise = self.per_channel_scale1 is not None
        h = _convolve(self.conv1, x, are_causal[0], norm=norms[0], has_bias=has_noise)
        if has_noise:
            h = self._with_noise(h, self.per_channel_scale1, generator)
        shift = None if has_noise else bias
        h = _convolve(self.conv2, h, are_causal[1], shift=shift, norm=norms[1], has_bias=False)
        bias = self.conv2.conv.bias
        if self.per_channel_scale2 is not None:
            h = h if bias is None else h + bias.view(-1, 1, 1, 1)
            h, bias = self._with_noise(h, self.per_channel_scale2, generator), None
        residual = x
        if self.norm3 is not None:
            residual = self.norm3(x.movedim(1, -1)).movedim(-1, 1)
        if self.conv_shortcut is not None:
            residual = self.conv_shortcut(residual)
        return add_into(h, laid_out(residual, channels_last=True), bias)

    def _with_noise(self: Any, h: Tensor, scale: Tensor, generator: Any) -> Tensor:
        noise = torch.randn(h.shape[-2:], generator=generator, device=h.device, dtype=h.dtype)[None]
        return laid_out(h + (noise * scale)[None, :, None], channels_last=True)

    def _norms(self: Any, x: Tensor, temb: Tensor | None) -> tuple[Norm, Norm] | None:
        """The operands for the kernels of both norms, with scale, shift and activation.

        None if stock's forward has to run.
        """
        if not (is_plain_inference(x) and _is_plain_conv(self.conv1, x, x.shape[1])):
            return None
        C = self.conv1.conv.out_channels
        if not (_is_plain_conv(self.conv2, x, C) and drops_nothing(self.dropout)):
            return None
        modulation: tuple[Tensor | None, ...] = (None,) * 4
        table = self.scale_shift_table
        if table is not None:
            if temb is None or len(x) != 1 or (temb.dtype, table.dtype) != (x.dtype, x.dtype):
                return None
            modulation = _modulation(temb, table)
        shift1, scale1, shift2, scale2 = modulation
        first = _norm_of(self.norm1, self.nonlinearity, x.shape[1], scale1, shift1)
        second = _norm_of(self.norm2, self.nonlinearity, C, scale2, shift2)
        return None if first is None or second is None else (first, second)


class _FusedUpsampler(nn.Module):
    """The upsampling of LTX-Video and LTX-2.

    x (N, C, T, H, W) -> (N, C_out, t T - t + 1, h H, w W), channels-last; (t, h, w) is the stride.
    """

    def forward(self: Any, hidden_states: Tensor, **options: Any) -> Tensor:
        x, cell = hidden_states, self.stride
        places = cell[0] * cell[1] * cell[2]
        if not (is_plain_inference(x) and _is_plain_conv(self.conv, x, x.shape[1])):
            return super().forward(x, **options)
        inner = self.conv.conv
        C_out, repeats = inner.out_channels // places, 1
        if self.residual:
            repeats = places // self.upscale_factor
            if x.shape[1] % places or x.shape[1] // places * repeats != C_out:
                return super().forward(x, **options)
        x = laid_out(x, channels_last=True)
        h = _convolve(self.conv, x, _is_causal(self.conv, **options), has_bias=self.residual)
        # Stock moves channels to t frames for each of the T frames of x, and then drops the first t - 1
        # frames. All of these come from the first frame of x. Here they are not written.
        N, T = len(x), h.shape[2]
        size = (N, C_out, cell[0] * (T - 1) + 1, cell[1] * h.shape[3], cell[2] * h.shape[4])
        y = empty_laid_out(x, size, channels_last=True)
        if self.residual:
            more = x
        else:
            bias = h.new_zeros(h.shape[1]) if inner.bias is None else inner.bias
            more = bias.view(1, -1, 1, 1, 1).expand(N, -1, T, 1, 1)
        _unpack(y[:, :, :1], h[:, :, :1], more[:, :, :1], repeats, cell, cell[0] - 1)
        if T > 1:
            _unpack(y[:, :, 1:], h[:, :, 1:], more[:, :, 1:], repeats, cell, 0)
        return y


class _FusedEncoder(nn.Module):
    """The encoders of LTX-Video and LTX-2. Videos (N, 3, T', H', W') -> (N, 2 C, T, H, W), channels-first.

    The first C channels of the result are means. The other C channels are copies of one logarithm of the
    variance.
    """

    def forward(self: Any, hidden_states: Tensor, causal: Any = None) -> Tensor:
        x = hidden_states
        given = () if not hasattr(self, "is_causal") else (causal,)
        C = channels_into(self.conv_out, "conv")
        norm = _norm_of(self.norm_out, self.conv_act, C, None, None)
        if norm is None or not (is_plain_inference(x) and _is_plain_conv(self.conv_out, x, C)):
            return super().forward(x, *given)
        options = {"causal": causal or self.is_causal} if given else {}
        p, p_t = self.patch_size, self.patch_size_t
        patches = x.unflatten(4, (-1, p)).unflatten(3, (-1, p)).unflatten(2, (-1, p_t))
        # The channels of a patch are numbered by (channel, frame, column, row).
        x = patches.permute(0, 2, 4, 6, 1, 3, 7, 5).flatten(4).movedim(-1, 1)
        x = self.conv_in(x, **options)
        for block in self.down_blocks:
            x = block(x, **options)
        x = self.mid_block(x, **options)
        y = _convolve(self.conv_out, x, _is_causal(self.conv_out, **options), norm=norm).contiguous()
        variance = y[:, -1:].expand(-1, y.shape[1] - 2, -1, -1, -1)
        return torch.cat([y, variance], dim=1)


class _FusedDecoder(nn.Module):
    """The decoders of LTX-Video and LTX-2. Latents (N, C, T, H, W) -> videos (N, 3, T', H', W')."""

    def forward(self: Any, hidden_states: Tensor, temb: Any = None, causal: Any = None) -> Tensor:
        x = hidden_states
        given = () if not hasattr(self, "is_causal") else (causal,)
        C = channels_into(self.conv_out, "conv")
        table = self.scale_shift_table
        fits = table is None or (temb is not None and len(x) == 1 and table.dtype == x.dtype)
        if not (
            fits
            and is_plain_inference(x)
            and _is_plain_conv(self.conv_out, x, C)
            and _norm_of(self.norm_out, self.conv_act, C, None, None) is not None
        ):
            return super().forward(x, temb, *given)
        options = {"causal": causal or self.is_causal} if given else {}
        x = self.conv_in(x, **options)
        if self.timestep_scale_multiplier is not None:
            temb = temb * self.timestep_scale_multiplier
        x = self.mid_block(x, temb, **options)
        for block in self.up_blocks:
            x = block(x, temb, **options)
        shift = scale = None
        if self.time_embedder is not None:
            embedded = {"timestep": temb.flatten(), "resolution": None, "aspect_ratio": None}
            temb = self.time_embedder(**embedded, batch_size=1, hidden_dtype=x.dtype)
            shift, scale = _modulation(temb, table)
        norm = _norm_of(self.norm_out, self.conv_act, C, scale, shift)
        y = _convolve(self.conv_out, x, _is_causal(self.conv_out, **options), norm=norm)
        p, p_t = self.patch_size, self.patch_size_t
        # The channels of y are numbered by (channel, frame, column, row) of a patch.
        cells = y.unflatten(1, (-1, p_t, p, p)).permute(0, 1, 5, 2, 6, 4, 7, 3)
        return cells.flatten(6, 7).flatten(4, 5).flatten(2, 3)


# --- fused classes ----------------------------------------------------------------------------------


class FusedLTXVideoCausalConv3d(_FusedConv, ltx.LTXVideoCausalConv3d):
    pass


class FusedLTXVideoResnetBlock3d(_FusedResnetBlock, ltx.LTXVideoResnetBlock3d):
    pass


class FusedLTXVideoUpsampler3d(_FusedUpsampler, ltx.LTXVideoUpsampler3d):
    pass


class FusedLTXVideoEncoder3d(_FusedEncoder, ltx.LTXVideoEncoder3d):
    pass


class FusedLTXVideoDecoder3d(_FusedDecoder, ltx.LTXVideoDecoder3d):
    pass


if ltx2 is not None:

    class FusedLTX2VideoCausalConv3d(_FusedConv, ltx2.LTX2VideoCausalConv3d):
        pass

    class FusedLTX2VideoResnetBlock3d(_FusedResnetBlock, ltx2.LTX2VideoResnetBlock3d):
        pass

    class FusedLTX2VideoUpsampler3d(_FusedUpsampler, ltx2.LTX2VideoUpsampler3d):
        pass

    class FusedLTX2VideoEncoder3d(_FusedEncoder, ltx2.LTX2VideoEncoder3d):
        pass

    class FusedLTX2VideoDecoder3d(_FusedDecoder, ltx2.LTX2VideoDecoder3d):
        pass


# --- fusions ----------------------------------------------------------------------------------------


def _fusions(family: str, norm: type[nn.Module], **classes: type[nn.Module]) -> tuple[ClassSwap, ...]:
    """Returns one fusion for each of ``classes``, {name: fused class}. The last base of a fused class is the
    stock class.
    """
    stock: dict[str, Any] = {name: fused.__bases__[-1] for name, fused in classes.items()}
    _CONVS.update((stock["conv"], classes["conv"]))
    parts = tested(norm, "__init__", "forward"), tested(stock["conv"], "__init__", "forward")
    relied = {"resnet_block": parts, "encoder": parts, "decoder": parts, "upsampler": parts[1:]}
    return tuple(
        ClassSwap(
            f"{family}_{name}",
            stock[name],
            fused,
            sources=(tested(stock[name], "__init__", "forward"), *relied.get(name, ())),
            check=activation_reason_of,
        )
        for name, fused in classes.items()
    )


FUSIONS: tuple[ClassSwap, ...] = _fusions(
    "ltx",
    RMSNorm,
    conv=FusedLTXVideoCausalConv3d,
    resnet_block=FusedLTXVideoResnetBlock3d,
    upsampler=FusedLTXVideoUpsampler3d,
    encoder=FusedLTXVideoEncoder3d,
    decoder=FusedLTXVideoDecoder3d,
)
if ltx2 is not None:
    FUSIONS += _fusions(
        "ltx2",
        ltx2.PerChannelRMSNorm,
        conv=FusedLTX2VideoCausalConv3d,
        resnet_block=FusedLTX2VideoResnetBlock3d,
        upsampler=FusedLTX2VideoUpsampler3d,
        encoder=FusedLTX2VideoEncoder3d,
        decoder=FusedLTX2VideoDecoder3d,
    )
