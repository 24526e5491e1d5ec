"""The launch of ``rotate``, and the memory for its result."""

from __future__ import annotations

import math

from torch import Tensor

from sdfastgn.kernels.common import gpu
from sdfastgn.kernels.common.launch import Launch
from sdfastgn.kernels.common.sizes import ceil_div, next_power_of_2, vector_width
from sdfastgn.kernels.rotate import kernels
from sdfastgn.kernels.rotate.op import RotateCall

# Number of elements of a program. With four warps and 16-bit elements, each lane makes two loads of 16 bytes.
_ELEMENTS = 2048
# Number of warps of a program, except for long rows.
_WARPS = 4
# Maximum number of elements of a row for each warp. With twice as many, registers did not suffice.
_MOST_OF_A_WARP = 512


class RotatePlan:
    """The launch of ``rotate`` for calls with equal shapes, strides, dtypes and device."""

    __slots__ = ("launch", "shape", "strides")

    def __init__(self, call: RotateCall) -> None:
        x, out = call.x, call.out
        _, B, C, D = self.shape = tuple(x.shape)
        self.strides = (B * C * D, C * D, D, 1)
        rows = math.prod(self.shape[:3])
        tables = [t for t in (call.cos, call.sin) if t is not None]
        steps = [_strides(t) for t in tables] + [(0, 0, 0, 1)] * (2 - len(tables))
        strides = {"x": _strides(x), "y": self.strides if out is None else _strides(out)}
        strides |= {"cos": steps[0], "sin": steps[1]}
        # The order in which the kernel goes through the axes of x. Rows of x that use the same row of cos and
        # sin are processed one after another, so that this row is read from memory once. Usually such rows
        # are the heads of a token. If tokens have one head, they are the samples of the batch.
        order = (1, 2, 0) if tables and C == 1 and all(len(t) == 1 for t in tables) else (0, 1, 2)
        vector = vector_width(x.itemsize, D, *strides["x"][:3], *strides["y"][:3])
        widest = max((t.itemsize for t in tables), default=x.itemsize)
        table_vector = vector_width(widest, *steps[0][:3], *steps[1][:3])
        units = {"x": vector, "y": vector, "cos": table_vector, "sin": table_vector}
        numbers = {
            f"{name}_{axis}": strides[name][i] // unit
            for name, unit in units.items()
            for i, axis in zip(order, "abc", strict=True)
        }
        block_d = max(2, next_power_of_2(D))
        block_r = max(1, min(_ELEMENTS // block_d, next_power_of_2(rows)))
        self.launch = Launch(
            kernels._rotate_kernel, ceil_div(rows, block_r), max(_WARPS, block_d // _MOST_OF_A_WARP),
            pdl=gpu.has_programmatic_launch(x.device),
            rows=rows, B=self.shape[order[1]], C=self.shape[order[2]], eps=call.eps,
            **numbers,
            D=D, VECTOR=vector, TABLE_VECTOR=table_vector,
            KIND="layer" if call.layer else "none" if call.weight is None else "rms",
            HALVES=call.halves, SHARED=D // tables[0].shape[-1] if tables else 1,
            COS_STEP=steps[0][3], SIN_STEP=steps[1][3],
            BLOCK_R=block_r, BLOCK_D=block_d,
        )  # fmt: skip

    def run(self, call: RotateCall) -> Tensor:
        """Launches the kernel, and returns the rotated rows."""
        x, out = call.x, call.out
        y = x.new_empty_strided(self.shape, self.strides) if out is None else out
        self.launch.run(x, call.cos, call.sin, call.weight, call.bias, y)
        return y


def _strides(t: Tensor) -> tuple[int, ...]:
    """The strides of ``t``, with 0 in place of the stride of each axis that has one element."""
    return tuple(0 if size == 1 else stride for size, stride in zip(t.shape, t.stride(), strict=True))
