"""Checks before a model is loaded: the device, the dtype, and whether a pipeline makes images from text.

Checks raise OptionError. The checks that need no torch are in ``checks.py``.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch

from sdfastgn.cli.checks import dtype_word
from sdfastgn.models.saved import native_size, unet_config
from sdfastgn.program import OptionError


def device_name(option: str, value: str | None) -> str:
    """Return ``value`` if PyTorch sees this device. None means ``cuda`` if there is a GPU, else ``cpu``."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if value is None:
        return "cuda" if count else "cpu"
    allowed = ["cpu", *(["cuda", *(f"cuda:{index}" for index in range(count))] if count else [])]
    if value not in allowed:
        why = "" if count else " (torch sees no CUDA GPU)"
        raise OptionError(f"{option}: cannot use {value!r}; choose from {', '.join(allowed)}{why}")
    return value


def dtype_name(option: str, value: str | None, device: str, on_gpu: str = "fp16") -> str:
    """The name in ``DTYPES`` of the dtype ``value``. None means ``on_gpu`` on a GPU and fp32 on the CPU."""
    return dtype_word(option, ("fp32" if device == "cpu" else on_gpu) if value is None else value)


def text_to_image(option: str, weights: str) -> tuple[int, int]:
    """Check that ``weights`` are a text-to-image pipeline, without loading them.

    Returns (native image size, pixels along a side of one latent), as ``saved.native_size`` does. Raises
    OptionError if ``weights`` are no text-to-image pipeline.
    """
    config = unet_config(option, weights)
    if reason := pipeline_reason(weights, config):
        raise OptionError(f"{option}: must be {reason}")
    return native_size(weights, config, without_vae=8)


def pipeline_reason(weights: str, config: Mapping[str, Any]) -> str:
    """Why ``weights`` are no text-to-image pipeline, as the end of a sentence that begins with "must be".

    Empty if they are a text-to-image pipeline, or if loading them will raise a better error. ``config``: the
    UNet's configuration.
    """
    if (channels := config.get("in_channels", 4)) != config.get("out_channels", 4):
        return f"a text-to-image UNet, but the one of {weights!r} takes {channels} channels"
    import diffusers

    try:
        kind = dict(diffusers.DiffusionPipeline.load_config(weights))["_class_name"]
        arguments = inspect.signature(getattr(diffusers, kind).__call__).parameters
    except Exception:  # ``weights`` are no pipeline; the error of loading them will say why
        return ""
    inputs = ("image", "mask_image", "control_image", "image_embeds", "video")
    needs = [name for name in inputs if name in arguments]
    if "prompt" not in arguments:
        return f"a pipeline that takes a prompt, but the {kind} of {weights!r} takes none"
    return f"a text-to-image pipeline, but the {kind} of {weights!r} takes {needs[0]!r}" if needs else ""
