"""Load on a server: figures of every number of clients, and none for wrong images."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest

from scripts.publish import serving_load
from scripts.publish.pages import TABLES
from sdfastgn.bench import documents
from sdfastgn.bench.workload import BenchConfig
from tests.bench.tables.cases import SOURCE, save
from tests.command_line import exit_code_of

CONFIG = BenchConfig("tiny", "pipeline", 64, 1, "fp32", "cpu", repeats=1, steps=1)
TINY = ("--model", "tiny", "--size", "64", "--steps", "1", "--device", "cpu")


@pytest.mark.parametrize("is_right", [True, False])
def test_wrong_images_get_no_figures(is_right: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    good = np.linspace(0, 1, 192, dtype=np.float32).reshape(1, 8, 8, 3)
    images = [good, good if is_right else 1 - good]

    @contextlib.contextmanager
    def served(config: BenchConfig, optimize: bool) -> Iterator[str]:
        yield f"optimize={optimize}"

    async def load(url: str, body: dict[str, Any], clients: int, seeds: Iterable[int]) -> serving_load.Load:
        return serving_load.Load([1.0, 3.0], 4.0)

    monkeypatch.setattr(serving_load, "served", served)
    monkeypatch.setattr(serving_load, "load", load)
    monkeypatch.setattr(serving_load, "image_of", lambda url, body: images.pop(0))
    rows = serving_load.run(CONFIG, requests=2)
    assert [(row.variant, row.clients) for row in rows] == [
        (variant, clients) for variant in ("eager", "sdfastgn") for clients in (1, 4, 16)
    ]
    assert {(row.requests_s, row.p50_s, row.status) for row in rows[:3]} == {(0.5, 2.0, documents.OK)}
    expected = (0.5, 2.0, documents.OK) if is_right else (None, None, documents.WRONG)
    assert {(row.requests_s, row.p50_s, row.status) for row in rows[3:]} == {expected}


def test_a_request_without_an_image_is_counted_and_its_row_has_no_figures() -> None:
    class Server(BaseHTTPRequestHandler):
        def do_POST(self) -> None:  # http.server calls this name
            seed = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["seed"]
            self.send_response(503 if seed == 5 else 200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *arguments: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        found = asyncio.run(serving_load.load(url, {}, clients=3, seeds=range(8)))
        rows = serving_load.rows_of("url", url, {}, requests=8)
        server.shutdown()
    assert (len(found.taken), len(found.lost)) == (7, 1)
    assert "503" in found.lost[0]
    for row in rows:
        assert (row.requests_s, row.status, row.reason) == (None, documents.FAILED, found.lost[0])


def test_a_missing_uvicorn_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(serving_load.importlib.util, "find_spec", lambda name: None)
    assert exit_code_of(monkeypatch, serving_load.serving_load, *TINY) == 2
    assert "serving_load: uvicorn is not installed" in capsys.readouterr().err


@pytest.mark.slow
def test_a_server_is_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("uvicorn", reason="needs uvicorn, which make test-serve installs")
    path = tmp_path / "load.json"
    options = ("--requests", "8", "--json", str(path))
    assert exit_code_of(monkeypatch, serving_load.serving_load, *TINY, *options) == 0
    content = json.loads(path.read_text())
    assert (content["kind"], content["config"]["requests"]) == ("serving", 8)
    assert len(content["rows"]) == 6
    for row in content["rows"]:
        assert 0 < row["p50_s"] <= row["p99_s"]
        assert row["requests_s"] > 0


def test_the_table_has_stock_beside_ours(tmp_path: Path) -> None:
    rows = [
        serving_load.LoadRow("eager", 1, 48, 1.25, 0.8, 0.9),
        serving_load.LoadRow("eager", 4, 48, 4.0, 1.0, 1.5),
        serving_load.LoadRow("sdfastgn", 1, 48, 5.0, 0.2, 0.25),
        serving_load.LoadRow("sdfastgn", 4, 48, status=documents.WRONG, reason="PSNR"),
    ]
    part = {"model": "sd15", "size": 512, "steps": 30, "dtype": "fp16"}
    save(tmp_path, "a.json", "serving", rows, config={"parts": [part], "requests": 48})
    lines = TABLES["serving_load"](tmp_path).splitlines()
    assert lines[2:4] == [
        "| 1 | 1.25 | 0.8 | 0.9 | 5 | 0.2 | 0.25 | 4.00x |",
        f"| 4 | 4 | 1 | 1.5 | {documents.WRONG} | - | - | - |",
    ]
    assert lines[-1] == f"SD1.5 512², 30 steps, fp16; 48 requests for each number of clients. {SOURCE}"
