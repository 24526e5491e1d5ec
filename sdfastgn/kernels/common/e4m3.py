"""Quantization to E4M3, an 8-bit float dtype, with one scale for a whole tensor.

A *quantizer* is an fp32 tensor of ``NUMBERS`` numbers. The constant ``SCALE`` and the next ones are the
indices of these numbers. A kernel that gets a quantizer writes y / scale in E4M3 instead of its result y. So
y is about scale times what was written.

The scale was learned from other tensors. If a finite value of y is beyond the range of E4M3, y is written
again with a larger scale: the learned one times the smallest power of two with which all finite values are in
the range. The factor is called the *growth*. Then all but the smallest values are rounded as with the learned
scale. NaN and infinities become NaN.

On a GPU two launches do this. The first one writes with the learned scale. It counts the values beyond the
range, and finds the largest of them. The second launch is called the *retry*. If nothing was beyond the range
it ends at once. Otherwise it writes y again. It also stores the scale that was used. All these numbers are in
the memory of the GPU. So every replay of a CUDA graph is right, and the CPU waits for nothing.

Two calls must not use the same quantizer at the same time.

The Triton functions for kernels are in ``common/e4m3_kernels.py``.

Source: Micikevicius et al., "FP8 Formats for Deep Learning", 2022.
"""

from __future__ import annotations

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
# The largest number of E4M3.
LARGEST = 448.0
# Indices of the numbers in a quantizer. It is the fp32 tensor with the scales and counts of a tensor that a
# kernel writes in E4M3. If values exceed a scale learned in earlier calls, a second launch, the retry, writes
# them again with a larger one:
# - the scale with which the tensor was written last. Matrix products read it from memory, so it comes first,
#   at an address that is a multiple of 16;
# - the learned scale, and 1 / the learned scale;
# - of the present call: the number of values beyond the range with the learned scale, including NaN and
#   infinities; the largest magnitude of the finite ones among them, divided by the learned scale; and the
#   number of programs of the retry that have written values. Between two calls these three numbers are 0;
# - of all calls so far: the number of values beyond the range, including NaN and infinities, and the largest
#   magnitude of the finite ones among them, divided by the learned scale.
SCALE, LEARNED, INVERSE, BEYOND, AMAX, RETRIED, TOTAL, MOST = range(8)
NUMBERS = 8
# Maximum number of programs of a retry, the second launch of a kernel. Most retries end at once, and more
# programs would take longer to start. This is about the number of multiprocessors of a large GPU.
RETRY_PROGRAMS = 128


def launches_of(programs: int) -> tuple[tuple[int, bool], tuple[int, bool]]:
    """Returns (number of programs, True for the retry) for each of the two launches of a kernel.

    The first launch quantizes y. The second one, the retry, does this again if values were beyond the range
    of E4M3. ``programs``: number of tiles of y.
    """
    return (programs, False), (min(programs, RETRY_PROGRAMS), True)


def quantized(y: Tensor, quantizer: Tensor) -> Tensor:
    """Returns y / scale in E4M3, for y of any shape and float dtype.

    ``quantizer``: the fp32 tensor of ``NUMBERS`` numbers that the module's docstring explains. The scale that
    was used is written into it, and its totals of values beyond the range of E4M3 are updated.
    """
    u = y.float() * quantizer[INVERSE]
    is_beyond = ~(u.abs() <= LARGEST)
    largest = torch.where(is_beyond & u.isfinite(), u.abs(), 0).amax()
    growth = _power_of_2(largest / LARGEST)
    quantizer[SCALE] = quantizer[LEARNED] * growth
    quantizer[TOTAL] += is_beyond.sum()
    quantizer[MOST] = quantizer[MOST].fmax(largest)
    grown = torch.where(u.isfinite(), u / growth, torch.nan).clamp(-LARGEST, LARGEST)
    return grown.to(E4M3).contiguous()


def _power_of_2(ratio: Tensor) -> Tensor:
    """Returns the smallest power of two that is at least ``ratio``, a 0-d fp32 tensor, and at least 1."""
    bits = ratio.clamp(min=1).view(torch.int32)
    return ((bits + 0x7FFFFF) & -0x800000).view(torch.float32)
