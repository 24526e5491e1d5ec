"""What a pipeline does on the CPU: by function, stock and optimized."""

from __future__ import annotations

import contextlib
import json
import sys
import time

import pytest

from scripts.publish import host
from scripts.publish.host import profiled
from scripts.publish.pages import TABLES
from sdfastgn.bench.tables.pipelines import HostRow, host_table
from tests.bench.tables.cases import SOURCE, save
from tests.command_line import exit_code_of

PIPELINE = "StableDiffusionPipeline"
DEVICE = f"{PIPELINE}._execution_device"
# Milliseconds, which pass where a function says so, however busy the machine is.
clock = [0]


def slow() -> None:
    clock[0] += 20


def fast() -> None:
    slow_inside()


def slow_inside() -> None:
    clock[0] += 5


def pipeline() -> None:
    slow()
    fast()


def test_functions_by_their_time(monkeypatch):
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0] / 1e3)
    total, found = profiled(lambda: pipeline(), pipeline, repeats=2)
    assert sys.getprofile() is None
    assert list(found) == ["slow", "fast"]  # what is below a function is within it
    assert found == pytest.approx({"slow": 20, "fast": 5})
    assert total == pytest.approx(25)


def test_what_raises_and_what_python_does_not_run(monkeypatch):
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0] / 1e3)

    def raises() -> None:
        slow()
        raise KeyError

    class Model:
        def __call__(self) -> None:
            fast()

    def call(model: Model) -> None:
        with contextlib.suppress(KeyError):
            raises()
        model()
        sorted([2, 1], key=lambda _: slow() or 0)

    total, found = profiled(lambda: call(Model()), call, repeats=3)
    assert {name: ms for name, ms in found.items() if ms} == pytest.approx(
        {"raises": 20, "Model.__call__": 5, "sorted": 40}
    )
    assert total == pytest.approx(65)


def test_a_run_and_its_table(tmp_path, monkeypatch):
    path = tmp_path / "host.json"
    options = ("--model", "tiny", "--size", "32", "--device", "cpu", "--repeats", "2", "--json", str(path))
    assert exit_code_of(monkeypatch, host.host, *options) == 0
    content = json.loads(path.read_text())
    assert content["kind"] == "host"
    (part,) = content["config"]["parts"]  # it leaves the switch alone
    assert part["cudnn_benchmark"] is content["environment"]["switches"]["cudnn.benchmark"] is False
    rows = [HostRow(**values) for values in content["rows"]]
    assert [row.variant for row in rows] == ["eager", "sdfastgn"]
    for row in rows:
        assert {f"{PIPELINE}.encode_prompt", DEVICE, "VaeImageProcessor.postprocess"} <= set(row.functions)
        assert max(row.functions.values()) <= row.total_ms
    assert f"| {rows[0].variant} | {rows[1].variant} |" in TABLES["host_calls"](tmp_path)


def test_the_table_leaves_out_what_takes_no_time(tmp_path):
    rows = [HostRow("eager", 30.0, {"decode": 12.0, "size": 0.01}), HostRow("sdfastgn", 9.0, {})]
    assert host_table(rows).body == [
        ["the image", "30", "9"],
        ["`decode`", "12", "-"],
    ]
    part = {"model": "sdxl", "size": 512, "steps": 1, "dtype": "fp16"}
    save(tmp_path, "host.json", "host", rows, config={"parts": [part]})
    assert TABLES["host_calls"](tmp_path).endswith(f"SDXL pipeline 512², 1 step, fp16. {SOURCE}")
