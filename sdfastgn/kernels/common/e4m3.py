"""Quantization to E4M3, an 8-bit float dtype, with one scale for a whole tensor.

A *quantizer* is an fp32 tensor with the four numbers that ``SCALE`` and the next constants index. A kernel
that gets a quantizer writes y / scale in E4M3 instead of y. So y is about scale times what was written.
Values beyond the range of E4M3, and NaN, become plus or minus ``LARGEST``, and the quantizer counts them. The
numbers are in the memory of the GPU, so CUDA graphs read their present values.

The Triton function for kernels is in ``common/e4m3_kernels.py``.

Source: Micikevicius et al., "FP8 Formats for Deep Learning", 2022.
"""

from __future__ import annotations

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
# The largest number of E4M3.
LARGEST = 448.0
# Indices of a quantizer's numbers: the scale, 1 / scale, the number of values beyond the range so far, and
# the largest magnitude that was seen before the scale was chosen. Matrix products read the scale from memory,
# so it comes first, at an address that is a multiple of 16.
SCALE, INVERSE, BEYOND, AMAX = range(4)


def quantized(y: Tensor, quantizer: Tensor) -> Tensor:
    """Returns y / scale in E4M3, for y of any shape and float dtype. Counts values beyond the range."""
    u = y.float() * quantizer[INVERSE]
    quantizer[BEYOND] += (~(u.abs() <= LARGEST)).sum()
    # ``fmax`` ignores NaN, as the kernels do.
    return u.fmax(u.new_tensor(-LARGEST)).clamp(max=LARGEST).to(E4M3).contiguous()
