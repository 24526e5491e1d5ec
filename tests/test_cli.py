"""The command line: real entry points in new processes, and every command and bad input through typer's runner."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from sfastgn.cli_commands import app

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = Path(sys.executable).with_name("sfastgn")

# As the entry point sets it; transformers would also keep the first runner's standard error, which is closed after its test.
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def process(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


# ---- real entry points


@pytest.mark.parametrize(
    "command",
    [pytest.param([str(SCRIPT)], id="script"), pytest.param([sys.executable, "-m", "sfastgn"], id="module")],
)
def test_help_lists_the_commands(command: list[str]) -> None:
    if not Path(command[0]).exists():
        pytest.skip("sfastgn is not installed as a script")
    done = process(*command, "--help")
    assert done.returncode == 0, done.stderr
    assert all(name in done.stdout for name in ("bench", "kernels", "inspect", "info", "demo"))


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\nsys.argv = ['sfastgn', '--help']\nfrom sfastgn.cli import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "print([name for name in ('torch', 'diffusers', 'triton', 'numpy') if name in sys.modules])"
    )
    start = time.perf_counter()
    done = process(sys.executable, "-c", code)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr
    assert time.perf_counter() - start < 10  # about a fifth of a second; loaded machines take longer


def test_without_typer_it_says_what_to_install() -> None:
    code = "import sys\nsys.modules['typer'] = None\nfrom sfastgn.cli import main\nmain()"
    done = process(sys.executable, "-c", code)
    assert done.returncode == 1
    assert done.stderr.strip() == "sfastgn: the command line needs typer: pip install 'sfastgn[bench]'"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        pytest.param(["bench", "--model", "sd3"], ["--model", "'sd3'", "sdxl"], id="model"),
        pytest.param(["bench", "--batch", "two"], ["--batch", "two"], id="not-a-number"),
        pytest.param(["bench", "--colour"], ["--colour"], id="unknown-option"),
        pytest.param(["paint"], ["paint"], id="unknown-command"),
    ],
)
def test_bad_input_is_one_line_in_a_real_process(arguments: list[str], words: list[str]) -> None:
    done = process(sys.executable, "-m", "sfastgn", *arguments)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr + done.stdout
    assert len(done.stderr.strip().splitlines()) == 1
    assert all(word in done.stderr for word in words)


# ---- bad input


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        pytest.param(["bench", "--model", "sd3"], ["--model", "'sd3'", "tiny, tiny_xl, sd15, sdxl"], id="model"),
        pytest.param(["bench", "--part", "text"], ["--part", "'text'", "unet, vae, pipeline"], id="part"),
        pytest.param(["bench", "--variants", "eager,fast"], ["--variants", "'fast'", "channels_last"], id="variant"),
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
            ["bench", "--json", "/proc/x.json"], ["--json: cannot write a file at '/proc/x.json'"], id="bench-json"
        ),
        pytest.param(
            ["bench", "--profile", "--plot", "/proc/x.png"],
            ["--plot: cannot write a file at '/proc/x.png'"],
            id="bench-plot",
        ),
        pytest.param(["kernels", "--json", "/proc/x/y.json"], ["--json", "'/proc/x/y.json'"], id="kernels-json"),
        pytest.param(["kernels", "--plot", "/proc/x/y.png"], ["--plot", "'/proc/x/y.png'"], id="kernels-plot"),
        pytest.param(
            ["kernels", "--dtype", "bf16,fp32", "--json", "/proc/x.json"],
            ["--json", "'/proc/x_bf16.json'"],
            id="kernels-json-of-a-dtype",
        ),
        pytest.param(["inspect", "tiny", "--json", "/proc/x.json"], ["--json", "'/proc/x.json'"], id="inspect-json"),
        pytest.param(["kernels", "--shapes", "2x320x64"], ["--shapes", "'2x320x64'", "NxCxHxW"], id="shape"),
        pytest.param(["kernels", "--shapes", "2x33x8x8"], ["--shapes", "'2x33x8x8'", "32"], id="groups"),
        pytest.param(["kernels", "--shapes", "0x32x8x8"], ["--shapes", "'0x32x8x8'"], id="empty-shape"),
        pytest.param(["kernels", "--providers", "cudnn"], ["--providers", "'cudnn'", "sfastgn"], id="provider"),
        pytest.param(["kernels", "--plot", "roof.svg"], ["--plot", "'roof.svg'", ".png"], id="plot"),
        pytest.param(["kernels", "--suite", "norms"], ["--suite", "'norms'", "inference, training"], id="suite"),
        pytest.param(
            ["kernels", "--suite", "instance_norm", "--shapes", "2x32x8x8"],
            ["--shapes", "'2x32x8x8'", "NxDxHxWxC"],
            id="suite-shape",
        ),
        pytest.param(
            ["kernels", "--suite", "training", "--shapes", "2x33x8x8"], ["'2x33x8x8'", "32", "unet"], id="suite-groups"
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
    import torch

    from sfastgn.bench.pipelines import build_pipeline

    build_pipeline("tiny", dtype=torch.float32, device="cpu").save_pretrained(tmp_path)
    arguments = ("bench", "--weights", str(tmp_path), "--device", "cpu", "--repeats", "1", "--variants", "eager")
    result = invoke(*arguments)
    assert result.exit_code == 0, result.output
    assert "tiny unet, 64x64" in result.stdout
    result = invoke(*arguments, "--model", "sdxl", "--size", "64")
    assert result.exit_code == 2
    assert "--model tiny fits" in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


# ---- commands


def test_bench_prints_checks_and_writes(tmp_path: Path) -> None:
    path = tmp_path / "new" / "out.json"
    result = invoke(
        "bench", "--part", "unet", "--part", "vae", "--device", "cpu", "--size", "64", "--repeats", "2", "--fp32-reference",
        "--variants", "eager,sfastgn,stable_fast", "--json", str(path),
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    content = json.loads(path.read_text())
    assert [(row["part"], row["variant"]) for row in content["rows"]] == [
        (part, name) for part in ("unet", "vae") for name in ("eager", "sfastgn", "stable_fast")
    ]
    assert [row["status"] for row in content["rows"]] == ["ok", "ok", "unavailable"] * 2
    assert "median ms" in result.stdout
    assert "correctness gate" in result.stdout
    assert "error, fp32" in result.stdout
    assert "not installed" in result.stdout


def test_a_wrong_variant_fails_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sfastgn.bench.workloads.ERROR_BOUNDS", {"fp32": -1.0})
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
        "kernels", "--device", "cpu", "--shapes", "1x64x4x4,2x32x3x3", "--providers", "eager_nchw,sfastgn,apex", "--repeats", "1",
        "--json", str(path),
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    content = json.loads(path.read_text())
    assert content["kind"] == "kernels"
    assert {row["provider"] for row in content["rows"]} == {"copy", "eager_nchw", "sfastgn", "apex"}
    assert "summary" in content
    assert "1x64x4x4" in result.stdout
    assert "apex: unavailable" in result.stdout


SUITE_SHAPES = {"training": "2x32x3x5", "issue_28201": "2x32x3x5", "instance_norm": "2x3x2x5x4", "layer_norm": "6x9"}


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
    monkeypatch.setattr("sfastgn.bench.suites.GRADIENT_BOUNDS", {"fp16": -1.0})
    result = invoke(
        "kernels", "--suite", "training", "--device", "cpu", "--shapes", "2x32x3x5", "--providers", "eager_nchw"
    )
    assert result.exit_code == 1
    assert "wrong output: relative error of dx" in result.stdout


def test_the_default_suite_is_inference_as_it_was(tmp_path: Path) -> None:
    names = ("default", "inference")
    for name in names:
        chosen = ("--suite", name) if name == "inference" else ()
        invoke(
            "kernels", *chosen, "--device", "cpu", "--shapes", "1x64x4x4", "--providers", "sfastgn", "--repeats", "1",
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
    assert set(json.loads(path.read_text())) == {"unet", "vae"}


def test_info_names_every_variant_and_provider() -> None:
    from sfastgn.bench.providers import NAMES as PROVIDERS
    from sfastgn.bench.variants import NAMES as VARIANTS

    result = invoke("info", "--device", "cpu")
    assert result.exit_code == 0, result.output
    assert all(name in result.stdout for name in (*VARIANTS, *PROVIDERS, "torch", "GPU"))
