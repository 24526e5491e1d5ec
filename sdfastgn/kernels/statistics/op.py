"""Ops that compute channel statistics of a GroupNorm's input x.

One op reads x. Two ops also compute x itself, as a sum or a concatenation. Their kernel computes x and the
statistics in one pass.

The *producer* of x is the kernel that writes x. It has the values of x in registers, and computes the
statistics from these registers. ``sdfastgn.group_norm(x, ..., statistics=statistics)`` then reads x once
instead of twice.

Statistics of x (N, C, *spatial) are fp32 (2, N, P, C): the mean and the sum of squared deviations (M2) of
each channel over P chunks of ``ceil(HW / P)`` positions, where HW is the product of the spatial sizes. The
last chunks may be shorter or empty. The same statistics serve norms with different numbers of groups.

The ops are ``sdfastgn::channel_statistics``, ``sdfastgn::add_with_statistics`` and
``sdfastgn::cat_with_statistics``.

Source: Jung et al., "Restructuring batch normalization to accelerate CNN training", 2019, for the idea that
the producer of x computes the statistics. The formulas are in ``statistics/kernels.py``.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sdfastgn.kernels.common import dispatch, gpu
from sdfastgn.kernels.common.checks import as_float, check_device, check_floating
from sdfastgn.kernels.common.layout import (
    dense,
    dense_is_channels_last,
    empty_dense_like,
    empty_laid_out,
    is_channels_last,
    laid_out,
    like_dense,
)
from sdfastgn.kernels.common.op import Op
from sdfastgn.kernels.common.plan_cache import PlanCache
from sdfastgn.kernels.statistics.config import statistics_config
from sdfastgn.kernels.statistics.plain import reference_channel_statistics


def _chunks(x: Tensor, *, producer: bool = False) -> int:
    """Returns P, the number of chunks of positions for which statistics of ``x`` are computed.

    ``producer``: True if the kernel that writes x computes the statistics, False if another kernel reads x to
    compute them.
    """
    N, C, HW = int(x.shape[0]), int(x.shape[1]), int(math.prod(x.shape[2:]))
    if N * C * HW == 0:
        return 1
    return statistics_config(
        N, C, HW, dense_is_channels_last(x), gpu.num_sms(x.device), kind="write" if producer else "read"
    ).chunks


def _statistics_of(x: Tensor) -> Tensor:
    """Computes ``channel_statistics(x)`` for a valid ``x``, by the kernel or in plain PyTorch."""
    if dispatch.runs_in_triton(x) and x.numel() > 0:
        try:
            return statistics_kernel(dense(x))
        except dispatch.KernelError:
            pass
    return _reference_statistics(x, _chunks(x))


def _reference_statistics(x: Tensor, chunks: int) -> Tensor:
    """Computes the statistics of ``x`` in plain PyTorch, in fp32 for every dtype. Zeros if x is empty."""
    if x.numel() == 0:
        return torch.zeros((2, x.shape[0], chunks, x.shape[1]), dtype=torch.float32, device=x.device)
    return reference_channel_statistics(x, chunks).float()


# Cache of the kernel's launches (``StatisticsLaunch``). The key has a call's operation, shapes, strides,
# dtypes and device.
_launches: PlanCache[Any] = PlanCache()


def _new_launch(*args: Any, **options: Any) -> Any:
    from sdfastgn.kernels.statistics.kernels import StatisticsLaunch  # imported late: kernels.py needs Triton

    return StatisticsLaunch(*args, **options)


@dispatch.kernels_of("channel_statistics")
def statistics_kernel(x: Tensor) -> Tensor:
    """Computes ``channel_statistics`` by the kernel. ``x`` must be dense and not empty."""
    key = ("read", x.shape, x.stride(), x.dtype, x.device)
    launch = _launches.get(key)
    if launch is None:
        launch = _launches[key] = _new_launch(x, is_channels_last(x))
    statistics = x.new_empty_strided(launch.shape, launch.strides, dtype=torch.float32)
    launch(x, statistics)
    return statistics


@dispatch.kernels_of("add_with_statistics")
def add_kernel(
    x: Tensor,
    residual: Tensor | None,
    bias: Tensor | None,
    scale: float,
    *,
    emits: bool = True,
    out: Tensor | None = None,
    factors: Tensor | None = None,
    activation: str = "identity",
) -> tuple[Tensor, Any]:
    """Computes ``add_with_statistics`` by the kernel. The arguments must be valid and not empty.

    Args:
        residual: may be None, unlike in ``add_with_statistics``. Then only a bias is added.
        bias: (C,), (N, C) for a separate bias of each sample, or None.
        emits: True to compute the statistics. If False, None is returned in place of the statistics.
        out: memory for the sum, instead of new memory: a dense tensor with the strides of x, or x itself.
        factors: contiguous fp32 (2, N) or None. With factors the sum is
            ``factors[0] * residual + factors[1] * (x + bias)``, and ``scale`` has no effect.
        activation: name of an activation that is applied to the sum before rounding. The statistics are those
            of the activation's result.
    """
    strides = (
        factors is None,
        None if residual is None else residual.stride(),
        None if bias is None else (bias.dtype, bias.stride()),
    )
    key = ("add", x.shape, x.stride(), x.dtype, x.device, scale, emits, strides, activation)
    launch = _launches.get(key)
    more: dict[str, Any]
    if launch is None:
        whole = dense(x)
        like = residual
        if residual is not None and residual.stride() != whole.stride():
            like = torch.empty_like(whole).copy_(residual)
        has_gaps = bias is not None and not bias.is_contiguous()
        if whole is not x or like is not residual or has_gaps:
            bias = None if bias is None else bias.contiguous()
            more = {"emits": emits, "out": out, "factors": factors, "activation": activation}
            return add_kernel(whole, like, bias, scale, **more)
        more = {"scale": scale, "bias_dim": 0 if bias is None else bias.dim(), "activation": activation}
        launch = _new_launch(x, is_channels_last(x), producer=True, **more)
        _launches[key] = launch
    y = torch.empty_like(x) if out is None else out
    statistics = x.new_empty_strided(launch.shape, launch.strides, dtype=torch.float32) if emits else None
    launch(x, statistics, residual=residual, bias=bias, factors=factors, y=y)
    return y, statistics


@dispatch.kernels_of("cat_with_statistics")
def cat_kernel(a: Tensor, b: Tensor, *, emits: bool = True) -> tuple[Tensor, Any]:
    """Computes ``cat_with_statistics`` by the kernel. The arguments must be valid, channels-last, not empty.

    ``emits``: True to compute the statistics. If False, None is returned in place of the statistics.
    """
    key = ("cat", a.shape, b.shape, a.dtype, a.device, emits)
    launch = _launches.get(key)
    if launch is None:
        launch = _launches[key] = _new_launch(a, True, tail=b.shape[1], producer=True)
    N, C, *spatial = a.shape
    y = empty_laid_out(a, (N, C + b.shape[1], *spatial), True)
    statistics = a.new_empty_strided(launch.shape, launch.strides, dtype=torch.float32) if emits else None
    launch(a, statistics, tail=b, y=y)
    return y, statistics


# --- ops --------------------------------------------------------------------------------------------


class _Read(NamedTuple):
    """The arguments of the op ``sdfastgn::channel_statistics``."""

    x: Tensor


class _Add(NamedTuple):
    """The arguments of the op ``sdfastgn::add_with_statistics``."""

    x: Tensor
    residual: Tensor
    bias: Tensor | None
    scale: float


class _Cat(NamedTuple):
    """The arguments of the op ``sdfastgn::cat_with_statistics``."""

    a: Tensor
    b: Tensor


def _add(call: _Add) -> tuple[Tensor, Tensor]:
    if dispatch.runs_in_triton(call.x) and call.x.numel() > 0:
        try:
            return add_kernel(*call)
        except dispatch.KernelError:
            pass
    return _plain_add(call)


def _plain_add(call: _Add) -> tuple[Tensor, Tensor]:
    x, residual, bias, scale = call
    dtype = torch.promote_types(x.dtype, torch.float32)
    total = x.to(dtype) + residual
    if bias is not None:
        total = total + bias.to(dtype).view(-1, *[1] * (x.dim() - 2))
    y = like_dense((total if scale == 1 else total * scale).to(x.dtype), x)
    return y, _reference_statistics(y.detach(), _chunks(y, producer=True))


def _cat(call: _Cat) -> tuple[Tensor, Tensor]:
    if _in_one_pass(call) and dispatch.runs_in_triton(call.a):
        try:
            return cat_kernel(*call)
        except dispatch.KernelError:
            pass
    y = torch.cat(call, dim=1, out=_empty_cat(*call))
    return y, _cat_statistics(call, y)


def _plain_cat(call: _Cat) -> tuple[Tensor, Tensor]:
    y = laid_out(torch.cat(call, dim=1), is_channels_last(call.a))
    return y, _cat_statistics(call, y.detach())


def _cat_statistics(call: _Cat, y: Tensor) -> Tensor:
    """Computes the statistics of the concatenation ``y``.

    The number of chunks is the one that ``_fake_cat``, the op's fake implementation, promises.
    """
    if _in_one_pass(call):
        return _reference_statistics(y, _chunks(y, producer=True))
    return _statistics_of(y)


def _in_one_pass(call: _Cat) -> bool:
    """True if one kernel can concatenate the tensors and compute the statistics of the result.

    Both tensors must be channels-last and not empty.
    """
    return all(t.numel() > 0 and is_channels_last(t) for t in call)


def _empty_cat(a: Tensor, b: Tensor) -> Tensor:
    """Returns uninitialized memory for ``torch.cat((a, b), 1)``, in the layout of ``a``."""
    return empty_laid_out(a, (a.shape[0], a.shape[1] + b.shape[1], *a.shape[2:]), is_channels_last(a))


def _fake_statistics(x: Tensor, *, producer: bool = False) -> Tensor:
    return x.new_empty((2, x.shape[0], _chunks(x, producer=producer), x.shape[1]), dtype=torch.float32)


def _fake_add(call: _Add) -> tuple[Tensor, Tensor]:
    return empty_dense_like(call.x, call.x.dtype), _fake_statistics(call.x, producer=True)


def _fake_cat(call: _Cat) -> tuple[Tensor, Tensor]:
    y = _empty_cat(*call)
    return y, _fake_statistics(y, producer=_in_one_pass(call))


def _save_add(ctx: Any, call: _Add, results: tuple[Tensor, Tensor]) -> None:
    ctx.scale, ctx.bias_dtype = call.scale, None if call.bias is None else call.bias.dtype
    ctx.mark_non_differentiable(results[1])


def _add_backward(ctx: Any, needs: Any, dy: Tensor, _: Any) -> dict[str, Tensor | None]:
    dx = dy * ctx.scale
    dbias = None
    if needs.bias:
        wide = torch.promote_types(dy.dtype, torch.float32)
        dbias = (dy.sum([0, *range(2, dy.dim())], dtype=wide) * ctx.scale).to(ctx.bias_dtype)
    return {"x": dx, "residual": dx, "bias": dbias}


def _save_cat(ctx: Any, call: _Cat, results: tuple[Tensor, Tensor]) -> None:
    ctx.channels = [t.shape[1] for t in call]
    ctx.mark_non_differentiable(results[1])


def _cat_backward(ctx: Any, needs: Any, dy: Tensor, _: Any) -> dict[str, Tensor | None]:
    return dict(zip(("a", "b"), dy.split(ctx.channels, dim=1), strict=True))


_CHANNEL_STATISTICS = Op(
    "channel_statistics",
    _Read,
    "Tensor",
    run=lambda call: _statistics_of(call.x),
    fake=lambda call: _fake_statistics(call.x),
)
_ADD_WITH_STATISTICS = Op(
    "add_with_statistics",
    _Add,
    "(Tensor, Tensor)",
    run=_add,
    fake=_fake_add,
    save=_save_add,
    backward=_add_backward,
)
_CAT_WITH_STATISTICS = Op(
    "cat_with_statistics",
    _Cat,
    "(Tensor, Tensor)",
    run=_cat,
    fake=_fake_cat,
    save=_save_cat,
    backward=_cat_backward,
)


# --- public functions -----------------------------------------------------------------------------


def channel_statistics(x: Tensor) -> Tensor:
    """Computes the statistics of ``x`` for ``sdfastgn.group_norm(x, ..., statistics=...)``.

    Args:
        x: (N, C, *spatial), at least rank 3.

    Returns:
        (2, N, P, C) fp32: the mean and the sum of squared deviations (M2) of each channel over P chunks of
        ceil(HW / P) positions, where HW is the product of the spatial sizes. P depends on the sizes, the
        layout and the GPU.

    Dtypes: x fp16, bf16, fp32 or fp64.
    Layout: any. A tensor that is neither channels-last nor channels-first is copied first.
    Grad: none. ``group_norm`` computes the whole gradient of x, as if it had computed the statistics itself.
    Raises:
        TypeError: x is not a strided tensor, or has another dtype.
        ValueError: x has rank 2 or less.
        NotImplementedError: within torch.func transforms or forward-mode AD.

    Source: Chan, Golub and LeVeque, 1979.
    """
    name = _CHANNEL_STATISTICS.name
    _check_input(name, "x", x)
    if dispatch.is_plain_inference(x, ()):
        return _statistics_of(x)
    _refuse_transforms(name)
    if not dispatch.needs_op(x):
        return _statistics_of(x.detach())
    return _CHANNEL_STATISTICS.through_dispatcher(_Read(x.detach()))


def add_with_statistics(
    x: Tensor, residual: Tensor, bias: Tensor | None = None, *, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Computes (x + residual + bias) * scale and its statistics, in one pass: the end of a ResNet block.

    Args:
        x: (N, C, *spatial), at least rank 3, fp16, bf16, fp32 or fp64.
        residual: a tensor with the shape, dtype and device of x.
        bias: (C,), fp16, bf16, fp32 or fp64, or None. Usually the bias of the convolution that computed x.
        scale: factor of the sum. In diffusers it is 1 / output_scale_factor.

    Returns:
        (sum, statistics). The sum is computed in fp32 (fp64 for fp64 input) and rounded once to the dtype of
        x. The statistics are (2, N, P, C) fp32, as in ``channel_statistics``.

    Layout: any. The sum has the strides of x if x is channels-first or channels-last. Else it is
        channels-last if the channels of x have stride 1, and channels-first otherwise.
    Grad: x, residual and bias have gradients. Nothing is differentiated through the statistics.
    Raises:
        TypeError: a tensor is not strided or has another dtype, x and residual have different dtypes, or
            scale is not a number.
        ValueError: a shape or a device does not fit, or x has rank 2 or less.
        NotImplementedError: within torch.func transforms or forward-mode AD.
    """
    name = _ADD_WITH_STATISTICS.name
    _check_input(name, "x", x)
    _check_like(name, x, "residual", residual, tuple(x.shape))
    if bias is not None:
        check_floating(name, "bias", bias)
        if tuple(bias.shape) != (x.shape[1],) or bias.device != x.device:
            raise ValueError(
                f"{name}: bias must be ({x.shape[1]},) on {x.device}, "
                f"got {tuple(bias.shape)} on {bias.device}"
            )
    if type(scale) is not float:
        scale = as_float(name, "scale", scale)
    call = _Add(x, residual, bias, scale)
    if dispatch.is_plain_inference(x, call):
        return _add(call)
    _refuse_transforms(name)
    if not dispatch.needs_op(x):
        return _plain_add(call)
    return _ADD_WITH_STATISTICS.through_dispatcher(call)


def cat_with_statistics(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Computes torch.cat((a, b), dim=1) and its statistics, in one pass: the skip connection of an up block.

    Args:
        a: (N, Ca, *spatial), at least rank 3, fp16, bf16, fp32 or fp64.
        b: (N, Cb, *spatial), in the dtype and on the device of a.

    Returns:
        (concatenation, statistics). The concatenation is (N, Ca + Cb, *spatial), channels-last if a is, else
        channels-first. The statistics are (2, N, P, Ca + Cb) fp32, as in ``channel_statistics``.

    Layout: any. If a and b are channels-last and not empty, one kernel computes both results. Else torch.cat
        runs first, and then the statistics are computed.
    Grad: a and b have gradients. Nothing is differentiated through the statistics.
    Raises:
        TypeError: a tensor is not strided or has another dtype, or the dtypes differ.
        ValueError: a shape or a device does not fit, or a has rank 2 or less.
        NotImplementedError: within torch.func transforms or forward-mode AD.
    """
    name = _CAT_WITH_STATISTICS.name
    _check_input(name, "a", a)
    _check_input(name, "b", b)
    _check_like(name, a, "b", b, (a.shape[0], b.shape[1], *a.shape[2:]))
    call = _Cat(a, b)
    if dispatch.is_plain_inference(a, call):
        return _cat(call)
    _refuse_transforms(name)
    if not dispatch.needs_op(a):
        return _plain_cat(call)
    return _CAT_WITH_STATISTICS.through_dispatcher(call)


def _refuse_transforms(name: str) -> None:
    """Raises NotImplementedError in torch.func transforms and forward-mode AD.

    Otherwise PyTorch would silently drop the tangents of forward-mode AD.
    """
    if not torch.compiler.is_compiling() and dispatch.is_transformed():
        raise NotImplementedError(f"{name}: torch.func transforms and forward-mode AD are not supported")


def _check_input(name: str, label: str, t: Any) -> None:
    check_floating(name, label, t)
    if t.dim() < 3:
        raise ValueError(f"{name}: {label} must be (N, C, *spatial), got shape {tuple(t.shape)}")


def _check_like(name: str, x: Tensor, label: str, t: Any, shape: tuple[int, ...]) -> None:
    _check_input(name, label, t)
    if tuple(t.shape) != shape:
        raise ValueError(f"{name}: {label} must have shape {shape}, got {tuple(t.shape)}")
    if t.dtype != x.dtype:
        raise TypeError(f"{name}: {label} must have the dtype {x.dtype}, got {t.dtype}")
    check_device(name, label, t, x, "the first tensor")
