"""Nearest-neighbor upsampling of images by two.

The ops are ``sdfastgn::upsample_nearest_2x`` and ``sdfastgn::upsample_nearest_2x_backward``.

Formula, for x (N, C, H, W) and y (N, C, 2H, 2W):

    y[n, c, i, j] = x[n, c, i // 2, j // 2]
    dx[n, c, h, w] = sum of dy[n, c, 2h + a, 2w + b] over a, b in {0, 1}

Channels-last tensors in fp16, bf16 or fp32 on a GPU run in the kernels of ``nearest_kernels.py``, all others
in PyTorch. PyTorch's own channels-last kernel for GPUs is slower, because it writes element by element.

Numerics: the forward copies values. The backward sums in fp32, or in fp64 for fp64 input, and rounds once.

Source: torch.nn.functional.interpolate.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from sdfastgn.kernels.common import dispatch
from sdfastgn.kernels.common.checks import check_floating
from sdfastgn.kernels.common.layout import dense, dense_is_channels_last, empty_laid_out, laid_out
from sdfastgn.kernels.common.op import Op
from sdfastgn.kernels.common.plan_cache import PlanCache


def reference_upsample_nearest_2x(x: Tensor) -> Tensor:
    """Computes ``upsample_nearest_2x`` in plain PyTorch, for calls that the kernel cannot run."""
    # On a GPU, x is first made channels-first. PyTorch's channels-last kernel fails for 2^31 elements or
    # more, and in older versions of PyTorch for batches of 64.
    y = torch.ops.aten.upsample_nearest2d.vec(x if x.is_cpu else x.contiguous(), None, [2.0, 2.0])
    return laid_out(y.to(x.dtype), dense_is_channels_last(x))


def reference_upsample_nearest_2x_grad(dy: Tensor) -> Tensor:
    """Computes dx (N, C, H, W) from dy (N, C, 2H, 2W) in plain PyTorch.

    dx is the gradient of x, dy the gradient of the upsampled image. Sums are fp32, or fp64 for fp64 input.
    This function runs for calls that the kernel cannot run, and in tests.
    """
    N, C, H, W = dy.shape
    wide = torch.promote_types(dy.dtype, torch.float32)
    return dy.reshape(N, C, H // 2, 2, W // 2, 2).sum((3, 5), dtype=wide).to(dy.dtype)


def empty_image(like: Tensor, C: int, H: int, W: int) -> Tensor:
    """Returns an uninitialized (N, C, H, W) tensor. N, dtype, device and layout come from ``like``.

    If ``like`` is channels-last or channels-first, the result has the same layout. If ``like`` has gaps in
    memory, the result is channels-last if the channels of ``like`` have stride 1, else channels-first.
    """
    return empty_laid_out(like, (like.shape[0], C, H, W), dense_is_channels_last(like))


# --- ops --------------------------------------------------------------------------------------------


class _Upsample(NamedTuple):
    """The arguments of the op ``sdfastgn::upsample_nearest_2x``."""

    x: Tensor


class _Grad(NamedTuple):
    """The arguments of the op ``sdfastgn::upsample_nearest_2x_backward``."""

    dy: Tensor


def _runs_kernel(x: Tensor) -> bool:
    """True if a kernel runs for ``x``.

    Kernels must support the device and the dtype of ``x``. And ``x`` must be channels-last, or have gaps in
    memory and channels with stride 1. A copy of x without gaps is then channels-last.
    """
    return dispatch.runs_in_triton(x) and x.numel() > 0 and dense_is_channels_last(x)


# Cache of kernel launches. The key is True for a backward, then shape, dtype and device of the tensor with
# the smaller images.
_launches: PlanCache[Any] = PlanCache()


@dispatch.kernels_of("upsample_nearest_2x")
def _by_kernel(x: Tensor, y: Tensor, *, backward: bool) -> Tensor:
    """Launches the kernel of the forward or backward, which reads ``x`` and fills ``y``. Returns ``y``."""
    small = y if backward else x  # x or y: the tensor with the smaller images
    key = (backward, small.shape, small.dtype, small.device)
    found = _launches.get(key)
    if found is None:
        # ``nearest_kernels.py`` is imported only here, because it needs Triton.
        from sdfastgn.kernels.upsample.nearest_kernels import upsample_launch

        found = _launches[key] = upsample_launch(small, backward=backward)
    found.run(dense(x), y)
    return y


def _upsample_fake(call: _Upsample) -> Tensor:
    x = call.x
    return empty_image(x, x.shape[1], 2 * x.shape[2], 2 * x.shape[3])


def _upsample(call: _Upsample) -> Tensor:
    x, y = call.x, _upsample_fake(call)
    if _runs_kernel(x):
        try:
            return _by_kernel(x, y, backward=False)
        except dispatch.KernelError:
            pass
    return y.copy_(reference_upsample_nearest_2x(x)) if x.numel() else y


def _grad_fake(call: _Grad) -> Tensor:
    dy = call.dy
    return empty_image(dy, dy.shape[1], dy.shape[2] // 2, dy.shape[3] // 2)


def _grad(call: _Grad) -> Tensor:
    dy, dx = call.dy, _grad_fake(call)
    if _runs_kernel(dy):
        try:
            return _by_kernel(dy, dx, backward=True)
        except dispatch.KernelError:
            pass
    return dx.copy_(reference_upsample_nearest_2x_grad(dy))


def _backward(ctx: Any, needs: Any, dy: Tensor) -> dict[str, Tensor | None]:
    return {"x": _UPSAMPLE_BACKWARD.through_dispatcher(_Grad(dy))}


def _double_backward(ctx: Any, needs: Any, ddx: Tensor) -> dict[str, Tensor | None]:
    return {"dy": _UPSAMPLE.through_dispatcher(_Upsample(ddx))}


_UPSAMPLE = Op(
    "upsample_nearest_2x", _Upsample, "Tensor", run=_upsample, fake=_upsample_fake, backward=_backward
)
_UPSAMPLE_BACKWARD = Op(
    "upsample_nearest_2x_backward", _Grad, "Tensor", run=_grad, fake=_grad_fake, backward=_double_backward
)


# --- the public function --------------------------------------------------------------------------

_NAME = f"{__name__}.upsample_nearest_2x"


def upsample_nearest_2x(x: Tensor) -> Tensor:
    """Nearest-neighbor upsampling by two, which repeats each pixel four times.

    Args:
        x: (N, C, H, W).

    Shapes: the output is (N, C, 2H, 2W).
    Dtypes: x is fp16, bf16, fp32 or fp64. fp64 runs in plain PyTorch. The output has the dtype of x.
    Layout: the output is channels-last if x is, else channels-first. On a GPU a kernel runs for channels-last
        x, and PyTorch for channels-first x. If x has gaps in memory it is copied first: to channels-last if
        its channels have stride 1, else to channels-first.
    Grad: x has gradients, of any order. The transforms of torch.func and forward-mode AD run in plain
        PyTorch.
    Raises:
        TypeError: x is not a strided tensor, or has another dtype.
        ValueError: x does not have rank 4.

    Source: torch.nn.functional.interpolate(x, scale_factor=2, mode="nearest").
    """
    check_floating(_NAME, "x", x)
    if x.dim() != 4:
        raise ValueError(f"{_NAME}: x must be (N, C, H, W), got shape {tuple(x.shape)}")
    if dispatch.is_plain_inference(x, ()):
        return _upsample(_Upsample(x))
    if not dispatch.needs_op(x):
        return reference_upsample_nearest_2x(x)
    return _UPSAMPLE.through_dispatcher(_Upsample(x))
