"""The launch of ``rotate``, and the memory for its result."""

from __future__ import annotations

import math

from torch import Tensor

from sdfastgn.kernels.common import gpu
from sdfastgn.kernels.common.launch import Launch
from sdfastgn.kernels.common.sizes import ceil_div, next_power_of_2, vector_width
from sdfastgn.kernels.rotate import kernels
from sdfastgn.kernels.rotate.op import RotateCall

# Number of elements of a program. With four warps, each lane has two 16-byte loads of 16-bit elements.
_ELEMENTS = 2048


class RotatePlan:
    """The launch for calls with equal shapes, strides, dtypes and device."""

    __slots__ = ("launch", "shape", "strides")

    def __init__(self, call: RotateCall) -> None:
        x, out = call.x, call.out
        _, B, C, D = self.shape = tuple(x.shape)
        self.strides = (B * C * D, C * D, D, 1)
        rows = math.prod(self.shape[:3])
        x_strides = _strides(x)[:3]
        y_strides = self.strides[:3] if out is None else _strides(out)[:3]
        vector = vector_width(x.itemsize, D, *x_strides, *y_strides)
        block_d = max(2, next_power_of_2(D))
        block_r = max(1, min(_ELEMENTS // block_d, next_power_of_2(rows)))
        numbers = {f"x_{axis}": stride // vector for axis, stride in zip("abc", x_strides, strict=True)}
        numbers |= {f"y_{axis}": stride // vector for axis, stride in zip("abc", y_strides, strict=True)}
        for name in ("cos", "sin"):
            table = getattr(call, name)
            strides = (0, 0, 0, 0) if table is None else _strides(table)
            numbers |= {f"{name}_{axis}": stride for axis, stride in zip("abcd", strides, strict=True)}
        self.launch = Launch(
            kernels._rotate_kernel, ceil_div(rows, block_r), 4,
            pdl=gpu.has_programmatic_launch(x.device),
            rows=rows, B=B, C=C, eps=call.eps, **numbers, D=D, VECTOR=vector,
            PAIRED=call.cos is not None and call.cos.shape[-1] < D, BLOCK_R=block_r, BLOCK_D=block_d,
        )  # fmt: skip

    def run(self, call: RotateCall) -> Tensor:
        """Launch the kernel, and return y."""
        x, cos, sin, weight, _, out = call
        y = x.new_empty_strided(self.shape, self.strides) if out is None else out
        self.launch.run(x, cos, sin, weight, y)
        return y


def _strides(t: Tensor) -> tuple[int, ...]:
    """The strides of ``t``, 0 along axes of one element, which are never moved along."""
    return tuple(0 if size == 1 else stride for size, stride in zip(t.shape, t.stride(), strict=True))
