"""Counts without a GPU how many kernels each model compiles beyond those of the models before it."""

from functools import partial
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from scripts.build_compiled import as_optimized
from sdfastgn.kernels.attention import wide_heads_kernels
from sdfastgn.kernels.common import dispatch, gpu
from sdfastgn.kernels.common.launch import Launch
from sdfastgn.models import architectures
from tests.kernels.gpus import GPUS

pytestmark = pytest.mark.fused_on_cpu

HALF = {"dtype": torch.float16, "device": "meta"}
# (model, part, pixels, batch, most kernels that no line before has compiled). The last may only fall.
CALLS = [
    ("sd15", "unet", 512, 2, 39),
    ("sd15", "unet", 384, 2, 4),
    ("sd15", "vae", 512, 1, 13),
    ("sdxl", "unet", 1024, 2, 9),
    ("sdxl", "vae", 1024, 1, 2),
    ("sd15", "unet", 768, 2, 1),
    ("sdxl", "unet", 768, 2, 0),
    ("sdxl", "vae", 768, 1, 1),
    ("sd15", "unet", 512, 8, 7),
]


@pytest.fixture
def as_on_an_h200(monkeypatch):
    """Tensors have no memory, launches are noted instead of made, and convolutions keep channels-last."""
    noted = []
    convolve = F.conv2d

    def conv2d(*args, **kwargs):
        return convolve(*args, **kwargs).to(memory_format=torch.channels_last)

    monkeypatch.setattr(dispatch, "is_supported", lambda x: True)
    monkeypatch.setattr(gpu, "num_sms", lambda device: GPUS["H200"].multiprocessors)
    monkeypatch.setattr(Launch, "__call__", lambda launch, stream, *tensors: noted.append((launch, tensors)))
    monkeypatch.setattr(wide_heads_kernels, "_multiply", mock.Mock())  # cuBLAS's
    monkeypatch.setattr(F, "conv2d", conv2d)
    # They know no such device.
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *kind: False)
    token = gpu.META_CAPABILITY.set((9, 0))
    yield noted
    gpu.META_CAPABILITY.reset(token)


def kernels_of(noted, model, part, size, batch):
    """For each launch in a call, everything that decides its compiled code."""
    noted.clear()
    build = architectures.build_unet if part == "unet" else architectures.build_vae
    network = build(model, **HALF)
    if part == "unet":
        call = partial(network, **architectures.unet_inputs(model, size=size, batch=batch, seed=0, **HALF))
    else:
        latents = architectures.vae_latents(model, size=size, batch=batch, seed=0, **HALF)
        call = partial(network.decode, latents)
    with torch.no_grad():
        for each in as_optimized(network, [call]):
            each()
    return {
        (
            launch.kernel,
            tuple(None if t is None else t.dtype for t in tensors),
            *launch.constants.items(),
            *launch.options.items(),
        )
        for launch, tensors in noted
    }


@pytest.mark.slow
def test_models_and_sizes_share_kernels(as_on_an_h200):
    known = set()
    for *call, most in CALLS:
        kernels = kernels_of(as_on_an_h200, *call)
        assert len(kernels) >= 13
        assert len(kernels - known) <= most, call
        known |= kernels
