"""Random inputs for the networks of ``configurations.VIDEO_NETWORKS``, and a call of such a network."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# A latent covers 8 x 8 pixels, unless the model says otherwise. In the autoencoders that compress time, the
# first latent frame covers one frame of the video, and each further latent frame covers four.
PIXELS, FRAMES = 8, 4
# Autoencoders whose latents have no axis for frames.
_OF_IMAGES = ("AutoencoderDC", "AutoencoderKLKVAE")
# Number of tokens of CLIP's encoding of a text.
_TOKENS = 77

# Type of ``draw(*shape)``, which returns a random tensor of this shape in the model's dtype, on its device.
Draw = Callable[..., Tensor]


def inputs(model: Any, draw: Draw, *, batch: int, frames: int, height: int, width: int) -> dict[str, Any]:
    """Random ``inputs`` of :func:`run` for ``batch`` videos, with the shapes that the pipeline passes.

    Args:
        model: an instance of one of the classes in ``VIDEO_NETWORKS``.
        draw: makes the tensors.
        batch: number of videos. For a UNet step with guidance, each video counts twice.
        frames: number of frames of a video.
        height, width: size of a frame in pixels.
    """
    kind, config = type(model).__name__, model.config
    pixels = getattr(model, "spatial_compression_ratio", PIXELS)
    size = height // pixels, width // pixels
    if kind == "UNetSpatioTemporalConditionModel":
        sample = draw(batch, frames, config.in_channels, *size)
        return {
            "sample": sample,
            "timestep": torch.tensor(500, device=sample.device),
            "encoder_hidden_states": draw(batch, 1, config.cross_attention_dim),
            "added_time_ids": draw(batch, 3),
        }
    if kind == "UNetMotionModel":
        sample = draw(batch, config.in_channels, frames, *size)
        return {
            "sample": sample,
            "timestep": torch.tensor(500, device=sample.device),
            # As in the pipeline, each frame of a video has a copy of the text's embedding.
            "encoder_hidden_states": draw(batch * frames, _TOKENS, config.cross_attention_dim),
        }
    if kind == "AutoencoderKLTemporalDecoder":
        return {"z": draw(batch * frames, config.latent_channels, *size), "num_frames": frames}
    channels = next(config[key] for key in ("z_dim", "latent_channels", "z_channels") if key in config)
    if kind in _OF_IMAGES:
        return {"z": draw(batch, channels, *size)}
    return {"z": draw(batch, channels, (frames - 1) // FRAMES + 1, *size)}


def run(model: Any, inputs: dict[str, Any]) -> Any:
    """Runs one step if ``model`` is a UNet, one decode if it is an autoencoder. Returns the output tensor."""
    call = model.decode if hasattr(model, "decode") else model
    return call(**inputs, return_dict=False)[0]
