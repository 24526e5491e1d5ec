"""The launch configuration: pure Python, checked over many sizes without a GPU."""

from dataclasses import asdict

import pytest

from sdfastgn.kernels.common.sizes import ceil_div, next_power_of_2, row_factor
from sdfastgn.kernels.group_norm.config import (
    ApplyConfig,
    MergeConfig,
    SmallConfig,
    SplitConfig,
    apply_config,
    launch_config,
    merge_config,
    parameter_config,
    parameter_rows,
)
from sdfastgn.kernels.statistics.config import StatisticsConfig, statistics_config, statistics_pay
from tests.kernels.samples import each_gpu

SIZES = [
    (N, C, HW)
    for N in (1, 2, 16)
    for C in (1, 4, 7, 30, 66, 128, 320, 960, 1280, 2560)
    for HW in (1, 3, 63, 64, 77, 1000, 4096, 9409, 65536, 66049, 999983, 1 << 22)
]
# Threads of a block on every GPU.
MAX_THREADS = 1024
# Elements of a tile that leave each thread enough registers.
MAX_TILE = 1 << 17

each_layout = pytest.mark.parametrize("channels_last", [True, False], ids=["channels_last", "channels_first"])


def groups_of(C):
    """One group, as many as channels, and the usual number."""
    return sorted({1, C, 32 if C % 32 == 0 else next(g for g in (10, 6, 4, 1) if C % g == 0)})


def is_power_of_2(n):
    return n > 0 and n & (n - 1) == 0


def assert_launchable(*sizes, num_warps):
    """What Triton asks of a tile of ``sizes``, and a GPU of a program."""
    tile = 1
    for size in (*sizes, num_warps):
        assert is_power_of_2(size)
    for size in sizes:
        tile *= size
    assert tile <= MAX_TILE
    assert 32 * num_warps <= MAX_THREADS


@each_gpu
@each_layout
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_a_small_program_covers_its_group_once(channels_last, num_sms, backward):
    seen = 0
    for N, C, HW in SIZES:
        for groups in groups_of(C):
            config = launch_config(N, C, HW, groups, channels_last, num_sms, backward=backward)
            if isinstance(config, SplitConfig):
                continue
            seen += 1
            # All channels of a group, or several groups of one channel side by side.
            assert config.channels == C // groups or (config.each_channel and groups == C and channels_last)
            outer, inner = (HW, config.channels) if channels_last else (config.channels, HW)
            assert config.lanes * config.num_warps * config.steps == next_power_of_2(outer) >= outer
            if config.tail:
                assert config.tail_lanes * config.num_warps * config.tail_steps == next_power_of_2(outer)
                assert config.block + config.tail == inner == config.channels
                assert_launchable(
                    config.tail_lanes,
                    config.num_warps,
                    config.tail_steps,
                    config.tail,
                    num_warps=config.num_warps,
                )
            else:
                assert config.block == next_power_of_2(inner) >= inner
            assert_launchable(
                config.lanes, config.num_warps, config.steps, config.block, num_warps=config.num_warps
            )
    assert seen > 100


@each_gpu
@each_layout
@pytest.mark.parametrize("kind", ["read", "write", "backward"])
def test_chunks_cover_every_position_once(channels_last, num_sms, kind):
    for N, C, HW in SIZES:
        config = statistics_config(N, C, HW, channels_last, num_sms, kind=kind)
        assert (config.chunks - 1) * config.rows < HW <= config.chunks * config.rows
        # Only P is handed on: the merge takes chunks of this many positions.
        assert config.rows == ceil_div(HW, config.chunks)
        # A warp's tile, of which one program has num_warps side by side.
        assert config.tile_rows == config.steps * (config.lanes if channels_last else config.block)
        assert_launchable(
            config.lanes, config.num_warps, config.steps, config.block, num_warps=config.num_warps
        )


@each_gpu
@each_layout
def test_offsets_within_a_chunk_or_a_tile_fit_into_32_bits(channels_last, num_sms):
    """Channels-last, and where the output is (N, HW, C) tokens, positions are C elements apart."""
    huge = [(1, 65536, 512 * 512), (1, 2**20, 2**16), (1, 2**27, 64)]
    for N, C, HW in SIZES + huge:
        for kind in ("read", "write", "backward") if channels_last else ():
            config = statistics_config(N, C, HW, True, num_sms, kind=kind)
            assert config.rows * C < 2**31, (N, C, HW)
            assert config.rows == ceil_div(HW, config.chunks)
        for backward in (False, True):
            blocks = apply_config(N, C, HW, channels_last, num_sms, backward=backward)
            assert blocks.block_hw * C < 2**31, (N, C, HW)
            assert_launchable(blocks.block_hw, blocks.block_c, num_warps=blocks.num_warps)


def test_no_warp_is_idle_where_samples_are_many():
    for N, C, HW in ((256, 512, 3136), (128, 256, 784), (64, 1280, 256)):
        config = statistics_config(N, C, HW, True, 132)
        assert config.chunks >= config.num_warps


@each_layout
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_apply_tiles_are_no_larger_than_the_tensor_needs(backward, channels_last):
    for N, C, HW in SIZES:
        config = apply_config(N, C, HW, channels_last, 132, backward=backward)
        assert config.block_hw <= next_power_of_2(HW)
        assert config.block_c <= max(64, next_power_of_2(C))
        assert_launchable(config.block_hw, config.block_c, num_warps=config.num_warps)


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_merge_tiles_hold_every_channel_of_a_group(backward):
    for groups, C in (
        (1, 1),
        (1, 2),
        (3, 30),
        (8, 320),
        (32, 2560),
        (1, 1280),
        (1, 2560),
        (7, 7),
        (320, 320),
    ):
        for chunks in (1, 3, 77, 256, 4096, 65536):
            config = merge_config(chunks, C, groups, backward=backward)
            assert config.each_channel == (groups == C)
            assert config.channels == C // groups or config.each_channel
            assert config.block_c == next_power_of_2(config.channels) >= config.channels
            assert config.block_p <= next_power_of_2(chunks)
            assert_launchable(config.block_p, config.block_c, num_warps=config.num_warps)


@pytest.mark.parametrize(
    ("channels_last", "sizes", "factor"),
    [
        pytest.param(False, (4096,), 16, id="whole-loads"),
        pytest.param(False, (4096, 1024), 16, id="rows-too"),
        pytest.param(False, (4096, 1023), 1, id="rows-of-chunks-are-odd"),
        pytest.param(False, (38 * 38,), 1, id="odd"),
        pytest.param(True, (4096,), 1, id="channels-last-whole"),
        pytest.param(True, (38 * 38,), 1, id="channels-last-odd"),
    ],
)
def test_one_channels_last_kernel_serves_every_number_of_positions(channels_last, sizes, factor):
    assert row_factor(channels_last, *sizes) == factor


def test_few_tiles_have_more_warps_each():
    warps = [apply_config(N, 320, 4096, True, 132).num_warps for N in (1, 2, 4, 16)]
    assert warps == [4, 4, 2, 2]
    # Twice the multiprocessors are as busy with twice the tiles.
    assert apply_config(4, 320, 4096, True, 264).num_warps == 4


def test_parameter_tiles_are_no_larger_than_needed():
    for N in (1, 2, 3, 100, 5000):
        for C in (1, 5, 320, 2560):
            block_n, block_c = parameter_config(N, C)
            assert block_n <= next_power_of_2(N)
            assert block_c <= next_power_of_2(C)
            assert_launchable(block_n, block_c, num_warps=4)


@each_gpu
def test_parameter_gradients_of_many_samples_are_summed_in_parts(num_sms):
    for N in (1, 32, 512, 513, 4096, 100000):
        for C in (1, 32, 320, 100000):
            rows = parameter_rows(N, C, num_sms)
            block_n, block_c = parameter_config(N, C)
            parts = ceil_div(N, rows)
            assert (parts - 1) * rows < N <= parts * rows
            assert parts == 1 or rows % block_n == 0
            # One program's tiles follow each other: where that would be many, others take a part.
            if N <= 512 or C == 100000:
                assert parts == 1
            else:
                tiles = ceil_div(rows, block_n)
                assert (
                    8 <= tiles <= max(15, 2 * ceil_div(ceil_div(N, block_n), num_sms // ceil_div(C, block_c)))
                )
    assert ceil_div(100000, parameter_rows(100000, 32, 132)) > 132


@pytest.mark.parametrize(
    ("sizes", "kind"),
    [
        pytest.param((2, 1280, 64), SmallConfig, id="unet-8x8"),
        pytest.param((2, 1280, 256), SmallConfig, id="unet-16x16"),
        pytest.param((2, 320, 4096), SplitConfig, id="unet-64x64"),
        pytest.param((1, 128, 1 << 20), SplitConfig, id="vae-1024x1024"),
    ],
)
def test_the_way_taken(sizes, kind):
    assert isinstance(launch_config(*sizes, 32, True, 132), kind)


@each_gpu
@each_layout
@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param((1, 512, 1 << 18), id="vae-512x512"),
        pytest.param((1, 128, 1 << 20), id="vae-1024x1024"),
        pytest.param((1, 66, 999983), id="odd"),
        pytest.param((16, 320, 4096), id="batch"),
    ],
)
def test_a_large_reduction_fills_the_gpu_and_no_more(sizes, channels_last, num_sms):
    """A multiprocessor holds 32 to 64 warps. Some let loads overlap; more leave chunks to merge."""
    N, C, _ = sizes
    config = statistics_config(*sizes, channels_last, num_sms)
    warps = N * (ceil_div(C, config.block) if channels_last else C) * config.chunks
    # Channels-first has a warp a channel and sample, however many that are.
    assert 7 * num_sms <= warps <= max(32 * num_sms, 0 if channels_last else N * C)


def test_the_same_sizes_give_the_same_configuration():
    configs = [launch_config(2, 320, 4096, 32, True, 132) for _ in range(2)]
    assert configs[0] == configs[1]
    assert hash(configs[0]) == hash(configs[1])


@pytest.mark.parametrize("kind", [ApplyConfig, MergeConfig, SmallConfig, StatisticsConfig])
def test_configurations_are_plain_integers(kind):
    """As constants of kernels: a float, or a bool in place of an int, would compile another one."""
    samples = [
        apply_config(2, 320, 4096, True, 132),
        merge_config(128, 320, 32),
        launch_config(2, 1280, 64, 32, True, 132),
        statistics_config(2, 320, 4096, True, 132),
    ]
    (config,) = [c for c in samples if type(c) is kind]
    assert {name for name, value in asdict(config).items() if type(value) is not int} <= {"each_channel"}


@pytest.mark.parametrize(
    ("sizes", "channels_last", "itemsize", "backward", "tiles"),
    [
        pytest.param((2, 1280, 256), True, 2, False, (32, 8), id="40-channels"),
        pytest.param((2, 2560, 64), True, 2, False, (64, 16), id="80-channels"),
        pytest.param((2, 1920, 256), True, 2, False, (64, 0), id="60-channels-fill-64"),
        pytest.param((2, 640, 64), True, 2, False, (32, 0), id="20-channels-and-a-narrow-rest"),
        pytest.param((2, 1280, 64), True, 4, False, (64, 0), id="fp32"),
        pytest.param((2, 1280, 64), True, 2, True, (64, 0), id="backward"),
        pytest.param((2, 1280, 64), False, 2, False, (64, 0), id="channels-first"),
        pytest.param((2, 2560, 256), True, 2, False, (64, 16), id="20480-elements-in-long-rows"),
        pytest.param((2, 1280, 512), True, 2, False, None, id="20480-elements-in-shorter-rows"),
    ],
)
def test_groups_a_little_over_a_power_of_2_are_two_tiles(sizes, channels_last, itemsize, backward, tiles):
    config = launch_config(*sizes, 32, channels_last, 132, itemsize=itemsize, backward=backward)
    assert (None if isinstance(config, SplitConfig) else (config.block, config.tail)) == tiles


@pytest.mark.parametrize(
    ("sizes", "groups", "small"),
    [
        pytest.param((2, 64, 2048), 64, True, id="2048-positions-a-warp"),
        pytest.param((2, 64, 4096), 64, False, id="4096-positions-a-warp"),
        pytest.param((2, 256, 4096), 64, False, id="four-channels-four-warps"),
        pytest.param((2, 512, 1024), 32, True, id="sixteen-channels"),
    ],
)
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_a_warp_has_no_more_of_long_channels_than_fits(sizes, groups, small, backward):
    """Channels-first, where it has whole ones: 4096 elements spilled 2 KB a thread, 16384 spilled 12."""
    fits = sizes[1] // groups * sizes[2] <= 4096 or not backward  # else too large for one program anyway
    config = launch_config(*sizes, groups, False, 132, backward=backward)
    assert isinstance(config, SmallConfig) is (small and fits)


@pytest.mark.parametrize(
    ("C", "size", "pays"),
    [
        pytest.param(1280, 8, False, id="1280x8x8"),
        pytest.param(2560, 8, False, id="2560x8x8"),
        pytest.param(1280, 16, True, id="1280x16x16"),
        pytest.param(2560, 16, True, id="2560x16x16"),
        pytest.param(640, 32, True, id="640x32x32"),
        pytest.param(320, 64, True, id="320x64x64"),
        pytest.param(128, 1024, True, id="128x1024x1024"),
        pytest.param(8, 64, False, id="fewer-channels-than-groups"),
    ],
)
def test_statistics_pay_where_the_sum_and_the_norm_together_were_quicker_on_an_h200(C, size, pays):
    """docs/benchmarks.md: time of norm and sum, with statistics handed over and without."""
    assert statistics_pay(C, size * size) is pays


def test_statistics_always_pay_for_a_norm_that_reads_twice():
    for C in (128, 320, 960, 2560):
        for HW in (1, 49, 64, 256, 1024, 4096, 10**6):
            split = isinstance(launch_config(2, C, HW, 32, True, 132), SplitConfig)
            assert statistics_pay(C, HW) >= split
