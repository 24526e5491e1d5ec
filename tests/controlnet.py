"""A ControlNet for the UNet of a small model."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import ControlNetModel
from torch import nn

from sdfastgn.models.architectures import build_unet, randomize


def build_controlnet(model: str, dtype: torch.dtype, device: torch.device | str) -> Any:
    """In eval mode, with random weights where ``device`` has memory."""
    unet = build_unet(model, dtype, device)
    with torch.device("meta"):
        controlnet = ControlNetModel.from_unet(
            unet, conditioning_embedding_out_channels=(8, 8, 16, 16), load_weights_from_unet=False
        )
    nn.Module.to(controlnet, dtype)
    if torch.device(device).type == "meta":
        return controlnet.eval()
    return randomize(controlnet.to_empty(device=device), 0).eval()
