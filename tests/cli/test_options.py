"""Names of dtypes, and that a try at writing leaves no trace, neither of a file nor of a folder."""

from __future__ import annotations

import os
import select
from pathlib import Path

import pytest

from sdfastgn.cli import bench_options, checks, kernel_options, loading, prompts
from sdfastgn.models.configurations import DTYPES
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


@pytest.mark.parametrize(("short", "full"), DTYPES.items())
def test_a_dtype_has_its_short_name_and_torchs(short: str, full: str, tmp_path: Path) -> None:
    (tmp_path / "prompts").write_text("a cat")
    (tmp_path / "unet").mkdir()
    (tmp_path / "unet" / "config.json").write_text("{}")
    settings = {
        "negative_prompt": None,
        "width": None,
        "height": None,
        "steps": 1,
        "guidance": 1.0,
        "seed": 0,
    }
    files = {"model": str(tmp_path), "prompts": tmp_path / "prompts", "out": str(tmp_path / "out")}
    for name in (short, full):
        assert loading.dtype_name("--dtype", name, "cpu") == short
        assert bench_options.preset_configs(None, dtype=name)[0].dtype == short
        assert prompts.checked_job(**files, settings=settings, dtype=name).dtype == short
    (found,) = kernel_options.kernel_configs(dtypes=f"{full},{short}")
    assert found.dtype == short
