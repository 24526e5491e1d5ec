"""The example for Ray Serve, with the digits pipeline on two replicas that run on the CPU."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
import torch
from PIL import Image

from sdfastgn.cli.digits_pipeline import FOLDER
from sdfastgn.models.pipelines import load_pipeline
from tests import serving_answers
from tests.command_line import ROOT
from tests.serving_answers import SEVEN

ray = pytest.importorskip("ray", reason="needs Ray, which make test-serve installs")
serve = pytest.importorskip("ray.serve")

pytestmark = pytest.mark.slow

EXAMPLES = ROOT / "docs" / "examples"
WAITING = 16
HELD = 2 * 8  # by the replicas
WIDE = {**SEVEN, "width": 96}


class Watched:
    """A pipeline that notes each call, and that files of a folder make slow or fail."""

    def __init__(self, pipe: Any, folder: Path) -> None:
        self.pipe, self.folder = pipe, folder

    def __call__(self, prompt: list[str], **options: Any) -> Any:
        own = {"pid": os.getpid(), "gpu": os.environ["CUDA_VISIBLE_DEVICES"]}
        note = {**own, "images": len(prompt), "width": options["width"]}
        with (self.folder / "calls").open("a") as file:
            file.write(json.dumps(note) + "\n")
        while (self.folder / "wait").exists():
            time.sleep(0.01)
        if serving_answers.WRONG_PROMPT in prompt:
            raise ValueError("no such prompt")
        if (self.folder / "break").exists():
            (self.folder / "break").unlink()
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
        return self.pipe(prompt=prompt, **options)


class Server:
    def __init__(self, folder: Path, port: int) -> None:
        self.folder, self.url = folder, f"http://127.0.0.1:{port}"

    def calls(self) -> list[dict[str, Any]]:
        path = self.folder / "calls"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def forget(self) -> None:
        (self.folder / "calls").unlink(missing_ok=True)

    def answers(self, *bodies: dict[str, Any]) -> list[httpx.Response]:
        """Of clients that ask at the same time."""

        async def ask() -> list[httpx.Response]:
            async with httpx.AsyncClient(base_url=self.url, timeout=120) as client:
                return await asyncio.gather(*(client.post("/images", json=body) for body in bodies))

        return asyncio.run(ask())

    def in_thread(self, *bodies: dict[str, Any]) -> Callable[[], list[httpx.Response]]:
        """Asks now; the function that it returns waits for the answers."""
        found: list[httpx.Response] = []
        thread = threading.Thread(target=lambda: found.extend(self.answers(*bodies)))
        thread.start()

        def wait() -> list[httpx.Response]:
            thread.join()
            return found

        return wait

    def replicas(self) -> dict[str, int]:
        """How many there are in each state."""
        painter = serve.status().applications["default"].deployments["Painter"]
        return {str(getattr(state, "value", state)): count for state, count in painter.replica_states.items()}

    @contextlib.contextmanager
    def waits(self) -> Iterator[None]:
        """No call ends until the block ends."""
        self.forget()
        (self.folder / "wait").touch()
        try:
            yield
        finally:
            (self.folder / "wait").unlink()

    @contextlib.contextmanager
    def replaced(self) -> Iterator[None]:
        """In the block a replica is lost; after it there is another."""
        assert self.replicas() == {"RUNNING": 2}
        yield
        until(lambda: self.replicas() != {"RUNNING": 2})
        until(lambda: self.replicas() == {"RUNNING": 2})


def until(is_so: Callable[[], bool], seconds: float = 90) -> None:
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.fixture(scope="module")
def example() -> Iterator[Any]:
    sys.path.insert(0, str(EXAMPLES))
    import ray_serve

    ray_serve.CHECK_S = 0.5
    yield ray_serve
    sys.path.remove(str(EXAMPLES))


@pytest.fixture(scope="module")
def server(example: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")

    def synchronize() -> None:
        sick = folder / "sick"
        if sick.exists() and sick.read_text() == str(os.getpid()):
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    def load(settings: Any) -> Watched:
        torch.cuda.synchronize = synchronize
        return Watched(example.load(settings.model_copy(update={"device": "cpu"})), folder)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    settings = example.Settings(model=str(FOLDER), min_replicas=2, max_replicas=2, max_waiting=WAITING)
    running = Server(folder, port)
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    # To Ray there are two GPUs: it gives one to each replica.
    resources = {"num_cpus": 4, "num_gpus": 2, "include_dashboard": False, "log_to_driver": False}
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # it would need the network
    ray.init(**resources, runtime_env={"working_dir": str(EXAMPLES)})
    try:
        serve.start(http_options={"port": port})
        serve.run(example.application(settings, load))
        until(lambda: running.replicas() == {"RUNNING": 2})
        yield running
    finally:
        serve.shutdown()
        ray.shutdown()


@pytest.fixture(scope="module")
def are_right() -> Callable[[list[httpx.Response], list[dict[str, Any]]], bool]:
    """Whether each answer is the image that the pipeline draws without a server."""
    pipe = load_pipeline("--model", str(FOLDER), torch.float32, "cpu", None)
    pipe.set_progress_bar_config(disable=True)

    def is_right(answer: httpx.Response, body: dict[str, Any]) -> bool:
        assert (answer.status_code, answer.headers["content-type"]) == (200, "image/png"), answer.text
        direct = pipe(
            body["prompt"],
            width=body["width"],
            height=body["height"],
            num_inference_steps=body["steps"],
            guidance_scale=body["guidance"],
            generator=torch.Generator().manual_seed(body["seed"]),
        ).images[0]
        image = np.asarray(Image.open(io.BytesIO(answer.content)), dtype=np.int16)
        # In a batch of another size fp32 rounds otherwise: one of 255 levels.
        return bool(np.abs(image - np.asarray(direct, dtype=np.int16)).max() <= 1)

    return lambda answers, bodies: all(is_right(*each) for each in zip(answers, bodies, strict=True))


def test_sizes_are_never_mixed_and_images_are_right(server: Server, are_right: Any) -> None:
    bodies = [{**(WIDE if seed % 3 == 0 else SEVEN), "seed": seed} for seed in range(12)]
    server.forget()
    answers = server.answers(*bodies)
    assert are_right(answers, bodies)
    calls = server.calls()
    for width in (64, 96):
        drawn = sum(call["images"] for call in calls if call["width"] == width)
        assert drawn == sum(body["width"] == width for body in bodies)
    assert 1 < max(call["images"] for call in calls) <= 4
    assert {call["gpu"] for call in calls} == {"0", "1"}


@pytest.mark.parametrize("case", serving_answers.CASES, ids=lambda case: case.name)
def test_answers_are_those_of_both_servers(server: Server, case: serving_answers.Case) -> None:
    server.forget()
    with httpx.Client(base_url=server.url, timeout=120) as client:
        serving_answers.check_answer(client, case)
    assert len(server.calls()) == (case.status in (200, 500))


def test_an_answer_names_the_seed(server: Server) -> None:
    serving_answers.check_seeds(lambda body: server.answers(body)[0])


def test_what_fails_together_is_drawn_alone(example: Any) -> None:
    def pipe(prompt: list[str], **_: Any) -> Any:
        if "wrong" in prompt:
            raise ValueError("no such prompt")
        return SimpleNamespace(images=prompt)

    painter = example.Painter(example.Settings(model="", device="cpu"), lambda _: pipe)
    right, wrong, also_right = painter._drawn(
        [example.Wanted(prompt=prompt) for prompt in ("a cat", "wrong", "a dog")]
    )
    assert (right, str(wrong), also_right) == ("a cat", "no such prompt", "a dog")


def test_a_full_queue_is_answered_with_503(server: Server) -> None:
    with server.waits():
        accepted = server.in_thread(*(SEVEN for _ in range(HELD)))
        until(lambda: len(server.calls()) >= 2)
        time.sleep(0.5)  # for the others to come as far
        refused = server.in_thread(*(SEVEN for _ in range(WAITING + 3)))
        time.sleep(1)
    assert [answer.status_code for answer in accepted()] == [200] * HELD
    found = refused()
    assert sorted(answer.status_code for answer in found) == [200] * WAITING + [503] * 3
    status, body, headers = serving_answers.BUSY
    for answer in found:
        if answer.status_code == status:
            assert answer.json() == body
            assert headers.items() <= dict(answer.headers).items()


def test_what_nobody_waits_for_is_not_drawn(server: Server) -> None:
    with server.waits():
        answers = server.in_thread(*(SEVEN for _ in range(HELD)))
        until(lambda: len(server.calls()) >= 2)
        time.sleep(0.5)
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{server.url}/images", json=WIDE, timeout=1)
    assert [answer.status_code for answer in answers()] == [200] * HELD
    assert server.answers(SEVEN)[0].status_code == 200
    assert sum(call["images"] for call in server.calls()) == HELD + 1
    assert {call["width"] for call in server.calls()} == {64}


def test_no_request_is_lost_with_a_replica(server: Server, are_right: Any) -> None:
    bodies = [{**SEVEN, "seed": seed, "steps": 20} for seed in range(12)]
    server.forget()
    answers = server.in_thread(*bodies)
    until(lambda: bool(server.calls()))
    with server.replaced():
        os.kill(server.calls()[0]["pid"], signal.SIGKILL)
        assert are_right(answers(), bodies)


def test_a_replica_whose_card_fails_in_a_call_is_replaced(server: Server, are_right: Any) -> None:
    server.forget()
    body = {**SEVEN, "seed": 5}
    with server.replaced():
        (server.folder / "break").touch()
        assert are_right(server.answers(body), [body])
    failed, drew = (call["pid"] for call in server.calls())
    assert failed != drew
    assert not psutil.pid_exists(failed)


def test_a_replica_whose_card_fails_a_health_check_is_replaced(server: Server, are_right: Any) -> None:
    server.forget()
    body = {**SEVEN, "seed": 5}
    assert are_right(server.answers(body), [body])
    sick = server.calls()[0]["pid"]
    with server.replaced():
        (server.folder / "sick").write_text(str(sick))
    assert not psutil.pid_exists(sick)


def test_running_requests_are_drawn_before_the_server_stops(server: Server, are_right: Any) -> None:
    bodies = [{**SEVEN, "seed": seed} for seed in range(HELD)]
    with server.waits():
        answers = server.in_thread(*bodies)
        until(lambda: len(server.calls()) >= 2)
        time.sleep(0.5)
        stops = threading.Thread(target=serve.delete, args=("default",))
        stops.start()
        time.sleep(1)
    assert are_right(answers(), bodies)
    stops.join()
    assert server.answers(SEVEN)[0].status_code == 404
