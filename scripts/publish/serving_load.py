"""Measure a server's requests per second and their latency, stock and optimized.

python -m scripts.publish.serving_load --model sd15 --json benchmarks/by_hand/serving_sd15.json

The server is docs/examples/serve.py with random weights. It runs in a separate process, and needs uvicorn:
``pip install ".[serve]"``. Each client sends its next request as soon as it has an answer. With ``--url``, a
server that runs already is measured instead, such as docs/examples/ray_serve.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.util
import io
import multiprocessing
import socket
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import httpx
import numpy as np
import typer
from PIL import Image

from scripts.publish.runs import write_rows
from sdfastgn.bench import documents, gate
from sdfastgn.bench import workload as workloads
from sdfastgn.bench.tables.blocks import Blocks
from sdfastgn.bench.workload import BenchConfig
from sdfastgn.cli import bench_options, checks, main
from sdfastgn.cli.errors import one_line_errors
from sdfastgn.cli.options import DeviceOption, DtypeOption, JsonOption, ModelOption, SizeOption, StepsOption
from sdfastgn.cli.session import exit_code
from sdfastgn.cli.terminal import console
from sdfastgn.kernels.common.failures import one_line
from sdfastgn.program import OptionError, counted

EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples"
CLIENTS = (1, 4, 16)
# Maximum number of seconds to wait for an image, or for a server to start.
PATIENCE_S = 600.0


@dataclass
class LoadRow:
    """The measurement of one server with one number of clients.

    Its numbers are None if an image was wrong or a request got no image.

    Attributes:
        requests_s: answers per second that all clients together got.
        p50_s, p99_s: median and 99th percentile of the seconds from a request to its complete image.
    """

    variant: str
    clients: int
    requests: int
    requests_s: float | None = None
    p50_s: float | None = None
    p99_s: float | None = None
    status: str = documents.OK
    reason: str = ""


def serve(config: BenchConfig, optimize: bool, port: int) -> None:
    """Runs the server. This function does not return, so it is called in a separate process."""
    import uvicorn

    sys.path.insert(0, str(EXAMPLES))
    example = importlib.import_module("serve")
    pipe = workloads.load(config)
    pipe.set_progress_bar_config(disable=True)
    if optimize:
        import sdfastgn

        sdfastgn.optimize(pipe)
    size = {"width": config.size, "height": config.size}
    for count in range(1, example.MAX_BATCH + 1):
        for _ in range(2):
            pipe(prompt=[config.prompt] * count, num_inference_steps=2, **size)
    uvicorn.run(example.serve(pipe), port=port, log_level="warning")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port: int = listening.getsockname()[1]
        return port


@contextlib.contextmanager
def served(config: BenchConfig, optimize: bool) -> Iterator[str]:
    """A context that starts a server, yields its address when it is ready, and ends it afterwards."""
    if importlib.util.find_spec("uvicorn") is None:
        raise OptionError('serving_load: uvicorn is not installed; pip install ".[serve]", or give --url')
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(config, optimize, port))
    process.start()
    try:
        end = time.monotonic() + PATIENCE_S
        while not _is_ready(url):
            if not process.is_alive() or time.monotonic() > end:
                raise OptionError(f"--model: the server of {config.model!r} did not start")
            time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.join()


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=PATIENCE_S).is_success
    except httpx.TransportError:
        return False


@dataclass(frozen=True)
class Load:
    """The times and failures of all clients' requests to a server.

    Attributes:
        taken: seconds of each request that got an image.
        seconds: time from the first request to the last answer.
        lost: for each request that got no image, the reason.
    """

    taken: list[float]
    seconds: float
    lost: list[str] = field(default_factory=list)

    def figures(self) -> dict[str, Any]:
        """Returns requests per second, and the median and 99th percentile of the seconds of a request.

        The result is a dict, whose keys are the names of these fields in ``LoadRow``.
        """
        p50, p99 = np.percentile(self.taken, (50, 99))
        return {"requests_s": len(self.taken) / self.seconds, "p50_s": float(p50), "p99_s": float(p99)}


async def load(url: str, body: dict[str, Any], clients: int, seeds: Iterable[int]) -> Load:
    """Sends a request for each of ``seeds``, from ``clients`` clients at once."""
    limits = httpx.Limits(max_connections=clients)
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S, limits=limits) as client:
        left, taken, lost = iter(seeds), [], []

        async def ask() -> None:
            for seed in left:  # all clients share the iterator ``left``, so each seed is asked for once
                start = time.perf_counter()
                try:
                    (await client.post("/images", json={**body, "seed": seed})).raise_for_status()
                except httpx.HTTPError as error:
                    lost.append(one_line(error))
                else:
                    taken.append(time.perf_counter() - start)

        start = time.perf_counter()
        await asyncio.gather(*(ask() for _ in range(clients)))
        return Load(taken, time.perf_counter() - start, lost)


def body_of(config: BenchConfig) -> dict[str, Any]:
    """Returns the JSON of a request for an image, without a seed."""
    size = {"width": config.size, "height": config.size}
    return {"prompt": config.prompt, **size, "steps": config.steps, "guidance": config.guidance}


def image_of(url: str, body: dict[str, Any]) -> np.ndarray:
    """Returns the server's image for the request ``body``: (1, H, W, 3), fp32 in [0, 1]."""
    answer = httpx.post(f"{url}/images", json={**body, "seed": 0}, timeout=PATIENCE_S).raise_for_status()
    return np.asarray(Image.open(io.BytesIO(answer.content)), dtype=np.float32)[None] / 255


def rows_of(variant: str, url: str, body: dict[str, Any], requests: int) -> list[LoadRow]:
    rows = []
    for clients in CLIENTS:
        found = asyncio.run(load(url, body, clients, range(requests)))
        row = LoadRow(variant, clients, requests)
        failed = {"status": documents.FAILED, "reason": found.lost[0]} if found.lost else found.figures()
        rows.append(replace(row, **failed))
    return rows


def run(config: BenchConfig, requests: int, url: str | None = None) -> list[LoadRow]:
    """Measures a stock server, then an optimized one, or only the server at ``url`` if this is given."""
    body = body_of(config)
    if url is not None:
        return rows_of("url", url, body, requests)
    with served(config, optimize=False) as stock:
        image = image_of(stock, body)
        rows = rows_of("eager", stock, body, requests)
    with served(config, optimize=True) as optimized:
        judged = gate.judge(config, image_of(optimized, body), gate.Reference(image))
        if not judged.reason:
            return rows + rows_of("sdfastgn", optimized, body, requests)
    wrong = (LoadRow("sdfastgn", clients, requests) for clients in CLIENTS)
    return rows + [replace(row, status=documents.WRONG, reason=judged.reason) for row in wrong]


def table(rows: list[LoadRow]) -> Blocks:
    body = []
    for row in rows:
        figures = (row.requests_s, row.p50_s, row.p99_s)
        shown = [row.status if value is None else f"{value:.3f}" for value in figures]
        body.append([row.variant, str(row.clients), *shown])
    notes = [f"{row.variant}: {row.status}: {row.reason}" for row in rows if row.reason]
    return Blocks(("variant", "clients", "requests/s", "p50 s", "p99 s"), body, notes=notes)


def serving_load(
    model: ModelOption = "sd15",
    size: SizeOption = None,
    steps: StepsOption = None,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    requests: Annotated[int, typer.Option(help="Requests at each number of clients.")] = 100,
    url: Annotated[str | None, typer.Option(help="Address of a server that runs already.")] = None,
    json: JsonOption = None,
) -> None:
    """Time a server's answers to 1, 4 and 16 clients, stock and optimized."""
    with one_line_errors():
        given: dict[str, Any] = {
            "model": model,
            "size": size,
            "steps": steps,
            "dtype": dtype,
            "device": device,
        }
        (config,) = bench_options.bench_configs(parts=["pipeline"], repeats=1, **given)
        checks.positive("--requests", requests)
        checks.file_path("--json", json)
        rows = run(config, requests, url)
    what = f"{config.model}, {config.size}x{config.size}, {counted(config.steps, 'step')}"
    console().print(table(rows))
    console().print(f"{what}, {config.dtype} on {config.device}")
    write_rows(json, "serving", config, rows, requests=requests)
    raise typer.Exit(exit_code(rows))


if __name__ == "__main__":
    main(__doc__, serving_load)
