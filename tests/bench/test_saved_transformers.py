"""``bench --weights`` for saved pipelines with a transformer: a step, and whole pipelines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from transformers import CLIPTextModelWithProjection, T5Config, T5EncoderModel

from sdfastgn.bench import workload
from sdfastgn.bench.documents import OK
from sdfastgn.cli import bench_options
from sdfastgn.models import configurations, pipelines
from sdfastgn.models.architectures import randomize
from sdfastgn.program import OptionError
from tests.command_line import invoke

VAE = {
    "block_out_channels": (8, 8, 8, 8),
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "layers_per_block": 1,
    "latent_channels": 4,
    "norm_num_groups": 4,
    "shift_factor": 0.1,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
}
TRANSFORMER = {
    "sample_size": 8,
    "patch_size": 2,
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 1,
    "attention_head_dim": 8,
    "num_attention_heads": 4,
    "caption_projection_dim": 32,
    "joint_attention_dim": 64,
    "pooled_projection_dim": 64,
    "pos_embed_max_size": 8,
}
T5 = T5Config(vocab_size=600, d_model=64, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
ON_CPU = ("--device", "cpu", "--repeats", "1", "--size", "64", "--fp32-reference")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A small pipeline of Stable Diffusion 3."""
    clip = {**configurations.TEXT_ENCODERS["tiny"][0], "projection_dim": 32}
    encoders = [
        pipelines._text_encoder(CLIPTextModelWithProjection, clip, torch.float32, "cpu", seed)
        for seed in range(2)
    ]
    pipe = diffusers.StableDiffusion3Pipeline(
        transformer=randomize(diffusers.SD3Transformer2DModel(**TRANSFORMER), 0),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        vae=randomize(diffusers.AutoencoderKL(**VAE), 1),
        text_encoder=encoders[0],
        tokenizer=pipelines.build_tokenizer(),
        text_encoder_2=encoders[1],
        tokenizer_2=pipelines.build_tokenizer(),
        text_encoder_3=randomize(T5EncoderModel(T5), 2),
        tokenizer_3=pipelines.build_tokenizer(),
    )
    folder = tmp_path_factory.mktemp("sd3")
    pipe.save_pretrained(folder)
    return str(folder)


@pytest.mark.slow
def test_a_step_and_a_pipeline_are_timed(saved: str, tmp_path: Path) -> None:
    files = ("--json", str(tmp_path / "out.json"), "--html", str(tmp_path / "page.html"))
    parts = ("--part", "transformer", "--part", "pipeline", "--steps", "2", "--dtype", "bf16")
    result = invoke("bench", "--weights", saved, *parts, *ON_CPU, "--variants", "eager,sdfastgn", *files)
    assert result.exit_code == 0, result.output
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [(row["model"], row["part"], row["status"]) for row in rows] == [
        ("sd35", part, OK) for part in ("transformer", "transformer", "pipeline", "pipeline")
    ]
    for row in rows[:2]:
        assert 0 < row["row_error_fp32"] < row["high_row_error_fp32"] < 0.1
    for row in rows[2:]:
        assert row["psnr_fp32_db"] > 30
    assert "row error: median" in result.output
    assert "PSNR dB, fp32" in result.output
    assert (tmp_path / "page.html").read_text().count("data:image/png;base64,") == 5


def config_of(saved: str, part: str, **options: Any) -> workload.BenchConfig:
    (config,) = bench_options.bench_configs(
        model="sd35", parts=[part], weights=saved, device="cpu", size=64, **options
    )
    return config


@pytest.mark.slow
def test_a_step_has_the_inputs_of_the_pipelines_first_step(saved: str) -> None:
    config = config_of(saved, "transformer", prompt="a cat")
    found = workload.build_workload(config)
    seen = []
    pipe = pipelines.load_pipeline("--weights", saved, torch.float32, "cpu")
    pipe.transformer.register_forward_hook(lambda module, args, y: seen.append(y[0]))
    generator = torch.Generator("cpu").manual_seed(config.seed)
    pipe("a cat", height=64, width=64, num_inference_steps=config.steps, generator=generator)
    with torch.no_grad():
        assert torch.equal(found.call(), seen[0])


def test_the_noise_is_the_same_in_every_dtype(saved: str) -> None:
    seen = []
    for dtype in ("fp32", "bf16"):
        found = workload.build_workload(config_of(saved, "transformer", dtype=dtype))
        found.target.register_forward_pre_hook(
            lambda module, args, kwargs: seen.append(kwargs["hidden_states"]), with_kwargs=True
        )
        with torch.no_grad():
            found.call()
    assert torch.equal(seen[0].bfloat16(), seen[1])


def test_a_pipeline_keeps_its_own_guidance(saved: str) -> None:
    assert config_of(saved, "pipeline").guidance is None
    assert config_of(saved, "pipeline", guidance=2.0).guidance == 2.0


def test_another_scheduler(saved: str) -> None:
    found = workload.build_workload(config_of(saved, "pipeline", scheduler="FlowMatchHeunDiscreteScheduler"))
    assert type(found.target.scheduler).__name__ == "FlowMatchHeunDiscreteScheduler"


def test_after_a_call_in_fp32_each_layer_has_its_own_dtype(saved: str) -> None:
    config = config_of(saved, "pipeline", dtype="bf16", steps=1)
    found = workload.build_workload(config)
    transformer = found.target.transformer
    transformer.norm_out.float()
    before = {name: (p.dtype, p.clone()) for name, p in transformer.named_parameters()}
    assert found.fp32_output is not None
    with torch.no_grad():
        found.fp32_output()
    for name, p in transformer.named_parameters():
        assert p.dtype == before[name][0]
        assert torch.equal(p, before[name][1])
    assert {p.dtype for p in transformer.parameters()} == {torch.float32, torch.bfloat16}


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"model": "flux"}, "--weights: there is no transformer of 'flux' in .*: it has a SD3Transformer2D"),
        ({"parts": ["vae"]}, "--part: cannot time 'vae' of the model 'sd35'; choose from transformer, pipe"),
    ],
)
def test_what_does_not_fit_is_refused(saved: str, options: dict[str, Any], text: str) -> None:
    with pytest.raises(OptionError, match=text):
        bench_options.bench_configs(**{"model": None, "weights": saved, "device": "cpu", **options})


def test_an_unknown_transformer_is_refused(saved: str, tmp_path: Path) -> None:
    index = json.loads((Path(saved) / "model_index.json").read_text())
    index["transformer"] = ["diffusers", "SanaTransformer2DModel"]
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    with pytest.raises(OptionError, match=r"--weights: cannot time the SanaTransformer2DModel in .*choose"):
        bench_options.bench_configs(model=None, weights=str(tmp_path), device="cpu")
