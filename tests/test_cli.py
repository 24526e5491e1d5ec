"""The command line: every command and bad input through typer's runner."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

import sdfastgn
from sdfastgn.bench.models import architectures
from sdfastgn.bench.models.pipelines import build_pipeline
from sdfastgn.bench.models.variants import NAMES as VARIANTS
from sdfastgn.bench.models.variants import PARTS
from sdfastgn.cli_commands import app

ROOT = Path(__file__).resolve().parents[1]

# As the entry point sets it; transformers would also keep the first runner's standard error, which is closed after its test.
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


# ---- bad input


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        pytest.param(
            ["bench", "--model", "sd3"], ["--model", "'sd3'", "tiny, tiny_xl, sd15, sdxl"], id="model"
        ),
        pytest.param(["bench", "--part", "text"], ["--part", "'text'", "unet, vae, pipeline"], id="part"),
        pytest.param(
            ["bench", "--variants", "eager,fast"], ["--variants", "'fast'", "channels_last"], id="variant"
        ),
        pytest.param(["bench", "--variants", ","], ["--variants", "no value"], id="no-variant"),
        pytest.param(["bench", "--dtype", "fp8"], ["--dtype", "'fp8'", "fp16, bf16, fp32"], id="dtype"),
        pytest.param(["bench", "--size", "100"], ["--size", "100", "multiple of 8"], id="size"),
        pytest.param(["bench", "--size", "-8"], ["--size", "-8"], id="negative-size"),
        pytest.param(["bench", "--steps", "0"], ["--steps", "0"], id="steps"),
        pytest.param(["bench", "--batch", "0"], ["--batch", "0"], id="batch"),
        pytest.param(["bench", "--repeats", "-1"], ["--repeats", "-1"], id="repeats"),
        pytest.param(["bench", "--device", "tpu"], ["--device", "'tpu'", "cpu"], id="device"),
        pytest.param(["bench", "--weights", "/no/such/folder"], ["--weights", "/no/such/folder"], id="path"),
        pytest.param(["bench", "--weights", "model"], ["--weights", "'model'", "Hub id"], id="word"),
        pytest.param(["bench", "--json", "tests"], ["--json", "tests"], id="json-is-a-folder"),
        pytest.param(
            ["bench", "--json", "/proc/x.json"],
            ["--json: cannot write a file at '/proc/x.json'"],
            id="bench-json",
        ),
        pytest.param(
            ["bench", "--profile", "--plot", "/proc/x.png"],
            ["--plot: cannot write a file at '/proc/x.png'"],
            id="bench-plot",
        ),
        pytest.param(
            ["kernels", "--json", "/proc/x/y.json"], ["--json", "'/proc/x/y.json'"], id="kernels-json"
        ),
        pytest.param(
            ["kernels", "--plot", "/proc/x/y.png"], ["--plot", "'/proc/x/y.png'"], id="kernels-plot"
        ),
        pytest.param(
            ["kernels", "--dtype", "bf16,fp32", "--json", "/proc/x.json"],
            ["--json", "'/proc/x_bf16.json'"],
            id="kernels-json-of-a-dtype",
        ),
        pytest.param(
            ["inspect", "tiny", "--json", "/proc/x.json"], ["--json", "'/proc/x.json'"], id="inspect-json"
        ),
        pytest.param(["kernels", "--shapes", "2x320x64"], ["--shapes", "'2x320x64'", "NxCxHxW"], id="shape"),
        pytest.param(["kernels", "--shapes", "2x33x8x8"], ["--shapes", "'2x33x8x8'", "32"], id="groups"),
        pytest.param(["kernels", "--shapes", "0x32x8x8"], ["--shapes", "'0x32x8x8'"], id="empty-shape"),
        pytest.param(
            ["kernels", "--providers", "cudnn"], ["--providers", "'cudnn'", "sdfastgn"], id="provider"
        ),
        pytest.param(["kernels", "--plot", "roof.svg"], ["--plot", "'roof.svg'", ".png"], id="plot"),
        pytest.param(
            ["kernels", "--suite", "norms"], ["--suite", "'norms'", "inference, training"], id="suite"
        ),
        pytest.param(
            ["kernels", "--suite", "instance_norm", "--shapes", "2x32x8x8"],
            ["--shapes", "'2x32x8x8'", "NxDxHxWxC"],
            id="suite-shape",
        ),
        pytest.param(
            ["kernels", "--suite", "training", "--shapes", "2x33x8x8"],
            ["'2x33x8x8'", "32", "unet"],
            id="suite-groups",
        ),
        pytest.param(
            ["kernels", "--suite", "layer_norm", "--providers", "apex"],
            ["--providers", "'apex'", "eager"],
            id="suite-provider",
        ),
        pytest.param(
            ["kernels", "--suite", "training", "--plot", "roof.png"],
            ["--plot", "'roof.png'", "inference"],
            id="suite-plot",
        ),
        pytest.param(["kernels", "--dtype", "int8"], ["--dtype", "'int8'", "fp16"], id="kernel-dtype"),
        pytest.param(["inspect", "/no/such/folder"], ["MODEL", "/no/such/folder", "tiny"], id="inspect"),
        pytest.param(["demo", "--output", "pyproject.toml"], ["--output", "pyproject.toml"], id="demo"),
        pytest.param(["demo", "--output", "/proc/x"], ["--output", "'/proc/x/stock.png'"], id="demo-output"),
    ],
)
def test_bad_input(arguments: list[str], words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert len(result.stderr.strip().splitlines()) == 1
    assert all(word in result.stderr for word in words)
    assert not result.stdout


@pytest.mark.parametrize("command", [["bench", "--weights"], ["inspect"]], ids=["bench", "inspect"])
def test_a_folder_that_holds_no_pipeline(command: list[str], tmp_path: Path) -> None:
    result = invoke(*command, str(tmp_path))
    assert result.exit_code == 2
    assert str(tmp_path) in result.stderr
    assert "Traceback" not in result.output


def test_weights_say_what_model_they_are(tmp_path: Path) -> None:
    build_pipeline("tiny", dtype=torch.float32, device="cpu").save_pretrained(tmp_path)
    arguments = (
        "bench",
        "--weights",
        str(tmp_path),
        "--device",
        "cpu",
        "--repeats",
        "1",
        "--variants",
        "eager",
    )
    result = invoke(*arguments)
    assert result.exit_code == 0, result.output
    assert "tiny unet, 64x64" in result.stdout
    result = invoke(*arguments, "--model", "sdxl", "--size", "64")
    assert result.exit_code == 2
    assert "--model tiny fits" in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


# ---- commands


def test_the_version() -> None:
    assert invoke("--version").stdout == f"sdfastgn {sdfastgn.__version__}\n"


@pytest.mark.parametrize(
    "command", ["", *(command.name or command.callback.__name__ for command in app.registered_commands)]
)
def test_every_command_has_both_helps(command: str) -> None:
    long, short = (invoke(*command.split(), option) for option in ("--help", "-h"))
    assert long.exit_code == short.exit_code == 0
    assert long.stdout == short.stdout
    assert "Usage" in short.stdout


def test_the_help_names_every_variant() -> None:
    words = invoke("bench", "--help").stdout.replace(",", " ").split()
    assert set(VARIANTS) <= set(words)


@pytest.mark.parametrize("seed", [0, -(2**63), 2**63 - 1])
def test_any_seed_of_64_bits_will_do(seed: int) -> None:
    result = invoke("bench", "--device", "cpu", "--repeats", "1", "--variants", "eager", "--seed", str(seed))
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("columns", ["60", "80", "120"])
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        pytest.param(
            ["bench", "--variants", "eager,sdfastgn,stable_fast", "--repeats", "1"],
            [
                "ready median p10-p90 speed-up it/s",
                "unavailable: package sfast (stable-fast) is not installed",
            ],
            id="bench",
        ),
        pytest.param(
            ["kernels", "--suite", "layer_norm", "--shapes", "6x9"],
            ["forward + backward", "not run"],
            id="suite",
        ),
        pytest.param(["info"], [*VARIANTS, "package sfast (stable-fast) is not installed"], id="info"),
    ],
)
def test_nothing_is_cut(arguments: list[str], words: list[str], columns: str) -> None:
    result = CliRunner().invoke(app, [*arguments, "--device", "cpu"], env={"COLUMNS": columns})
    assert result.exit_code == 0, result.output
    assert max(map(len, result.stdout.splitlines())) <= int(columns)
    assert "\N{HORIZONTAL ELLIPSIS}" not in result.stdout
    # A table's cell may go on in the next line, under itself.
    shown = " ".join(re.sub("[│┃]", " ", result.stdout).split())
    assert all(set(word.split()) <= set(shown.split()) for word in words)


@pytest.mark.parametrize(
    "arguments", [[], ["--suite", "training"], ["--device", "cpu", "--shapes", "2x1280x64x64"]]
)
def test_kernels_say_once_why_nothing_is_timed(arguments: list[str], tmp_path: Path) -> None:
    if torch.cuda.is_available() and arguments[1:2] != ["cpu"]:
        pytest.skip("there is a GPU, which can be timed")
    path = tmp_path / "out.json"
    result = invoke("kernels", *arguments, "--json", str(path))
    assert result.exit_code == 1
    (line,) = (line for line in result.stdout.splitlines() if not line.startswith("wrote"))
    why = "too many for the CPU" if "cpu" in arguments else "kernel times need an NVIDIA GPU"
    assert line.startswith("nothing was timed: ")
    assert why in line
    assert {row["status"] for row in json.loads(path.read_text())["rows"]} == {"unavailable"}


def test_bench_says_what_a_cpu_can_show() -> None:
    result = invoke("bench", "--device", "cpu", "--repeats", "1", "--variants", "eager,sdfastgn")
    assert result.stdout.splitlines()[0].startswith("no GPU: sdfastgn runs stock's own code here")


@pytest.fixture
def other_pipeline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A saved pipeline that is none of the known models: three levels, wider text, a VAE of four pixels a latent."""
    levels = {
        "block_out_channels": (8, 16, 24),
        "norm_num_groups": 4,
        "sample_size": 16,
        "cross_attention_dim": 48,
    }
    blocks = {
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    }
    vae = {"down_block_types": ("DownEncoderBlock2D",) * 3, "up_block_types": ("UpDecoderBlock2D",) * 3}
    with monkeypatch.context() as patch:
        patch.setitem(architectures.UNETS, "tiny", {**architectures.UNETS["tiny"], **levels, **blocks})
        patch.setitem(
            architectures.VAES,
            "tiny",
            {**architectures.VAES["tiny"], **vae, "block_out_channels": (8, 8, 16)},
        )
        text = {**architectures.TEXT_ENCODERS["tiny"][0], "hidden_size": 48}
        patch.setitem(architectures.TEXT_ENCODERS, "tiny", (text,))
        build_pipeline("tiny", dtype=torch.float32, device="cpu").save_pretrained(tmp_path / "other")
    return tmp_path / "other"


def test_weights_of_any_pipeline_with_a_unet(other_pipeline: Path, tmp_path: Path) -> None:
    parts = [word for part in PARTS for word in ("--part", part)]
    path = tmp_path / "out.json"
    result = invoke(
        "bench", "--weights", str(other_pipeline), *parts, "--device", "cpu", "--repeats", "1", "--steps", "2",
        "--variants", "eager,sdfastgn", "--json", str(path),
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    rows = json.loads(path.read_text())["rows"]
    assert {(row["part"], row["model"], row["size"], row["status"]) for row in rows} == {
        (part, "other", 64, "ok") for part in PARTS
    }


def test_bench_prints_checks_and_writes(tmp_path: Path) -> None:
    path = tmp_path / "new" / "out.json"
    result = invoke(
        "bench", "--part", "unet", "--part", "vae", "--device", "cpu", "--size", "64", "--repeats", "2", "--fp32-reference",
        "--variants", "eager,sdfastgn,stable_fast", "--json", str(path),
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    content = json.loads(path.read_text())
    assert [(row["part"], row["variant"]) for row in content["rows"]] == [
        (part, name) for part in ("unet", "vae") for name in ("eager", "sdfastgn", "stable_fast")
    ]
    assert [row["status"] for row in content["rows"]] == ["ok", "ok", "unavailable"] * 2
    assert "median ms" in result.stdout
    assert "correctness gate" in result.stdout
    assert "error, fp32" in result.stdout
    assert "not installed" in result.stdout


def test_a_wrong_variant_fails_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sdfastgn.bench.models.workload.ERROR_BOUNDS", {"fp32": -1.0})
    result = invoke(
        "bench", "--device", "cpu", "--dtype", "fp32", "--repeats", "1", "--variants", "eager,channels_last"
    )
    assert result.exit_code == 1
    assert "wrong output" in result.stdout
    assert "median ms" not in result.stdout
    assert "speed-up" not in result.stdout


def test_a_bench_without_any_result_fails() -> None:
    result = invoke("bench", "--device", "cpu", "--variants", "stable_fast")
    assert result.exit_code == 1
    assert "unavailable" in result.stdout


def test_kernels_on_the_cpu(tmp_path: Path) -> None:
    path = tmp_path / "kernels.json"
    result = invoke(
        "kernels", "--device", "cpu", "--shapes", "1x64x4x4,2x32x3x3", "--providers", "eager_nchw,sdfastgn,apex", "--repeats", "1",
        "--json", str(path),
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    content = json.loads(path.read_text())
    assert content["kind"] == "kernels"
    assert {row["provider"] for row in content["rows"]} == {"copy", "eager_nchw", "sdfastgn", "apex"}
    assert "summary" in content
    assert "1x64x4x4" in result.stdout
    assert "apex: unavailable" in result.stdout


SUITE_SHAPES = {
    "training": "2x32x3x5",
    "issue_28201": "2x32x3x5",
    "instance_norm": "2x3x2x5x4",
    "layer_norm": "6x9",
}


@pytest.mark.parametrize(("suite", "shape"), SUITE_SHAPES.items(), ids=SUITE_SHAPES)
def test_a_suite_on_the_cpu(suite: str, shape: str, tmp_path: Path) -> None:
    path = tmp_path / "kernels.json"
    result = invoke("kernels", "--suite", suite, "--device", "cpu", "--shapes", shape, "--json", str(path))
    assert result.exit_code == 0, result.output
    content = json.loads(path.read_text())
    assert content["kind"] == f"kernels_{suite}"
    assert content["config"]["suite"] == suite
    assert content["config"]["dtype"] == ("fp32" if suite == "issue_28201" else "fp16")
    assert content["environment"]["switches"]
    assert content["summary"]["slower_than_best_peer"]
    assert all("inductor" not in row["provider"] for row in content["rows"])
    assert shape in result.stdout
    assert "forward + backward" in result.stdout
    assert "not run (name them in --providers): inductor" in result.stdout


def test_a_suite_with_several_dtypes_writes_a_file_for_each(tmp_path: Path) -> None:
    result = invoke(
        "kernels", "--suite", "layer_norm", "--device", "cpu", "--shapes", "6x9", "--providers", "eager",
        "--dtype", "bf16,fp32", "--json", str(tmp_path / "ln.json"),
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert {path.name for path in tmp_path.iterdir()} == {"ln_bf16.json", "ln_fp32.json"}


def test_a_wrong_gradient_fails_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sdfastgn.bench.kernels.suites.GRADIENT_BOUNDS", {"fp16": -1.0})
    result = invoke(
        "kernels",
        "--suite",
        "training",
        "--device",
        "cpu",
        "--shapes",
        "2x32x3x5",
        "--providers",
        "eager_nchw",
    )
    assert result.exit_code == 1
    assert "wrong output: relative error of dx" in result.stdout


def test_the_default_suite_is_inference_as_it_was(tmp_path: Path) -> None:
    names = ("default", "inference")
    for name in names:
        chosen = ("--suite", name) if name == "inference" else ()
        invoke(
            "kernels", *chosen, "--device", "cpu", "--shapes", "1x64x4x4", "--providers", "sdfastgn", "--repeats", "1",
            "--json", str(tmp_path / f"{name}.json"),
        )  # fmt: skip
    contents = [json.loads((tmp_path / f"{name}.json").read_text()) for name in names]
    assert contents[0]["config"] == contents[1]["config"]
    for content in contents:
        assert content["kind"] == "kernels"
        assert set(content) == {"schema", "kind", "environment", "config", "rows", "summary"}
        assert set(content["config"]) == {
            "shapes", "providers", "dtype", "device", "repeats", "seed", "wall_clock",
        }  # fmt: skip
        assert set(content["rows"][0]) == {
            "shape", "provider", "status", "reason", "hot_us", "cold_us", "hot_gbps", "cold_gbps", "hot_ratio", "cold_ratio",
            "error", "cpu_us",
        }  # fmt: skip


@pytest.mark.parametrize("model", ["tiny", "tiny_xl"])
def test_inspect_reports_without_weights(model: str, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    result = invoke("inspect", model, "--json", str(path))
    assert result.exit_code == 0, result.output
    assert "resnet_block" in result.stdout
    assert "optimize would fuse" in result.stdout
    assert "runs in" not in result.stdout
    assert set(json.loads(path.read_text())) == {"unet", "vae"}


def test_info_names_every_variant_and_provider() -> None:
    from sdfastgn.bench.kernels.providers import NAMES as PROVIDERS

    result = invoke("info", "--device", "cpu")
    assert result.exit_code == 0, result.output
    assert all(name in result.stdout for name in (*VARIANTS, *PROVIDERS, "torch", "GPU"))
