"""Differences from a mean and their square root, as every norm takes them, inside Triton kernels.

Sums are of differences from a pivot, one of the values: rounded at the size of the deviations, where
sums of the values are rounded at the size of the data. If the pivot is an outlier, the differences
are rounded at its size. Results in 16 bits do not show that. For results in fp32 (``EXACT``) the sum
of the differences only makes a better pivot, ``mean_as_pivot``, from which they are taken again.
"""

from __future__ import annotations

from sdfastgn.kernels.common.tiles import triton

if triton is not None:
    import triton.language as tl

    from sdfastgn.kernels.common.tiles import PTX

__all__ = ["difference", "inverse_deviation", "mean_as_pivot"]

if triton is not None:

    @triton.jit
    def mean_as_pivot(pivot, total, share):
        """The mean, rounded, from the sum of differences from a pivot. Exactly the pivot where all are 0."""
        return tl.fma(total, share, pivot)

    @triton.jit
    def difference(x, shift, pivot):
        """x + shift - pivot. Its rounding error scales with the result, not with x, shift or pivot.

        Knuth's two-sum finds the rounding error of x + shift. The last line adds that error back.
        """
        total = x + shift
        shift_in_total = total - x
        rounded_off = (x - (total - shift_in_total)) + (shift - shift_in_total)
        return (total - pivot) + rounded_off

    @triton.jit
    def inverse_deviation(variance, eps):
        """1 / sqrt(variance + eps), by an instruction: ``tl.sqrt`` links a library, and compiles longer."""
        root = variance + eps
        if PTX:
            root = tl.inline_asm_elementwise(
                "sqrt.rn.f32 $0, $1;", "=f,f", [root], dtype=tl.float32, is_pure=True, pack=1
            )
        else:
            root = tl.sqrt(root)
        return 1 / root
