"""Benchmarks that other projects publish: their settings and their numbers. This file does not import torch.

``Preset.source`` is the URL of a preset's numbers. A ``Case`` has no numbers if the page has none for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Case:
    """One measurement of a benchmark that another project publishes.

    Attributes:
        settings: name of a field of BenchConfig -> its value.
        published: software and machine, such as "TensorRT 9.0, A100 80GB" -> the published number.
    """

    settings: dict[str, Any]
    published: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Preset:
    """A benchmark that another project publishes.

    Attributes:
        unit: the unit of the published numbers: it/s, images/s, s or ms.
        source: URL of the numbers.
        date: the date of the page at ``source``.
        differs: how sdfastgn's run of this benchmark differs from the published run.
    """

    name: str
    unit: str
    source: str
    date: str
    differs: str
    cases: tuple[Case, ...]

    def value(self, median_ms: float, config: Mapping[str, Any]) -> float | None:
        """Converts the time of a call to ``unit``. ``config``: the call's settings, as in BenchConfig.

        Returns None if ``unit`` is images/s and the call makes no image (``config["part"]`` is neither
        "pipeline" nor "vae").
        """
        s, part = median_ms / 1e3, config["part"]
        iterations = config["steps"] if part == "pipeline" else 1
        images = config["batch"] / s if part in ("pipeline", "vae") else None
        return {"it/s": iterations / s, "images/s": images, "s": s, "ms": median_ms}[self.unit]


def _pipeline(model: str, size: int, steps: int, **others: Any) -> dict[str, Any]:
    what = {"model": model, "part": "pipeline", "size": size, "batch": 1, "steps": steps}
    return {**what, "dtype": "fp16", **others}


_CAT = {"prompt": "A photo of a cat"}
_CASTLES = {"prompt": "ghibli style, a fantasy landscape with castles"}
_EULER_A = {"scheduler": "EulerAncestralDiscreteScheduler"}
# diffusers' default guidance scale for SDXL. It is used if a benchmark's source does not name its guidance.
_SDXL_GUIDANCE = {"guidance": 5.0}
_COMPILED = "compiled, channels last, A100 80GB"
_EVERY = (
    Preset(
        "fal",
        "it/s",
        "https://github.com/fal-ai/stable-diffusion-benchmarks",
        "2023-12-21",
        "SDXL's VAE decodes in fp32 there, in fp16 here; both count the whole call",
        (
            Case(
                _pipeline("sd15", 512, 50, **_CAT),
                {
                    "Diffusers, A100 80GB": 31.19,
                    _COMPILED: 47.29,
                    "stable-fast, A100 80GB": 55.51,
                    "TensorRT 9.0, A100 80GB": 61.14,
                },
            ),
            Case(
                _pipeline("sdxl", 1024, 50, **_CAT, **_SDXL_GUIDANCE),
                {
                    "Diffusers, A100 80GB": 8.43,
                    _COMPILED: 9.73,
                    "stable-fast, A100 80GB": 12.05,
                    "TensorRT 9.0, A100 80GB": 12.18,
                },
            ),
        ),
    ),
    Preset(
        "diffusion-fast",
        "s",
        "https://github.com/huggingface/diffusers/blob/v0.30.0/docs/source/en/tutorials/fast_diffusion.md",
        "2024-08-02",
        "fused projections and int8 change the model there; here it stays",
        (
            Case(
                _pipeline("sdxl", 1024, 30, dtype="bf16", **_CASTLES, **_SDXL_GUIDANCE),
                {
                    "Diffusers, A100 80GB": 3.31,
                    "compiled, A100 80GB": 2.54,
                    "and fused projections, A100 80GB": 2.52,
                    "and int8, A100 80GB": 2.43,
                },
            ),
        ),
    ),
    Preset(
        "stable-fast",
        "it/s",
        "https://github.com/chengzeyi/stable-fast",
        "2025-03-27",
        "the time between steps alone counts there, the whole call with text encoder and VAE here",
        (
            Case(
                _pipeline("sd15", 512, 30, **_EULER_A),
                {"PyTorch 2.1, H100": 54.5, "compiled, H100": 66.0, "stable-fast, H100": 104.6},
            ),
            Case(
                _pipeline("sdxl", 1024, 30, **_EULER_A, **_SDXL_GUIDANCE),
                {"PyTorch 2.1, H100": 14.9, "compiled, H100": 18.5, "stable-fast, H100": 21.6},
            ),
        ),
    ),
    Preset(
        "mlperf",
        "images/s",
        "https://github.com/mlcommons/inference_results_v4.1/tree/main/closed/NVIDIA/results",
        "2024-08-28",
        "scenario Offline; TensorRT runs the UNet in FP8 there, for many captions; here one prompt; "
        "v5.1 is closed/Cisco/results/C885_H200x8_TRT in inference_results_v5.1",
        (
            Case(
                # As in the published TensorRT runs, a batch is 32 images, with guidance.
                {**_pipeline("sdxl", 1024, 20, guidance=8.0), "batch": 32, "repeats": 2},
                {
                    "TensorRT, one of 8 H200, v5.1": 19.12 / 8,
                    "TensorRT, one of 8 H200": 17.4186 / 8,
                    "TensorRT, one of 8 H100": 16.3484 / 8,
                    "TensorRT, GH200 144GB": 2.30033,
                },
            ),
        ),
    ),
    Preset(
        "diffusers",
        "ms",
        "https://github.com/huggingface/diffusers/blob/main/benchmarks/benchmarking_sdxl.py",
        "2025-07-04",
        "weights are random here",
        (Case({"model": "sdxl", "part": "unet", "size": 1024, "batch": 1, "dtype": "bf16"}),),
    ),
)
PRESETS: dict[str, Preset] = {preset.name: preset for preset in _EVERY}
