"""The square root that every norm takes, inside Triton kernels."""

from __future__ import annotations

from sdfastgn.kernels.common.tiles import triton

if triton is not None:
    import triton.language as tl

    from sdfastgn.kernels.common.tiles import PTX

__all__ = ["inverse_deviation"]

if triton is not None:

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
