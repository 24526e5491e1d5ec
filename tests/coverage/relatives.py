"""Rows of the coverage table: video, other image pipelines, audio, transformers with a VAE."""

import sys

import diffusers
from transformers import (
    ClapConfig,
    ClapModel,
    CLIPImageProcessor,
    CLIPTextModelWithProjection,
    CLIPVisionConfig,
    CLIPVisionModelWithProjection,
    GPT2Config,
    GPT2LMHeadModel,
    SpeechT5HifiGan,
    SpeechT5HifiGanConfig,
    T5Config,
    T5EncoderModel,
)

from tests.coverage.parts import (
    TWO_LEVELS,
    Rows,
    image,
    model,
    noise,
    pipeline,
    scheduler,
    sd,
    text,
    text_encoder,
    unet,
    vae,
)

video = Rows("Video")
FRAMES = {"num_frames": 2, "height": 16, "width": 16}
BLOCKS = {"block_out_channels": (32, 64), "layers_per_block": 1, "norm_num_groups": 8, "sample_size": 8}


def small_vae(**options):
    """Of two levels: 16 pixels are 8 latents."""
    return vae(block_out_channels=(12, 24), **TWO_LEVELS, **options)


def image_encoder():
    sizes = {"hidden_size": 32, "intermediate_size": 64, "image_size": 16, "patch_size": 8}
    config = CLIPVisionConfig(**sizes, num_hidden_layers=1, num_attention_heads=4, projection_dim=32)
    return model(CLIPVisionModelWithProjection, config)


def feature_extractor():
    return CLIPImageProcessor(crop_size=16, size=16)


@video("Stable Video Diffusion")
def _():
    network = model(
        "UNetSpatioTemporalConditionModel",
        sample_size=8,
        block_out_channels=(32, 64),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
        up_block_types=("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"),
        cross_attention_dim=32,
        num_attention_heads=(2, 4),
        projection_class_embeddings_input_dim=24,
        addition_time_embed_dim=8,
    )
    decoder = model(
        "AutoencoderKLTemporalDecoder",
        block_out_channels=(32, 64),
        down_block_types=("DownEncoderBlock2D",) * 2,
        layers_per_block=1,
    )
    euler = scheduler("tiny_xl", prediction_type="v_prediction", use_karras_sigmas=True, sigma_max=700.0)
    parts = {
        "unet": network,
        "vae": decoder,
        "scheduler": euler,
        "image_encoder": image_encoder(),
        "feature_extractor": feature_extractor(),
    }
    return pipeline("StableVideoDiffusionPipeline", parts, image=image(size=16), **FRAMES)


@video("AnimateDiff")
def _():
    adapter = model(
        "MotionAdapter",
        block_out_channels=(40, 80),
        motion_layers_per_block=1,
        motion_norm_num_groups=8,
        motion_num_attention_heads=2,
    )
    parts = sd(motion_adapter=adapter, vae=small_vae())
    for name in ("safety_checker", "requires_safety_checker"):
        del parts[name]
    return pipeline("AnimateDiffPipeline", parts, **FRAMES)


def video_text(cls, **options):
    """Components of a pipeline whose UNet takes a text and a block of frames."""
    network = model(
        cls,
        **BLOCKS,
        down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"),
        up_block_types=("UpBlock3D", "CrossAttnUpBlock3D"),
        cross_attention_dim=32,
        attention_head_dim=8,
        **options,
    )
    return {**text(), "unet": network, "vae": small_vae(), "scheduler": scheduler(name="DDIMScheduler")}


@video("text to video (ModelScope)")
def _():
    return pipeline("TextToVideoSDPipeline", video_text("UNet3DConditionModel"), **FRAMES)


@video("I2VGenXL")
def _():
    parts = video_text("I2VGenXLUNet", num_attention_heads=None)
    parts |= {"image_encoder": image_encoder(), "feature_extractor": feature_extractor()}
    return pipeline("I2VGenXLPipeline", parts, image=image(size=16), clip_skip=None, **FRAMES)


# --- other image pipelines ------------------------------------------------------------------------

images = Rows("Other image pipelines")


def movq():
    return model(
        "VQModel",
        block_out_channels=(32, 64),
        down_block_types=("DownEncoderBlock2D", "AttnDownEncoderBlock2D"),
        up_block_types=("AttnUpDecoderBlock2D", "UpDecoderBlock2D"),
        latent_channels=4,
        norm_num_groups=8,
        norm_type="spatial",
        num_vq_embeddings=12,
        vq_embed_dim=4,
    )


SIMPLE = {
    **BLOCKS,
    "down_block_types": ("ResnetDownsampleBlock2D", "SimpleCrossAttnDownBlock2D"),
    "up_block_types": ("SimpleCrossAttnUpBlock2D", "ResnetUpsampleBlock2D"),
    "mid_block_type": "UNetMidBlock2DSimpleCrossAttn",
    "cross_attention_dim": 32,
    "attention_head_dim": 8,
    "encoder_hid_dim": 32,
    "resnet_time_scale_shift": "scale_shift",
}


@images("Kandinsky 2.2 decoder")
def _():
    embeds = {"addition_embed_type": "image", "encoder_hid_dim_type": "image_proj"}
    network = model("UNet2DConditionModel", **SIMPLE, **embeds, out_channels=8)
    parts = {"unet": network, "movq": movq(), "scheduler": scheduler(name="DDIMScheduler")}
    states = {"image_embeds": noise(1, 32), "negative_image_embeds": noise(1, 32, seed=1)}
    return pipeline("KandinskyV22Pipeline", parts, **states, prompt=None, height=64, width=64)


@images("Kandinsky 3")
def _():
    network = model(
        "Kandinsky3UNet",
        time_embedding_dim=16,
        groups=4,
        attention_head_dim=8,
        layers_per_block=3,
        block_out_channels=(32, 64),
        cross_attention_dim=16,
        encoder_hid_dim=32,
    )
    parts = {"unet": network, "movq": movq(), "scheduler": scheduler(name="DDPMScheduler")}
    parts |= {"text_encoder": None, "tokenizer": None}
    return pipeline("Kandinsky3Pipeline", parts, **embeds(mask=True), height=64, width=64)


def embeds(mask=False, mask_name="attention_mask", **options):
    """What a T5 would make of a prompt and of none."""
    found = {
        "prompt": None,
        "prompt_embeds": noise(1, 5, 32),
        "negative_prompt_embeds": noise(1, 5, 32, seed=1),
    }
    if mask:
        ones = noise(1, 5).isfinite()
        found |= {mask_name: ones, f"negative_{mask_name}": ones}
    return {**found, **options}


@images("DeepFloyd IF, first stage")
def _():
    network = model(
        "UNet2DConditionModel",
        **SIMPLE,
        in_channels=3,
        out_channels=6,
        addition_embed_type="text",
        addition_embed_type_num_heads=2,
        cross_attention_norm="group_norm",
        act_fn="gelu",
    )
    parts = dict.fromkeys(("text_encoder", "tokenizer", "safety_checker", "feature_extractor", "watermarker"))
    parts |= {"unet": network, "scheduler": scheduler(name="DDPMScheduler", variance_type="learned_range")}
    parts["requires_safety_checker"] = False
    return pipeline("IFPipeline", parts, **embeds(), height=16, width=16)


@images("Stable Cascade, decoder")
def _():
    blocks = {
        "num_attention_heads": (-1, 2),
        "block_types_per_layer": (("SDCascadeResBlock", "SDCascadeTimestepBlock"),) * 2,
    }
    layers = dict.fromkeys(("down_num_layers_per_block", "up_num_layers_per_block"), (1, 1))
    layers |= dict.fromkeys(("down_blocks_repeat_mappers", "up_blocks_repeat_mappers"), (1, 1))
    network = model(
        "StableCascadeUNet",
        in_channels=4,
        out_channels=4,
        conditioning_dim=64,
        block_out_channels=(16, 32),
        switch_level=None,
        clip_text_pooled_in_channels=32,
        dropout=(0.1, 0.1),
        **blocks,
        **layers,
    )
    parts = text() | {"text_encoder": text_encoder(CLIPTextModelWithProjection)}
    parts |= {"decoder": network, "vqgan": paella("StableCascadeDecoderPipeline"), "latent_dim_scale": 4.0}
    parts["scheduler"] = diffusers.DDPMWuerstchenScheduler()
    return pipeline("StableCascadeDecoderPipeline", parts, image_embeddings=noise(1, 4, 4, 4))


@images("Stable Cascade, prior")
def _():
    network = model(
        "StableCascadeUNet",
        conditioning_dim=64,
        block_out_channels=(32, 32),
        num_attention_heads=(2, 2),
        down_num_layers_per_block=(1, 1),
        up_num_layers_per_block=(1, 1),
        switch_level=(False,),
        clip_image_in_channels=32,
        clip_text_in_channels=32,
        clip_text_pooled_in_channels=32,
        dropout=(0.1, 0.1),
    )
    parts = text() | {"text_encoder": text_encoder(CLIPTextModelWithProjection), "prior": network}
    parts |= {
        "scheduler": diffusers.DDPMWuerstchenScheduler(),
        "feature_extractor": None,
        "image_encoder": None,
    }
    return pipeline("StableCascadePriorPipeline", parts, height=128, width=128)


def paella(pipe):
    return model(beside(pipe, "PaellaVQModel"), bottleneck_blocks=1, num_vq_embeddings=2, embed_dim=32)


def beside(pipe, name):
    """A class that stands where ``pipe`` does: diffusers moves its folders."""
    return getattr(sys.modules[getattr(diffusers, pipe).__module__], name)


@images("Wuerstchen, decoder")
def _():
    sizes = {"c_cond": 32, "c_hidden": [32], "nhead": [-1], "blocks": [1], "level_config": ["CT"]}
    cls = beside("WuerstchenDecoderPipeline", "WuerstchenDiffNeXt")
    parts = text() | {"decoder": model(cls, **sizes, clip_embd=32, inject_effnet=[False])}
    parts |= {"vqgan": paella("WuerstchenDecoderPipeline"), "latent_dim_scale": 4.0}
    parts["scheduler"] = diffusers.DDPMWuerstchenScheduler()
    return pipeline("WuerstchenDecoderPipeline", parts, image_embeddings=noise(1, 4, 4, 4))


@images("Wuerstchen, prior")
def _():
    cls = beside("WuerstchenPriorPipeline", "WuerstchenPrior")
    parts = text() | {"prior": model(cls, c_in=2, c=16, c_cond=32, c_r=16, depth=1, nhead=2)}
    parts["scheduler"] = diffusers.DDPMWuerstchenScheduler()
    return pipeline("WuerstchenPriorPipeline", parts, height=128, width=128)


# --- audio ----------------------------------------------------------------------------------------

audio = Rows("Audio")


def vocoder():
    config = SpeechT5HifiGanConfig(
        model_in_dim=8,
        upsample_initial_channel=16,
        upsample_rates=[2, 2],
        upsample_kernel_sizes=[4, 4],
        resblock_kernel_sizes=[3, 7],
        resblock_dilation_sizes=[[1, 3, 5], [1, 3, 5]],
        normalize_before=False,
    )
    return model(SpeechT5HifiGan, config)


SOUND = {"output_type": "np", "audio_length_in_s": 0.004}


@audio("AudioLDM2")
def _():
    blocks = {
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
    }
    network = model(
        "AudioLDM2UNet2DConditionModel", **BLOCKS, **blocks, cross_attention_dim=((None, 16, 32),) * 2
    )
    t5 = T5Config(vocab_size=10, d_model=32, d_ff=32, d_kv=8, num_heads=2, num_layers=1)
    gpt = GPT2Config(n_embd=16, n_head=1, n_layer=1, vocab_size=10)
    parts = {
        "unet": network,
        "vae": small_vae(in_channels=1, out_channels=1),
        "text_encoder_2": model(T5EncoderModel, t5),
        "language_model": model(GPT2LMHeadModel, gpt),
        "scheduler": scheduler(name="DDIMScheduler"),
        "vocoder": vocoder(),
        **dict.fromkeys(
            ("text_encoder", "tokenizer", "tokenizer_2", "feature_extractor", "projection_model")
        ),
    }
    states = {"generated_prompt_embeds": noise(1, 4, 16), "negative_generated_prompt_embeds": noise(1, 4, 16)}
    return pipeline("AudioLDM2Pipeline", parts, **embeds(mask=True), **states, **SOUND)


@audio("MusicLDM")
def _():
    network = unet(
        class_embed_type="simple_projection",
        projection_class_embeddings_input_dim=32,
        class_embeddings_concat=True,
        cross_attention_dim=(40, 80),
    )
    hidden = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1}
    sound = {"hidden_size": 32, "depths": [1], "num_attention_heads": [1], "num_hidden_layers": 1}
    sizes = {
        "spec_size": 8,
        "num_mel_bins": 8,
        "window_size": 4,
        "patch_embeds_hidden_size": 32,
        "patch_size": 2,
        "patch_stride": 2,
    }
    clap = ClapConfig(
        text_config={**hidden, "vocab_size": 10}, audio_config={**sound, **sizes}, projection_dim=32
    )
    parts = {
        "unet": network,
        "vae": small_vae(in_channels=1, out_channels=1),
        "text_encoder": model(ClapModel, clap),
        "tokenizer": None,
        "feature_extractor": None,
        "scheduler": scheduler(name="DDIMScheduler"),
        "vocoder": vocoder(),
    }
    states = {"prompt": None, "prompt_embeds": noise(1, 32), "negative_prompt_embeds": noise(1, 32, seed=1)}
    return pipeline("MusicLDMPipeline", parts, **states, **SOUND)


SECTIONS = (video, images, audio)
