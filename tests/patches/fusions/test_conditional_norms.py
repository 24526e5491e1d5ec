"""Norms that read a time embedding or the latents, and the blocks around them."""

import copy

import pytest
import torch
from diffusers import VQModel
from diffusers.models.resnet import ResnetBlockCondNorm2D
from torch import nn

import sdfastgn
from tests.patches import cases

pytestmark = [pytest.mark.fused_on_cpu, pytest.mark.usefixtures("on_each_device", "without_gradients")]


def image(*shape, seed=0):
    return cases.noise(*shape, seed=seed).contiguous(memory_format=torch.channels_last)


def spatial_block(**options):
    sizes = {"in_channels": 32, "out_channels": 64, "temb_channels": 4, "groups": 32}
    return ResnetBlockCondNorm2D(**sizes, time_embedding_norm="spatial", **options)


@pytest.mark.drawn(2)
@pytest.mark.parametrize("layer", ["norm1", "norm1.norm_layer", "norm2.conv_b", "nonlinearity", "conv1"])
def test_a_hook_sees_what_it_saw(layer):
    models = cases.random_twins(spatial_block())
    x, latents = image(1, 32, 4, 4), image(1, 4, 2, 2, seed=1)
    seen = [], []
    for model, found in zip(models, seen, strict=True):
        module = model.get_submodule(layer)
        module.register_forward_hook(lambda m, args, y, found=found: found.append(y.clone()))
    cases.agree(*(model(x, latents) for model in models))
    assert len(seen[0]) == len(seen[1]) > 0
    for ours, theirs in zip(*seen, strict=True):
        cases.agree(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_no_less_exact_than_stock(dtype):
    fused, stock = cases.random_twins(spatial_block(), dtype)
    x, latents = image(1, 32, 8, 4).to(dtype) + 3, image(1, 4, 4, 2, seed=1).to(dtype)
    exact = copy.deepcopy(stock).double()(x.double(), latents.double())
    errors = [float((model(x, latents).double() - exact).norm() / exact.norm()) for model in (fused, stock)]
    assert errors[0] <= 1.1 * errors[1] + 1e-7


@pytest.mark.drawn(1)
@pytest.mark.parametrize("plans", [True, False], ids=["plans", "blocks"])
def test_movq(plans):
    sizes = {"block_out_channels": (32, 32), "latent_channels": 4, "vq_embed_dim": 4, "norm_type": "spatial"}
    blocks = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    models = fused, stock = cases.random_twins(
        VQModel(**sizes, **blocks, layers_per_block=1, num_vq_embeddings=16), cuda_graphs=False, plans=plans
    )
    assert not sdfastgn.report(fused).skipped
    latents = image(1, 4, 4, 4)
    cases.agree(*(model.decode(latents, force_not_quantize=True).sample for model in models), 1e-4)
    expected = stock.decode(latents, force_not_quantize=True).sample
    sdfastgn.restore(fused)
    assert torch.equal(fused.decode(latents, force_not_quantize=True).sample, expected)


def test_an_activation_after_scale_and_shift_has_no_pass(launches, monkeypatch):
    models = cases.random_twins(ResnetBlockCondNorm2D(in_channels=12, temb_channels=16, groups=3))
    x, temb = image(2, 12, 5, 6), cases.noise(2, 16)
    expected = models[1](x, temb)
    activations = []
    forward = nn.SiLU.forward
    monkeypatch.setattr(nn.SiLU, "forward", lambda self, y: activations.append(y.dim()) or forward(self, y))
    cases.agree(models[0](x, temb), expected)
    assert 4 not in activations
    assert cases.passes(launches)["small"] + cases.passes(launches)["apply"] == 2
