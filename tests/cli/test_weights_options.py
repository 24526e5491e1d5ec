"""``--weights`` beside ``--model``: a wrong name is refused before anything is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from sdfastgn.cli import bench_options
from sdfastgn.models.architectures import build_unet, unet_difference
from sdfastgn.models.configurations import MODELS, UNETS
from sdfastgn.models.pipelines import load_pipeline
from sdfastgn.program import OptionError

# As published: tuples are lists, and there are keys of no matter here.
SD15 = {**json.loads(json.dumps(UNETS["sd15"])), "in_channels": 4, "norm_num_groups": 32}
SDXL = {**json.loads(json.dumps(UNETS["sdxl"])), "in_channels": 4, "num_attention_heads": None}
SD21 = {
    **SD15,
    "cross_attention_dim": 1024,
    "attention_head_dim": [5, 10, 20, 20],
    "use_linear_projection": True,
}


def folder(place: Path, config: dict[str, Any]) -> str:
    """A pipeline's folder as far as its UNet's configuration."""
    (place / "unet").mkdir()
    (place / "unet" / "config.json").write_text(json.dumps(config))
    return str(place)


def model_of(weights: str, model: str | None, part: str = "unet") -> str:
    (config,) = bench_options.bench_configs(model=model, parts=[part], weights=weights, device="cpu")
    return config.model


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


OTHER_MODELS = {
    "sd15": (
        SD15,
        "sdxl",
        "block_out_channels (320, 640, 1280, 1280), not (320, 640, 1280); --model sd15 fits",
    ),
    "sdxl": (
        SDXL,
        "sd15",
        "block_out_channels (320, 640, 1280), not (320, 640, 1280, 1280); --model sdxl fits",
    ),
    "sd21": (SD21, "sd15", "cross_attention_dim (1024, 1024, 1024, 1024), not (768, 768, 768, 768)"),
    "pruned": (
        {**SDXL, "transformer_layers_per_block": [0, 2, 4]},
        "sdxl",
        "transformer_layers_per_block (0, 2, 4), not (1, 2, 10)",
    ),
}


@pytest.mark.parametrize(("config", "model", "why"), OTHER_MODELS.values(), ids=OTHER_MODELS)
def test_a_wrong_name_is_refused(config, model, why, tmp_path):
    with pytest.raises(OptionError) as caught:
        model_of(folder(tmp_path, config), model)
    assert str(caught.value) == f"--model: the UNet of '{tmp_path}' is not {model!r}'s: {why}"


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


@pytest.mark.parametrize(
    ("config", "words"),
    [
        pytest.param(
            {"_class_name": "UNet3DConditionModel"}, "a UNet3DConditionModel takes inputs", id="video"
        ),
        pytest.param(
            {**SD21, "addition_embed_type": "image"}, "its addition_embed_type 'image' takes", id="image"
        ),
    ],
)
def test_what_cannot_be_timed_says_why(config, words, tmp_path):
    with pytest.raises(OptionError, match=rf"^--weights: the UNet of '{tmp_path}' cannot be timed: {words}"):
        model_of(folder(tmp_path, config), None)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        pytest.param("StableDiffusionImg2ImgPipeline", "text-to-image pipe.* takes 'image'", id="image"),
        pytest.param("LDMSuperResolutionPipeline", "takes a prompt, .* takes none", id="no-prompt"),
    ],
)
def test_a_pipeline_that_does_not_make_images_of_text(kind, words, tmp_path):
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": kind}))
    with pytest.raises(OptionError, match=rf"^--part: 'pipeline' needs a .*{words}"):
        model_of(folder(tmp_path, SD21), None, "pipeline")


def test_an_inpainting_unet_is_no_text_to_image(tmp_path):
    with pytest.raises(OptionError, match=r"^--part: 'pipeline' needs .* takes 9 channels$"):
        model_of(folder(tmp_path, {**SD15, "in_channels": 9}), "sd15", "pipeline")


def test_a_folder_without_a_unet(tmp_path):
    with pytest.raises(
        OptionError,
        match=rf"^--weights: no configuration of a UNet in '{tmp_path}': there is no unet/config.json$",
    ):
        model_of(str(tmp_path), "sd15")


def test_without_weights_the_model_is_tiny():
    assert model_of("random", None) == "tiny"


def test_a_file_is_no_pipeline(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(OptionError, match=r"PATH: '.*model.safetensors' is a file; expected"):
        load_pipeline("PATH", str(tmp_path / "model.safetensors"), torch.float32, "cpu")


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ("a" * 300, "cannot look at 'a+': File name too long"),
        ("~nobody-of-this-name/x", "cannot look at '~nobody-of-this-name/x': Could not determine home"),
        ("", "no such path ''; give random, a path, or a Hub id"),
    ],
    ids=["long", "home of nobody", "empty"],
)
def test_what_can_be_no_path(weights: str, words: str) -> None:
    with pytest.raises(OptionError, match=f"^--weights: {words}"):
        model_of(weights, "sd15")
