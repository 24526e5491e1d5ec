"""The networks that docs/coverage.md lists with times, and for each network the call that is timed.

The networks have the architectures of published models. The call is one step of a UNet or transformer, or one
decode or encode of an autoencoder, at a usual image size. Most steps are with guidance, so their batch is 2.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import diffusers
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from sdfastgn.model_inputs import unet_inputs
from sdfastgn.models import video
from sdfastgn.models.architectures import DTYPES
from sdfastgn.models.configurations import UNETS, VAES, VIDEO_NETWORKS, VideoNetwork
from sdfastgn.models.video import Draw

# A function ``(model, draw) -> call``. ``call`` has no arguments, and calls the model on random inputs.
# ``draw`` makes a random tensor of a given shape.
Prepare = Callable[[Any, Draw], Callable[[], Any]]


@dataclass(frozen=True)
class Case:
    """One model, and the call of it that is timed.

    Attributes:
        name: describes the model, the call, and the size of the image or video.
        build: makes the model.
        prepare: makes the function that calls the model on random inputs.
        dtype: the dtype of the model.
        is_video: True if the model makes videos.
        is_long: True if its errors against fp32 are not measured, because a call in fp32 takes too long.
    """

    name: str
    build: Callable[[], nn.Module]
    prepare: Prepare
    dtype: torch.dtype
    is_video: bool = False
    is_long: bool = False


CASES: list[Case] = []
# Encodes by autoencoders whose decodes are in ``CASES``. ``scripts.publish.real_sizes --encodes`` times them.
# They are no part of ``make bench``, because its steps already take all of the time that it may take.
ENCODES: list[Case] = []
# Diffusion transformers. ``scripts.publish.plans`` times them. Each one is listed with all of its layers, and
# with two layers: the errors against fp32 are measured with two.
TRANSFORMERS: list[Case] = []


def case(
    name: str,
    cls: str,
    dtype: torch.dtype = torch.float16,
    *,
    is_video: bool = False,
    is_long: bool = False,
    **config: Any,
) -> Callable[[Prepare], Prepare]:
    """A decorator that adds a ``Case`` (a model and its timed call) to ``CASES``.

    The model is the diffusers class ``cls`` with the arguments ``config``. The decorated function is the
    case's ``prepare``.
    """

    def register(prepare: Prepare) -> Prepare:
        CASES.append(Case(name, lambda: getattr(diffusers, cls)(**config), prepare, dtype, is_video, is_long))
        return prepare

    return register


BF16, FP16 = torch.bfloat16, torch.float16
BATCH = 2  # the batch size of a step with guidance


def tokens(draw: Draw, width: int, length: int = 77) -> Tensor:
    return draw(BATCH, length, width)


def step_of(name: str, **more: Callable[[Draw], Any]) -> Prepare:
    """Returns a function that makes the timed call: a step of the UNet ``name``, or of its ControlNet.

    ``name``: a key of ``UNETS``. ``more``: name of a further argument of the call -> function that
    makes this argument from ``draw``.
    """

    def prepare(model: Any, draw: Draw) -> Callable[[], Any]:
        config = {**dict(model.config), "_class_name": "UNet2DConditionModel"}
        size = UNETS[name]["sample_size"] * 8
        inputs = unet_inputs(config, size=size, batch=BATCH, dtype=FP16, device=model.device, seed=0)
        # Inputs are drawn in fp16, and then cast to the model's dtype. So a model that was cast to fp32 gets
        # the same values.
        inputs = tree_map_only(Tensor, lambda t: t.to(model.dtype) if t.dtype == FP16 else t, inputs)
        return partial(model, **inputs, **{k: make(draw) for k, make in more.items()}, return_dict=False)

    return prepare


def decode_of(*latents: int, **options: Any) -> Prepare:
    """Returns a function that makes the timed call: a decode of random latents.

    ``latents``: their shape. ``options``: further arguments of ``decode``.
    """

    def prepare(model: Any, draw: Draw) -> Callable[[], Any]:
        z = draw(*latents)
        # The attribute ``decode`` is read in each call, because ``optimize`` may replace it between calls.
        return lambda: model.decode(z, **options, return_dict=False)

    return prepare


def encode_of(*pixels: int) -> Prepare:
    """Returns a function that makes the timed call: an encode of a random image or video.

    ``pixels``: the shape of the image or video.
    """

    def prepare(model: Any, draw: Draw) -> Callable[[], Any]:
        x = draw(*pixels)
        return lambda: model.encode(x, return_dict=False)[0].mode()

    return prepare


def encode_case(name: str, *pixels: int, prepare: Prepare | None = None, is_long: bool = False) -> None:
    """Adds a ``Case`` with the name "MODEL encode, SIZE" to ``ENCODES``.

    Its model is that of the case "MODEL decode, ..." in ``CASES``. ``pixels``: the shape of the image
    or video. ``prepare``: makes the timed call. If it is None, ``encode_of(*pixels)`` makes the call.
    """
    decodes = name.partition(" encode")[0] + " decode"
    same = next(case for case in CASES if case.name.startswith(decodes))
    ENCODES.append(replace(same, name=name, prepare=prepare or encode_of(*pixels), is_long=is_long))


def call_of(network: VideoNetwork) -> Prepare:
    """Returns a function that makes the timed call: a call of ``network`` at its own size."""
    size = {"frames": network.frames, "height": network.height, "width": network.width}

    def prepare(model: Any, draw: Draw) -> Callable[[], Any]:
        return partial(video.run, model, video.inputs(model, draw, batch=network.batch, **size))

    return prepare


def video_case(name: str, model: str, part: str) -> None:
    """Adds the timed call of the network ``VIDEO_NETWORKS[model][part]`` to ``CASES``."""
    network = VIDEO_NETWORKS[model][part]
    case(name, network.cls, DTYPES[network.dtype], is_video=True, **network.config)(call_of(network))


def blocks(kind: str, count: int) -> tuple[str, ...]:
    return (kind,) * count


# --- Stable Diffusion -----------------------------------------------------------------------------

case("SD1.5 ControlNet, 512²", "ControlNetModel", cross_attention_dim=768)(
    step_of("sd15", controlnet_cond=lambda draw: draw(BATCH, 3, 512, 512))
)
case("AutoencoderTiny decode, 512²", "AutoencoderTiny")(decode_of(1, 4, 64, 64))
case(
    "AsymmetricAutoencoderKL decode, 512²",
    "AsymmetricAutoencoderKL",
    down_block_types=blocks("DownEncoderBlock2D", 4),
    down_block_out_channels=(128, 256, 512, 512),
    layers_per_down_block=2,
    up_block_types=blocks("UpDecoderBlock2D", 4),
    up_block_out_channels=(192, 384, 768, 768),
    layers_per_up_block=3,
)(decode_of(1, 4, 64, 64))


@case(
    "x4 upscaler UNet, to 512²",
    "UNet2DConditionModel",
    in_channels=7,
    block_out_channels=(256, 512, 512, 1024),
    down_block_types=("DownBlock2D", *blocks("CrossAttnDownBlock2D", 3)),
    up_block_types=(*blocks("CrossAttnUpBlock2D", 3), "UpBlock2D"),
    only_cross_attention=(True, True, True, False),
    attention_head_dim=8,
    cross_attention_dim=1024,
    num_class_embeds=1000,
    use_linear_projection=True,
)
def _(model, draw):
    labels = torch.full((BATCH,), 20, device=model.device)
    return partial(
        model, draw(BATCH, 7, 128, 128), 500, tokens(draw, 1024), class_labels=labels, return_dict=False
    )


@case(
    "x2 latent upscaler UNet, to 1024²",
    "UNet2DConditionModel",
    in_channels=8,
    out_channels=5,
    act_fn="gelu",
    attention_head_dim=64,
    block_out_channels=(384, 384, 768, 768),
    conv_in_kernel=1,
    conv_out_kernel=1,
    cross_attention_dim=768,
    down_block_types=("KDownBlock2D", *blocks("KCrossAttnDownBlock2D", 3)),
    layers_per_block=4,
    mid_block_type=None,
    norm_num_groups=None,
    resnet_time_scale_shift="scale_shift",
    time_cond_proj_dim=896,
    time_embedding_type="fourier",
    timestep_post_act="gelu",
    up_block_types=(*blocks("KCrossAttnUpBlock2D", 3), "KUpBlock2D"),
)
def _(model, draw):
    condition = draw(BATCH, 896)
    return partial(
        model, draw(BATCH, 8, 128, 128), 0.5, tokens(draw, 768), timestep_cond=condition, return_dict=False
    )


def controlnet_xs() -> nn.Module:
    sd21 = {"cross_attention_dim": 1024, "attention_head_dim": [5, 10, 20, 20], "use_linear_projection": True}
    unet = diffusers.UNet2DConditionModel(sample_size=64, **sd21)
    adapter = diffusers.ControlNetXSAdapter.from_unet(unet, size_ratio=0.1, learn_time_embedding=True)
    return diffusers.UNetControlNetXSModel.from_unet(unet, adapter)


CASES.append(
    Case(
        "SD2.1 UNet with ControlNet-XS, 512²",
        controlnet_xs,
        lambda model, draw: partial(
            model,
            draw(BATCH, 4, 64, 64),
            500,
            tokens(draw, 1024),
            draw(BATCH, 3, 512, 512),
            return_dict=False,
        ),
        torch.float16,
    )
)

# --- Stable Diffusion XL --------------------------------------------------------------------------

REFINER = {
    **UNETS["sdxl"],
    "block_out_channels": (384, 768, 1536, 1536),
    "down_block_types": ("DownBlock2D", *blocks("CrossAttnDownBlock2D", 2), "DownBlock2D"),
    "up_block_types": ("UpBlock2D", *blocks("CrossAttnUpBlock2D", 2), "UpBlock2D"),
    "transformer_layers_per_block": 4,
    "attention_head_dim": [6, 12, 24, 24],
    "cross_attention_dim": 1280,
    "projection_class_embeddings_input_dim": 2560,
}


@case("SDXL refiner UNet, 1024²", "UNet2DConditionModel", **REFINER)
def _(model, draw):
    conditions = {"text_embeds": draw(BATCH, 1280), "time_ids": draw(BATCH, 5)}
    sample = draw(BATCH, 4, 128, 128)
    return partial(model, sample, 500, tokens(draw, 1280), added_cond_kwargs=conditions, return_dict=False)


SDXL_CONTROL = {k: v for k, v in UNETS["sdxl"].items() if k not in ("sample_size", "up_block_types")}
case("SDXL ControlNet, 1024²", "ControlNetModel", **SDXL_CONTROL)(
    step_of("sdxl", controlnet_cond=lambda draw: draw(BATCH, 3, 1024, 1024))
)
case("SDXL ControlNet Union, 1024²", "ControlNetUnionModel", **SDXL_CONTROL)(
    step_of(
        "sdxl",
        controlnet_cond=lambda draw: [draw(BATCH, 3, 1024, 1024)],
        control_type=lambda draw: draw(BATCH, 6),
        control_type_idx=lambda draw: [3],
        conditioning_scale=lambda draw: [1.0],
    )
)

# --- Video ----------------------------------------------------------------------------------------


video_case("SVD UNet, 14 x 576 x 1024", "svd", "unet")
video_case("SVD VAE decode, 4 x 576 x 1024", "svd", "vae")
video_case("AnimateDiff UNet, 16 x 512²", "animatediff", "unet")


@case("ModelScope UNet, 16 x 256²", "UNet3DConditionModel", is_video=True)
def _(model, draw):
    return partial(model, draw(BATCH, 4, 16, 32, 32), 500, tokens(draw, 1024), return_dict=False)


@case("I2VGenXL UNet, 16 x 704 x 1280", "I2VGenXLUNet", is_video=True)
def _(model, draw):
    fps = torch.full((BATCH,), 16, device=model.device)
    sample, latents = draw(BATCH, 4, 16, 88, 160), draw(BATCH, 4, 16, 88, 160)
    return partial(model, sample, 500, fps, latents, draw(BATCH, 1024), tokens(draw, 1024), return_dict=False)


video_case("HunyuanVideo VAE decode, 17 x 480 x 832", "hunyuan_video", "vae")
video_case("Wan 2.1 VAE decode, 17 x 480 x 832", "wan", "vae")
case("Wan 2.1 VAE decode, 81 x 480 x 832", "AutoencoderKLWan", BF16, is_video=True, is_long=True)(
    decode_of(1, 16, 21, 60, 104)
)
video_case("Qwen-Image VAE decode, 1024²", "qwen_image", "vae")
video_case("Qwen-Image 2.1 VAE decode, 1024²", "qwen_image_21", "vae")
video_case("DC-AE decode (Sana), 1024²", "dc_ae", "vae")
video_case("KVAE decode, 1024²", "kvae", "vae")
case("Qwen-Image VAE decode, 512²", "AutoencoderKLQwenImage", BF16, is_video=True)(
    decode_of(1, 16, 1, 64, 64)
)
video_case("CogVideoX VAE decode, 9 x 480 x 720", "cogvideox", "vae")

case("Mochi VAE decode, 13 x 480 x 848", "AutoencoderKLMochi", BF16, is_video=True)(
    decode_of(1, 12, 3, 60, 106)
)
case(
    "Wan 2.2 VAE decode, 17 x 704 x 1280",
    "AutoencoderKLWan",
    BF16,
    is_video=True,
    base_dim=160,
    decoder_base_dim=256,
    z_dim=48,
    is_residual=True,
    in_channels=12,
    out_channels=12,
    patch_size=2,
    scale_factor_spatial=16,
    latents_mean=[0.0] * 48,
    latents_std=[1.0] * 48,
)(decode_of(1, 48, 5, 44, 80))
case("HunyuanVideo 1.5 VAE decode, 17 x 480 x 832", "AutoencoderKLHunyuanVideo15", BF16, is_video=True)(
    decode_of(1, 32, 5, 30, 52)
)
case("Cosmos VAE decode, 17 x 480 x 832", "AutoencoderKLCosmos", BF16, is_video=True)(
    decode_of(1, 16, 3, 60, 104)
)
case("LTX VAE decode, 17 x 480 x 832", "AutoencoderKLLTXVideo", BF16, is_video=True)(
    decode_of(1, 128, 3, 15, 26)
)
case("LTX-2 VAE decode, 17 x 480 x 832", "AutoencoderKLLTX2Video", BF16, is_video=True)(
    decode_of(1, 128, 3, 15, 26)
)
case("EasyAnimate VAE decode, 9 x 480 x 832", "AutoencoderKLMagvit", BF16, is_video=True)(
    decode_of(1, 16, 3, 60, 104)
)


@case("Allegro VAE decode, one tile of 24 x 320²", "AutoencoderKLAllegro", BF16, is_video=True)
def _(model, draw):
    return partial(model.decoder, draw(1, 4, 6, 40, 40))


# --- Other images ---------------------------------------------------------------------------------


@case(
    "Kandinsky 2.2 UNet, 768²",
    "UNet2DConditionModel",
    out_channels=8,
    act_fn="silu",
    addition_embed_type="image",
    addition_embed_type_num_heads=64,
    attention_head_dim=64,
    block_out_channels=(384, 768, 1152, 1536),
    cross_attention_dim=768,
    down_block_types=("ResnetDownsampleBlock2D", *blocks("SimpleCrossAttnDownBlock2D", 3)),
    encoder_hid_dim=1280,
    encoder_hid_dim_type="image_proj",
    layers_per_block=3,
    mid_block_type="UNetMidBlock2DSimpleCrossAttn",
    resnet_time_scale_shift="scale_shift",
    up_block_types=(*blocks("SimpleCrossAttnUpBlock2D", 3), "ResnetUpsampleBlock2D"),
)
def _(model, draw):
    image = {"image_embeds": draw(BATCH, 1280)}
    return partial(model, draw(BATCH, 4, 96, 96), 500, None, added_cond_kwargs=image, return_dict=False)


case(
    "Kandinsky MoVQ decode, 768²",
    "VQModel",
    down_block_types=(*blocks("DownEncoderBlock2D", 3), "AttnDownEncoderBlock2D"),
    up_block_types=("AttnUpDecoderBlock2D", *blocks("UpDecoderBlock2D", 3)),
    block_out_channels=(128, 256, 256, 512),
    layers_per_block=2,
    latent_channels=4,
    num_vq_embeddings=16384,
    norm_type="spatial",
    vq_embed_dim=4,
)(decode_of(1, 4, 96, 96, force_not_quantize=True))
case(
    "VQModel of latent diffusion, decode, 256²",
    "VQModel",
    down_block_types=blocks("DownEncoderBlock2D", 3),
    up_block_types=blocks("UpDecoderBlock2D", 3),
    block_out_channels=(128, 256, 512),
    layers_per_block=2,
    num_vq_embeddings=8192,
)(decode_of(1, 3, 64, 64, force_not_quantize=True))


@case("Kandinsky 3 UNet, 1024²", "Kandinsky3UNet")
def _(model, draw):
    mask = torch.ones(BATCH, 128, device=model.device, dtype=model.dtype)
    states = tokens(draw, 4096, 128)
    timestep = torch.tensor(500, device=model.device)
    return partial(model, draw(BATCH, 4, 128, 128), timestep, states, mask, return_dict=False)


@case(
    "DeepFloyd IF-I-M UNet, 64²",
    "UNet2DConditionModel",
    in_channels=3,
    out_channels=6,
    act_fn="gelu",
    addition_embed_type="text",
    attention_head_dim=64,
    block_out_channels=(192, 384, 576, 768),
    cross_attention_dim=768,
    down_block_types=("ResnetDownsampleBlock2D", *blocks("SimpleCrossAttnDownBlock2D", 3)),
    encoder_hid_dim=4096,
    layers_per_block=3,
    mid_block_scale_factor=1.4142135623730951,
    mid_block_type="UNetMidBlock2DSimpleCrossAttn",
    resnet_time_scale_shift="scale_shift",
    time_embedding_act_fn="gelu",
    timestep_post_act="gelu",
    up_block_types=(*blocks("SimpleCrossAttnUpBlock2D", 3), "ResnetUpsampleBlock2D"),
)
def _(model, draw):
    return partial(model, draw(BATCH, 3, 64, 64), 500, tokens(draw, 4096), return_dict=False)


case(
    "Flux and SD3 VAE decode, 1024²",
    "AutoencoderKL",
    BF16,
    **{**VAES["sdxl"], "latent_channels": 16, "use_quant_conv": False, "use_post_quant_conv": False},
)(decode_of(1, 16, 128, 128))
case("Flux2 VAE decode, 1024²", "AutoencoderKLFlux2", BF16)(decode_of(1, 32, 128, 128))
case(
    "HunyuanImage VAE decode, 1024²",
    "AutoencoderKLHunyuanImage",
    BF16,
    in_channels=3,
    out_channels=3,
    latent_channels=64,
    block_out_channels=(128, 256, 512, 512, 1024, 1024),
    layers_per_block=2,
    spatial_compression_ratio=32,
    sample_size=384,
)(decode_of(1, 64, 32, 32))
case("HunyuanImage refiner, VAE decode, 1024²", "AutoencoderKLHunyuanImageRefiner", BF16)(
    decode_of(1, 32, 1, 64, 64)
)
case("ConsistencyDecoderVAE, its UNet, 512²", "ConsistencyDecoderVAE")(
    lambda model, draw: partial(model.decoder_unet, draw(1, 7, 512, 512), 500, return_dict=False)
)


@case(
    "DDPM UNet of cat-256, 256²",
    "UNet2DModel",
    sample_size=256,
    layers_per_block=2,
    block_out_channels=(128, 128, 256, 256, 512, 512),
    down_block_types=(*blocks("DownBlock2D", 4), "AttnDownBlock2D", "DownBlock2D"),
    up_block_types=("UpBlock2D", "AttnUpBlock2D", *blocks("UpBlock2D", 4)),
    attention_head_dim=None,
    norm_eps=1e-6,
    downsample_padding=0,
    flip_sin_to_cos=False,
    freq_shift=1,
)
def _(model, draw):
    return partial(model, draw(1, 3, 256, 256), 500, return_dict=False)


# --- Transformers and audio -----------------------------------------------------------------------


@case("PixArt transformer, 1024²", "PixArtTransformer2DModel", caption_channels=4096)
def _(model, draw):
    sizes = {"resolution": draw(BATCH, 2), "aspect_ratio": draw(BATCH, 1)}
    timestep = torch.full((BATCH,), 500, device=model.device)
    sample, states = draw(BATCH, 4, 128, 128), tokens(draw, 4096, 120)
    return partial(model, sample, states, timestep, added_cond_kwargs=sizes, return_dict=False)


@case("Sana transformer, 1024²", "SanaTransformer2DModel", BF16)
def _(model, draw):
    timestep = torch.full((BATCH,), 500, device=model.device)
    return partial(model, draw(BATCH, 32, 32, 32), tokens(draw, 2304, 300), timestep, return_dict=False)


@case(
    "Stable Cascade prior, 1024²",
    "StableCascadeUNet",
    BF16,
    clip_text_in_channels=1280,
    clip_image_in_channels=768,
)
def _(model, draw):
    ratio = torch.full((BATCH,), 0.5, device=model.device, dtype=model.dtype)
    text = {"clip_text_pooled": draw(BATCH, 1, 1280), "clip_text": draw(BATCH, 77, 1280)}
    return partial(
        model, draw(BATCH, 16, 24, 24), ratio, clip_img=draw(BATCH, 1, 768), **text, return_dict=False
    )


def wuerstchen_prior() -> nn.Module:
    from diffusers.pipelines.deprecated.wuerstchen import WuerstchenPrior

    return WuerstchenPrior(c_in=16, c=1536, c_cond=1280, c_r=64, depth=32, nhead=24)


CASES.append(
    Case(
        "Wuerstchen prior, 1024²",
        wuerstchen_prior,
        lambda model, draw: partial(
            model,
            draw(BATCH, 16, 24, 24),
            torch.full((BATCH,), 0.5, dtype=model.dtype, device=model.device),
            tokens(draw, 1280),
        ),
        BF16,
    )
)


@case(
    "AudioLDM2 UNet, 10 s",
    "AudioLDM2UNet2DConditionModel",
    in_channels=8,
    out_channels=8,
    block_out_channels=(128, 256, 384, 640),
    cross_attention_dim=((None, 768, 1024),) * 4,
    attention_head_dim=32,
)
def _(model, draw):
    states = {"encoder_hidden_states": draw(BATCH, 8, 768), "encoder_hidden_states_1": draw(BATCH, 32, 1024)}
    return partial(model, draw(BATCH, 8, 250, 16), 500, **states, return_dict=False)


@case(
    "MusicLDM UNet, 10 s",
    "UNet2DConditionModel",
    in_channels=8,
    out_channels=8,
    block_out_channels=(128, 256, 384, 640),
    class_embed_type="simple_projection",
    class_embeddings_concat=True,
    projection_class_embeddings_input_dim=512,
    cross_attention_dim=(128, 256, 384, 640),
    attention_head_dim=32,
)
def _(model, draw):
    sample, labels = draw(BATCH, 8, 250, 16), draw(BATCH, 512)
    return partial(model, sample, 500, None, class_labels=labels, return_dict=False)


@case(
    "UNet1DModel of hopper-medium-v2, 64 plans",
    "UNet1DModel",
    torch.float32,
    in_channels=14,
    out_channels=14,
    down_block_types=blocks("DownResnetBlock1D", 4),
    up_block_types=blocks("UpResnetBlock1D", 3),
    block_out_channels=(32, 64, 128, 256),
    mid_block_type="MidResTemporalBlock1D",
    out_block_type="OutConv1DBlock",
    act_fn="mish",
    layers_per_block=1,
    use_timestep_embedding=True,
    time_embedding_type="positional",
    flip_sin_to_cos=False,
    freq_shift=1,
)
def _(model, draw):
    return partial(model, draw(64, 14, 128), 20, return_dict=False)


# --- Encodes --------------------------------------------------------------------------------------

encode_case("Wan 2.1 VAE encode, 17 x 480 x 832", 1, 3, 17, 480, 832)
encode_case("Wan 2.1 VAE encode, 81 x 480 x 832", 1, 3, 81, 480, 832, is_long=True)
encode_case("Wan 2.2 VAE encode, 17 x 704 x 1280", 1, 3, 17, 704, 1280)
encode_case("Qwen-Image VAE encode, 1024²", 1, 3, 1, 1024, 1024)
encode_case("HunyuanVideo VAE encode, 17 x 480 x 832", 1, 3, 17, 480, 832)
encode_case("HunyuanVideo 1.5 VAE encode, 17 x 480 x 832", 1, 3, 17, 480, 832)
encode_case("CogVideoX VAE encode, 9 x 480 x 720", 1, 3, 9, 480, 720)
encode_case("LTX VAE encode, 17 x 480 x 832", 1, 3, 17, 480, 832)
encode_case("LTX-2 VAE encode, 17 x 480 x 832", 1, 3, 17, 480, 832)
encode_case("Cosmos VAE encode, 17 x 480 x 832", 1, 3, 17, 480, 832)
encode_case("Mochi VAE encode, 13 x 480 x 848", 1, 3, 13, 480, 848)
# diffusers encodes with Allegro only in tiles. Here its encoder is called with one tile.
encode_case(
    "Allegro VAE encode, one tile of 24 x 320²",
    prepare=lambda model, draw: partial(model.encoder, draw(1, 3, 24, 320, 320)),
)
encode_case("EasyAnimate VAE encode, 9 x 480 x 832", 1, 3, 9, 480, 832)
encode_case("SVD VAE encode, 576 x 1024", 1, 3, 576, 1024)
encode_case("HunyuanImage VAE encode, 1024²", 1, 3, 1024, 1024)
encode_case("HunyuanImage refiner, VAE encode, 1024²", 1, 3, 1, 1024, 1024)
encode_case("Flux and SD3 VAE encode, 1024²", 1, 3, 1024, 1024)
encode_case("Flux2 VAE encode, 1024²", 1, 3, 1024, 1024)

# --- Diffusion transformers -----------------------------------------------------------------------


def transformer_case(name: str, model: str, few: dict[str, Any]) -> None:
    """Adds two cases of a transformer to ``TRANSFORMERS``: with all of its layers, and with two layers.

    ``few``: the arguments of the model's class that leave it two layers.
    """
    network = VIDEO_NETWORKS[model]["transformer"]
    frames, height, width = network.frames, network.height, network.width
    is_video = frames > 1
    size = f"{frames} x {height} x {width}" if is_video else f"{width}²"
    batch = f", batch {network.batch}" if network.batch > 1 else ""
    for layers, config in (("", network.config), (", 2 layers", {**network.config, **few})):
        build = partial(getattr(diffusers, network.cls), **config)
        title = f"{name}{layers}, {size}{batch}"
        each = Case(title, build, call_of(network), BF16, is_video, is_long=not layers)
        TRANSFORMERS.append(each)


transformer_case("Flux.1-dev", "flux", {"num_layers": 1, "num_single_layers": 1})
transformer_case("SD3.5-medium", "sd35", {"num_layers": 2, "dual_attention_layers": (0,)})
transformer_case("Z-Image", "zimage", {"n_layers": 2, "n_refiner_layers": 1})
transformer_case("Qwen-Image", "qwen_image", {"num_layers": 2})
transformer_case("LTX", "ltx", {"num_layers": 2})
transformer_case("Wan 2.1 1.3B", "wan", {"num_layers": 2})
transformer_case("Flux.2-klein-4B", "flux2_klein", {"num_layers": 1, "num_single_layers": 1})
