"""Whole pipelines of the families whose autoencoder or UNet has fusions of its own."""

from collections.abc import Callable
from typing import NamedTuple

import diffusers
import PIL.Image
import torch
from transformers import SiglipImageProcessor, SiglipVisionConfig, SiglipVisionModel

from tests.coverage import networks, relatives
from tests.coverage.networks import flow, without_text
from tests.coverage.parts import Built, image, model, noise, pipeline, scheduler
from tests.coverage.relatives import beside, embeds, feature_extractor, image_encoder


class Family(NamedTuple):
    """A pipeline, and what runs fused in it.

    ``fusions``: beginnings of names in the report. ``stock``: classes with such a fusion whose fused forward
    may call stock's. ``bound``: maximum error in fp32, relative to stock's output.
    """

    name: str
    build: Callable[[], Built]
    fusions: tuple[str, ...]
    stock: tuple[str, ...]
    bound: float


FAMILIES: list[Family] = []


def family(name, *fusions, stock=(), bound=1e-5):
    """Adds a builder to ``FAMILIES``."""

    def add(build):
        FAMILIES.append(Family(name, build, fusions, stock, bound))
        return build

    return add


FRAMES = {"num_frames": 5, "height": 16, "width": 16}
MASKED = {"mask": True, "mask_name": "prompt_attention_mask"}


def picture(size=16):
    pixels = image(size=size)[0].mul(255).byte().movedim(0, -1)
    return PIL.Image.fromarray(pixels.cpu().numpy())


def built(section, name):
    """The pipeline or model of a row of the coverage table."""
    return next(row for row in section if row.name == name).build()


def autoencoder(name):
    """The autoencoder of the row ``name`` of the coverage table.

    Its last convolution is scaled down, because pipelines clamp the video to [0, 1].
    """
    network = built(networks.autoencoders, name).obj
    last = getattr(network.decoder, "conv_out", None) or network.decoder.proj_out
    with torch.no_grad():
        for parameter in last.parameters():
            parameter.mul_(0.3)
    return network


# --- Wan, Qwen-Image --------------------------------------------------------------------------------


def wan(vae, in_channels=4, **options):
    """Components of a pipeline of Wan."""
    network = model(
        "WanTransformer3DModel",
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=in_channels,
        out_channels=4,
        text_dim=32,
        freq_dim=32,
        ffn_dim=32,
        num_layers=1,
        rope_max_seq_len=32,
        **options,
    )
    return {"transformer": network, "vae": vae, "scheduler": flow(), **without_text("")}


WAN = {"scale_factor_temporal": 2, "latents_mean": [0.1] * 4, "latents_std": [2.0] * 4}


def wan_21():
    return networks.wan(**WAN, scale_factor_spatial=4)


@family("Wan 2.1, text to video")
def _():
    return pipeline("WanPipeline", wan(wan_21()), **embeds(), **FRAMES)


@family("Wan 2.1, video to video")
def _():
    parts = wan(wan_21()) | {"scheduler": diffusers.UniPCMultistepScheduler(use_flow_sigmas=True)}
    inputs = embeds(video=[picture()] * 5, strength=0.8, height=16, width=16)
    return pipeline("WanVideoToVideoPipeline", parts, **inputs)


@family("Wan 2.1, image to video")
def _():
    parts = wan(wan_21(), in_channels=4 + 2 + 4, image_dim=32)
    parts |= {"image_encoder": image_encoder(), "image_processor": feature_extractor()}
    return pipeline("WanImageToVideoPipeline", parts, image=image(size=16), **embeds(), **FRAMES)


def wan_22():
    patches = {"in_channels": 12, "out_channels": 12, "patch_size": 2, "is_residual": True}
    return networks.wan(**patches, **WAN, scale_factor_spatial=8)


@family("Wan 2.2, text to video")
def _():
    return pipeline("WanPipeline", wan(wan_22()) | {"expand_timesteps": True}, **embeds(), **FRAMES)


@family("Wan 2.2, image to video")
def _():
    parts = wan(wan_22()) | {"expand_timesteps": True}
    return pipeline("WanImageToVideoPipeline", parts, image=image(size=16), **embeds(), **FRAMES)


@family("Qwen-Image, text to image")
def _():
    return built(networks.transformers, "Qwen-Image")


@family("Qwen-Image, image to image")
def _():
    parts = built(networks.transformers, "Qwen-Image").obj.components
    states = {"prompt": None, "prompt_embeds": noise(1, 5, 32)}
    states["prompt_embeds_mask"] = noise(1, 5).isfinite().long()
    return pipeline("QwenImageImg2ImgPipeline", parts, image=image(size=32), **states, height=32, width=32)


# --- Flux2 ------------------------------------------------------------------------------------------


# The decoder calls stock's forward for each slice of a batch.
@family("Flux2, editing", "conv_norm_out", "resnet_block", stock=("Decoder",))
def _():
    return networks.flux2(image=picture(64))


# --- HunyuanVideo, HunyuanImage ---------------------------------------------------------------------


def hunyuan_video(**options):
    network = model(
        "HunyuanVideoTransformer3DModel",
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=10,
        num_layers=1,
        num_single_layers=1,
        num_refiner_layers=1,
        patch_size=1,
        text_embed_dim=32,
        pooled_projection_dim=8,
        rope_axes_dim=(2, 4, 4),
        **options,
    )
    decoder = autoencoder("HunyuanVideo")
    parts = {"transformer": network, "vae": decoder, "scheduler": flow()}
    inputs = embeds(**MASKED, pooled_prompt_embeds=noise(1, 8), negative_pooled_prompt_embeds=noise(1, 8))
    return parts | without_text("", "_2"), inputs


@family("HunyuanVideo, text to video")
def _():
    parts, inputs = hunyuan_video(in_channels=4)
    return pipeline("HunyuanVideoPipeline", parts, **inputs, **FRAMES)


@family("HunyuanVideo, image to video")
def _():
    parts, inputs = hunyuan_video(in_channels=2 * 4 + 1, image_condition_type="latent_concat")
    parts["image_processor"] = None
    return pipeline("HunyuanVideoImageToVideoPipeline", parts, image=image(size=16), **inputs, **FRAMES)


def two_texts():
    """What two text encoders would make of a prompt and of none."""
    ones = noise(1, 5).isfinite().long()
    masks = dict.fromkeys(("prompt_embeds_mask", "negative_prompt_embeds_mask"), ones)
    found = embeds() | masks
    return found | {f"{name}_2": value for name, value in found.items() if name != "prompt"}


def hunyuan_video_15():
    network = model(
        "HunyuanVideo15Transformer3DModel",
        in_channels=2 * 4 + 1,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=10,
        num_layers=1,
        num_refiner_layers=1,
        text_embed_dim=32,
        text_embed_2_dim=32,
        image_embed_dim=32,
        rope_axes_dim=(2, 4, 4),
        target_size=16,
    )
    parts = {
        "transformer": network,
        "vae": autoencoder("HunyuanVideo 1.5"),
        "scheduler": flow(),
        "guider": diffusers.guiders.ClassifierFreeGuidance(),
    }
    return parts | without_text("", "_2")


@family("HunyuanVideo 1.5, text to video")
def _():
    return pipeline("HunyuanVideo15Pipeline", hunyuan_video_15(), **two_texts(), **FRAMES)


@family("HunyuanVideo 1.5, image to video")
def _():
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1}
    encoder = SiglipVisionConfig(**sizes, image_size=16, patch_size=8)
    parts = hunyuan_video_15() | {
        "image_encoder": model(SiglipVisionModel, encoder),
        "feature_extractor": SiglipImageProcessor(size={"height": 16, "width": 16}),
    }
    return pipeline("HunyuanVideo15ImageToVideoPipeline", parts, image=picture(), **two_texts(), num_frames=5)


def hunyuan_image(vae, channels, **options):
    """channels: of the transformer (input, output)."""
    network = model(
        "HunyuanImageTransformer2DModel",
        in_channels=channels[0],
        out_channels=channels[1],
        num_attention_heads=2,
        attention_head_dim=10,
        num_layers=1,
        num_single_layers=1,
        num_refiner_layers=1,
        text_embed_dim=32,
        **options,
    )
    return {"transformer": network, "vae": vae, "scheduler": flow()}


@family("HunyuanImage")
def _():
    vae = autoencoder("HunyuanImage")
    vae.register_to_config(scaling_factor=0.8)
    parts = hunyuan_image(vae, (4, 4), patch_size=(1, 1), text_embed_2_dim=32, rope_axes_dim=(4, 6))
    parts |= without_text("", "_2") | {"guider": diffusers.guiders.AdaptiveProjectedMixGuidance()}
    return pipeline("HunyuanImagePipeline", parts, **two_texts(), height=16, width=16)


@family("HunyuanImage, refiner")
def _():
    vae = autoencoder("HunyuanImage, refiner")
    options = {"patch_size": (1, 1, 1), "rope_axes_dim": (2, 4, 4), "guidance_embeds": True}
    parts = hunyuan_image(vae, (16, 8), **options) | without_text("")
    inputs = {name: value for name, value in two_texts().items() if not name.endswith("_2")}
    return pipeline("HunyuanImageRefinerPipeline", parts, image=image(size=16), **inputs, height=16, width=16)


# --- Cosmos -----------------------------------------------------------------------------------------


class Permissive:
    """Takes the place of Cosmos' safety checker, whose weights would have to be downloaded.

    The pipeline rounds its video to 8 bits for the checker.
    """

    def to(self, device):
        pass

    def check_text_safety(self, prompt):
        return True

    def check_video_safety(self, frames):
        return frames


def cosmos(name, in_channels, **inputs):
    network = model(
        "CosmosTransformer3DModel",
        in_channels=in_channels,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=12,
        num_layers=1,
        mlp_ratio=2,
        text_embed_dim=32,
        adaln_lora_dim=4,
        max_size=(4, 32, 32),
        patch_size=(1, 1, 1),
        concat_padding_mask=False,
        extra_pos_embed_type=None,
    )
    euler = diffusers.EDMEulerScheduler(sigma_min=0.002, sigma_max=80, sigma_data=0.5)
    parts = {"transformer": network, "vae": autoencoder("Cosmos"), "scheduler": euler}
    return pipeline(name, parts | without_text("") | {"safety_checker": Permissive()}, **inputs)


@family("Cosmos, text to world", bound=1e-3)
def _():
    inputs = embeds(num_frames=9, height=16, width=16)
    return cosmos("CosmosTextToWorldPipeline", 4, **inputs)


@family("Cosmos, video to world", bound=1e-3)
def _():
    inputs = embeds(num_frames=9, height=16, width=16)
    return cosmos("CosmosVideoToWorldPipeline", 5, image=image(size=16), **inputs)


# --- LTX --------------------------------------------------------------------------------------------

LTX = {"num_frames": 9, "height": 32, "width": 32}


def ltx(vae):
    network = model(
        "LTXVideoTransformer3DModel",
        in_channels=8,
        out_channels=8,
        num_attention_heads=2,
        attention_head_dim=8,
        cross_attention_dim=16,
        num_layers=1,
        caption_channels=32,
    )
    return {"transformer": network, "vae": vae, "scheduler": flow()} | without_text("")


@family("LTX-Video, text to video")
def _():
    return pipeline("LTXPipeline", ltx(autoencoder("LTX-Video")), **embeds(**MASKED), **LTX)


@family("LTX-Video, image to video")
def _():
    inputs = embeds(**MASKED, image=image(size=32))
    return pipeline("LTXImageToVideoPipeline", ltx(autoencoder("LTX-Video")), **inputs, **LTX)


@family("LTX-Video 0.9.5, text to video")
def _():
    inputs = embeds(**MASKED, decode_timestep=0.05, decode_noise_scale=0.025)
    return pipeline("LTXPipeline", ltx(autoencoder("LTX-Video 0.9.5")), **inputs, **LTX)


def ltx2(name, **inputs):
    rope = {"rope_type": "split", "rope_double_precision": False}
    network = model(
        "LTX2VideoTransformer3DModel",
        in_channels=8,
        out_channels=8,
        num_attention_heads=2,
        attention_head_dim=8,
        cross_attention_dim=16,
        audio_in_channels=8,
        audio_out_channels=8,
        audio_num_attention_heads=2,
        audio_attention_head_dim=4,
        audio_cross_attention_dim=8,
        num_layers=1,
        caption_channels=16,
        **rope,
    )
    connectors = model(
        beside("LTX2Pipeline", "LTX2TextConnectors"),
        caption_channels=16,
        text_proj_in_factor=2,
        video_connector_num_attention_heads=2,
        video_connector_attention_head_dim=8,
        video_connector_num_layers=1,
        video_connector_num_learnable_registers=None,
        audio_connector_num_attention_heads=2,
        audio_connector_attention_head_dim=8,
        audio_connector_num_layers=1,
        audio_connector_num_learnable_registers=None,
        connector_rope_base_seq_len=8,
        **rope,
    )
    audio = model(
        "AutoencoderKLLTX2Audio",
        base_channels=8,
        ch_mult=(1,),
        num_res_blocks=1,
        resolution=32,
        latent_channels=2,
        mel_bins=16,
    )
    vocoder = model(
        beside("LTX2Pipeline", "LTX2Vocoder"),
        in_channels=32,
        hidden_channels=32,
        upsample_kernel_sizes=[4, 4],
        upsample_factors=[2, 2],
        resnet_kernel_sizes=[3],
        resnet_dilations=[[1, 3, 5]],
    )
    decoder = autoencoder("LTX-2")
    decoder.spatial_compression_ratio = decoder.temporal_compression_ratio = 8
    parts = {
        "transformer": network,
        "vae": decoder,
        "audio_vae": audio,
        "connectors": connectors,
        "vocoder": vocoder,
        "scheduler": flow(),
    }
    # One call of the transformer for each step and prompt.
    inputs |= dict.fromkeys(("stg_scale", "audio_stg_scale"), 0.0)
    inputs |= dict.fromkeys(("modality_scale", "audio_modality_scale"), 1.0)
    return pipeline(name, parts | without_text(""), **embeds(**MASKED), **inputs, **LTX)


@family("LTX-2, text to video")
def _():
    return ltx2("LTX2Pipeline")


@family("LTX-2, image to video")
def _():
    return ltx2("LTX2ImageToVideoPipeline", image=image(size=32), image_crf=0)


# --- CogVideoX, Mochi, Allegro, EasyAnimate ---------------------------------------------------------


def cogvideox(in_channels):
    network = model(
        "CogVideoXTransformer3DModel",
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=in_channels,
        out_channels=4,
        time_embed_dim=2,
        text_embed_dim=32,
        num_layers=1,
        sample_width=2,
        sample_height=2,
        sample_frames=9,
        max_text_seq_length=5,
        use_rotary_positional_embeddings=True,
    )
    decoder = autoencoder("CogVideoX")
    parts = {"transformer": network, "vae": decoder, "scheduler": scheduler(name="CogVideoXDDIMScheduler")}
    return parts | without_text("")


@family("CogVideoX, text to video")
def _():
    return pipeline("CogVideoXPipeline", cogvideox(4), **embeds(), **FRAMES)


@family("CogVideoX, image to video")
def _():
    inputs = embeds(image=image(size=16))
    return pipeline("CogVideoXImageToVideoPipeline", cogvideox(8), **inputs, **FRAMES)


@family("CogVideoX, video to video")
def _():
    inputs = embeds(video=[picture()] * 5, strength=0.8, height=16, width=16)
    return pipeline("CogVideoXVideoToVideoPipeline", cogvideox(4), **inputs)


@family("Mochi")
def _():
    network = model(
        "MochiTransformer3DModel",
        num_attention_heads=2,
        attention_head_dim=8,
        num_layers=2,
        pooled_projection_dim=16,
        in_channels=12,
        text_embed_dim=32,
        time_embed_dim=4,
        max_sequence_length=5,
    )
    parts = {"transformer": network, "vae": autoencoder("Mochi"), "scheduler": flow()} | without_text("")
    return pipeline("MochiPipeline", parts, **embeds(**MASKED), num_frames=7, height=16, width=16)


@family("Allegro")
def _():
    network = model(
        "AllegroTransformer3DModel",
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        num_layers=1,
        cross_attention_dim=24,
        sample_width=2,
        sample_height=2,
        sample_frames=2,
        caption_channels=32,
    )
    parts = {
        "transformer": network,
        "vae": autoencoder("Allegro"),
        "scheduler": scheduler(name="DDIMScheduler"),
    }
    inputs = embeds(**MASKED, negative_prompt=None, num_frames=8, height=16, width=16)
    return pipeline("AllegroPipeline", parts | without_text(""), **inputs)


def easyanimate(name, in_channels, options, **inputs):
    """options: of the transformer."""
    network = model(
        "EasyAnimateTransformer3DModel",
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=in_channels,
        out_channels=4,
        time_embed_dim=2,
        text_embed_dim=32,
        num_layers=1,
        sample_width=8,
        sample_height=8,
        patch_size=2,
        **options,
    )
    decoder = autoencoder("EasyAnimate")
    decoder.temporal_compression_ratio = 2
    parts = {"transformer": network, "vae": decoder, "scheduler": flow()}
    return pipeline(name, parts | without_text(""), **embeds(**MASKED), **inputs, **FRAMES)


@family("EasyAnimate, text to video")
def _():
    return easyanimate("EasyAnimatePipeline", 4, {})


# diffusers 0.42.1 can neither resize the mask nor run EasyAnimateControlPipeline.
@family("EasyAnimate, inpainting")
def _():
    frames = noise(1, 3, 5, 16, 16).sigmoid()
    inputs = {"video": frames, "mask_video": 255.0 * (frames[:, :1] > 0.5)}
    options = {"resize_inpaint_mask_directly": False, "add_noise_in_inpaint_model": False}
    return easyanimate("EasyAnimateInpaintPipeline", 3 * 4, options, **inputs)


# --- UNets for video --------------------------------------------------------------------------------


def one_step(name, **inputs):
    """The pipeline of a row of the coverage table, with one step for 8 x 8 pixels."""
    pipe = built(relatives.video, name).obj
    size = {"num_inference_steps": 1, "num_frames": 2, "height": 8, "width": 8}
    return pipeline(type(pipe).__name__, pipe.components, **size, **inputs)


@family(
    "Stable Video Diffusion", "spatio_temporal_res_block", "transformer_spatio_temporal", "up_block_spatio"
)
def _():
    return one_step("Stable Video Diffusion", image=image(size=16), max_guidance_scale=1.0)


@family("AnimateDiff", "motion_module", "up_block_motion", "cross_attn_up_block_motion")
def _():
    return one_step("AnimateDiff", guidance_scale=1.0)


@family("AnimateDiff, video to video", "motion_module", "up_block_motion", "cross_attn_up_block_motion")
def _():
    parts = built(relatives.video, "AnimateDiff").obj.components
    inputs = {"video": [picture()] * 2, "height": 16, "width": 16, "strength": 1.0, "guidance_scale": 1.0}
    return pipeline("AnimateDiffVideoToVideoPipeline", parts, **inputs, num_inference_steps=1)


@family("text to video (ModelScope)", "sequential", "transformer_temporal", "resnet_block")
def _():
    return one_step("text to video (ModelScope)", guidance_scale=1.0)


@family("I2VGenXL", "sequential", "transformer_temporal", "resnet_block")
def _():
    return one_step("I2VGenXL", image=image(size=8), guidance_scale=1.0, clip_skip=None)
