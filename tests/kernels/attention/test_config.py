"""Chunks and launches of wide attention: pure Python, checked over many sizes without a GPU."""

import pytest

from sdfastgn.kernels.attention.config import (
    VECTOR,
    ChunksConfig,
    chunks_config,
    divide_config,
    pays,
    softmax_config,
)
from sdfastgn.kernels.common.sizes import next_power_of_2
from tests.kernels.samples import each_gpu

COUNTS = (1, 2, 3, 17)
TOKENS = (1, 7, 128, 1000, 1024, 4096, 9216, 16384, 16385, 65536, 200003)
CHANNELS = (1, 264, 320, 512, 4096)


def every_size():
    return ((count, L, keys, D) for count in COUNTS for L in TOKENS for keys in TOKENS for D in CHANNELS)


@pytest.mark.slow
@each_gpu
def test_chunks_are_all_queries_once_and_fit(num_sms):
    for count, L, keys, D in every_size():
        config = chunks_config(count, L, keys, D, num_sms)
        chunks = list(config.chunks(count, L))
        # One after the other: each begins where the one before it ended, in one matrix or in the next.
        at = 0
        for b0, b1, r0, r1 in chunks:
            assert b0 * L + r0 == at
            assert r0 == 0 or r1 - r0 <= config.rows
            assert b1 - b0 == 1 or (r0, r1) == (0, L)
            assert b1 > b0
            assert r1 > r0
            assert (b1 - b0) * (r1 - r0) <= config.matrices * config.rows
            at = (b1 - 1) * L + r1
        assert at == count * L
        # A chunk and a last one.
        assert len({(b1 - b0) * (r1 - r0) for b0, b1, r0, r1 in chunks}) <= 2
        assert keys <= config.pitch < keys + VECTOR
        assert config.pitch % VECTOR == 0
        rows = config.matrices * config.rows
        assert rows * config.pitch * 4 <= max(64 * 2**20, 128 * config.pitch * 4)
        assert config.scratch(D) >= rows * max(config.pitch, config.splits * D)
        # Parts of the keys: of one matrix, equal, aligned, and no more than fill a GPU.
        assert config.splits == 1 or config.matrices == 1
        assert keys % config.splits == 0
        assert config.splits == 1 or keys // config.splits % VECTOR == 0
        tiles = -(-config.rows // 128) * -(-D // 128)
        assert config.splits == 1 or config.splits * tiles <= num_sms


@pytest.mark.parametrize(
    ("count", "L", "expected"),
    [
        pytest.param(1, 1024, ChunksConfig(1, 1024, 1024, 2), id="256-pixels"),
        pytest.param(1, 4096, ChunksConfig(1, 4096, 4096, 1), id="512-pixels"),
        pytest.param(1, 9216, ChunksConfig(1, 1536, 9216, 2), id="768-pixels"),
        pytest.param(1, 16384, ChunksConfig(1, 1024, 16384, 4), id="1024-pixels"),
        pytest.param(1, 65536, ChunksConfig(1, 256, 65536, 16), id="2048-pixels"),
        pytest.param(8, 1024, ChunksConfig(8, 1024, 1024, 1), id="eight-of-256-pixels"),
        pytest.param(18, 1024, ChunksConfig(9, 1024, 1024, 1), id="eighteen-in-two-halves"),
        pytest.param(2, 16384, ChunksConfig(1, 1024, 16384, 4), id="two-of-1024-pixels"),
    ],
)
def test_images_of_a_vae_on_an_h200(count, L, expected):
    config = chunks_config(count, L, L, 512, 132)
    assert config == expected
    # Scores (fp32) and weights (16 bit).
    assert 4 * config.scratch(512) + 2 * config.matrices * config.rows * config.pitch <= 96 * 2**20


def test_a_chunk_is_a_tile_of_rows_at_least():
    assert chunks_config(1, 10**6, 10**6, 512, 132).rows == 128


def test_a_row_of_scores_stays_in_registers_where_it_fits():
    for keys in range(1, 40000, 37):
        block, warps, whole = softmax_config(keys)
        assert whole == (keys <= 16384)
        assert not whole or keys <= block
        assert block == next_power_of_2(block) <= 16384
        assert warps == next_power_of_2(warps) <= 16
        assert block <= 32 * 32 * warps
    assert softmax_config(4096) == (4096, 8, True)
    assert softmax_config(16384) == (16384, 16, True)
    assert softmax_config(16385) == (8192, 16, False)


def test_blocks_of_the_division():
    for D in CHANNELS:
        block, warps = divide_config(D)
        assert block == min(1024, next_power_of_2(D))
        assert block <= 32 * 32 * warps
    assert divide_config(512) == (512, 2)


@pytest.mark.parametrize(
    ("L", "keys", "D", "expected"),
    [
        pytest.param(4096, 4096, 512, True, id="vae"),
        pytest.param(1024, 1024, 264, True, id="least"),
        pytest.param(4096, 4096, 256, False, id="flash"),
        pytest.param(4096, 4096, 260, False, id="unaligned"),
        pytest.param(1023, 4096, 512, False, id="few-queries"),
        pytest.param(4096, 77, 512, False, id="few-keys"),
    ],
)
def test_where_it_pays(L, keys, D, expected):
    assert pays(L, keys, D) is expected
