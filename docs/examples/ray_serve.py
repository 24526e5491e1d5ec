"""An image server on Ray Serve, with one replica per GPU. It draws similar requests in one call.

Requests can share a call if they have the same size, steps and guidance, and if all or none have a
negative prompt.

pip install ".[serve]"
serve run --app-dir docs/examples --working-dir docs/examples ray_serve:build model=path/to/pipeline
curl localhost:8000/images -H 'content-type: application/json' -d '{"prompt": "a cat"}' -o cat.png
"""

# `from __future__ import annotations` is missing on purpose: Ray and FastAPI need the annotations of `build`
# and `images` as types, not as strings.
import asyncio
import io
import logging
import os
import secrets
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field, PositiveInt
from ray import serve
from ray.exceptions import RayActorError, RayTaskError
from ray.serve import Application
from ray.serve.config import AutoscalingConfig
from ray.serve.exceptions import BackPressureError
from ray.serve.handle import DeploymentHandle

# Maximum number of images in one call. There are separate CUDA graphs for each number of images.
MAX_BATCH = 4
# Seconds that a request waits for other requests that can share its call. An image takes much longer.
WAIT_S = 0.005
# Maximum number of requests at a replica, for its running call and for its next call.
MAX_ONGOING = 2 * MAX_BATCH
# Maximum number of seconds that a call may take. A health check waits this long for the running call, and a
# replica that is stopped has this long to finish its call.
CALL_S = 60.0
# Seconds between two health checks. Ray replaces a replica after three failed checks in a row.
CHECK_S = 2.0
# Maximum number of replicas that are tried for one request. If a replica dies, another one gets the request.
TRIES = 3
# Seconds after which a refused client should ask again: the header Retry-After of the answer 503.
RETRY_S = 1

log = logging.getLogger("ray.serve")


class Settings(BaseModel):
    """The arguments that ``serve run`` accepts as name=value."""

    model_config = ConfigDict(extra="forbid")

    model: str  # path of a pipeline, or its name on the Hub
    device: Literal["cuda", "cpu"] = "cuda"
    dtype: Literal["float16", "bfloat16", "float32"] | None = None  # None: float16 on cuda, float32 on cpu
    stock: bool = False  # True: do not call sdfastgn.optimize
    min_replicas: PositiveInt = 1
    max_replicas: PositiveInt = 1  # set it to the number of GPUs
    max_waiting: PositiveInt = 64  # maximum number of waiting requests; further ones get the answer 503


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
        return {**size, "num_inference_steps": self.steps, "guidance_scale": self.guidance}

    def kind(self) -> str:
        """Returns a key. Requests with equal keys can be drawn in one call."""
        return f"{self.call()} {self.negative_prompt is not None}"


def load(settings: Settings) -> Any:
    # Imported here, because these imports take seconds and only the replicas' processes need them.
    import torch
    from diffusers import DiffusionPipeline

    import sdfastgn

    on_gpu = settings.device == "cuda"
    dtype = settings.dtype or ("float16" if on_gpu else "float32")
    # Before diffusers 0.40 the argument ``dtype`` is called ``torch_dtype``.
    pipe = DiffusionPipeline.from_pretrained(settings.model, dtype=getattr(torch, dtype))
    pipe.to(settings.device).set_progress_bar_config(disable=True)
    if not settings.stock:
        sdfastgn.optimize(pipe)
    if on_gpu:
        # Before the first request, compile the kernels and capture the CUDA graphs for each number of
        # images of the default size. Other sizes are captured when they are first asked for.
        for count in range(1, MAX_BATCH + 1):
            for _ in range(2):
                pipe(prompt=["a cat"] * count, num_inference_steps=2)
    return pipe


class Painter:
    """A replica: a pipeline on one GPU, and the one thread that calls it."""

    def __init__(self, settings: Settings, load: Callable[[Settings], Any]) -> None:
        import torch

        self._torch = torch
        self._on_gpu = settings.device == "cuda"
        self._pipe = load(settings)
        self._thread = ThreadPoolExecutor(max_workers=1)  # a pipeline's calls must not overlap

    async def draw(self, wanted: Wanted) -> bytes:
        """Returns the image as PNG. Raises what the pipeline raised."""
        drawn = await self._batch(wanted)
        if isinstance(drawn, Exception):
            raise drawn
        return await asyncio.to_thread(_png, drawn)  # in a thread: the next call need not wait

    # Ray batches only requests with the same multiplexed model id. Here the id is ``Wanted.kind``.
    @serve.batch(max_batch_size=MAX_BATCH, batch_wait_timeout_s=WAIT_S)
    async def _batch(self, batch: list[Wanted]) -> list[Any]:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._drawn, batch)

    async def check_health(self) -> None:
        """Raises if the GPU has failed.

        Waits for the running call. If the GPU hangs, the wait takes too long, and Ray counts a failed check.
        """
        if self._on_gpu:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._torch.cuda.synchronize)

    def _drawn(self, batch: list[Wanted]) -> list[Any]:
        """Returns for each request its image, or the exception that the pipeline raised for it."""
        try:
            return self._images(batch)
        except self._torch.AcceleratorError:
            log.exception("the card has failed: this process ends, and Ray starts another")
            os._exit(1)  # CUDA is unusable in this process now. Front asks another replica.
        except Exception as error:
            traceback.clear_frames(error.__traceback__)  # frames keep the failed call's memory alive
            if len(batch) == 1:
                log.exception("an image could not be drawn")
                return [error]
        # The batch needed too much memory, or one request is at fault. So draw them one by one.
        return [drawn for each in batch for drawn in self._drawn([each])]

    def _images(self, batch: list[Wanted]) -> list[Any]:
        call = batch[0].call()
        if batch[0].negative_prompt is not None:
            call["negative_prompt"] = [each.negative_prompt for each in batch]
        images: list[Any] = self._pipe(
            prompt=[each.prompt for each in batch],
            # A generator for each image, on the CPU, makes its noise independent of the batch.
            generator=[self._torch.Generator("cpu").manual_seed(each.seed) for each in batch],
            **call,
        ).images
        return images


def _png(image: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return buffer.getvalue()


app = FastAPI()


@app.exception_handler(RequestValidationError)
async def refuse(_: Request, error: RequestValidationError) -> Response:
    # FastAPI's own handler repeats the invalid value in its answer, and fails if the value is NaN.
    detail = [{"loc": each["loc"], "msg": each["msg"]} for each in error.errors()]
    return JSONResponse({"detail": detail}, 422)


# Front accepts every request at once, because the queue of the Painters limits how many may wait. Front does
# little work, so Ray reserves no CPU for it.
@serve.deployment(
    ray_actor_options={"num_cpus": 0}, max_ongoing_requests=10_000, graceful_shutdown_timeout_s=CALL_S
)
@serve.ingress(app)
class Front:
    """Checks requests and sends each to a replica. The answer is 503 if too many requests wait."""

    def __init__(self, painter: DeploymentHandle) -> None:
        self._painter = painter

    @app.post("/images")
    async def images(self, wanted: Wanted) -> Response:
        replicas = self._painter.options(multiplexed_model_id=wanted.kind())
        retry = {"Retry-After": str(RETRY_S)}
        for _ in range(TRIES):
            try:
                png = await replicas.draw.remote(wanted)
            except RayActorError as error:  # a second try draws the same image
                log.warning("a replica has died, another one is asked: %s", error)
            except BackPressureError:
                raise HTTPException(503, "too many requests are waiting", retry) from None
            except RayTaskError:  # the replica has logged what the pipeline raised
                raise HTTPException(500, "the image could not be drawn") from None
            else:
                return Response(png, media_type="image/png", headers={"Seed": str(wanted.seed)})
        raise HTTPException(503, "the replicas that were asked have died", retry)


def application(settings: Settings, load: Callable[[Settings], Any] = load) -> Application:
    painter = serve.deployment(
        Painter,
        ray_actor_options={"num_gpus": int(settings.device == "cuda")},
        max_ongoing_requests=MAX_ONGOING,
        max_queued_requests=settings.max_waiting,
        # Ray adds replicas while there are more than MAX_BATCH running and waiting requests per replica.
        autoscaling_config=AutoscalingConfig(
            min_replicas=settings.min_replicas,
            max_replicas=settings.max_replicas,
            target_ongoing_requests=MAX_BATCH,
        ),
        health_check_period_s=CHECK_S,
        health_check_timeout_s=CALL_S,
        graceful_shutdown_timeout_s=CALL_S,
    )
    return Front.bind(painter.bind(settings, load))


def build(settings: Settings) -> Application:
    """Returns the application. ``serve run`` calls it with the settings from its command line."""
    if Path(settings.model).exists():  # made absolute: replicas have another working directory
        settings.model = str(Path(settings.model).resolve())
    return application(settings)
