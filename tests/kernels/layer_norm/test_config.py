"""The launch configuration of LayerNorm: pure Python, checked over many sizes without a GPU."""

import pytest
import torch

from sdfastgn.kernels.common.layout import row_stride
from sdfastgn.kernels.common.sizes import WARP, ceil_div, next_power_of_2, vector_width
from sdfastgn.kernels.common.sums import column_sum_block
from sdfastgn.kernels.layer_norm.config import (
    ChunksConfig,
    RowsConfig,
    backward_config,
    column_groups,
    forward_config,
)
from tests.kernels.samples import each_gpu, each_size

ROWS = (1, 2, 10, 77, 154, 512, 2048, 8192, 100003, 10**7)
WIDTHS = (
    1,
    2,
    7,
    10,
    33,
    64,
    100,
    320,
    333,
    640,
    768,
    1000,
    1280,
    4096,
    8191,
    8193,
    16384,
    16385,
    50000,
    10**7,
    10**7 + 1,
)
# Threads of a program, elements that each of them can hold, programs of a launch.
MAX_WARPS, MAX_PER_THREAD, MAX_PROGRAMS = 32, 64, 2**31 - 1


def configs(num_sms, itemsize):
    for rows in ROWS:
        for D in WIDTHS:
            vector = vector_width(itemsize, D)
            yield rows, D, False, forward_config(rows, D, itemsize, vector, num_sms)
            yield rows, D, False, backward_config(rows, D, vector, num_sms, column_sums=False)
            yield rows, D, True, backward_config(rows, D, vector, num_sms, column_sums=True)


@each_gpu
@each_size
def test_rows_fit_into_registers_and_are_covered(itemsize, num_sms):
    for rows, D, sums, config in configs(num_sms, itemsize):
        if not isinstance(config, RowsConfig):
            continue
        sizes = (config.lanes, config.num_warps, config.steps, config.block)
        assert all(size == next_power_of_2(size) for size in sizes)
        width = config.steps * config.block * (config.num_warps if config.wide else 1)
        assert D <= width < max(2 * D + 1, 2 * WARP * vector_width(itemsize, D) + 1)
        assert config.num_warps <= MAX_WARPS
        assert config.rows * width <= MAX_PER_THREAD * WARP * config.num_warps
        assert 1 <= config.programs <= MAX_PROGRAMS
        if not sums:  # one tile a program, and none without a row
            assert (config.programs - 1) * config.rows < rows <= config.programs * config.rows
        else:
            assert config.programs <= max(num_sms * 16, 1)


@each_gpu
@each_size
def test_chunks_cover_a_row_once(itemsize, num_sms):
    for rows, D, _, config in configs(num_sms, itemsize):
        if isinstance(config, ChunksConfig):
            assert config.length % config.block == 0
            assert (config.chunks - 1) * config.length < D <= config.chunks * config.length
            assert rows * config.chunks <= MAX_PROGRAMS
            groups = column_groups(rows, D, config.block, num_sms)
            assert 1 <= groups <= rows


@each_gpu
def test_few_long_rows_fill_the_gpu(num_sms):
    config = forward_config(10, 10**7, 2, 8, num_sms)
    assert 10 * config.chunks >= 4 * num_sms


def test_short_rows_leave_no_lane_idle():
    config = forward_config(10**7, 10, 2, vector_width(2, 10), 132)
    assert config.lanes * config.block >= WARP * 2
    assert config.steps * config.block == 16


@pytest.mark.parametrize(("D", "waste"), [(320, 0), (640, 0), (768, 0), (1280, 0), (1000, 24), (960, 64)])
def test_blocks_leave_few_lanes_idle(D, waste):
    """Whole steps that hold nothing cost nothing: the compiler drops them."""
    config = forward_config(10**5, D, 2, 8, 132)
    assert not config.wide
    assert ceil_div(D, config.block) * config.block - D == waste


@pytest.mark.parametrize(
    ("itemsize", "strides", "expected"),
    [(2, (320,), 8), (4, (320,), 4), (2, (10,), 2), (4, (10, 12), 2), (2, (333,), 1), (2, (320, 324), 4)],
)
def test_vector_width(itemsize, strides, expected):
    assert vector_width(itemsize, *strides) == expected


@pytest.mark.parametrize(("partials", "D"), [(1, 1), (528, 10), (528, 1280), (1, 10**7), (10**4, 77)])
def test_column_sums(partials, D):
    block_p, block_d = column_sum_block(partials, D)
    assert block_p == next_power_of_2(block_p) <= next_power_of_2(partials)
    assert block_d == next_power_of_2(block_d)
    assert block_p * block_d <= 8192
    assert ceil_div(partials, block_p) <= 40  # loads that wait for each other


X = torch.empty(4, 6, 10)


@pytest.mark.parametrize(
    ("x", "expected"),
    [
        pytest.param(X, 10, id="contiguous"),
        pytest.param(X[..., :8], 10, id="narrowed"),
        pytest.param(X[:, ::2], 20, id="every-second"),
        pytest.param(X[:, 1:3], None, id="uneven"),
        pytest.param(X[:1, 1:3, :4], 10, id="size-1"),
        pytest.param(X[..., ::2], None, id="gaps-in-a-row"),
        pytest.param(X.transpose(1, 2), None, id="transposed"),
        pytest.param(X[:1, :1].expand(4, 6, 10), None, id="expanded"),
        pytest.param(X[..., :1], 10, id="one-column"),
        pytest.param(X[0, 0, ::2], None, id="a-row-with-gaps"),
        pytest.param(torch.empty(2, 1, device="meta").as_strided((2, 1), (2**21, 1)), None, id="far-apart"),
    ],
)
def test_row_stride(x, expected):
    assert row_stride(x) == expected
