"""Rows of the coverage table: Stable Diffusion, its controls, and Stable Diffusion XL."""

import diffusers
import torch

from sdfastgn.models.configurations import UNETS
from tests.coverage.parts import TWO_LEVELS, Rows, image, model, noise, pipeline, scheduler, sd, sdxl, unet
from tests.patches.cases import ip_adapter_weights

rows = Rows("Stable Diffusion")
SIZE = {"height": 64, "width": 64}


def mask():
    return (image(1) > 0.5).to(torch.float32)


@rows("text to image")
def _():
    return pipeline("StableDiffusionPipeline", sd(), **SIZE)


@rows("image to image")
def _():
    return pipeline("StableDiffusionImg2ImgPipeline", sd(), image=image(), strength=0.9)


@rows("inpainting, UNet with 9 channels")
def _():
    parts = sd(unet=unet(in_channels=9))
    return pipeline("StableDiffusionInpaintPipeline", parts, image=image(), mask_image=mask(), **SIZE)


@rows("upscaling (x4)")
def _():
    network = unet(in_channels=7, num_class_embeds=1000, only_cross_attention=(True, False))
    parts = sd(
        unet=network,
        low_res_scheduler=scheduler(name="DDPMScheduler"),
        scheduler=scheduler(name="DDIMScheduler"),
    )
    del parts["requires_safety_checker"]
    return pipeline("StableDiffusionUpscalePipeline", parts, image=image(size=8))


@rows("latent upscaling (x2)")
def _():
    network = unet(
        sample_size=8,
        in_channels=8,
        out_channels=5,
        act_fn="gelu",
        attention_head_dim=8,
        norm_num_groups=None,
        block_out_channels=(32, 32, 64, 64),
        time_cond_proj_dim=160,
        conv_in_kernel=1,
        conv_out_kernel=1,
        down_block_types=("KDownBlock2D", *("KCrossAttnDownBlock2D",) * 3),
        mid_block_type=None,
        up_block_types=(*("KCrossAttnUpBlock2D",) * 3, "KUpBlock2D"),
        resnet_time_scale_shift="scale_shift",
        time_embedding_type="fourier",
        timestep_post_act="gelu",
    )
    parts = sd(unet=network, scheduler=scheduler("tiny_xl", prediction_type="sample"))
    for name in ("safety_checker", "feature_extractor", "requires_safety_checker"):
        del parts[name]
    return pipeline("StableDiffusionLatentUpscalePipeline", parts, image=noise(1, 4, 8, 8))


@rows("InstructPix2Pix")
def _():
    return pipeline("StableDiffusionInstructPix2PixPipeline", sd(unet=unet(in_channels=8)), image=image())


@rows("latent consistency (LCM)")
def _():
    parts = sd(unet=unet(time_cond_proj_dim=16), scheduler=scheduler(name="LCMScheduler"))
    return pipeline("LatentConsistencyModelPipeline", parts, **SIZE)


@rows("AutoencoderTiny (TAESD) as VAE")
def _():
    return pipeline("StableDiffusionPipeline", sd(vae=tiny_vae()), **SIZE)


@rows("AsymmetricAutoencoderKL as VAE")
def _():
    sizes = {"down_block_out_channels": (20, 40), "up_block_out_channels": (20, 40), "norm_num_groups": 5}
    parts = sd(unet=unet(in_channels=9), vae=model("AsymmetricAutoencoderKL", **sizes, **TWO_LEVELS))
    inputs = {"image": image(size=16), "mask_image": mask()[..., :16, :16], "height": 16, "width": 16}
    return pipeline("StableDiffusionInpaintPipeline", parts, **inputs)


def tiny_vae():
    return model(
        "AutoencoderTiny",
        encoder_block_out_channels=(16,) * 4,
        decoder_block_out_channels=(16,) * 4,
        num_encoder_blocks=(1,) * 4,
        num_decoder_blocks=(1,) * 4,
    )


# --- controls -------------------------------------------------------------------------------------


def controlnet(config="tiny", cls="ControlNetModel", **options):
    shared = {k: v for k, v in UNETS[config].items() if k not in ("sample_size", "up_block_types")}
    return model(cls, **shared, conditioning_embedding_out_channels=(8, 8, 16, 16), **options)


@rows("ControlNet")
def _():
    return pipeline("StableDiffusionControlNetPipeline", sd(controlnet=controlnet()), image=image())


@rows("several ControlNets")
def _():
    parts = sd(controlnet=[controlnet(), controlnet()])
    return pipeline("StableDiffusionControlNetPipeline", parts, image=[image(), image()])


@rows("ControlNet-XS")
def _():
    base = unet(use_linear_projection=True, layers_per_block=2)
    sizes = {"conditioning_embedding_out_channels": (8, 8, 16, 16), "learn_time_embedding": True}
    adapter = model(diffusers.ControlNetXSAdapter.from_unet, base, size_ratio=1, **sizes)
    return pipeline("StableDiffusionControlNetXSPipeline", sd(unet=base, controlnet=adapter), image=image())


@rows("T2I-Adapter")
def _():
    adapter = model("T2IAdapter", channels=(40, 80), num_res_blocks=1, downscale_factor=8)
    parts = sd(adapter=adapter)
    return pipeline("StableDiffusionAdapterPipeline", parts, image=image(), **SIZE)


@rows("IP-Adapter")
def _():
    network = unet()
    network._load_ip_adapter_weights([ip_adapter_weights(network)])
    embeds = [noise(2, 1, 24, seed=7)]
    return pipeline("StableDiffusionPipeline", sd(unet=network), ip_adapter_image_embeds=embeds, **SIZE)


# --- Stable Diffusion XL --------------------------------------------------------------------------

xl = Rows("Stable Diffusion XL")


@xl("base")
def _():
    return pipeline("StableDiffusionXLPipeline", sdxl(), **SIZE)


@xl("refiner")
def _():
    network = unet("tiny_xl", cross_attention_dim=32, projection_class_embeddings_input_dim=5 * 8 + 32)
    parts = sdxl(unet=network, text_encoder=None, tokenizer=None, requires_aesthetics_score=True)
    return pipeline("StableDiffusionXLImg2ImgPipeline", parts, image=image(), strength=0.9)


@xl("image to image")
def _():
    return pipeline("StableDiffusionXLImg2ImgPipeline", sdxl(), image=image(), strength=0.9)


@xl("inpainting")
def _():
    inputs = {"image": image(), "mask_image": mask(), "strength": 0.9, **SIZE}
    return pipeline("StableDiffusionXLInpaintPipeline", sdxl(), **inputs)


@xl("Turbo: one step without guidance")
def _():
    euler = scheduler(name="EulerAncestralDiscreteScheduler", timestep_spacing="trailing")
    inputs = {**SIZE, "num_inference_steps": 1, "guidance_scale": 0.0}
    return pipeline("StableDiffusionXLPipeline", sdxl(scheduler=euler), **inputs)


@xl("ControlNet")
def _():
    parts = sdxl(controlnet=controlnet("tiny_xl"))
    return pipeline("StableDiffusionXLControlNetPipeline", parts, image=image(), **SIZE)


@xl("ControlNet Union")
def _():
    sizes = {"num_trans_channel": 40, "num_trans_head": 4, "num_proj_channel": 40}
    parts = sdxl(controlnet=controlnet("tiny_xl", "ControlNetUnionModel", **sizes))
    inputs = {"control_image": [image()], "control_mode": [3], **SIZE}
    return pipeline("StableDiffusionXLControlNetUnionPipeline", parts, **inputs)


@xl("T2I-Adapter")
def _():
    adapter = model(
        "T2IAdapter", channels=(40, 80, 80, 80), adapter_type="full_adapter_xl", downscale_factor=16
    )
    parts = sdxl(adapter=adapter)
    del parts["add_watermarker"]
    return pipeline("StableDiffusionXLAdapterPipeline", parts, image=image(), **SIZE)


SECTIONS = (rows, xl)
