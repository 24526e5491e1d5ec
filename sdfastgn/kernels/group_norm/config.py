"""The launch configurations of GroupNorm's kernels: pure functions of sizes and of the GPU's properties.

All constants were measured on an H200 (docs/adr/0006-group-norm-kernels.md,
0007-programmatic-dependent-launch.md). They affect only speed, and other values may be faster on other GPUs.

There are three ways to launch the kernels: small, split and, in the backward only, walk. ``SmallConfig``,
``SplitConfig`` and ``WalkConfig`` explain them.

Tiles that a program sums have four axes: lanes (the threads of a warp), warps, steps (elements in registers
of the same thread) and block (contiguous elements). ``common/tiles.py`` explains why.
"""

from __future__ import annotations

from dataclasses import dataclass

from sdfastgn.kernels.common.sizes import MAX_OFFSET, WARP_LOAD, ceil_div, next_power_of_2, power_of_2_below
from sdfastgn.kernels.statistics.config import StatisticsConfig, statistics_config

# --- small: a program holds a group in registers

# Maximum size of a group that a forward normalizes in one launch (``SmallConfig``). It is a number of
# elements, with the group's sizes rounded up to powers of 2. For larger groups three launches
# (``SplitConfig``) are faster.
_SMALL_MAX_ELEMENTS = 16384
# Maximum size of a group that a channels-last forward normalizes in one launch (``SmallConfig``) if the
# group's channels at one position are a long row. It is a number of elements, with the group's sizes rounded
# up to powers of 2. Reading long rows is efficient, so one launch is faster up to somewhat larger groups than
# with short rows.
_SMALL_MAX_ELEMENTS_OF_LONG_ROWS = 20480
# Minimum number of bytes of a long row (``_SMALL_MAX_ELEMENTS_OF_LONG_ROWS``): a whole cache line.
_SMALL_LONG_ROW = 128
# Maximum size of a group for which a backward computes dx in one launch (``SmallConfig``). It is a number of
# elements, with the group's sizes rounded up to powers of 2. It is smaller than in the forward, because
# registers hold both x and dy.
_SMALL_BACKWARD_MAX_ELEMENTS = 4096
# Pairs (maximum number of elements of a group, number of elements for each warp) for a channels-last forward
# that normalizes groups in one launch (``SmallConfig``). A group takes the first pair whose maximum is large
# enough. The group's sizes are rounded up to powers of 2 before. Small groups are faster with fewer elements
# for each warp.
_SMALL_PER_WARP = ((4096, 512), (8192, 1024), (32768, 2048))
# Number of elements for each warp in all other launches with a ``SmallConfig``: channels-first, or a
# backward.
_SMALL_OTHER_PER_WARP = 1024
# Maximum number of elements for each warp in a launch with a ``SmallConfig``. With more, registers spill.
_SMALL_MAX_PER_WARP = 2048
# Minimum number of channels of the second tile of a group (``SmallConfig.tail``). Eight channels of 16 bits
# are one 16-byte load.
_SMALL_MIN_TAIL = 8

# --- apply: elementwise

# Maximum number of elements of a tile of the two apply kernels, which compute y or dx element by element. A
# program has one tile.
_APPLY_TILE = 2048
# Warps of a program of the kernel that computes y element by element, if tiles are many or x is
# channels-first. A thread then has 32 elements, which hides the memory's latency best.
_APPLY_WARPS = 2
# Warps of a program of the kernels that compute y or dx element by element, in a channels-last forward with
# few tiles and in every backward: 16 elements for each thread.
_APPLY_WARPS_OF_FEW_TILES = 4
# ``apply_kernel``, which computes y, has few tiles if there are at most this many tiles for each
# multiprocessor. If x is channels-last, each of its programs then has ``_APPLY_WARPS_OF_FEW_TILES`` warps.
_APPLY_FEW_TILES = 12
# Channels of a channels-last tile of ``apply_kernel``, which computes y, if C is a multiple of this number.
# Otherwise a tile has 64 channels, or fewer if C is at most 32.
_APPLY_CHANNELS = 128
# Channels of a channels-last tile of ``apply_grad_kernel``, which computes dx and keeps five values of each
# channel beside x and dy. With 64 channels a thread takes 48 registers. With 128 channels it took 71, and the
# programs did not all run at once.
_APPLY_BACKWARD_CHANNELS = 64

# --- merge, and gradients of parameters

# Numbers of samples and channels of the tile in which a program sums the gradients of weight, bias and other
# shared operands over samples.
_PARAMETER_TILE = (32, 32)
# Maximum number of tiles of samples for which one program of ``parameter_grad_kernel`` sums all samples of
# its channels. With more, samples are divided into parts for several programs, and a second launch adds up
# the parts' sums.
_PARAMETER_MOST_TILES = 16
# Minimum number of tiles of samples in a part of the samples that one program sums. With fewer tiles there
# would be more parts, and the second launch, which adds up the parts' sums, would take too long.
_PARAMETER_MIN_TILES = 8
# Programs of ``parameter_grad_kernel`` for each multiprocessor if samples are divided into parts.
_PARAMETER_PROGRAMS_PER_SM = 2
# Channels of a program if each channel is a group, as in InstanceNorm. In memory, 32 neighboring channels are
# whole sectors of 32 bytes.
_EACH_CHANNEL_BLOCK = 32
# Maximum number of elements of a tile of (chunks, channels) in the two merge kernels, which combine the
# results of all chunks of a group.
_MERGE_TILE = 4096
# Elements for each warp of a tile of the forward's kernel that merges the statistics of chunks.
_MERGE_PER_WARP = 256
# Elements for each warp of a tile of the backward's kernel that merges the sums of chunks. A program has
# fewer warps than in the forward. More warps would need more time to exchange their sums than they would save
# in additions.
_MERGE_BACKWARD_PER_WARP = 1024

# --- walk: a program reads its group twice, the second time from L2

# Minimum of (size of x) / (size of L2) for a backward in which one program reads its group twice
# (``WalkConfig``). On an H200, with 60 MiB of L2, x must have at least 64 MiB. A smaller x is still in L2
# when the three launches of ``SplitConfig`` read it a second time, so these are faster.
_WALK_MIN_CACHES = 16 / 15
# Maximum share of L2 that the groups of all running programs may take in a backward with ``WalkConfig``. Only
# x is counted, and one program for each multiprocessor. Then most of x and dy is still in L2 at the second
# read. On an H200 this share is 237 KiB for each group.
_WALK_MAX_PART = 0.51
# Minimum number of contiguous bytes of a group at one position for a backward with ``WalkConfig``, if x is
# channels-last. Shorter reads from memory are inefficient.
_WALK_MIN_RUN = 64
# Minimum number of groups for each multiprocessor for a backward with ``WalkConfig``, in which a program
# computes a whole group. With fewer, multiprocessors that finish early wait too long for the last ones.
_WALK_MIN_GROUPS = 8
# Minimum number of elements of a large group in a backward with ``WalkConfig``. A program for a large group
# fills a multiprocessor, and has other tiles than a program for a smaller group (``_WALK_OTHER``).
_WALK_LARGE_ELEMENTS = 32768
# Each of the next four constants is (elements of a tile, elements that stay in registers, warps) of a program
# in a backward with ``WalkConfig``. How many elements fit into registers depends on the activation's
# derivative. ``_WALK_CHEAP`` is for large groups with identity or ReLU, ``_WALK_SILU_FIRST`` for large
# channels-first groups with SiLU, both only if the gradient of the shift is not wanted. ``_WALK_LARGE`` is
# for all other large groups, ``_WALK_OTHER`` for groups that are not large.
_WALK_CHEAP = (16384, 16384, 16)
_WALK_SILU_FIRST = (8192, 16384, 32)
_WALK_LARGE = (8192, 8192, 32)
_WALK_OTHER = (4096, 4096, 8)
# Activations whose derivative takes few registers. A program of a backward with ``WalkConfig`` can then keep
# more elements of x and dy in registers (``_WALK_CHEAP``).
_CHEAP = ("identity", "relu")


@dataclass(frozen=True)
class SmallConfig:
    """The configuration *small*: one launch, in which a program holds ``channels`` channels in registers.

    These channels of one sample are one group or, if ``each_channel``, groups of one channel each. The tile
    has the axes (lanes, num_warps, steps, block). ``block`` is a number of channels if x is channels-last,
    and a number of positions if x is channels-first.

    If ``tail`` is not 0, the group's last ``tail`` channels are in a second tile, with the axes (tail_lanes,
    num_warps, tail_steps, tail).
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
    """A program of a kernel that computes y or dx has ``block_hw`` positions of ``block_c`` channels."""

    block_hw: int
    block_c: int
    num_warps: int

    @property
    def few(self) -> bool:
        """True if a program has ``_APPLY_WARPS_OF_FEW_TILES`` warps.

        That is so in a channels-last forward with few tiles, and in every backward. In a forward with few
        tiles, registers do not limit how many programs run at once. So the forward's kernel may then have a
        branch that takes more registers (``OPTIONAL`` of ``apply_kernel``).
        """
        return self.num_warps == _APPLY_WARPS_OF_FEW_TILES


@dataclass(frozen=True)
class MergeConfig:
    """A program of a merge kernel combines the results of all chunks of ``channels`` channels of a sample.

    These channels are one group or, if ``each_channel``, groups of one channel each. The program reads the
    results in tiles of (``block_p`` chunks, ``block_c`` channels).
    """

    channels: int
    each_channel: bool
    block_p: int
    block_c: int
    num_warps: int

    @property
    def is_full(self) -> bool:
        """True if the tile has the largest size. Only then may there be more chunks than ``block_p``."""
        return self.block_p * self.block_c >= _MERGE_TILE


@dataclass(frozen=True)
class WalkConfig:
    """The configuration *walk*: one launch of the backward, whose programs read a group of x and dy twice.

    A program keeps the last ``kept_hw`` positions of its group in registers. It reads the other positions
    twice, in tiles of (``block_hw`` positions, ``block_c`` channels): first to compute sums, then to compute
    dx (``group_norm/walk_kernels.py``).
    """

    block_hw: int
    kept_hw: int
    block_c: int
    num_warps: int


@dataclass(frozen=True)
class SplitConfig:
    """The configuration *split*: three launches.

    The first computes statistics, or in the backward sums, of chunks of positions. The second merges them for
    each group. The third reads x again and computes y or dx.
    """

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
    """The configuration of kernels that normalize x (N, C, HW) or, if ``backward``, compute its gradients.

    Args:
        channels_last: True if x is channels-last, False if it is channels-first.
        num_sms: multiprocessors of the GPU.
        itemsize: bytes of an element of x. It makes no difference in the backward.
    """
    small = _small_config(C, HW, num_groups, channels_last, itemsize, backward)
    elements = small.lanes * small.num_warps * small.steps * small.block + next_power_of_2(HW) * small.tail
    long_rows = channels_last and small.channels * itemsize >= _SMALL_LONG_ROW
    largest = _SMALL_MAX_ELEMENTS_OF_LONG_ROWS if long_rows else _SMALL_MAX_ELEMENTS
    # The elements of a warp must fit into the warp's registers. If x is channels-first, a warp holds all
    # positions of its channels, and these may be too many for the registers.
    fits = (
        elements <= (_SMALL_BACKWARD_MAX_ELEMENTS if backward else largest)
        and elements <= small.num_warps * _SMALL_MAX_PER_WARP
    )
    if fits and C * HW < 2**31:  # the kernels of SmallConfig have int32 offsets
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
    """The ``WalkConfig`` of the kernel that computes the gradients of x (N, C, HW).

    None if the three launches of ``SplitConfig`` are faster, or if a sample has too many elements for int32
    offsets.

    Args:
        l2_bytes: size of the GPU's L2.
        itemsize: bytes of an element of x. dy is assumed to have elements of the same size. dy must have the
            layout of x.
        activation: name of the activation.
        shift_grad: True if the gradient of the shift is wanted.
    """
    CG = C // num_groups
    group, block_c = CG * HW, next_power_of_2(CG)
    if (
        N * C * HW * itemsize < _WALK_MIN_CACHES * l2_bytes
        or group * itemsize * num_sms > _WALK_MAX_PART * l2_bytes
        or N * num_groups < _WALK_MIN_GROUPS * num_sms
        or (channels_last and CG * itemsize < _WALK_MIN_RUN)
        or 4 * block_c > 5 * CG  # the padding of the channels would leave over a fifth of the lanes idle
        or C * HW >= 2**31  # the kernel has int32 offsets within a sample
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
    largest = next_power_of_2(HW + 1) // 2  # the largest power of 2 that is at most HW
    return WalkConfig(
        min(next_power_of_2(HW), max(1, tile // block_c)),
        min(largest, max(1, kept // block_c)),
        block_c,
        num_warps,
    )


def _small_config(
    C: int, HW: int, num_groups: int, channels_last: bool, itemsize: int, backward: bool
) -> SmallConfig:
    """The ``SmallConfig`` for x (N, C, HW). ``launch_config`` uses it if a group is small enough."""
    # A second tile for a group's last channels, and the sizes in ``_SMALL_PER_WARP``, were measured only for
    # channels-last forwards. Other launches do not use them.
    is_measured = channels_last and not backward
    each_channel = num_groups == C and channels_last
    channels = min(_EACH_CHANNEL_BLOCK, next_power_of_2(C)) if each_channel else C // num_groups
    sizes = next_power_of_2(channels), next_power_of_2(HW)
    outer, block = reversed(sizes) if channels_last else sizes
    tail = 0
    if is_measured and itemsize == 2 and not each_channel:
        # The last channels get a second tile. For example, 40 channels take tiles of 32 and 8, not one of 64.
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
    """The tile of the kernels that compute y or dx element by element, for x (N, C, HW)."""
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
    """Returns (samples, channels) of the tile in which a program sums parameter gradients over samples."""
    return min(_PARAMETER_TILE[0], next_power_of_2(N)), min(_PARAMETER_TILE[1], next_power_of_2(C))


def parameter_rows(N: int, C: int, num_sms: int) -> int:
    """Number of samples that one program of ``parameter_grad_kernel`` sums.

    It is N, or the size of one part if samples are divided into parts.
    """
    block_n, block_c = parameter_config(N, C)
    tiles = ceil_div(N, block_n)
    if tiles <= _PARAMETER_MOST_TILES:
        return N
    parts = num_sms * _PARAMETER_PROGRAMS_PER_SM // ceil_div(C, block_c)
    parts = min(max(1, parts), tiles // _PARAMETER_MIN_TILES)
    return ceil_div(tiles, parts) * block_n


def merge_config(chunks: int, C: int, num_groups: int, *, backward: bool = False) -> MergeConfig:
    """The configuration of kernels that merge ``chunks`` chunks of statistics, or of the backward's sums."""
    each_channel = num_groups == C
    channels = min(_EACH_CHANNEL_BLOCK, next_power_of_2(C)) if each_channel else C // num_groups
    block_c = next_power_of_2(channels)
    block_p = max(1, min(next_power_of_2(chunks), _MERGE_TILE // block_c))
    per_warp = _MERGE_BACKWARD_PER_WARP if backward else _MERGE_PER_WARP
    return MergeConfig(
        channels, each_channel, block_p, block_c, max(1, min(16, block_p * block_c // per_warp))
    )
