"""The example of a VQGAN: the checkpoint's format, the same values as diffusers, and training."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from diffusers.loaders.single_file_utils import convert_ldm_vae_checkpoint
from torch import nn

from tests.command_line import ROOT
from tests.patches import samples

CONFIG = {
    "ch": 32,
    "out_ch": 3,
    "ch_mult": (1, 2),
    "num_res_blocks": 1,
    "attn_resolutions": (),
    "in_channels": 3,
    "resolution": 16,
    "z_channels": 4,
}


@pytest.fixture(scope="module")
def vqgan():
    spec = importlib.util.spec_from_file_location("vqgan", ROOT / "docs" / "examples" / "vqgan.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def randomized(module):
    for parameter in module.parameters():
        parameter.data = torch.randn_like(parameter) * (0.05 if parameter.dim() > 1 else 0.5)
    return module


def images(seed=0, size=16):
    x = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(seed))
    return x.to(memory_format=torch.channels_last)


def test_its_weights_are_those_of_latent_diffusion(vqgan):
    """diffusers reads them, and computes the same."""
    parts = nn.ModuleDict(
        {
            "encoder": vqgan.Encoder(**CONFIG),
            "decoder": vqgan.Decoder(**CONFIG),
            "quant_conv": nn.Conv2d(8, 8, 1),
            "post_quant_conv": nn.Conv2d(4, 4, 1),
        }
    )
    randomized(parts)
    vae = samples.vae(block_out_channels=(32, 64), norm_num_groups=32)
    vae.load_state_dict(convert_ldm_vae_checkpoint(parts.state_dict(), vae.config))
    with torch.no_grad():
        moments = parts.quant_conv(parts.encoder(images()))
        torch.testing.assert_close(moments, vae.encode(images()).latent_dist.parameters, atol=1e-4, rtol=1e-4)
        z = moments[:, :4]
        decoded = parts.decoder(parts.post_quant_conv(z))
        torch.testing.assert_close(decoded, vae.decode(z).sample, atol=1e-4, rtol=1e-4)


def test_the_names_of_a_checkpoint_with_attention(vqgan):
    model = vqgan.VQModel({**CONFIG, "attn_resolutions": (8,), "dropout": 0.0}, n_embed=16, embed_dim=4)
    names = {name.rpartition(".")[0] for name in model.state_dict()}
    assert {
        "encoder.down.0.downsample.conv",
        "encoder.down.1.attn.0.proj_out",
        "encoder.down.1.block.0.nin_shortcut",
        "encoder.mid.attn_1.q",
        "decoder.up.1.attn.1.norm",
        "decoder.up.1.upsample.conv",
        "decoder.norm_out",
        "quantize.embedding",
        "quant_conv",
        "post_quant_conv",
    } <= names
    assert not any(name.startswith("encoder.down.0.attn") for name in names)


def test_a_quantized_image_is_made_of_codes_and_trains(vqgan):
    model = randomized(vqgan.VQModel(CONFIG, n_embed=16, embed_dim=4)).to(memory_format=torch.channels_last)
    with torch.no_grad():  # codes that lie among what is quantized
        z = model.quant_conv(model.encoder(images(1)))
        model.quantize.embedding.weight.copy_(z.movedim(1, -1).flatten(0, -2)[::8])
    image, loss = model(images())
    (image.square().mean() + loss).backward()
    assert image.is_contiguous(memory_format=torch.channels_last)
    assert all(parameter.grad is not None for parameter in model.parameters())
    quant, _, indices = model.encode(images())
    torch.testing.assert_close(quant.movedim(1, -1), model.quantize.embedding.weight[indices])
    assert indices.unique().numel() > 1


@pytest.mark.gpu
def test_its_kernels_compute_the_same(vqgan):
    model = randomized(vqgan.VQModel(CONFIG, n_embed=16, embed_dim=4)).to(memory_format=torch.channels_last)
    with torch.no_grad():
        z = model.quant_conv(model.encoder(images()))
        expected = z, model.decode(z)
        model.cuda()
        found = model.quant_conv(model.encoder(images().cuda()))
        for a, b in zip((found, model.decode(z.cuda())), expected, strict=True):
            torch.testing.assert_close(a.cpu(), b, atol=1e-3, rtol=1e-3)
