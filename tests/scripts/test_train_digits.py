"""The digits experiment, tiny and on the CPU: both learn alike, and wrong gradients are noticed."""

from __future__ import annotations

import math
import runpy
from typing import Any

import pytest
import torch

import sdfastgn
from sdfastgn.patches.layers import group_norm as group_norm_patch
from tests.command_line import ROOT, exit_code

pytestmark = pytest.mark.fused_on_cpu

pytest.importorskip("sklearn")
TINY = ("--device", "cpu", "--batch-size", "4", "--width", "8", "--steps", "4")


@pytest.mark.slow
def test_both_learn_alike(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(monkeypatch, "train_digits.py", *TINY) == 0
    assert "learns as the stock one does" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["--steps", "--batch-size"])
def test_no_steps_and_no_images_are_refused(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(monkeypatch, "train_digits.py", *TINY, name, "0") == 2
    assert "--steps and --batch-size: must be positive whole numbers, got " in capsys.readouterr().err


class _Scaled(torch.autograd.Function):
    """Its own input, and a gradient a tenth too small."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
        return dy * 0.9


@pytest.mark.slow
def test_wrong_gradients_are_noticed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def scaled(*args: Any, **kwargs: Any) -> torch.Tensor:
        return _Scaled.apply(sdfastgn.group_norm(*args, **kwargs))

    monkeypatch.setattr(group_norm_patch, "group_norm", scaled)
    assert exit_code(monkeypatch, "train_digits.py", *TINY) == 1
    assert "DISAGREES" in capsys.readouterr().out


def test_curves_are_compared_smoothed() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "train_digits.py"))
    difference, reference = script["curve_difference"], [1.0 + step / 60 for step in range(60)]
    assert difference([2 * x for x in reference], reference) == pytest.approx(1)
    # One step in a window of three.
    assert difference([1.3, *[1.0] * 59], [1.0] * 60) == pytest.approx(0.1)
    assert math.isnan(difference([math.nan] * 60, reference))
