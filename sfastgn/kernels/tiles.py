"""The four axes of a tile in registers: which of them Triton gives to the lanes, to the warps, and to one thread's registers.

A tile's last axis is contiguous in memory. Of the other three, Triton fills a warp's lanes from one end, then the warps, and keeps what
is left in registers: from the first axis in Triton 3.6, from the third since 3.7. Reductions over the register axis are plain additions,
over the lanes' axis shuffles; the wrong way round they go through shared memory and spill. The warps' axis is the second in both.

Where an axis stands changes no result. ``tests/kernels/test_compile_only.py`` fails where it costs registers.
"""

from __future__ import annotations

try:
    import triton
    import triton.language as tl
except ImportError:  # every call then runs in plain PyTorch
    triton = None

__all__ = ["COMPILED", "LANE_AXIS", "STEP_AXIS", "along_block", "along_lanes", "along_steps", "along_warps", "triton"]

if triton is not None:
    _LANES_FIRST = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7)
    LANE_AXIS = tl.constexpr(0 if _LANES_FIRST else 2)
    STEP_AXIS = tl.constexpr(2 if _LANES_FIRST else 0)
    COMPILED = tl.constexpr(not triton.knobs.runtime.interpret)  # the interpreter knows no inline assembly

    @triton.jit
    def along_lanes(SIZE: tl.constexpr):
        i = tl.arange(0, SIZE)
        return i[:, None, None, None] if LANE_AXIS == 0 else i[None, None, :, None]

    @triton.jit
    def along_warps(SIZE: tl.constexpr):
        return tl.arange(0, SIZE)[None, :, None, None]

    @triton.jit
    def along_steps(SIZE: tl.constexpr):
        i = tl.arange(0, SIZE)
        return i[:, None, None, None] if STEP_AXIS == 0 else i[None, None, :, None]

    @triton.jit
    def along_block(SIZE: tl.constexpr):
        return tl.arange(0, SIZE)[None, None, None, :]
