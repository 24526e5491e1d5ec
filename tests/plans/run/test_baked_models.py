"""Whole models, traced, rewritten and baked: the bits of the plan for other inputs than the traced ones."""

import diffusers
import pytest
import torch

from sdfastgn.kernels.product import packed
from sdfastgn.plans.run.bake import Baked
from tests.plans.engine import in_channels_last, plan_of
from tests.plans.models import of_diffusers

pytestmark = pytest.mark.fused_on_cpu


def decode(model):
    return lambda z: model.decode(z, return_dict=False)[0]


def denoise(model):
    return lambda x, t, states: model(x, t, states, return_dict=False)[0]


def image_decoder():
    blocks = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    channels = {"block_out_channels": (8, 16), "norm_num_groups": 4, "latent_channels": 4}
    return diffusers.AutoencoderKL(**blocks, **channels), decode, [(1, 4, 4, 4)]


def unet():
    model = diffusers.UNet2DConditionModel(
        cross_attention_dim=16,
        block_out_channels=(16, 32),
        norm_num_groups=8,
        attention_head_dim=2,
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )
    return model, denoise, [(2, 4, 8, 8), (), (2, 7, 16)]


def wan(name="AutoencoderKLWan", in_time=True):
    sizes = {"base_dim": 8, "z_dim": 4, "dim_mult": [1, 2], "num_res_blocks": 1}
    means = {"latents_mean": [0.0] * 4, "latents_std": [1.0] * 4}
    model = of_diffusers(name, **sizes, **means, temperal_downsample=[in_time])
    return model, decode, [(1, 4, 2 if in_time else 1, 4, 4)]


def qwen_image():
    return wan("AutoencoderKLQwenImage", in_time=False)


def cosmos():
    channels = {"encoder_block_out_channels": (8,) * 4, "decode_block_out_channels": (8,) * 4}
    model = of_diffusers("AutoencoderKLCosmos", **channels, latent_channels=4, num_layers=1)
    return model, decode, [(1, 4, 2, 2, 2)]


def stable_video_diffusion():
    blocks = {"block_out_channels": (32, 32), "down_block_types": ("DownEncoderBlock2D",) * 2}
    model = of_diffusers("AutoencoderKLTemporalDecoder", **blocks)
    return model, lambda m: lambda z: m.decode(z, num_frames=2, return_dict=False)[0], [(2, 4, 4, 4)]


def inputs(shapes, seed):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=g) if shape else torch.tensor(100 + seed) for shape in shapes]


@pytest.mark.slow
@pytest.mark.parametrize("make", [image_decoder, unet, wan, qwen_image, cosmos, stable_video_diffusion])
@torch.no_grad()
def test_models(make, monkeypatch):
    monkeypatch.setattr(packed, "PACKED_DEVICES", ("cpu",))
    model, call, shapes = make()
    in_channels_last(model.eval().requires_grad_(False))
    call = call(model)
    call(*inputs(shapes, 0))  # some models count their layers in the first call
    plan = plan_of(model, call, *inputs(shapes, 0))
    plan.pack()
    baked = Baked(plan)
    calls = [inputs(shapes, seed) for seed in range(1, 5)]
    results = [baked.run(each)[0] for each in calls]
    copies = [result.clone() for result in results]
    for each, result, copy in zip(calls, results, copies, strict=True):
        assert torch.equal(result, plan.run(each)[0])
        torch.testing.assert_close(result, call(*each), rtol=1e-4, atol=1e-5)
        assert torch.equal(result, copy)
    for p in model.parameters():
        old, p.data = p.data, p.data * 1.01
        old.fill_(torch.nan)
    plan.pack()
    assert torch.equal(baked.run(calls[0])[0], plan.run(calls[0])[0])
    assert (baked.recorded, baked.declined, baked.left) == (1, {}, {})
