"""The Triton function with which kernels quantize to E4M3. ``common/e4m3.py`` explains quantizers."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def start_of_e4m3():
    """Returns 0, but the compiler only knows that the result is a multiple of 8. Add it to a store's offsets.

    Then a thread stores at most 8 elements at once, as many as it has loaded as 16 bytes of fp16. Without
    this 0 a thread would store 16 elements, half of them loaded by another thread, and the threads would
    exchange them through shared memory.
    """
    return tl.program_id(0) // 1073741824 * 8


@triton.jit
def in_e4m3_range(y, mask, quantizer_ptr, RETRY: tl.constexpr):
    """Returns y / scale, limited to the range of E4M3, in fp32. NaN stays NaN.

    The first launch uses the learned scale, and counts values beyond its range, NaN and infinities. The retry
    uses the scale that has grown, and makes infinities NaN.

    ``mask``: True for the elements that count, or None if all do. ``quantizer``: (8,) fp32.
    """
    if RETRY:
        u = y * (tl.load(quantizer_ptr + 2) / _growth(quantizer_ptr))
        # Only infinities and rounding errors are beyond the range now.
        u = tl.where(tl.abs(u) < 449.0, u, float("nan"))
    else:
        u = y * tl.load(quantizer_ptr + 2)
        beyond = (tl.abs(u) <= 448.0) == 0  # also True for NaN
        if mask is not None:
            beyond = beyond & mask
        count = tl.sum(beyond.to(tl.int32))
        if count > 0:
            # Only u is needed here, because y would take further registers.
            finite = beyond & (tl.abs(u) < float("inf"))
            largest = tl.max(tl.where(finite, tl.abs(u), 0.0))
            tl.atomic_max(quantizer_ptr + 4, largest, sem="relaxed")
            tl.atomic_add(quantizer_ptr + 3, count.to(tl.float32), sem="relaxed")
    u = tl.maximum(u, -448.0, propagate_nan=tl.PropagateNan.ALL)
    return tl.minimum(u, 448.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _growth(quantizer_ptr):
    """Returns the smallest power of two with which the scale covers all finite values; at least 1."""
    # The counts bypass the L1 cache. The first launch may have read the same line before it counted.
    ratio = tl.load(quantizer_ptr + 4, cache_modifier=".cg") / 448.0
    bits = tl.maximum(ratio, 1.0).to(tl.int32, bitcast=True)
    # Adding this carries into the exponent, unless the number is a power of two.
    return ((bits + 0x7FFFFF) & -0x800000).to(tl.float32, bitcast=True)


@triton.jit
def wait_before_retry(quantizer_ptr):
    """Waits for the previous kernel. Then it lets the retry start, which follows if there is a quantizer."""
    gdc_wait()
    if quantizer_ptr is not None:
        gdc_launch_dependents()


@triton.jit
def begin_retry(quantizer_ptr):
    """Returns True if y must be written again. Stores the scale of y."""
    if tl.program_id(0) == 0:
        tl.store(quantizer_ptr, tl.load(quantizer_ptr + 1) * _growth(quantizer_ptr))
    return tl.load(quantizer_ptr + 3, cache_modifier=".cg") > 0


@triton.jit
def end_retry(quantizer_ptr):
    """Each program that has written y again calls this at its end. The last one resets the counts."""
    tl.debug_barrier()  # all threads of the program have read the counts
    if tl.atomic_add(quantizer_ptr + 5, 1.0) == tl.num_programs(0) - 1:
        total = tl.load(quantizer_ptr + 6) + tl.load(quantizer_ptr + 3, cache_modifier=".cg")
        most = tl.maximum(tl.load(quantizer_ptr + 7), tl.load(quantizer_ptr + 4, cache_modifier=".cg"))
        tl.store(quantizer_ptr + 6, total)
        tl.store(quantizer_ptr + 7, most)
        tl.store(quantizer_ptr + 3 + tl.arange(0, 4), 0.0, mask=tl.arange(0, 4) < 3)
