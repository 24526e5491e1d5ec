"""The Triton kernel of ``fold_batch_norm``. Formula and launch: ``batch_norm/fold.py``."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["columns", "eps"])
def fold_kernel(
    weight_ptr, bias_ptr, scale_ptr, offset_ptr, mean_ptr, var_ptr, folded_ptr, shift_ptr, columns, eps,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """A program multiplies the weights of one output channel by BatchNorm's factor for that channel.

    These weights are a row of ``columns`` numbers. The program also computes the channel's new bias. bias,
    scale and offset may be None.

    Numerics: the kernel computes in fp64. It loads and stores by way of fp32, because Triton's interpreter
    cannot convert between bf16 and fp64.
    """
    row = tl.program_id(0)
    factor = 1.0 / tl.sqrt(tl.load(var_ptr + row).to(tl.float32).to(tl.float64) + eps)
    if scale_ptr is not None:
        factor *= tl.load(scale_ptr + row).to(tl.float32).to(tl.float64)
    shift = -tl.load(mean_ptr + row).to(tl.float32).to(tl.float64)
    if bias_ptr is not None:
        shift += tl.load(bias_ptr + row).to(tl.float32).to(tl.float64)
    shift *= factor
    if offset_ptr is not None:
        shift += tl.load(offset_ptr + row).to(tl.float32).to(tl.float64)
    tl.store(shift_ptr + row, shift.to(tl.float32).to(shift_ptr.dtype.element_ty))
    start = row.to(tl.int64) * columns
    for first in range(0, columns, BLOCK):
        column = first + tl.arange(0, BLOCK)
        weight = (
            tl.load(weight_ptr + start + column, mask=column < columns, other=0.0)
            .to(tl.float32)
            .to(tl.float64)
        )
        folded = (weight * factor).to(tl.float32).to(folded_ptr.dtype.element_ty)
        tl.store(folded_ptr + start + column, folded, mask=column < columns)
