"""What a causal convolution of a video reads, written in one pass: ``pad_frames``.

A causal convolution sees the frames before a frame, and none after it. A video that is computed in chunks
keeps the last frames of each chunk for the next one (the cache). So before each convolution stands a
concatenation with the cache, then padding, and before these a norm and an activation. Here one kernel does
all of it, for x (N, C, T, H, W):

    u = act(norm(x + shift))        or x + shift
    y = (zeros, cache, u), ``front`` + T frames, within ``border`` zeros around each frame
    kept = the last ``keep`` frames of y, without borders

In mode "replicate" the nearest element stands for each zero, as in torch.nn.functional.pad.

On a GPU the kernel of ``channel_norm/kernels.py`` runs; everywhere else, and with gradients,
``reference_pad_frames``. Layout and numerics contract: there.

Source: the convolutions of Wan's autoencoder in diffusers (``WanCausalConv3d``).
"""

from __future__ import annotations

import math
from typing import Annotated, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sdfastgn.kernels.channel_norm.config import fits, rows_config
from sdfastgn.kernels.channel_norm.op import reference_channel_norm
from sdfastgn.kernels.common import dispatch, gpu
from sdfastgn.kernels.common.checks import as_size, check_activation, check_device, check_input
from sdfastgn.kernels.common.declaration import Operand, Value, channels_last, checks_of
from sdfastgn.kernels.common.launch import Launch
from sdfastgn.kernels.common.layout import empty_laid_out, laid_out
from sdfastgn.kernels.common.plan_cache import Plans
from sdfastgn.kernels.common.sizes import vector_width

# Rows are counted in int32.
_MAX_ROWS = 2**31 - 1
_MODES = ("zeros", "replicate")


class Norm(NamedTuple):
    """The norm of ``pad_frames``: the operands of ``channel_norm`` after x."""

    weight: Tensor | None = None
    bias: Tensor | None = None
    scale: float = 1.0
    eps: float = 1e-12
    activation: str = "identity"


def _check_mode(name: str, mode: Any) -> None:
    if mode not in _MODES:
        raise ValueError(f"{name}: mode must be one of {_MODES}, got {mode!r}")


_PerChannel = Annotated[Tensor | None, Operand("(C,)")]


class _Call(NamedTuple):
    x: Annotated[Tensor, Operand("(N, C, T, H, W)", whole=channels_last)]
    cache: Annotated[Tensor | None, Operand(whole=channels_last, same_dtype=True)]
    shift: _PerChannel
    weight: _PerChannel
    bias: _PerChannel
    scale: float
    eps: float
    activation: Annotated[str, Value(check_activation)]
    has_norm: bool
    front: int
    pad_h: int
    pad_w: int
    mode: Annotated[str, Value(_check_mode)]
    keep: int

    @property
    def cached(self) -> int:
        return 0 if self.cache is None else self.cache.shape[2]


def reference_pad_frames(
    x: Tensor,
    cache: Tensor | None = None,
    *,
    front: int = 0,
    border: tuple[int, int] = (0, 0),
    mode: str = "zeros",
    keep: int = 0,
    shift: Tensor | None = None,
    norm: Norm | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The same function in plain PyTorch, in fp32 (fp64 for fp64 input): the fallback."""
    u = x.to(torch.promote_types(x.dtype, torch.float32))
    u = u if shift is None else u + shift.to(u.dtype).view(-1, 1, 1, 1)
    u = (u if norm is None else reference_channel_norm(u, *norm)).to(x.dtype)
    known = u if cache is None else torch.cat((cache, u), 2)
    fill = "constant" if mode == "zeros" else mode
    frames = F.pad(known, (0, 0, 0, 0, front + x.shape[2] - known.shape[2], 0), fill)
    y = F.pad(frames, (border[1], border[1], border[0], border[0], 0, 0), fill)
    kept = laid_out(frames[:, :, -keep:].clone(), channels_last=True) if keep else None
    return laid_out(y, channels_last=True), kept


# --- launch -----------------------------------------------------------------------------------------


class _Plan:
    """The launch for one combination of shapes, dtypes, device and other arguments."""

    __slots__ = ("kept_shape", "launch", "shape")

    def __init__(self, call: _Call) -> None:
        from sdfastgn.kernels.channel_norm import kernels  # needs Triton
        from sdfastgn.kernels.channel_norm.plans import norm_constants

        x = call.x
        N, C, T, H, W = x.shape
        self.shape = _padded_shape(call)
        self.kept_shape = (N, C, call.keep, H, W)
        rows = math.prod(self.shape) // C
        config = rows_config(rows, C, x.itemsize, vector_width(x.itemsize, C), gpu.num_sms(x.device))
        self.launch = Launch(
            kernels._frames_kernel, config.programs, config.num_warps,
            pdl=gpu.has_programmatic_launch(x.device),
            rows=rows, frames=T, height=H, width=W, front=call.front, cached=call.cached, keep=call.keep,
            pad_h=call.pad_h, pad_w=call.pad_w, scale=call.scale, eps=call.eps, C=C, NORM=call.has_norm,
            BORDER=bool(call.pad_h or call.pad_w), REPLICATE=call.mode == "replicate",
            **norm_constants(call, config),
        )  # fmt: skip

    def run(self, call: _Call) -> tuple[Tensor, Tensor | None]:
        x = call.x
        y = empty_laid_out(x, self.shape, channels_last=True)
        kept = empty_laid_out(x, self.kept_shape, channels_last=True) if call.keep else None
        self.launch.run(x, call.shift, call.weight, call.bias, call.cache, y, kept)
        return y, kept


def _padded_shape(call: _Call) -> tuple[int, ...]:
    N, C, T, H, W = call.x.shape
    return N, C, call.front + T, H + 2 * call.pad_h, W + 2 * call.pad_w


def _has_kernel(call: _Call) -> bool:
    C = call.x.shape[1]
    return call.x.numel() > 0 and fits(C) and math.prod(_padded_shape(call)) // C <= _MAX_ROWS


_plans = Plans(_Call, _Plan)

# --- public function ------------------------------------------------------------------------------

_NAME = f"{__name__}.pad_frames"


def pad_frames(
    x: Tensor,
    cache: Tensor | None = None,
    *,
    front: int = 0,
    border: tuple[int, int] = (0, 0),
    mode: str = "zeros",
    keep: int = 0,
    shift: Tensor | None = None,
    norm: Norm | None = None,
) -> tuple[Tensor, Tensor | None]:
    """``norm(x + shift)`` behind the frames of ``cache`` and within borders, in one launch: what a causal
    convolution with padding 0 reads.

    Args:
        x: (N, C, T, H, W).
        cache: (N, C, T', H, W) with T' up to ``front``, with the dtype and on the device of x: the frames
            before x, as they are to be read. None: there are none.
        front: frames before those of x.
        border: rows above and below each frame, and columns left and right of it.
        mode: what stands in the frames before the cache and in borders: "zeros", or "replicate", the
            nearest element that there is.
        keep: frames of ``kept``, up to ``front`` + T.
        shift: (C,) or None, added to x first: the bias of the convolution that made x.
        norm: the ``channel_norm`` of x + shift, with its activation. None: x + shift as it is.

    Returns:
        (y, kept). y is (N, C, front + T, H + 2 border[0], W + 2 border[1]). kept is (N, C, keep, H, W), the
        last frames of y without borders, in memory of its own; None if ``keep`` is 0.

    Dtypes: x fp16, bf16 or fp32 (fp64 runs in plain PyTorch); shift and the operands of norm any of
        these. Both results have the dtype of x.
    Layout: both results are channels-last. An x or cache that is not is copied first.
    Grad: in plain PyTorch, as are the transforms of torch.func and forward-mode AD.
    Raises:
        TypeError: a tensor is not dense, or none of these dtypes, or the dtypes of x and cache differ.
        ValueError: a shape, a device, a size or a name does not fit.

    Source: torch.nn.functional.pad.
    """
    call = _Call(x, cache, shift, *(norm or Norm()), norm is not None, front, *border, mode, keep)
    if dispatch.is_plain_inference(x, call):
        try:
            # Invalid arguments never have a plan, so only calls of a new kind are checked.
            plan = _plans.made.get(_plans.key(call, _plans.tensors(call)))
            if plan is None:
                _check(_NAME, call)
                if _has_kernel(call):
                    plan = _plans.of(call)
            if plan is not None:
                return plan.run(call)
        except dispatch.KernelError:
            return reference_pad_frames(
                x, cache, front=front, border=border, mode=mode, keep=keep, shift=shift, norm=norm
            )
        # A number for a tensor; a tensor without strides or memory.
        except (AttributeError, RuntimeError):
            _check(_NAME, call)
            raise
    _check(_NAME, call)
    return reference_pad_frames(
        x, cache, front=front, border=border, mode=mode, keep=keep, shift=shift, norm=norm
    )


def _check_sizes(name: str, call: _Call) -> None:
    x, cache = call.x, call.cache
    if x.dim() != 5:
        raise ValueError(f"{name}: x must be (N, C, T, H, W), got shape {tuple(x.shape)}")
    for label in ("front", "pad_h", "pad_w", "keep"):
        as_size(name, "border" if label.startswith("pad") else label, getattr(call, label))
    if cache is not None:
        check_input(name, "cache", cache)
        wanted = (*x.shape[:2], cache.shape[2] if cache.dim() == 5 else "T'", *x.shape[3:])
        if tuple(cache.shape) != wanted or cache.shape[2] > call.front:
            raise ValueError(
                f"{name}: cache must have shape {wanted} with at most front={call.front} frames, "
                f"got {tuple(cache.shape)}"
            )
        check_device(name, "cache", cache, x)
    if call.keep > call.front + x.shape[2]:
        raise ValueError(f"{name}: keep={call.keep} must be at most front + T, {call.front + x.shape[2]}")
    if call.mode == "replicate" and 0 in x.shape[2:]:
        raise ValueError(f"{name}: mode 'replicate' needs elements, x has shape {tuple(x.shape)}")


_check = checks_of(_Call, _check_sizes)
