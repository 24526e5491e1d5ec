"""The launch configuration of linear layers of few rows, checked over many sizes."""

import pytest

from sdfastgn.kernels.act_linear.config import has_few_rows, tile_config
from sdfastgn.kernels.common.sizes import WARP, ceil_div, next_power_of_2, vector_width
from tests.kernels.samples import each_gpu, each_size

ROWS = (1, 2, 3, 4, 5, 16, 77, 10**6)
CHANNELS = (1, 3, 77, 320, 640, 1280, 2560, 10**6 + 1)
LENGTHS = (1, 7, 16, 33, 320, 333, 1280, 2048, 2816, 8191, 10**5)


@each_gpu
@each_size
def test_tiles_cover_everything_and_fit(itemsize, num_sms):
    for N in ROWS:
        for C in CHANNELS:
            for K in LENGTHS:
                config = tile_config(N, C, K, itemsize, vector_width(itemsize, K), num_sms)
                sizes = (config.block_n, config.block_c, config.block_k, config.num_warps)
                assert all(n == next_power_of_2(n) for n in sizes)
                assert config.programs(N, C) == ceil_div(N, config.block_n) * ceil_div(C, config.block_c)
                assert config.is_even(K) == (K % (config.block_k * config.steps) == 0)
                threads = WARP * config.num_warps
                assert config.block_n * config.block_c * ceil_div(config.block_k, threads) <= 64
                assert config.steps * config.block_c * config.vector * itemsize <= 256
                # Idle columns: less than two blocks, at most half of a row longer than a block.
                turns = ceil_div(K, config.block_k * config.steps)
                idle = turns * config.steps * config.block_k - K
                assert 0 <= idle < config.block_k * max(2, turns)
                assert idle <= K or config.block_k * config.steps * turns < 2 * next_power_of_2(K)
                # As many programs as multiprocessors, where there are rows enough of the weight.
                assert config.programs(N, C) >= num_sms or config.block_c == 1


@pytest.mark.parametrize(
    ("N", "C", "K", "expected"),
    [
        pytest.param(2, 1280, 1280, (2, 8, 512, 3, 4), id="sd15-1280"),
        pytest.param(2, 640, 1280, (2, 4, 512, 3, 4), id="sd15-640"),
        pytest.param(2, 320, 1280, (2, 2, 512, 3, 4), id="sd15-320"),
        pytest.param(1, 1280, 320, (1, 8, 512, 1, 4), id="linear_1"),
        pytest.param(2, 1280, 2816, (2, 8, 512, 3, 4), id="sdxl-add-embedding"),
        pytest.param(2, 3, 5, (2, 1, 8, 1, 1), id="tiny"),
    ],
)
def test_a_time_embedding_is_spread_over_an_h200(N, C, K, expected):
    config = tile_config(N, C, K, 2, vector_width(2, K), 132)
    assert (config.block_n, config.block_c, config.block_k, config.steps, config.num_warps) == expected


def test_what_few_rows_are():
    assert [N for N in range(100) if has_few_rows(N)] == list(range(1, 17))
