"""A try at writing leaves no trace, neither of a file nor of a folder."""

from __future__ import annotations

import os
import select
from pathlib import Path

import pytest

from sdfastgn.cli import checks
from sdfastgn.program import OptionError
from tests.command_line import state_of


@pytest.mark.parametrize("name", ["new", "old", "link", "pipe"])
def test_a_try_at_writing_leaves_no_trace(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    (tmp_path / "old").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "new")
    os.mkfifo(tmp_path / "pipe")
    # Without a reader, opening the pipe would wait for one.
    reader, was_opened = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK), select.poll()
    was_opened.register(reader)
    before = state_of(tmp_path)
    assert checks.file_path("--json", path) == path
    assert state_of(tmp_path) == before
    assert not was_opened.poll(0)  # a reader would take it for the end
    os.close(reader)


@pytest.mark.parametrize("name", ["new", "old", "link"])
def test_a_try_at_a_folder_leaves_no_trace(name: str, tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "old")
    before = state_of(tmp_path)
    path = checks.folder("--out", str(tmp_path / name))
    checks.folder_file("--out", path, "a.png")
    assert state_of(tmp_path) == before


@pytest.mark.parametrize("name", ["file", "link"])
def test_a_folder_cannot_be_where_something_else_is(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    with pytest.raises(OptionError, match=r"--out: cannot make a folder at .*: File exists"):
        checks.folder_file("--out", tmp_path / name, "a.png")
