"""A server of images. Requests that arrive together and fit in one call are drawn together.

pip install fastapi uvicorn
MODEL=path/to/pipeline uvicorn --app-dir docs/examples --factory serve:create_app
curl localhost:8000/images -H 'content-type: application/json' -d '{"prompt": "a cat"}' -o cat.png
"""

from __future__ import annotations

import asyncio
import io
import os
import queue
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch
from diffusers import DiffusionPipeline
from fastapi import FastAPI, HTTPException, Response
from fastapi.concurrency import run_in_threadpool
from pydantic import BaseModel, Field

import sdfastgn

# Images a call, at most. Each number of images has CUDA graphs of its own.
MAX_BATCH = 4
# Seconds that a request waits for others that fit: little beside the seconds of an image.
WAIT_S = 0.005


class Wanted(BaseModel):
    """One image; without a size, of the model's own. Outside of these limits the answer is 422."""

    prompt: str = Field(max_length=2000)
    width: int | None = Field(None, ge=64, le=2048, multiple_of=8)
    height: int | None = Field(None, ge=64, le=2048, multiple_of=8)
    steps: int = Field(30, ge=1, le=100)
    guidance: float = Field(7.5, ge=0, le=50)
    seed: int = Field(0, ge=0, lt=2**63)

    def call(self) -> dict[str, Any]:
        """The arguments that all images of a call share."""
        size = {"width": self.width, "height": self.height}
        return {**size, "num_inference_steps": self.steps, "guidance_scale": self.guidance}


@dataclass(eq=False)
class Request:
    wanted: Wanted
    image: Future[Any] = field(default_factory=Future)


class Batcher:
    """One thread calls the pipeline, with requests from any thread."""

    def __init__(self, pipe: Any) -> None:
        self._pipe = pipe
        self._queue: queue.SimpleQueue[Request] = queue.SimpleQueue()
        self._waiting: list[Request] = []  # in the order in which they came
        threading.Thread(target=self._run, daemon=True).start()

    def submit(self, wanted: Wanted) -> Future[Any]:
        """The image, or what the pipeline raised, as soon as there is one."""
        request = Request(wanted)
        self._queue.put(request)
        return request.image

    def _run(self) -> None:
        while True:
            batch = self._next_batch()
            # Those that were cancelled are not drawn; the others can no longer be.
            self._draw([each for each in batch if each.image.set_running_or_notify_cancel()])

    def _next_batch(self) -> list[Request]:
        """The request that came first, and those that fit with it."""
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

    def _draw(self, batch: list[Request]) -> None:
        if not batch:
            return
        try:
            images = self._pipe(
                prompt=[each.wanted.prompt for each in batch],
                # One for each image, on the CPU: the same noise in any batch.
                generator=[torch.Generator("cpu").manual_seed(each.wanted.seed) for each in batch],
                **batch[0].wanted.call(),
            ).images
        except Exception as error:
            if len(batch) == 1:
                batch[0].image.set_exception(error)
                return
            for each in batch:  # too much memory together, or one of them is at fault
                self._draw([each])
        else:
            for each, image in zip(batch, images, strict=True):
                each.image.set_result(image)


def _png(image: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return buffer.getvalue()


def serve(pipe: Any) -> FastAPI:
    """The application around a pipeline that is ready."""
    app, batcher = FastAPI(), Batcher(pipe)

    @app.post("/images")
    async def images(wanted: Wanted) -> Response:
        try:
            image = await asyncio.wrap_future(batcher.submit(wanted))
        except Exception as error:
            raise HTTPException(500, f"{type(error).__name__}: {error}") from error
        # In a thread: a PNG takes long enough that other requests would wait for it.
        return Response(await run_in_threadpool(_png, image), media_type="image/png")

    return app


def create_app() -> FastAPI:
    # dtype is torch_dtype before diffusers 0.40.
    pipe = DiffusionPipeline.from_pretrained(os.environ["MODEL"], dtype=torch.float16).to("cuda")
    pipe.set_progress_bar_config(disable=True)
    sdfastgn.optimize(pipe)
    # Compile the kernels and capture the graphs of each number of images before the first request.
    for count in range(1, MAX_BATCH + 1):
        for _ in range(2):
            pipe(prompt=["a cat"] * count, num_inference_steps=2)
    return serve(pipe)
