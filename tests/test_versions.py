"""A version of PyTorch or Triton that was never run: one warning, and a line of ``info``."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import sdfastgn
from sdfastgn import api, versions
from sdfastgn.cli.app import app


@pytest.mark.parametrize(
    ("package", "version", "is_run"),
    [("torch", "2.13.0+cpu", True), ("torch", "2.130.0", False), ("torch", "3.0.0a0+git1", False),
     ("triton", "3.9.0", True), ("triton", "9.9", False), ("rich", "1", True)],
)  # fmt: skip
def test_what_was_run_has_no_note(package, version, is_run):
    note = versions.never_run(package, version)
    assert note is None if is_run else note.startswith(f"{package} {version} was never run")


@pytest.fixture
def newer(monkeypatch):
    """This PyTorch was never run, and nothing has been said of it yet."""
    monkeypatch.setitem(versions.RUN, "torch", ("1.13", "2.0"))
    monkeypatch.setattr(api, "noted", set(api.noted))
    return "was never run with this sdfastgn (1.13, 2.0 were)"


def optimized():
    with sdfastgn.optimized(nn.GroupNorm(2, 8)) as norm:
        return norm


@pytest.mark.parametrize(
    ("name", "call"), [("optimize", lambda: sdfastgn.optimize(nn.GroupNorm(2, 8))), ("optimized", optimized)]
)
def test_the_first_call_warns_in_its_own_name_and_goes_on(name, call, newer):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(2):
            assert "GroupNorm" in repr(call())
    assert [str(each.message) for each in seen] == [f"sdfastgn.{name}: torch {torch.__version__} {newer}"]
    assert seen[0].filename == __file__


def test_info_says_so(newer):
    result = CliRunner().invoke(app, ["info", "--device", "cpu"])
    assert newer in " ".join(result.stdout.split())
