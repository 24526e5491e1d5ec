"""The Triton function with which kernels quantize to E4M3. ``common/e4m3.py`` explains quantizers."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def start_of_e4m3():
    """Returns 0, but the compiler only knows that the result is a multiple of 8. Add it to a store's offsets.

    Then a thread stores at most 8 elements at once, as many as it has loaded as 16 bytes of fp16. Without
    this 0 a thread would store 16 elements, half of them loaded by another thread, and the threads would
    exchange them through shared memory.
    """
    return tl.program_id(0) // 1073741824 * 8


@triton.jit
def in_e4m3_range(y, mask, quantizer_ptr):
    """Returns y / scale, limited to the range of E4M3, in fp32. Counts values beyond the range, and NaN.

    ``mask``: True for the elements that count, or None if all do. ``quantizer``: (4,) fp32.
    """
    u = y * tl.load(quantizer_ptr + 1)
    beyond = (tl.abs(u) <= 448.0) == 0  # also True for NaN
    if mask is not None:
        beyond = beyond & mask
    count = tl.sum(beyond.to(tl.int32))
    tl.atomic_add(quantizer_ptr + 2, count.to(tl.float32), mask=count > 0, sem="relaxed")
    return tl.minimum(tl.maximum(u, -448.0), 448.0)
