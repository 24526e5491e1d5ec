"""Makes random inputs for the networks of ``configurations.VIDEO_NETWORKS``, and calls these networks."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sdfastgn.model_inputs import randn

# ``PIXELS``: a position of the latent covers 8 x 8 pixels, unless the model's settings say otherwise.
# ``FRAMES``: in autoencoders that compress time, each latent frame covers four frames of the video, except
# for the first one, which covers one.
PIXELS, FRAMES = 8, 4
# Names of the classes of autoencoders whose latents have no axis for frames.
_OF_IMAGES = ("AutoencoderDC", "AutoencoderKLKVAE")
# Number of tokens to which CLIP's text encoder pads or cuts a text.
_TOKENS = 77

# The type of a function ``draw(*shape)``. It returns a random tensor of this shape in the model's dtype, on
# the model's device.
Draw = Callable[..., Tensor]


def inputs(model: Any, draw: Draw, *, batch: int, frames: int, height: int, width: int) -> dict[str, Any]:
    """Returns random inputs of ``model`` for ``batch`` videos, with the shapes that the pipeline passes.

    Args:
        model: an instance of one of the classes in ``VIDEO_NETWORKS``.
        draw: a function that returns a random tensor of a given shape.
        batch: number of videos. For a UNet step with guidance, each video counts twice.
        frames: number of frames of a video.
        height, width: size of a frame in pixels.
    """
    kind, config = type(model).__name__, model.config
    if kind in _TRANSFORMERS:
        return _TRANSFORMERS[kind](model, draw, batch, frames, height, width)
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


def random_inputs(
    model: Any,
    *,
    batch: int,
    frames: int,
    height: int,
    width: int,
    dtype: torch.dtype,
    device: torch.device | str,
    seed: int,
) -> dict[str, Any]:
    """Returns random inputs of ``model``, which are the same for every device.

    Inputs in different dtypes are equal except for rounding. ``seed``: the seed of the first tensor; each
    further tensor has the next larger seed.
    """
    seeds = itertools.count(seed)

    def draw(*shape: int) -> Tensor:
        return randn(*shape, dtype=dtype, device=device, seed=next(seeds))

    return inputs(model, draw, batch=batch, frames=frames, height=height, width=width)


def _flux(
    model: Any, draw: Draw, batch: int, frames: int, height: int, width: int, *, axes: int, is_pooled: bool
) -> dict[str, Any]:
    """Random inputs of the transformers of Flux and Flux 2, in which a token covers 16 x 16 pixels.

    ``axes``: the count of numbers by which the model describes the position of a token. ``is_pooled``: True
    if the model also gets a pooled embedding of the text, as Flux does.
    """
    tokens, config = (height // 16) * (width // 16), model.config
    of_batch = () if is_pooled else (batch,)
    found = {
        "hidden_states": draw(batch, tokens, config.in_channels),
        "encoder_hidden_states": draw(batch, 512, config.joint_attention_dim),
        "timestep": draw(batch),
        "img_ids": draw(*of_batch, tokens, axes),
        "txt_ids": draw(*of_batch, 512, axes),
    }
    if is_pooled:
        found["pooled_projections"] = draw(batch, config.pooled_projection_dim)
    return found | ({"guidance": draw(batch)} if config.guidance_embeds else {})


def _sd3(model: Any, draw: Draw, batch: int, frames: int, height: int, width: int) -> dict[str, Any]:
    config = model.config
    return {
        "hidden_states": draw(batch, config.in_channels, height // PIXELS, width // PIXELS),
        "encoder_hidden_states": draw(batch, 333, config.joint_attention_dim),
        "pooled_projections": draw(batch, config.pooled_projection_dim),
        "timestep": draw(batch),
    }


def _z_image(model: Any, draw: Draw, batch: int, frames: int, height: int, width: int) -> dict[str, Any]:
    size = model.config.in_channels, frames, height // PIXELS, width // PIXELS
    texts = [draw(96, model.config.cap_feat_dim) for _ in range(batch)]
    return {"x": [draw(*size) for _ in range(batch)], "t": draw(batch), "cap_feats": texts}


def _qwen_image(model: Any, draw: Draw, batch: int, frames: int, height: int, width: int) -> dict[str, Any]:
    rows, columns = height // 16, width // 16
    return {
        "hidden_states": draw(batch, rows * columns, model.config.in_channels),
        "encoder_hidden_states": draw(batch, 128, model.config.joint_attention_dim),
        "encoder_hidden_states_mask": None,
        "timestep": draw(batch),
        "img_shapes": [[(frames, rows, columns)]] * batch,
    }


def _ltx(model: Any, draw: Draw, batch: int, frames: int, height: int, width: int) -> dict[str, Any]:
    """Random inputs of LTX-Video's transformer, in which a token covers 8 frames of 32 x 32 pixels.

    The video has 25 frames a second.
    """
    size = (frames - 1) // 8 + 1, height // 32, width // 32
    texts = draw(batch, 128, model.config.caption_channels)
    return {
        "hidden_states": draw(batch, size[0] * size[1] * size[2], model.config.in_channels),
        "encoder_hidden_states": texts,
        "timestep": draw(batch),
        "encoder_attention_mask": torch.ones(batch, 128, dtype=torch.long, device=texts.device),
        "num_frames": size[0],
        "height": size[1],
        "width": size[2],
        "rope_interpolation_scale": (8 / 25, 32, 32),
    }


def _wan(model: Any, draw: Draw, batch: int, frames: int, height: int, width: int) -> dict[str, Any]:
    size = (frames - 1) // FRAMES + 1, height // PIXELS, width // PIXELS
    sample = draw(batch, model.config.in_channels, *size)
    return {
        "hidden_states": sample,
        "timestep": torch.full((batch,), 500, device=sample.device),
        "encoder_hidden_states": draw(batch, 512, model.config.text_dim),
    }


def _cogvideox(model: Any, draw: Draw, batch: int, frames: int, height: int, width: int) -> dict[str, Any]:
    """Random inputs of CogVideoX's transformer, in which a token covers 4 frames of 16 x 16 pixels.

    The model gets the position of each token as cosines and sines, which are random here too.
    """
    config, size = model.config, ((frames - 1) // FRAMES + 1, height // PIXELS, width // PIXELS)
    tokens = size[0] * (size[1] // 2) * (size[2] // 2)
    sample = draw(batch, size[0], config.in_channels, *size[1:])
    return {
        "hidden_states": sample,
        "encoder_hidden_states": draw(batch, config.max_text_seq_length, config.text_embed_dim),
        "timestep": torch.full((batch,), 500, device=sample.device),
        "image_rotary_emb": tuple(draw(tokens, config.attention_head_dim).float() for _ in range(2)),
    }


# For each class of a transformer, the function that makes its random inputs. The function gets the model, a
# function that draws a random tensor, and batch, frames, height and width of the videos.
_TRANSFORMERS: dict[str, Callable[..., dict[str, Any]]] = {
    "FluxTransformer2DModel": functools.partial(_flux, axes=3, is_pooled=True),
    "Flux2Transformer2DModel": functools.partial(_flux, axes=4, is_pooled=False),
    "SD3Transformer2DModel": _sd3,
    "ZImageTransformer2DModel": _z_image,
    "QwenImageTransformer2DModel": _qwen_image,
    "LTXVideoTransformer3DModel": _ltx,
    "WanTransformer3DModel": _wan,
    "CogVideoXTransformer3DModel": _cogvideox,
}


def run(model: Any, inputs: dict[str, Any]) -> Any:
    """Runs one step of ``model``, or one decode if it is an autoencoder. Returns the output tensor."""
    call = model.decode if hasattr(model, "decode") else model
    result = call(**inputs, return_dict=False)[0]
    # Z-Image's transformer returns a list of images.
    return torch.stack(result) if isinstance(result, list) else result
