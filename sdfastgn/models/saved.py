"""What the configuration files of a saved pipeline say. Of a folder they are read without diffusers."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sdfastgn.models.configurations import UNETS
from sdfastgn.program import OptionError

_CONFIG = "config.json"


def load_config(weights: str, component: str) -> dict[str, Any]:
    """The configuration of a pipeline's component, as it was saved.

    Raises OSError or ValueError, and for a Hub id whatever its client raises.
    """
    if Path(weights).is_dir():
        return dict(json.loads((Path(weights) / component / _CONFIG).read_text(encoding="utf-8")))
    from diffusers import UNet2DConditionModel  # any class reads any other's

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # diffusers asks the Hub's client with an argument that is gone
        return dict(UNet2DConditionModel.load_config(weights, subfolder=component))


def unet_config(option: str, weights: str) -> dict[str, Any]:
    """The UNet's configuration. Raises OptionError where ``weights``, which ``option`` named, have none."""
    lacks = f"{option}: no configuration of a UNet in {weights!r}"
    if Path(weights).is_dir() and not (Path(weights) / "unet" / _CONFIG).exists():
        raise OptionError(f"{lacks}: there is no unet/{_CONFIG}")
    try:
        return load_config(weights, "unet")
    except Exception as error:  # whatever the client meets on the network, besides OSError
        from sdfastgn.kernels.common.failures import one_line  # imports torch

        raise OptionError(f"{lacks}: {one_line(error)}") from None


def latent_scale(vae: Mapping[str, Any] | None) -> int:
    """Pixels on a side of a latent; 1 without a VAE, where the UNet works on pixels."""
    return 1 if vae is None else 2 ** (len(vae["block_out_channels"]) - 1)


def native_size(weights: str, unet: Mapping[str, Any], without_vae: int) -> tuple[int, int]:
    """Pixels of the image that a pipeline was made for, and of a latent.

    ``without_vae`` is the latter where there is no configuration of a VAE.
    """
    try:
        scale = latent_scale(load_config(weights, "vae"))
    except Exception:  # there is none, or what the client met is told when the pipeline is loaded
        scale = without_vae
    latents = unet.get("sample_size") or UNETS["sd15"]["sample_size"]
    return (latents if isinstance(latents, int) else max(latents)) * scale, scale
