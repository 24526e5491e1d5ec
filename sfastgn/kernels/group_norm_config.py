"""How GroupNorm is launched: a pure function of sizes and the GPU's number of multiprocessors, without autotuning.

The constants were chosen on an H200 (docs/adr/0006-group-norm-kernels.md); none of them assumes one.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["SmallConfig", "SplitConfig", "Tiling", "ceil_div", "launch_config", "next_power_of_2"]

# Elements of a group that one program keeps in registers: 16 warps hold 32768 fp32 values in 64 registers a thread.
_SMALL_MAX_ELEMENTS = 32768
# The reduction runs one warp a program: sums over rows then stay within threads and shuffles, and never pass through shared
# memory, whose bank conflicts cost more than the reading (13 us against 3 at 2x1280x32x32 on an H200). 32 elements a thread leave
# registers for both running sums. Large tensors take two warps for more loads in flight.
_STATS_TILE_PER_WARP = 1024
_STATS_LARGE_ELEMENTS = 16 << 20
# Programs per multiprocessor: enough loads in flight to fill the memory system, few enough partials to merge.
_STATS_PROGRAMS_PER_SM = 8
_APPLY_TILE, _APPLY_WARPS = 2048, 2


@dataclass(frozen=True)
class SmallConfig:
    """One launch: each program normalises ``groups`` whole groups of one sample, held as (block_hw, groups, block_cg) in registers."""

    block_hw: int
    groups: int
    block_cg: int
    num_warps: int


@dataclass(frozen=True)
class Tiling:
    """``chunks`` of ``rows`` spatial positions each, done by one program per ``block_c`` channels in (block_hw, block_c) tiles."""

    block_hw: int
    block_c: int
    chunks: int
    rows: int
    num_warps: int


@dataclass(frozen=True)
class SplitConfig:
    """Three launches: reduce by chunks, merge, apply."""

    stats: Tiling
    apply: Tiling


def launch_config(
    N: int, C: int, HW: int, num_groups: int, channels_last: bool, num_sms: int
) -> SmallConfig | SplitConfig:
    """How to launch for x of (N, C, HW): a function of sizes and the GPU's number of multiprocessors, without autotuning."""
    block_hw, block_cg = next_power_of_2(HW), next_power_of_2(C // num_groups)
    if block_hw * block_cg <= _SMALL_MAX_ELEMENTS:
        return _small_config(N, num_groups, block_hw, block_cg, num_sms)
    stats_warps = 1 if N * C * HW < _STATS_LARGE_ELEMENTS else 2
    stats_tile = _STATS_TILE_PER_WARP * stats_warps
    if channels_last:
        # Segments of 128 bytes and more of each row; whole ones where C allows.
        stats_c = next((b for b in (64, 32) if C % b == 0), min(64, next_power_of_2(C)))
        apply_c = 128 if C % 128 == 0 else stats_c
    else:
        stats_c = min(next_power_of_2(C), max(1, stats_tile // block_hw))
        apply_c = min(next_power_of_2(C), max(1, _APPLY_TILE // block_hw))
    stats_hw = min(block_hw, stats_tile // stats_c)
    wanted = ceil_div(num_sms * _STATS_PROGRAMS_PER_SM, N * ceil_div(C, stats_c))
    stats = Tiling(stats_hw, stats_c, *_split_rows(HW, stats_hw, wanted), stats_warps)
    apply_hw = min(block_hw, _APPLY_TILE // apply_c)
    apply = Tiling(apply_hw, apply_c, *_split_rows(HW, apply_hw, ceil_div(HW, apply_hw)), _APPLY_WARPS)
    return SplitConfig(stats, apply)


def _small_config(N: int, num_groups: int, block_hw: int, block_cg: int, num_sms: int) -> SmallConfig:
    # Several groups a program where one is tiny: whole 128-byte lines instead of a few bytes per row. They stay fewer than
    # the programs that keep every multiprocessor busy.
    groups = 1
    while (
        num_groups % (2 * groups) == 0
        and 2 * groups * block_hw * block_cg <= 2048
        and N * num_groups // (2 * groups) >= num_sms
    ):
        groups *= 2
    elements = block_hw * groups * block_cg
    num_warps = max(1, min(16, elements // 512), elements // 1024)
    return SmallConfig(block_hw, groups, block_cg, num_warps)


def _split_rows(HW: int, block_hw: int, chunks: int) -> tuple[int, int]:
    """``HW`` rows in about ``chunks`` equal chunks of whole blocks: (number of chunks, rows in each)."""
    rows = ceil_div(ceil_div(HW, max(chunks, 1)), block_hw) * block_hw
    return ceil_div(HW, rows), rows


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()
