"""Replicas of the server on Ray: figures of each number of them, a killed one, and the table."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scripts.publish import serving_replicas
from scripts.publish.pages import TABLES
from scripts.publish.serving_load import Load
from scripts.publish.serving_replicas import ReplicasRow
from sdfastgn.bench import documents
from sdfastgn.bench.workload import BenchConfig
from tests.bench.tables.cases import SOURCE, save
from tests.command_line import exit_code_of

CONFIG = BenchConfig("tiny", "pipeline", 64, 1, "fp32", "cpu", repeats=1, steps=1)
TINY = ("--model", "tiny", "--size", "64", "--steps", "1", "--device", "cpu")


@pytest.mark.parametrize("is_right", [True, False])
def test_wrong_images_get_no_figures(is_right: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    good = np.linspace(0, 1, 192, dtype=np.float32).reshape(1, 8, 8, 3)
    deployed = []

    @contextlib.contextmanager
    def ray_started(config: BenchConfig, replicas: int) -> Iterator[str]:
        yield "url"

    async def load(url: str, body: dict[str, Any], clients: int, seeds: Iterable[int]) -> Load:
        return Load([1.0, 3.0], 4.0)

    monkeypatch.setattr(serving_replicas, "ray_started", ray_started)
    monkeypatch.setattr(serving_replicas, "load", load)
    monkeypatch.setattr(serving_replicas, "save", lambda config, folder: good)
    monkeypatch.setattr(serving_replicas, "deploy", lambda config, folder, count: deployed.append(count))
    monkeypatch.setattr(serving_replicas, "image_of", lambda url, body: good if is_right else 1 - good)
    kill = ReplicasRow(2, 16, killed=True)
    monkeypatch.setattr(serving_replicas, "killed", lambda url, body, replicas, clients: kill)
    *rows, last = serving_replicas.rows(CONFIG, replicas=2, requests=2)
    if is_right:
        assert deployed == [1, 2]
        assert [(row.replicas, row.clients) for row in rows] == [(1, 4), (1, 16), (2, 4), (2, 16)]
        assert {(row.requests_s, row.p50_s, row.lost, row.status) for row in rows} == {(0.5, 2.0, 0, "ok")}
        assert last is kill
    else:
        assert (deployed, rows) == ([1], [])
        assert (last.requests_s, last.status) == (None, documents.WRONG)


def test_lost_requests_are_counted() -> None:
    row = serving_replicas._row(2, 16, Load([1.0, 3.0], 4.0, ["status 503", "status 500"]))
    assert (row.requests, row.lost, row.status, row.reason) == (4, 2, documents.FAILED, "status 503")
    assert row.requests_s == 0.5
    row = serving_replicas._row(2, 16, Load([], 4.0, ["status 503"]))
    assert (row.requests, row.lost, row.status, row.requests_s) == (1, 1, documents.FAILED, None)


def test_missing_ray_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(serving_replicas.importlib.util, "find_spec", lambda name: None)
    path = str(tmp_path / "replicas.json")
    assert exit_code_of(monkeypatch, serving_replicas.serving_replicas, *TINY, "--json", path) == 2
    assert "serving_replicas: Ray is not installed" in capsys.readouterr().err


def test_the_load_lasts_from_before_the_kill_until_all_replicas_run_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[str] = []
    asked_after_kill = threading.Event()

    async def load(url: str, body: dict[str, Any], clients: int, seeds: Iterable[int]) -> Load:
        taken = []
        for seed in seeds:
            seen.append("request")
            if "kill" in seen:
                asked_after_kill.set()
            taken.append(float(seed + 1))
            await asyncio.sleep(0.001)
        return Load(taken, 2.0)

    def running() -> int:
        assert asked_after_kill.wait(10)
        seen.append("look")
        return 1 if seen.count("look") in (2, 3) else 2

    monkeypatch.setattr(serving_replicas, "BEFORE_S", 0.02)
    monkeypatch.setattr(serving_replicas, "load", load)
    monkeypatch.setattr(serving_replicas, "running", running)
    monkeypatch.setattr(serving_replicas, "process", lambda: 12)
    monkeypatch.setattr(serving_replicas.os, "kill", lambda pid, signal: seen.append("kill"))
    row = serving_replicas.killed("url", {}, replicas=2, clients=4)
    assert seen[0] == "request"
    assert (row.killed, row.lost, row.requests) == (True, 0, seen.count("request"))
    assert row.back_s is not None
    assert row.back_s > 0
    assert seen.count("look") == 4  # two until one is missing, two until it is back


@pytest.mark.slow
def test_a_replica_is_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray.serve", reason="needs Ray, which make test-serve installs")
    found = []
    process = serving_replicas.process
    deploy = serving_replicas.deploy

    def deploy_and_look(*options: Any) -> None:
        deploy(*options)
        found.append(process())

    monkeypatch.setattr(serving_replicas, "deploy", deploy_and_look)
    path = tmp_path / "replicas.json"
    options = ("--replicas", "1", "--requests", "8", "--json", str(path))
    assert exit_code_of(monkeypatch, serving_replicas.serving_replicas, *TINY, *options) == 0
    rows = json.loads(path.read_text())["rows"]
    assert [(row["replicas"], row["clients"]) for row in rows] == [(1, 4), (1, 16)]
    assert {(row["requests"], row["lost"], row["killed"]) for row in rows} == {(8, 0, False)}
    for row in rows:
        assert 0 < row["p50_s"] <= row["p99_s"]
    (pid,) = found
    assert pid != os.getpid()


def test_the_table_has_a_line_for_each_load_and_one_for_the_killed_replica(tmp_path: Path) -> None:
    rows = [
        ReplicasRow(1, 4, False, 64, 6.25, 0.6, 0.7, 0),
        ReplicasRow(1, 16, False, 64, 7.0, 2.2, 2.3, 0),
        ReplicasRow(2, 4, False, 64, 10.0, 0.3, 0.4, 0),
        ReplicasRow(2, 16, False, 64, 13.0, 1.1, 1.2, 1, status=documents.FAILED, reason="status 503"),
        ReplicasRow(2, 16, True, 210, 8.0, 1.9, 3.5, 0, 21.46),
    ]
    part = {"model": "sd15", "size": 512, "steps": 30, "dtype": "fp16"}
    save(tmp_path, "a.json", "serving_replicas", rows, config={"parts": [part], "requests": 64})
    lines = TABLES["serving_replicas"](tmp_path).splitlines()
    assert lines[2:6] == [
        "| 1 | 4 | 6.25 | 0.6 | 0.7 | 1.00x |",
        "| 1 | 16 | 7 | 2.2 | 2.3 | 1.00x |",
        "| 2 | 4 | 10 | 0.3 | 0.4 | 1.60x |",
        "| 2 | 16 | failed status 503 | - | - | - |",
    ]
    assert lines[-3] == (
        "With 2 replicas and 16 clients a replica was killed: 0 of 210 requests were lost, 99 % took at most"
        " 3.5 s, and all replicas ran again after 21.5 s."
    )
    assert lines[-1] == f"SD1.5 512², 30 steps, fp16; 64 requests for each number of clients. {SOURCE}"
