"""The launch configuration: pure Python, checked over many sizes without a GPU."""

from __future__ import annotations

import inspect

import pytest

from sfastgn.kernels import group_norm_kernels
from sfastgn.kernels.group_norm_config import SmallConfig, SplitConfig, launch_config

SIZES = [
    (N, C, HW) for N in (1, 2, 16) for C in (4, 30, 128, 320, 1280, 2560) for HW in (1, 64, 1000, 4096, 65536, 1 << 22)
]


@pytest.mark.parametrize("num_sms", [14, 132], ids=lambda n: f"{n}sms")
@pytest.mark.parametrize("channels_last", [True, False], ids=["channels_last", "channels_first"])
def test_every_element_is_covered_once(channels_last, num_sms):
    for N, C, HW in SIZES:
        groups = 2 if C < 32 else 32 if C % 32 == 0 else 10
        config = launch_config(N, C, HW, groups, channels_last, num_sms)
        if isinstance(config, SmallConfig):
            assert config.block_hw >= HW
            assert config.block_cg >= C // groups
            assert groups % config.groups == 0
            continue
        for tiling in (config.stats, config.apply):
            assert tiling.rows % tiling.block_hw == 0
            assert (tiling.chunks - 1) * tiling.rows < HW <= tiling.chunks * tiling.rows


@pytest.mark.parametrize(
    ("sizes", "kind"),
    [
        pytest.param((2, 1280, 64), SmallConfig, id="unet-8x8"),
        pytest.param((2, 2560, 256), SmallConfig, id="unet-16x16"),
        pytest.param((2, 320, 4096), SplitConfig, id="unet-64x64"),
        pytest.param((1, 128, 1 << 20), SplitConfig, id="vae-1024x1024"),
    ],
)
def test_the_way_taken(sizes, kind):
    assert isinstance(launch_config(*sizes, 32, True, 132), kind)


def test_a_large_reduction_fills_the_gpu_and_a_long_one_is_split():
    config = launch_config(1, 512, 1 << 18, 32, True, 132)
    assert isinstance(config, SplitConfig)
    programs = config.stats.chunks * 512 // config.stats.block_c
    assert 4 * 132 <= programs <= 16 * 132


@pytest.mark.parametrize("name", ["_small_kernel", "_stats_kernel", "_finalize_kernel", "_apply_kernel"])
def test_constants_come_last_so_that_a_compiled_kernel_can_be_called_by_position(name):
    kernel = getattr(group_norm_kernels, name)
    is_constant = ["constexpr" in str(p.annotation) for p in inspect.signature(kernel.fn).parameters.values()]
    assert is_constant == sorted(is_constant)
