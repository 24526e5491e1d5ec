"""The digits experiment, tiny and on the CPU: what it reports, and that it notices wrong gradients."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import sdfastgn
from sdfastgn import cli
from sdfastgn.bench import digits, digits_report
from sdfastgn.bench.digits import Comparison, DigitsConfig, Run
from sdfastgn.patches.fusions import group_norm as group_norm_patch

CONFIG = DigitsConfig(steps=6, batch_size=4, size=8, width=8, dtype="fp32", device="cpu")
TINY = ("--device", "cpu", "--size", "8", "--width", "8", "--batch-size", "4", "--samples", "3")


def script(*arguments: str, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "argv", ["train_digits.py", *arguments])
    with pytest.raises(SystemExit) as caught:
        cli.main("doc", "train-digits")
    assert isinstance(caught.value.code, int)
    return caught.value.code


def trained(folder: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[int, dict[str, Any]]:
    path = folder / "out.json"
    code = script(*TINY, *arguments, "--output", str(folder), "--json", str(path), monkeypatch=monkeypatch)
    return code, json.loads(path.read_text())


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_both_learn_alike(dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, content = trained(tmp_path, monkeypatch, "--steps", "8", "--dtype", dtype, "--stock-repeat")
    assert code == 0
    assert content["kind"] == "train_digits"
    rows = {row["name"]: row for row in content["rows"]}
    assert list(rows) == ["stock", "sdfastgn", "stock, other batches"]
    for row in rows.values():
        assert len(row["losses"]) == 8
        assert row["steps_per_s"] == pytest.approx(1e3 / row["step_ms"])
        assert row["peak_mib"] is row["step_mib"] is None  # PyTorch counts memory on CUDA only
    ours, noise = content["comparisons"]["sdfastgn"], content["comparisons"]["stock, other batches"]
    assert 0 < ours["smoothed_max"] < (1e-5 if dtype == "fp32" else 1e-2)
    assert ours["smoothed_mean"] <= ours["smoothed_max"] < noise["smoothed_max"]
    if dtype == "fp32":
        assert len(ours["steps"]) == 8
        assert ours["step_max"] == max(ours["steps"]) < 1e-5
    assert noise["steps"] is None
    assert content["verdict"]["reasons"] == []
    assert content["verdict"]["curve_max_bound"] == noise["smoothed_max"]
    assert 0 < content["verdict"]["gradient_error"] <= content["verdict"]["gradient_bound"]


def test_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, _ = trained(tmp_path, monkeypatch, "--steps", "2")
    assert code == 0
    samples = np.asarray(Image.open(tmp_path / "samples.png"))
    assert samples.shape[0] * 3 == samples.shape[1]  # three digits in one row
    curves = np.asarray(Image.open(tmp_path / "losses.png"))
    assert all(len(np.unique(picture)) > 20 for picture in (samples, curves))


@pytest.mark.parametrize("seconds", [0.0, 1e6], ids=["each-step", "first-and-last"])
def test_steps_are_counted_on_standard_error(
    seconds: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sdfastgn.bench.terminal.LINE_S", seconds)
    trained(tmp_path, monkeypatch, "--steps", "4", "--stock-repeat")
    steps = (1, 2, 3, 4) if seconds == 0 else (1, 4)
    names = ("stock", "sdfastgn", "stock, other batches")
    shown = capsys.readouterr()
    lines = [line for line in shown.err.splitlines() if ": step " in line]
    assert lines == [f"{name}: step {step} of 4" for name in names for step in steps]
    assert ": step " not in shown.out


class _Scaled(torch.autograd.Function):
    """Its own input, and a gradient a tenth too small."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
        return dy * 0.9


def test_wrong_gradients_are_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def scaled(*args: Any, **kwargs: Any) -> torch.Tensor:
        return _Scaled.apply(sdfastgn.group_norm(*args, **kwargs))

    monkeypatch.setattr(group_norm_patch, "group_norm", scaled)
    code, content = trained(tmp_path, monkeypatch, "--steps", "4")
    assert code == 1
    assert any("first gradient's error" in reason for reason in content["verdict"]["reasons"])
    assert content["comparisons"]["sdfastgn"]["step_max"] > 1e-3  # equal batches: no noise covers it
    assert content["comparisons"]["sdfastgn"]["steps"][0] < 1e-5  # and the forward was right
    assert "DISAGREES" in capsys.readouterr().out


# ---- the parts


def of_losses(losses: list[float], data_seed: int = 0) -> Run:
    return Run("run", data_seed, losses, 1.0, 1e3, None, None)


def test_comparison_of_curves() -> None:
    config = dataclasses.replace(CONFIG, steps=60)
    reference = [1.0 + step / 60 for step in range(60)]
    found = digits.compare(config, of_losses([2 * x for x in reference]), of_losses(reference))
    assert found.window == 3
    assert (found.smoothed_max, found.smoothed_mean, found.step_max) == (pytest.approx(1),) * 3
    assert digits.compare(config, of_losses(reference, 1), of_losses(reference)).steps is None
    assert digits.compare(config, of_losses([math.nan] * 60), of_losses(reference)).smoothed_max == math.inf


GOOD = Comparison(1, 0.01, 0.005)


@pytest.mark.parametrize(
    ("gradient", "patched", "yardstick", "words"),
    [
        pytest.param((1e-6, 1e-3), GOOD, None, [], id="good"),
        pytest.param((1e-6, 1e-3), GOOD, Comparison(1, 0.02, 0.006), [], id="good-by-the-yardstick"),
        pytest.param((2e-3, 1e-3), GOOD, None, ["gradient"], id="gradient"),
        pytest.param((math.nan, 1e-3), GOOD, None, ["gradient"], id="gradient-nan"),
        pytest.param((1e-6, 1e-3), Comparison(1, 0.5, 0.5), None, ["largest"], id="curve"),
        pytest.param((1e-6, 1e-3), GOOD, Comparison(1, 0.02, 0.004), ["mean"], id="mean-above-the-yardstick"),
        pytest.param(
            (1e-6, 1e-3), GOOD, Comparison(1, math.inf, math.inf), ["largest", "mean"], id="no-yardstick"
        ),
    ],
)
def test_verdict(
    gradient: tuple[float, float], patched: Comparison, yardstick: Comparison | None, words: list[str]
) -> None:
    verdict = digits_report.judge(CONFIG, gradient, patched, yardstick)
    assert len(verdict.reasons) == len(words)
    assert all(word in reason for word, reason in zip(words, verdict.reasons, strict=True))


@pytest.mark.parametrize("size", digits.SIZES)
def test_data(size: int) -> None:
    data = digits.load_images(size, torch.device("cpu"))
    assert data.shape == (1797, 1, size, size)
    assert -1 <= data.min() < -0.9
    assert 0.9 < data.max() <= 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(("--steps", "0"), "--steps: must be a positive whole number, got 0", id="steps"),
        pytest.param(
            ("--batch-size", "-1"), "--batch-size: must be a positive whole number, got -1", id="batch"
        ),
        pytest.param(("--size", "9"), "--size: unknown value '9'; choose from 8, 16, 32", id="size"),
        pytest.param(("--width", "12"), "--width: must be a positive multiple of 8, got 12", id="width"),
        pytest.param(
            ("--dtype", "fp16"), "--dtype: unknown value 'fp16'; choose from fp32, bf16", id="dtype"
        ),
        pytest.param(("--samples", "0"), "--samples: must be a positive whole number, got 0", id="samples"),
        pytest.param(("--output", __file__), f"--output: {__file__!r} is not a folder", id="output"),
        pytest.param(
            ("--output", "/proc/x"), "--output: cannot write a file at '/proc/x/losses.png': ", id="proc"
        ),
        pytest.param(
            ("--json", "/proc/x.json"), "--json: cannot write a file at '/proc/x.json': ", id="json"
        ),
        pytest.param(("--device", "tpu"), "--device: cannot use 'tpu'", id="device"),
    ],
)
def test_bad_input_is_one_line(
    arguments: tuple[str, ...],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert script(*arguments, monkeypatch=monkeypatch) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"train_digits.py: {message}")
    assert error.count("\n") == 1


def test_the_script_is_this_command() -> None:
    path = Path(__file__).resolve().parents[1] / "scripts" / "train_digits.py"
    done = subprocess.run(
        [sys.executable, str(path), "--steps", "0"], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 2
    assert done.stderr.strip() == "train_digits.py: --steps: must be a positive whole number, got 0"


def test_without_scikit_learn(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    assert script(*TINY, monkeypatch=monkeypatch) == 2
    assert "come with scikit-learn, which is not installed" in capsys.readouterr().err


@pytest.mark.gpu
def test_memory_is_counted_on_the_gpu() -> None:
    config = dataclasses.replace(CONFIG, device="cuda")
    data = digits.load_images(8, config.torch_device)
    run = digits.train(config, digits.build_model(config), data, name="stock", data_seed=0)
    assert run.peak_mib is not None
    assert run.step_mib is not None
    assert 0 < run.step_mib < run.peak_mib
