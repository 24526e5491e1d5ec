"""Tiny checkpoints in ComfyUI's own format, with random weights, and runs of them through its nodes."""

import logging

import nodes
import torch

from scripts.publish import comfyui_models
from tests.patches import cases
from tests.patches.samples import randomize

__all__ = [
    "KINDS",
    "VAE",
    "close",
    "image_of",
    "latent_of",
    "load_model",
    "load_vae",
    "lora_file",
    "lora_of",
    "save_checkpoint",
    "snapshot",
    "step",
    "unet_of",
    "with_random_parameters",
]

logging.disable(logging.INFO)  # ComfyUI tells of every model that it loads

# Configurations with as few blocks as ComfyUI's model detection accepts. "sdxl" is Segmind Vega, an SDXL
# with fewer transformer blocks.
KINDS = {
    "sd15": {
        "num_res_blocks": [1, 1], "channel_mult": [1, 1], "transformer_depth": [1, 1],
        "transformer_depth_output": [1, 1, 1, 1], "transformer_depth_middle": 1, "context_dim": 768,
        "num_heads": 8,
    },
    "sdxl": {
        "num_res_blocks": [2, 2, 2], "channel_mult": [1, 1, 1], "transformer_depth": [0, 0, 1, 1, 2, 2],
        "transformer_depth_output": [0, 0, 0, 1, 1, 1, 2, 2, 2], "transformer_depth_middle": -1,
        "context_dim": 2048, "num_head_channels": 64, "use_linear_in_transformer": True,
        "num_classes": "sequential", "adm_in_channels": 2816,
    },
}  # fmt: skip
VAE = {**comfyui_models.VAE, "resolution": 64, "ch": 32, "ch_mult": [1, 2], "num_res_blocks": 1}


def load_model(kind, **options):
    """A ``ModelPatcher`` from ComfyUI's own loader. options: the loader's ``model_options``."""
    import comfy.sd

    unet = comfyui_models.unet(KINDS[kind])
    with torch.inference_mode():  # ComfyUI runs every node in inference mode
        weights = comfyui_models.random_weights(unet, torch.float32, "cpu", "model.diffusion_model.")
        found, *_ = comfy.sd.load_state_dict_guess_config(
            weights, output_vae=False, output_clip=False, model_options=options
        )
    assert type(found.model).__name__ == {"sd15": "BaseModel", "sdxl": "SDXL"}[kind]
    return found


def load_vae():
    """ComfyUI's VAE with random weights, in the dtype that ComfyUI chooses."""
    import comfy.sd
    from comfy.ldm.models.autoencoder import AutoencoderKL

    params = {"ddconfig": VAE, "embed_dim": VAE["z_channels"]}
    weights = comfyui_models.random_weights(AutoencoderKL(**params), torch.float32, "cpu")
    return comfy.sd.VAE(sd=weights, config={"params": params})


def latent_of(model, kind, steps=2, **options):
    """The result of the node KSampler for an empty latent. options: further entries of the conditioning."""
    positive, negative = (comfyui_models.conditioning(KINDS[kind], seed) for seed in (5, 6))
    positive[0][1].update(options)
    with torch.inference_mode():
        latent = {"samples": torch.zeros(1, 4, 16, 16)}
        return nodes.KSampler().sample(model, 3, steps, 4.0, "euler", "normal", positive, negative, latent)[
            0
        ]["samples"]


def image_of(vae, latent):
    """The image of the node VAEDecode for ``latent``, (1, H, W, 3)."""
    with torch.inference_mode():
        return nodes.VAEDecode().decode(vae, {"samples": latent})[0]


def unet_of(model):
    return model.model.diffusion_model


def step(model, kind, **options):
    """The result of one call of the UNet in its present state."""
    g = torch.Generator().manual_seed(2)
    x = torch.randn(2, 4, 16, 16, generator=g)
    context = torch.randn(2, 77, KINDS[kind]["context_dim"], generator=g)
    y = torch.randn(2, 2816, generator=g) if kind == "sdxl" else None
    options = {"transformer_options": {}, **options}
    with torch.inference_mode():
        return unet_of(model)(x, torch.tensor([5.0, 5.0]), context, y=y, **options)


def close(a, b):
    """Assert that a is b within fp32's rounding in some dozen blocks and steps, and not b bit by bit."""
    assert (a - b).abs().max() < 2e-5 * b.abs().max()
    assert not torch.equal(a, b), "nothing ran fused"


def lora_of(model):
    """Patches for some convolutions, linear layers and norms."""
    g = torch.Generator().manual_seed(1)
    names = ("in_layers.2.weight", "attn1.to_q.weight", "ff.net.2.weight", "out_layers.0.weight")
    return {
        name: (torch.randn(weight.shape, generator=g) * 0.02,)
        for name, weight in model.model.state_dict().items()
        if name.endswith(names)
    }


def snapshot(root):
    """Everything that ejection restores: classes, attributes, hooks, and weights with their strides."""
    hooks = ("_forward_hooks", "_forward_pre_hooks")
    return [
        (path, type(module), sorted(vars(module)), *(dict(vars(module)[name]) for name in hooks))
        for path, module in root.named_modules()
    ] + [
        (name, id(weight), weight.stride(), weight.is_inference(), weight.float().sum().item())
        for name, weight in root.named_parameters()
    ]


def save_checkpoint(path):
    """Write a checkpoint of a tiny UNet, with a text encoder and a VAE of SD 1.5's own sizes, to ``path``."""
    import comfy.sd1_clip
    from comfy.ldm.models.autoencoder import AutoencoderKL
    from safetensors.torch import save_file

    with torch.device("meta"):
        vae = AutoencoderKL(ddconfig=comfyui_models.VAE, embed_dim=4)
        clip = comfy.sd1_clip.SD1ClipModel(device="meta", dtype=torch.float16)
    parts = {
        "model.diffusion_model.": comfyui_models.unet(KINDS["sd15"]),
        "first_stage_model.": vae,
        "cond_stage_model.transformer.": clip.clip_l.transformer,
    }
    weights = {}
    for prefix, module in parts.items():
        weights.update(comfyui_models.random_weights(module, torch.float16, "cpu", prefix))
    save_file({name: weight.contiguous() for name, weight in weights.items()}, path)


def lora_file():
    """The content of a LoRA's file for the attention of the tiny UNet's middle block."""
    g = torch.Generator().manual_seed(7)
    name = "lora_unet_mid_block_attentions_0_transformer_blocks_0_attn1_to_q"
    return {
        f"{name}.lora_down.weight": torch.randn(4, 320, generator=g) * 0.1,
        f"{name}.lora_up.weight": torch.randn(320, 4, generator=g) * 0.1,
        f"{name}.alpha": torch.tensor(4.0),
    }


def with_random_parameters(model):
    """``model`` with random weights, which ComfyUI's layers do not have."""
    torch.manual_seed(1)
    for p in model.parameters():
        if p.dim() > 1:
            torch.nn.init.normal_(p, std=(p.numel() / len(p)) ** -0.5)
    return randomize(model).to(cases.WHERE["device"])
