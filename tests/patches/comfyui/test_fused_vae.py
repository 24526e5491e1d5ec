"""Pixels of an optimized VAE: they are scaled where they were decoded, and copied to the CPU once."""

import itertools

import pytest
import torch

from tests.patches.comfyui import comfy_checkout

comfy_checkout.import_for_cpu()

from comfy import model_management  # noqa: E402

from sdfastgn.patches.comfyui import fused_vae  # noqa: E402
from sdfastgn.patches.comfyui.model_patcher import optimize_vae  # noqa: E402
from sdfastgn.patches.offload import staged_copy  # noqa: E402
from sdfastgn.patches.offload.staged_copy import StagedCopy  # noqa: E402
from tests.patches.comfyui import comfy_models  # noqa: E402

pytestmark = pytest.mark.fused_on_cpu

META = torch.device("meta")


class NoEvent:
    def record(self, stream):
        pass

    def synchronize(self):
        pass


class StageOnCPU(StagedCopy):
    """A ``StagedCopy`` whose "GPU" is the CPU, so its buffer is not pinned, and nothing waits."""

    def __init__(self, device):
        self.device, self._stream = device, None
        buffer = torch.empty(staged_copy._SLOTS, staged_copy._SLOT_BYTES, dtype=torch.uint8)
        self._slots = itertools.cycle([(slot, NoEvent()) for slot in buffer])


@pytest.fixture
def vae(monkeypatch):
    """An optimized VAE on the CPU. Its pixels shall go to the device meta, as a GPU's go to the CPU."""
    monkeypatch.setattr(fused_vae, "_WAY", ("cpu", "meta"))
    monkeypatch.setattr(fused_vae, "StagedCopy", StageOnCPU)
    yield optimize_vae(comfy_models.load_vae())
    model_management.unload_all_models()


def latents(N=1):
    return torch.randn(N, 4, 5, 6, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("N", [1, 3])
@torch.inference_mode()
def test_the_pixels_are_those_of_stocks_way(vae, monkeypatch, N):
    expected = vae.decode(latents(N))
    vae.output_device = META
    monkeypatch.setattr(staged_copy, "_SLOT_BYTES", 400)
    pixels = vae.decode(latents(N))
    assert torch.equal(pixels, expected)
    assert (pixels.stride(), pixels.dtype) == (expected.stride(), torch.float32)
    assert vae.output_device == META


@torch.inference_mode()
def test_many_pixels_leave_the_gpu_before_they_are_scaled(vae, monkeypatch):
    vae.output_device = META
    monkeypatch.setattr(fused_vae, "_FRACTION", 0)
    assert vae.decode(latents()).device == META


@torch.inference_mode()
def test_the_pixels_of_a_video_are_counted(vae, monkeypatch):
    """17 frames of 24 x 32 from 5 x 3 x 4 latents."""
    counted = []
    monkeypatch.setattr(fused_vae, "_FRACTION", 1)
    monkeypatch.setattr(vae, "latent_dim", 3)
    monkeypatch.setattr(vae, "upscale_ratio", (lambda frames: 4 * frames - 3, 8, 8))
    bytes_of_both = 2 * 4 * 3 * 17 * 24 * 32
    monkeypatch.setattr(vae, "output_device", META)
    for memory in (bytes_of_both, bytes_of_both - 1):
        monkeypatch.setattr(vae, "memory_used_decode", lambda *_, memory=memory: memory)
        counted.append(fused_vae.fit(vae, torch.empty(1, 4, 5, 3, 4)))
    assert counted == [True, False]
    assert not fused_vae.fit(vae, torch.empty(1, 4, 3, 4))  # stock's decode may take this for an image


@torch.inference_mode()
def test_an_error_in_the_decode_gives_the_device_back(vae, monkeypatch):
    def fails(*_, **__):
        assert vae.output_device.type == "cpu"
        raise ValueError("on purpose")

    vae.output_device = META
    monkeypatch.setattr(vae, "throw_exception_if_invalid", fails)
    with pytest.raises(ValueError, match="on purpose"):
        vae.decode(latents())
    assert vae.output_device == META


@pytest.mark.parametrize("shape", [(1, 3, 4), (2, 1, 5, 7), (1, 3, 5, 2, 3)])
@pytest.mark.parametrize("is_dense", [True, False])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_copies_through_small_buffers(monkeypatch, shape, is_dense, device):
    monkeypatch.setattr(staged_copy, "_SLOT_BYTES", 28)
    if device == "cpu":
        monkeypatch.setattr(fused_vae, "StagedCopy", StageOnCPU)
    stocks = torch.randn(shape, device=device).movedim(1, -1)
    pixels = stocks if is_dense else torch.stack([stocks, stocks], -1)[..., 0]
    found = fused_vae.to_cpu(pixels)
    assert torch.equal(found, pixels.cpu())
    if is_dense:
        assert found.stride() == pixels.stride()
        assert found.data_ptr() != pixels.data_ptr()
