"""Factors of diffusers' ``AlphaBlender``, which mixes the results of spatial and of temporal layers.

The blocks of Stable Video Diffusion compute ``alpha * spatial + (1 - alpha) * temporal``, where alpha may
differ from frame to frame. The fusions of these blocks compute the mix in one pass (``blend`` of
``layers/statistics.py``).
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models.resnet import AlphaBlender
from torch import Tensor

from sdfastgn.patches.swap.fusion import is_unhooked
from sdfastgn.patches.swap.tested_sources import tested

SOURCE = tested(AlphaBlender, "__init__", "get_alpha", "forward")


def is_plain_blender(mixer: Any) -> bool:
    """True if calling ``mixer`` only runs diffusers' methods: it has no hooks or replaced methods."""
    is_own = not {"get_alpha", "forward"} & vars(mixer).keys()
    return type(mixer) is AlphaBlender and is_own and is_unhooked(mixer)


def factors_of(mixer: Any, image_only_indicator: Tensor | None, x: Tensor) -> Tensor:
    """Computes the factors of each frame's spatial and temporal result in the mix: (2, N) fp32, contiguous.

    The factors are rounded to the dtype of x, as in diffusers.

    Args:
        mixer: an ``AlphaBlender``.
        image_only_indicator: (videos, frames); None if the mixer's merge strategy needs none.
        x: (N, ...), one of the tensors to mix, where N is the number of frames of all videos.
    """
    alpha = mixer.get_alpha(image_only_indicator, 3).to(x.dtype).flatten()
    if mixer.switch_spatial_to_temporal_mix:
        alpha = 1.0 - alpha
    return torch.stack((alpha, 1.0 - alpha)).float().expand(2, len(x)).contiguous()
