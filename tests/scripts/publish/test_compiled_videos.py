"""Networks of video beside torch.compile: what is timed, what fails, and what the table shows."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from torch import nn

from scripts.publish import compiled_videos
from scripts.publish.networks import Case
from scripts.publish.pages import TABLES
from scripts.publish.tables.compiled_videos import CompiledRow
from sdfastgn.bench.documents import FAILED, OK
from sdfastgn.bench.variants import VARIANTS
from tests.bench.tables.cases import ENVIRONMENT, save

ROW = CompiledRow("a VAE", "bfloat16", 40.0, 20.0, 1.5, 12.0, 1e-3, 25.0, 73.0, 1e-3)
NAMES = ("first", "second")


class Network(nn.Module):
    """A convolution and a norm. Its call fails if its weights have the memory format ``refuses``."""

    def __init__(self, refuses=None):
        super().__init__()
        self.conv, self.norm, self.refuses = nn.Conv2d(8, 8, 3), nn.GroupNorm(2, 8), refuses

    def forward(self, x):
        if self.refuses is not None and self.conv.weight.is_contiguous(memory_format=self.refuses):
            raise RuntimeError("no such layout")
        return self.norm(self.conv(x))


@pytest.fixture
def networks(monkeypatch):
    """Replaces the cases by two small networks. Returns an empty list for a test to fill.

    If a test puts a memory format into it, the call of the network "first" fails for weights in this format.
    Nothing is compiled: the variant "channels_last" takes the place of torch.compile.
    """
    refuses = []

    def case(name):
        def prepare(model, draw):
            x = draw(1, 8, 6, 5)
            return lambda: model(x)

        def build():
            return Network(*(refuses if name == "first" else ()))

        return Case(name, build, prepare, torch.float32)

    monkeypatch.setattr(compiled_videos, "NAMES", NAMES)
    monkeypatch.setattr(compiled_videos, "CASES", [case("second"), case("first")])
    monkeypatch.setitem(VARIANTS, "compile_channels_last", VARIANTS["channels_last"])
    return refuses


def alone(tmp_path, name="first"):
    """(exit code, row in the file of the network)"""
    options = ["--alone", "--only", name, "--folder", str(tmp_path), "--device", "cpu"]
    code = compiled_videos.main(options)
    (row,) = json.loads((tmp_path / f"{name}.json").read_text())["rows"]
    return code, CompiledRow(**row)


def test_a_network_is_timed_in_each_way(networks, tmp_path):
    code, row = alone(tmp_path, "second")
    assert min(row.stock_ms, row.optimized_ms, row.compiled_ms, row.compile_s, row.first_call_s) > 0
    assert max(row.error, row.compiled_error) < 1e-5
    assert (code, row.model, row.status, row.reason, row.floor_ms) == (0, "second", OK, "", None)


def test_stock_and_optimized_times_are_kept_if_compiling_is_stopped(networks, tmp_path, monkeypatch):
    def stopped(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(compiled_videos, "prepared", stopped)
    with pytest.raises(KeyboardInterrupt):
        alone(tmp_path)
    (row,) = json.loads((tmp_path / "first.json").read_text())["rows"]
    assert min(row["stock_ms"], row["optimized_ms"]) > 0
    assert row["compiled_ms"] is None


@pytest.mark.parametrize("only", [(), ("sec",)])
def test_each_network_has_a_process_and_a_limit(networks, tmp_path, monkeypatch, capsys, only):
    started = []
    monkeypatch.setattr(compiled_videos, "execute", lambda program, *rest: started.append((program, *rest)))
    options = ["--only", *only] if only else []
    assert compiled_videos.main(["--folder", str(tmp_path), "--limit", "5", *options]) == 0
    names = [program[program.index("--only") + 1] for program, _, _ in started]
    assert names == (["second"] if only else [*NAMES])
    assert [rest for _, *rest in started] == [[None, 5.0]] * len(names)
    assert "stopped after 5 s: second" in capsys.readouterr().out  # ``execute`` returned None


def test_nothing_starts_after_the_end(networks, tmp_path, monkeypatch):
    monkeypatch.setattr(compiled_videos, "execute", lambda *_: pytest.fail("started"))
    assert compiled_videos.main(["--folder", str(tmp_path), "--seconds", "0"]) == 0


def test_the_networks_are_real_cases():
    assert [case.name for case in compiled_videos.chosen(())] == [*compiled_videos.NAMES]


def test_failures_of_each_way(networks, tmp_path):
    networks.append(torch.channels_last)
    code, row = alone(tmp_path)
    assert (code, row.status, row.compiled_ms, row.reason) == (0, OK, None, "RuntimeError: no such layout")
    assert row.optimized_ms > 0
    networks[:] = [torch.contiguous_format]
    code, row = alone(tmp_path)
    assert (code, row.status, row.reason) == (1, FAILED, "RuntimeError: no such layout")


def test_a_wrong_output_of_a_compiled_network_has_no_time(networks, tmp_path, monkeypatch):
    errors = iter((0.0, 0.5))
    monkeypatch.setattr(compiled_videos, "relative_error", lambda found, expected: next(errors))
    _, row = alone(tmp_path)
    assert (row.compiled_ms, row.reason) == (None, "the output of torch.compile has the error 5.0e-01")


@pytest.mark.parametrize(
    ("row", "cells"),
    [
        (ROW, "40 | 25 | 73 | 20 | 1.5 | 2.00x | 12"),
        (dataclasses.replace(ROW, compiled_ms=None, compile_s=None), "40 | - | - | 20 | 1.5 | 2.00x | 12"),
        (
            dataclasses.replace(ROW, compiled_ms=None, compile_s=None, reason="it failed"),
            "40 | failed | - | 20 | 1.5 | 2.00x | 12",
        ),
        (
            dataclasses.replace(ROW, stock_ms=None, status=FAILED, reason="no memory"),
            "failed no memory | - | - | - | - | - | -",
        ),
    ],
)
def test_the_line_of_a_network(tmp_path, row, cells):
    save(tmp_path, "1.json", "compiled_videos", [row])
    assert f"| a VAE | bfloat16 | {cells} |" in TABLES["compiled_videos"](tmp_path)


def test_a_later_run_takes_the_place_of_an_earlier_one(tmp_path):
    where = {**ENVIRONMENT, "date": "2026-11-25T06:00:00+00:00"}
    save(tmp_path, "2.json", "compiled_videos", [dataclasses.replace(ROW, stock_ms=50.0)], environment=where)
    save(tmp_path, "3.json", "compiled_videos", [ROW, dataclasses.replace(ROW, model="another")])
    text = TABLES["compiled_videos"](tmp_path)
    assert text.count("| a VAE | bfloat16 | 50 |") == text.count("| a VAE |") == 1
    assert text.count("commit") == 2


def test_no_network_has_the_name(tmp_path, capsys):
    with pytest.raises(SystemExit):
        compiled_videos.main(["--only", "Sora", "--folder", str(tmp_path / "new")])
    assert "--only Sora: no network begins so. The names are: Qwen-Image VAE" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
