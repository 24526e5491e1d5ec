"""The command line: every command, and bad input, which is one line before anything starts."""

from __future__ import annotations

import io
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from sdfastgn import cli
from sdfastgn.bench.documents import OK
from sdfastgn.bench.kernels.suite import KernelRow
from sdfastgn.bench.kernels.suites import SUITES
from sdfastgn.bench.variants import PARTS, VARIANTS, Variant
from sdfastgn.kernels.common import dispatch
from sdfastgn.models import architectures, configurations
from sdfastgn.models.pipelines import build_pipeline
from sdfastgn.patches.fusions.geglu import FusedGEGLU
from tests.command_line import ROOT, exit_code, invoke

# As the entry point sets it. transformers would keep the first runner's standard error.
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

FORWARD = FusedGEGLU.forward
ON_CPU = ("--device", "cpu", "--repeats", "1")


def rows_of(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text())["rows"]


# ---- bad input

BAD_INPUT = {
    "bench --model sd3": "--model: unknown value 'sd3'; choose from tiny, tiny_xl, sd15, sdxl",
    "bench --part text": "--part: unknown value 'text'; choose from unet, vae, pipeline",
    "bench --variants eager,fast": "--variants: unknown value 'fast'; choose from eager, channels_last",
    "bench --variants ,": "--variants: no value given; choose from eager",
    "bench --dtype fp8": "--dtype: unknown value 'fp8'; choose from fp16, bf16, fp32",
    "bench --size 100": "--size: must be a positive multiple of 8 (one latent covers 8x8 pixels), got 100",
    "bench --size -8": "--size: must be a positive multiple of 8",
    "bench --preset mine": "--preset: unknown value 'mine'; choose from fal, diffusion-fast, stable-fast",
    "bench --scheduler Euler": "--scheduler: diffusers has no scheduler 'Euler'; give a class such as Euler",
    "bench --html tests": "--html: cannot write a file at 'tests': Is a directory",
    "report /no/such.json": "cannot read '/no/such.json': No such file or directory",
    "report pyproject.toml": "'pyproject.toml' holds no result of sdfastgn: it is no JSON (Expecting value: ",
    "report benchmarks/by_hand/stable_fast.json": "'stable_fast.json' has results of the kind 'stable_fast',",
    "bench --steps 0": "--steps: must be a positive whole number, got 0",
    "bench --batch two": "--batch: must be a positive whole number or a list such as 1,4, got 'two'",
    "bench --steps 1,-4": "--steps: must be a positive whole number, got -4",
    "bench --steps ,": "--steps: must be a positive whole number or a list such as 1,4, got ','",
    "bench --batch 0": "--batch: must be a positive whole number, got 0",
    "bench --repeats -1": "--repeats: must be a positive whole number, got -1",
    "bench --device tpu": "--device: cannot use 'tpu'; choose from cpu",
    "bench --weights /no/such/folder": "--weights: no such path '/no/such/folder'",
    "bench --weights model": "--weights: no such path 'model'; give random, a path, or a Hub id",
    "bench --weights tests": "--weights: no configuration of a UNet in 'tests'",
    "verify tiny": "PATH: no such path 'tiny'; give a path, or a Hub id",
    f"bench --batch {10**18}": "--batch: must be a positive whole number or a list such as 1,4, got",
    "bench --json tests": "--json: cannot write a file at 'tests': Is a directory",
    "bench --json /proc/x.json": "--json: cannot write a file at '/proc/x.json'",
    "bench --plot out.png": "--plot: draws the breakdown of --profile, got 'out.png' without --profile",
    "bench --profile --plot /proc/x.png": "--plot: cannot write a file at '/proc/x.png'",
    "bench --profile --plot out.svg": "--plot: must end in .png, got 'out.svg'",
    "kernels --json /proc/x/y.json": "--json: there is no folder '/proc/x'; make it first",
    "kernels --dtype bf16,fp32 --json /proc/x.json": "--json: cannot write a file at '/proc/x_bf16.json'",
    "kernels --dtype bf16,fp32 --json .": "--json: cannot write a file at '.': Is a directory",
    "kernels --plot roof.svg": "--plot: must end in .png, got 'roof.svg'",
    "kernels --suite training --plot x.png": "--plot: only the suite inference has a picture, got 'x.png'",
    "kernels --shapes 2x320x64": "--shapes: cannot use shape '2x320x64'; give NxCxHxW with C divisible by 32",
    "kernels --shapes 2x33x8x8": "--shapes: cannot use shape '2x33x8x8'",
    "kernels --shapes 0x32x8x8": "--shapes: cannot use shape '0x32x8x8'",
    f"kernels --shapes {10**18}x32x8x8": f"--shapes: cannot use shape '{10**18}x32x8x8'",
    "kernels --suite instance_norm --shapes 2x32x8x8": "--shapes: cannot use shape '2x32x8x8'; give N",
    "kernels --providers cudnn": "--providers: unknown value 'cudnn'; choose from copy, eager_nchw",
    "kernels --suite layer_norm --providers sdpa": "--providers: unknown value 'sdpa'; choose from",
    "kernels --suite norms": "--suite: unknown value 'norms'; choose from inference, training",
    "kernels --dtype int8": "--dtype: unknown value 'int8'; choose from fp16",
    "inspect /no/such/folder": "MODEL: no such path '/no/such/folder'; give tiny, tiny_xl,",
    "inspect tests": "MODEL: cannot load 'tests'",
    "inspect tiny --json /proc/x.json": "--json: cannot write a file at '/proc/x.json'",
    "warm-up sd3": f"MODEL: no such path 'sd3'; give {', '.join(configurations.MODELS)}, a path, or a Hub id",
    "warm-up tests": "MODEL: no configuration of a UNet in 'tests'",
    "warm-up tiny --batch 0": "--batch: must be a positive whole number, got 0",
    "warm-up tiny --size 1,2": "--size: must be like 512 or 768x512 (width first), got '1,2'",
    f"warm-up tiny --size {10**18}": "--size: must be like 512 or 768x512 (width first), got",
    "warm-up tiny --size 64x60": "--size: must be a positive multiple of 8 (one latent covers 8x8 pixels)",
    "warm-up tiny --device tpu": "--device: cannot use 'tpu'; choose from cpu",
    "warm-up tiny --device cpu": "--device: kernels can only be compiled on a CUDA GPU, got 'cpu'",
    "sources --against tests": "--against: no wheel or folder of diffusers or ComfyUI, got 'tests'",
    "sources --comfyui tests": "--comfyui: no checkout of ComfyUI, got 'tests'",
    f"sources --against {'a' * 300}": "--against: no wheel or folder of diffusers or ComfyUI, got",
    "demo --output pyproject.toml": "--output: cannot make a folder at 'pyproject.toml': File exists",
    "demo --output /proc/x": "--output: cannot make a folder at '/proc/x': No such",
    # typer's own checks
    "bench --guidance inf": "Invalid value for '--guidance': inf is not finite",
    "generate --model m --prompts p --out o --guidance nan": "Invalid value for '--guidance': nan is not",
    "bench --repeats two": "Invalid value for '--repeats': Input should be a valid integer",
    "bench --color": "No such option: --color",
    f"bench --seed {2**64}": f"Invalid value for '--seed': {2**64} is not a whole number of 64 bits",
    f"kernels --seed {-(2**64)}": f"Invalid value for '--seed': {-(2**64)} is not a whole number of 64 bits",
    "paint": "No such command 'paint'.",
}


@pytest.mark.parametrize(("command", "message"), BAD_INPUT.items(), ids=BAD_INPUT)
def test_bad_input_is_one_line(
    command: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    assert exit_code(monkeypatch, "sdfastgn", *command.split()) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith(f"sdfastgn: {message}")
    assert shown.err.count("\n") == 1
    assert not shown.out


def test_an_output_without_all_characters_has_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii", write_through=True))
    monkeypatch.setattr(sys, "argv", ["sdfastgn", "report", str(ROOT / "benchmarks/h200/warm_up_sdxl.json")])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert not caught.value.code
    assert rb"first images, sdxl 1024\xb2" in written.getvalue()


@pytest.mark.parametrize("seed", [0, -(2**63), 2**63 - 1])
def test_any_seed_of_64_bits_will_do(seed: int) -> None:
    result = invoke("kernels", "--shapes", "1x32x1x1", "--providers", "copy", *ON_CPU, "--seed", str(seed))
    assert result.exit_code == 0, result.output
    where = {"dtype": torch.float32, "device": "cpu"}
    inputs = architectures.unet_inputs("tiny_xl", size=8, batch=1, seed=seed, **where)
    assert inputs["sample"].isfinite().all()


# ---- bench


def test_bench_prints_checks_and_writes(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    chosen = ("--part", "unet", "--part", "vae", "--variants", "eager,sdfastgn,stable_fast")
    result = invoke("bench", *chosen, *ON_CPU, "--fp32-reference", "--json", str(path), COLUMNS="60")
    assert result.exit_code == 0, result.output
    cells = [(row["part"], row["variant"], row["status"]) for row in rows_of(path)]
    status = {"eager": OK, "sdfastgn": OK, "stable_fast": "unavailable"}
    assert cells == [(part, name, status[name]) for part in ("unet", "vae") for name in status]
    # Nothing is cut. A table's cell may go on in the next line, under itself.
    assert result.stdout.startswith("no GPU: sdfastgn runs stock's own code here")
    assert max(map(len, result.stdout.splitlines())) <= 60
    shown = " ".join(re.sub("[│┃]", " ", result.stdout).split())
    for words in ("median", "speed-up", "correctness gate", "package sfast (stable-fast) is not installed"):
        assert words in shown


def test_a_new_variant_is_one_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    new = Variant("thrown_away", "thrown away", lambda device: None, lambda *arguments: None)
    monkeypatch.setitem(VARIANTS, new.name, new)
    path = tmp_path / "out.json"
    result = invoke("bench", "--part", "vae", *ON_CPU, "--variants", "thrown_away", "--json", str(path))
    assert result.exit_code == 0, result.output
    assert "│ thrown away │" in result.stdout
    assert [(row["variant"], row["status"]) for row in rows_of(path)] == [("thrown_away", OK)]
    assert "variant thrown_away: yes" in invoke("info", "--device", "cpu").stdout
    assert "thrown_away" in invoke("bench", "-h").stdout


def test_a_wrong_variant_fails_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sdfastgn.bench.gate.ERROR_BOUNDS", {"fp32": -1.0})
    result = invoke("bench", "--part", "vae", *ON_CPU, "--variants", "eager,channels_last")
    assert result.exit_code == 1
    assert "wrong output" in result.stdout
    assert "median ms" not in result.stdout
    assert "speed-up" not in result.stdout


def test_batches_and_steps_are_lists(tmp_path: Path) -> None:
    path = tmp_path / "sweep.json"
    lists = ("--part", "vae", "--part", "pipeline", "--batch", "1,2", "--steps", "2,1", "--size", "32")
    result = invoke("bench", *lists, *ON_CPU, "--variants", "eager", "--json", str(path))
    assert result.exit_code == 0, result.output
    assert json.loads(path.read_text())["kind"] == "sweep"
    found = [(row["part"], row["batch"], row["steps"]) for row in rows_of(path)]
    pipelines = [("pipeline", batch, steps) for batch in (1, 2) for steps in (2, 1)]
    assert found == [("vae", 1, None), ("vae", 2, None), *pipelines]
    shown = invoke("report", str(path))
    assert shown.exit_code == 0, shown.output
    assert all(re.search(rf"\b{steps}\b", shown.stdout) for steps in ("1 step", "2 steps"))


def test_a_bench_without_any_result_fails() -> None:
    result = invoke("bench", "--part", "vae", "--device", "cpu", "--variants", "stable_fast")
    assert result.exit_code == 1
    assert "unavailable" in result.stdout


def test_weights_of_any_pipeline_with_a_unet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """None of the known models: three levels, wider text, a VAE of four pixels a latent."""
    changes = {
        "UNETS": {
            "block_out_channels": (8, 16, 24),
            "norm_num_groups": 4,
            "sample_size": 16,
            "cross_attention_dim": 48,
            "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
            "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        },
        "VAES": {
            "block_out_channels": (8, 8, 16),
            "down_block_types": ("DownEncoderBlock2D",) * 3,
            "up_block_types": ("UpDecoderBlock2D",) * 3,
        },
    }
    with monkeypatch.context() as patch:
        for table, values in changes.items():
            known = getattr(configurations, table)
            patch.setitem(known, "tiny", {**known["tiny"], **values})
        text = {**configurations.TEXT_ENCODERS["tiny"][0], "hidden_size": 48}
        patch.setitem(configurations.TEXT_ENCODERS, "tiny", (text,))
        build_pipeline("tiny", dtype=torch.float32, device="cpu").save_pretrained(tmp_path / "other")
    path, parts = tmp_path / "out.json", [word for part in PARTS for word in ("--part", part)]
    chosen = ("--weights", str(tmp_path / "other"), *parts, "--steps", "1", "--variants", "eager")
    result = invoke("bench", *chosen, *ON_CPU, "--json", str(path))
    assert result.exit_code == 0, result.output
    found = {(row["part"], row["model"], row["size"], row["status"]) for row in rows_of(path)}
    assert found == {(part, "other", 64, OK) for part in PARTS}


# ---- verify


@pytest.mark.parametrize(
    ("wrong", "code", "says"),
    [
        (None, 0, "not verified: no kernel runs"),
        (False, 0, "right"),
        (True, 1, "put back: verification: its error"),
    ],
    ids=["without kernels", "right", "wrong"],
)
def test_a_saved_pipeline_is_verified(
    wrong: bool | None, code: int, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_pipeline("tiny", dtype=torch.float32, device="cpu").save_pretrained(tmp_path)
    if wrong is not None:
        monkeypatch.setattr(dispatch, "has_kernels", lambda x: dispatch.is_on())
    if wrong:
        monkeypatch.setattr(
            FusedGEGLU,
            "forward",
            lambda self, x: self.proj(x).chunk(2, -1)[0] if dispatch.has_kernels(x) else FORWARD(self, x),
        )
    result = invoke("verify", str(tmp_path), "--device", "cpu")
    assert (result.exit_code, says in result.output) == (code, True), result.output
    assert "group_norm" in result.output


# ---- kernels


def test_kernels_on_the_cpu(tmp_path: Path) -> None:
    path = tmp_path / "kernels.json"
    chosen = ("--shapes", "1x64x4x4,2x32x3x3", "--providers", "eager_nchw,sdfastgn,stable_fast")
    result = invoke("kernels", *chosen, *ON_CPU, "--json", str(path))
    assert result.exit_code == 0, result.output
    content = json.loads(path.read_text())
    assert list(content) == ["schema", "kind", "environment", "config", "rows", "summary"]
    assert (content["kind"], content["config"]["suite"]) == ("kernels", "inference")
    assert content["environment"]["switches"]
    assert {row["provider"] for row in content["rows"]} == {"copy", "eager_nchw", "sdfastgn", "stable_fast"}
    assert "1x64x4x4" in result.stdout
    assert "stable_fast: unavailable" in result.stdout
    # One measured case is one line, and what old runs have is what new ones have.
    lines = [line for line in path.read_text().splitlines() if '"provider"' in line]
    assert [json.loads(line.rstrip(",")) for line in lines] == content["rows"]
    for name in ("kernels", "kernels_training"):
        old = json.loads((ROOT / "benchmarks" / "h200" / f"{name}.json").read_text())
        assert set(old["rows"][0]) <= set(content["rows"][0])
        assert set(old["config"]) <= set(content["config"])


def test_a_suite_with_several_dtypes_writes_a_file_for_each(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    command = ("kernels", "--suite", "instance_norm", "--shapes", "1x3x5x2x4", *ON_CPU, "--json", str(path))
    assert invoke(*command, "--dtype", "bf16,fp32").exit_code == 0
    assert {each.name for each in tmp_path.iterdir()} == {"a_bf16.json", "a_fp32.json"}
    result = invoke(*command)
    content = json.loads(path.read_text())
    assert (content["kind"], content["config"]["dtype"]) == ("kernels_instance_norm", "fp16")
    assert "forward + backward" in result.stdout
    assert "not run (name them in --providers): inductor_ndhwc" in result.stdout


@pytest.mark.parametrize(
    "arguments",
    [(), ("--suite", "training"), ("--device", "cpu", "--shapes", "2x1280x64x64")],
    ids=["inference", "training", "large"],
)
def test_kernels_say_once_why_nothing_is_timed(arguments: tuple[str, ...], tmp_path: Path) -> None:
    if torch.cuda.is_available() and "cpu" not in arguments:
        pytest.skip("there is a GPU, which can be timed")
    path = tmp_path / "out.json"
    result = invoke("kernels", *arguments, "--json", str(path))
    assert result.exit_code == 1
    (line,) = (line for line in result.stdout.splitlines() if not line.startswith("wrote"))
    why = "too many for the CPU" if "cpu" in arguments else "kernel times need an NVIDIA GPU"
    assert line.startswith("nothing was timed: ")
    assert why in line
    assert {row["status"] for row in rows_of(path)} == {"unavailable"}


def test_kernels_that_are_cut_off_leave_the_shapes_that_were_timed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def line(row: KernelRow) -> str:
        if row.shape == (2, 32, 5, 3):
            raise KeyboardInterrupt
        return ""

    monkeypatch.setattr("sdfastgn.bench.tables.kernels.cell_line", line)
    path = tmp_path / "out.json"
    shapes = ("--shapes", "2x32x3x5,2x32x5x3", "--providers", "eager_nchw")
    assert invoke("kernels", *shapes, *ON_CPU, "--json", str(path)).exit_code != 0
    rows = rows_of(path)
    assert {tuple(row["shape"]) for row in rows} == {(2, 32, 3, 5)}
    assert all(row["hot_ratio"] for row in rows)


def test_a_wrong_gradient_fails_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sdfastgn.bench.kernels.run.GRADIENT_BOUNDS", {"fp16": -1.0})
    chosen = ("--suite", "training", "--shapes", "2x32x3x5", "--providers", "eager_nchw")
    result = invoke("kernels", *chosen, *ON_CPU)
    assert result.exit_code == 1
    assert "wrong output: relative error of dx" in result.stdout


# ---- inspect and info


def test_inspect_reports_without_weights(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    result = invoke("inspect", "tiny_xl", "--json", str(path))
    assert result.exit_code == 0, result.output
    assert "resnet_block" in result.stdout
    assert "optimize would fuse" in result.stdout
    assert "graphs: none yet" in result.stdout
    assert "would be CUDA graphs on an NVIDIA GPU: UNet2DConditionModel" in result.stdout
    assert ("would run in: plain PyTorch, stock's own code" in result.stdout) != torch.cuda.is_available()
    assert set(json.loads(path.read_text())) == {"unet", "vae"}


def test_info_names_what_runs_and_why_the_rest_does_not() -> None:
    result = invoke("info", "--device", "cpu", COLUMNS="60")
    assert result.exit_code == 0, result.output
    shown = " ".join(result.stdout.split())
    providers = {name for suite in SUITES.values() for name in suite.providers}
    names = [f"variant {name}:" for name in VARIANTS] + [f"kernel {name}:" for name in providers]
    assert all(name in shown for name in (*names, "torch:", "GPU:"))
    assert "variant stable_fast: package sfast (stable-fast) is not installed" in shown
