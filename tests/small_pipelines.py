"""Small pipelines on the CPU, an image of one, and what must hold of its image."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from transformers import CLIPTextConfig, CLIPTextModel

import sdfastgn
from sdfastgn.bench.images import psnr
from sdfastgn.models.pipelines import build_pipeline

SIZE = {"height": 64, "width": 64}
IMAGE = torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(3))


def pipeline(model: str = "tiny") -> Any:
    return build_pipeline(model, dtype=torch.float32, device="cpu")


def text_encoder() -> CLIPTextModel:
    """A CLIP text encoder with a vocabulary of 20 tokens. Its calls can run as CUDA graphs."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return CLIPTextModel(CLIPTextConfig(vocab_size=20, **sizes)).eval()


def generate(pipe: Any, **options: Any) -> np.ndarray:
    options = {"num_inference_steps": 3, "output_type": "np", **options}
    return pipe("a cat", generator=torch.Generator().manual_seed(0), **options).images


def same_image_and_exact_restore(pipe: Any, options: dict[str, Any], components: set[str]) -> None:
    """``components``: all that are fused."""
    before = generate(pipe, **options)
    assert before.std() > 0.02
    sdfastgn.optimize(pipe, strict=True)
    assert {e.component for e in sdfastgn.report(pipe).fused} == components
    assert psnr(generate(pipe, **options), before) > 80
    sdfastgn.restore(pipe)
    assert np.array_equal(generate(pipe, **options), before)


def waits(call: Callable[[], object]) -> int:
    """How often the host waits for the GPU in ``call``."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(w.message) for w in caught)
