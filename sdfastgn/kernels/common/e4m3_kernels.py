"""Triton functions with which kernels quantize their result y to E4M3.

Such a kernel gets a *quantizer*: fp32 numbers in the GPU's memory, among them the scale and counts of values
beyond the range of E4M3. ``common/e4m3.py`` explains them. The kernel is launched twice. The second launch is
called the *retry*. It does nothing unless the first launch has met values beyond the range.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def start_of_e4m3():
    """Returns 0, but the compiler only knows that the result is a multiple of 8.

    Kernels add it to the offsets of a store of 8-bit elements. Then a thread stores at most 8 elements at
    once, as many as it has loaded as 16 bytes of fp16. Without this 0 a thread would store 16 elements.
    Another thread would have loaded half of them, and the threads would exchange elements through shared
    memory.
    """
    return tl.program_id(0) // 1073741824 * 8


@triton.jit
def in_e4m3_range(y, mask, quantizer_ptr, RETRY: tl.constexpr):
    """Returns y / scale, limited to the range of E4M3, in fp32. NaN stays NaN.

    The first launch uses the scale that was learned from other tensors. It counts the values beyond the range
    of E4M3, including NaN and infinities. The second launch (``RETRY``) uses a larger scale, with which all
    finite values are in the range. It turns infinities into NaN.

    ``mask``: True for the elements that belong to y, or None if all do. ``quantizer``: (8,) fp32, with
    the scale and counts of values beyond the range (``common/e4m3.py``).
    """
    if RETRY:
        u = y * (tl.load(quantizer_ptr + 2) / _growth(quantizer_ptr))
        # With the larger scale, finite values exceed the range of E4M3 only by a rounding error. Other values
        # beyond the range are infinities. They become NaN.
        u = tl.where(tl.abs(u) < 449.0, u, float("nan"))
    else:
        u = y * tl.load(quantizer_ptr + 2)
        beyond = (tl.abs(u) <= 448.0) == 0  # NaN counts as beyond the range too
        if mask is not None:
            beyond = beyond & mask
        count = tl.sum(beyond.to(tl.int32))
        if count > 0:
            # The largest magnitude is computed from u = y / scale and not from y, because y would take
            # further registers.
            finite = beyond & (tl.abs(u) < float("inf"))
            largest = tl.max(tl.where(finite, tl.abs(u), 0.0))
            tl.atomic_max(quantizer_ptr + 4, largest, sem="relaxed")
            tl.atomic_add(quantizer_ptr + 3, count.to(tl.float32), sem="relaxed")
    u = tl.maximum(u, -448.0, propagate_nan=tl.PropagateNan.ALL)
    return tl.minimum(u, 448.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _growth(quantizer_ptr):
    """Returns the power of two by which the learned scale of y in E4M3 must be multiplied, at least 1.

    It is the smallest one with which all finite values of y / scale are in the range of E4M3.
    """
    # This load bypasses the L1 cache, which may have old values: the first launch has perhaps read the same
    # cache line before it wrote its counts.
    ratio = tl.load(quantizer_ptr + 4, cache_modifier=".cg") / 448.0
    bits = tl.maximum(ratio, 1.0).to(tl.int32, bitcast=True)
    # ``ratio`` is rounded up to a power of two. Adding 0x7FFFFF to its bits carries into the exponent, unless
    # ``ratio`` is a power of two already. After the addition, the bits below the exponent are cleared.
    return ((bits + 0x7FFFFF) & -0x800000).to(tl.float32, bitcast=True)


@triton.jit
def wait_before_retry(quantizer_ptr):
    """Waits for the end of the previous kernel, and then lets the retry start if y is written in E4M3.

    The retry is the second launch of the kernel. It writes y again if values were beyond the range of E4M3.
    ``quantizer``: None if y is not written in E4M3.
    """
    gdc_wait()
    if quantizer_ptr is not None:
        gdc_launch_dependents()


@triton.jit
def begin_retry(quantizer_ptr):
    """Begins the second launch of a kernel that writes y in E4M3. Stores the scale of y in the quantizer.

    Returns True if y must be written again, because values were beyond the range of E4M3.
    """
    if tl.program_id(0) == 0:
        tl.store(quantizer_ptr, tl.load(quantizer_ptr + 1) * _growth(quantizer_ptr))
    return tl.load(quantizer_ptr + 3, cache_modifier=".cg") > 0


@triton.jit
def end_retry(quantizer_ptr):
    """Ends a program of the second launch, which has written values of y in E4M3 again.

    The last program adds this call's counts of values beyond the range of E4M3 to the totals of all calls,
    and sets the counts to 0.
    """
    tl.debug_barrier()  # before the counts are reset, all threads must have read them
    if tl.atomic_add(quantizer_ptr + 5, 1.0) == tl.num_programs(0) - 1:
        total = tl.load(quantizer_ptr + 6) + tl.load(quantizer_ptr + 3, cache_modifier=".cg")
        most = tl.maximum(tl.load(quantizer_ptr + 7), tl.load(quantizer_ptr + 4, cache_modifier=".cg"))
        tl.store(quantizer_ptr + 6, total)
        tl.store(quantizer_ptr + 7, most)
        tl.store(quantizer_ptr + 3 + tl.arange(0, 4), 0.0, mask=tl.arange(0, 4) < 3)
