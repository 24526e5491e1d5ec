"""How the kernels are launched: pure functions of sizes and the number of multiprocessors.

The constants were chosen on an H200 (docs/adr/0006-group-norm-kernels.md,
0007-programmatic-dependent-launch.md); none of them assumes one.

Tiles of reductions have four axes, (lanes, warps, steps, block), the block contiguous in memory and
the steps in one thread's registers (``common/tiles.py``). Sums over steps are then plain additions,
and sums over lanes are shuffles. Only a last scalar or vector passes between warps through shared
memory, whose bank conflicts cost more than the reading.
"""

from __future__ import annotations

from dataclasses import dataclass

from sdfastgn.kernels.common.sizes import MAX_OFFSET, WARP_LOAD, ceil_div, next_power_of_2, power_of_2_below
from sdfastgn.kernels.statistics.config import StatisticsConfig, statistics_config

# --- small: a group in one program's registers
# Elements of a group, padded to powers of 2, above which three launches are faster.
_SMALL_MAX_ELEMENTS = 16384
# The same where a row of a group has at least ``_SMALL_LONG_ROW`` bytes, a whole line of memory.
_SMALL_MAX_ELEMENTS_OF_LONG_ROWS = 20480
_SMALL_LONG_ROW = 128
# The same in the backward, which holds x and dy.
_SMALL_BACKWARD_MAX_ELEMENTS = 4096
# (largest group, elements per warp) of the forward in channels-last; other cases use the constant below.
_SMALL_PER_WARP = ((4096, 512), (8192, 1024), (32768, 2048))
_SMALL_OTHER_PER_WARP = 1024
# Elements per warp above which its registers spill.
_SMALL_MAX_PER_WARP = 2048
# Channels that a tile of the rest needs: in 16 bits, fewer are less than a 16-byte load.
_SMALL_MIN_TAIL = 8

# --- apply: elementwise
# Elements of a tile.
_APPLY_TILE = 2048
# Warps of a tile: 32 elements a thread hide the latency where there are many tiles.
_APPLY_WARPS = 2
# Warps of a tile where there are few: 16 elements a thread.
_APPLY_WARPS_OF_FEW_TILES = 4
# Tiles a multiprocessor up to which they are few.
_APPLY_FEW_TILES = 12
# Channels of a tile in the forward.
_APPLY_CHANNELS = 128
# And in the backward, which keeps five values of each channel beside x and dy. 128 channels took 71
# registers a thread and a second wave of programs, 64 take 48.
_APPLY_BACKWARD_CHANNELS = 64

# --- merge, and gradients of parameters
# Samples x channels of one program that sums parameter gradients over samples.
_PARAMETER_TILE = (32, 32)
# Tiles of samples up to which one program sums all of them, and which each of several has at least: a
# second launch adds up their sums.
_PARAMETER_MOST_TILES = 16
_PARAMETER_MIN_TILES = 8
# Programs per multiprocessor, where there are several.
_PARAMETER_PROGRAMS_PER_SM = 2
# Channels a program where each is a group: their rows are then whole 32-byte sectors of memory.
_EACH_CHANNEL_BLOCK = 32
# Partial results of a tile.
_MERGE_TILE = 4096
# Partial results per warp.
_MERGE_PER_WARP = 256
# The same in the backward, whose sums over warps cost more than its additions.
_MERGE_BACKWARD_PER_WARP = 1024

# --- walk: a group per program that is read twice, the second time from L2
# Bytes of x, over those of L2, above which the first read of three launches has left L2: 64 MiB on an H200.
_WALK_MIN_CACHES = 16 / 15
# Part of L2 that x takes at most if each multiprocessor has one group: 237 KiB each on an H200. L2 then
# still has most of x and dy when they are read again.
_WALK_MAX_PART = 0.51
# Contiguous bytes of a row that memory delivers well.
_WALK_MIN_RUN = 64
# Groups per multiprocessor that make up for an uneven end.
_WALK_MIN_GROUPS = 8
# Elements of a group from which on it has a multiprocessor for itself.
_WALK_LARGE_ELEMENTS = 32768
# (elements of a tile, elements kept, warps) of such groups, by the registers that the activation's
# derivative leaves: of a cheap one, of SiLU in channels-first rows, and of any other.
_WALK_CHEAP = (16384, 16384, 16)
_WALK_SILU_FIRST = (8192, 16384, 32)
_WALK_LARGE = (8192, 8192, 32)
# The same of smaller groups.
_WALK_OTHER = (4096, 4096, 8)
# Activations whose derivative takes few registers.
_CHEAP = ("identity", "relu")


@dataclass(frozen=True)
class SmallConfig:
    """One launch: a program has ``channels`` of a sample in a (lanes, num_warps, steps, block) tile.

    They are one group, or groups of one channel each (``each_channel``). ``block`` covers what is
    contiguous in memory: the channels in channels-last, the positions in channels-first. The last
    ``tail`` channels of a group may be a tile of their own, of (tail_lanes, num_warps, tail_steps,
    tail).
    """

    channels: int
    each_channel: bool
    lanes: int
    num_warps: int
    steps: int
    block: int
    tail: int = 0
    tail_lanes: int = 1
    tail_steps: int = 1


@dataclass(frozen=True)
class ApplyConfig:
    """One (block_hw, block_c) tile a program."""

    block_hw: int
    block_c: int
    num_warps: int

    @property
    def few(self) -> bool:
        """True if there are so few tiles that registers do not limit the programs at a time."""
        return self.num_warps == _APPLY_WARPS_OF_FEW_TILES


@dataclass(frozen=True)
class MergeConfig:
    """One program for ``channels`` of a sample, as in SmallConfig, in (block_p, block_c) partials."""

    channels: int
    each_channel: bool
    block_p: int
    block_c: int
    num_warps: int

    @property
    def is_full(self) -> bool:
        """True if a tile is as large as they get: only then there may be more partials than it has."""
        return self.block_p * self.block_c >= _MERGE_TILE


@dataclass(frozen=True)
class WalkConfig:
    """One launch: each program keeps the last ``kept_hw`` positions of a group in registers, and reads
    the others twice in (block_hw, block_c) tiles, the second time backwards and in part from L2.
    """

    block_hw: int
    kept_hw: int
    block_c: int
    num_warps: int


@dataclass(frozen=True)
class SplitConfig:
    """Three launches: statistics, merge, apply."""

    statistics: StatisticsConfig
    apply: ApplyConfig


def launch_config(
    N: int,
    C: int,
    HW: int,
    num_groups: int,
    channels_last: bool,
    num_sms: int,
    *,
    itemsize: int = 2,
    backward: bool = False,
) -> SmallConfig | SplitConfig:
    """How to normalize x of (N, C, HW), or to take gradients: a function of sizes and the GPU.

    ``itemsize``: bytes of an element of x.
    """
    small = _small_config(C, HW, num_groups, channels_last, itemsize, backward)
    elements = small.lanes * small.num_warps * small.steps * small.block + next_power_of_2(HW) * small.tail
    long_rows = channels_last and small.channels * itemsize >= _SMALL_LONG_ROW
    largest = _SMALL_MAX_ELEMENTS_OF_LONG_ROWS if long_rows else _SMALL_MAX_ELEMENTS
    # Channels-first, a warp has whole channels: a few long ones would not fit into its registers.
    # Offsets within a sample are 32-bit.
    fits = (
        elements <= (_SMALL_BACKWARD_MAX_ELEMENTS if backward else largest)
        and elements <= small.num_warps * _SMALL_MAX_PER_WARP
    )
    if fits and C * HW < 2**31:
        return small
    kind = "backward" if backward else "read"
    statistics = statistics_config(N, C, HW, channels_last, num_sms, kind=kind)
    return SplitConfig(statistics, apply_config(N, C, HW, channels_last, num_sms, backward=backward))


def walk_config(
    N: int,
    C: int,
    HW: int,
    num_groups: int,
    channels_last: bool,
    num_sms: int,
    l2_bytes: int,
    itemsize: int,
    activation: str,
    shift_grad: bool = False,
) -> WalkConfig | None:
    """How to take gradients of more data than L2 holds; None where three launches are faster.

    ``l2_bytes``: size of the GPU's L2. ``itemsize``: bytes of an element of x, and about as many of an
    element of the gradient, which has the layout of x. ``shift_grad``: the shift's is wanted too.
    """
    CG = C // num_groups
    group, block_c = CG * HW, next_power_of_2(CG)
    if (
        N * C * HW * itemsize < _WALK_MIN_CACHES * l2_bytes
        or group * itemsize * num_sms > _WALK_MAX_PART * l2_bytes
        or N * num_groups < _WALK_MIN_GROUPS * num_sms
        or (channels_last and CG * itemsize < _WALK_MIN_RUN)
        or 4 * block_c > 5 * CG  # lanes for nothing
        or C * HW >= 2**31  # offsets within a sample
    ):
        return None
    if group < _WALK_LARGE_ELEMENTS:
        tile, kept, num_warps = _WALK_OTHER
    elif activation in _CHEAP and not shift_grad:
        tile, kept, num_warps = _WALK_CHEAP
    elif activation == "silu" and not channels_last and not shift_grad:
        tile, kept, num_warps = _WALK_SILU_FIRST
    else:
        tile, kept, num_warps = _WALK_LARGE
    largest = next_power_of_2(HW + 1) // 2  # not above HW
    return WalkConfig(
        min(next_power_of_2(HW), max(1, tile // block_c)),
        min(largest, max(1, kept // block_c)),
        block_c,
        num_warps,
    )


def _small_config(
    C: int, HW: int, num_groups: int, channels_last: bool, itemsize: int, backward: bool
) -> SmallConfig:
    is_measured = channels_last and not backward  # what more than one tile, and other warps, were tried on
    each_channel = num_groups == C and channels_last
    channels = min(_EACH_CHANNEL_BLOCK, next_power_of_2(C)) if each_channel else C // num_groups
    sizes = next_power_of_2(channels), next_power_of_2(HW)
    outer, block = reversed(sizes) if channels_last else sizes
    tail = 0
    if is_measured and itemsize == 2 and not each_channel:
        # 40 channels are 32 and 8, not 64 of which 24 are computed for nothing.
        rest = channels - block // 2
        if _SMALL_MIN_TAIL <= rest == next_power_of_2(rest) and 4 * channels <= 3 * block:
            block, tail = block // 2, rest
    lanes = min(outer, max(1, WARP_LOAD // block))
    elements = outer * (block + tail)
    per_warp = _SMALL_OTHER_PER_WARP
    if is_measured:
        per_warp = next((each for most, each in _SMALL_PER_WARP if elements <= most), _SMALL_PER_WARP[-1][1])
    num_warps = min(32, next_power_of_2(ceil_div(elements, per_warp)), outer // lanes)
    steps = outer // (lanes * num_warps)
    if not tail:
        return SmallConfig(channels, each_channel, lanes, num_warps, steps, block)
    tail_lanes = min(32, outer // num_warps, max(1, WARP_LOAD // tail))
    return SmallConfig(
        channels, False, lanes, num_warps, steps, block, tail, tail_lanes, outer // (tail_lanes * num_warps)
    )


def apply_config(
    N: int, C: int, HW: int, channels_last: bool, num_sms: int, *, backward: bool = False
) -> ApplyConfig:
    """How to read, map and write x of (N, C, HW), or x and a gradient."""
    longest = min(next_power_of_2(HW), power_of_2_below(MAX_OFFSET // C))
    if channels_last:
        widest = _APPLY_BACKWARD_CHANNELS if backward else _APPLY_CHANNELS
        block_c = widest if C % widest == 0 else 64 if C > 32 else next_power_of_2(C)
        block_hw = min(longest, _APPLY_TILE // block_c)
    else:
        block_hw = min(longest, _APPLY_TILE)
        block_c = min(next_power_of_2(C), max(1, _APPLY_TILE // block_hw))
    few = N * ceil_div(C, block_c) * ceil_div(HW, block_hw) <= _APPLY_FEW_TILES * num_sms
    warps = _APPLY_WARPS_OF_FEW_TILES if backward or (few and channels_last) else _APPLY_WARPS
    return ApplyConfig(block_hw, block_c, warps)


def parameter_config(N: int, C: int) -> tuple[int, int]:
    """(samples, channels) of a tile of per-sample values that one program sums over all samples."""
    return min(_PARAMETER_TILE[0], next_power_of_2(N)), min(_PARAMETER_TILE[1], next_power_of_2(C))


def parameter_rows(N: int, C: int, num_sms: int) -> int:
    """Samples that one program of its own launch sums: all N of them, or one of several equal parts."""
    block_n, block_c = parameter_config(N, C)
    tiles = ceil_div(N, block_n)
    if tiles <= _PARAMETER_MOST_TILES:
        return N
    parts = num_sms * _PARAMETER_PROGRAMS_PER_SM // ceil_div(C, block_c)
    parts = min(max(1, parts), tiles // _PARAMETER_MIN_TILES)
    return ceil_div(tiles, parts) * block_n


def merge_config(chunks: int, C: int, num_groups: int, *, backward: bool = False) -> MergeConfig:
    """How to merge statistics, or sums of the backward, of ``chunks`` chunks of C channels."""
    each_channel = num_groups == C
    channels = min(_EACH_CHANNEL_BLOCK, next_power_of_2(C)) if each_channel else C // num_groups
    block_c = next_power_of_2(channels)
    block_p = max(1, min(next_power_of_2(chunks), _MERGE_TILE // block_c))
    per_warp = _MERGE_BACKWARD_PER_WARP if backward else _MERGE_PER_WARP
    return MergeConfig(
        channels, each_channel, block_p, block_c, max(1, min(16, block_p * block_c // per_warp))
    )
