"""The roofline: a PNG from rows, and from a committed result."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from sdfastgn.bench.documents import OK, UNAVAILABLE
from sdfastgn.bench.kernels.cells import KernelRow
from sdfastgn.bench.tables import plots

ROWS = [
    KernelRow((2, 320, 64, 64), "copy", OK, "", 2.0, 3.0, 5000.0, 3000.0),
    KernelRow((2, 320, 64, 64), "sdfastgn", OK, "", 6.0, 9.0, 1700.0, 1000.0),
    KernelRow((2, 640, 64, 64), "sdfastgn", OK, "", 9.0, 12.0, 2300.0, 1500.0),
    KernelRow((2, 320, 64, 64), "apex", UNAVAILABLE, "not installed"),
    KernelRow((2, 320, 64, 64), "add", OK, "", 3.0, 4.0, 5000.0, 4000.0),
]


def is_png(path: Path) -> bool:
    return path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_roofline_is_a_picture(tmp_path: Path) -> None:
    path = tmp_path / "new" / "roofline.png"
    plots.roofline(ROWS, path, "fp16")
    assert is_png(path)


def test_the_pictures_size_is_in_megabytes_moved() -> None:
    assert plots._megabytes(ROWS[0]) == pytest.approx(10.0)


def test_from_a_committed_result(tmp_path: Path) -> None:
    environment = {"gpu": "NVIDIA H200", "packages": {}, "date": "2026-11-21"}
    content = {"kind": "kernels", "environment": environment, "config": {"dtype": "fp16"}}
    (tmp_path / "kernels.json").write_text(json.dumps({**content, "rows": [asdict(row) for row in ROWS]}))
    assert plots.main([str(tmp_path / "kernels.json"), str(tmp_path / "out.png")]) == 0
    assert is_png(tmp_path / "out.png")


def test_wrong_use_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert plots.main([]) == 2
    assert "RESULT.json" in capsys.readouterr().err


def test_without_matplotlib_there_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    assert "matplotlib" in (plots.plot_reason() or "")
