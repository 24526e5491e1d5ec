"""The digits experiment, tiny and on the CPU: what it says, and that it notices wrong gradients."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import sdfastgn
from sdfastgn.bench import digits
from sdfastgn.patches.fusions import group_norm as group_norm_patch
from tests.command_line import exit_code

TINY = ("--device", "cpu", "--batch-size", "4")


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digits, "WIDTH", 8)


def trained(monkeypatch: pytest.MonkeyPatch, path: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    code = exit_code(monkeypatch, "train_digits.py", *TINY, *arguments, "--json", str(path))
    return code, json.loads(path.read_text())


def test_both_learn_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, content = trained(monkeypatch, tmp_path / "out.json", "--steps", "4")
    assert (code, content["kind"], content["reasons"]) == (0, "train_digits", [])
    stock, ours = content["rows"]
    assert (stock["name"], ours["name"]) == ("stock", "sdfastgn")
    assert len(stock["losses"]) == len(ours["losses"]) == 4
    assert ours["losses"] == pytest.approx(stock["losses"], rel=1e-5)
    assert "learns as the stock one does" in capsys.readouterr().out


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
    code, content = trained(monkeypatch, tmp_path / "out.json", "--steps", "2")
    assert code == 1
    assert "first gradient's relative error" in content["reasons"][0]
    assert "DISAGREES" in capsys.readouterr().out


def test_curves_are_compared_smoothed() -> None:
    reference = [1.0 + step / 60 for step in range(60)]
    assert digits.curve_difference([2 * x for x in reference], reference) == pytest.approx(1)
    # One step in a window of three.
    assert digits.curve_difference([1.3, *[1.0] * 59], [1.0] * 60) == pytest.approx(0.1)
    assert math.isnan(digits.curve_difference([math.nan] * 60, reference))


def test_data() -> None:
    data = digits.load_images(torch.device("cpu"))
    assert data.shape == (1797, 1, digits.SIZE, digits.SIZE)
    assert -1 <= data.min() < -0.9
    assert 0.9 < data.max() <= 1


BAD_INPUT = {
    "--steps 0": "--steps: must be a positive whole number, got 0",
    "--batch-size -1": "--batch-size: must be a positive whole number, got -1",
    "--json /proc/x.json": "--json: cannot write a file at '/proc/x.json': ",
}


@pytest.mark.parametrize(("arguments", "message"), BAD_INPUT.items(), ids=BAD_INPUT)
def test_bad_input_is_one_line(
    arguments: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(monkeypatch, "train_digits.py", *arguments.split()) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"train_digits.py: {message}")
    assert error.count("\n") == 1


def test_without_scikit_learn(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    assert exit_code(monkeypatch, "train_digits.py", *TINY) == 2
    assert "come with scikit-learn, which is not installed" in capsys.readouterr().err
