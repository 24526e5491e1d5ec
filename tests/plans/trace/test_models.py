"""Models of diffusers: their graphs compute for other inputs what the models compute."""

import pytest
import torch

from sdfastgn.plans.trace.traced import Untraceable
from sdfastgn.plans.trace.tracer import trace
from tests.plans.trace.runs import check, targets

pytest.importorskip("diffusers")
from tests.patches import samples  # it imports diffusers
from tests.plans.models import asked, of_diffusers

aten = torch.ops.aten


def test_autoencoder_kl():
    model = samples.vae().eval()
    check(lambda z: model.decode(z, return_dict=False)[0], (1, 4, 4, 4), module=model)
    check(lambda x: model.encode(x).latent_dist.mode(), (1, 3, 8, 8), module=model)
    with pytest.raises(Untraceable, match="random"):
        trace(model, lambda x: torch.randn_like(model.encode(x).latent_dist.mode()), torch.randn(1, 3, 8, 8))


def test_tiled_decoder():
    model = samples.vae().eval()
    model.enable_tiling()
    model.tile_sample_min_size, model.tile_latent_min_size = 8, 4
    check(lambda z: model.decode(z).sample, (1, 4, 6, 6), module=model)


def test_unet():
    model = samples.unet().eval()
    call = lambda x, tokens: model(x, torch.tensor(5), tokens, return_dict=False)[0]  # noqa: E731
    found = targets(check(call, (2, 4, 8, 8), (2, 3, 12), module=model))
    assert aten.scaled_dot_product_attention.default in found
    assert aten.group_norm.default in found
    assert aten.layer_norm.default in found


def test_a_decoder_whose_calls_leave_attributes():
    sizes = {"base_dim": 8, "decoder_base_dim": 8, "z_dim": 4, "dim_mult": [1, 2, 2], "num_res_blocks": 1}
    sizes["temperal_downsample"] = [False, True]
    model = of_diffusers("AutoencoderKLQwenImage21", **sizes).eval()
    call = lambda z: model.decode(z, return_dict=False)[0]  # noqa: E731
    with pytest.raises(Untraceable, match=r"changes AutoencoderKLQwenImage21\."):
        trace(model, call, torch.randn(1, 4, 1, 4, 4))
    model.clear_cache()  # as after a call
    check(call, (1, 4, 1, 4, 4), module=model)


def test_autoencoder_dc():
    kinds = {"block_types": ("ResBlock", "EfficientViTBlock"), "block_out_channels": (8, 8)}
    kinds |= {"qkv_multiscales": ((), (5,)), "layers_per_block": (1, 1)}
    blocks = {f"{half}_{name}": value for half in ("encoder", "decoder") for name, value in kinds.items()}
    model = of_diffusers(
        "AutoencoderDC", latent_channels=4, attention_head_dim=2, upsample_block_type="interpolate", **blocks
    ).eval()
    check(lambda z: model.decode(z, return_dict=False)[0], (1, 4, 4, 4), module=model)


@pytest.mark.slow
def test_a_transformer_whose_table_of_positions_is_cached():
    heads = {"attention_head_dim": 16, "num_attention_heads": 2, "axes_dims_rope": (8, 4, 4)}
    sizes = {"in_channels": 16, "out_channels": 4, "num_layers": 1, "joint_attention_dim": 32}
    model = of_diffusers("QwenImageTransformer2DModel", **heads, **sizes).eval()

    def call(x, tokens):
        time = torch.tensor([0.5])
        lengths = asked("QwenImageTransformer2DModel", txt_seq_lens=[3])
        return model(x, tokens, None, time, img_shapes=[[(1, 4, 4)]], return_dict=False, **lengths)[0]

    check(call, (1, 16, 16), (1, 3, 32), module=model)
