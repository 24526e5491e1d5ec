"""The networks of ``VIDEO_NETWORKS`` at a size for tests: the same blocks with fewer channels and frames."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sdfastgn.models import configurations

_FEW_CHANNELS = {"block_out_channels": (8, 8, 16, 16), "norm_num_groups": 4, "layers_per_block": 1}
# (model, part) -> settings that make it small.
_FEW_HEADS = {"num_layers": 1, "num_attention_heads": 2, "attention_head_dim": 16}
_FLUX = {**_FEW_HEADS, "num_single_layers": 1, "in_channels": 16, "joint_attention_dim": 32}
SETTINGS: dict[tuple[str, str], dict[str, Any]] = {
    ("flux", "transformer"): {**_FLUX, "pooled_projection_dim": 16, "axes_dims_rope": (4, 4, 8)},
    ("flux2_klein", "transformer"): {
        **_FLUX,
        "axes_dims_rope": (4, 4, 4, 4),
        "timestep_guidance_channels": 16,
    },
    ("sd35", "transformer"): {
        **_FEW_HEADS,
        "sample_size": 8,
        "in_channels": 4,
        "out_channels": 4,
        "caption_projection_dim": 32,
        "joint_attention_dim": 32,
        "pooled_projection_dim": 16,
        "pos_embed_max_size": 8,
        "dual_attention_layers": (0,),
    },
    ("zimage", "transformer"): {
        "in_channels": 4,
        "dim": 32,
        "n_layers": 1,
        "n_refiner_layers": 1,
        "n_heads": 2,
        "n_kv_heads": 2,
        "cap_feat_dim": 16,
        "axes_dims": [4, 4, 8],
        "axes_lens": [128, 32, 32],
    },
    ("ltx", "transformer"): {
        **_FEW_HEADS,
        "in_channels": 8,
        "out_channels": 8,
        "cross_attention_dim": 32,
        "caption_channels": 16,
    },
    ("wan", "vae"): {"base_dim": 8},
    ("wan", "transformer"): {
        **_FEW_HEADS,
        "in_channels": 4,
        "out_channels": 4,
        "text_dim": 16,
        "ffn_dim": 32,
        "freq_dim": 16,
    },
    ("qwen_image", "vae"): {"base_dim": 8},
    ("qwen_image", "transformer"): {
        **_FEW_HEADS,
        "in_channels": 16,
        "out_channels": 4,
        "joint_attention_dim": 16,
        "axes_dims_rope": (4, 4, 8),
    },
    ("qwen_image_21", "vae"): {"base_dim": 8, "decoder_base_dim": 8, "num_res_blocks": 1, "z_dim": 64},
    ("dc_ae", "vae"): {
        "encoder_block_out_channels": (16, 16, 16, 32, 32, 32),
        "decoder_block_out_channels": (16, 16, 16, 32, 32, 32),
        "attention_head_dim": 8,
    },
    ("kvae", "vae"): {"channels": 32, "num_enc_blocks": 1, "num_dec_blocks": 1},
    ("hunyuan_video", "vae"): _FEW_CHANNELS,
    ("cogvideox", "vae"): _FEW_CHANNELS,
    ("cogvideox", "transformer"): {
        **_FEW_HEADS,
        "in_channels": 4,
        "out_channels": 4,
        "time_embed_dim": 8,
        "text_embed_dim": 16,
        "max_text_seq_length": 5,
    },
    ("svd", "unet"): {
        "block_out_channels": (32, 32, 64, 64),
        "num_attention_heads": (2, 2, 4, 4),
        "layers_per_block": 1,
        "cross_attention_dim": 16,
        "addition_time_embed_dim": 8,
        "projection_class_embeddings_input_dim": 3 * 8,
    },
    ("svd", "vae"): {"block_out_channels": (32, 32, 64, 64)},
    ("animatediff", "unet"): {
        **_FEW_CHANNELS,
        "num_attention_heads": 2,
        "motion_num_attention_heads": 2,
        "cross_attention_dim": 16,
    },
}
FRAMES = 5


def shrink(patch: pytest.MonkeyPatch, height: int = 32, width: int = 48) -> None:
    """Make all networks small, with videos of at most ``FRAMES`` frames."""
    for (model, part), settings in SETTINGS.items():
        networks = configurations.VIDEO_NETWORKS[model]
        full = networks[part]
        small = {"frames": min(FRAMES, full.frames), "height": height, "width": width}
        patch.setitem(networks, part, replace(full, config={**full.config, **settings}, **small))
