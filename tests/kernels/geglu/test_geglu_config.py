"""The launch configuration of GEGLU: pure Python, checked over many sizes without a GPU."""

import pytest

from sdfastgn.kernels.common.sizes import WARP, ceil_div, next_power_of_2, vector_width
from sdfastgn.kernels.geglu.config import backward_config, forward_config
from tests.kernels.samples import each_gpu, each_size

ROWS = (1, 2, 3, 77, 2048, 8192, 100003, 10**7)
WIDTHS = (1, 2, 7, 10, 33, 320, 333, 1280, 2560, 5120, 8191, 50000, 10**7, 10**9 + 1)


@each_gpu
@each_size
def test_tiles_cover_all_rows_and_fit(itemsize, num_sms):
    for rows in ROWS:
        for D in WIDTHS:
            vector = vector_width(itemsize, D)
            sums = backward_config(rows, D, vector, 2 * D, num_sms, column_sums=True)
            configs = [
                forward_config(rows, D, vector, 2 * D),
                backward_config(rows, D, vector, 2 * D, num_sms, column_sums=False),
                sums,
            ]
            for config in configs:
                height = config.block_r * config.tiles
                assert (config.groups - 1) * height < rows <= config.groups * height
                assert config.programs(D) == config.groups * ceil_div(D, config.block_d)
                assert all(
                    n == next_power_of_2(n) for n in (config.block_r, config.block_d, config.num_warps)
                )
                assert config.block_r * config.block_d <= 32 * WARP * config.num_warps
                # Offsets within a tile.
                assert config.block_r == 1 or config.block_r * 2 * D < 2**31
                assert config.is_even(rows, D) == (rows % height == 0 and D % config.block_d == 0)
            assert [config.tiles for config in configs[:2]] == [1, 1]
            # Partial sums are little beside what is read.
            assert sums.groups <= max(1, ceil_div(rows, 4))
            assert sums.programs(D) * sums.num_warps <= max(
                num_sms * 16, ceil_div(D, sums.block_d) * sums.num_warps
            )


@pytest.mark.parametrize(
    ("D", "block_d", "num_warps"),
    [
        (10, 16, 1),
        (320, 512, 2),
        (1280, 256, 1),
        (2560, 512, 2),
        (5120, 1024, 4),
        (4096, 1024, 4),
        (10**7, 1024, 4),
    ],
)
def test_warps_lie_side_by_side_where_that_leaves_no_more_lanes_idle(D, block_d, num_warps):
    config = forward_config(8192, D, vector_width(2, D), 2 * D)
    assert (config.block_d, config.num_warps) == (block_d, num_warps)


def test_rows_that_are_far_apart_stay_within_32_bits():
    assert forward_config(8, 1, 1, 2**20).block_r * 2**20 < 2**31
    assert forward_config(8, 2**30, 8, 2**31).block_r == 1
