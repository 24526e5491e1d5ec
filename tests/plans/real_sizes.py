"""What plans of well-known networks read and write at their real size: see ``bytes_at_real_size.json``.

The networks are on the device meta, so this takes neither a GPU nor memory. To write the file again:
``python -m tests.plans.real_sizes``
"""

from __future__ import annotations

import collections
import functools
import json
import math
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from sdfastgn.models.configurations import UNETS, VAES, VIDEO_NETWORKS
from sdfastgn.plans.run.aliases import adds_bias_apart, copies
from tests.plans.engine import plan_of
from tests.plans.models import of_diffusers

FILE = pathlib.Path(__file__).with_name("bytes_at_real_size.json")


class Network(NamedTuple):
    """A network at its real size.

    Attributes:
        method: its name, or the name of a part of the network.
        inputs: shapes of the tensors, or other arguments.
    """

    cls: str
    settings: dict[str, Any]
    dtype: torch.dtype
    method: str
    inputs: dict[str, Any]


def unet(name: str, size: int, **more: Any) -> Network:
    width = UNETS[name]["cross_attention_dim"]
    inputs = {"sample": (2, 4, size, size), "timestep": 500, "encoder_hidden_states": (2, 77, width), **more}
    return Network("UNet2DConditionModel", UNETS[name], torch.float16, "forward", inputs)


def decoder(cls: str, *shape: int, dtype: torch.dtype = torch.bfloat16, **settings: Any) -> Network:
    return Network(cls, settings, dtype, "decode", {"z": shape})


def transformer(name: str, few: dict[str, Any], **inputs: Any) -> Network:
    """The transformer ``name`` with the layers in ``few``: the others would move as many bytes each."""
    network = VIDEO_NETWORKS[name]["transformer"]
    return Network(network.cls, {**network.config, **few}, torch.bfloat16, "forward", inputs)


CONDITIONS = {"added_cond_kwargs": {"text_embeds": (2, 1280), "time_ids": (2, 6)}}
DC = {
    f"{part}_block_types": ("ResBlock",) * 3 + ("EfficientViTBlock",) * 3 for part in ("encoder", "decoder")
}
WAN_22 = {
    "base_dim": 160,
    "decoder_base_dim": 256,
    "z_dim": 48,
    "is_residual": True,
    "in_channels": 12,
    "out_channels": 12,
    "patch_size": 2,
    "scale_factor_spatial": 16,
    "latents_mean": [0.0] * 48,
    "latents_std": [1.0] * 48,
}
HUNYUAN_IMAGE = {
    "in_channels": 3,
    "out_channels": 3,
    "latent_channels": 64,
    "block_out_channels": (128, 256, 512, 512, 1024, 1024),
    "layers_per_block": 2,
    "spatial_compression_ratio": 32,
    "sample_size": 384,
}
COGVIEW4 = {
    "patch_size": 2,
    "in_channels": 16,
    "out_channels": 16,
    "num_layers": 2,
    "attention_head_dim": 128,
    "num_attention_heads": 32,
    "text_embed_dim": 4096,
    "time_embed_dim": 512,
    "condition_dim": 256,
    "pos_embed_max_size": 128,
    "sample_size": 128,
}
SVD = VIDEO_NETWORKS["svd"]["vae"]
NETWORKS = {
    "SD1.5, UNet, batch 2": unet("sd15", 64),
    "SDXL, UNet, batch 2": unet("sdxl", 128, **CONDITIONS),
    "Kandinsky 3, UNet 1024x1024, batch 2": Network(
        "Kandinsky3UNet",
        {},
        torch.float16,
        "forward",
        {
            "sample": (2, 4, 128, 128),
            "timestep": 500,
            "encoder_hidden_states": (2, 128, 4096),
            "encoder_attention_mask": (2, 128),
        },
    ),
    "ConsistencyDecoderVAE, UNet 512x512": Network(
        "ConsistencyDecoderVAE",
        {},
        torch.float16,
        "decoder_unet",
        {"sample": (1, 7, 512, 512), "timestep": 500},
    ),
    "SD1.5, decode 1024x1024": decoder("AutoencoderKL", 1, 4, 128, 128, dtype=torch.float16, **VAES["sd15"]),
    "TAESD, decode 512x512": Network("AutoencoderTiny", {}, torch.float16, "decode", {"x": (1, 4, 64, 64)}),
    "Qwen-Image, decode 1024x1024": decoder("AutoencoderKLQwenImage", 1, 16, 1, 128, 128),
    "Qwen-Image 2.1, decode 1024x1024": decoder("AutoencoderKLQwenImage21", 1, 64, 1, 64, 64),
    "Wan, decode 17x480x832": decoder("AutoencoderKLWan", 1, 16, 5, 60, 104),
    "Wan 2.2, encode 5x704x1280": Network(
        "AutoencoderKLWan", WAN_22, torch.bfloat16, "_encode", {"x": (1, 3, 5, 704, 1280)}
    ),
    "Wan 2.2, decode 5x704x1280": decoder("AutoencoderKLWan", 1, 48, 2, 44, 80, **WAN_22),
    "HunyuanVideo, decode 17x480x832": decoder("AutoencoderKLHunyuanVideo", 1, 16, 5, 60, 104),
    "HunyuanVideo 1.5, decode 17x480x832": decoder("AutoencoderKLHunyuanVideo15", 1, 32, 5, 30, 52),
    "HunyuanImage's refiner, decode 1024x1024": decoder("AutoencoderKLHunyuanImageRefiner", 1, 32, 1, 64, 64),
    "CogVideoX, decode 9x480x720": decoder("AutoencoderKLCogVideoX", 1, 16, 3, 60, 90),
    "CogVideoX, encode 9x480x720": Network(
        "AutoencoderKLCogVideoX", {}, torch.bfloat16, "_encode", {"x": (1, 3, 9, 480, 720)}
    ),
    "Allegro, encode 24x320x320": Network(
        "AutoencoderKLAllegro", {}, torch.bfloat16, "encoder", {"sample": (1, 3, 24, 320, 320)}
    ),
    "Allegro, decode 24x320x320": Network(
        "AutoencoderKLAllegro", {}, torch.bfloat16, "decoder", {"sample": (1, 4, 6, 40, 40)}
    ),
    "LTX, decode 49x512x704": decoder("AutoencoderKLLTXVideo", 1, 128, 7, 16, 22),
    "Mochi, decode 13x480x848": decoder("AutoencoderKLMochi", 1, 12, 3, 60, 106),
    "Cosmos, decode 17x480x832": decoder("AutoencoderKLCosmos", 1, 16, 3, 60, 104),
    "Cosmos, encode 17x480x832": Network(
        "AutoencoderKLCosmos", {}, torch.bfloat16, "_encode", {"x": (1, 3, 17, 480, 832)}
    ),
    "DC-AE, decode 1024x1024": decoder("AutoencoderDC", 1, 32, 32, 32, **DC),
    "SVD, decode 4x576x1024": Network(
        SVD.cls, SVD.config, torch.float16, "decode", {"z": (4, 4, 72, 128), "num_frames": 4}
    ),
    "Flux.2, decode 1024x1024": decoder("AutoencoderKLFlux2", 1, 32, 128, 128),
    "EasyAnimate, decode 9x384x672": decoder("AutoencoderKLMagvit", 1, 16, 3, 48, 84),
    "KVAE of videos, decode 9x480x832": decoder("AutoencoderKLKVAEVideo", 1, 16, 3, 60, 104),
    "KVAE, decode 1024x1024": decoder("AutoencoderKLKVAE", 1, 16, 128, 128),
    "HunyuanImage, decode 1024x1024": decoder("AutoencoderKLHunyuanImage", 1, 64, 32, 32, **HUNYUAN_IMAGE),
    "Kandinsky 6, decode 5x512x512": decoder("Kandinsky6SRVAE", 1, 64, 2, 32, 32),
    "SD3.5, transformer 1024x1024, 2 layers, batch 2": transformer(
        "sd35",
        {"num_layers": 2, "dual_attention_layers": (0,)},
        hidden_states=(2, 16, 128, 128),
        encoder_hidden_states=(2, 333, 4096),
        pooled_projections=(2, 2048),
        timestep=(2,),
    ),
    "Wan, transformer 33x480x832, 2 layers": transformer(
        "wan",
        {"num_layers": 2},
        hidden_states=(1, 16, 9, 60, 104),
        timestep=(1,),
        encoder_hidden_states=(1, 512, 4096),
    ),
    "CogVideoX, transformer 49x480x720, 2 layers, batch 2": transformer(
        "cogvideox",
        {"num_layers": 2},
        hidden_states=(2, 13, 16, 60, 90),
        encoder_hidden_states=(2, 226, 4096),
        timestep=(2,),
        image_rotary_emb=[(17550, 64)] * 2,
    ),
    "CogView4, transformer 1024x1024, 2 layers": Network(
        "CogView4Transformer2DModel",
        COGVIEW4,
        torch.bfloat16,
        "forward",
        {
            "hidden_states": (1, 16, 128, 128),
            "encoder_hidden_states": (1, 224, 4096),
            "timestep": (1,),
            **dict.fromkeys(("original_size", "target_size", "crop_coords"), (1, 2)),
        },
    ),
}


def measured(network: Network) -> dict[str, Any]:
    """The bytes that each kind of step reads and writes, and how many steps there are of it."""
    with torch.device("meta"), torch.no_grad():
        model = of_diffusers(network.cls, **network.settings).to("meta", network.dtype).eval()

        def draw(value: Any) -> Any:
            if isinstance(value, dict):
                return {key: draw(each) for key, each in value.items()}
            if isinstance(value, list):
                return [draw(each) for each in value]
            return torch.empty(value, dtype=network.dtype) if isinstance(value, tuple) else value

        inputs = draw(network.inputs)
        call: Callable[..., Any] = getattr(model, network.method)
        if not network.method.startswith("_") and not isinstance(call, torch.nn.Module):
            call = functools.partial(call, return_dict=False)
        call(**inputs)  # some models keep numbers from their first call
        plan = plan_of(model, lambda **inputs: call(**inputs), **inputs)
    found: dict[str, list[int]] = collections.defaultdict(lambda: [0, 0])
    for step in plan.steps:
        found[step.target][0] += 1
        found[step.target][1] += step.read + step.written
    for n in filter(copies, plan.graph.nodes):
        found["reshape that copies"][0] += 1
        found["reshape that copies"][1] += 2 * math.prod(n.meta["shape"]) * n.meta["dtype"].itemsize
    for n in filter(adds_bias_apart, plan.graph.nodes):
        found["bias apart"][0] += 1
        found["bias apart"][1] += 2 * math.prod(n.meta["shape"]) * n.meta["dtype"].itemsize
    return {
        "steps": sum(count for count, _ in found.values()),
        "bytes": sum(size for _, size in found.values()),
        "by step": {target: found[target] for target in sorted(found)},
    }


def text(results: dict[str, Any]) -> str:
    """The results as JSON, with one line for each kind of step."""
    return (
        json.dumps(results, indent=1).replace("[\n    ", "[").replace(",\n    ", ", ").replace("\n   ]", "]")
        + "\n"
    )


if __name__ == "__main__":
    FILE.write_text(text({name: measured(network) for name, network in NETWORKS.items()}))
