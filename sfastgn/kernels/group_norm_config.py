"""How the kernels are launched: pure functions of sizes and the GPU's number of multiprocessors, without autotuning.

The constants were chosen on an H200 (docs/adr/0006-group-norm-kernels.md, 0007-programmatic-dependent-launch.md); none of them
assumes one.

Tiles of reductions have four axes, (lanes, warps, steps, block), the block contiguous in memory and the steps in one thread's registers
(``tiles.py``). Sums over steps are then plain additions, sums over lanes shuffles, and nothing but a last scalar or vector passes between
warps through shared memory, whose bank conflicts cost more than the reading.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = [
    "ApplyConfig",
    "MergeConfig",
    "SmallConfig",
    "SplitConfig",
    "StatisticsConfig",
    "apply_config",
    "ceil_div",
    "launch_config",
    "merge_config",
    "next_power_of_2",
    "statistics_config",
]

# Elements that one warp reads with one 16-byte load a lane, in fp16.
_WARP_LOAD = 256
# Elements of a group, padded to powers of 2, that one program keeps in registers.
_SMALL_MAX_ELEMENTS, _SMALL_PER_WARP = 16384, 1024
# Warps of the reduction a multiprocessor and steps of its tiles, which are loads in flight: enough to keep the memory system busy, few
# enough to leave little to merge. A kernel that writes too has more in flight with more and smaller ones.
_STATISTICS_WARPS = 4
_STATISTICS_STEPS_MIN = 8
_STATISTICS_WARPS_PER_SM, _STATISTICS_STEPS_MAX = 8, 16
_PRODUCER_WARPS_PER_SM, _PRODUCER_STEPS_MAX = 16, 8
_APPLY_TILE, _APPLY_WARPS = 2048, 2
_MERGE_TILE, _MERGE_PER_WARP = 4096, 256


@dataclass(frozen=True)
class SmallConfig:
    """One launch: each program holds one group of one sample in registers, as a (lanes, num_warps, steps, block) tile.

    ``block`` covers what is contiguous in memory: the group's channels in channels-last, the positions in channels-first.
    """

    lanes: int
    num_warps: int
    steps: int
    block: int


@dataclass(frozen=True)
class StatisticsConfig:
    """Mean and M2 of every channel over ``chunks`` of ``rows`` positions each, one chunk a warp.

    Each warp walks its chunk by itself, in (lanes, steps, block) tiles of ``tile_rows`` positions. Channels-last: ``block`` channels
    of each position, and the warps of a program have neighbouring chunks. Channels-first: ``block`` positions of one channel, and
    the warps have neighbouring channels.
    """

    lanes: int
    num_warps: int
    steps: int
    block: int
    tile_rows: int
    rows: int
    chunks: int


@dataclass(frozen=True)
class ApplyConfig:
    """One (block_hw, block_c) tile a program."""

    block_hw: int
    block_c: int
    num_warps: int


@dataclass(frozen=True)
class MergeConfig:
    """One program a group, in tiles of (block_p, block_cg) partials."""

    block_p: int
    block_cg: int
    num_warps: int


@dataclass(frozen=True)
class SplitConfig:
    """Three launches: statistics, merge, apply."""

    statistics: StatisticsConfig
    apply: ApplyConfig


def launch_config(
    N: int, C: int, HW: int, num_groups: int, channels_last: bool, num_sms: int
) -> SmallConfig | SplitConfig:
    """How to normalise x of (N, C, HW): a function of sizes and the GPU's number of multiprocessors."""
    outer, inner = (HW, C // num_groups) if channels_last else (C // num_groups, HW)
    if next_power_of_2(outer) * next_power_of_2(inner) <= _SMALL_MAX_ELEMENTS:
        return _small_config(next_power_of_2(outer), next_power_of_2(inner))
    return SplitConfig(statistics_config(N, C, HW, channels_last, num_sms), apply_config(C, HW, channels_last))


def _small_config(outer: int, block: int) -> SmallConfig:
    lanes = min(outer, max(1, _WARP_LOAD // block))
    num_warps = min(32, max(1, outer * block // _SMALL_PER_WARP), outer // lanes)
    return SmallConfig(lanes, num_warps, outer // (lanes * num_warps), block)


def statistics_config(
    N: int, C: int, HW: int, channels_last: bool, num_sms: int, *, producer: bool = False
) -> StatisticsConfig:
    """How to reduce x of (N, C, HW) to means and M2 per channel and chunk, in a kernel that also writes x if ``producer``."""
    warps_per_sm = _PRODUCER_WARPS_PER_SM if producer else _STATISTICS_WARPS_PER_SM
    steps_max = _PRODUCER_STEPS_MAX if producer else _STATISTICS_STEPS_MAX
    if channels_last:
        # Whole 128-byte lines of each row where C allows.
        block = min(64, next_power_of_2(C))
        lanes, columns, warps = _WARP_LOAD // block, ceil_div(C, block), _STATISTICS_WARPS
    else:
        block, lanes, columns = min(_WARP_LOAD, next_power_of_2(HW)), 1, C
        warps = min(_STATISTICS_WARPS, next_power_of_2(C))
    step_rows = lanes if channels_last else block
    wanted = ceil_div(N * columns * HW, num_sms * warps_per_sm)  # rows a warp
    steps = max(_STATISTICS_STEPS_MIN, min(steps_max, _power_of_2_below(wanted // step_rows)))
    steps = min(steps, next_power_of_2(ceil_div(HW, step_rows)))
    tile_rows = step_rows * steps
    chunks = ceil_div(HW, _whole_chunks(HW, tile_rows, min(max(1, wanted // tile_rows), ceil_div(HW, tile_rows))))
    # Chunks as equal as can be: their number alone then says how many rows each has.
    return StatisticsConfig(lanes, warps, steps, block, tile_rows, ceil_div(HW, chunks), chunks)


def _whole_chunks(HW: int, tile_rows: int, tiles: int) -> int:
    """Rows of a chunk of about ``tiles`` tiles; such that chunks fill HW without a rest if one up to half as long does."""
    for count in range(tiles, max(1, tiles // 2) - 1, -1):
        if HW % (tile_rows * count) == 0:
            return tile_rows * count
    return tile_rows * tiles


def apply_config(C: int, HW: int, channels_last: bool) -> ApplyConfig:
    """How to read, map and write x of (N, C, HW)."""
    if channels_last:
        block_c = 128 if C % 128 == 0 else 64 if C > 32 else next_power_of_2(C)
        block_hw = min(next_power_of_2(HW), _APPLY_TILE // block_c)
    else:
        block_hw = min(next_power_of_2(HW), _APPLY_TILE)
        block_c = min(next_power_of_2(C), max(1, _APPLY_TILE // block_hw))
    return ApplyConfig(block_hw, block_c, _APPLY_WARPS)


def merge_config(chunks: int, channels: int) -> MergeConfig:
    """How to merge the statistics of one group: ``chunks`` chunks of ``channels`` channels."""
    block_cg = next_power_of_2(channels)
    block_p = max(1, min(next_power_of_2(chunks), _MERGE_TILE // block_cg))
    return MergeConfig(block_p, block_cg, max(1, min(16, block_p * block_cg // _MERGE_PER_WARP)))


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def _power_of_2_below(n: int) -> int:
    return 1 << max(n.bit_length() - 1, 0)
