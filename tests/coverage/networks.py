"""Rows of the coverage table: transformers with their VAE, autoencoders, networks and layers alone."""

import diffusers
from diffusers.models.activations import get_activation
from diffusers.models.attention_processor import SpatialNorm
from diffusers.models.normalization import AdaGroupNorm, RMSNorm
from diffusers.models.resnet import ResnetBlock2D
from torch import nn

from tests.coverage.parts import TWO_LEVELS, Built, Rows, model, noise, pipeline, scheduler, vae
from tests.coverage.relatives import embeds, small_vae
from tests.coverage.stable_diffusion import tiny_vae
from tests.patches.transformers import FLUX, TRANSFORMERS

transformers = Rows("Diffusion transformers")
SIZE = {"height": 16, "width": 16}


def tiny(name, **options):
    """The transformer ``name`` of ``TRANSFORMERS``, with other settings where ``options`` say so."""
    kind = TRANSFORMERS[name]
    return model(kind.kind, **{**kind.config, **options})


def flow():
    return diffusers.FlowMatchEulerDiscreteScheduler()


def without_text(*numbers):
    return {f"{part}{n}": None for n in numbers for part in ("text_encoder", "tokenizer")}


@transformers("Flux")
def _():
    network = tiny("flux")
    parts = {"transformer": network, "vae": small_vae(shift_factor=0.1), "scheduler": flow()}
    states = {"prompt_embeds": noise(1, 5, 32), "pooled_prompt_embeds": noise(1, 32), "prompt": None}
    return pipeline("FluxPipeline", parts | without_text("", "_2"), **states, **SIZE)


def flux2(**inputs):
    changes = {"timestep_guidance_channels": 32, "axes_dims_rope": (4, 4, 4, 4)}
    network = model("Flux2Transformer2DModel", **{**FLUX, **changes})
    sizes = {"block_out_channels": (12, 24), "layers_per_block": 1, "norm_num_groups": 4}
    decoder = model("AutoencoderKLFlux2", **sizes, **TWO_LEVELS, latent_channels=4, sample_size=16)
    decoder.bn.running_var.abs_()
    parts = {"transformer": network, "vae": decoder, "scheduler": flow()} | without_text("")
    return pipeline("Flux2Pipeline", parts, prompt=None, prompt_embeds=noise(1, 5, 32), **inputs, **SIZE)


@transformers("Flux2")
def _():
    return flux2()


@transformers("Stable Diffusion 3")
def _():
    parts = {"transformer": tiny("sd3"), "vae": small_vae(shift_factor=0.1), "scheduler": flow()}
    pooled = {"pooled_prompt_embeds": noise(1, 64), "negative_pooled_prompt_embeds": noise(1, 64)}
    return pipeline(
        "StableDiffusion3Pipeline", parts | without_text("", "_2", "_3"), **embeds(), **pooled, **SIZE
    )


def pixart(decoder):
    network = model(
        "PixArtTransformer2DModel",
        sample_size=8,
        num_layers=1,
        patch_size=2,
        attention_head_dim=8,
        num_attention_heads=3,
        caption_channels=32,
        in_channels=4,
        cross_attention_dim=24,
        out_channels=8,
    )
    parts = {"transformer": network, "vae": decoder, "scheduler": scheduler(name="DDIMScheduler")}
    inputs = embeds(
        mask=True, mask_name="prompt_attention_mask", use_resolution_binning=False, negative_prompt=None
    )
    return pipeline("PixArtAlphaPipeline", parts | without_text(""), **inputs, height=64, width=64)


@transformers("PixArt")
def _():
    return pixart(vae())


@transformers("PixArt with AutoencoderTiny")
def _():
    return pixart(tiny_vae())


@transformers("Sana")
def _():
    network = model(
        "SanaTransformer2DModel",
        patch_size=1,
        in_channels=4,
        out_channels=4,
        num_layers=1,
        num_attention_heads=2,
        attention_head_dim=8,
        num_cross_attention_heads=2,
        cross_attention_head_dim=8,
        cross_attention_dim=16,
        caption_channels=32,
        sample_size=8,
    )
    blocks = {
        f"{part}_{name}": value
        for part in ("encoder", "decoder")
        for name, value in {
            "block_types": ("ResBlock", "EfficientViTBlock"),
            "block_out_channels": (8, 8),
            "qkv_multiscales": ((), (5,)),
            "layers_per_block": (1, 1),
        }.items()
    }
    kinds = {"downsample_block_type": "conv", "upsample_block_type": "interpolate"}
    decoder = model("AutoencoderDC", latent_channels=4, attention_head_dim=2, **blocks, **kinds)
    parts = {"transformer": network, "vae": decoder, "scheduler": flow()} | without_text("")
    options = {"use_resolution_binning": False, "complex_human_instruction": None, "negative_prompt": None}
    return pipeline(
        "SanaPipeline",
        parts,
        **embeds(mask=True, mask_name="prompt_attention_mask"),
        **options,
        height=32,
        width=32,
    )


@transformers("Qwen-Image")
def _():
    network = tiny("qwen_image")
    decoder = model(
        "AutoencoderKLQwenImage",
        base_dim=24,
        z_dim=4,
        dim_mult=[1, 2, 4],
        num_res_blocks=1,
        temperal_downsample=[False, True],
        latents_mean=[0.0] * 4,
        latents_std=[1.0] * 4,
    )
    parts = {"transformer": network, "vae": decoder, "scheduler": flow()} | without_text("")
    states = {
        "prompt": None,
        "prompt_embeds": noise(1, 5, 32),
        "prompt_embeds_mask": noise(1, 5).isfinite().long(),
    }
    return pipeline("QwenImagePipeline", parts, **states, height=32, width=32)


# --- autoencoders ---------------------------------------------------------------------------------

autoencoders = Rows("Autoencoders")


def decodes(network, *latents):
    return Built(network, lambda: network.decode(noise(*latents))[0])


def video_vae(name, block, **options):
    blocks = {"down_block_types": (f"{block}DownBlock3D",) * 4, "up_block_types": (f"{block}UpBlock3D",) * 4}
    sizes = {
        "block_out_channels": (8,) * 4,
        "latent_channels": 4,
        "layers_per_block": 1,
        "norm_num_groups": 4,
    }
    return decodes(model(name, **blocks, **sizes, **options), 1, 4, 2, 2, 2)


@autoencoders("HunyuanVideo")
def _():
    return video_vae("AutoencoderKLHunyuanVideo", "HunyuanVideo")


@autoencoders("CogVideoX")
def _():
    return video_vae("AutoencoderKLCogVideoX", "CogVideoX", temporal_compression_ratio=4)


@autoencoders("Allegro")
def _():
    built = video_vae("AutoencoderKLAllegro", "Allegro", temporal_compression_ratio=4)
    built.obj.enable_tiling()  # diffusers decodes it no other way
    built.obj.kernel = built.obj.stride = (8, 16, 16)
    return built


@autoencoders("EasyAnimate")
def _():
    blocks = {f"{way}_block_types": (f"SpatialTemporal{way.title()}Block3D",) * 2 for way in ("down", "up")}
    sizes = {"block_out_channels": (8, 16), "latent_channels": 4, "layers_per_block": 1}
    return decodes(model("AutoencoderKLMagvit", **blocks, **sizes, norm_num_groups=4), 1, 4, 2, 2, 2)


@autoencoders("Mochi")
def _():
    sizes = {"encoder_block_out_channels": (32,) * 4, "decoder_block_out_channels": (32,) * 4}
    network = model("AutoencoderKLMochi", **sizes, layers_per_block=(1,) * 5)
    return decodes(network, 1, 12, 2, 2, 2)


@autoencoders("LTX-Video")
def _():
    switches = (True, True, False, False)
    network = model(
        "AutoencoderKLLTXVideo",
        latent_channels=8,
        block_out_channels=(8,) * 4,
        decoder_block_out_channels=(8,) * 4,
        layers_per_block=(1,) * 5,
        decoder_layers_per_block=(1,) * 5,
        spatio_temporal_scaling=switches,
        decoder_spatio_temporal_scaling=switches,
        patch_size=1,
    )
    return decodes(network, 1, 8, 2, 4, 4)


@autoencoders("LTX-Video 0.9.5")
def _():
    network = model(
        "AutoencoderKLLTXVideo",
        latent_channels=8,
        block_out_channels=(8,) * 4,
        decoder_block_out_channels=(8, 16),
        layers_per_block=(1,) * 5,
        decoder_layers_per_block=(1,) * 3,
        decoder_spatio_temporal_scaling=(True,) * 2,
        upsample_factor=(2, 2),
        upsample_residual=(True, True),
        timestep_conditioning=True,
        patch_size=1,
    )
    return Built(network, lambda: network.decode(noise(1, 8, 2, 2, 2), noise(1))[0])


@autoencoders("LTX-2")
def _():
    network = model(
        "AutoencoderKLLTX2Video",
        latent_channels=8,
        block_out_channels=(8,) * 4,
        decoder_block_out_channels=(8, 16, 32),
        layers_per_block=(1,) * 5,
        decoder_layers_per_block=(1,) * 4,
        patch_size=1,
    )
    return decodes(network, 1, 8, 2, 2, 2)


@autoencoders("Cosmos")
def _():
    sizes = {"encoder_block_out_channels": (8,) * 4, "decode_block_out_channels": (8,) * 4}
    network = model("AutoencoderKLCosmos", **sizes, latent_channels=4, num_layers=1)
    return decodes(network, 1, 4, 2, 2, 2)


def hunyuan_15(name):
    sizes = {"block_out_channels": (16, 32), "latent_channels": 4, "layers_per_block": 1}
    network = model(name, **sizes, spatial_compression_ratio=2, temporal_compression_ratio=2)
    return decodes(network, 1, 4, 2, 2, 2)


@autoencoders("HunyuanVideo 1.5")
def _():
    return hunyuan_15("AutoencoderKLHunyuanVideo15")


@autoencoders("HunyuanImage, refiner")
def _():
    return hunyuan_15("AutoencoderKLHunyuanImageRefiner")


@autoencoders("HunyuanImage")
def _():
    network = model(
        "AutoencoderKLHunyuanImage",
        in_channels=3,
        out_channels=3,
        latent_channels=4,
        block_out_channels=(32, 32),
        layers_per_block=1,
        spatial_compression_ratio=2,
        sample_size=8,
    )
    return decodes(network, 1, 4, 2, 3)


@autoencoders("VQModel")
def _():
    sizes = {"block_out_channels": (32, 64), "norm_num_groups": 8}
    return decodes(model("VQModel", **sizes, **TWO_LEVELS), 1, 3, 8, 8)


@autoencoders("ConsistencyDecoderVAE")
def _():
    network = model(
        "ConsistencyDecoderVAE",
        encoder_block_out_channels=(16, 32),
        encoder_down_block_types=("DownEncoderBlock2D",) * 2,
        encoder_norm_num_groups=4,
        decoder_block_out_channels=(16, 32),
        decoder_down_block_types=("ResnetDownsampleBlock2D",) * 2,
        decoder_up_block_types=("ResnetUpsampleBlock2D",) * 2,
        decoder_layers_per_block=1,
        decoder_norm_num_groups=4,
    )
    return decodes(network, 1, 4, 8, 8)


def wan(**options):
    """Of Wan 2.1; three latent frames are three chunks."""
    sizes = {"base_dim": 8, "z_dim": 4, "dim_mult": [1, 2, 2], "num_res_blocks": 1}
    return model("AutoencoderKLWan", **sizes, temperal_downsample=[False, True], **options)


@autoencoders("Wan 2.1")
def _():
    return decodes(wan(), 1, 4, 3, 2, 3)


@autoencoders("Wan 2.2")
def _():
    patches = {"in_channels": 12, "out_channels": 12, "patch_size": 2}
    return decodes(wan(**patches, is_residual=True, scale_factor_spatial=8), 1, 4, 3, 2, 3)


# --- networks and layers alone ----------------------------------------------------------------------

alone = Rows("Networks and layers alone")


@alone("UNet1DModel")
def _():
    network = model(
        "UNet1DModel",
        block_out_channels=(8, 16),
        in_channels=14,
        out_channels=14,
        time_embedding_type="positional",
        use_timestep_embedding=True,
        flip_sin_to_cos=False,
        freq_shift=1.0,
        out_block_type="OutConv1DBlock",
        mid_block_type="MidResTemporalBlock1D",
        down_block_types=("DownResnetBlock1D",) * 2,
        up_block_types=("UpResnetBlock1D",),
        act_fn="swish",
    )
    return Built(network, lambda: network(noise(1, 14, 16), 10)[0])


@alone("UNet2DModel")
def _():
    blocks = {
        "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
        "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
    }
    network = model("UNet2DModel", sample_size=8, block_out_channels=(32, 64), layers_per_block=1, **blocks)
    return Built(network, lambda: network(noise(1, 3, 8, 8), 10)[0])


def on_image(network):
    return Built(network, lambda: network(noise(1, 32, 8, 8)))


def residual_block(activation):
    block = model(ResnetBlock2D, in_channels=32, temb_channels=None, groups=4, non_linearity=activation)
    return Built(block, lambda: block(noise(1, 32, 8, 8), None))


@alone("residual block with swish")
def _():
    return residual_block("swish")


@alone("residual block with Mish")
def _():
    return residual_block("mish")


@alone("GroupNorm and Mish in a Sequential")
def _():
    return on_image(nn.Sequential(model(nn.GroupNorm, 4, 32), get_activation("mish")))


@alone("SpatialNorm")
def _():
    norm = model(SpatialNorm, 32, 4)
    return Built(norm, lambda: norm(noise(1, 32, 8, 8), noise(1, 4, 4, 4)))


@alone("AdaGroupNorm")
def _():
    norm = model(AdaGroupNorm, 16, 32, 4)
    return Built(norm, lambda: norm(noise(1, 32, 8, 8), noise(1, 16)))


@alone("RMSNorm")
def _():
    return on_image(model(RMSNorm, 8, eps=1e-5))


SECTIONS = (transformers, autoencoders, alone)
