"""The launch configuration of BatchNorm: pure Python, checked over many sizes without a GPU."""

import pytest

from sdfastgn.kernels.batch_norm.config import as_rows, merge_config, moments_config, small_config
from tests.kernels.gpus import GPUS

SIZES = [
    (N, C, HW)
    for N in (1, 3, 8, 128)
    for C in (1, 2, 3, 30, 64, 66, 1024, 2048)
    for HW in (1, 16, 49, 3136, 102400)
]
each_layout = pytest.mark.parametrize("channels_last", [True, False], ids=["channels_last", "channels_first"])


@pytest.mark.drawn(40)
@each_layout
@pytest.mark.parametrize(("N", "C", "HW"), SIZES)
def test_rows_are_all_of_the_tensor(N, C, HW, channels_last):
    rows = as_rows(N, C, HW, channels_last)
    assert rows.samples * rows.rows * rows.width == N * C * HW
    assert rows.width % C == 0
    if rows.channels_last:
        assert rows.samples == 1
        # Rows are whole loads, or twice as many positions side by side would be too wide, or leave a rest.
        assert rows.width % 8 == 0 or 2 * rows.width > 64 or rows.rows % 2
        assert rows.width == C or rows.width % 16
    else:
        assert (rows.samples, rows.width) == (N, C)


MULTIPROCESSORS = sorted({gpu.multiprocessors for gpu in GPUS.values()})


@pytest.mark.drawn(40)
@each_layout
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize(("N", "C", "HW"), SIZES)
def test_a_small_tile_has_all_positions_and_fits_into_registers(N, C, HW, backward, channels_last):
    rows = as_rows(N, C, HW, channels_last)
    for sms in MULTIPROCESSORS:
        config = small_config(rows, C, sms, backward=backward)
        if config is None:
            assert N * HW > 256
            continue
        positions = config.lanes * config.num_warps * config.steps
        assert N * HW <= positions < 2 * max(N * HW, 2)
        assert config.block <= 16
        # So many warps leave no room for another program on a multiprocessor.
        assert config.num_warps <= 16 or (not backward and -(-C // config.block) <= sms)
        assert positions * config.block // (32 * config.num_warps) <= 32 or config.num_warps == positions


@pytest.mark.parametrize("C", [1, 2, 3, 64, 2048])
@pytest.mark.parametrize("partials", [1, 2, 66, 1056, 10**5])
def test_a_merge_fits_into_registers(partials, C):
    config = merge_config(partials, C)
    assert config.channels == config.block_c <= 8
    assert config.channels >= min(C, 8 if partials <= 1024 else 2)
    assert partials <= config.block_p or config.channels <= 2
    assert all(n & (n - 1) == 0 for n in (config.block_p, config.channels, config.num_warps))
    assert config.num_warps <= 16
    assert config.block_p * config.channels <= 512 * config.num_warps


@pytest.mark.drawn(40)
@each_layout
@pytest.mark.parametrize(("N", "C", "HW"), [*SIZES, (3, 6, 113 * 113), (2, 3, 1009), (7, 30, 35 * 35)])
def test_a_merge_counts_the_positions_of_every_chunk_right(N, C, HW, channels_last):
    """It takes all chunks of a channel for those of one sample, of which the last may be shorter."""
    rows = as_rows(N, C, HW, channels_last)
    for sms in MULTIPROCESSORS:
        config = moments_config(rows, C, sms)
        real = [min(config.rows, rows.rows - start) for start in range(0, rows.rows, config.rows)]
        assert len(real) == config.chunks
        partials = rows.samples * config.chunks * rows.width // C
        taken = [min(config.rows, N * HW - p * config.rows) for p in range(partials)]
        assert taken == real * (partials // len(real))
