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
    """The saved configuration of a pipeline's component, such as ``"unet"``.

    ``weights``: the pipeline's folder or Hub id. Raises OSError or ValueError, and for a Hub id any error of
    the Hub's client.
    """
    if Path(weights).is_dir():
        return dict(json.loads((Path(weights) / component / _CONFIG).read_text(encoding="utf-8")))
    from diffusers import UNet2DConditionModel  # its ``load_config`` works for any component

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer Hub clients warn of an argument that diffusers passes
        return dict(UNet2DConditionModel.load_config(weights, subfolder=component))


def unet_config(option: str, weights: str) -> dict[str, Any]:
    """The UNet's configuration in the saved pipeline ``weights``.

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
        from sdfastgn.kernels.common.failures import one_line  # here, because it imports torch

        raise OptionError(f"{lacks}: {one_line(error)}") from None


def check_hub(option: str, weights: str, error: BaseException) -> None:
    """Raise OptionError if ``error`` was raised because the Hub cannot be reached.

    diffusers' own message then says only that ``weights`` lack a file.
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
    """Number of pixels along a side of one latent, from the VAE's configuration; 1 if ``vae`` is None."""
    return 1 if vae is None else 2 ** (len(vae["block_out_channels"]) - 1)


def native_size(weights: str, unet: Mapping[str, Any], without_vae: int) -> tuple[int, int]:
    """Returns (native image size, pixels along a side of one latent) of a saved pipeline.

    The native image size is the number of pixels along a side of the images for which the pipeline was made.

    Args:
        weights: the pipeline's folder or Hub id.
        unet: the UNet's configuration.
        without_vae: the pixels along a side of one latent, if the pipeline has no configuration of a VAE.
    """
    try:
        scale = latent_scale(load_config(weights, "vae"))
    except Exception:  # there is no VAE; or the network failed, which a later load reports
        scale = without_vae
    latents = unet.get("sample_size") or UNETS["sd15"]["sample_size"]
    return (latents if isinstance(latents, int) else max(latents)) * scale, scale
