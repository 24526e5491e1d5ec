"""The architectures are the published ones, and their random weights are usable."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sdfastgn.models import architectures
from sdfastgn.models.configurations import SEEDS


def parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize(
    ("build", "model", "count"),
    [
        pytest.param(architectures.build_unet, "sd15", 859_520_964, id="unet-sd15"),
        pytest.param(architectures.build_unet, "sdxl", 2_567_463_684, id="unet-sdxl"),
        pytest.param(architectures.build_vae, "sd15", 83_653_863, id="vae-sd15"),
        pytest.param(architectures.build_vae, "sdxl", 83_653_863, id="vae-sdxl"),
        pytest.param(architectures.build_unet, "lcm", 859_520_964 + 256 * 320, id="unet-lcm"),
        pytest.param(architectures.build_unet, "sd_turbo", 865_910_724, id="unet-sd-turbo"),
        pytest.param(architectures.build_vae, "sd_turbo", 2_445_063, id="vae-sd-turbo"),
    ],
)
def test_parameter_counts(build, model, count):
    assert parameters(build(model, torch.float16, "meta")) == count


@pytest.mark.parametrize("model", ["tiny", "tiny_xl"])
def test_tiny_models_run_and_are_reproducible(model):
    where = {"dtype": torch.float32, "device": "cpu"}
    inputs = architectures.unet_inputs(model, size=64, batch=2, seed=0, **where)
    latents = architectures.vae_latents(model, size=64, batch=1, seed=0, **where)
    with torch.no_grad():
        steps = [architectures.build_unet(model, **where, seed=s)(**inputs).sample for s in (0, 0, 1)]
        images = [architectures.build_vae(model, **where, seed=s).decode(latents).sample for s in (0, 0, 1)]
    for same, again, other in (steps, images):
        assert torch.equal(same, again)
        assert not torch.allclose(same, other)
        assert 0.05 < same.std() < 20
    assert (steps[0].shape, images[0].shape) == ((2, 4, 8, 8), (1, 3, 64, 64))


@pytest.mark.parametrize("seed", [SEEDS[0], SEEDS[-1]])
def test_any_seed_of_64_bits_will_do(seed):
    inputs = architectures.unet_inputs(
        "tiny_xl", size=8, batch=1, seed=seed, dtype=torch.float32, device="cpu"
    )
    assert inputs["sample"].isfinite().all()


def test_norms_of_tiny_models_have_random_affines_and_groups_of_odd_sizes():
    unet = architectures.build_unet("tiny", torch.float32, "cpu")
    norms = [m for m in unet.modules() if isinstance(m, nn.GroupNorm)]
    assert all(m.weight.std() > 0.01 and m.bias.std() > 0.01 for m in norms)
    per_group = {m.num_channels // m.num_groups for m in norms}
    assert any(n & (n - 1) for n in per_group)
