"""The timing scripts, run as a user runs them, with the tiny models on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts" / script), *arguments]
    # readline, which pytest imports, hands the terminal's width on to processes.
    environment = {**os.environ, "COLUMNS": "160"}
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, env=environment)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "model", "part", "variants"),
    [
        pytest.param("time_sd15.py", "tiny", "pipeline", "eager,sdfastgn", id="sd15"),
        pytest.param("time_sdxl.py", "tiny_xl", "pipeline", "eager,sdfastgn", id="sdxl"),
        pytest.param("time_vae.py", "tiny", "vae", "eager,channels_last,sdfastgn", id="vae"),
        pytest.param("time_training.py", "tiny_xl", "train", "eager,sdfastgn", id="training"),
        pytest.param("compare_stable_fast.py", "tiny", "pipeline", None, id="stable-fast"),
    ],
)
def test_script(script: str, model: str, part: str, variants: str | None, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    chosen = ["--variants", variants] if variants else []
    done = run(
        script, "--model", model, "--device", "cpu", "--steps", "2", "--size", "64", "--repeats", "1", "--json", str(path), *chosen
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = json.loads(path.read_text())["rows"]
    assert {row["part"] for row in rows} == {part}
    names = variants.split(",") if variants else ["eager", "sdfastgn", "stable_fast"]
    assert [row["variant"] for row in rows] == names
    assert [row["status"] for row in rows if row["variant"] != "stable_fast"] == ["ok"] * len(
        [n for n in names if n != "stable_fast"]
    )
    assert "correctness gate" in done.stdout


@pytest.mark.slow
def test_warm_up_script(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    done = run("time_warm_up.py", "--model", "tiny", "--device", "cpu", "--steps", "1", "--json", str(path))
    assert done.returncode == 0, done.stderr
    assert [row["status"] for row in json.loads(path.read_text())["rows"]] == ["ok"] * 3
    assert "second image" in done.stdout


@pytest.mark.parametrize(
    "script",
    [
        "time_sd15.py",
        "time_sdxl.py",
        "time_vae.py",
        "time_training.py",
        "time_warm_up.py",
        "compare_stable_fast.py",
    ],
)
def test_bad_input_is_one_line(script: str) -> None:
    done = run(script, "--size", "100")
    assert done.returncode == 2
    assert (
        done.stderr.strip()
        == f"{script}: --size: must be a positive multiple of 8 (pixels of a latent), got 100"
    )
