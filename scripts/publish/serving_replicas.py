"""Measure the example server on Ray with one replica, with several, and while a replica is killed.

python -m scripts.publish.serving_replicas --model sd15 --json benchmarks/by_hand/serving_replicas.json

The server is docs/examples/ray_serve.py with random weights, on as many GPUs as replicas. It needs Ray:
``pip install ".[serve]"``. Each client sends its next request as soon as it has an answer. At the end one of
several replicas is killed while clients send requests. The clients go on until Ray has replaced the replica.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.util
import itertools
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import psutil
import torch
import typer

from scripts.publish.runs import release_memory, write_each
from scripts.publish.serving_load import EXAMPLES, PATIENCE_S, Load, body_of, free_port, image_of, load
from sdfastgn.bench import documents, gate
from sdfastgn.bench import workload as workloads
from sdfastgn.bench.environment import environment
from sdfastgn.bench.run import describe
from sdfastgn.bench.workload import BenchConfig
from sdfastgn.cli import bench_options, checks, main
from sdfastgn.cli.errors import one_line_errors
from sdfastgn.cli.options import DeviceOption, DtypeOption, ModelOption, SizeOption, StepsOption
from sdfastgn.cli.session import exit_code
from sdfastgn.program import OptionError, counted

KIND = "serving_replicas"
CLIENTS = (4, 16)
# Number of seconds in which clients send requests before a replica is killed.
BEFORE_S = 2.0
# Bytes of Ray's shared memory, which holds the images on their way to a client. Ray's default is 30 % of main
# memory.
SHARED_MEMORY = 2**28


@dataclass
class ReplicasRow:
    """The measurement of a number of replicas with a number of clients.

    Its status is FAILED if a request got no image.

    Attributes:
        killed: True if one of the replicas was killed during the measurement.
        requests: number of requests.
        requests_s: answers per second that all clients together got.
        p50_s, p99_s: median and 99th percentile of the seconds from a request to its complete image.
        lost: number of requests that got no image.
        back_s: seconds until all replicas ran again after the kill; None without a kill.
    """

    replicas: int
    clients: int
    killed: bool = False
    requests: int | None = None
    requests_s: float | None = None
    p50_s: float | None = None
    p99_s: float | None = None
    lost: int | None = None
    back_s: float | None = None
    status: str = documents.OK
    reason: str = ""


def save(config: BenchConfig, folder: str) -> np.ndarray:
    """Saves the pipeline with random weights in ``folder``. Returns stock's image for the seed 0."""
    pipe = workloads.load(config)
    pipe.save_pretrained(folder)
    images: np.ndarray = pipe(
        config.prompt,
        width=config.size,
        height=config.size,
        num_inference_steps=config.steps,
        guidance_scale=config.guidance,
        generator=torch.Generator("cpu").manual_seed(0),
        output_type="np",
    ).images
    return images


@contextlib.contextmanager
def ray_started(config: BenchConfig, replicas: int) -> Iterator[str]:
    """A context in which Ray and its HTTP server run on this machine. Yields the server's address."""
    import ray
    from ray import serve

    sys.path.insert(0, str(EXAMPLES))
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # Ray sends no statistics to the Internet
    ray.init(
        address="local",  # a new Ray is started, even if one runs already
        num_cpus=replicas,  # each replica takes one CPU
        num_gpus=replicas if config.torch_device.type == "cuda" else 0,
        object_store_memory=SHARED_MEMORY,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"working_dir": str(EXAMPLES)},
    )
    try:
        port = free_port()
        serve.start(http_options={"port": port})
        yield f"http://127.0.0.1:{port}"
    finally:
        serve.shutdown()
        ray.shutdown()
        sys.path.remove(str(EXAMPLES))


def deploy(config: BenchConfig, folder: str, replicas: int) -> None:
    """Serves the pipeline in ``folder``. Returns when all replicas are ready."""
    from ray import serve

    example = importlib.import_module("ray_serve")
    settings = example.Settings(
        model=folder,
        device=config.torch_device.type,
        dtype=str(config.torch_dtype).removeprefix("torch."),
        min_replicas=replicas,
        max_replicas=replicas,
    )
    serve.delete("default")  # replicas of an earlier call of ``deploy`` are ended
    serve.run(example.application(settings))
    _until(lambda: running() == replicas)


def running() -> int:
    """Returns the number of replicas that take requests, according to Ray."""
    from ray import serve

    states = serve.status().applications["default"].deployments["Painter"].replica_states
    return states.get("RUNNING", 0)


def process() -> int:
    """Returns the process id of one of the replicas."""
    own = psutil.Process().children(recursive=True)
    return next(each.pid for each in own if "ServeReplica:default:Painter" in " ".join(each.cmdline()))


def _until(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not is_so():
        if time.monotonic() > end:
            raise TimeoutError("Ray's replicas are not ready")
        time.sleep(0.05)


def killed(url: str, body: dict[str, Any], replicas: int, clients: int) -> ReplicasRow:
    """Kills a replica while clients send requests. The clients stop when all replicas run again."""
    is_back = False
    seeds = itertools.takewhile(lambda _: not is_back, itertools.count())
    with ThreadPoolExecutor(1) as thread:
        asked = thread.submit(lambda: asyncio.run(load(url, body, clients, seeds)))
        try:
            time.sleep(BEFORE_S)
            start = time.perf_counter()
            os.kill(process(), signal.SIGKILL)
            _until(lambda: running() < replicas)
            _until(lambda: running() == replicas)
            back_s = time.perf_counter() - start
        finally:
            is_back = True
    return replace(_row(replicas, clients, asked.result()), killed=True, back_s=back_s)


def _row(replicas: int, clients: int, found: Load) -> ReplicasRow:
    lost = len(found.lost)
    row = ReplicasRow(replicas, clients, requests=len(found.taken) + lost, lost=lost)
    if found.taken:
        row = replace(row, **found.figures())
    return replace(row, status=documents.FAILED, reason=found.lost[0]) if lost else row


def rows(config: BenchConfig, replicas: int, requests: int) -> Iterator[ReplicasRow]:
    body = body_of(config)
    with tempfile.TemporaryDirectory() as folder:
        stock = gate.Reference(save(config, folder))
        release_memory()  # stock's memory is freed for the first replica, which uses the same GPU
        with ray_started(config, replicas) as url:
            for count in dict.fromkeys((1, replicas)):
                deploy(config, folder, count)
                if reason := gate.judge(config, image_of(url, body), stock).reason:
                    yield ReplicasRow(count, 1, status=documents.WRONG, reason=reason)
                    return
                for clients in CLIENTS:
                    yield _row(count, clients, asyncio.run(load(url, body, clients, range(requests))))
            if replicas > 1:  # a single replica is not killed: none could answer until it is replaced
                yield killed(url, body, replicas, max(CLIENTS))


def serving_replicas(
    json: Annotated[Path, typer.Option(help="File for the result.")],
    model: ModelOption = "sd15",
    size: SizeOption = None,
    steps: StepsOption = None,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    replicas: Annotated[int, typer.Option(help="Number of replicas, each on its own GPU.")] = 2,
    requests: Annotated[int, typer.Option(help="Requests at each number of clients.")] = 96,
) -> None:
    """Time the answers of one replica and of several to 4 and 16 clients, and kill a replica."""
    with one_line_errors():
        given: dict[str, Any] = {"model": model, "size": size, "steps": steps, "dtype": dtype}
        (config,) = bench_options.bench_configs(parts=["pipeline"], repeats=1, device=device, **given)
        for option, value in (("--replicas", replicas), ("--requests", requests)):
            checks.positive(option, value)
        checks.file_path("--json", json)
        if importlib.util.find_spec("ray") is None:
            raise OptionError('serving_replicas: Ray is not installed; pip install ".[serve]"')
        on_gpu = config.torch_device.type == "cuda"
        if on_gpu and replicas > (gpus := torch.cuda.device_count()):
            raise OptionError(
                f"--replicas: each needs a GPU of its own, and here is only {counted(gpus, 'GPU')}"
            )
        tries = torch.backends.cudnn.benchmark
        where = environment(config.torch_device, {"cudnn.benchmark": tries})
        described = {**describe([config]), "requests": requests}
        described["parts"][0]["cudnn_benchmark"] = tries
        found = write_each(rows(config, replicas, requests), json, KIND, where, described)
    raise typer.Exit(exit_code(found))


if __name__ == "__main__":
    main(__doc__, serving_replicas)
