"""Configurations of UNets as they are published: tuples are lists, and there are keys that do not matter."""

from __future__ import annotations

import json

from sdfastgn.models.configurations import UNETS

SD15 = {**json.loads(json.dumps(UNETS["sd15"])), "in_channels": 4, "norm_num_groups": 32}
SDXL = {**json.loads(json.dumps(UNETS["sdxl"])), "in_channels": 4, "num_attention_heads": None}
SD21 = {
    **SD15,
    "cross_attention_dim": 1024,
    "attention_head_dim": [5, 10, 20, 20],
    "use_linear_projection": True,
}
