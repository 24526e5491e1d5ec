"""The demo does what it says and notices when it does not."""

from __future__ import annotations

import io

import pytest
from PIL import Image
from rich.console import Console

import sdfastgn
from sdfastgn.bench import demo


@pytest.fixture(autouse=True)
def smaller(monkeypatch):
    monkeypatch.setattr(demo, "SIZE", 64)
    monkeypatch.setattr(demo, "STEPS", 1)


def run(tmp_path) -> tuple[int, str]:
    console = Console(file=io.StringIO(), width=120)
    return demo.run_demo(tmp_path, console), console.file.getvalue()


def test_it_shows_the_main_job(tmp_path):
    code, text = run(tmp_path)
    assert code == 0
    for expected in ("same image", "bit-identical", "parts fused", "0 skipped", "runs in: "):
        assert expected in text
    assert all(Image.open(tmp_path / name).size == (192, 192) for name in ("stock.png", "optimized.png"))


def test_it_fails_when_restore_does_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(sdfastgn, "restore", lambda pipe: pipe)
    code, text = run(tmp_path)
    assert code == 1
    assert "DIFFERS" in text
