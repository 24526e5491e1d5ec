"""Time offloaded pipelines, stock and optimized. sdfastgn does not change their largest models.

python -m scripts.publish.offloading --json benchmarks/by_hand/offloading.json

The largest models are the text encoder and the transformer. They are T5 and the transformer of Flux.1 schnell
in one pipeline, and UMT5 and the transformer of Wan 2.1 (1.3B) in the other. The weights are random, in bf16.
Each pipeline is called three times after ``enable_model_cpu_offload``. The optimized pipeline's first call
includes the time to compile kernels, and copies all weights back to main memory. In its later calls, large
weights are copied back only if they have changed.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from torch import nn

import sdfastgn
from scripts.publish.runs import call_times, release_memory, write_each
from scripts.publish.tables.offloading import KIND, OffloadingRow
from scripts.publish.tiled_decode import AUTOENCODERS
from sdfastgn.bench import documents, gate, timing
from sdfastgn.bench.environment import environment
from sdfastgn.bench.workload import BenchConfig
from sdfastgn.cli.session import exit_code
from sdfastgn.models.architectures import with_random_weights
from sdfastgn.models.configurations import PROMPT, TEXT_ENCODERS, VAES
from sdfastgn.models.pipelines import build_tokenizer

DTYPE = torch.bfloat16
STEPS = 4
CALLS = 3
# The encoder of T5 v1.1 XXL. UMT5 XXL has the same values, except for ``vocab_size``.
_T5 = {
    "vocab_size": 32128,
    "d_model": 4096,
    "d_ff": 10240,
    "d_kv": 64,
    "num_heads": 64,
    "num_layers": 24,
    "feed_forward_proj": "gated-gelu",
}
_SMALL_T5 = {"vocab_size": 600, "d_model": 32, "d_ff": 64, "d_kv": 16, "num_heads": 2, "num_layers": 1}
_SMALL_FLUX = {
    "in_channels": 16,
    "num_layers": 1,
    "num_single_layers": 1,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 32,
    "pooled_projection_dim": 32,
    "axes_dims_rope": (4, 4, 8),
}
_WAN = {
    "num_attention_heads": 12,
    "attention_head_dim": 128,
    "ffn_dim": 8960,
    "num_layers": 30,
}
_SMALL_WAN = {
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "ffn_dim": 64,
    "num_layers": 1,
    "text_dim": 32,
}


@dataclass(frozen=True)
class Offloaded:
    """A pipeline to offload, and those arguments of its calls that differ between pipelines."""

    pipe: Any
    arguments: dict[str, Any]

    def call(self) -> Any:
        """Returns images (N, H, W, 3) or the frames of videos (N, F, H, W, 3), with values in [0, 1]."""
        generator = torch.Generator("cpu").manual_seed(0)
        made = self.pipe(
            PROMPT, num_inference_steps=STEPS, generator=generator, output_type="np", **self.arguments
        )
        return made[0]


def flux(device: torch.device, tiny: bool) -> Offloaded:
    """Builds the pipeline of Flux.1 schnell, for images of 1024 x 1024 pixels.

    ``tiny``: True for small models and images of 64 x 64 pixels.
    """
    config = {**VAES["tiny"], "latent_channels": 4} if tiny else AUTOENCODERS["Flux"]
    pipe = diffusers.FluxPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        vae=_model(diffusers.AutoencoderKL, {**config, "shift_factor": 0.1}, device),
        text_encoder=_text_encoder("CLIPText", TEXT_ENCODERS["tiny" if tiny else "sd15"][0], device),
        tokenizer=build_tokenizer(),
        text_encoder_2=_text_encoder("T5", _SMALL_T5 if tiny else _T5, device),
        tokenizer_2=build_tokenizer(),
        transformer=_model(diffusers.FluxTransformer2DModel, _SMALL_FLUX if tiny else {}, device),
    )
    pixels = 64 if tiny else 1024
    return Offloaded(pipe, {"height": pixels, "width": pixels, "guidance_scale": 0.0})


def wan(device: torch.device, tiny: bool) -> Offloaded:
    """Builds the pipeline of Wan 2.1 1.3B, for videos of 81 frames of 480 x 832 pixels, without guidance.

    ``tiny``: True for small models and 5 frames of 32 x 32 pixels.
    """
    small = {"base_dim": 8, "z_dim": 16}
    text = _SMALL_T5 if tiny else {**_T5, "vocab_size": 256384}
    pipe = diffusers.WanPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=_model(diffusers.AutoencoderKLWan, small if tiny else {}, device),
        text_encoder=_text_encoder("UMT5", text, device),
        tokenizer=build_tokenizer(),
        transformer=_model(diffusers.WanTransformer3DModel, _SMALL_WAN if tiny else _WAN, device),
    )
    size = (5, 32, 32) if tiny else (81, 480, 832)
    sizes = dict(zip(("num_frames", "height", "width"), size, strict=True))
    return Offloaded(pipe, {**sizes, "guidance_scale": 1.0})


# Name of a pipeline -> the function that builds it. The function's arguments are the device, and True for a
# small pipeline.
PIPELINES: dict[str, Callable[[torch.device, bool], Offloaded]] = {"flux": flux, "wan": wan}


def _model(cls: Any, config: dict[str, Any], device: torch.device) -> Any:
    return with_random_weights(lambda: cls(**config), DTYPE, device, seed=0)


def _text_encoder(family: str, config: dict[str, Any], device: torch.device) -> Any:
    """A text encoder of transformers with random weights.

    ``family``: ``"CLIPText"``, ``"T5"`` or ``"UMT5"``. ``config``: the arguments of its configuration.
    """
    # All pipelines here have the tokenizer of ``build_tokenizer``. Its token 512 begins a text, and its token
    # 513 ends it.
    tokens = {"bos_token_id": 512, "eos_token_id": 513, "pad_token_id": 513}
    whole = getattr(transformers, f"{family}Config")(**config, **tokens)
    cls = getattr(transformers, "CLIPTextModel" if family == "CLIPText" else f"{family}EncoderModel")
    return with_random_weights(lambda: cls(whole), DTYPE, device, seed=0)


def rows(name: str, device: torch.device, tiny: bool) -> Iterator[OffloadingRow]:
    """Yields the row of the stock pipeline, then the row of the optimized pipeline."""
    release_memory()  # the pipeline that was measured before is freed
    offloaded = PIPELINES[name](device, tiny)
    pipe = offloaded.pipe
    pipe.set_progress_bar_config(disable=True)
    models = [model for model in pipe.components.values() if isinstance(model, nn.Module)]
    weights = sum(p.nbytes for model in models for p in model.parameters())
    size = offloaded.arguments["height"]
    config = BenchConfig(name, "pipeline", size, 1, "bf16", str(device), repeats=CALLS, steps=STEPS)
    stock = None
    for is_optimized in (False, True):
        if is_optimized:
            sdfastgn.optimize(pipe)
        pipe.enable_model_cpu_offload(device=device)
        release_memory()
        row, made = _called(OffloadingRow(name, is_optimized, weights / 2**30), offloaded.call, device)
        pipe.remove_all_hooks()
        if made is not None:
            stock = stock or gate.Reference(made)
            row = _checked(row, config, made, stock)
        yield row


def _called(row: OffloadingRow, call: Callable[[], Any], device: torch.device) -> tuple[OffloadingRow, Any]:
    """Calls a pipeline ``CALLS`` times. Returns (``row`` with the times and the memory, the last result).

    If a call fails, the row has the reason, and the result is None.
    """
    calls = call_times(call, CALLS, device)
    if calls.reason:
        return replace(row, status=documents.FAILED, reason=calls.reason), None
    reserved = None if calls.reserved_mib is None else calls.reserved_mib / 1024
    return replace(row, call_s=list(calls.seconds), reserved_gib=reserved), calls.result


def _checked(row: OffloadingRow, config: BenchConfig, made: Any, stock: gate.Reference) -> OffloadingRow:
    """Returns ``row``, or a row with the status ``WRONG`` if the images or frames ``made`` are wrong.

    They are wrong if they are not finite, are constant, or differ too much from stock's.
    """
    reason = gate.judge(config, made, stock).reason or gate.problem(config, made)
    return replace(row, status=documents.WRONG, reason=reason, call_s=[]) if reason else row


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command. Returns the exit code: 1 if a result was wrong or every row failed, else 0."""
    parser = argparse.ArgumentParser(
        "python -m scripts.publish.offloading",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", type=Path, required=True, help="file for the result")
    parser.add_argument("--only", choices=PIPELINES, help="measure only this pipeline")
    parser.add_argument("--tiny", action="store_true", help="measure small pipelines")
    parser.add_argument("--device", default="cuda", help="device of the pipelines")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    names = [options.only] if options.only else PIPELINES
    with timing.global_switches(cudnn_benchmark=False) as switches:
        where = environment(device, switches)
        measured = itertools.chain.from_iterable(rows(name, device, options.tiny) for name in names)
        found = write_each(measured, options.json, KIND, where, {"dtype": "bf16", "steps": STEPS})
    return exit_code(found)


if __name__ == "__main__":
    sys.exit(main())
