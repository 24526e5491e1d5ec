"""Adds LoRA adapters with random weights to models, for measurements. This needs peft."""

from __future__ import annotations

from typing import Any

import torch

# Names of the layers that get a LoRA: the projections of attention, which most LoRAs adapt.
TARGETS = ("to_q", "to_k", "to_v", "to_out.0")


def add_lora(
    model: Any, *, rank: int, seed: int, name: str = "default", dtype: torch.dtype | None = None
) -> None:
    """Adds a LoRA to the attention of ``model``, a model of diffusers.

    A LoRA adds the product of two matrices, B A, to a layer's weight. Here the product is small beside the
    weight, so the model's outputs change little.

    Args:
        rank: number of rows of A, which is the number of columns of B.
        seed: seed of the random weights.
        name: the adapter's name.
        dtype: dtype of the adapter; None for the dtype of the model.
    """
    from peft import LoraConfig

    model.add_adapter(LoraConfig(r=rank, target_modules=list(TARGETS)), adapter_name=name)
    generator = torch.Generator(model.device).manual_seed(seed)
    for key, parameter in model.named_parameters():
        if "lora_" in key and f".{name}." in key:
            with torch.no_grad():
                parameter.data = parameter.to(dtype or model.dtype)
                parameter.normal_(std=0.02, generator=generator)
