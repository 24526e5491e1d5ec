"""A ControlNet for the UNet of a small model."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import ControlNetModel

from sdfastgn.bench.models.architectures import build_unet, randomise


def build_controlnet(model: str, dtype: torch.dtype, device: torch.device | str) -> Any:
    """In eval mode, with random weights."""
    unet = build_unet(model, dtype, device)
    controlnet = ControlNetModel.from_unet(unet, conditioning_embedding_out_channels=(8, 8, 16, 16))
    return randomise(controlnet.to(device, dtype), 0).eval()
