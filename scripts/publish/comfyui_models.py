"""Writes files with random weights for ComfyUI: SD1.5 and SDXL with their VAE, a ControlNet and a LoRA."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

_UNET = {
    "image_size": 32, "in_channels": 4, "out_channels": 4, "model_channels": 320,
    "use_spatial_transformer": True, "legacy": False,
}  # fmt: skip
# Model -> arguments with which ComfyUI makes its UNet. When ComfyUI loads a checkpoint, it finds these
# arguments from the shapes of the weights.
MODELS: dict[str, dict[str, Any]] = {
    "sd15": {
        "num_res_blocks": [2] * 4, "channel_mult": [1, 2, 4, 4], "transformer_depth": [1] * 6 + [0] * 2,
        "transformer_depth_output": [1] * 9 + [0] * 3, "transformer_depth_middle": 1, "context_dim": 768,
        "num_heads": 8,
    },
    "sdxl": {
        "num_res_blocks": [2] * 3, "channel_mult": [1, 2, 4], "transformer_depth": [0, 0, 2, 2, 10, 10],
        "transformer_depth_output": [0] * 3 + [2] * 3 + [10] * 3, "transformer_depth_middle": 10,
        "context_dim": 2048, "num_head_channels": 64, "use_linear_in_transformer": True,
        "num_classes": "sequential", "adm_in_channels": 2816,
    },
}  # fmt: skip
VAE: dict[str, Any] = {
    "double_z": True, "z_channels": 4, "resolution": 256, "in_channels": 3, "out_ch": 3, "ch": 128,
    "ch_mult": [1, 2, 4, 4], "num_res_blocks": 2, "attn_resolutions": [], "dropout": 0.0,
}  # fmt: skip
# Names of the files of a model. The path is ``{model}_{name}.safetensors``.
FILES = ("checkpoint", "control", "lora")
_LORA_RANK = 16


def random_weights(module: nn.Module, dtype: torch.dtype, device: str, prefix: str = "") -> dict[str, Tensor]:
    """Returns a state dict for ``module``, with ``prefix`` before each name.

    The weights are the same in every process. They are scaled so that activations keep their magnitude from
    layer to layer.
    """
    g = torch.Generator(device).manual_seed(0)
    return {
        f"{prefix}{name}": (
            torch.randn(weight.shape, generator=g, device=device)
            * max(math.prod(weight.shape[1:]), 4) ** -0.5
            + (weight.dim() == 1 and name.endswith("weight"))
        ).to(dtype)
        for name, weight in module.state_dict().items()
    }


def unet(config: dict[str, Any]) -> nn.Module:
    """Returns ComfyUI's UNet on the device ``meta``, without memory for weights.

    ``config``: a value of ``MODELS``.
    """
    from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel

    with torch.device("meta"):
        return UNetModel(**_UNET, **config)


def control_net(config: dict[str, Any], **options: Any) -> nn.Module:
    """Returns ComfyUI's ControlNet for ``unet(config)``, on the device ``meta``.

    ``options``: further arguments of ComfyUI's class.
    """
    from comfy.cldm.cldm import ControlNet

    with torch.device("meta"):
        return ControlNet(**_UNET, **config, hint_channels=3, **options)


def write_files(folder: Path, model: str, device: str) -> None:
    """Write the files of ``FILES`` in fp16: a checkpoint without text encoder, a ControlNet and a LoRA.

    model: a key of ``MODELS``. device: where the random numbers are drawn.
    """
    from comfy.ldm.models.autoencoder import AutoencoderKL

    main = unet(MODELS[model])
    with torch.device("meta"):
        vae = AutoencoderKL(ddconfig=VAE, embed_dim=VAE["z_channels"])
    weights = {
        "checkpoint": {
            **random_weights(main, torch.float16, device, "model.diffusion_model."),
            **random_weights(vae, torch.float16, device, "first_stage_model."),
        },
        "control": random_weights(control_net(MODELS[model]), torch.float16, device, "control_model."),
        "lora": _lora(main, device),
    }
    for name in FILES:
        save_file(weights.pop(name), folder / f"{model}_{name}.safetensors")


def _lora(module: nn.Module, device: str) -> dict[str, Tensor]:
    """Returns a LoRA with random weights for every linear layer of the transformer blocks of ``module``."""
    g = torch.Generator(device).manual_seed(1)
    found = {}
    for name, layer in module.named_modules():
        if isinstance(layer, nn.Linear) and ".transformer_blocks." in name:
            key = f"lora_unet_{name.replace('.', '_')}"
            for part, shape in {
                "lora_down": (_LORA_RANK, layer.in_features),
                "lora_up": (layer.out_features, _LORA_RANK),
            }.items():
                drawn = torch.randn(shape, generator=g, device=device) * 0.3 * shape[1] ** -0.5
                found[f"{key}.{part}.weight"] = drawn.half()
            found[f"{key}.alpha"] = torch.tensor(float(_LORA_RANK))
    return found


def conditioning(config: dict[str, Any], seed: int) -> list[Any]:
    """Returns random values in the format that a text encoder returns for one prompt of 77 tokens."""
    g = torch.Generator().manual_seed(seed)
    pooled = {"pooled_output": torch.randn(1, 1280, generator=g)} if "adm_in_channels" in config else {}
    return [[torch.randn(1, 77, config["context_dim"], generator=g), pooled]]
