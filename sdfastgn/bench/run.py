"""Measures variants (ways to run a model): checks that the output is right, then measures times and memory.

A variant that cannot run, raises an error or has a wrong output gets a row with a reason and without times.
What is run is a workload: a model, and a function that calls it.
"""

from __future__ import annotations

import contextlib
import gc
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from sdfastgn.bench import gate, profiling, timing
from sdfastgn.bench.documents import FAILED, OK, UNAVAILABLE, WRONG
from sdfastgn.bench.environment import environment
from sdfastgn.bench.gate import Reference
from sdfastgn.bench.images import relative_error
from sdfastgn.bench.meeting import Meeting
from sdfastgn.bench.variants import Variant, prepared
from sdfastgn.bench.workload import BenchConfig, Workload, build_workload
from sdfastgn.kernels.common.failures import one_line

# Number of timed replays of each CUDA graph of a pipeline. Few are enough, because replays vary little.
GRAPH_REPEATS = 20
# Maximum number of calls of a model before the call whose output is compared with stock's output. These calls
# end as soon as ``Variant.is_ready`` returns True: FP8 first has to learn its scales.
_MOST_FIRST_CALLS = 64
# After each variant, this number of calls of the unchanged model (eager) is timed, to see whether the
# machine's speed has changed.
EAGER_REPEATS = 3


@dataclass
class Row:
    """The result of one variant (way to run a model) on one part, such as a UNet step or a VAE decode.

    Times are None unless ``status`` is ``"ok"``.

    Attributes:
        note: what the variant did to the model.
        ready_s: seconds from the start of the preparation to the end of the first call whose output is
            compared. For most variants this is the first call. FP8 first makes calls in which it learns its
            scales. Eager's first call is the first of all, and includes cuDNN's search for the fastest
            algorithms.
        graph_ms: time of a replay, if the call was captured as one CUDA graph. If it was not captured, or if
            the replay's output was wrong, ``graph_reason`` says why.
        its: iterations per second. For a pipeline, its number of denoising steps divided by the time of the
            whole call, with text encoder and decode. For other parts, calls per second.
        images_s: images per second of all processes together, if a launcher started several processes. It is
            computed from the time of the slowest process.
        process_images_s: images per second of each process.
        p99_ms: the 99th percentile of the calls' times. With few calls it is almost the slowest time.
        graphs_ms: sum of the times of all CUDA graphs that a call of a pipeline replays. Each graph is timed
            separately, so this is None for variants whose graphs cannot be replayed separately.
        eager_ms: medians of eager's calls just before and just after the variant's calls. None in eager's own
            row, in a row after which eager was not timed, and in runs with profiles.
        steps: denoising steps of a pipeline.
        frames, width: number of frames of a video, and width of a frame in pixels; the height of a frame is
            ``size``. None if the model is not in ``VIDEO_NETWORKS``.
        peak_mib: maximum number of MiB that tensors occupied during the timed calls.
        reserved_mib: maximum number of MiB of the GPU that PyTorch's CUDA allocator held during these calls,
            including CUDA graphs.
        error_eager: relative error of the output y against eager's output: ||y - eager|| / ||eager||.
        error_fp32: relative error against the output in fp32 without TF32, if this was computed.
        psnr_db: PSNR of a pipeline's images against eager's.
        psnr_fp32_db, ssim_fp32: PSNR and SSIM of a pipeline's images against the fp32 pipeline's images.
        row_error_fp32, high_row_error_fp32: the median and the 95th percentile of the relative errors of the
            rows of a network's output against fp32. A row has all channels of one position.
        step_mib: maximum memory in MiB of a training step, without model and inputs: activations that are
            kept for the backward, temporary tensors and gradients.
        saved_mib: MiB of the tensors that autograd keeps for the backward of a training step.
        profile: a ``profiling.Breakdown`` as a dict. If there is none, ``profile_reason`` says why.
    """

    model: str
    part: str
    size: int
    batch: int
    dtype: str
    variant: str
    status: str
    reason: str = ""
    note: str = ""
    ready_s: float | None = None
    median_ms: float | None = None
    p10_ms: float | None = None
    p90_ms: float | None = None
    graph_ms: float | None = None
    graph_reason: str = ""
    its: float | None = None
    images_s: float | None = None
    process_images_s: list[float] | None = None
    peak_mib: float | None = None
    error_eager: float | None = None
    error_fp32: float | None = None
    psnr_db: float | None = None
    step_mib: float | None = None
    saved_mib: float | None = None
    profile: dict[str, Any] | None = None
    profile_reason: str = ""
    psnr_fp32_db: float | None = None
    ssim_fp32: float | None = None
    p99_ms: float | None = None
    graphs_ms: float | None = None
    reserved_mib: float | None = None
    steps: int | None = None
    frames: int | None = None
    width: int | None = None
    lora_rank: int | None = None
    eager_ms: list[float] | None = None
    row_error_fp32: float | None = None
    high_row_error_fp32: float | None = None


def _finite(value: float | None) -> float | None:
    # JSON cannot hold NaN or infinity, such as the PSNR of identical images. None is written instead.
    return value if value is not None and math.isfinite(value) else None


def _free(device: torch.device) -> None:
    """Free unused memory on the GPU. Does nothing on a CPU."""
    if device.type == "cuda":
        gc.collect()
        # After an invalid memory access every CUDA call raises an error, also ``empty_cache``. This error is
        # ignored, because the variant's row already has the first error.
        with contextlib.suppress(RuntimeError):
            torch.cuda.empty_cache()


def _reference(config: BenchConfig, workload: Workload, images: dict[str, Any]) -> Reference:
    try:
        first_call_s, output = timing.time_once(workload.call, config.torch_device)
        output = gate.kept(output)
        if problem := gate.problem(config, output):
            return Reference(status=WRONG, reason=problem)
        if config.part == "pipeline":
            images["eager"] = output[0]
        stock = Reference(output, first_call_s, images=images)
        if workload.fp32_output is not None and (config.fp32_reference or config.part == "train"):
            fp32 = gate.kept(workload.fp32_output())
            if config.part == "pipeline":
                images["fp32"] = fp32[0]
            error = relative_error(gate.tensors(output), gate.tensors(fp32))
            stock = replace(stock, fp32=fp32, fp32_error=error)
        return stock
    except Exception as error:  # stock's call failed: perhaps there is too little memory
        return Reference(status=FAILED, reason=f"stock eager fails: {one_line(error)}")
    finally:
        _free(config.torch_device)


def _stock(
    config: BenchConfig, workload: Workload | None, images: dict[str, Any]
) -> tuple[Workload, Reference]:
    """Return (workload, stock's output). Builds the workload (a model and its call) if ``workload`` is None.

    ``images``: a dict to which the first images of a pipeline's output are added, as "eager" and "fp32".
    If there is too little memory to build the model, the Reference has the status FAILED and no output.
    """
    try:
        workload = workload or build_workload(config)
    except torch.OutOfMemoryError as error:
        reason = f"stock eager fails: {one_line(error)}"
        return Workload(None, lambda: None, None), Reference(status=FAILED, reason=reason)
    return workload, _reference(config, workload, images)


def _no_graph_reason(config: BenchConfig, variant: Variant) -> str:
    if config.part == "pipeline":
        return "a pipeline is not one graph"
    if config.part == "train":
        return "a training step is timed call by call"
    if config.torch_device.type != "cuda":
        return f"CUDA graphs need CUDA; the device is {config.torch_device}"
    return "the variant replays CUDA graphs itself" if variant.replays_graph else ""


def _replay(
    row: Row, config: BenchConfig, variant: Variant, workload: Workload, stock: Reference
) -> tuple[Callable[[], object] | None, Any]:
    """Capture the workload's call as a CUDA graph, check the output of a replay, and time replays.

    Returns (replay function, output). Each replay writes into ``output``. Sets the row's ``graph_ms``. If the
    call cannot be captured or the output is wrong, sets ``graph_reason`` and returns (None, None).
    """
    row.graph_reason = _no_graph_reason(config, variant)
    try:
        if not row.graph_reason:
            replay, output = timing.capture_graph(workload.call)
            replay()
            torch.cuda.synchronize()
            if reason := gate.judge(config, output, stock, variant.slack).reason:
                row.graph_reason = f"the replay is wrong: {reason}"
            else:
                timed = timing.time_callable(replay, config.torch_device, repeats=config.repeats)
                row.graph_ms = timed.median_ms
                return replay, output
    except Exception as error:  # a failed capture of a CUDA graph is a result, not an error of the benchmark
        row.graph_reason = f"capture failed: {one_line(error)}"
    return None, None


def _profile(row: Row, config: BenchConfig, call: Callable[[], Any], replay: Any) -> None:
    """Set ``row.profile`` (where the call's time goes), or ``row.profile_reason`` if the profiler fails."""
    # A pipeline is recorded only once: it launches tens of thousands of kernels, and a recording of them
    # takes minutes.
    recordings = 1 if config.part == "pipeline" else profiling.RECORDINGS
    try:
        found = profiling.measure(
            call,
            replay,
            config.torch_device,
            call_ms=row.median_ms or math.nan,
            replay_ms=row.graph_ms,
            recordings=recordings,
        )
        row.profile = asdict(found)
    except Exception as error:
        row.profile_reason = one_line(error)


def _call_when_ready(variant: Variant, workload: Workload) -> Any:
    """Call the workload until ``variant`` is ready (FP8 first learns its scales), then once more.

    Returns the output of the last call.
    """
    for _ in range(_MOST_FIRST_CALLS):
        if variant.is_ready(workload.target):
            break
        workload.call()
    return workload.call()


def _measure(
    row: Row,
    config: BenchConfig,
    variant: Variant,
    workload: Workload,
    stock: Reference,
    meeting: Meeting,
) -> None:
    """Set the errors of ``row``. If the correctness gate accepts them, set its times and memory too."""
    device = config.torch_device
    with contextlib.ExitStack() as stack:
        context = prepared(variant, workload.target, config.part)
        prepare_s, _ = timing.time_once(lambda: stack.enter_context(context), device)
        call_s, output = timing.time_once(lambda: _call_when_ready(variant, workload), device)
        judgement = gate.judge(config, output, stock, variant.slack)
        row.error_eager, row.error_fp32 = _finite(judgement.error), _finite(judgement.fp32_error)
        row.psnr_db, row.psnr_fp32_db = _finite(judgement.psnr_db), _finite(judgement.fp32_psnr_db)
        row.ssim_fp32 = _finite(judgement.fp32_ssim)
        row.row_error_fp32, row.high_row_error_fp32 = map(_finite, judgement.rows)
        if judgement.reason:
            row.status, row.reason, row.note = WRONG, judgement.reason, variant.describe(workload.target)
            return
        if config.part == "pipeline":
            stock.images[variant.name] = output[0]
        del output
        timed = timing.time_callable(workload.call, device, repeats=config.repeats)
        seconds = meeting.seconds(workload.call, config.repeats, device)
        if seconds:
            images = config.batch * config.repeats
            row.process_images_s = [images / each for each in seconds]
            row.images_s = len(seconds) * images / max(seconds)
        # ``row.note`` says what the variant did to the model. Some variants do a part of this only in the
        # second call, so the note is made after the calls.
        row.note = variant.describe(workload.target)
        row.ready_s = stock.first_call_s if variant.name == "eager" else prepare_s + call_s
        row.median_ms, row.p10_ms, row.p90_ms = timed.median_ms, timed.p10_ms, timed.p90_ms
        row.p99_ms, row.peak_mib, row.reserved_mib = timed.p99_ms, timed.peak_mib, timed.reserved_mib
        if variant.graphs_stand_alone and config.part == "pipeline" and device.type == "cuda":
            repeats = min(config.repeats, GRAPH_REPEATS)
            row.graphs_ms = timing.time_graphs(workload.call, device, repeats=repeats)
        row.its = 1e3 * (config.steps if config.part == "pipeline" else 1) / timed.median_ms
        if workload.memory is not None:
            row.saved_mib, row.step_mib = workload.memory()
        # Replays write into the memory of ``_output``, which must stay alive while ``_profile`` replays.
        replay, _output = _replay(row, config, variant, workload, stock)
        if config.profile:
            _profile(row, config, workload.call, replay)


def _attempt(
    config: BenchConfig, variant: Variant, workload: Workload, stock: Reference, meeting: Meeting
) -> Row:
    what = (config.model, config.part, config.size, config.batch, config.dtype, variant.name)
    more: dict[str, Any] = {
        "steps": config.steps if config.part == "pipeline" else None,
        "frames": config.frames,
        "width": config.width,
        "lora_rank": config.lora_rank,
    }
    if (reason := variant.available(config.torch_device)) is not None:
        return Row(*what, UNAVAILABLE, reason, **more)
    row = Row(*what, stock.status, stock.reason, **more)
    if stock.status == OK:
        try:
            _measure(row, config, variant, workload, stock, meeting)
        except Exception as error:  # the run goes on after an error, whose text is in the variant's row
            row = Row(*what, FAILED, one_line(error), **more)
        finally:
            _free(config.torch_device)
    return row


def run(
    config: BenchConfig,
    variants: Sequence[Variant],
    *,
    workload: Workload | None = None,
    on_variant: Callable[[str], object] = lambda what: None,
    on_row: Callable[[Row], object] = lambda row: None,
    images: dict[str, Any] | None = None,
) -> list[Row]:
    """Measure ``variants`` (ways to run a model) on one workload, all with the same global switches.

    Args:
        config: the part of the model, its size and so on.
        variants: the variants to measure.
        workload: the workload. If it is None, it is built from ``config``.
        on_variant: called before each variant with a text, such as ``"unet: eager"``.
        on_row: called with each row as soon as it is measured.
        images: a dict to which a pipeline's first images are added: variant -> image, for each variant whose
            output is right. If the fp32 reference is computed, its image has the key ``"fp32"``.
    """
    device = config.torch_device
    with (
        timing.device_scope(device),
        timing.global_switches(cudnn_benchmark=tries_algorithms(config)),
        torch.no_grad(),
    ):
        timing.spin_up(device)
        workload, stock = _stock(config, workload, {} if images is None else images)
        rows = []
        eager: float | None = None  # the latest median of eager's times, in ms
        for variant in variants:
            on_variant(f"{config.part}: {variant.name}")
            meeting = Meeting()
            row = _attempt(config, variant, workload, stock, meeting)
            meeting.leave(row.reason)
            if variant.name == "eager":
                eager = row.median_ms
            elif eager is not None and row.median_ms is not None and not config.profile:
                # Without CUDA graphs a call's time depends on how fast the CPU launches kernels, and a shared
                # CPU's speed may change by a factor of two within minutes. So eager is timed again after each
                # variant, and the speed-up uses eager's times just before and just after the variant.
                # In runs with profiles eager is not timed again: after the profiler has recorded something,
                # eager's calls take longer.
                repeats = min(config.repeats, EAGER_REPEATS)
                again = timing.time_callable(workload.call, device, repeats=repeats, warmup=1).median_ms
                row.eager_ms, eager = [eager, again], again
            rows.append(row)
            on_row(row)
    del workload, stock
    _free(device)
    return rows


def tries_algorithms(config: BenchConfig) -> bool:
    """The value for ``torch.backends.cudnn.benchmark``: if True, cuDNN tries several algorithms.

    It is False for training steps, whose peak memory is measured: an algorithm that cuDNN tries may need a
    workspace that is larger than the memory of the step.
    """
    return config.part != "train"


def describe(configs: Sequence[BenchConfig]) -> dict[str, Any]:
    """Returns the configs as a dict for JSON. Each config also says, in words, which errors are accepted."""
    return {
        "parts": [
            {**asdict(each), "gate": gate.gate_text(each), "cudnn_benchmark": tries_algorithms(each)}
            for each in configs
        ]
    }


def current_environment(device: torch.device, configs: Sequence[BenchConfig] = ()) -> dict[str, Any]:
    """Returns a dict for JSON: the machine, the versions, and PyTorch's global switches during the run.

    The switches are those that ``run`` sets for ``configs[0]``.
    """
    tries = not configs or tries_algorithms(configs[0])
    with timing.global_switches(cudnn_benchmark=tries) as switches:
        return environment(device, switches)
