"""Variants on a workload: correctness first, then times and memory.

A variant that cannot run, raises, or is wrong is a row with a reason and no time.
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
from sdfastgn.bench.workload import BUILDERS, BenchConfig, Workload
from sdfastgn.kernels.common.failures import one_line

# Replays of each of a pipeline's graphs: a graph alone takes the same time again and again.
GRAPH_REPEATS = 20


@dataclass
class Row:
    """One variant on one part. Times are None unless ``status`` is ``"ok"``.

    Attributes:
        ready_s: seconds from preparing to the first call's end. Eager's holds cuDNN's tuning.
        graph_ms: of one replay of the call captured in a CUDA graph, or ``graph_reason`` says why not.
        its: iterations a second: UNet steps (also of a pipeline), or decodes of a VAE.
        images_s: of all processes together, by the slowest, where a launcher has started several.
        process_images_s: of each process.
        p99_ms: the 99th percentile; with few calls it is next to the slowest.
        graphs_ms: of the CUDA graphs that a call of a pipeline replays, each timed alone, for variants
            whose graphs can be.
        steps: of a pipeline.
        peak_mib: MiB that tensors held at most during the timed calls.
        reserved_mib: MiB that the CUDA allocator took for them, memory of CUDA graphs included.
        error_eager: ||y - eager|| / ||eager||.
        error_fp32: the same against fp32 without TF32, where that was asked for.
        psnr_db: of a pipeline's images, against eager's.
        psnr_fp32_db, ssim_fp32: of a pipeline's images, against those of the fp32 pipeline.
        step_mib: of a training step, what PyTorch's CUDA allocator held at most over what the model
            and its inputs occupy: all that is kept for the backward, temporaries, gradients.
        saved_mib: of a training step, what autograd keeps for the backward.
        profile: a ``profiling.Breakdown`` as a dict, or ``profile_reason`` says why not.
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


def _finite(value: float | None) -> float | None:
    # JSON has no NaN and no infinity; identical images have an infinite PSNR.
    return value if value is not None and math.isfinite(value) else None


def _free(device: torch.device) -> None:
    """Gives the GPU's memory back. On a CPU a full collection would only take half a second."""
    if device.type == "cuda":
        gc.collect()
        # After a peer's invalid access nothing runs on this GPU any more. Its row has said so.
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
    except Exception as error:  # too little memory, or weights of another architecture
        return Reference(status=FAILED, reason=f"stock eager fails: {one_line(error)}")
    finally:
        _free(config.torch_device)


def _stock(
    config: BenchConfig, workload: Workload | None, images: dict[str, Any]
) -> tuple[Workload, Reference]:
    """The workload, built if there is none, and stock's output. What does not fit fails as stock's call."""
    try:
        workload = workload or BUILDERS[config.part](config)
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
    """The call as the replay of a CUDA graph, timed, or None and the row's reason why there is none.

    Each replay writes to the memory of the output, which is returned too. A wrong one gets no time.
    """
    row.graph_reason = _no_graph_reason(config, variant)
    try:
        if not row.graph_reason:
            replay, output = timing.capture_graph(workload.call)
            replay()
            torch.cuda.synchronize()
            if reason := gate.judge(config, output, stock).reason:
                row.graph_reason = f"the replay is wrong: {reason}"
            else:
                timed = timing.time_callable(replay, config.torch_device, repeats=config.repeats)
                row.graph_ms = timed.median_ms
                return replay, output
    except Exception as error:  # whatever a variant does under capture is its result, not the harness's
        row.graph_reason = f"capture failed: {one_line(error)}"
    return None, None


def _profile(row: Row, config: BenchConfig, call: Callable[[], Any], replay: Any) -> None:
    """Fills in the row's ``profile``, or ``profile_reason`` where the profiler does not work."""
    # Recording the tens of thousands of kernels of a pipeline takes minutes.
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


def _measure(
    row: Row,
    config: BenchConfig,
    variant: Variant,
    workload: Workload,
    stock: Reference,
    meeting: Meeting,
) -> None:
    """Fills in the row: errors and, if these are within their bounds, times."""
    device = config.torch_device
    with contextlib.ExitStack() as stack:
        context = prepared(variant, workload.target, config.part)
        prepare_s, _ = timing.time_once(lambda: stack.enter_context(context), device)
        call_s, output = timing.time_once(workload.call, device)
        judgement = gate.judge(config, output, stock)
        row.error_eager, row.error_fp32 = _finite(judgement.error), _finite(judgement.fp32_error)
        row.psnr_db, row.psnr_fp32_db = _finite(judgement.psnr_db), _finite(judgement.fp32_psnr_db)
        row.ssim_fp32 = _finite(judgement.fp32_ssim)
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
        # After all calls: a variant may do something at its second.
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
        # The output is held: a replay writes to its memory.
        replay, _output = _replay(row, config, variant, workload, stock)
        if config.profile:
            _profile(row, config, workload.call, replay)


def _attempt(
    config: BenchConfig, variant: Variant, workload: Workload, stock: Reference, meeting: Meeting
) -> Row:
    what = (config.model, config.part, config.size, config.batch, config.dtype, variant.name)
    steps = config.steps if config.part == "pipeline" else None
    if (reason := variant.available(config.torch_device)) is not None:
        return Row(*what, UNAVAILABLE, reason, steps=steps)
    row = Row(*what, stock.status, stock.reason, steps=steps)
    if stock.status == OK:
        try:
            _measure(row, config, variant, workload, stock, meeting)
        except Exception as error:  # a variant that breaks is a row of the table, without times
            row = Row(*what, FAILED, one_line(error), steps=steps)
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
    """Measures ``variants`` on one workload, all under the same global switches.

    ``workload`` is an already built one. ``on_variant`` gets part and variant before it starts,
    ``on_row`` each row as soon as there is one, ``images`` a pipeline's first right image by
    variant and, where that was asked for, under ``"fp32"``.
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
        for variant in variants:
            on_variant(f"{config.part}: {variant.name}")
            meeting = Meeting()
            rows.append(_attempt(config, variant, workload, stock, meeting))
            meeting.leave(rows[-1].reason)
            on_row(rows[-1])
    del workload, stock
    _free(device)
    return rows


def tries_algorithms(config: BenchConfig) -> bool:
    """Whether cuDNN tries its algorithms: in training their workspaces would be the peak memory."""
    return config.part != "train"


def describe(configs: Sequence[BenchConfig]) -> dict[str, Any]:
    """The configs as JSON, each with its correctness gate in words."""
    return {
        "parts": [
            {**asdict(each), "gate": gate.gate_text(each), "cudnn_benchmark": tries_algorithms(each)}
            for each in configs
        ]
    }


def current_environment(device: torch.device, configs: Sequence[BenchConfig] = ()) -> dict[str, Any]:
    """:func:`environment` with the switches that :func:`run` sets for the first config."""
    tries = not configs or tries_algorithms(configs[0])
    with timing.global_switches(cudnn_benchmark=tries) as switches:
        return environment(device, switches)
