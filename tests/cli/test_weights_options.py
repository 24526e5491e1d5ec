"""``--weights`` beside ``--model``: which model a folder has, read from its configurations alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from sdfastgn.cli import bench_options
from sdfastgn.models.architectures import build_unet, unet_difference
from sdfastgn.models.configurations import MODELS
from tests.cli.cases import SD15, SD21, SDXL


def folder(place: Path, config: dict[str, Any]) -> str:
    """A pipeline's folder as far as its UNet's configuration."""
    (place / "unet").mkdir()
    (place / "unet" / "config.json").write_text(json.dumps(config))
    return str(place)


def model_of(weights: str, model: str | None, part: str = "unet") -> str:
    (config,) = bench_options.bench_configs(model=model, parts=[part], weights=weights, device="cpu")
    return config.model


@pytest.mark.drawn(2)
@pytest.mark.parametrize("model", MODELS)
def test_each_model_is_itself_only(model):
    config = build_unet(model, torch.float16, "meta").config  # with every default
    assert [known for known in MODELS if not unet_difference(config, known)] == [model]


RELATIVES = {
    "sd15": (SD15, "sd15"),
    "lists": ({**SD15, "attention_head_dim": [8] * 4, "transformer_layers_per_block": [1] * 4}, "sd15"),
    "inpainting": ({**SD15, "in_channels": 9}, "sd15"),
    "distilled": ({**SD15, "time_cond_proj_dim": 256}, "lcm"),
    "sdxl": (SDXL, "sdxl"),
    "turbo": ({**SDXL, "sample_size": 64}, "sdxl"),
}


def test_sd_turbo_is_sd2_until_it_is_named(tmp_path):
    weights = folder(tmp_path, dict(build_unet("sd_turbo", torch.float16, "meta").config))
    assert [model_of(weights, name) for name in (None, "sd_turbo")] == [tmp_path.name, "sd_turbo"]


@pytest.mark.parametrize(("config", "model"), RELATIVES.values(), ids=RELATIVES)
def test_relatives_pass(config, model, tmp_path):
    weights = folder(tmp_path, config)
    assert model_of(weights, model) == model_of(weights, None) == model


# (the UNet's configuration, levels of the VAE, (size, batch of a UNet step))
OTHERS = {
    "sd21": (SD21, 4, (512, 2)),
    "three-levels": ({**SD21, "sample_size": 96}, 3, (384, 2)),
    "distilled": ({**SD21, "time_cond_proj_dim": 256}, 4, (512, 1)),
    "pixels": ({"_class_name": "UNet2DModel", "sample_size": 32, "in_channels": 3}, 0, (32, 1)),
}


@pytest.mark.parametrize(("config", "levels", "expected"), OTHERS.values(), ids=OTHERS)
def test_weights_of_no_known_model_are_what_they_say(config, levels, expected, tmp_path):
    weights = folder(tmp_path, config)
    if levels:
        (tmp_path / "vae").mkdir()
        (tmp_path / "vae" / "config.json").write_text(json.dumps({"block_out_channels": [8] * levels}))
    (found,) = bench_options.bench_configs(model=None, parts=["unet"], weights=weights, device="cpu")
    assert (found.size, found.batch) == expected
    assert found.model == tmp_path.name


def test_without_weights_the_model_is_tiny():
    assert model_of("random", None) == "tiny"
