"""Options are checked before any work; a try at writing leaves no trace."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch

from sdfastgn.cli import checks
from sdfastgn.models.pipelines import build_pipeline
from sdfastgn.program import OptionError
from tests.command_line import invoke


def test_a_new_file_is_not_made(tmp_path):
    path = tmp_path / "out.json"
    assert checks.file_path("--json", path) == path
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "command",
    [
        "bench --json new/sub/a.json",
        "bench --html new/sub/a.html",
        "bench --profile --plot new/sub/a.png",
        "kernels --json new/sub/a.json",
        "kernels --plot new/sub/a.png",
        "inspect tiny --json new/sub/a.json",
        "report b.json --html new/sub/a.html",
        "demo --output new/sub/folder",
        "generate --model here --prompts b.json --out new/sub/folder",
        "bench --json link.json",
    ],
)
def test_a_folder_that_is_not_there_is_named_and_not_made(command, tmp_path, monkeypatch):
    build_pipeline("tiny", dtype=torch.float32, device="cpu").save_pretrained(tmp_path / "here")
    monkeypatch.chdir(tmp_path)
    Path("b.json").write_text("a cat")
    Path("link.json").symlink_to("new/sub/a.json")
    before = sorted(tmp_path.iterdir())
    result = invoke(*command.split())
    missing = f"there is no folder {str(tmp_path / 'new' / 'sub')!r}; make it first"
    assert (result.exit_code, result.stdout) == (2, "")
    assert re.fullmatch(rf"sdfastgn: --\w+: {re.escape(missing)}\n", result.stderr)
    assert sorted(tmp_path.iterdir()) == before


def test_a_folder_of_results_is_made_where_it_is_named(tmp_path):
    path = checks.folder("--out", str(tmp_path / "out"))
    assert not path.exists()
    checks.made_folder("--out", path, "a.png")
    checks.made_folder("--out", path, "a.png")
    assert path.is_dir()
    assert not list(path.iterdir())


def test_an_old_file_is_left_alone(tmp_path):
    path = tmp_path / "out.json"
    path.write_text("old")
    os.utime(path, (1, 1))
    checks.file_path("--json", path)
    assert (path.read_text(), path.stat().st_mtime) == ("old", 1)


def test_a_link_that_leads_nowhere_yet_stays_one(tmp_path):
    link = tmp_path / "link.json"
    link.symlink_to(tmp_path / "out.json")
    checks.file_path("--json", link)
    assert link.is_symlink()
    assert not link.exists()


def test_a_pipe_is_not_opened(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    checks.file_path("--json", pipe)  # opening it would wait for a reader


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("bench --json a --html a", "--html: 'a' is the file of --json too; give another path"),
        ("bench --json a --html ../here/a", "--html: '../here/a' is the file of --json too"),
        ("bench --json a.png --profile --plot link.png", "--plot: 'link.png' is the file of --json too"),
        ("bench --json a.json --html a.images", "--html: 'a.images' is the file of --json's images too"),
        ("kernels --json a.png --plot a.png", "--plot: 'a.png' is the file of --json too"),
        ("report b.json --html ./b.json", "--html: 'b.json' is the file of RESULTS too"),
        ("report c.json b.json --html b.images", "--html: 'b.images' is the file of RESULTS too"),
    ],
)
def test_no_file_is_written_over_another(command, message, tmp_path, monkeypatch):
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    (here / "link.png").symlink_to("a.png")
    for name in ("b.json", "b.images"):
        (here / name).write_text("old")
    result = invoke(*command.split())
    assert result.exit_code == 2
    assert result.output.startswith(f"sdfastgn: {message}")
    assert {path.name for path in here.iterdir()} == {"link.png", "b.json", "b.images"}
    assert (here / "b.json").read_text() == (here / "b.images").read_text() == "old"


@pytest.mark.parametrize(
    ("path", "why"),
    [
        pytest.param("/proc/x.json", "No such file or directory", id="no-new-files"),
        pytest.param("/proc/version", ".+", id="read-only"),
        pytest.param("/", "Is a directory", id="folder"),
        pytest.param(f"{__file__}/out.json", "File exists|Not a directory", id="parent-is-a-file"),
        pytest.param(f"/tmp/{'x' * 300}.json", "File name too long", id="long-name"),
    ],
)
def test_no_place_for_a_file(path, why):
    with pytest.raises(OptionError, match=rf"^--json: cannot write a file at '{path}': ({why})$"):
        checks.file_path("--json", Path(path))
