"""Computes the padded input of a causal convolution of a video in one pass: ``pad_frames``.

A causal convolution reads a frame and the frames before it, but no later frames. If a video is computed in
chunks of frames, the last frames of each chunk are kept for the next chunk. They are called the cache. Before
each convolution, diffusers runs a norm and an activation, or upsampling; then a concatenation with the cache;
then padding. Here one kernel does all of this. For x (N, C, T, H, W):

    u = act(norm(x + shift) * factor + offset). A GroupNorm may have a modulation, a tensor with factor and
        offset. Without a modulation, factor is 1 and offset is 0. Without a norm, u is x + shift
    v = u upsampled: each element is repeated ``upsample`` times along (T, H, W), but the first frame is not
        repeated along T
    w = ``front`` frames, then v, then ``back`` frames. The last of the ``front`` frames are the cache, all
        other added frames are 0
    y = w with ``border`` zeros around each frame
    kept = the last ``keep`` frames of w

With a ``window`` of more than one frame, the result is not y. Frame t of the result then has the channels of
``window`` frames of y side by side: of the frames t, t + 1, and so on. So a 2-D convolution of this result
computes the same as a 3-D convolution of y.

``mode`` is "zeros", "replicate" or "reflect". In mode "replicate", the nearest element replaces each zero, as
in torch.nn.functional.pad. Mode "reflect" does the same along T. Along H and W, mode "reflect" mirrors each
frame at its outermost lines and columns, which are not repeated.

On a GPU the kernel of ``pad_frames/kernels.py`` runs; that file explains layouts and numerics. For a
GroupNorm, the kernels that compute mean and variance run first. Everywhere else, if gradients are wanted, and
for calls that the kernel cannot run (``_has_kernel``), ``reference_pad_frames`` runs.

Source: the convolutions of Wan's and HunyuanVideo's autoencoders in diffusers (``WanCausalConv3d``,
``HunyuanVideoCausalConv3d``, ``HunyuanVideoUpsampleCausal3D``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

from sdfastgn.kernels.channel_norm.config import fits
from sdfastgn.kernels.channel_norm.op import reference_channel_norm
from sdfastgn.kernels.common.activations import ACTIVATIONS
from sdfastgn.kernels.common.checks import (
    as_float,
    as_size,
    check_activation,
    check_device,
    check_input,
)
from sdfastgn.kernels.common.declaration import Operand, Value, channels_last, checks_of
from sdfastgn.kernels.common.layout import laid_out
from sdfastgn.kernels.common.plan_cache import Plans, named
from sdfastgn.kernels.group_norm.op import GROUP_NORM, GroupNormCall, reference_group_norm

aten = torch.ops.aten
# Maximum number of positions (frame, line, column) of all padded samples, because the kernel numbers them by
# int32.
_MAX_ROWS = 2**31 - 1
# The values of added frames and of borders: zeros, the nearest element, or the mirrored frame.
_MODES = ("zeros", "replicate", "reflect")


class Norm(NamedTuple):
    """A norm of the channels of each position.

    All attributes except ``added`` are arguments of ``channel_norm``. ``added`` is added to the sum of
    squares: the channels x of a position are divided by max(sqrt(||x||^2 + added), eps). For an RMSNorm over
    C channels, ``scale`` is sqrt(C), ``eps`` is 0, and ``added`` is C times the eps of the RMSNorm.
    """

    weight: Tensor | None = None
    bias: Tensor | None = None
    scale: float = 1.0
    eps: float = 1e-12
    activation: str = "identity"
    added: float = 0.0


class GroupNorm(NamedTuple):
    """A GroupNorm, optionally with a modulation, which multiplies the result and adds to it.

    The attributes that are not listed here are arguments of ``group_norm``.

    Attributes:
        statistics: (2, N, P, C) fp32, or (2, N T, P, C) if ``framewise``: the mean and the sum of squared
            deviations of each channel of x without the shift, in each of P chunks of positions, as for
            ``group_norm``. If None, kernels compute the statistics.
        modulation: (N, 2 C, t, h, w), in the dtype and on the device of x, or None. The first C channels
            multiply the norm's result. The last C channels are then added, before the activation. The
            modulation is upsampled to the size of x: H must be a multiple of h and W of w. If T is even, T
            must be a multiple of t. If T is odd, the first frame of the modulation is used for the first
            frame of x only, and T - 1 must be a multiple of t - 1. With a modulation, x must not be
            upsampled.
        framewise: True if each frame has its own mean and variance. x must then not be upsampled.
        pads_first: True if the ``front`` and ``back`` frames count in the mean and the variance, as if they
            were added before the norm. A kernel only runs if ``statistics`` are given. They must be the
            statistics of all frames, including the added ones, in chunks of equal sizes. The mode must not
            be "zeros", ``framewise`` must be False, and there must be no cache, modulation or upsampling.
    """

    num_groups: int
    weight: Tensor | None = None
    bias: Tensor | None = None
    eps: float = 1e-5
    activation: str = "identity"
    statistics: Tensor | None = None
    modulation: Tensor | None = None
    framewise: bool = False
    pads_first: bool = False


def _check_mode(name: str, mode: Any) -> None:
    if mode not in _MODES:
        raise ValueError(f"{name}: mode must be one of {_MODES}, got {mode!r}")


_PerChannel = Annotated[Tensor | None, Operand("(C,)")]


class PadFramesCall(NamedTuple):
    """The arguments of ``pad_frames``. Each attribute of the norm is a separate field.

    ``norm``: "channel" for a ``Norm``, "group" for a ``GroupNorm``, or "" for none. ``pad_h``, ``pad_w``: the
    border. ``times_t``, ``times_h``, ``times_w``: the numbers in ``upsample``.
    """

    x: Annotated[Tensor, Operand("(N, C, T, H, W)", whole=channels_last)]
    cache: Annotated[Tensor | None, Operand(whole=channels_last, same_dtype=True)]
    shift: _PerChannel
    weight: _PerChannel
    bias: _PerChannel
    statistics: Tensor | None
    modulation: Annotated[Tensor | None, Operand(whole=channels_last, same_dtype=True)]
    norm: str
    framewise: bool
    pads_first: bool
    num_groups: int
    scale: float
    eps: float
    activation: Annotated[str, Value(check_activation)]
    added: float
    front: int
    back: int
    pad_h: int
    pad_w: int
    mode: Annotated[str, Value(_check_mode)]
    keep: int
    times_t: int
    times_h: int
    times_w: int
    window: int

    @property
    def cached(self) -> int:
        return 0 if self.cache is None else self.cache.shape[2]

    @property
    def upsampled(self) -> tuple[int, int, int]:
        """The sizes (T, H, W) of x after upsampling."""
        T, H, W = self.x.shape[2:]
        return (T - 1) * self.times_t + 1 if T else 0, H * self.times_h, W * self.times_w

    @property
    def padded(self) -> tuple[int, int, int, int, int]:
        """The shape of y: (N, window * C, frames, H, W) with padding."""
        (N, C), (T, H, W) = self.x.shape[:2], self.upsampled
        frames = self.front + T + self.back - self.window + 1
        return N, self.window * C, frames, H + 2 * self.pad_h, W + 2 * self.pad_w


def modulation_times(x: Sequence[int], modulation: Sequence[int]) -> tuple[tuple[int, int, int], bool] | None:
    """Computes from the shapes of x and of a modulation how the modulation is upsampled to the size of x.

    Returns the number of copies of each element along (T, H, W), and True if the first frame is not repeated.
    Returns None if the sizes do not fit.
    """
    (T, H, W), (t, h, w) = x[2:], modulation[2:]
    if min(t, h, w) < 1 or H % h or W % w:
        return None
    first = T % 2
    if T == t == 1:
        return (1, H // h, W // w), True
    if t == first or t > T or (T - first) % (t - first):
        return None
    return ((T - first) // (t - first), H // h, W // w), first == 1


def _call_of(
    x: Tensor,
    cache: Tensor | None,
    shift: Tensor | None,
    norm: Norm | GroupNorm | None,
    front: int,
    back: int,
    border: tuple[int, int],
    mode: str,
    keep: int,
    upsample: tuple[int, int, int],
    window: int,
) -> PadFramesCall:
    where = (front, back, *border, mode, keep, *upsample, window)
    if isinstance(norm, GroupNorm):
        groups, weight, bias, eps, activation, statistics, modulation, framewise, pads_first = norm
        operands: Any = (
            weight,
            bias,
            statistics,
            modulation,
            "group",
            framewise,
            pads_first,
            groups,
            1.0,
            eps,
            activation,
            0.0,
        )
    else:
        weight, bias, *numbers = norm or Norm()
        operands = (weight, bias, None, None, "" if norm is None else "channel", False, False, 0, *numbers)
    return PadFramesCall._make((x, cache, shift, *operands, *where))


def _images(x: Tensor) -> Tensor:
    """Reshapes a video (N, C, T, H, W) to images (N T, C, H, W), as a view if x is channels-last."""
    return x.movedim(2, 1).flatten(0, 1)


def normalized_together(call: PadFramesCall) -> int:
    """Number of positions (frame, line, column) over which a GroupNorm takes each mean and variance."""
    T, H, W = call.x.shape[2:]
    frames = 1 if call.framewise else call.front + T + call.back if call.pads_first else T
    return frames * H * W


def group_norm_call(call: PadFramesCall) -> GroupNormCall:
    """Makes the ``group_norm`` call for the GroupNorm of ``call``, without the activation."""
    affine = call.weight, call.bias, call.eps, "identity"
    x = _images(call.x) if call.framewise else call.x
    return GroupNormCall(x, call.num_groups, *affine, call.shift, None, None, call.statistics, False, None)


def reference_pad_frames(
    x: Tensor,
    cache: Tensor | None = None,
    *,
    front: int = 0,
    back: int = 0,
    border: tuple[int, int] = (0, 0),
    mode: str = "zeros",
    keep: int = 0,
    shift: Tensor | None = None,
    norm: Norm | GroupNorm | None = None,
    upsample: tuple[int, int, int] = (1, 1, 1),
    window: int = 1,
) -> tuple[Tensor, Tensor | None]:
    """Computes ``pad_frames`` in plain PyTorch, in fp32 or fp64, for calls that the kernel cannot run."""
    u = x.to(torch.promote_types(x.dtype, torch.float32))
    u = u if shift is None else u + shift.to(u.dtype).view(-1, 1, 1, 1)
    if isinstance(norm, GroupNorm):
        if norm.pads_first:
            u, front, back = _replicated(u, 2, front, back), 0, 0
        if norm.framewise:
            u = reference_group_norm(_images(u), *norm[:4]).unflatten(0, (len(u), -1)).movedim(2, 1)
        else:
            u = reference_group_norm(u, *norm[:4])
        modulation = norm.modulation
        times = None if modulation is None else modulation_times(x.shape, modulation.shape)
        if modulation is not None and times is not None:
            factor, offset = _upsampled(modulation.to(u.dtype), *times).chunk(2, 1)
            u = u * factor + offset
        u = ACTIVATIONS[norm.activation](u)
    elif norm is not None:
        u = _channel_norm(u, norm)
    u = _upsampled(u.to(x.dtype), upsample)
    known = u if cache is None else torch.cat((cache, u), 2)
    front += u.shape[2] - known.shape[2]
    if mode == "zeros":
        frames = aten.pad.default(known, [0, 0, 0, 0, front, back])
    else:
        frames = _replicated(known, 2, front, back)
    y = _bordered(frames, border, mode)
    count = y.shape[2] - window + 1
    y = torch.cat([y[:, :, k : k + count] for k in range(window)], 1)
    kept = laid_out(frames[:, :, -keep:].clone(), channels_last=True) if keep else None
    return laid_out(y, channels_last=True), kept


def _bordered(frames: Tensor, border: tuple[int, int], mode: str) -> Tensor:
    if mode == "replicate":
        return _replicated(_replicated(frames, 3, border[0], border[0]), 4, border[1], border[1])
    fill = "constant" if mode == "zeros" else mode
    return aten.pad.default(frames, [border[1], border[1], border[0], border[0], 0, 0], fill)


def _replicated(u: Tensor, axis: int, front: int, back: int) -> Tensor:
    """Adds ``front`` copies of the first slice along ``axis``, and ``back`` copies of the last slice.

    ``aten.replication_pad3d`` is not used, because its backward is not deterministic on a GPU. The backward
    of a concatenation is.
    """
    if front == 0 == back:
        return u
    first, last = u.narrow(axis, 0, 1), u.narrow(axis, -1, 1)
    return torch.cat((*[first] * front, u, *[last] * back), axis)


def _channel_norm(u: Tensor, norm: Norm) -> Tensor:
    if not norm.added:
        return reference_channel_norm(u, *norm[:5])
    # ``reference_channel_norm`` has no argument ``added``. So an additional channel with the value
    # sqrt(added) adds ``added`` to the sum of squares. This channel is removed from the result.
    more = u.new_full((u.shape[0], 1, *u.shape[2:]), math.sqrt(norm.added))
    weight, bias = (t if t is None else aten.pad.default(t, [0, 1]) for t in norm[:2])
    return reference_channel_norm(torch.cat((u, more), 1), weight, bias, *norm[2:5])[:, :-1]


def _upsampled(u: Tensor, times: tuple[int, int, int], first_once: bool = True) -> Tensor:
    for axis, count in zip((3, 4), times[1:], strict=True):
        u = u if count == 1 else u.repeat_interleave(count, axis)
    if times[0] == 1:
        return u
    first = int(first_once)
    return torch.cat((u[:, :, :first], u[:, :, first:].repeat_interleave(times[0], 2)), 2)


# --- launch -----------------------------------------------------------------------------------------


def _has_kernel(call: PadFramesCall) -> bool:
    frames = call.front + call.upsampled[0] + call.back
    rows = call.x.shape[0] * frames * math.prod(call.padded[3:])
    if call.pads_first:
        statistics = call.statistics
        if statistics is None or normalized_together(call) % statistics.shape[2]:
            return False
    return call.x.numel() > 0 and fits(call.x.shape[1]) and rows <= _MAX_ROWS


_plans = Plans("pad_frames", PadFramesCall, named(f"{__package__}.plans:PadFramesPlan"))

# --- public function ------------------------------------------------------------------------------

_NAME = f"{__name__}.pad_frames"


def pad_frames(
    x: Tensor,
    cache: Tensor | None = None,
    *,
    front: int = 0,
    back: int = 0,
    border: tuple[int, int] = (0, 0),
    mode: str = "zeros",
    keep: int = 0,
    shift: Tensor | None = None,
    norm: Norm | GroupNorm | None = None,
    upsample: tuple[int, int, int] = (1, 1, 1),
    window: int = 1,
) -> tuple[Tensor, Tensor | None]:
    """Computes in one pass the padded input of a causal convolution, which can then run with padding 0.

    x + shift is normalized and upsampled. The sizes after that are T'', H'' and W''. Then the frames of
    ``cache`` are put before these frames, and borders are added.

    Args:
        x: (N, C, T, H, W).
        cache: (N, C, T', H'', W'') in the dtype and on the device of x, or None: the frames before x, already
            normalized and upsampled. T' is at most ``front``.
        front: number of frames before the frames of x, including the frames of the cache.
        back: number of frames after the frames of x.
        border: two numbers: of rows above and below each frame, and of columns left and right of each frame.
        mode: the values of borders, of the frames before the cache and of the ``back`` frames. "zeros";
            "replicate" for the nearest element; or "reflect", which repeats the nearest frame and mirrors
            each frame in its borders. With "reflect" the borders must be smaller than the frame.
        keep: number of frames of ``kept``, at most ``front`` + T'' + ``back``.
        shift: (C,) or None, added to x first. For example the bias of the convolution that made x.
        norm: the norm of x + shift, with an activation. If None, x + shift is not normalized.
        upsample: (t, h, w), the number of copies of each element along T, H and W. The first frame is not
            repeated along T.
        window: at most ``front`` + T'' + ``back``. With 1, y has the padded frames. With a larger number,
            frame t of y has the channels of the padded frames t, t + 1, ... t + ``window`` - 1 side by side.
            Then a 2-D convolution of y computes a 3-D convolution of the padded frames.

    Returns:
        (y, kept). T'', H'' and W'' are the sizes after upsampling. y is (N, window C,
        front + T'' + back - window + 1, H'' + 2 border[0], W'' + 2 border[1]). kept is (N, C, keep, H'',
        W''): a copy of the last frames, without borders and windows. kept is None if ``keep`` is 0.

    Dtypes: x is fp16, bf16, fp32 or fp64. fp64 runs in plain PyTorch. shift and the tensors of norm may have
        any of the four dtypes, but a modulation must have the dtype of x. Both results have the dtype of x.
    Layout: any. x and cache are copied first if they are not channels-last. Both results are channels-last.
    Grad: calls that want gradients, the transforms of torch.func and forward-mode AD run in plain PyTorch.
    Raises:
        TypeError: a tensor is not strided or has another dtype, cache or modulation has another dtype than x,
            or another argument or an attribute of norm has the wrong type.
        ValueError: a shape, a device, a size or a name does not fit.

    Source: torch.nn.functional.pad and interpolate.
    """
    _check_structure(norm, border, upsample)
    call = _call_of(x, cache, shift, norm, front, back, border, mode, keep, upsample, window)
    found = _plans.run(_NAME, call, _check, _has_kernel)
    if found is not None:
        return found
    where: Any = {"front": front, "back": back, "border": border, "mode": mode, "keep": keep}
    return reference_pad_frames(x, cache, shift=shift, norm=norm, upsample=upsample, window=window, **where)


def _check_structure(norm: Any, border: Any, upsample: Any) -> None:
    """Checks types and lengths of ``norm``, ``border`` and ``upsample``, which ``_call_of`` then unpacks."""
    for label, numbers, count in (("border", border, 2), ("upsample", upsample, 3)):
        if not isinstance(numbers, (tuple, list)):
            raise TypeError(f"{_NAME}: {label} must be a tuple of {count} ints, got {numbers!r}")
        if len(numbers) != count:
            raise ValueError(f"{_NAME}: {label} must have {count} numbers, got {numbers!r}")
    if norm is not None and not isinstance(norm, (Norm, GroupNorm)):
        raise TypeError(f"{_NAME}: norm must be a Norm, a GroupNorm or None, got {norm!r}")


def _check_sizes(name: str, call: PadFramesCall) -> None:
    x, cache = call.x, call.cache
    if x.dim() != 5:
        raise ValueError(f"{name}: x must be (N, C, T, H, W), got shape {tuple(x.shape)}")
    for label in ("front", "back", "pad_h", "pad_w", "keep"):
        as_size(name, "border" if label.startswith("pad") else label, getattr(call, label))
    for times in (call.times_t, call.times_h, call.times_w):
        if as_size(name, "upsample", times) == 0:
            raise ValueError(f"{name}: upsample must be positive, got 0")
    if not as_float(name, "added", call.added) >= 0:
        raise ValueError(f"{name}: added must not be negative, got {call.added!r}")
    image = call.upsampled[1:]
    if cache is not None:
        check_input(name, "cache", cache)
        wanted = (*x.shape[:2], cache.shape[2] if cache.dim() == 5 else "T'", *image)
        if tuple(cache.shape) != wanted or cache.shape[2] > call.front:
            raise ValueError(
                f"{name}: cache must have shape {wanted} with at most front={call.front} frames, "
                f"got {tuple(cache.shape)}"
            )
        check_device(name, "cache", cache, x)
    frames = call.front + call.upsampled[0] + call.back
    if call.keep > frames:
        raise ValueError(f"{name}: keep={call.keep} must be at most front + T + back, {frames}")
    if as_size(name, "window", call.window) not in range(1, max(1, frames) + 1):
        raise ValueError(
            f"{name}: window={call.window} must be at least 1 and at most front + T + back, {frames}"
        )
    if call.mode != "zeros" and 0 in x.shape[2:]:
        raise ValueError(f"{name}: mode {call.mode!r} needs elements, x has shape {tuple(x.shape)}")
    if call.mode == "reflect" and (call.pad_h >= image[0] or call.pad_w >= image[1]):
        border = (call.pad_h, call.pad_w)
        raise ValueError(f"{name}: border must be smaller than the frame {tuple(image)}, got {border}")
    if call.modulation is not None:
        _check_modulation(name, call)
    upsample = call.times_t, call.times_h, call.times_w
    has_others = call.framewise or call.cache is not None or call.modulation is not None
    if call.pads_first and (call.mode == "zeros" or has_others):
        raise ValueError(
            f"{name}: a norm with pads_first needs another mode than 'zeros', no cache, no modulation and "
            f"framewise=False, got mode={call.mode!r}"
        )
    if upsample != (1, 1, 1) and (call.framewise or call.pads_first or call.modulation is not None):
        raise ValueError(f"{name}: upsample must be (1, 1, 1) with this norm, got {upsample}")
    if call.norm == "group":
        as_size(name, "num_groups", call.num_groups)
        GROUP_NORM.check(name, group_norm_call(call))


def _check_modulation(name: str, call: PadFramesCall) -> None:
    x, modulation = call.x, call.modulation
    check_input(name, "modulation", modulation)
    assert modulation is not None
    N, C = x.shape[:2]
    fits = modulation.dim() == 5 and modulation.shape[:2] == (N, 2 * C)
    if not fits or modulation_times(x.shape, modulation.shape) is None:
        raise ValueError(
            f"{name}: modulation must have shape ({N}, {2 * C}, t, h, w) with sizes that can be upsampled to "
            f"those of x, {tuple(x.shape[2:])}, got {tuple(modulation.shape)}"
        )
    check_device(name, "modulation", modulation, x)


_check = checks_of(PadFramesCall, _check_sizes)
