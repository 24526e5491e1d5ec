"""``make bench`` runs the one command of the measurements; ``make test-comfyui`` may skip."""

from __future__ import annotations

import itertools
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import tomllib
from packaging.requirements import Requirement

from tests.kernels.gpus import SHARED_KIB

ROOT = Path(__file__).resolve().parents[1]


def run_make(folder: Path, target: str, *variables: str) -> tuple[str, str]:
    """What a target prints, and the programs that it starts, which do nothing."""
    bin_folder, log = folder / "venv" / "bin", folder / "log"
    bin_folder.mkdir(parents=True)
    for name in ("python", "sdfastgn", "mkdocs"):
        (bin_folder / name).write_text(f'#!/bin/bash\nprintf "%q " "$@" >> {log}; echo >> {log}\n')
        (bin_folder / name).chmod(0o755)
    if target != "docs":
        (folder / "venv" / ".installed").touch()  # newer than what it is made of
    log.touch()
    command = ["make", target, f"VENV={folder / 'venv'}", *variables]
    # What the tests' own make was called with is not for this one.
    environment = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout, log.read_text()


def test_test_compile_collects_each_file_with_its_marker() -> None:
    marker = "mark." + "every_gpu"  # in two parts, so that this file does not count
    marked = {
        path.relative_to(ROOT).as_posix() for path in ROOT.glob("tests/**/*.py") if marker in path.read_text()
    }
    assert marked == {"tests/kernels/test_compile_only.py"}
    assert all(path in (ROOT / "Makefile").read_text() for path in marked)


def test_generations_that_ci_leaves_out_are_compiled_beside_it() -> None:
    chosen = set(re.findall(r"(?:sm_|gfx)\d+", (ROOT / ".ci" / "run").read_text()))
    assert chosen < SHARED_KIB.keys()
    assert "- run: make test-compile\n" in (ROOT / ".github" / "workflows" / "ci.yml").read_text()


def test_each_test_is_in_a_target(tmp_path: Path) -> None:
    """Whatever its markers are, but many_programs, whose files have a target."""
    chosen = {}
    for target in ("test", "test-slow", "test-compile", "test-gpu"):
        words = shlex.split(run_make(tmp_path / target, target)[1])
        chosen[target] = words[words.index("-m", words.index("pytest")) + 1]
    markers = ("gpu", "every_gpu", "slow")
    for values in itertools.product((False, True), repeat=len(markers)):
        given = {**dict(zip(markers, values, strict=True)), "many_programs": False}
        assert any(eval(expression, {}, given) for expression in chosen.values()), given
    marker = "mark." + "many_programs"
    files = {p.relative_to(ROOT).as_posix() for p in ROOT.glob("tests/**/*.py") if marker in p.read_text()}
    assert files == set(re.findall(r"\S+\.py", run_make(tmp_path / "test-programs", "test-programs")[1]))


def test_bench_runs_the_list_of_measurements(tmp_path: Path) -> None:
    _, log = run_make(tmp_path, "bench", "BENCH_ARGS=--resume --budget 560")
    assert log.split() == [
        "-m",
        "scripts.publish.renew",
        "--archive",
        "build/renewal.tar.gz",
        "--resume",
        "--budget",
        "560",
    ]


def test_docs_are_built_without_torch(tmp_path: Path) -> None:
    """The extra ``docs`` is installed, but not the package, which needs torch."""
    printed, ran = run_make(tmp_path, "docs", f"DOCS_VENV={tmp_path / 'venv'}", f"PYTHON={sys.executable}")
    assert ran.splitlines()[-1].split() == ["build"]
    [install] = [line.split() for line in ran.splitlines() if "install" in line]
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    asked = tomllib.loads(text)["project"]["optional-dependencies"]["docs"]
    options = ["-m", "pip", "install", "--quiet", "-c", "constraints.txt"]
    assert [word.replace("\\", "") for word in install] == [*options, *asked]
    assert {Requirement(word).name for word in asked} == {"mkdocs-material", "mkdocstrings", "ruff"}
    assert "open build/site/index.html" in printed.splitlines()  # below another make it says more


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
