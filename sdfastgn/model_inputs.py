"""Makes random inputs for a call of a diffusers model, from the model's configuration."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

# Names of the classes of models whose inputs ``unet_inputs`` makes for ``small_call``.
_UNETS = ("UNet2DConditionModel", "UNet2DModel", "ControlNetModel")
# For each class of an autoencoder, the number of frames of the video with which ``small_call`` calls it; 0
# for an autoencoder of images. In the latents of a video, the first latent frame stands for the video's first
# frame, and each further latent frame stands for four or eight frames. So these videos have two latent
# frames.
_VIDEO_AUTOENCODERS = {
    "AutoencoderKLWan": 5,
    "AutoencoderKLQwenImage": 5,
    "AutoencoderKLHunyuanVideo": 5,
    "AutoencoderKLHunyuanVideo15": 5,
    "AutoencoderKLHunyuanImageRefiner": 5,
    "AutoencoderKLHunyuanImage": 0,
    "AutoencoderKLCogVideoX": 5,
    "AutoencoderKLCosmos": 9,
    "AutoencoderKLLTXVideo": 9,
    "AutoencoderKLLTX2Video": 9,
    "AutoencoderKLMagvit": 5,
}
# A ControlNet's image has 8 times as many pixels along a side as the latents.
_CONTROL_SCALE = 8
# Height and width of the latent when ``small_call`` calls ``AutoencoderKL`` or ``AutoencoderTiny``.
_LATENTS = 8
# Height and width of the latent when ``small_call`` calls any other autoencoder.
_VIDEO_LATENTS = 2
# Number of latent frames when ``small_call`` calls Allegro's autoencoder.
_ALLEGRO_FRAMES = 2


def unet_inputs(
    config: Mapping[str, Any],
    *,
    size: int,
    batch: int,
    dtype: torch.dtype,
    device: torch.device | str,
    seed: int,
    scale: int = 8,
) -> dict[str, Any]:
    """Returns random keyword arguments for one step of a UNet.

    They include embeddings of text, size, guidance and class, if the UNet's configuration needs them.
    Embeddings of images are never made.

    Args:
        config: the UNet's configuration.
        size: pixels along a side of the square image.
        batch: the batch size.
        dtype, device: dtype and device of the tensors.
        seed: the seed of the first tensor. Each further tensor has a fixed larger seed.
        scale: number of pixels along a side that one position of the latent covers.
    """
    draw = functools.partial(randn, batch, dtype=dtype, device=device)
    inputs: dict[str, Any] = {
        "sample": draw(config.get("in_channels", 4), size // scale, size // scale, seed=seed),
        "timestep": torch.tensor(500, device=device),
    }
    if config.get("_class_name") != "UNet2DModel":
        width = config.get("encoder_hid_dim") or config["cross_attention_dim"]
        width = width if isinstance(width, int) else width[0]
        inputs["encoder_hidden_states"] = draw(77, width, seed=seed + 1)
    if config.get("addition_embed_type") == "text_time":
        pooled = config["projection_class_embeddings_input_dim"] - 6 * config["addition_time_embed_dim"]
        time_ids = torch.tensor([size, size, 0, 0, size, size], dtype=dtype, device=device).repeat(batch, 1)
        inputs["added_cond_kwargs"] = {"text_embeds": draw(pooled, seed=seed + 2), "time_ids": time_ids}
    if config.get("time_cond_proj_dim"):
        inputs["timestep_cond"] = draw(config["time_cond_proj_dim"], seed=seed + 4)
    kind = config.get("class_embed_type")
    if kind in ("projection", "simple_projection"):
        inputs["class_labels"] = draw(config["projection_class_embeddings_input_dim"], seed=seed + 5)
    elif kind == "timestep" or config.get("num_class_embeds"):
        inputs["class_labels"] = torch.zeros(batch, dtype=torch.long, device=device)
    return inputs


def small_call(model: nn.Module, dtype: torch.dtype, device: torch.device) -> Callable[[], object] | None:
    """Returns a function without arguments that calls ``model`` with small random inputs.

    Returns None if the class of the model is unknown.
    """
    kind, config = type(model).__name__, dict(getattr(model, "config", {}))
    draw = functools.partial(randn, dtype=dtype, device=device)
    if kind == "AutoencoderKL":
        side = _LATENTS * 2 ** (len(config["block_out_channels"]) - 1)
        image = draw(1, config["in_channels"], side, side, seed=0)
        return functools.partial(model, sample=image, sample_posterior=False)
    if kind in _VIDEO_AUTOENCODERS:
        video_model: Any = model
        # CogVideoX's autoencoder has no ``spatial_compression_ratio``. Each of its levels except the last
        # halves height and width.
        ratio = getattr(video_model, "spatial_compression_ratio", None)
        side = _VIDEO_LATENTS * (ratio or 2 ** (len(config["block_out_channels"]) - 1))
        frames = _VIDEO_AUTOENCODERS[kind]
        sample = draw(1, 3, *([frames] if frames else []), side, side, seed=0)
        if config.get("timestep_conditioning"):
            return functools.partial(model, sample, torch.full((1,), 0.05, dtype=dtype, device=device))
        return functools.partial(model, sample)
    if kind == "AutoencoderKLAllegro":
        return functools.partial(_call_halves, model, config, draw)
    if kind == "AutoencoderTiny":
        return functools.partial(_encode_and_decode, model, config, draw)
    if kind not in _UNETS:
        return None
    config["_class_name"] = kind
    side = 2 ** len(config["block_out_channels"])
    inputs = unet_inputs(config, size=side, batch=2, dtype=dtype, device=device, seed=0, scale=1)
    if kind == "ControlNetModel":
        pixels, channels = _CONTROL_SCALE * side, config["conditioning_channels"]
        inputs["controlnet_cond"] = draw(2, channels, pixels, pixels, seed=9)
    return functools.partial(model, **inputs)


def _encode_and_decode(model: Any, config: dict[str, Any], draw: Callable[..., Tensor]) -> None:
    # AutoencoderTiny's ``forward`` would pass fp32 to the decoder, even if the weights are in half precision.
    # So its ``encode`` and ``decode`` are called instead.
    side = _LATENTS * 2 ** (len(config["encoder_block_out_channels"]) - 1)
    model.encode(draw(1, config["in_channels"], side, side, seed=0))
    model.decode(draw(1, config["latent_channels"], _LATENTS, _LATENTS, seed=1))


def _call_halves(model: Any, config: dict[str, Any], draw: Callable[..., Tensor]) -> None:
    # The methods ``encode`` and ``decode`` of Allegro's autoencoder work only on large videos, in tiles. So
    # the modules ``encoder`` and ``decoder`` are called directly.
    frames = _ALLEGRO_FRAMES * config["temporal_compression_ratio"]
    side = _VIDEO_LATENTS * model.spatial_compression_ratio
    model.encoder(draw(1, config["in_channels"], frames, side, side, seed=0))
    latents = _ALLEGRO_FRAMES, _VIDEO_LATENTS, _VIDEO_LATENTS
    model.decoder(draw(1, config["latent_channels"], *latents, seed=1))


def randn(*shape: int, dtype: torch.dtype, device: torch.device | str, seed: int) -> Tensor:
    """Returns normal random numbers. They are drawn on the CPU, to be the same on all devices."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").to(device, dtype)
