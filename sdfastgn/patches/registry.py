"""Every fusion there is, in the order in which they are applied (undone in reverse).

The patcher knows no model but through this.
"""

from __future__ import annotations

import importlib.util

from sdfastgn.patches.core.fusion import Fusion
from sdfastgn.patches.fusions import group_norm, sequential
from sdfastgn.patches.pipeline.object_fusion import ObjectFusion

__all__ = ["FUSIONS", "OBJECT_FUSIONS"]


FUSIONS: tuple[Fusion, ...] = (group_norm.FUSION, sequential.FUSION)
# Of a pipeline, for what is no module.
OBJECT_FUSIONS: tuple[ObjectFusion, ...] = ()

if importlib.util.find_spec("diffusers") is not None:
    from sdfastgn.patches.fusions import (
        ada_group_norm,
        attention,
        autoencoder_tiny,
        conv_norm_out,
        cross_attention,
        downsample,
        geglu,
        resnet_block,
        temporal_resnet_block,
        timestep_embedding,
        transformer_2d,
        transformer_block,
        up_block,
        upsample_2d,
    )
    from sdfastgn.patches.pipeline import image_processor, scheduler

    FUSIONS += (
        resnet_block.FUSION,
        temporal_resnet_block.FUSION,
        timestep_embedding.FUSION,
        transformer_2d.FUSION,
        transformer_block.FUSION,
        attention.FUSION,
        cross_attention.FUSION,
        up_block.FUSION,
        up_block.CROSS_ATTENTION,
        downsample.FUSION,
        upsample_2d.FUSION,
        ada_group_norm.FUSION,
        geglu.FUSION,
        conv_norm_out.FUSION,
        autoencoder_tiny.BLOCK,
        autoencoder_tiny.ENCODER,
        autoencoder_tiny.DECODER,
    )
    OBJECT_FUSIONS += (scheduler.FUSION, image_processor.FUSION)
