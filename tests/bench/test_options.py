"""Options are checked before any work; a try at writing leaves no trace."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sdfastgn.bench import options
from sdfastgn.bench.options import OptionError
from tests.command_line import invoke


def test_a_new_file_is_not_made_but_its_folder_is(tmp_path):
    path = tmp_path / "new" / "folder" / "out.json"
    assert options.file_path("--json", path) == path
    assert path.parent.is_dir()
    assert not list(path.parent.iterdir())


def test_an_old_file_is_left_alone(tmp_path):
    path = tmp_path / "out.json"
    path.write_text("old")
    os.utime(path, (1, 1))
    options.file_path("--json", path)
    assert (path.read_text(), path.stat().st_mtime) == ("old", 1)


def test_a_link_that_leads_nowhere_yet_stays_one(tmp_path):
    link = tmp_path / "link.json"
    link.symlink_to(tmp_path / "folder" / "out.json")
    options.file_path("--json", link)
    assert link.is_symlink()
    assert not link.exists()


def test_a_pipe_is_not_opened(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    options.file_path("--json", pipe)  # opening it would wait for a reader


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
        pytest.param("/proc/x/y.json", "No such file or directory", id="no-new-folders"),
        pytest.param("/proc/version", ".+", id="read-only"),
        pytest.param("/", "Is a directory", id="folder"),
        pytest.param(f"{__file__}/out.json", "File exists|Not a directory", id="parent-is-a-file"),
        pytest.param(f"/tmp/{'x' * 300}.json", "File name too long", id="long-name"),
    ],
)
def test_no_place_for_a_file(path, why):
    with pytest.raises(OptionError, match=rf"^--json: cannot write a file at '{path}': ({why})$"):
        options.file_path("--json", Path(path))
