"""Builds what is timed (a UNet step, a VAE decode, a pipeline or a training step) as a model and a call."""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from sdfastgn import model_inputs
from sdfastgn.bench.timing import global_switches
from sdfastgn.kernels.common.failures import one_line
from sdfastgn.models import architectures, configurations, video
from sdfastgn.models.architectures import DTYPES
from sdfastgn.models.configurations import PROMPT
from sdfastgn.models.loras import add_lora
from sdfastgn.models.saved import latent_scale
from sdfastgn.patches.graphs.capture import pool_sizes
from sdfastgn.program import OptionError

T = TypeVar("T")

GUIDANCE = 7.5
# Maximum number of pixels that a pipeline's VAE decodes in one call. Larger batches are decoded image by
# image, so that activations have fewer than 2**31 elements.
MOST_DECODED_PIXELS = 4 * 1024**2


@dataclass(frozen=True)
class BenchConfig:
    """One part of one model at one size.

    Attributes:
        model: a name in ``models.configurations``, such as ``"sd15"``.
        part: ``"unet"`` (one step), ``"vae"`` (one decode), ``"pipeline"`` (text encoder, ``steps``
            steps, decode), ``"train"`` (forward and backward of the UNet) or ``"transformer"`` (one step).
        size: pixels along a side of the square image, or the height of a video's frames.
        batch: batch size of the UNet or the VAE (for a video model, the number of videos). For a pipeline,
            images per call. For a transformer with saved weights, images per call of its pipeline: one step
            of this call is timed.
        weights: ``"random"``, a local path or a Hub id.
        fp32_reference: True if the output is also computed in fp32, and all outputs are compared with it.
        profile: True if the profiler also records where a call's time goes, after the call was timed.
        scheduler: name of a scheduler class in diffusers; empty for the pipeline's own scheduler.
        preset: the entry of ``PRESETS`` that these settings come from, or empty.
        frames: frames of a video if the model is one of ``VIDEO_NETWORKS``, else None.
        width: width of a video's frames in pixels; None for other models.
        guidance: guidance scale of a pipeline; None for the pipeline's own.
        lora_rank: rank of the LoRA that a training step trains; None to train all parameters.
    """

    model: str
    part: str
    size: int
    batch: int
    dtype: str
    device: str
    repeats: int
    steps: int = 30
    weights: str = "random"
    seed: int = 0
    fp32_reference: bool = False
    profile: bool = False
    scheduler: str = ""
    guidance: float | None = GUIDANCE
    prompt: str = PROMPT
    preset: str = ""
    frames: int | None = None
    width: int | None = None
    lora_rank: int | None = None

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def torch_device(self) -> torch.device:
        return torch.device(self.device)


@dataclass
class Workload:
    """A stock model, and a function that calls it.

    Attributes:
        target: the module or pipeline that variants are applied to.
        call: runs ``target`` on fixed inputs. Returns the output of a UNet or VAE as one tensor, images
            (N, H, W, 3) in [0, 1], or the gradients of a training step by parameter name.
        fp32_output: returns the output with the same weights and inputs, computed in fp32 without TF32.
        memory: runs a training step. Returns (MiB of the tensors that autograd keeps for the backward, peak
            MiB of the step without model and inputs; None on the CPU). ``memory`` is None for other parts.
    """

    target: Any
    call: Callable[[], Any]
    fp32_output: Callable[[], Any] | None
    memory: Callable[[], tuple[float, float | None]] | None = None


def load(config: BenchConfig) -> Any:
    """Return the whole pipeline: built with random weights, or loaded from ``config.weights``."""
    # This module is imported only here, because it imports transformers, which the timing of one network does
    # not need.
    from sdfastgn.models import pipelines

    if config.weights == "random":
        return pipelines.build_pipeline(config.model, **_random_options(config))
    return pipelines.load_pipeline("--weights", config.weights, config.torch_dtype, config.torch_device)


def component(config: BenchConfig, name: str) -> tuple[Any, int]:
    """Return the module ``name`` with the config's weights, and the scale of its latents.

    The scale is the width of an image in pixels, divided by the width of its latent.

    ``name``: ``"unet"`` or ``"vae"``. Raises OptionError if a loaded pipeline has no such module.
    """
    if config.weights == "random":
        build = architectures.build_unet if name == "unet" else architectures.build_vae
        scale = latent_scale(configurations.VAES[config.model])
        return build(config.model, **_random_options(config)), scale
    pipe = load(config)
    component = getattr(pipe, name, None)
    if component is None:
        raise OptionError(f"--weights: the pipeline in {config.weights!r} has no {name}")
    vae = getattr(pipe, "vae", None)
    return component, latent_scale(None if vae is None else vae.config)


def step_inputs(config: BenchConfig, unet: Any, scale: int, **changes: Any) -> dict[str, Any]:
    """Keyword arguments of one UNet step. ``changes`` replace the config's ``size`` or ``batch``."""
    # Numbers of channels come from ``unet.config``: a loaded UNet may differ from ``config.model``.
    where = {"size": config.size, "batch": config.batch, "scale": scale, **changes}
    return model_inputs.unet_inputs(unet.config, **_random_options(config), **where)


def _random_options(config: BenchConfig) -> dict[str, Any]:
    return {"dtype": config.torch_dtype, "device": config.torch_device, "seed": config.seed}


def workload_of(module: Any, inputs: T, run: Callable[[Any, T], Any]) -> Workload:
    """A workload that calls ``run(module, inputs)``.

    Its ``fp32_output`` calls ``run`` with fp32 copies of ``module`` and ``inputs``.
    """

    def fp32_output() -> Any:
        exact = tree_map_only(torch.Tensor, lambda t: t.float() if t.is_floating_point() else t, inputs)
        with global_switches(cudnn_tf32=False, matmul_tf32=False):
            return run(copy.deepcopy(module).float(), exact)

    return Workload(module, lambda: run(module, inputs), fp32_output)


def build_unet(config: BenchConfig) -> Workload:
    """The workload of one UNet step."""
    unet, scale = component(config, "unet")
    inputs = step_inputs(config, unet, scale)
    return workload_of(unet.eval(), inputs, lambda unet, inputs: unet(**inputs, return_dict=False)[0])


def build_vae(config: BenchConfig) -> Workload:
    """The workload of one VAE decode."""
    vae, _ = component(config, "vae")
    latents = architectures.vae_latents(
        vae.config, size=config.size, batch=config.batch, **_random_options(config)
    )
    return workload_of(vae.eval(), latents, lambda vae, latents: vae.decode(latents, return_dict=False)[0])


def build_video(config: BenchConfig) -> Workload:
    """The workload of one UNet step or one decode of a network of ``VIDEO_NETWORKS``."""
    network = configurations.VIDEO_NETWORKS[config.model][config.part]
    model = architectures.build_video_network(network, **_random_options(config))
    size: dict[str, Any] = {"frames": config.frames, "height": config.size, "width": config.width}
    inputs = video.random_inputs(model, batch=config.batch, **size, **_random_options(config))
    return workload_of(model, inputs, video.run)


def _start_arguments(config: BenchConfig, pipe: Any, dtype: torch.dtype) -> dict[str, Any]:
    """The keyword arguments with the noise from which a pipeline's call starts, and with the image's size.

    For an image-to-image pipeline they are a random image and ``strength`` instead.
    """
    # ``randn`` draws in fp32 and then casts to ``dtype``. So pipelines in fp16 and fp32 start from the same
    # noise.
    where = {**_random_options(config), "dtype": dtype}
    if "strength" in inspect.signature(pipe.__call__).parameters:
        images = model_inputs.randn(config.batch, 3, config.size, config.size, **where)
        return {"image": images.sigmoid(), "strength": 1.0}
    pixels = config.size // pipe.vae_scale_factor
    noise = model_inputs.randn(config.batch, pipe.unet.config.in_channels, pixels, pixels, **where)
    return {"latents": noise, "height": config.size, "width": config.size}


def _prepare(pipe: Any, config: BenchConfig) -> None:
    """Turn progress bars off. If ``config`` names a scheduler, give it to ``pipe``."""
    pipe.set_progress_bar_config(disable=True)
    if config.scheduler:
        import diffusers

        try:
            pipe.scheduler = getattr(diffusers, config.scheduler).from_config(pipe.scheduler.config)
        except Exception as error:  # the scheduler may need a package that is not installed
            raise OptionError(f"--scheduler: cannot make {config.scheduler!r}: {one_line(error)}") from None


def build_pipeline(config: BenchConfig, pipe: Any = None) -> Workload:
    """The workload of a whole pipeline, from prompt to image.

    ``pipe``: the pipeline, if another workload has it already. If it is None, it is built or loaded here.
    """
    pipe = load(config) if pipe is None else pipe
    _prepare(pipe, config)
    if config.batch * config.size**2 > MOST_DECODED_PIXELS:
        pipe.vae.enable_slicing()
    # A UNet with ``time_cond_proj_dim``, such as LCM's, was distilled to take guidance as an embedding. The
    # benchmark's guidance does not fit such a UNet, so the default of its pipeline is used.
    distilled = getattr(pipe.unet.config, "time_cond_proj_dim", None)
    guidance = {} if distilled else {"guidance_scale": config.guidance}

    # The noise is drawn here and not in ``call``, which is timed.
    drawn = _start_arguments(config, pipe, config.torch_dtype)

    def call(start: dict[str, Any] = drawn) -> Any:
        return pipe(
            prompt=[config.prompt] * config.batch,
            num_inference_steps=config.steps,
            **start,
            # Some schedulers draw noise. A CPU generator gives the same noise on every device.
            generator=torch.Generator("cpu").manual_seed(config.seed),
            output_type="np",
            **guidance,
        ).images

    def fp32_output() -> Any:
        with _in_fp32(pipe):
            return call(_start_arguments(config, pipe, torch.float32))

    return Workload(pipe, call, fp32_output)


@contextlib.contextmanager
def _in_fp32(pipe: Any) -> Iterator[None]:
    """A context in which ``pipe`` is in fp32, without TF32. At its end each tensor has its former dtype."""
    # The pipeline itself is cast to fp32 and back: a copy of SDXL would need much memory. The casts change no
    # weight, because each value of fp16 and bf16 is exact in fp32. Some layers are in fp32 from the start.
    models = [each for each in pipe.components.values() if isinstance(each, nn.Module)]
    dtypes = [[t.dtype for t in _tensors_of(model)] for model in models]
    try:
        with global_switches(cudnn_tf32=False, matmul_tf32=False):
            pipe.to(torch.float32)
            yield
    finally:
        for model, before in zip(models, dtypes, strict=True):
            for tensor, dtype in zip(_tensors_of(model), before, strict=True):
                tensor.data = tensor.data.to(dtype)


def _tensors_of(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


def build_transformer_pipeline(config: BenchConfig) -> Workload:
    """The workload of a saved pipeline with a transformer, from prompt to image or video.

    It is called with the pipeline's own defaults, except for what ``config`` says.
    """
    pipe = load(config)
    _prepare(pipe, config)
    known = inspect.signature(pipe.__call__).parameters
    options = {"num_frames": config.frames, "guidance_scale": config.guidance}
    options = {name: value for name, value in options.items() if name in known and value is not None}

    def call() -> Any:
        images = pipe(
            prompt=[config.prompt] * config.batch,
            height=config.size,
            width=config.width,
            num_inference_steps=config.steps,
            # A CPU generator gives the same noise on every device, and in every dtype.
            generator=torch.Generator("cpu").manual_seed(config.seed),
            output_type="np",
            return_dict=False,
            **options,
        )[0]
        return images.reshape(-1, *images.shape[-3:])  # frames of videos become a batch of images

    def fp32_output() -> Any:
        with _in_fp32(pipe):
            return call()

    return Workload(pipe, call, fp32_output)


class _Recorded(Exception):  # noqa: N818  # raised to end a pipeline's call early
    pass


def build_saved_transformer(config: BenchConfig) -> Workload:
    """The workload of a step of a saved pipeline's transformer.

    The arguments of the step are those of the transformer's first call when the pipeline is called.
    """
    whole = build_transformer_pipeline(config)
    transformer, inputs = whole.target.transformer, {}

    def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs.update(inspect.signature(module.forward).bind(*args, **kwargs).arguments)
        raise _Recorded

    handle = transformer.register_forward_pre_hook(record, with_kwargs=True)
    try:
        with contextlib.suppress(_Recorded):
            whole.call()
    finally:
        handle.remove()
    inputs.pop("return_dict", None)
    return workload_of(transformer.eval(), inputs, video.run)


def saved_bytes(forward: Callable[[], object], model: nn.Module) -> int:
    """Number of bytes that autograd saves in ``forward`` for the backward, without ``model``'s parameters.

    Memory that several saved tensors share is counted once.
    """
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    found: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage.nbytes()
        # ``detach`` prevents a reference cycle: a node of the autograd graph may save its own output, which
        # refers to the node.
        return tensor.detach()

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        # ``output`` keeps all saved tensors alive. If one was freed during ``forward``, a later tensor could
        # get its address, and only the later tensor would be counted.
        output = forward()
    del output
    return sum(found.values())


def build_training(config: BenchConfig) -> Workload:
    """A training step of the UNet with fixed latents, timestep, text and noise.

    A step drops old gradients, and computes forward, mean squared error against the noise, and backward.
    ``call`` returns the gradients. Weights are in the config's dtype. There is no gradient checkpointing. A
    step does not include an optimizer, whose time and memory would be the same for every variant.

    If ``config.lora_rank`` is set, the UNet is frozen and only a LoRA in fp32 is trained. The forward then
    runs under autocast, unless the UNet is in fp32 too.
    """
    unet, scale = component(config, "unet")
    unet.train()
    if config.lora_rank is not None:
        unet.requires_grad_(False)
        add_lora(unet, rank=config.lora_rank, seed=config.seed, dtype=torch.float32)
    kwargs = step_inputs(config, unet, scale)
    generator = torch.Generator().manual_seed(config.seed + 3)
    # The noise has as many channels as the UNet's output. The input of an inpainting UNet has more.
    shape = (config.batch, unet.config.out_channels, *kwargs["sample"].shape[2:])
    noise = torch.randn(shape, generator=generator).to(config.torch_device)

    def loss_of(model: Any, inputs: dict[str, Any]) -> Tensor:
        is_mixed = config.lora_rank is not None and model.dtype != torch.float32
        with torch.autocast(config.device, config.torch_dtype, enabled=is_mixed):
            output = model(**inputs, return_dict=False)[0]
        return F.mse_loss(output.float(), noise)

    def step(model: nn.Module, inputs: dict[str, Any]) -> dict[str, Tensor]:
        model.zero_grad()
        with torch.enable_grad():
            loss_of(model, inputs).backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    def memory() -> tuple[float, float | None]:
        unet.zero_grad()
        saved_mib, step_mib = saved_bytes(lambda: loss_of(unet, kwargs), unet) / 2**20, None
        if config.torch_device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            step(unet, kwargs)
            # If the step is a CUDA graph, the tensors that autograd saves are in the graphs' memory pools.
            # The pools were allocated at the capture, so the peak of this step does not contain them. Their
            # size is added.
            pools = sum(pool_sizes().values())
            step_mib = (torch.cuda.max_memory_allocated() - before + pools) / 2**20
        unet.zero_grad()
        return saved_mib, step_mib

    return replace(workload_of(unet, kwargs, step), memory=memory)


# Value of ``BenchConfig.part`` -> function that builds the workload, except for networks of video.
BUILDERS: dict[str, Callable[[BenchConfig], Workload]] = {
    "unet": build_unet,
    "vae": build_vae,
    "pipeline": build_pipeline,
    "train": build_training,
}


# Value of ``BenchConfig.part`` -> function that builds the workload of a saved pipeline with a transformer.
OF_TRANSFORMERS = {"transformer": build_saved_transformer, "pipeline": build_transformer_pipeline}


def build_workload(config: BenchConfig) -> Workload:
    """The workload that ``config`` describes."""
    if config.frames is None:
        return BUILDERS[config.part](config)
    return build_video(config) if config.weights == "random" else OF_TRANSFORMERS[config.part](config)
