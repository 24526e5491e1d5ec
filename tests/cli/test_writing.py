"""A file or an output that cannot be written is one line with its path, also if it fails only at the end."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

from sdfastgn.cli import digits
from sdfastgn.cli.digits import PICTURE
from sdfastgn.models.pipelines import build_pipeline
from tests.bench.tables.cases import row, save
from tests.command_line import ROOT, exit_code

FULL = "No space left on device"
BENCH = "bench --part vae --variants eager --device cpu --repeats 1"
KERNELS = "kernels --shapes 1x32x1x1 --providers copy --device cpu --repeats 1"
# Command -> the file that it cannot write. Every path is a link to /dev/full.
COMMANDS = {
    f"{BENCH} --json full": "full",
    f"{BENCH} --html full": "full",
    f"{BENCH} --profile --plot full.png": "full.png",
    f"{KERNELS} --json full": "full",
    f"{KERNELS} --plot full.png": "full.png",
    "report a.json --html full": "full",
    "inspect tiny --json full": "full",
    "plan tiny --json full": "full",
    "demo --output out": f"out/{PICTURE}",
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "out").mkdir()
    for name in ("full", "full.png", f"out/{PICTURE}"):
        (tmp_path / name).symlink_to("/dev/full")
    save(tmp_path, "a.json", "end_to_end", [row("eager", 25.0)])
    monkeypatch.setattr(digits, "STEPS", 1)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.drawn(1)
@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(("command", "path"), COMMANDS.items(), ids=COMMANDS)
def test_a_full_disk_is_one_line(
    command: str, path: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(monkeypatch, "sdfastgn", *command.split()) == 2
    assert capsys.readouterr().err.endswith(f"sdfastgn: cannot write '{path}': {FULL}\n")


def test_the_images_of_an_earlier_run_that_cannot_be_removed(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "a.images").mkdir()
    assert exit_code(monkeypatch, "sdfastgn", *BENCH.split(), "--json", "a.json") == 2
    assert capsys.readouterr().err.startswith("sdfastgn: cannot write 'a.images': ")


def test_a_full_disk_ends_generate_at_the_first_image(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    build_pipeline("tiny", dtype=torch.float32, device="cpu").save_pretrained(here / "model")
    (here / "prompts").write_text("a cat\na dog\n")
    tried = []

    def save(self: Image.Image, path: Path, **_: object) -> None:
        tried.append(path)
        raise OSError(errno.ENOSPC, FULL)

    monkeypatch.setattr(Image.Image, "save", save)
    command = "generate --model model --prompts prompts --out new --steps 1 --device cpu"
    assert exit_code(monkeypatch, "sdfastgn", *command.split()) == 2
    assert capsys.readouterr().err.endswith(f"sdfastgn: cannot write 'new/00001.png': {FULL}\n")
    assert len(tried) == 1


@pytest.mark.drawn(1)
@pytest.mark.parametrize("unbuffered", ["1", ""])
@pytest.mark.parametrize("command", ["--version", "bench -h"])
def test_an_output_that_is_full_is_one_line(command: str, unbuffered: str) -> None:
    program = [sys.executable, "-m", "sdfastgn", *command.split()]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            program,
            cwd=ROOT,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert (done.returncode, done.stderr) == (2, f"sdfastgn: cannot write to standard output: {FULL}\n")


@pytest.mark.parametrize("command", ["--version", "bench -h"])
def test_a_reader_that_has_gone_ends_it_without_a_word(command: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    program = [sys.executable, "-m", "sdfastgn", *command.split()]
    done = subprocess.run(program, cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")
