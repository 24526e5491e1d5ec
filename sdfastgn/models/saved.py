"""Reads the configuration files of a saved pipeline. diffusers is imported only for pipelines on the Hub."""

from __future__ import annotations

import json
import socket
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sdfastgn.models.configurations import UNETS
from sdfastgn.program import OptionError

_CONFIG = "config.json"


def load_config(weights: str, component: str) -> dict[str, Any]:
    """Reads the saved configuration of a pipeline's component, such as ``"unet"``.

    ``weights``: the pipeline's folder or Hub id. Raises OSError if the folder has no such file, and
    ValueError if the file is no JSON. For a Hub id any error of the Hub's client may be raised.
    """
    if Path(weights).is_dir():
        return dict(json.loads((Path(weights) / component / _CONFIG).read_text(encoding="utf-8")))
    # ``UNet2DConditionModel`` reads the configurations of all components, because its ``load_config`` works
    # for each of them.
    from diffusers import UNet2DConditionModel

    with warnings.catch_warnings():
        # Newer clients of the Hub warn of an argument that diffusers passes. The user cannot change this.
        warnings.simplefilter("ignore")
        return dict(UNet2DConditionModel.load_config(weights, subfolder=component))


def unet_config(option: str, weights: str) -> dict[str, Any]:
    """Reads the UNet's configuration of the saved pipeline ``weights``, a folder or Hub id.

    ``option``: the command-line option that named the pipeline, for errors.

    Raises OptionError if the pipeline has no configuration of a UNet, or the Hub cannot be reached.
    """
    lacks = f"{option}: no configuration of a UNet in {weights!r}"
    if Path(weights).is_dir() and not (Path(weights) / "unet" / _CONFIG).exists():
        raise OptionError(f"{lacks}: there is no unet/{_CONFIG}")
    try:
        return load_config(weights, "unet")
    except Exception as error:  # the Hub's client raises errors of many classes
        check_hub(option, weights, error)
        # This import is not at the top of the file, because it imports torch, which takes seconds.
        from sdfastgn.kernels.common.failures import one_line

        raise OptionError(f"{lacks}: {one_line(error)}") from None


def check_hub(option: str, weights: str, error: BaseException) -> None:
    """Raise OptionError if ``error`` was raised because the Hub cannot be reached.

    In this case diffusers' own message says only that ``weights``, the pipeline's Hub id, lacks a file.

    ``option``: the command-line option that named the pipeline, for the message.
    """
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, ConnectionError | TimeoutError | socket.gaierror):
        cause = cause.__cause__ or cause.__context__
    if cause is not None:
        is_offline = type(cause).__name__ == "OfflineModeIsEnabled"
        why = "HF_HUB_OFFLINE is set" if is_offline else str(cause).strip() or type(cause).__name__
        lacks = f"{weights!r} is not fully in the local cache, and the Hub cannot be reached"
        raise OptionError(f"{option}: {lacks} ({why.splitlines()[0]})") from None


def latent_scale(vae: Mapping[str, Any] | None) -> int:
    """Number of pixels along a side that one position of the latent covers; 1 if ``vae`` is None.

    ``vae``: the VAE's configuration.
    """
    return 1 if vae is None else 2 ** (len(vae["block_out_channels"]) - 1)


def native_size(weights: str, unet: Mapping[str, Any], without_vae: int) -> tuple[int, int]:
    """Returns (native image size, scale of the latents) of a saved pipeline.

    The native image size is the number of pixels along a side of the images for which the pipeline was made.
    The scale is the number of pixels along a side that one position of the latent covers.

    Args:
        weights: the pipeline's folder or Hub id.
        unet: the UNet's configuration.
        without_vae: the scale to use if the pipeline has no configuration of a VAE.
    """
    try:
        scale = latent_scale(load_config(weights, "vae"))
    except Exception:  # there is no VAE, or the Hub is out of reach, which loading reports later
        scale = without_vae
    latents = unet.get("sample_size") or UNETS["sd15"]["sample_size"]
    return (latents if isinstance(latents, int) else max(latents)) * scale, scale
