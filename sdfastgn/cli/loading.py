"""Checks before a model is loaded: the device, the dtype, and whether a pipeline makes images from text.

Checks raise OptionError. The checks that need no torch are in ``checks.py``.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from sdfastgn.cli.checks import dtype_word
from sdfastgn.models.configurations import ARGUMENTS
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

    Returns (the model's own image size in pixels, number of pixels along a side that one position of the
    latent covers). Raises OptionError if ``weights`` are no text-to-image pipeline.
    """
    config = unet_config(option, weights)
    if reason := pipeline_reason(weights, config):
        raise OptionError(f"{option}: must be {reason}")
    return native_size(weights, config, without_vae=8)


class SavedPipeline(NamedTuple):
    """What a pipeline's index says, without loading the pipeline.

    Attributes:
        kind, scheduler: names of the pipeline's and of the scheduler's class in diffusers.
        arguments: the arguments of a call of the pipeline.
        origin: the Hub id or path from which the pipeline was loaded before it was saved; or empty.
        transformer: name of the class of its transformer; empty if it has none.
    """

    kind: str
    scheduler: str
    arguments: Mapping[str, inspect.Parameter]
    origin: str
    transformer: str = ""


def saved_pipeline(weights: str) -> SavedPipeline | None:
    """Reads the index of the saved pipeline ``weights``. Returns None if it is no pipeline of diffusers.

    A later attempt to load the pipeline then raises an error, which says what is wrong.
    """
    import diffusers

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # newer Hub clients warn of an argument that diffusers passes
            index = dict(diffusers.DiffusionPipeline.load_config(weights))
        kind, scheduler = index["_class_name"], index.get("scheduler") or ("", "")
        arguments = inspect.signature(getattr(diffusers, kind).__call__).parameters
        origin, transformer = index.get("_name_or_path", ""), index.get("transformer") or ("", "")
        return SavedPipeline(kind, str(scheduler[1]), arguments, str(origin), str(transformer[1] or ""))
    except Exception:  # diffusers and the Hub's client raise errors of many classes
        return None


def own_settings(option: str, weights: str, names: Collection[str] = tuple(ARGUMENTS)) -> dict[str, Any]:
    """The settings ``names`` (steps, guidance) with which a saved pipeline draws if its call is given none.

    They are the defaults of the pipeline's class. These defaults are wrong for a model that was distilled to
    few steps but has the class of the model that it comes from. A saved scheduler of LCM or TCD is a sign of
    such a model, which then gets 4 steps. If only the model's name is a sign ("turbo", "lightning"), a
    warning names the settings. ``option``: the option that named the pipeline, for the warning.
    """
    if (saved := saved_pipeline(weights)) is None:
        return {}
    own = {
        field: saved.arguments[name].default for field, name in ARGUMENTS.items() if name in saved.arguments
    }
    is_few = saved.scheduler in ("LCMScheduler", "TCDScheduler")
    if is_few:
        own["steps"] = 4
        if not unet_config(option, weights).get("time_cond_proj_dim"):
            own["guidance"] = 1.0  # off: such a model needs none, unless its UNet takes the scale as an input
    own = {field: value for field, value in own.items() if field in names}
    name = f"{Path(weights).name} {saved.origin}".lower()
    if not is_few and ("turbo" in name or "lightning" in name):
        told = ", ".join(f"{field} {value}" for field, value in own.items())
        made = "may be made for few steps, but is drawn with"
        warnings.warn(f"{option}: {weights!r} {made} {told}", stacklevel=2)
    return own


def pipeline_reason(weights: str, config: Mapping[str, Any]) -> str:
    """Why ``weights`` are no text-to-image pipeline, as the end of a sentence that begins with "must be".

    Empty if they are a text-to-image pipeline, or if loading them will raise a better error. ``config``: the
    UNet's configuration.
    """
    if (channels := config.get("in_channels", 4)) != config.get("out_channels", 4):
        return f"a text-to-image UNet, but the one of {weights!r} takes {channels} channels"
    if (saved := saved_pipeline(weights)) is None:
        return ""
    kind, arguments = saved.kind, saved.arguments
    inputs = ("image", "mask_image", "control_image", "image_embeds", "video")
    needs = [name for name in inputs if name in arguments]
    if "prompt" not in arguments:
        return f"a pipeline that takes a prompt, but the {kind} of {weights!r} takes none"
    return f"a text-to-image pipeline, but the {kind} of {weights!r} takes {needs[0]!r}" if needs else ""
