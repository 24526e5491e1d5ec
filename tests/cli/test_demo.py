"""The demo does what it says and notices when it does not."""

from __future__ import annotations

import io
import re

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

import sdfastgn
from sdfastgn.cli import digits, digits_pipeline
from sdfastgn.cli.digits import CELL, DIGITS, LABEL_HEIGHT, LABEL_WIDTH
from tests.command_line import ROOT, invoke
from tests.pages import BLOCKS


@pytest.fixture(autouse=True)
def fewer_steps(monkeypatch):
    monkeypatch.setattr(digits, "STEPS", 1)


def run(tmp_path) -> tuple[int, str]:
    console = Console(file=io.StringIO(), width=120)
    return digits.run_demo(tmp_path, console), console.file.getvalue()


def _without_counts(text: str) -> str:
    return re.sub(r"\d+ calls? without", "N calls without", text)


@pytest.mark.slow
def test_it_shows_the_main_job(tmp_path):
    code, text = run(tmp_path)
    assert code == 0
    for expected in ("same images", "bit-identical", "parts fused", "0 skipped", "runs in: ", " of 10"):
        assert expected in text
    assert ("No kernel runs on this machine" in text) == (not digits.torch.cuda.is_available())
    if not digits.torch.cuda.is_available():
        [shown] = [b.code for b in BLOCKS if (b.page, b.language) == ("docs/getting-started.md", "text")]
        assert _without_counts(shown) in _without_counts(text)  # the demo's own has more steps
    size = (LABEL_WIDTH + len(DIGITS) * CELL, LABEL_HEIGHT + 3 * CELL)
    assert Image.open(tmp_path / digits.PICTURE).size == size


def test_outside_of_a_checkout_it_says_in_one_line_where_its_pipeline_is(tmp_path, monkeypatch):
    monkeypatch.setattr(digits_pipeline, "FOLDER", tmp_path / "installed")
    monkeypatch.chdir(tmp_path)
    result = invoke("demo", "--output", str(tmp_path / "out"))
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    places = f"'{tmp_path}/installed' or '{tmp_path}/scripts/digits'"
    assert result.stderr.startswith(f"sdfastgn: demo: no trained pipeline at {places}")
    assert "in a checkout of sdfastgn's repository" in result.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_an_installed_package_finds_the_pipeline_of_the_checkout_it_runs_in(tmp_path, monkeypatch):
    monkeypatch.setattr(digits_pipeline, "FOLDER", tmp_path / "installed")
    monkeypatch.chdir(ROOT)
    result = invoke("demo", "--output", str(tmp_path / "out"))
    assert result.exit_code == 0, result.output
    assert f"   {ROOT / 'scripts' / 'digits'}\n" in result.stdout
    assert (tmp_path / "out" / digits.PICTURE).is_file()


def broken(pipe):
    pipe.vae.decoder.conv_out.weight.data.mul_(1.1)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "stand_in"), [("restore", lambda pipe: pipe), ("optimize", broken)])
def test_it_fails_when_images_or_the_restored_pipeline_differ(name, stand_in, tmp_path, monkeypatch):
    monkeypatch.setattr(sdfastgn, name, stand_in)
    code, text = run(tmp_path)
    assert code == 1
    assert "DIFFERS" in text


def test_the_difference_is_amplified():
    first = np.full((1, 8, 8, 3), 0.5)
    second = first + 0.004
    picture = np.asarray(digits.grid(["a handwritten one"], {"first": first, "second": second}))
    row = [picture[LABEL_HEIGHT + (2 * i + 1) * CELL // 2, LABEL_WIDTH + CELL // 2, 0] for i in range(3)]
    assert row == [128, 129, 102]  # 0.004 times 100
