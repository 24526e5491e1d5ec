"""Plans of small models: results and their classes, changed parameters, tables without weights."""

import gc
import weakref

import pytest
import torch
from diffusers import AutoencoderKL, UNet2DConditionModel
from diffusers.models.autoencoders.vae import DecoderOutput

from tests.plans.engine import plan_of


def autoencoder():
    return AutoencoderKL(block_out_channels=(8,), norm_num_groups=4, layers_per_block=1).eval()


def unet():
    return UNet2DConditionModel(
        block_out_channels=(8, 16),
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=6,
        attention_head_dim=4,
        norm_num_groups=4,
        layers_per_block=1,
    ).eval()


def inputs(dtype=torch.float32):
    return torch.randn(2, 4, 6, 8, dtype=dtype), torch.tensor([3, 500]), torch.randn(2, 5, 6, dtype=dtype)


@pytest.mark.drawn(1)
@pytest.mark.parametrize("return_dict", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_unet(dtype, return_dict):
    model = unet().to(dtype)
    plan = plan_of(model, model, *inputs(dtype), return_dict=return_dict)
    with torch.no_grad():
        for _ in range(2):
            args = inputs(dtype)
            found, expected = plan(args, {"return_dict": return_dict}), model(*args, return_dict=return_dict)
            assert type(found) is type(expected)
            torch.testing.assert_close(found[0], expected[0], atol=1e-4, rtol=1e-4)
            for p in model.parameters():
                p.add_(0.01)
            model.load_state_dict({k: v + 0.01 for k, v in model.state_dict().items()}, assign=True)


def test_a_decode_and_an_encoder():
    model, z, x = autoencoder(), torch.randn(1, 4, 5, 3), torch.randn(1, 3, 6, 7)
    decode, encode = plan_of(model, model.decode, z), plan_of(model, model.encoder, x)
    with torch.no_grad():
        found = decode((-z,))
        assert type(found) is DecoderOutput
        torch.testing.assert_close(found.sample, model.decode(-z).sample, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(encode((-x,)), model.encoder(-x), atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_a_model_goes_at_once():
    model = unet()
    model.plan = plan_of(model, model, *inputs())
    model.plan(inputs(), {})
    gone = weakref.ref(model.mid_block), weakref.ref(model.conv_in.weight)
    gc.collect()
    gc.disable()
    try:
        del model.plan
        del model
        assert [reference() for reference in gone] == [None, None]
    finally:
        gc.enable()


def test_the_table_of_a_model_without_weights():
    model, args = unet(), inputs()
    with_weights = plan_of(model, model, *args)
    without = plan_of(model.to("meta"), model, *(t.to("meta") for t in args))
    assert str(without) == str(with_weights)
    assert len(str(without).splitlines()) > len(without.steps) > 50
