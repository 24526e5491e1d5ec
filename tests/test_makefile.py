"""``make bench`` makes every file of results that is committed; ``make test-comfyui`` may skip."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "h200"


def run_make(folder: Path, target: str, *variables: str) -> tuple[str, str]:
    """What a target prints, and the programs that it starts, which do nothing."""
    bin_folder, log = folder / "venv" / "bin", folder / "log"
    bin_folder.mkdir(parents=True)
    for name in ("python", "sdfastgn"):
        (bin_folder / name).write_text(f'#!/bin/bash\nprintf "%q " "$@" >> {log}; echo >> {log}\n')
        (bin_folder / name).chmod(0o755)
    (folder / "venv" / ".installed").touch()  # newer than what it is made of
    log.touch()
    command = ["make", target, f"VENV={folder / 'venv'}", *variables]
    # What the tests' own make was called with is not for this one.
    environment = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout, log.read_text()


def calls_of_bench(folder: Path) -> list[list[str]]:
    """The arguments of each command of the target that writes JSON."""
    _, log = run_make(folder, "bench", f"RESULTS={folder}")
    return [call for line in log.splitlines() if "--json" in (call := shlex.split(line))]


def files_of(call: list[str]) -> set[str]:
    """Names of what a call writes: one file for each of several dtypes."""
    path = Path(call[call.index("--json") + 1])
    dtypes = call[call.index("--dtype") + 1].split(",") if "--dtype" in call else []
    return {f"{path.stem}_{dtype}.json" for dtype in dtypes} if len(dtypes) > 1 else {path.name}


def test_bench_makes_every_committed_file(tmp_path: Path) -> None:
    made = [name for call in calls_of_bench(tmp_path) for name in files_of(call)]
    assert len(made) == len(set(made))
    # Others' published times are nobody's to make.
    committed = {path.name for path in RESULTS.glob("*.json") if not path.stem.endswith("_quoted")}
    assert committed - set(made) == set()


def test_the_training_script_names_the_file_of_the_target() -> None:
    text = (ROOT / "scripts" / "time_training.py").read_text(encoding="utf-8")
    assert "--json benchmarks/h200/train_sdxl.json" in text
    assert "/train_sdxl.json" in (ROOT / "Makefile").read_text(encoding="utf-8")


def test_comfyui_is_tested_where_it_is(tmp_path: Path) -> None:
    for name, checkout in {"none": "", "wrong": str(tmp_path / "nowhere")}.items():
        printed, ran = run_make(tmp_path / name, "test-comfyui", f"COMFYUI={checkout}")
        assert "skipped, no ComfyUI" in printed  # below another make it says more
        assert ran == ""
    (tmp_path / "ComfyUI" / "comfy").mkdir(parents=True)
    asked = "torch\ntorchsde\ntorchvision\neinops>=0.8\nkornia>=0.7.1\n"
    (tmp_path / "ComfyUI" / "requirements.txt").write_text(asked)
    printed, ran = run_make(tmp_path / "there", "test-comfyui", f"COMFYUI={tmp_path / 'ComfyUI'}")
    assert "skipped" not in printed
    assert "-m pytest tests/patches/comfyui" in ran
    installed = (tmp_path / "there" / "venv" / "comfyui.txt").read_text()
    assert installed == "torchsde\neinops>=0.8\n"  # torchvision may have no build for this torch
