"""An image server. Requests that arrive together are drawn in one call of the pipeline, if they can share it.

pip install fastapi uvicorn
MODEL=path/to/pipeline uvicorn --app-dir docs/examples --factory serve:create_app
curl localhost:8000/images -H 'content-type: application/json' -d '{"prompt": "a cat"}' -o cat.png

The environment variables DEVICE (cuda or cpu) and DTYPE (float16, bfloat16 or float32) may be set, too.
"""

from __future__ import annotations

import asyncio
import io
import logging
import os
import queue
import secrets
import threading
import time
import traceback
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch
from diffusers import DiffusionPipeline
from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field

import sdfastgn

# Maximum number of images in one call. There are separate CUDA graphs for each number of images.
MAX_BATCH = 4
# Seconds that a request waits for other requests that can share its call. An image takes much longer.
WAIT_S = 0.005
# Maximum number of waiting requests. Further requests get the answer 503.
MAX_WAITING = 64
# Seconds after which a refused client should ask again: the header Retry-After of the answer 503.
RETRY_S = 1
# Seconds between two checks whether a client is still connected.
LOOK_S = 0.1

log = logging.getLogger("uvicorn.error")


class Wanted(BaseModel):
    """A request for one image. Invalid values get the status 422. The default size is the model's own."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    prompt: str = Field(max_length=2000)
    negative_prompt: str | None = Field(None, max_length=2000)
    width: int | None = Field(None, ge=64, le=2048, multiple_of=8)
    height: int | None = Field(None, ge=64, le=2048, multiple_of=8)
    steps: int = Field(30, ge=1, le=100)
    guidance: float = Field(7.5, ge=0, le=50)
    # Random if it is not given. Clients that read numbers as floating point keep its 32 bits exactly.
    seed: int = Field(default_factory=lambda: secrets.randbelow(2**32), ge=0, lt=2**63)

    def call(self) -> dict[str, Any]:
        """Returns the pipeline's arguments that must be the same for all images of one call."""
        size = {"width": self.width, "height": self.height}
        options = {"num_inference_steps": self.steps, "guidance_scale": self.guidance}
        negative = {} if self.negative_prompt is None else {"negative_prompt": self.negative_prompt}
        return {**size, **options, **negative}


@dataclass(eq=False)
class Waiting:
    wanted: Wanted
    image: Future[Any] = field(default_factory=Future)


class Batcher:
    """Collects requests from all threads into batches.

    A single thread draws each batch in one call of the pipeline, or one by one if this call fails.
    """

    def __init__(self, pipe: Any) -> None:
        self._pipe = pipe
        self._queue: queue.SimpleQueue[Waiting] = queue.SimpleQueue()
        self._waiting: list[Waiting] = []  # in the order in which they came
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def submit(self, wanted: Wanted) -> Future[Any]:
        """Returns a future of the image or of the pipeline's exception.

        Raises queue.Full if too many requests wait.
        """
        if self._queue.qsize() + len(self._waiting) >= MAX_WAITING:
            raise queue.Full
        request = Waiting(wanted)
        self._queue.put(request)
        return request.image

    def _run(self) -> None:
        while True:
            batch = self._next_batch()
            # Leaves out cancelled requests. From here on, the other requests can no longer be cancelled.
            self._draw([each for each in batch if each.image.set_running_or_notify_cancel()])

    def _next_batch(self) -> list[Waiting]:
        """Waits for a request. Returns the oldest one and others that can be drawn in the same call."""
        if not self._waiting:
            self._waiting.append(self._queue.get())
        call = self._waiting[0].wanted.call()
        until = time.monotonic() + WAIT_S
        while True:
            batch = [each for each in self._waiting if each.wanted.call() == call][:MAX_BATCH]
            try:
                if len(batch) == MAX_BATCH:
                    break
                self._waiting.append(self._queue.get(timeout=max(0.0, until - time.monotonic())))
            except queue.Empty:
                break
        self._waiting = [each for each in self._waiting if each not in batch]
        return batch

    def _draw(self, batch: list[Waiting]) -> None:
        if not batch:
            return
        call = batch[0].wanted.call()
        if "negative_prompt" in call:
            call["negative_prompt"] = [call["negative_prompt"]] * len(batch)
        try:
            images = self._pipe(
                prompt=[each.wanted.prompt for each in batch],
                # A generator for each image, on the CPU, makes its noise independent of the batch.
                generator=[torch.Generator("cpu").manual_seed(each.wanted.seed) for each in batch],
                **call,
            ).images
        except Exception as error:
            traceback.clear_frames(error.__traceback__)  # frames keep the failed call's memory alive
            if len(batch) == 1:
                batch[0].image.set_exception(error)
                return
        else:
            for each, image in zip(batch, images, strict=True):
                each.image.set_result(image)
            return
        # The batch needed too much memory, or one request is at fault. So draw the requests one by one. This
        # follows the ``except``, because inside of it the memory of the failed call is not free yet.
        for each in batch:
            self._draw([each])


def _png(image: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return buffer.getvalue()


def serve(pipe: Any) -> FastAPI:
    """Returns the web application for ``pipe``, a pipeline that is ready to draw."""
    app, batcher = FastAPI(), Batcher(pipe)

    @app.exception_handler(RequestValidationError)
    async def refuse(_: Request, error: RequestValidationError) -> Response:
        # FastAPI's own handler repeats the invalid value in its answer, and fails if the value is NaN.
        detail = [{"loc": each["loc"], "msg": each["msg"]} for each in error.errors()]
        return JSONResponse({"detail": detail}, 422)

    @app.get("/health")
    async def health() -> dict[str, str]:
        if not batcher.is_alive():
            raise HTTPException(503, "the thread that draws has ended")
        return {"status": "ok"}

    @app.post("/images")
    async def images(wanted: Wanted, request: Request) -> Response:
        try:
            drawn = asyncio.wrap_future(batcher.submit(wanted))
        except queue.Full:
            retry = {"Retry-After": str(RETRY_S)}
            raise HTTPException(503, "too many requests are waiting", retry) from None
        while not (await asyncio.wait([drawn], timeout=LOOK_S))[0]:
            if await request.is_disconnected():
                drawn.cancel()  # has no effect once its call has begun
                return Response(status_code=499)
        if drawn.exception() is not None:
            log.error("an image could not be drawn", exc_info=drawn.exception())
            raise HTTPException(500, "the image could not be drawn")
        # The PNG is made in a thread, because other requests would have to wait for it otherwise.
        png = await run_in_threadpool(_png, drawn.result())
        return Response(png, media_type="image/png", headers={"Seed": str(wanted.seed)})

    return app


def _setting(name: str, choices: Iterable[str], default: str) -> str:
    """Returns the environment variable ``name``, or ``default`` if it is not set."""
    value = os.environ.get(name) or default
    if value not in choices:
        raise SystemExit(
            f"serve.py: the environment variable {name}={value!r} must be {' or '.join(choices)}"
        )
    return value


def create_app() -> FastAPI:
    model = os.environ.get("MODEL")
    if not model:
        raise SystemExit("serve.py: set the environment variable MODEL to a pipeline's path or name")
    has_gpu = torch.cuda.is_available()
    device = _setting("DEVICE", ("cuda", "cpu"), "cuda" if has_gpu else "cpu")
    if device == "cuda" and not has_gpu:
        raise SystemExit("serve.py: the environment variable DEVICE is 'cuda', but PyTorch finds no CUDA GPU")
    dtypes = ("float16", "bfloat16", "float32")
    dtype = _setting("DTYPE", dtypes, "float16" if device == "cuda" else "float32")
    # Before diffusers 0.40 the argument ``dtype`` is called ``torch_dtype``.
    pipe = DiffusionPipeline.from_pretrained(model, dtype=getattr(torch, dtype)).to(device)
    pipe.set_progress_bar_config(disable=True)
    sdfastgn.optimize(pipe)
    if device == "cuda":
        # Before the first request, compile the kernels and capture the CUDA graphs for each number of
        # images of the default size. Other sizes are captured when they are first asked for.
        for count in range(1, MAX_BATCH + 1):
            for _ in range(2):
                pipe(prompt=["a cat"] * count, num_inference_steps=2)
    return serve(pipe)
