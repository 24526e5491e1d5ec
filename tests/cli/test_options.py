"""A try at writing leaves no trace, and a folder of results is made only where its place exists."""

from __future__ import annotations

import os
import select
from pathlib import Path

import pytest

from sdfastgn.cli import checks
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


def test_a_folder_of_results_is_made_where_it_is_named(tmp_path: Path) -> None:
    path = checks.folder("--out", str(tmp_path / "out"))
    assert not path.exists()
    checks.made_folder("--out", path, "a.png")
    checks.made_folder("--out", path, "a.png")
    assert path.is_dir()
    assert not list(path.iterdir())
