"""A server of images on Ray Serve: a replica for each GPU, which draws requests of one size together.

pip install ".[serve]"
serve run --app-dir docs/examples --working-dir docs/examples ray_serve:build model=path/to/pipeline
curl localhost:8000/images -H 'content-type: application/json' -d '{"prompt": "a cat"}' -o cat.png
"""

# No `from __future__ import annotations`: Ray and FastAPI read the annotations of `build` and `images`.
import asyncio
import io
import logging
import os
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
from ray.exceptions import RayActorError
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, BackpressureConfig
from ray.serve.handle import DeploymentHandle

# Most images of a call. Each number of images has its own CUDA graphs.
MAX_BATCH = 4
# Seconds that a request waits for others that fit: little beside the seconds of an image.
WAIT_S = 0.005
# Requests that a replica holds: one call's run, and the next call's wait.
MAX_ONGOING = 2 * MAX_BATCH
# Seconds that a call may take. A health check waits as long for the running call, and a replica that
# is stopped has as long to finish.
CALL_S = 60.0
# Seconds between two health checks. Ray replaces a replica that fails three in a row.
CHECK_S = 2.0
# Replicas that one request may be sent to, if they die while it is drawn.
TRIES = 3

log = logging.getLogger("ray.serve")


class Settings(BaseModel):
    """What ``serve run`` takes as name=value."""

    model_config = ConfigDict(extra="forbid")

    model: str  # a pipeline's path or name
    device: Literal["cuda", "cpu"] = "cuda"
    dtype: Literal["float16", "bfloat16", "float32"] = "float16"
    stock: bool = False  # without sdfastgn.optimize
    min_replicas: PositiveInt = 1
    max_replicas: PositiveInt = 1  # the number of GPUs
    max_waiting: PositiveInt = 64  # requests that wait for a replica; further ones are answered with 503


class Wanted(BaseModel):
    """One image; without a size, of the model's own. Outside of these limits the answer is 422."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    prompt: str = Field(max_length=2000)
    negative_prompt: str | None = Field(None, max_length=2000)
    width: int | None = Field(None, ge=64, le=2048, multiple_of=8)
    height: int | None = Field(None, ge=64, le=2048, multiple_of=8)
    steps: int = Field(30, ge=1, le=100)
    guidance: float = Field(7.5, ge=0, le=50)
    seed: int = Field(0, ge=0, lt=2**63)

    def call(self) -> dict[str, Any]:
        """The arguments that all images of a call share."""
        size = {"width": self.width, "height": self.height}
        return {**size, "num_inference_steps": self.steps, "guidance_scale": self.guidance}

    def kind(self) -> str:
        """Requests of equal kind can be drawn in one call."""
        return f"{self.call()} {self.negative_prompt is not None}"


def load(settings: Settings) -> Any:
    # Here and not above: of all processes only the replicas need them, and they take seconds.
    import torch
    from diffusers import DiffusionPipeline

    import sdfastgn

    # dtype is torch_dtype before diffusers 0.40.
    pipe = DiffusionPipeline.from_pretrained(settings.model, dtype=getattr(torch, settings.dtype))
    pipe.to(settings.device).set_progress_bar_config(disable=True)
    if not settings.stock:
        sdfastgn.optimize(pipe)
    # Compile the kernels and capture the graphs of each number of images before the first request.
    for count in range(1, MAX_BATCH + 1):
        for _ in range(2):
            pipe(prompt=["a cat"] * count, num_inference_steps=2)
    return pipe


class Painter:
    """A replica: one GPU, one pipeline, and one thread that calls both."""

    def __init__(self, settings: Settings, load: Callable[[Settings], Any]) -> None:
        import torch

        self._torch = torch
        self._on_gpu = settings.device == "cuda"
        self._pipe = load(settings)
        self._thread = ThreadPoolExecutor(max_workers=1)  # a pipeline's calls must not overlap

    async def draw(self, wanted: Wanted) -> bytes:
        """The PNG. Raises what the pipeline raised."""
        drawn = await self._batch(wanted)
        if isinstance(drawn, Exception):
            raise drawn
        return await asyncio.to_thread(_png, drawn)  # the GPU need not wait for it

    # Ray splits what has come by the multiplexed model id, which is the request's kind here.
    @serve.batch(max_batch_size=MAX_BATCH, batch_wait_timeout_s=WAIT_S)
    async def _batch(self, batch: list[Wanted]) -> list[Any]:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._drawn, batch)

    async def check_health(self) -> None:
        """Raises if the card has failed. Waits for the running call: a card that hangs fails, too."""
        if self._on_gpu:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._torch.cuda.synchronize)

    def _drawn(self, batch: list[Wanted]) -> list[Any]:
        """An image for each, or what the pipeline raised."""
        try:
            return self._images(batch)
        except self._torch.AcceleratorError:
            log.exception("the card has failed: this process ends, and Ray starts another")
            os._exit(1)  # CUDA does not work again in it. Front asks another replica.
        except Exception as error:
            traceback.clear_frames(error.__traceback__)  # they hold the memory of the call that failed
            if len(batch) == 1:
                log.exception("an image could not be drawn")
                return [error]
        # There was too much memory together, or one of them is at fault.
        return [drawn for each in batch for drawn in self._drawn([each])]

    def _images(self, batch: list[Wanted]) -> list[Any]:
        call = batch[0].call()
        if batch[0].negative_prompt is not None:
            call["negative_prompt"] = [each.negative_prompt for each in batch]
        images: list[Any] = self._pipe(
            prompt=[each.prompt for each in batch],
            # One for each image, on the CPU: the same noise in any batch.
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
    # FastAPI's own answer repeats the value, and fails at NaN.
    detail = [{"loc": each["loc"], "msg": each["msg"]} for each in error.errors()]
    return JSONResponse({"detail": detail}, 422)


# It takes every request at once: they wait for a Painter, whose queue is bounded. It does little work,
# so Ray need not keep a processor for it.
@serve.deployment(
    ray_actor_options={"num_cpus": 0}, max_ongoing_requests=10_000, graceful_shutdown_timeout_s=CALL_S
)
@serve.ingress(app)
class Front:
    """Checks requests, and sends each to a replica. Answers 503 if too many wait."""

    def __init__(self, painter: DeploymentHandle) -> None:
        self._painter = painter

    @app.post("/images")
    async def images(self, wanted: Wanted) -> Response:
        replicas = self._painter.options(multiplexed_model_id=wanted.kind())
        for _ in range(TRIES):
            try:
                return Response(await replicas.draw.remote(wanted), media_type="image/png")
            except RayActorError as error:  # drawing it again gives the same image
                log.warning("a replica has died, another one is asked: %s", error)
        raise HTTPException(503, "the replicas that were asked have died")


def application(settings: Settings, load: Callable[[Settings], Any] = load) -> Application:
    painter = serve.deployment(
        Painter,
        ray_actor_options={"num_gpus": int(settings.device == "cuda")},
        max_ongoing_requests=MAX_ONGOING,
        max_queued_requests=settings.max_waiting,
        backpressure_config=BackpressureConfig(retry_after_s=1),
        # As many replicas as keep one call's requests at each, those that wait included.
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
    """For ``serve run``, which gives it name=value."""
    if Path(settings.model).exists():  # replicas have another working directory
        settings.model = str(Path(settings.model).resolve())
    return application(settings)
