"""Variants on a workload: correctness first, then times and memory.

A variant that cannot run, raises, or is wrong is a row with a reason and no time.
"""

from __future__ import annotations

import contextlib
import gc
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from sdfastgn.bench import timing
from sdfastgn.bench.documents import FAILED, OK, UNAVAILABLE, WRONG, one_line
from sdfastgn.bench.environment import environment
from sdfastgn.bench.images import relative_error
from sdfastgn.bench.models import profiling, training
from sdfastgn.bench.models import workload as workloads
from sdfastgn.bench.models.training import Gradients
from sdfastgn.bench.models.variants import Variant, prepared
from sdfastgn.bench.models.workload import BenchConfig, Judgement, Workload

# How each part's workload is made.
BUILDERS: dict[str, Callable[[BenchConfig], Workload]] = {
    "unet": workloads.build_unet,
    "vae": workloads.build_vae,
    "pipeline": workloads.build_pipeline,
    "train": training.build,
}


@dataclass
class Row:
    """One variant on one part. Times are None unless ``status`` is ``"ok"``.

    Attributes:
        ready_s: seconds from preparing to the first call's end. Eager's holds cuDNN's tuning.
        median_ms, p10_ms, p90_ms: milliseconds of one call.
        graph_ms: milliseconds of one replay of the call captured in a CUDA graph; where None,
            ``graph_reason`` says why.
        its: iterations a second: UNet steps (also of a pipeline), or decodes of a VAE.
        peak_mib: MiB that the CUDA allocator held at most during the timed calls.
        error_eager: ||y - eager|| / ||eager||.
        error_fp32: the same against fp32 without TF32, where that was asked for.
        psnr_db: images of a pipeline against eager's.
        step_mib: of a training step, what PyTorch's CUDA allocator held at most over what the model
            and its inputs occupy: all that is kept for the backward, temporaries, gradients.
        saved_mib: of a training step, what autograd keeps for the backward.
        profile: a ``profiling.Breakdown`` as a dict, where that was asked for; where it could not
            be had, ``profile_reason`` says why.
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
    peak_mib: float | None = None
    error_eager: float | None = None
    error_fp32: float | None = None
    psnr_db: float | None = None
    step_mib: float | None = None
    saved_mib: float | None = None
    profile: dict[str, Any] | None = None
    profile_reason: str = ""


@dataclass(frozen=True)
class _Replay:
    """A call captured in a CUDA graph, judged and timed; where there is none, ``reason`` says why.

    Each ``call`` writes to the memory of ``output``, which must not be freed before.
    """

    median_ms: float | None = None
    call: Callable[[], object] | None = None
    output: Any = None
    reason: str = ""


@dataclass
class _References:
    """Stock eager's output, the seconds of its first call, and the fp32 output where that was asked
    for or is the gate.

    Where nothing can be compared with it, ``status`` is not ``"ok"`` and ``reason`` says why.
    """

    output: Any = None
    first_call_s: float = 0.0
    fp32: Any = None
    gradient_limit: float = math.nan
    status: str = OK
    reason: str = ""


def _finite(value: float | None) -> float | None:
    # JSON has no NaN and no infinity; identical images have an infinite PSNR.
    return value if value is not None and math.isfinite(value) else None


def _row(config: BenchConfig, variant: Variant, status: str, **values: Any) -> Row:
    what = (config.model, config.part, config.size, config.batch, config.dtype)
    return Row(*what, variant.name, status, **values)


def _free(device: torch.device) -> None:
    """Gives the GPU's memory back. On a CPU a full collection would only take half a second."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


def _keep(output: Any) -> Any:
    if isinstance(output, Gradients):
        return output.kept()
    # A variant with CUDA graphs of its own overwrites its output in the next call.
    return output.detach().clone() if isinstance(output, torch.Tensor) else output


def _error(output: Any, reference: Any) -> float:
    if isinstance(output, Gradients):
        return output.relative_error(reference)
    return float(relative_error(output, reference))


def _judge(config: BenchConfig, output: Any, stock: _References) -> Judgement:
    if isinstance(output, Gradients):
        judged = training.judge(config, output, stock.fp32, stock.gradient_limit)
        return Judgement(output.relative_error(stock.output), None, judged.reason)
    return workloads.judge(config, output, stock.output)


def _references(config: BenchConfig, workload: Workload) -> _References:
    try:
        first_call_s, output = timing.time_once(workload.call, config.torch_device)
        output = _keep(output)
        trains = isinstance(output, Gradients)
        problem = output.problem() if trains else workloads.usable_reference(config, output)
        if problem:
            return _References(status=WRONG, reason=problem)
        reference = workload.fp32_output if config.fp32_reference or trains else None
        fp32 = None if reference is None else reference()
        limit = training.error_limit(config, output.relative_error(fp32)) if trains else math.nan
    except Exception as error:  # too little memory, or weights of another architecture
        return _References(status=FAILED, reason=f"stock eager fails: {one_line(error)}")
    finally:
        _free(config.torch_device)
    return _References(output, first_call_s, fp32, limit)


def _no_graph_reason(config: BenchConfig, variant: Variant) -> str:
    if config.part == "pipeline":
        return "a pipeline is not one graph"
    if config.part == "train":
        return "a training step is timed call by call"
    if config.torch_device.type != "cuda":
        return f"CUDA graphs need CUDA; the device is {config.torch_device}"
    return "the variant replays CUDA graphs itself" if variant.replays_graph else ""


def _graph(config: BenchConfig, variant: Variant, workload: Workload, stock: _References) -> _Replay:
    """A replay of the call, or why there is none. A wrong replay gets no time."""
    reason = _no_graph_reason(config, variant)
    if reason:
        return _Replay(reason=reason)
    try:
        replay, output = timing.capture_graph(workload.call)
        replay()
        torch.cuda.synchronize()
        judgement = _judge(config, output, stock)
        if judgement.reason:
            return _Replay(reason=f"the replay is wrong: {judgement.reason}")
        timed = timing.time_callable(replay, config.torch_device, repeats=config.repeats)
        return _Replay(timed.median_ms, replay, output)
    except Exception as error:  # whatever a variant does under capture is its result, not the harness's
        return _Replay(reason=f"capture failed: {one_line(error)}")


def _profile(config: BenchConfig, workload: Workload, call_ms: float, replay: _Replay) -> dict[str, Any]:
    """The row's ``profile``, or ``profile_reason`` where the profiler does not work."""
    if not config.profile:
        return {}
    # Recording the tens of thousands of kernels of a pipeline takes minutes.
    recordings = 1 if config.part == "pipeline" else profiling.RECORDINGS
    try:
        found = profiling.measure(
            workload.call,
            replay.call,
            config.torch_device,
            call_ms=call_ms,
            replay_ms=replay.median_ms,
            recordings=recordings,
        )
    except Exception as error:
        return {"profile_reason": one_line(error)}
    return {"profile": asdict(found)}


def _measure(config: BenchConfig, variant: Variant, workload: Workload, stock: _References) -> Row:
    device = config.torch_device
    is_eager = variant.name == "eager"
    with contextlib.ExitStack() as stack:
        context = prepared(variant, workload.target, config.part)
        prepare_s, _ = timing.time_once(lambda: stack.enter_context(context), device)
        call_s, output = timing.time_once(workload.call, device)
        judgement = _judge(config, output, stock)
        values: dict[str, Any] = {
            "error_eager": _finite(judgement.error),
            "psnr_db": _finite(judgement.psnr_db),
        }
        if stock.fp32 is not None:
            values["error_fp32"] = _finite(_error(output, stock.fp32))
        if judgement.reason:
            note = variant.describe(workload.target)
            return _row(config, variant, WRONG, reason=judgement.reason, note=note, **values)
        del output
        timed = timing.time_callable(workload.call, device, repeats=config.repeats)
        values["note"] = variant.describe(
            workload.target
        )  # after all calls: a variant may do something at its second
        values |= workload.memory() if workload.memory is not None else {}
        replay = _graph(config, variant, workload, stock)
        values |= _profile(config, workload, timed.median_ms, replay)
    iterations = config.steps if config.part == "pipeline" else 1
    return _row(
        config,
        variant,
        OK,
        ready_s=stock.first_call_s if is_eager else prepare_s + call_s,
        median_ms=timed.median_ms,
        p10_ms=timed.p10_ms,
        p90_ms=timed.p90_ms,
        peak_mib=timed.peak_mib,
        its=1e3 * iterations / timed.median_ms,
        graph_ms=replay.median_ms,
        graph_reason=replay.reason,
        **values,
    )


def _attempt(config: BenchConfig, variant: Variant, workload: Workload, stock: _References) -> Row:
    reason = variant.available(config.torch_device)
    if reason is not None:
        return _row(config, variant, UNAVAILABLE, reason=reason)
    if stock.status != OK:
        return _row(config, variant, stock.status, reason=stock.reason)
    try:
        return _measure(config, variant, workload, stock)
    except Exception as error:  # a variant that breaks is a row of the table
        return _row(config, variant, FAILED, reason=one_line(error))
    finally:
        _free(config.torch_device)


def run(
    config: BenchConfig,
    variants: Sequence[Variant],
    *,
    workload: Workload | None = None,
    on_variant: Callable[[str], object] = lambda name: None,
    on_row: Callable[[Row], object] = lambda row: None,
) -> list[Row]:
    """Measures ``variants`` on one workload, all under the same global switches.

    Args:
        workload: an already built one, instead of building the config's.
        on_variant: called with a variant's name before it starts, for a progress bar.
        on_row: called with each row as soon as there is one, for whoever must not lose it.
    """
    device = config.torch_device
    with (
        timing.device_scope(device),
        timing.global_switches(cudnn_benchmark=tries_algorithms(config)),
        torch.no_grad(),
    ):
        timing.spin_up(device)
        if workload is None:
            workload = BUILDERS[config.part](config)
        stock = _references(config, workload)
        rows = []
        for variant in variants:
            on_variant(variant.name)
            rows.append(_attempt(config, variant, workload, stock))
            on_row(rows[-1])
    del workload, stock
    _free(device)
    return rows


def tries_algorithms(config: BenchConfig) -> bool:
    """Whether cuDNN tries its algorithms: in training their workspaces would be the peak memory."""
    return config.part != "train"


def describe(configs: Sequence[BenchConfig]) -> dict[str, Any]:
    """The configs as JSON, each with its correctness gate in words."""
    gates = [
        {"gate": workloads.gate_text(each), "cudnn_benchmark": tries_algorithms(each)} for each in configs
    ]
    return {"parts": [{**asdict(config), **gate} for config, gate in zip(configs, gates, strict=True)]}


def current_environment(device: torch.device, configs: Sequence[BenchConfig] = ()) -> dict[str, Any]:
    """:func:`environment` with the switches that :func:`run` sets for the first config."""
    tries = tries_algorithms(configs[0]) if configs else True
    with timing.global_switches(cudnn_benchmark=tries) as switches:
        return environment(device, switches)
