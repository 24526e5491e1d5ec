"""What commands have to know before they load a model: its device, its dtype, whether it draws from text.

A check raises OptionError. Those that need no torch are in ``checks``.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch

from sdfastgn.cli.checks import one_of
from sdfastgn.models.configurations import DTYPES
from sdfastgn.models.saved import native_size, unet_config
from sdfastgn.program import OptionError


def device_name(option: str, value: str | None) -> str:
    """``value`` as PyTorch knows it; without one, ``cuda`` where there is a GPU, else ``cpu``."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if value is None:
        return "cuda" if count else "cpu"
    allowed = ["cpu", *(["cuda", *(f"cuda:{index}" for index in range(count))] if count else [])]
    if value not in allowed:
        why = "" if count else " (torch sees no CUDA GPU)"
        raise OptionError(f"{option}: cannot use {value!r}; choose from {', '.join(allowed)}{why}")
    return value


def dtype_name(option: str, value: str | None, device: str) -> str:
    """``value``, one of ``DTYPES``; without one, fp16 on a GPU and fp32 on the CPU."""
    return one_of(option, ("fp32" if device == "cpu" else "fp16") if value is None else value, DTYPES)


def text_to_image(option: str, weights: str) -> tuple[int, int]:
    """The native size of a pipeline of text to image and the pixels of a latent, before it is loaded."""
    config = unet_config(option, weights)
    if reason := pipeline_reason(weights, config):
        raise OptionError(f"{option}: must be {reason}")
    return native_size(weights, config, without_vae=8)


def pipeline_reason(weights: str, config: Mapping[str, Any]) -> str:
    """What a pipeline would need that is not so; empty where it makes images of text."""
    if (channels := config.get("in_channels", 4)) != config.get("out_channels", 4):
        return f"a UNet of text to image, that of {weights!r} takes {channels} channels"
    import diffusers

    try:
        kind = dict(diffusers.DiffusionPipeline.load_config(weights))["_class_name"]
        arguments = inspect.signature(getattr(diffusers, kind).__call__).parameters
    except Exception:  # what is no pipeline says why when it is loaded
        return ""
    inputs = ("image", "mask_image", "control_image", "image_embeds", "video")
    needs = [name for name in inputs if name in arguments]
    if "prompt" not in arguments:
        return f"a pipeline that takes a prompt, {kind} of {weights!r} does not"
    return f"a pipeline of text to image, {kind} of {weights!r} takes {needs[0]!r}" if needs else ""
