"""Whole pipelines: built offline from configuration, or loaded from a path or the Hub."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers import DiffusionPipeline, StableDiffusionPipeline, StableDiffusionXLPipeline
from packaging.version import Version
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

from sdfastgn.bench.documents import OptionError
from sdfastgn.bench.models import architectures, configurations
from sdfastgn.kernels.common.failures import one_line

# What ``from_pretrained`` calls the dtype: 0.40 deprecated the older name, and older ones ignore the new.
_DTYPE = "dtype" if Version(diffusers.__version__) >= Version("0.40.0") else "torch_dtype"


def build_pipeline(model: str, *, dtype: torch.dtype, device: torch.device | str, seed: int = 0) -> Any:
    """A complete text-to-image pipeline of ``model`` with random weights, without any download.

    Every component has its real architecture; only the tokenizer's vocabulary is made up (single
    bytes), so that prompts cost the real 77 tokens. It can be saved and loaded again.
    """
    scheduler, options = configurations.SCHEDULERS[model]
    first, *second = configurations.TEXT_ENCODERS[model]
    components: dict[str, Any] = {
        "vae": architectures.build_vae(model, dtype, device, seed=seed),
        "unet": architectures.build_unet(model, dtype, device, seed=seed),
        "scheduler": getattr(diffusers, scheduler)(**options),
        "tokenizer": build_tokenizer(),
        "text_encoder": _text_encoder(CLIPTextModel, first, dtype, device, seed),
    }
    pipe: Any
    if second:
        encoder = _text_encoder(CLIPTextModelWithProjection, second[0], dtype, device, seed + 1)
        components |= {"text_encoder_2": encoder, "tokenizer_2": build_tokenizer()}
        pipe = StableDiffusionXLPipeline(**components, add_watermarker=False)
    else:
        pipe = StableDiffusionPipeline(
            **components, safety_checker=None, feature_extractor=None, requires_safety_checker=False
        )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def load_pipeline(
    option: str,
    weights: str,
    dtype: torch.dtype,
    device: torch.device | str,
    variant: str | None = None,
) -> Any:
    """The pipeline in a folder that ``save_pretrained`` wrote or of a Hub id, which ``option`` named.

    ``variant`` is that of its files, such as fp16.

    Raises OptionError where it cannot be loaded, in diffusers' words.
    """
    try:
        pipe = DiffusionPipeline.from_pretrained(weights, variant=variant, **{_DTYPE: dtype})
    except Exception as error:  # a folder that is no pipeline gives KeyError and more, besides OSError
        raise OptionError(f"{option}: cannot load {weights!r}: {one_line(error)}") from error
    return pipe.to(device)


def build_tokenizer() -> CLIPTokenizer:
    """A CLIP tokenizer of the 256 bytes, inside and at the end of a word, and two special tokens."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    # CLIP's byte-level alphabet: bytes that do not print stand at 256 and after.
    alphabet = [chr(b) for b in printable] + [chr(256 + i) for i in range(len(others))]
    tokens = [*alphabet, *(c + "</w>" for c in alphabet), "<|startoftext|>", "<|endoftext|>"]
    # Through files: the constructors of transformers 4 and 5 share no argument.
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "vocab.json").write_text(json.dumps({t: i for i, t in enumerate(tokens)}))
        Path(folder, "merges.txt").write_text("")
        return CLIPTokenizer.from_pretrained(folder, model_max_length=77)


def _text_encoder(
    cls: Any, config: dict[str, Any], dtype: torch.dtype, device: torch.device | str, seed: int
) -> CLIPTextModel:
    tokens = {"bos_token_id": 512, "eos_token_id": 513, "pad_token_id": 513}
    # Built where it runs: the meta device would leave its buffers empty.
    with torch.device(device):
        encoder = cls(CLIPTextConfig(**config, **tokens))
    return architectures.randomise(encoder.to(dtype), seed).eval()
