"""The tests that kernel-builder runs on a build: they compare kernels with PyTorch in fp64.

The environment variable ``LOCAL_KERNELS`` makes ``get_kernel`` load the build instead of the repository on
the Hub.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import tomlkit
import torch
import torch.nn.functional as F

import kernels

GENERAL = tomlkit.parse((Path(__file__).parents[1] / "build.toml").read_text("utf-8"))["general"]
KERNEL = kernels.get_kernel(GENERAL["hub"]["repo-id"], version=GENERAL["version"], trust_remote_code=True)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CHANNELS = 64

pytestmark = pytest.mark.kernels_ci


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(DEVICE, torch.float16)


def agree(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found.double(), expected, atol=4e-3, rtol=4e-3)


@pytest.mark.parametrize("memory_format", [torch.channels_last, torch.contiguous_format])
def test_group_norm_and_silu(memory_format):
    x, weight = drawn(2, CHANNELS, 16, 16).to(memory_format=memory_format), drawn(CHANNELS)
    expected = F.silu(F.group_norm(x.double(), 32, weight.double(), None, 1e-6))
    agree(KERNEL.group_norm(x, 32, weight, None, eps=1e-6, activation="silu"), expected)


def test_channel_norm_and_silu():
    x, weight = drawn(1, CHANNELS, 3, 8, 8), drawn(CHANNELS)
    scaled = F.normalize(x.double(), dim=1) * CHANNELS**0.5 * weight.double().view(-1, 1, 1, 1)
    agree(KERNEL.channel_norm(x, weight, scale=CHANNELS**0.5, activation="silu"), F.silu(scaled))


def test_layer_norm():
    x, weight = drawn(2, 77, CHANNELS), drawn(CHANNELS)
    agree(KERNEL.layer_norm(x, weight), F.layer_norm(x.double(), (CHANNELS,), weight.double()))
