"""The configurations of the models that benchmarks time, by the model's name. This file imports no torch.

The configurations are the public ones of four models:

- ``sd15``: runwayml/stable-diffusion-v1-5;
- ``sdxl``: stabilityai/stable-diffusion-xl-base-1.0;
- ``lcm``: SimianLuo/LCM_Dreamshaper_v7, which is SD1.5 with embedded guidance, here at 512 pixels;
- ``sd_turbo``: stabilityai/sd-turbo, image to image, with the autoencoder of madebyollin/taesd.

``tiny`` and ``tiny_xl`` are small models for tests, with the kinds of blocks of SD1.5 and SDXL. In their
GroupNorms the number of channels of a group is no power of two: it is a multiple of five in the UNets, and
a multiple of three in the VAEs. Settings that equal the defaults of diffusers and transformers are left out:
diffusers' default UNet is that of SD1.5, except for ``sample_size`` and ``cross_attention_dim``.

``VIDEO_NETWORKS`` are single networks (no whole pipelines) of other models. Most of them are for video:

- ``wan``: Wan-AI/Wan2.1-T2V-14B-Diffusers;
- ``qwen_image``: Qwen/Qwen-Image. Its autoencoder has Wan's architecture. An image is a video of one frame;
- ``qwen_image_21`` and ``kvae``: diffusers' AutoencoderKLQwenImage21 and AutoencoderKLKVAE with their
  default settings, for images;
- ``dc_ae``: the autoencoder of Sana, mit-han-lab/dc-ae-f32c32-sana-1.0, for images;
- ``hunyuan_video``: hunyuanvideo-community/HunyuanVideo;
- ``cogvideox``: THUDM/CogVideoX-5b;
- ``svd``: stabilityai/stable-video-diffusion-img2vid;
- ``animatediff``: SD1.5 with guoyww/animatediff-motion-adapter-v1-5-2.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

# The prompt of a benchmark if the user gives none.
PROMPT = "a photograph of an astronaut riding a horse"
# torch's name of the dtype for each value of the command-line option --dtype.
DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}
# Those options of the command line whose default depends on the pipeline: for each option the name of the
# pipeline's argument.
ARGUMENTS = {"steps": "num_inference_steps", "guidance": "guidance_scale"}
# The allowed seeds: signed 64-bit integers. Some tensors are drawn with larger seeds, such as ``seed + 1``,
# which PyTorch also accepts: its limit is 2**64 - 1.
SEEDS = range(-(2**63), 2**63)
UNETS: dict[str, dict[str, Any]] = {
    "tiny": {
        "sample_size": 8,
        "block_out_channels": (40, 80),
        "norm_num_groups": 8,
        "layers_per_block": 1,
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
        "cross_attention_dim": 32,
        "attention_head_dim": 4,
    },
    "tiny_xl": {
        "sample_size": 8,
        "block_out_channels": (40, 80),
        "norm_num_groups": 8,
        "layers_per_block": 1,
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
        "transformer_layers_per_block": [1, 2],
        "attention_head_dim": [2, 4],
        "cross_attention_dim": 64,
        "use_linear_projection": True,
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 8,
        "projection_class_embeddings_input_dim": 6 * 8 + 32,
    },
    "sd15": {"sample_size": 64, "cross_attention_dim": 768},
    "sdxl": {
        "sample_size": 128,
        "block_out_channels": (320, 640, 1280),
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        "transformer_layers_per_block": [1, 2, 10],
        "attention_head_dim": [5, 10, 20],
        "cross_attention_dim": 2048,
        "use_linear_projection": True,
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 256,
        "projection_class_embeddings_input_dim": 2816,
    },
    "lcm": {"sample_size": 64, "cross_attention_dim": 768, "time_cond_proj_dim": 256},
    "sd_turbo": {
        "sample_size": 64,
        "cross_attention_dim": 1024,
        "attention_head_dim": [5, 10, 20, 20],
        "use_linear_projection": True,
    },
}
MODELS = tuple(UNETS)
_VAE: dict[str, Any] = {
    "block_out_channels": (128, 256, 512, 512),
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "layers_per_block": 2,
}
_TINY_VAE = {
    **_VAE,
    "block_out_channels": (12, 12, 24, 24),
    "layers_per_block": 1,
    "norm_num_groups": 4,
    "sample_size": 64,
}
VAES: dict[str, dict[str, Any]] = {
    "tiny": {**_TINY_VAE, "scaling_factor": 0.18215},
    "tiny_xl": {**_TINY_VAE, "scaling_factor": 0.13025},
    "sd15": {**_VAE, "sample_size": 512, "scaling_factor": 0.18215},
    "sdxl": {**_VAE, "sample_size": 1024, "scaling_factor": 0.13025},
    "lcm": {**_VAE, "sample_size": 512, "scaling_factor": 0.18215},
    "sd_turbo": {"sample_size": 512, "block_out_channels": (64,) * 4},
}
# Models whose autoencoder is diffusers' AutoencoderTiny with its default settings.
TINY_AUTOENCODERS = ("sd_turbo",)
# Models whose pipeline makes an image from a prompt and another image. All other models need only a prompt.
IMAGE_TO_IMAGE = ("sd_turbo",)
TEXT_TO_IMAGE = tuple(name for name in MODELS if name not in IMAGE_TO_IMAGE)


def _clip(width: int, layers: int, heads: int, **others: Any) -> dict[str, Any]:
    sizes = {"hidden_size": width, "projection_dim": width, "num_hidden_layers": layers}
    return {**sizes, "num_attention_heads": heads, **others}


_TINY_CLIP = _clip(32, 2, 4, intermediate_size=64, vocab_size=514)
_CLIP_L = _clip(768, 12, 12, intermediate_size=3072)
_CLIP_BIG_G = _clip(1280, 32, 20, intermediate_size=5120, hidden_act="gelu")
# For each model the configurations of its text encoders. SDXL's second encoder ends in a projection, which
# makes the pooled embedding.
TEXT_ENCODERS: dict[str, tuple[dict[str, Any], ...]] = {
    "tiny": (_TINY_CLIP,),
    "tiny_xl": (_TINY_CLIP, _TINY_CLIP),
    "sd15": (_CLIP_L,),
    "sdxl": (_CLIP_L, _CLIP_BIG_G),
    "lcm": (_CLIP_L,),
    "sd_turbo": (_clip(1024, 23, 16, intermediate_size=4096, hidden_act="gelu"),),
}

_BETAS = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "steps_offset": 1}
_PNDM = ("PNDMScheduler", {**_BETAS, "skip_prk_steps": True, "set_alpha_to_one": False})
_EULER = ("EulerDiscreteScheduler", {**_BETAS, "timestep_spacing": "leading"})
SCHEDULERS: dict[str, tuple[str, dict[str, Any]]] = {
    "tiny": _PNDM,
    "tiny_xl": _EULER,
    "sd15": _PNDM,
    "sdxl": _EULER,
    "lcm": ("LCMScheduler", _BETAS),
    "sd_turbo": ("EulerDiscreteScheduler", {**_BETAS, "timestep_spacing": "trailing"}),
}


@dataclass(frozen=True)
class VideoNetwork:
    """A network that is timed without a pipeline, and the size of the video or image with which it is timed.

    Attributes:
        cls: name of the network's class in diffusers.
        dtype: the dtype in which the network is used, a key of ``DTYPES``.
        frames: number of frames of the video; 1 for an image.
        height, width: size of a frame in pixels.
        batch: number of videos in one call. It is 2 for a step with guidance of a UNet or a transformer.
        config: settings of the class that differ from diffusers' defaults.
    """

    cls: str
    dtype: str
    frames: int
    height: int
    width: int
    batch: int = 1
    config: dict[str, Any] = field(default_factory=dict)


_SD35 = {
    "sample_size": 128,
    "num_layers": 24,
    "num_attention_heads": 24,
    "attention_head_dim": 64,
    "caption_projection_dim": 1536,
    "joint_attention_dim": 4096,
    "pooled_projection_dim": 2048,
    "pos_embed_max_size": 384,
    "qk_norm": "rms_norm",
    "dual_attention_layers": tuple(range(13)),
}
_KLEIN = {
    "num_layers": 5,
    "num_single_layers": 20,
    "num_attention_heads": 24,
    "joint_attention_dim": 7680,
    "guidance_embeds": False,
}
_WAN_1B = {"num_attention_heads": 12, "num_layers": 30, "ffn_dim": 8960}
_COGVIDEOX_5B = {"num_attention_heads": 48, "num_layers": 42, "use_rotary_positional_embeddings": True}
_DC_BLOCKS = ("ResBlock",) * 3 + ("EfficientViTBlock",) * 3
_DC_AE = {
    "encoder_block_types": _DC_BLOCKS,
    "decoder_block_types": _DC_BLOCKS,
    "downsample_block_type": "conv",
    "upsample_block_type": "interpolate",
    "scaling_factor": 0.41407,
}
# For each model its networks: "unet", "vae" or "transformer". The first network of a model is the default of
# the command-line option ``--part``.
VIDEO_NETWORKS: dict[str, dict[str, VideoNetwork]] = {
    "flux": {
        "transformer": VideoNetwork(
            "FluxTransformer2DModel", "bf16", 1, 1024, 1024, config={"guidance_embeds": True}
        )
    },
    "flux2_klein": {
        "transformer": VideoNetwork("Flux2Transformer2DModel", "bf16", 1, 1024, 1024, config=_KLEIN)
    },
    "sd35": {
        "transformer": VideoNetwork("SD3Transformer2DModel", "bf16", 1, 1024, 1024, batch=2, config=_SD35)
    },
    "zimage": {"transformer": VideoNetwork("ZImageTransformer2DModel", "bf16", 1, 1024, 1024)},
    "ltx": {"transformer": VideoNetwork("LTXVideoTransformer3DModel", "bf16", 121, 512, 768, batch=2)},
    "wan": {
        "vae": VideoNetwork("AutoencoderKLWan", "bf16", 17, 480, 832),
        "transformer": VideoNetwork("WanTransformer3DModel", "bf16", 33, 480, 832, config=_WAN_1B),
    },
    "qwen_image": {
        "vae": VideoNetwork("AutoencoderKLQwenImage", "bf16", 1, 1024, 1024),
        "transformer": VideoNetwork("QwenImageTransformer2DModel", "bf16", 1, 1024, 1024),
    },
    "qwen_image_21": {"vae": VideoNetwork("AutoencoderKLQwenImage21", "bf16", 1, 1024, 1024)},
    "dc_ae": {"vae": VideoNetwork("AutoencoderDC", "bf16", 1, 1024, 1024, config=_DC_AE)},
    "kvae": {"vae": VideoNetwork("AutoencoderKLKVAE", "bf16", 1, 1024, 1024)},
    "hunyuan_video": {"vae": VideoNetwork("AutoencoderKLHunyuanVideo", "bf16", 17, 480, 832)},
    "cogvideox": {
        "vae": VideoNetwork("AutoencoderKLCogVideoX", "bf16", 9, 480, 720, config={"scaling_factor": 0.7}),
        "transformer": VideoNetwork(
            "CogVideoXTransformer3DModel", "bf16", 49, 480, 720, batch=2, config=_COGVIDEOX_5B
        ),
    },
    "svd": {
        "unet": VideoNetwork(
            "UNetSpatioTemporalConditionModel", "fp16", 14, 576, 1024, batch=2, config={"num_frames": 14}
        ),
        # With ``decode_chunk_size``, SVD's pipeline decodes its frames in several calls, because all frames
        # in one call need much memory. The call that is timed decodes four frames.
        "vae": VideoNetwork(
            "AutoencoderKLTemporalDecoder",
            "fp16",
            4,
            576,
            1024,
            config={key: value for key, value in _VAE.items() if key != "up_block_types"},
        ),
    },
    "animatediff": {
        "unet": VideoNetwork(
            "UNetMotionModel", "fp16", 16, 512, 512, batch=2, config={"cross_attention_dim": 768}
        )
    },
}
