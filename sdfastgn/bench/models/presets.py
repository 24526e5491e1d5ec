"""Benchmarks that others publish, by name: their settings and their numbers. Importable without torch.

Each number was read at its source. A preset without numbers is one whose figures were not found at
a source that stands; ``differs`` says in what our run is another.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Published:
    """A number in the preset's unit, for one GPU: what ran, and where."""

    what: str
    gpu: str
    value: float


@dataclass(frozen=True)
class Case:
    """One row of a preset: fields of a BenchConfig, and what was published for them."""

    settings: dict[str, Any]
    published: tuple[Published, ...] = ()


@dataclass(frozen=True)
class Preset:
    """A benchmark of others.

    Attributes:
        unit: that its numbers are quoted in: it/s, images/s, s or ms.
        source, date: where the numbers stand, and of when that text is.
        differs: in what our run is another, for the note under the table.
    """

    name: str
    unit: str
    source: str
    date: str
    differs: str
    cases: tuple[Case, ...]

    def value(self, median_ms: float, batch: int, steps: int) -> float:
        """A call's time in the preset's unit."""
        seconds = median_ms / 1e3
        return {"it/s": steps / seconds, "images/s": batch / seconds, "s": seconds, "ms": median_ms}[
            self.unit
        ]


def _pipeline(model: str, size: int, steps: int, **others: Any) -> dict[str, Any]:
    what = {"model": model, "part": "pipeline", "size": size, "batch": 1, "steps": steps}
    return {**what, "dtype": "fp16", **others}


def _on(gpu: str, **values: float) -> tuple[Published, ...]:
    return tuple(Published(what.replace("_", " "), gpu, value) for what, value in values.items())


_A100 = "A100 80GB"
_CAT = {"prompt": "A photo of a cat"}
_EULER_A = {"scheduler": "EulerAncestralDiscreteScheduler"}
_EVERY = (
    Preset(
        "fal",
        "it/s",
        "https://github.com/fal-ai/stable-diffusion-benchmarks",
        "2023-12-21",
        "it/s are steps over the whole call, as there; SDXL's VAE decodes in fp32 there, in fp16 here",
        (
            Case(
                _pipeline("sd15", 512, 50, **_CAT),
                _on(_A100, Diffusers=31.19, compiled_channels_last=47.29, stable_fast=55.51, TensorRT=61.14),
            ),
            Case(
                _pipeline("sdxl", 1024, 50, guidance=5.0, **_CAT),
                _on(_A100, Diffusers=8.43, compiled_channels_last=9.73, stable_fast=12.05, TensorRT=12.18),
            ),
        ),
    ),
    Preset(
        "diffusion-fast",
        "s",
        "https://github.com/huggingface/diffusers/blob/v0.30.0/docs/source/en/tutorials/fast_diffusion.md",
        "2024-08-02",
        "random weights here",
        (
            Case(
                _pipeline(
                    "sdxl",
                    1024,
                    30,
                    dtype="bf16",
                    guidance=5.0,
                    prompt="ghibli style, a fantasy landscape with castles",
                ),
                _on(_A100, Diffusers=3.31, compiled=2.54, compiled_and_fused_projections=2.52, int8=2.43),
            ),
        ),
    ),
    Preset(
        "stable-fast",
        "it/s",
        "https://github.com/chengzeyi/stable-fast",
        "2025-03-27",
        "theirs counts the time between steps alone, ours the whole call with text encoder and VAE",
        (
            Case(
                _pipeline("sd15", 512, 30, **_EULER_A),
                _on("H100", PyTorch=54.5, compiled=66.0, stable_fast=104.6),
            ),
            Case(
                _pipeline("sdxl", 1024, 30, guidance=5.0, **_EULER_A),
                _on("H100", PyTorch=14.9, compiled=18.5, stable_fast=21.6),
            ),
        ),
    ),
    Preset(
        "mlperf",
        "images/s",
        "https://github.com/mlcommons/inference_results_v4.1/tree/main/closed/NVIDIA/results",
        "2024-08-28",
        "Offline, a GPU's share of eight; TensorRT quantizes, and feeds captions of COCO, where one prompt"
        " is repeated here; its UNet too runs 32 images with guidance",
        (
            Case(
                {**_pipeline("sdxl", 1024, 20, guidance=8.0), "batch": 32, "repeats": 2},
                (
                    *_on("H200, one of 8", TensorRT=17.4186 / 8),
                    *_on("H100 SXM, one of 8", TensorRT=16.3484 / 8),
                    *_on("GH200 144GB", TensorRT=2.30033),
                ),
            ),
        ),
    ),
    Preset(
        "diffusers",
        "ms",
        "https://github.com/huggingface/diffusers/blob/main/benchmarks/benchmarking_sdxl.py",
        "2025-07-04",
        "random weights here",
        (Case({"model": "sdxl", "part": "unet", "size": 1024, "batch": 1, "dtype": "bf16"}),),
    ),
)
PRESETS: dict[str, Preset] = {preset.name: preset for preset in _EVERY}
