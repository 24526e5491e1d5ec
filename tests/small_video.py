"""The networks of ``VIDEO_NETWORKS`` at a size for tests: the same blocks with fewer channels and frames."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sdfastgn.models import configurations

_FEW_CHANNELS = {"block_out_channels": (8, 8, 16, 16), "norm_num_groups": 4, "layers_per_block": 1}
# (model, part) -> settings that make it small.
SETTINGS: dict[tuple[str, str], dict[str, Any]] = {
    ("wan", "vae"): {"base_dim": 8},
    ("qwen_image", "vae"): {"base_dim": 8},
    ("qwen_image_21", "vae"): {"base_dim": 8, "decoder_base_dim": 8, "num_res_blocks": 1, "z_dim": 64},
    ("dc_ae", "vae"): {
        "encoder_block_out_channels": (16, 16, 16, 32, 32, 32),
        "decoder_block_out_channels": (16, 16, 16, 32, 32, 32),
        "attention_head_dim": 8,
    },
    ("kvae", "vae"): {"channels": 32, "num_enc_blocks": 1, "num_dec_blocks": 1},
    ("hunyuan_video", "vae"): _FEW_CHANNELS,
    ("cogvideox", "vae"): _FEW_CHANNELS,
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
