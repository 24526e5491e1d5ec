"""Small models of diffusers with random parameters, and calls of them, as a table.

In the inputs of a call, a tuple of ints is a random tensor of this shape. Anything else is passed as it is.
"""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import diffusers
import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree


def of_diffusers(name: str, **settings: Any) -> nn.Module:
    """A new model of the class ``name``. Skips the test if the installed diffusers has no such class."""
    cls = getattr(diffusers, name, None)
    if cls is None:
        pytest.skip(f"diffusers {diffusers.__version__} has no {name}")
    missing = settings.keys() - inspect.signature(cls).parameters.keys()
    if missing:
        pytest.skip(f"{name} of diffusers {diffusers.__version__} has no {', '.join(sorted(missing))}")
    return cls(**settings)


def asked(name: str, **inputs: Any) -> dict[str, Any]:
    """Those of ``inputs`` that ``forward`` of the class ``name`` has in the installed diffusers."""
    known = inspect.signature(getattr(diffusers, name, nn.Identity).forward).parameters
    return {key: value for key, value in inputs.items() if key in known}


class Size(NamedTuple):
    """The shape of a random tensor among the inputs of a call."""

    shape: tuple[int, ...]


class Call(NamedTuple):
    """A call of a model.

    Attributes:
        name: of the row, such as ``AutoencoderKL.decode``.
        cls: the class, a name of diffusers.
        settings: of the class.
        method: which method is called.
        inputs: its keyword arguments.
        why_not: the beginning of the reason, if it cannot be traced; else empty.
        is_slow: it takes more than a few seconds.
    """

    name: str
    cls: str
    settings: dict[str, Any]
    method: str
    inputs: dict[str, Any]
    why_not: str = ""
    is_slow: bool = False

    def model(self) -> nn.Module:
        model = randomized(of_diffusers(self.cls, **self.settings)).eval().requires_grad_(False)
        if self.cls == "AutoencoderKLAllegro":  # which works in tiles only
            model.enable_tiling()
            model.kernel, model.stride = (8, 16, 16), (8, 16, 16)
        return model

    def drawn(self, seed: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(seed)

        def draw(value: Any) -> Any:
            return torch.randn(value.shape, generator=generator) if isinstance(value, Size) else value

        return pytree.tree_map(draw, self.inputs, is_leaf=lambda value: isinstance(value, Size))

    def run(self, model: nn.Module, **inputs: Any) -> list[Tensor]:
        """All tensors of the result."""
        if "return_dict" not in inputs and self.cls not in NO_RETURN_DICT:
            inputs["return_dict"] = False
        result = getattr(model, self.method)(**inputs)
        parts = result if isinstance(result, tuple) else (getattr(result, "latent_dist", result),)
        parts = [getattr(part, "parameters", part) for part in parts]  # of a distribution
        return [x for x in pytree.tree_leaves(parts) if isinstance(x, Tensor)]


# Classes whose methods do not take the argument return_dict.
NO_RETURN_DICT = ("AutoencoderVidTok", "T2IAdapter")


def randomized(model: nn.Module) -> nn.Module:
    """Gives each parameter random values: also those that start as zeros or ones."""
    generator = torch.Generator().manual_seed(0)
    for module in model.modules():
        for name, p in module.named_parameters(recurse=False):
            draws = torch.randn(p.shape, generator=generator)
            if p.dim() > 1 and p.numel() > len(p):
                p.data = draws / (p.numel() / p.shape[0]) ** 0.5
            else:
                p.data = 0.2 * draws + ("weight" in name or "gamma" in name or "scale" in name)
        for name, b in module.named_buffers(recurse=False):
            if name == "running_var":
                b.data = 0.5 + torch.rand(b.shape, generator=generator)
    return model


CALLS: list[Call] = []


def calls(cls: str, settings: dict[str, Any], /, name: str = "", **methods: Any) -> None:
    """Adds calls: ``methods`` are names of methods, and their inputs. Names of options end in "_"."""
    name = f"{cls}{' ' * bool(name)}{name}"
    for method, inputs in methods.items():
        if isinstance(inputs, tuple):
            inputs = {"z" if method == "decode" else "x" if method == "encode" else "sample": inputs}
        options = {k: inputs.pop(k) for k in ("why_not", "is_slow") if k in inputs}
        sized = pytree.tree_map(_sized, inputs, is_leaf=_is_size)
        CALLS.append(Call(f"{name}.{method}", cls, settings, method, sized, **options))


def _is_size(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) > 0 and all(type(v) is int for v in value)


def _sized(value: Any) -> Any:
    return Size(value) if _is_size(value) else value


TIME = torch.tensor(5)
# Reasons of calls that cannot be traced.
KEEPS = "the call keeps a tensor in "
WEIGHT_NORM = KEEPS + "Conv1d.weight"  # which PyTorch's weight_norm computes anew in each call


# ---- autoencoders of images

TWO = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
CHANNELS = {"block_out_channels": (8, 16), "norm_num_groups": 4, "layers_per_block": 1, "latent_channels": 4}
calls("AutoencoderKL", {**TWO, **CHANNELS}, encode=(2, 3, 16, 24), decode=(2, 4, 8, 12))
calls(
    "AutoencoderKL",
    {**TWO, **CHANNELS, "use_quant_conv": False, "use_post_quant_conv": False, "norm_num_groups": 8},
    "like Flux's",
    encode=(1, 3, 16, 16),
    decode=(1, 4, 8, 8),
)
calls(
    "AsymmetricAutoencoderKL",
    {
        **TWO,
        "down_block_out_channels": (8, 16),
        "up_block_out_channels": (16, 32),
        "layers_per_up_block": 1,
        "norm_num_groups": 4,
    },
    encode=(1, 3, 16, 16),
    decode=(1, 4, 8, 8),
)
calls("AutoencoderKLFlux2", {**TWO, **CHANNELS}, encode=(1, 3, 16, 16), decode=(1, 4, 8, 8))
calls(
    "AutoencoderTiny",
    {
        "encoder_block_out_channels": (8, 8),
        "decoder_block_out_channels": (8, 8),
        "num_encoder_blocks": (1, 2),
        "num_decoder_blocks": (2, 1),
    },
    encode=(2, 3, 16, 16),
    decode={"x": (2, 4, 8, 8)},
)
calls(
    "AutoencoderKLHunyuanImage",
    {
        "in_channels": 3,
        "out_channels": 3,
        "latent_channels": 4,
        "block_out_channels": (32, 64),
        "layers_per_block": 1,
        "spatial_compression_ratio": 2,
        "sample_size": 16,
    },
    encode=(1, 3, 16, 16),
    decode=(1, 4, 8, 8),
)
DC = {
    f"{part}_{name}": value
    for part in ("encoder", "decoder")
    for name, value in {
        "block_types": ("ResBlock", "EfficientViTBlock"),
        "block_out_channels": (8, 16),
        "qkv_multiscales": ((), (5,)),
        "layers_per_block": (1, 1),
    }.items()
}
calls(
    "AutoencoderDC",
    {**DC, "latent_channels": 4, "attention_head_dim": 4},
    encode=(1, 3, 16, 16),
    decode=(1, 4, 8, 8),
)
calls(
    "AutoencoderDC",
    {
        **DC,
        "latent_channels": 4,
        "attention_head_dim": 4,
        "downsample_block_type": "conv",
        "upsample_block_type": "interpolate",
    },
    "with interpolation",
    encode=(1, 3, 16, 16),
    decode=(1, 4, 8, 8),
)
calls(
    "VQModel", {**TWO, **CHANNELS, "num_vq_embeddings": 16}, encode=(1, 3, 16, 16), decode={"h": (1, 4, 8, 8)}
)
calls(
    "VQModel",
    {**TWO, **CHANNELS, "block_out_channels": (32, 32), "norm_type": "spatial"},
    "with spatial norms",
    decode={"h": (1, 4, 8, 8), "force_not_quantize": True},
)
calls(
    "AutoencoderKLKVAE",
    {"channels": 32, "num_enc_blocks": 1, "num_dec_blocks": 1, "z_channels": 4, "ch_mult": (1, 2)},
    encode=(1, 3, 16, 16),
    decode=(1, 4, 8, 8),
)
calls(
    "ConsistencyDecoderVAE",
    {
        "encoder_block_out_channels": (8, 8, 16, 16),
        "encoder_norm_num_groups": 4,
        "encoder_layers_per_block": 1,
        "decoder_block_out_channels": (16, 16, 32, 32),
        "decoder_norm_num_groups": 4,
        "decoder_layers_per_block": 1,
    },
    encode=(1, 3, 32, 32),
    decode={"z": (1, 4, 4, 4), "why_not": "the call keeps a tensor in ConsistencyDecoderScheduler.timesteps"},
)


# ---- autoencoders of videos

calls(
    "AutoencoderKLTemporalDecoder",
    {"block_out_channels": (32, 64), "down_block_types": ("DownEncoderBlock2D",) * 2},
    encode=(3, 3, 16, 16),
    decode={"z": (3, 4, 8, 8), "num_frames": 3},
)
WAN = {
    "base_dim": 8,
    "z_dim": 4,
    "dim_mult": [1, 2, 2],
    "num_res_blocks": 1,
    "temperal_downsample": [False, True],
}
calls("AutoencoderKLQwenImage", WAN, encode=(1, 3, 1, 16, 24), decode=(1, 4, 1, 4, 6))
calls("AutoencoderKLWan", WAN, encode=(1, 3, 5, 16, 16), decode=(1, 4, 3, 4, 4))
calls("AutoencoderKLWan", WAN, "two videos", decode=(2, 4, 2, 4, 4))
calls(
    "AutoencoderKLWan",
    {
        **WAN,
        "is_residual": True,
        "decoder_base_dim": 16,
        "in_channels": 12,
        "out_channels": 12,
        "patch_size": 2,
    },
    "2.2",
    encode=(1, 3, 5, 16, 16),
    decode=(1, 4, 2, 4, 4),
)
calls(
    "AutoencoderKLQwenImage21",
    {**WAN, "decoder_base_dim": 8},
    encode=(1, 4, 1, 16, 16),
    decode=(1, 4, 1, 4, 4),
)
FOUR = {"block_out_channels": (8, 8, 8, 8), "latent_channels": 4, "layers_per_block": 1, "norm_num_groups": 4}
calls("AutoencoderKLHunyuanVideo", FOUR, encode=(1, 3, 5, 16, 16), decode=(1, 4, 2, 2, 2))
HUNYUAN = {
    "block_out_channels": (16, 32),
    "latent_channels": 4,
    "layers_per_block": 1,
    "spatial_compression_ratio": 2,
    "temporal_compression_ratio": 2,
}
calls("AutoencoderKLHunyuanVideo15", HUNYUAN, encode=(1, 3, 3, 8, 8), decode=(1, 4, 2, 5, 7))
calls("AutoencoderKLHunyuanImageRefiner", HUNYUAN, encode=(1, 3, 3, 8, 8), decode=(1, 4, 2, 3, 3))
calls(
    "AutoencoderKLCogVideoX",
    {**FOUR, "temporal_compression_ratio": 4},
    encode=(1, 3, 9, 16, 16),
    decode=(1, 4, 3, 2, 2),
)
calls(
    "AutoencoderKLAllegro",
    {**FOUR, "temporal_compression_ratio": 4},
    encode=(1, 3, 8, 16, 16),
    decode=(1, 4, 2, 2, 2),
)
calls(
    "AutoencoderKLMagvit",
    {
        "down_block_types": ["SpatialTemporalDownBlock3D"] * 2,
        "up_block_types": ["SpatialTemporalUpBlock3D"] * 2,
        "block_out_channels": [8, 16],
        "latent_channels": 4,
        "layers_per_block": 1,
        "norm_num_groups": 4,
    },
    encode=(1, 3, 5, 16, 16),
    decode=(1, 4, 2, 4, 4),
)
LTX = {
    "latent_channels": 8,
    "block_out_channels": (8,) * 4,
    "decoder_block_out_channels": (8,) * 4,
    "layers_per_block": (1,) * 5,
    "decoder_layers_per_block": (1,) * 5,
    "patch_size": 1,
    "spatio_temporal_scaling": (True, True, False, False),
    "decoder_spatio_temporal_scaling": (True, True, False, False),
}
calls("AutoencoderKLLTXVideo", LTX, encode=(1, 3, 5, 16, 16), decode=(1, 8, 2, 4, 4))
calls(
    "AutoencoderKLLTXVideo",
    {**LTX, "timestep_conditioning": True},
    "0.9.1",
    decode={"z": (1, 8, 2, 4, 4), "temb": (1,)},
)
calls(
    "AutoencoderKLLTX2Video",
    {
        "latent_channels": 8,
        "block_out_channels": (8, 8, 16, 16),
        "decoder_block_out_channels": (8, 16, 32),
        "layers_per_block": (1,) * 5,
        "decoder_layers_per_block": (1,) * 4,
        "patch_size": 1,
    },
    encode=(1, 3, 9, 16, 16),
    decode=(1, 8, 2, 2, 2),
)
calls(
    "AutoencoderKLMochi",
    {
        "encoder_block_out_channels": (32,) * 4,
        "decoder_block_out_channels": (32,) * 4,
        "layers_per_block": (1,) * 5,
    },
    encode=(1, 3, 7, 16, 16),
    decode=(1, 12, 2, 2, 2),
)
calls(
    "AutoencoderKLCosmos",
    {
        "encoder_block_out_channels": (8,) * 4,
        "decode_block_out_channels": (8,) * 4,
        "latent_channels": 4,
        "num_layers": 1,
    },
    encode=(1, 3, 9, 32, 32),
    decode=(1, 4, 2, 2, 2),
)
calls(
    "AutoencoderKLKVAEVideo",
    {"ch": 32, "ch_mult": (1, 2), "num_res_blocks": 1, "z_channels": 4, "temporal_compress_times": 2},
    encode=(1, 3, 5, 16, 16),
    decode=(1, 4, 3, 8, 8),
)
calls(
    "AutoencoderVidTok",
    {
        "ch": 32,
        "ch_mult": [1, 2],
        "z_channels": 4,
        "num_res_blocks": 1,
        "tempo_ds": [0],
        "tempo_us": [1],
        "spatial_ds": [0],
        "spatial_us": [1],
    },
    encode={"x": (1, 3, 5, 16, 16), "why_not": KEEPS + "VidTokCausalConv3d.causal_cache"},
    decode={"z": (1, 4, 3, 8, 8), "why_not": KEEPS + "VidTokCausalConv3d.causal_cache"},
)
calls(
    "Kandinsky6SRVAE",
    {
        "latent_channels": 4,
        "encoder_block_out_channels": (4, 32, 32),
        "decoder_block_out_channels": (4, 32, 32),
        "layers_per_block": 1,
        "temporal_compression_ratio": 2,
    },
    encode=(1, 3, 5, 16, 16),
    decode=(1, 4, 3, 4, 4),
)
calls(
    "AutoencoderKLMiniMaxH3",
    {
        "latent_channels": 4,
        "clip_length": 5,
        "token_drop": 1,
        "block_out_channels": (8, 8),
        "layers_per_block": 1,
        "norm_num_groups": 4,
        "spatial_downsample_factors": (2, 1),
        "temporal_downsample_factors": (1, 2),
        "decoder_num_layers": 1,
        "decoder_num_attention_heads": 2,
        "decoder_attention_head_dim": 16,
        "latents_mean": (0.0,) * 4,
        "latents_std": (1.0,) * 4,
    },
    encode=(1, 3, 5, 16, 16),
    decode=(1, 4, 5, 8, 8),
)


# ---- autoencoders of sounds, and others

calls(
    "AutoencoderOobleck",
    {
        "encoder_hidden_size": 8,
        "downsampling_ratios": [2, 4],
        "channel_multiples": [1, 2],
        "decoder_channels": 8,
        "decoder_input_channels": 4,
    },
    encode={"x": (1, 2, 64), "why_not": WEIGHT_NORM},
    decode={"z": (1, 4, 8), "why_not": WEIGHT_NORM},
)
calls(
    "AutoencoderKLLTX2Audio",
    {
        "base_channels": 16,
        "ch_mult": (1, 2),
        "num_res_blocks": 1,
        "resolution": 32,
        "latent_channels": 4,
        "mel_bins": 16,
    },
    encode=(1, 2, 16, 16),
    decode=(1, 4, 8, 8),
)
calls(
    "AutoencoderSAME",
    {
        "patch_size": 8,
        "encoder_channels": 16,
        "encoder_c_mults": (2,),
        "encoder_strides": (2,),
        "encoder_transformer_depths": (1,),
        "latent_dim": 8,
        "dim_heads": 8,
    },
    encode={"sample": (1, 2, 64), "why_not": WEIGHT_NORM},
    decode={"latents": (1, 8, 4), "why_not": WEIGHT_NORM},
)
calls(
    "MMAudioVAE",
    {
        "mel_bins": 16,
        "latent_channels": 4,
        "hidden_channels": 16,
        "channel_multipliers": (1, 2),
        "layers_per_block": 1,
    },
    decode=(1, 4, 8),
)
calls(
    "AutoencoderRAE",
    {
        "encoder_hidden_size": 64,
        "encoder_num_hidden_layers": 1,
        "decoder_hidden_size": 32,
        "decoder_num_hidden_layers": 1,
        "decoder_num_attention_heads": 2,
        "decoder_intermediate_size": 32,
        "encoder_input_size": 28,
        "patch_size": 8,
    },
    decode=(1, 64, 2, 2),
)


# ---- UNets

UNET = {
    "block_out_channels": (16, 32),
    "norm_num_groups": 4,
    "layers_per_block": 1,
    "attention_head_dim": 4,
    "cross_attention_dim": 24,
}
BLOCKS = {
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
}
TEXT = {"sample": (2, 4, 8, 8), "timestep": TIME, "encoder_hidden_states": (2, 7, 24)}
XL = {
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
    "transformer_layers_per_block": (1, 2),
    "attention_head_dim": (2, 4),
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 8,
    "projection_class_embeddings_input_dim": 32 + 48,
}
calls("UNet2DConditionModel", {**UNET, **BLOCKS}, "like SD1.5's", forward=TEXT)
calls(
    "UNet2DConditionModel",
    {**UNET, **XL},
    "like SDXL's",
    forward={**TEXT, "added_cond_kwargs": {"text_embeds": (2, 32), "time_ids": (2, 6)}},
)
calls(
    "UNet2DConditionModel",
    {**UNET, **BLOCKS, "resnet_time_scale_shift": "scale_shift"},
    "scale_shift",
    forward=TEXT,
)
calls(
    "UNet2DModel",
    {
        "sample_size": 8,
        "block_out_channels": (16, 32),
        "layers_per_block": 1,
        "norm_num_groups": 4,
        "attention_head_dim": 4,
        "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
        "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
    },
    forward={"sample": (2, 3, 8, 8), "timestep": TIME},
)
THREE = {
    "down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D"),
    "up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D"),
}
calls(
    "UNet3DConditionModel",
    {**UNET, **THREE},
    forward={"sample": (1, 4, 3, 8, 8), "timestep": TIME, "encoder_hidden_states": (1, 7, 24)},
)
calls(
    "UNetSpatioTemporalConditionModel",
    {
        "block_out_channels": (32, 64),
        "cross_attention_dim": 24,
        "num_attention_heads": (2, 4),
        "layers_per_block": 1,
        "num_frames": 3,
        "addition_time_embed_dim": 8,
        "projection_class_embeddings_input_dim": 24,
        "down_block_types": ("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
        "up_block_types": ("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"),
    },
    forward={
        "sample": (1, 3, 8, 8, 8),
        "timestep": TIME,
        "encoder_hidden_states": (1, 1, 24),
        "added_time_ids": (1, 3),
    },
)
calls(
    "UNetMotionModel",
    {
        "block_out_channels": (16, 32),
        "norm_num_groups": 4,
        "layers_per_block": 1,
        "cross_attention_dim": 24,
        "num_attention_heads": 2,
        "motion_num_attention_heads": 2,
        "down_block_types": ("CrossAttnDownBlockMotion", "DownBlockMotion"),
        "up_block_types": ("UpBlockMotion", "CrossAttnUpBlockMotion"),
    },
    forward={"sample": (1, 4, 3, 8, 8), "timestep": TIME, "encoder_hidden_states": (3, 7, 24)},
)
calls(
    "Kandinsky3UNet",
    {
        "time_embedding_dim": 16,
        "groups": 4,
        "attention_head_dim": 8,
        "layers_per_block": 2,
        "block_out_channels": (16, 16, 32, 32),
        "cross_attention_dim": 24,
        "encoder_hid_dim": 24,
    },
    forward={
        "sample": (1, 4, 8, 8),
        "timestep": TIME,
        "encoder_hidden_states": (1, 7, 24),
        "encoder_attention_mask": torch.ones(1, 7),
    },
)
ONE = {
    "down_block_types": ("DownResnetBlock1D",) * 2,
    "up_block_types": ("UpResnetBlock1D",),
    "mid_block_type": "MidResTemporalBlock1D",
    "out_block_type": "OutConv1DBlock",
    "act_fn": "mish",
    "time_embedding_type": "positional",
    "use_timestep_embedding": True,
    "flip_sin_to_cos": False,
    "freq_shift": 1,
}
calls(
    "UNet1DModel",
    {"in_channels": 6, "out_channels": 6, "block_out_channels": (8, 16), **ONE},
    "of diffusion over plans",
    forward={"sample": (2, 6, 14), "timestep": TIME},
)
calls(
    "UNet1DModel",
    {"block_out_channels": (32, 32, 32), "extra_in_channels": 64},
    "of sounds",
    forward={"sample": (2, 2, 32), "timestep": TIME},
)
CONTROL = {
    **UNET,
    "down_block_types": BLOCKS["down_block_types"],
    "conditioning_embedding_out_channels": (8, 16),
}
calls("ControlNetModel", CONTROL, forward={**TEXT, "controlnet_cond": (2, 3, 16, 16)})
calls(
    "UNetControlNetXSModel",
    {
        "block_out_channels": (16, 32),
        "ctrl_block_out_channels": (8, 16),
        "norm_num_groups": 4,
        "ctrl_max_norm_num_groups": 4,
        "cross_attention_dim": 24,
        "num_attention_heads": 4,
        "ctrl_num_attention_heads": 4,
        "ctrl_conditioning_embedding_out_channels": (8, 16),
        **BLOCKS,
    },
    forward={**TEXT, "controlnet_cond": (2, 3, 16, 16)},
)
calls(
    "T2IAdapter",
    {"in_channels": 3, "channels": [8, 16], "num_res_blocks": 1, "downscale_factor": 4},
    forward={"x": (1, 3, 16, 16)},
)
calls(
    "StableCascadeUNet",
    {
        "in_channels": 4,
        "out_channels": 4,
        "timestep_ratio_embedding_dim": 8,
        "patch_size": 1,
        "conditioning_dim": 16,
        "block_out_channels": (16, 32),
        "num_attention_heads": (0, 4),
        "down_num_layers_per_block": (1, 1),
        "up_num_layers_per_block": (1, 1),
        "down_blocks_repeat_mappers": (1, 1),
        "up_blocks_repeat_mappers": (1, 1),
        "block_types_per_layer": (
            ("SDCascadeResBlock", "SDCascadeTimestepBlock"),
            ("SDCascadeResBlock", "SDCascadeTimestepBlock", "SDCascadeAttnBlock"),
        ),
        "clip_text_in_channels": 16,
        "clip_text_pooled_in_channels": 16,
        "clip_image_in_channels": 16,
        "clip_seq": 2,
        "dropout": (0.0, 0.0),
        "self_attn": True,
        "kernel_size": 3,
        "timestep_conditioning_type": ("sca", "crp"),
    },
    forward={
        "sample": (1, 4, 8, 8),
        "timestep_ratio": (1,),
        "clip_text_pooled": (1, 1, 16),
        "clip_text": (1, 5, 16),
        "clip_img": (1, 1, 16),
    },
)


# ---- transformers

FLUX = {
    "num_layers": 1,
    "num_single_layers": 1,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 24,
}
calls(
    "FluxTransformer2DModel",
    {**FLUX, "in_channels": 4, "pooled_projection_dim": 24, "axes_dims_rope": (4, 4, 8)},
    forward={
        "hidden_states": (2, 16, 4),
        "encoder_hidden_states": (2, 7, 24),
        "pooled_projections": (2, 24),
        "timestep": torch.tensor([1.0, 1.0]),
        "img_ids": torch.zeros(16, 3),
        "txt_ids": torch.zeros(7, 3),
    },
)
calls(
    "SD3Transformer2DModel",
    {
        "sample_size": 8,
        "patch_size": 1,
        "in_channels": 4,
        "out_channels": 4,
        "num_layers": 2,
        "attention_head_dim": 8,
        "num_attention_heads": 4,
        "caption_projection_dim": 32,
        "joint_attention_dim": 24,
        "pooled_projection_dim": 24,
        "qk_norm": "rms_norm",
        "dual_attention_layers": (0,),
    },
    forward={
        "hidden_states": (2, 4, 8, 8),
        "encoder_hidden_states": (2, 7, 24),
        "pooled_projections": (2, 24),
        "timestep": torch.tensor([1.0, 1.0]),
    },
)
calls(
    "QwenImageTransformer2DModel",
    {
        "in_channels": 16,
        "out_channels": 4,
        "num_layers": 2,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "joint_attention_dim": 24,
        "axes_dims_rope": (8, 4, 4),
    },
    forward={
        "hidden_states": (1, 16, 16),
        "encoder_hidden_states": (1, 7, 24),
        "encoder_hidden_states_mask": None,
        "timestep": torch.tensor([1.0]),
        "img_shapes": [[[1, 4, 4]]],
        **asked("QwenImageTransformer2DModel", txt_seq_lens=[7]),
    },
)
calls(
    "WanTransformer3DModel",
    {
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "num_layers": 2,
        "ffn_dim": 32,
        "text_dim": 24,
        "in_channels": 4,
        "out_channels": 4,
    },
    forward={
        "hidden_states": (1, 4, 2, 8, 8),
        "timestep": torch.tensor([5]),
        "encoder_hidden_states": (1, 7, 24),
    },
)
calls(
    "LTXVideoTransformer3DModel",
    {
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "cross_attention_dim": 32,
        "num_layers": 2,
        "caption_channels": 24,
        "in_channels": 8,
        "out_channels": 8,
    },
    forward={
        "hidden_states": (2, 8, 8),
        "encoder_hidden_states": (2, 7, 24),
        "timestep": torch.tensor([1.0, 2.0]),
        "encoder_attention_mask": torch.ones(2, 7).long(),
        "num_frames": 2,
        "height": 2,
        "width": 2,
        "rope_interpolation_scale": (8 / 25, 32, 32),
    },
)
calls(
    "ZImageTransformer2DModel",
    {
        "dim": 64,
        "n_layers": 2,
        "n_refiner_layers": 1,
        "n_heads": 2,
        "n_kv_heads": 2,
        "cap_feat_dim": 24,
        "axes_dims": [8, 12, 12],
        "axes_lens": [256, 64, 64],
    },
    forward={"x": [(16, 1, 8, 8)], "t": torch.tensor([0.5]), "cap_feats": [(16, 24)]},
)
calls(
    "PixArtTransformer2DModel",
    {
        "sample_size": 8,
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "cross_attention_dim": 32,
        "num_layers": 2,
        "caption_channels": 24,
        "use_additional_conditions": False,
    },
    forward={
        "hidden_states": (2, 4, 8, 8),
        "encoder_hidden_states": (2, 7, 24),
        "timestep": torch.tensor([5, 5]),
        "encoder_attention_mask": torch.ones(2, 7).long(),
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
    },
)
calls(
    "SanaTransformer2DModel",
    {
        "in_channels": 4,
        "out_channels": 4,
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "num_layers": 2,
        "num_cross_attention_heads": 2,
        "cross_attention_head_dim": 16,
        "cross_attention_dim": 32,
        "caption_channels": 24,
        "sample_size": 8,
    },
    forward={
        "hidden_states": (2, 4, 8, 8),
        "encoder_hidden_states": (2, 7, 24),
        "timestep": torch.tensor([5, 5]),
        "encoder_attention_mask": torch.ones(2, 7).long(),
    },
)
calls(
    "Flux2Transformer2DModel",
    {**FLUX, "in_channels": 8, "axes_dims_rope": (4, 4, 4, 4), "guidance_embeds": False},
    forward={
        "hidden_states": (1, 16, 8),
        "encoder_hidden_states": (1, 7, 24),
        "timestep": torch.tensor([1.0]),
        "img_ids": torch.arange(4.0).repeat(1, 16, 1),
        "txt_ids": torch.arange(4.0).repeat(1, 7, 1),
        "guidance": None,
    },
)
calls(
    "CogView4Transformer2DModel",
    {
        "in_channels": 4,
        "out_channels": 4,
        "num_layers": 2,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "text_embed_dim": 24,
        "time_embed_dim": 16,
        "condition_dim": 8,
    },
    forward={
        "hidden_states": (2, 4, 8, 8),
        "encoder_hidden_states": (2, 7, 24),
        "timestep": torch.tensor([1.0, 1.0]),
        "original_size": (2, 2),
        "target_size": (2, 2),
        "crop_coords": (2, 2),
    },
)
calls(
    "CogVideoXTransformer3DModel",
    {
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "in_channels": 4,
        "out_channels": 4,
        "time_embed_dim": 8,
        "text_embed_dim": 24,
        "num_layers": 2,
        "sample_width": 6,
        "sample_height": 4,
        "sample_frames": 9,
        "max_text_seq_length": 5,
        "use_rotary_positional_embeddings": True,
    },
    forward={
        "hidden_states": (2, 3, 4, 4, 6),
        "encoder_hidden_states": (2, 5, 24),
        "timestep": torch.tensor([7.0, 7.0]),
        "image_rotary_emb": ((18, 16), (18, 16)),
    },
)
calls(
    "Krea2Transformer2DModel",
    {
        "in_channels": 16,
        "num_layers": 2,
        "attention_head_dim": 16,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "timestep_embed_dim": 12,
        "text_hidden_dim": 20,
        "num_text_layers": 3,
        "text_num_attention_heads": 2,
        "text_num_key_value_heads": 2,
        "text_intermediate_size": 24,
        "axes_dims_rope": (8, 4, 4),
    },
    forward={
        "hidden_states": (2, 6, 16),
        "encoder_hidden_states": (2, 5, 3, 20),
        "timestep": torch.tensor([0.5, 0.5]),
        "position_ids": torch.cartesian_prod(*map(torch.arange, (1, 1, 11))).float(),
    },
)
calls(
    "CosmosTransformer3DModel",
    {
        "in_channels": 4,
        "out_channels": 4,
        "num_layers": 2,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "mlp_ratio": 2,
        "text_embed_dim": 24,
        "adaln_lora_dim": 4,
        "max_size": (4, 32, 32),
        "concat_padding_mask": False,
        "extra_pos_embed_type": None,
    },
    forward={
        "hidden_states": (1, 4, 2, 8, 8),
        "encoder_hidden_states": (1, 7, 24),
        "timestep": torch.tensor([1.0]),
        "fps": 30,
    },
)
calls(
    "ChromaTransformer2DModel",
    {
        **FLUX,
        "in_channels": 4,
        "axes_dims_rope": (4, 4, 8),
        "approximator_num_channels": 8,
        "approximator_hidden_dim": 32,
        "approximator_layers": 1,
    },
    forward={
        "hidden_states": (1, 16, 4),
        "encoder_hidden_states": (1, 7, 24),
        "timestep": torch.tensor([1.0]),
        "img_ids": torch.arange(3.0).repeat(16, 1),
        "txt_ids": torch.arange(3.0).repeat(7, 1),
        "attention_mask": torch.ones(1, 23),
    },
)
calls(
    "HunyuanVideoTransformer3DModel",
    {
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "num_layers": 1,
        "num_single_layers": 1,
        "num_refiner_layers": 1,
        "in_channels": 4,
        "out_channels": 4,
        "text_embed_dim": 24,
        "pooled_projection_dim": 24,
        "rope_axes_dim": (4, 4, 8),
    },
    forward={
        "hidden_states": (1, 4, 2, 4, 4),
        "timestep": torch.tensor([5]),
        "encoder_hidden_states": (1, 7, 24),
        "encoder_attention_mask": torch.ones(1, 7).bool(),
        "pooled_projections": (1, 24),
        "guidance": torch.tensor([1.0]),
    },
)
calls(
    "Lumina2Transformer2DModel",
    {
        "hidden_size": 32,
        "num_layers": 2,
        "num_refiner_layers": 1,
        "num_attention_heads": 2,
        "num_kv_heads": 1,
        "multiple_of": 16,
        "cap_feat_dim": 24,
        "axes_dim_rope": (4, 4, 8),
        "axes_lens": (32, 32, 32),
    },
    forward={
        "hidden_states": (1, 16, 8, 8),
        "timestep": torch.tensor([0.5]),
        "encoder_hidden_states": (1, 7, 24),
        "encoder_attention_mask": torch.ones(1, 7).long(),
        "why_not": "the call uses Tensor.tolist",
    },
)
