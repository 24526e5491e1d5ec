"""Builds whole pipelines offline from a configuration, or loads them from a folder or the Hub."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers import (
    DiffusionPipeline,
    StableDiffusionImg2ImgPipeline,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
)
from packaging.version import Version
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

from sdfastgn.kernels.common.failures import one_line
from sdfastgn.models import architectures, configurations, saved
from sdfastgn.program import OptionError

# Name of the argument of ``from_pretrained`` for the dtype. diffusers 0.40 has renamed this argument: older
# releases ignore the new name, and newer releases warn of the old name.
_DTYPE = "dtype" if Version(diffusers.__version__) >= Version("0.40.0") else "torch_dtype"


def build_pipeline(model: str, *, dtype: torch.dtype, device: torch.device | str, seed: int = 0) -> Any:
    """Builds a complete pipeline of ``model`` with random weights, without any download.

    There is no safety checker. Every component has its real architecture, except for the tokenizer, whose
    vocabulary consists of single bytes. A prompt is padded or cut to 77 tokens, as by the real tokenizer. The
    pipeline can be saved and loaded again.
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
        kind = (
            StableDiffusionImg2ImgPipeline
            if model in configurations.IMAGE_TO_IMAGE
            else StableDiffusionPipeline
        )
        pipe = kind(**components, safety_checker=None, feature_extractor=None, requires_safety_checker=False)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def load_pipeline(
    option: str,
    weights: str,
    dtype: torch.dtype,
    device: torch.device | str,
    variant: str | None = None,
) -> Any:
    """Load the saved pipeline ``weights``, and move it to ``device``.

    Args:
        option: the command-line option that named the pipeline, for errors.
        weights: a folder that ``save_pretrained`` wrote, or a Hub id.
        dtype, device: dtype and device for the pipeline.
        variant: the part of the weight files' names that selects one of several files, such as fp16.

    Raises OptionError, with diffusers' reason, if the pipeline cannot be loaded or the Hub cannot be reached.
    """
    if Path(weights).is_file():  # without this check diffusers would take a file's path for a Hub id
        raise OptionError(f"{option}: {weights!r} is a file; expected a saved pipeline's folder or a Hub id")
    try:
        pipe = DiffusionPipeline.from_pretrained(weights, variant=variant, **{_DTYPE: dtype})
    except Exception as error:  # diffusers raises errors of many classes, such as KeyError
        saved.check_hub(option, weights, error)
        raise OptionError(f"{option}: cannot load {weights!r}: {one_line(error)}") from error
    return pipe.to(device)


def build_tokenizer(words: Iterable[str] = ()) -> CLIPTokenizer:
    """Returns a CLIP tokenizer that knows all single bytes, ``words``, and the beginnings of ``words``."""
    # The tokenizer is loaded from files, which work with transformers 4 and 5. The arguments of
    # CLIPTokenizer's constructor differ between these two.
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder), words)
        return CLIPTokenizer.from_pretrained(folder)


def write_tokenizer(folder: Path, words: Iterable[str] = ()) -> None:
    """Write the files of a CLIP tokenizer into ``folder``.

    The tokenizer's vocabulary has two tokens for each of the 256 bytes, one inside of a word and one at the
    end of a word. It also has a token for the start and one for the end of the text, and tokens for each of
    ``words`` and for all beginnings of these words that have at least two letters.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    # CLIP's vocabulary writes each byte as one character: a printable byte as itself, any other byte as a
    # character with a code over 255.
    alphabet = [chr(b) for b in printable] + [chr(256 + i) for i in range(len(others))]
    merges = {}
    for word in words:
        first, *letters = [*word[:-1], f"{word[-1]}</w>"]
        for letter in letters:
            merges[f"{first} {letter}"] = first = first + letter
    ends = [c + "</w>" for c in alphabet]
    tokens = [*alphabet, *ends, "<|startoftext|>", "<|endoftext|>", *merges.values()]
    (folder / "vocab.json").write_text(json.dumps({token: i for i, token in enumerate(tokens)}))
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]))
    config = {"tokenizer_class": "CLIPTokenizer", "model_max_length": 77}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def _text_encoder(
    cls: Any, config: dict[str, Any], dtype: torch.dtype, device: torch.device | str, seed: int
) -> CLIPTextModel:
    tokens = {"bos_token_id": 512, "eos_token_id": 513, "pad_token_id": 513}
    # The text encoder is not built on the meta device, where its buffers would get no values.
    with torch.device(device):
        encoder = cls(CLIPTextConfig(**config, **tokens))
    return architectures.randomize(encoder.to(dtype), seed).eval()
