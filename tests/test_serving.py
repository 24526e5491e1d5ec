"""The serving example: requests that fit are drawn together, and the image is a direct call's."""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import io
import json
import logging
import sys
import threading
import types
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import sdfastgn
from sdfastgn.cli.digits_pipeline import FOLDER
from sdfastgn.models.pipelines import build_pipeline
from tests import serving_answers
from tests.command_line import ROOT

TestClient = pytest.importorskip("fastapi.testclient").TestClient
httpx = pytest.importorskip("httpx")

CAT = {"prompt": "a cat", "width": 64, "height": 64, "steps": 2, "seed": 3}
DOG = {**CAT, "prompt": "a dog", "seed": 4}
WIDE = {**CAT, "width": 72}
WRONG = {**CAT, "prompt": "wrong"}


class Watched:
    """A pipeline that keeps the prompts of each call, and that a prompt makes fail."""

    def __init__(self) -> None:
        self.pipe = build_pipeline("tiny", dtype=torch.float32, device="cpu")
        sdfastgn.optimize(self.pipe)
        self.calls: list[list[str]] = []
        self.free = threading.Event()  # calls wait for it
        self.free.set()

    def __call__(self, prompt: list[str], **options: Any) -> Any:
        self.calls.append(prompt)
        assert self.free.wait(60)
        if "wrong" in prompt:
            raise ValueError("no such prompt")
        return self.pipe(prompt=prompt, **options)


@pytest.fixture(scope="module")
def example() -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("serve", ROOT / "docs" / "examples" / "serve.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["serve"] = module  # where dataclasses and pydantic look for annotations
    spec.loader.exec_module(module)
    module.WAIT_S = 0.05
    return module


@pytest.fixture
def patient(example: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is sent together is drawn together, on a busy machine too."""
    monkeypatch.setattr(example, "WAIT_S", 1.0)


@pytest.fixture
def pairs(example: types.ModuleType, monkeypatch: pytest.MonkeyPatch, patient: None) -> None:
    """Two that fit are a full batch, which waits for no more."""
    monkeypatch.setattr(example, "MAX_BATCH", 2)


@pytest.fixture
def watched() -> Watched:
    return Watched()


def answers(app: Any, *bodies: dict[str, Any]) -> list[Any]:
    """Of clients that ask at the same time."""

    async def ask() -> list[Any]:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://server", timeout=60) as client:
            return await asyncio.gather(*(client.post("/images", json=body) for body in bodies))

    return asyncio.run(ask())


@pytest.mark.slow
@pytest.mark.usefixtures("pairs")
def test_requests_that_fit_are_drawn_together(example: types.ModuleType, watched: Watched) -> None:
    found = answers(example.serve(watched), CAT, DOG, WIDE)
    assert sorted(map(len, watched.calls)) == [1, 2]
    for body, answer in zip((CAT, DOG, WIDE), found, strict=True):
        assert (answer.status_code, answer.headers["content-type"]) == (200, "image/png")
        direct = watched.pipe(
            body["prompt"],
            width=body["width"],
            height=64,
            num_inference_steps=2,
            generator=torch.Generator().manual_seed(body["seed"]),
        ).images[0]
        image = np.asarray(Image.open(io.BytesIO(answer.content)), dtype=np.int16)
        # In a batch of another size fp32 rounds otherwise: one of 255 levels.
        assert np.abs(image - np.asarray(direct, dtype=np.int16)).max() <= 1


@pytest.mark.slow
@pytest.mark.usefixtures("pairs")
def test_a_batch_has_its_most_images(example: types.ModuleType, watched: Watched) -> None:
    assert [answer.status_code for answer in answers(example.serve(watched), CAT, DOG, CAT)] == [200] * 3
    assert sorted(map(len, watched.calls)) == [1, 2]


@pytest.mark.slow
@pytest.mark.usefixtures("pairs")
def test_an_error_is_answered_and_the_server_goes_on(
    example: types.ModuleType, watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard = io.StringIO()
    monkeypatch.setattr(example.log, "handlers", [logging.StreamHandler(heard)])
    app = example.serve(watched)
    wrong, right = answers(app, WRONG, CAT)
    assert (wrong.status_code, wrong.json()) == (500, {"detail": "the image could not be drawn"})
    assert right.status_code == 200  # alone, after both together have failed
    assert "ValueError: no such prompt" in heard.getvalue()
    assert answers(app, DOG)[0].status_code == 200


@pytest.mark.usefixtures("pairs")
def test_a_call_that_failed_holds_no_memory(example: types.ModuleType) -> None:
    """Neither while its requests are drawn one by one, nor while the server waits for others."""

    class Memory:
        pass

    held: list[weakref.ref[Memory]] = []

    def fails(prompt: list[str], **_: Any) -> Any:
        alive.append(sum(each() is not None for each in held))
        memory = Memory()
        held.append(weakref.ref(memory))
        raise ValueError("no such prompt")

    alive: list[int] = []
    batcher = example.Batcher(fails)
    images = [batcher.submit(example.Wanted(**CAT)) for _ in range(2)]
    gc.disable()  # which would find it in the end
    try:
        assert [str(each.exception(timeout=60)) for each in images] == ["no such prompt"] * 2
    finally:
        gc.enable()
    assert alive == [0, 0, 0]
    assert [each() for each in held] == [None] * 3


@pytest.mark.slow
@pytest.mark.usefixtures("patient")
def test_what_nobody_waits_for_is_not_drawn(example: types.ModuleType, watched: Watched) -> None:
    batcher = example.Batcher(watched)
    gone, kept = (batcher.submit(example.Wanted(**body)) for body in (DOG, CAT))
    assert gone.cancel()
    assert kept.result(timeout=60).size == (64, 64)
    assert watched.calls == [["a cat"]]


@pytest.mark.drawn(1)
@pytest.mark.parametrize("case", serving_answers.CASES, ids=lambda case: case.name)
def test_answers_are_those_of_both_servers(
    example: types.ModuleType, watched: Watched, case: serving_answers.Case
) -> None:
    with TestClient(example.serve(watched)) as client:
        serving_answers.check_answer(client, case)
    assert len(watched.calls) == (case.status in (200, 500))


@pytest.mark.slow
def test_an_answer_names_the_seed(example: types.ModuleType, watched: Watched) -> None:
    with TestClient(example.serve(watched)) as client:
        serving_answers.check_seeds(lambda body: client.post("/images", json=body))


@pytest.mark.slow
@pytest.mark.usefixtures("pairs")
def test_a_negative_prompt_is_drawn_with(example: types.ModuleType, watched: Watched) -> None:
    plain, other, both = answers(
        example.serve(watched), CAT, {**CAT, "negative_prompt": "a dog"}, {**DOG, "negative_prompt": "a dog"}
    )
    assert [each.status_code for each in (plain, other, both)] == [200] * 3
    assert sorted(map(len, watched.calls)) == [1, 2]
    assert plain.content != other.content


def test_requests_beyond_the_limit_are_answered_with_503(
    example: types.ModuleType, watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(example, "MAX_WAITING", 0)
    app = example.serve(watched)
    (refused,) = answers(app, CAT)
    status, body, headers = serving_answers.BUSY
    assert (refused.status_code, refused.json()) == (status, body)
    assert headers.items() <= dict(refused.headers).items()
    with TestClient(app) as client:
        assert client.get("/health").json() == {"status": "ok"}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_server_whose_thread_has_ended_is_not_healthy(example: types.ModuleType) -> None:
    ended = threading.Event()

    def interrupted(prompt: list[str], **options: Any) -> Any:
        assert "negative_prompt" not in options  # not every pipeline has one
        ended.set()
        raise KeyboardInterrupt

    batcher = example.Batcher(interrupted)
    assert batcher.is_alive()
    batcher.submit(example.Wanted(**CAT))
    assert ended.wait(60)
    batcher._thread.join(60)
    assert not batcher.is_alive()


@pytest.mark.slow
def test_a_request_whose_client_has_gone_is_not_drawn(example: types.ModuleType, watched: Watched) -> None:
    watched.free.clear()
    app = example.serve(watched)
    scope = {"type": "http", "method": "POST", "path": "/images", "query_string": b"", "http_version": "1.1"}
    headers = [(b"content-type", b"application/json")]

    async def ask(body: dict[str, Any], gone: asyncio.Event) -> None:
        sent = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

        async def receive() -> dict[str, Any]:
            if sent:
                return sent.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            pass

        await app({**scope, "headers": headers}, receive, send)

    async def both() -> None:
        stays, leaves = asyncio.Event(), asyncio.Event()
        first = asyncio.create_task(ask(CAT, stays))
        while not watched.calls:
            await asyncio.sleep(0.01)
        leaves.set()
        await ask(WIDE, leaves)  # returns though the first is still drawn
        watched.free.set()
        await first
        await ask({**CAT, "prompt": "a bird"}, stays)

    asyncio.run(asyncio.wait_for(both(), 60))
    assert watched.calls == [["a cat"], ["a bird"]]


@pytest.mark.parametrize(
    ("has_gpu", "settings", "expected"),
    [
        (True, {}, ("cuda", torch.float16)),
        (True, {"DTYPE": "bfloat16"}, ("cuda", torch.bfloat16)),
        (True, {"DEVICE": "cpu"}, ("cpu", torch.float32)),
        (False, {}, ("cpu", torch.float32)),
        (False, {"DEVICE": "", "DTYPE": ""}, ("cpu", torch.float32)),
        (False, {"DEVICE": "cpu", "DTYPE": "float16"}, ("cpu", torch.float16)),
    ],
)
def test_device_and_dtype(
    example: types.ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    has_gpu: bool,
    settings: dict[str, str],
    expected: tuple[str, torch.dtype],
) -> None:
    calls: list[list[str]] = []

    class Pipeline:
        def __call__(self, prompt: list[str], **_: Any) -> None:
            calls.append(prompt)

        def to(self, device: str) -> Pipeline:
            self.device = device
            return self

        def set_progress_bar_config(self, **_: Any) -> None:
            pass

    def load(model: str, dtype: torch.dtype) -> Pipeline:
        assert model == "sd15"
        loaded.dtype = dtype
        return loaded

    loaded: Any = Pipeline()
    monkeypatch.setattr(example, "DiffusionPipeline", types.SimpleNamespace(from_pretrained=load))
    monkeypatch.setattr(example.sdfastgn, "optimize", lambda pipe: pipe)
    start(example, monkeypatch, has_gpu, {"MODEL": "sd15", **settings})
    assert (loaded.device, loaded.dtype) == expected
    # On a CPU there is nothing to compile or to capture.
    assert len(calls) == (2 * example.MAX_BATCH if expected[0] == "cuda" else 0)


def start(example: Any, monkeypatch: pytest.MonkeyPatch, has_gpu: bool, settings: dict[str, str]) -> Any:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    for name in ("MODEL", "DEVICE", "DTYPE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    return example.create_app()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"DEVICE": "gpu"}, "DEVICE='gpu' must be cuda or cpu"),
        ({"DEVICE": "cuda"}, "DEVICE is 'cuda', but PyTorch finds no CUDA GPU"),
        ({"DTYPE": "fp8"}, "DTYPE='fp8' must be float16 or bfloat16 or float32"),
    ],
)
def test_a_wrong_setting_is_named(
    example: types.ModuleType, monkeypatch: pytest.MonkeyPatch, settings: dict[str, str], message: str
) -> None:
    with pytest.raises(SystemExit, match=f"^serve.py: the environment variable {message}$"):
        start(example, monkeypatch, False, {"MODEL": "no such model", **settings})


def test_it_starts_without_a_gpu(example: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    app = start(example, monkeypatch, False, {"MODEL": str(FOLDER)})
    (answer,) = answers(app, serving_answers.SEVEN)
    assert (answer.status_code, answer.headers["seed"]) == (200, "3")


def test_a_missing_model_is_named(example: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MODEL", raising=False)
    with pytest.raises(SystemExit, match="MODEL"):
        example.create_app()
