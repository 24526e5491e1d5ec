"""Every fusion there is, in the order in which they are applied (undone in reverse). The patcher knows no model but through this."""

from __future__ import annotations

import importlib.util

from sfastgn.patches import group_norm, sequential
from sfastgn.patches.fusion import Fusion

__all__ = ["FUSIONS"]

FUSIONS: tuple[Fusion, ...] = (group_norm.FUSION, sequential.FUSION)

if importlib.util.find_spec("diffusers") is not None:
    from sfastgn.patches import (
        ada_group_norm,
        conv_norm_out,
        resnet_block,
        temporal_resnet_block,
        transformer_2d,
        transformer_block,
    )

    FUSIONS += (
        resnet_block.FUSION,
        temporal_resnet_block.FUSION,
        transformer_2d.FUSION,
        transformer_block.FUSION,
        ada_group_norm.FUSION,
        conv_norm_out.FUSION,
    )
