"""``--weights`` beside ``--model``: a label that is not the weights' own is refused before anything is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from sfastgn.bench import options
from sfastgn.bench.architectures import MODELS, UNETS, build_unet, unet_difference
from sfastgn.bench.options import OptionError

# As published, the keys that matter: SD1.5's own, written before some of diffusers' arguments, and relatives.
SD15 = {
    "attention_head_dim": 8,
    "block_out_channels": [320, 640, 1280, 1280],
    "cross_attention_dim": 768,
    "down_block_types": ["CrossAttnDownBlock2D"] * 3 + ["DownBlock2D"],
    "in_channels": 4,
    "layers_per_block": 2,
    "norm_num_groups": 32,
    "sample_size": 64,
    "up_block_types": ["UpBlock2D"] + ["CrossAttnUpBlock2D"] * 3,
}
SDXL = {
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256,
    "attention_head_dim": [5, 10, 20],
    "block_out_channels": [320, 640, 1280],
    "cross_attention_dim": 2048,
    "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
    "in_channels": 4,
    "layers_per_block": 2,
    "norm_num_groups": 32,
    "num_attention_heads": None,
    "projection_class_embeddings_input_dim": 2816,
    "sample_size": 128,
    "transformer_layers_per_block": [1, 2, 10],
    "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
    "use_linear_projection": True,
}
SD21 = {**SD15, "cross_attention_dim": 1024, "attention_head_dim": [5, 10, 20, 20], "use_linear_projection": True}


def folder(place: Path, config: dict[str, Any]) -> str:
    """A pipeline's folder as far as its UNet's configuration."""
    (place / "unet").mkdir()
    (place / "unet" / "config.json").write_text(json.dumps(config))
    return str(place)


def model_of(weights: str, model: str | None, part: str = "unet") -> str:
    (config,) = options.bench_configs(model=model, parts=[part], weights=weights, device="cpu")
    return config.model


@pytest.mark.parametrize("model", MODELS)
def test_each_model_is_itself_only(model: str) -> None:
    config = build_unet(model, torch.float16, "meta").config  # with every default
    assert [known for known in MODELS if not unet_difference(config, known)] == [model]


@pytest.mark.parametrize("named", [True, False], ids=["named", "derived"])
@pytest.mark.parametrize(
    ("config", "model"),
    [
        pytest.param(SD15, "sd15", id="sd15"),
        pytest.param(
            {**SD15, "attention_head_dim": [8] * 4, "transformer_layers_per_block": [1] * 4}, "sd15", id="lists"
        ),
        pytest.param({**SD15, "in_channels": 9}, "sd15", id="sd15-inpainting"),
        pytest.param({**SD15, "time_cond_proj_dim": 256}, "sd15", id="sd15-distilled"),
        pytest.param(SDXL, "sdxl", id="sdxl"),
        pytest.param({**SDXL, "sample_size": 64}, "sdxl", id="sdxl-turbo"),
    ],
)
def test_relatives_pass(config: dict[str, Any], model: str, named: bool, tmp_path: Path) -> None:
    assert model_of(folder(tmp_path, config), model if named else None) == model


@pytest.mark.parametrize(
    ("config", "model", "words"),
    [
        pytest.param(SD15, "sdxl", ["(320, 640, 1280, 1280), not (320, 640, 1280)", "--model sd15 fits"], id="sd15"),
        pytest.param(SDXL, "sd15", ["--model sdxl fits"], id="sdxl"),
        pytest.param({**UNETS["tiny"]}, "sdxl", ["block_out_channels", "--model tiny fits"], id="tiny"),
        pytest.param(SD21, "sd15", ["cross_attention_dim (1024, 1024, 1024, 1024)"], id="sd21"),
        pytest.param(
            {**SDXL, "transformer_layers_per_block": [0, 2, 4]}, "sdxl", ["(0, 2, 4), not (1, 2, 10)"], id="pruned"
        ),
    ],
)
def test_a_wrong_name_is_refused(config: dict[str, Any], model: str, words: list[str], tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=rf"^--model: the UNet of '{tmp_path}' is not that of '{model}'") as caught:
        model_of(folder(tmp_path, config), model)
    assert all(word in str(caught.value) for word in words)


def test_weights_of_no_model_need_a_name_that_there_is_not(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=rf"^--weights: the UNet of '{tmp_path}' is that of no known model: tiny"):
        model_of(folder(tmp_path, SD21), None)


@pytest.mark.parametrize("part", ["pipeline", "train"])
def test_inpainting_is_no_text_to_image(part: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=rf"^--part: '{part}' needs .* takes 9 channels$"):
        model_of(folder(tmp_path, {**SD15, "in_channels": 9}), "sd15", part)


def test_a_folder_without_a_unet(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=rf"^--weights: no configuration of a UNet in '{tmp_path}': OSError: "):
        model_of(str(tmp_path), "sd15")


def test_without_weights_the_model_is_tiny() -> None:
    assert model_of("random", None) == "tiny"
