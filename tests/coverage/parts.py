"""What the rows of the coverage table are built from: tiny networks with random weights, and calls."""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import diffusers
import torch
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

from sdfastgn.models.architectures import randomize
from sdfastgn.models.configurations import SCHEDULERS, TEXT_ENCODERS, UNETS, VAES
from sdfastgn.models.pipelines import build_tokenizer

# Where the tensors of a row are, and in which dtype. A test on a GPU changes both.
WHERE = {"device": "cpu", "dtype": torch.float32}
PROMPT = {"prompt": "a cat", "num_inference_steps": 2, "output_type": "pt"}
# Two levels of a VAE.
TWO_LEVELS = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
# Ends of a text that build_tokenizer writes.
_ENDS = {"bos_token_id": 512, "eos_token_id": 513, "pad_token_id": 513}


class Built(NamedTuple):
    """A pipeline or model, and the call whose result is compared."""

    obj: Any
    call: Callable[[], Any]


class Row(NamedTuple):
    """A row of the table. ``name``: what a user of diffusers calls it."""

    name: str
    build: Callable[[], Built]


class Rows(list[Row]):
    """A section of the table; ``@rows("name")`` adds a builder to it."""

    def __init__(self, title):
        super().__init__()
        self.title = title

    def __call__(self, name):
        def add(build):
            self.append(Row(name, build))
            return build

        return add


def noise(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(**WHERE)


def image(channels=3, size=64):
    """In [0, 1], as pipelines take it."""
    return noise(1, channels, size, size, seed=3).sigmoid()


def model(cls, *config, **options):
    """A network with random weights; a class of diffusers may be given by its name."""
    cls = getattr(diffusers, cls) if isinstance(cls, str) else cls
    return randomize(cls(*config, **options), 3).to(**WHERE).eval()


def pipeline(name, parts, **inputs):
    """A pipeline of diffusers, and its call with two steps for a short prompt."""
    # Some pipelines make networks of their own from these parts.
    pipe = getattr(diffusers, name)(**parts).to(**WHERE)
    pipe.set_progress_bar_config(disable=True)
    taken = inspect.signature(type(pipe).__call__).parameters
    inputs = {**{k: v for k, v in PROMPT.items() if k in taken}, **inputs}
    return Built(pipe, lambda: pipe(**inputs, generator=torch.Generator().manual_seed(0))[0])


def unet(config="tiny", **options):
    return model("UNet2DConditionModel", **{**UNETS[config], **options})


def vae(**options):
    return model("AutoencoderKL", **{**VAES["tiny"], **options})


def text_encoder(cls=CLIPTextModel, **options):
    return model(cls, CLIPTextConfig(**{**TEXT_ENCODERS["tiny"][0], **_ENDS, **options}))


def scheduler(config="tiny", name=None, **options):
    """The scheduler of a Stable Diffusion, or ``name`` with the same noise."""
    own, settings = SCHEDULERS[config]
    if name is None:
        return getattr(diffusers, own)(**{**settings, **options})
    betas = {key: settings[key] for key in ("beta_start", "beta_end", "beta_schedule")}
    return getattr(diffusers, name)(**{**betas, **options})


def text():
    """One CLIP text encoder with its tokenizer."""
    return {"text_encoder": text_encoder(), "tokenizer": build_tokenizer()}


def sd(**parts):
    """Components of Stable Diffusion; ``parts`` replace or join them."""
    unsafe = {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}
    made = {} if "unet" in parts else {"unet": unet()}
    return {**text(), **made, "vae": vae(), "scheduler": scheduler(), **unsafe, **parts}


def sdxl(**parts):
    """Components of Stable Diffusion XL; ``parts`` replace or join them."""
    made = {} if "unet" in parts else {"unet": unet("tiny_xl")}
    second = {"text_encoder_2": text_encoder(CLIPTextModelWithProjection), "tokenizer_2": build_tokenizer()}
    around = {"vae": vae(), "scheduler": scheduler("tiny_xl"), "add_watermarker": False}
    return {**text(), **second, **made, **around, **parts}
