"""Tiny transformers of diffusers with random weights, and their inputs."""

from collections.abc import Callable
from typing import Any, NamedTuple

import diffusers
import torch
from diffusers.utils.peft_utils import set_weights_and_activate_adapters
from peft import LoraConfig
from torch import nn

from sdfastgn.models.architectures import randomize
from tests.patches.cases import noise


class Transformer(NamedTuple):
    """``scale``: the name of the argument whose item "scale" multiplies the scales of all LoRAs."""

    kind: str
    config: dict[str, Any]
    inputs: Callable[[], dict[str, Any]]
    scale: str = "attention_kwargs"

    def build(self) -> Any:
        return randomize(getattr(diffusers, self.kind)(**self.config), 3).eval()

    def run(self, model: Any, scale: Any = None) -> torch.Tensor:
        more = {} if scale is None else {self.scale: {"scale": scale}}
        (result, *_) = model(**self.inputs(), **more, return_dict=False)
        return torch.stack(result) if isinstance(result, list) else result


def add_lora(model: Any, name: str, seed: int = 5, targets: Any = None, **options: Any) -> None:
    """Adds a LoRA to each linear layer, or to those that ``targets`` names."""
    torch.manual_seed(seed)
    every = [
        path for path, layer in model.named_modules() if isinstance(layer, nn.Linear) and ".lora_" not in path
    ]
    paths = [path.removesuffix(".base_layer") for path in every]
    options = {"r": 3, "lora_alpha": 4, "init_lora_weights": False, **options}
    model.add_adapter(LoraConfig(target_modules=targets or paths, **options), adapter_name=name)


# Targets of a LoRA on some layers.
FEW = ["to_q", "proj_out"]


def add_two(model: Any) -> None:
    """Adds the LoRA "a" to each layer, and "b" to some. "a" is active."""
    add_lora(model, "a")
    add_lora(model, "b", 6, FEW)
    model.set_adapter("a")


ONES = torch.ones(1, 5).long()
STEP = torch.tensor([500.0])
# fmt: off
FLUX = {
    "patch_size": 1, "in_channels": 16, "num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16,
    "num_attention_heads": 2, "joint_attention_dim": 32, "axes_dims_rope": (4, 4, 8),
}
# fmt: on
IDS = {"img_ids": torch.cartesian_prod(*map(torch.arange, (1, 2, 2))).float(), "txt_ids": torch.zeros(5, 3)}


def tokens() -> dict[str, Any]:
    return {"hidden_states": noise(1, 4, 16), "encoder_hidden_states": noise(1, 5, 32)}


def video(*shape: int) -> dict[str, Any]:
    return {"hidden_states": noise(1, *shape), "encoder_hidden_states": noise(1, 5, 32), "timestep": STEP}


# fmt: off
TRANSFORMERS = {
    "flux": Transformer(
        "FluxTransformer2DModel",
        {**FLUX, "pooled_projection_dim": 32},
        lambda: {**tokens(), **IDS, "pooled_projections": noise(1, 32), "timestep": STEP / 1000},
        "joint_attention_kwargs",
    ),
    "sd3": Transformer(
        "SD3Transformer2DModel",
        {
            "sample_size": 8, "patch_size": 1, "in_channels": 4, "num_layers": 1, "attention_head_dim": 8,
            "num_attention_heads": 4, "caption_projection_dim": 32, "joint_attention_dim": 32,
            "pooled_projection_dim": 64, "out_channels": 4, "qk_norm": "rms_norm",
        },
        lambda: {**video(4, 4, 4), "pooled_projections": noise(1, 64)},
        "joint_attention_kwargs",
    ),
    "qwen_image": Transformer(
        "QwenImageTransformer2DModel",
        {
            "patch_size": 2, "in_channels": 16, "out_channels": 4, "num_layers": 1, "attention_head_dim": 16,
            "num_attention_heads": 2, "joint_attention_dim": 32, "axes_dims_rope": (8, 4, 4),
        },
        lambda: {
            **tokens(), "encoder_hidden_states_mask": ONES, "timestep": STEP / 1000,
            "img_shapes": [[(1, 2, 2)]],
        },
    ),
    "z_image": Transformer(
        "ZImageTransformer2DModel",
        {
            "in_channels": 4, "dim": 32, "n_layers": 1, "n_refiner_layers": 1, "n_heads": 2, "n_kv_heads": 2,
            "cap_feat_dim": 32, "axes_dims": [8, 4, 4], "axes_lens": [256, 32, 32],
        },
        lambda: {"x": [noise(4, 1, 4, 4)], "t": STEP / 1000, "cap_feats": [noise(5, 32)]},
        "joint_attention_kwargs",
    ),
    "ltx": Transformer(
        "LTXVideoTransformer3DModel",
        {
            "in_channels": 16, "out_channels": 16, "num_attention_heads": 2, "attention_head_dim": 8,
            "cross_attention_dim": 16, "num_layers": 1, "caption_channels": 32,
        },
        lambda: {
            **tokens(), "timestep": STEP, "encoder_attention_mask": ONES, "num_frames": 1, "height": 2,
            "width": 2,
        },
    ),
    "wan": Transformer(
        "WanTransformer3DModel",
        {
            "num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 4, "out_channels": 4,
            "text_dim": 32, "freq_dim": 32, "ffn_dim": 32, "num_layers": 1, "rope_max_seq_len": 32,
        },
        lambda: video(4, 2, 4, 4),
    ),
    "lumina2": Transformer(
        "Lumina2Transformer2DModel",
        {
            "sample_size": 4, "in_channels": 4, "hidden_size": 24, "num_layers": 1, "num_refiner_layers": 1,
            "num_attention_heads": 3, "num_kv_heads": 1, "multiple_of": 2, "axes_dim_rope": (4, 2, 2),
            "axes_lens": (32, 32, 32), "cap_feat_dim": 32,
        },
        lambda: {**video(4, 4, 4), "encoder_attention_mask": ONES},
    ),
    "chroma": Transformer(
        "ChromaTransformer2DModel",
        {
            **FLUX, "approximator_num_channels": 8, "approximator_hidden_dim": 16, "approximator_layers": 1,
        },
        lambda: {**tokens(), **IDS, "timestep": STEP / 1000},
        "joint_attention_kwargs",
    ),
    "hunyuan_video": Transformer(
        "HunyuanVideoTransformer3DModel",
        {
            "in_channels": 4, "out_channels": 4, "num_attention_heads": 2, "attention_head_dim": 10,
            "num_layers": 1, "num_single_layers": 1, "num_refiner_layers": 1, "patch_size": 1,
            "text_embed_dim": 32, "pooled_projection_dim": 8, "rope_axes_dim": (2, 4, 4),
        },
        lambda: {
            **video(4, 2, 4, 4), "encoder_attention_mask": ONES, "pooled_projections": noise(1, 8),
            "guidance": torch.tensor([3.5]),
        },
    ),
    "cogvideox": Transformer(
        "CogVideoXTransformer3DModel",
        {
            "num_attention_heads": 2, "attention_head_dim": 16, "in_channels": 4, "out_channels": 4,
            "time_embed_dim": 2, "text_embed_dim": 32, "num_layers": 1, "sample_width": 4, "sample_height": 4,
            "sample_frames": 9, "max_text_seq_length": 5,
        },
        lambda: video(3, 4, 4, 4),
    ),
}

# Parts of it are fused, and its calls become CUDA graphs.
SANA = Transformer(
    "SanaTransformer2DModel",
    {
        "patch_size": 1, "in_channels": 4, "out_channels": 4, "num_layers": 1, "num_attention_heads": 2,
        "attention_head_dim": 8, "num_cross_attention_heads": 2, "cross_attention_head_dim": 8,
        "cross_attention_dim": 16, "caption_channels": 32, "sample_size": 8,
    },
    lambda: video(4, 8, 8),
)
# fmt: on


# ---- changes of LoRAs


def weights(names, numbers):
    return lambda model: set_weights_and_activate_adapters(model, names, numbers)


@torch.no_grad()
def written(model, through_data=False):
    for name, parameter in model.named_parameters():
        if "lora_B.a" in name:
            (parameter.data if through_data else parameter).mul_(2.0)


def stepped(model, **options):
    """A step of an optimizer, after a backward in training mode."""
    model.train()
    with torch.enable_grad():
        TRANSFORMERS["sd3"].run(model).square().mean().backward()
    options = {"lr": 0.05, **options}
    torch.optim.AdamW([p for p in model.parameters() if p.grad is not None], **options).step()
    model.zero_grad()


def fused_and_unfused(model):
    model.fuse_lora(lora_scale=0.5)
    model.unfuse_lora()


# Changes of an SD3 with the two LoRAs of ``add_two``.
CHANGES = {
    "other-adapter": lambda m: m.set_adapter("b"),
    "both": lambda m: m.set_adapter(["a", "b"]),
    "weights": weights(["a", "b"], [0.3, -0.7]),
    "scale": weights(["a"], [-0.5]),
    "off": lambda m: m.disable_adapters(),
    "off-and-on": lambda m: (m.disable_adapters(), TRANSFORMERS["sd3"].run(m), m.enable_adapters()),
    "fused": lambda m: m.fuse_lora(lora_scale=0.5),
    "fused-and-unfused": fused_and_unfused,
    "deleted": lambda m: m.delete_adapters("a"),
    "third": lambda m: add_lora(m, "c", 7),
    "written": written,
    "data": lambda m: written(m, through_data=True),
    "optimizer": stepped,
    "fused-optimizer": lambda m: stepped(m, fused=True),
    "training": lambda m: m.train(),
}
