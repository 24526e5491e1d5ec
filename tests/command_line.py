"""The command line and the scripts, run in this process as a shell would run them."""

from __future__ import annotations

import importlib
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from stat import S_ISDIR

import pytest
from typer.testing import CliRunner, Result

from sdfastgn import cli
from sdfastgn.cli.app import app
from tests.processes import ROOT

# What ``invoke`` runs. ``cli.main`` imports the one command that it needs.
for _name in cli.COMMANDS:
    importlib.import_module(f"sdfastgn.cli.{_name}")


def invoke(*arguments: str, **environment: str) -> Result:
    return CliRunner().invoke(app, list(arguments), env=environment)


def exit_code(monkeypatch: pytest.MonkeyPatch, program: str, *arguments: str) -> int:
    """How ``sdfastgn`` or a script of that file name ends."""
    monkeypatch.setattr(sys, "argv", [program, *arguments])
    script = str(ROOT / "scripts" / program)
    with pytest.raises(SystemExit) as caught:
        runpy.run_path(script, run_name="__main__") if program.endswith(".py") else cli.main()
    assert isinstance(caught.value.code, int)
    return caught.value.code


def exit_code_of(monkeypatch: pytest.MonkeyPatch, function: Callable[..., None], *arguments: str) -> int:
    """How a script ends whose command is this function."""
    monkeypatch.setattr(sys, "argv", ["script.py", *arguments])
    with pytest.raises(SystemExit) as caught:
        cli.main("", function)
    return int(caught.value.code or 0)


def state_of(folder: Path) -> dict[str, tuple[int, int] | None]:
    """All that lies in a folder: the path of each folder, and of each file with its size and last change."""
    found = {str(path): path.lstat() for path in folder.rglob("*")}
    return {path: None if S_ISDIR(s.st_mode) else (s.st_size, s.st_mtime_ns) for path, s in found.items()}


def refusal(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    folder: Path,
    program: str,
    *arguments: str,
) -> str:
    """The standard error of a program that refuses ``arguments`` in ``folder``.

    Asserts that the exit code is 2, that nothing is on standard output, and that no file was changed.
    """
    monkeypatch.chdir(folder)
    before = state_of(folder)
    assert exit_code(monkeypatch, program, *arguments) == 2
    shown = capsys.readouterr()
    assert not shown.out
    assert state_of(folder) == before
    return shown.err
