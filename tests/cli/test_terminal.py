"""What is on a terminal while something is measured, and on what is none."""

from __future__ import annotations

import pytest

from sdfastgn.cli.terminal import console, watched


def measured() -> None:
    with watched(2) as (on_start, on_done):
        on_start("unet: eager")
        on_done("unet: eager: 12 ms")
        on_start("unet: [fast]")
        on_done("")


def test_a_bar_says_what_runs_and_how_much_is_left(monkeypatch, capsys):
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    measured()
    shown = capsys.readouterr()
    assert "unet: eager: 12 ms" in shown.err
    assert "2/2" in shown.err
    assert "unet: [fast]" in shown.err
    assert not shown.out


def test_without_a_terminal_there_are_lines_alone(capsys):
    measured()
    assert capsys.readouterr().err == "unet: eager: 12 ms\n"


@pytest.mark.parametrize(("columns", "width"), [("80", 80), (None, 160)])
def test_a_pipe_is_wide_unless_columns_says_so(columns, width, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns:
        monkeypatch.setenv("COLUMNS", columns)
    assert console().width == width
