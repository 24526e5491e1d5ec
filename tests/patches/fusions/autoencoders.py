"""Small autoencoders of the families with fused blocks, as a table, with their calls and their blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import diffusers
import torch
from diffusers.models.autoencoders import autoencoder_kl_magvit as magvit
from torch import Tensor, nn

from sdfastgn.patches.fusions import easyanimate, hunyuan_video_15
from sdfastgn.patches.layers import wrapped_conv
from tests.patches import cases
from tests.patches.samples import randomize, without_frames
from tests.patches.video_cases import codes, decode_of, drop_all, encode_of, pixels

# Functions that make a call of a tensor, and the tensor.
Calls = Sequence[tuple[Callable[[Tensor], Callable[[Any], Tensor]], Tensor]]


def small(cls: Any, *args: Any, **settings: Any) -> Any:
    """A new module of ``cls`` with random parameters, where the tests run."""
    return randomize(cls(*args, **settings)).to(cases.WHERE["device"])


def same_results(models: Sequence[Any], x: Tensor) -> None:
    cases.agree(*(model(x) for model in models))


class Block(NamedTuple):
    """A residual block of an autoencoder.

    Attributes:
        make: a new one.
        shape: of its input.
        layers: the layers in it on which other code may put a hook.
        changes: name -> a change of the block, with which its layers run stock's code.
        fused: (module, name) of the functions that only fused code calls, with a layer first.
        same: asserts that two blocks compute the same.
    """

    make: Callable[[], Any]
    shape: tuple[int, ...]
    layers: Sequence[str]
    changes: Mapping[str, Callable[[Any], object]]
    fused: Sequence[tuple[Any, str]]
    same: Callable[..., None] = same_results


class Family(NamedTuple):
    """The autoencoder of a family.

    Attributes:
        make: a new one.
        calls: a decode and an encode.
        larger: a decode and an encode whose errors are measured.
        block: its own kind of residual block; None if it has the one of other autoencoders.
    """

    make: Callable[[], Any]
    calls: Callable[[], Calls]
    larger: Callable[[], Calls]
    block: Block | None = None


def conv_twice(of: Callable[[Any], nn.Module], **options: Any) -> Callable[[Any], None]:
    """Replaces the code of the convolution ``of(block)``: it computes with twice the weight."""

    def change(block: Any) -> None:
        of(block)._conv_forward = lambda x, w, b: nn.functional.conv3d(x, 2 * w, b, **options)

    return change


def sets(name: str, make: Callable[[], Any]) -> Callable[[Any], None]:
    """Sets an attribute of the block, or of a module in it."""

    def change(block: Any) -> None:
        path, _, attribute = name.rpartition(".")
        setattr(block.get_submodule(path), attribute, make())

    return change


# ---- EasyAnimate

EASYANIMATE = {
    "down_block_types": ("SpatialTemporalDownBlock3D",) * 2,
    "up_block_types": ("SpatialTemporalUpBlock3D",) * 2,
    "block_out_channels": (8, 16),
    "latent_channels": 4,
    "layers_per_block": 1,
    "norm_num_groups": 4,
}


def easyanimate_autoencoder(**options: Any) -> Any:
    return small(diffusers.AutoencoderKLMagvit, **{**EASYANIMATE, **options})


def easyanimate_block(C_in: int = 6, C_out: int = 10, **options: Any) -> Any:
    return small(magvit.EasyAnimateResidualBlock3D, C_in, C_out, norm_num_groups=2, **options)


def frames_kept(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: m.prev_features for name, m in model.named_modules() if hasattr(m, "prev_features")}


def same_in_batches(models: Sequence[Any], x: Tensor, *sizes: int) -> None:
    """Assert that both models give and keep the same after each batch of frames of x."""
    for part in x.split(sizes or (1, x.shape[2] - 1), 2):
        cases.agree(*(model(part) for model in models), 5e-5)
        ours, theirs = map(frames_kept, models)
        assert ours.keys() == theirs.keys()
        for name, kept in theirs.items():
            assert (ours[name] is None) == (kept is None)
            if kept is not None:
                cases.agree(ours[name], kept, 5e-5)
    for model in models:
        without_frames(model)


EASYANIMATE_BLOCK = Block(
    easyanimate_block,
    (1, 6, 3, 4, 4),
    ("norm1", "nonlinearity", "conv1", "conv2", "shortcut", "dropout"),
    {
        "a-replaced-conv-forward": conv_twice(lambda m: m.conv1, padding=(0, 1, 1)),
        "another-norm": sets("norm1", nn.Identity),
        "another-activation": sets("nonlinearity", nn.Tanh),
        "dropout": drop_all,
    },
    [(easyanimate, "_convolve")],
    same_in_batches,
)


# ---- HunyuanVideo 1.5, and HunyuanImage's refiner

HUNYUAN = {
    "latent_channels": 4,
    "block_out_channels": (16, 16, 32),
    "layers_per_block": 1,
    "spatial_compression_ratio": 4,
    "temporal_compression_ratio": 2,
}
# The files of diffusers; None in a diffusers before the model.
HUNYUAN_FILES = {"video": hunyuan_video_15._video, "refiner": hunyuan_video_15._refiner}
_PREFIXES = {"video": "HunyuanVideo15", "refiner": "HunyuanImageRefiner"}


def hunyuan_class(family: str, name: str) -> Any:
    if name.endswith("sample") and family == "refiner":
        name += "DCAE"
    return getattr(HUNYUAN_FILES[family], _PREFIXES[family] + name)


def hunyuan_autoencoder(family: str) -> Any:
    return small(getattr(HUNYUAN_FILES[family], f"AutoencoderKL{_PREFIXES[family]}"), **HUNYUAN)


def hunyuan_block(family: str, C_in: int = 6, C_out: int = 10) -> Any:
    return small(hunyuan_class(family, "ResnetBlock"), C_in, C_out)


def _shortcut() -> nn.Module:
    torch.manual_seed(0)
    return nn.Conv3d(6, 10, (1, 3, 3), padding=(0, 1, 1))


def _of_hunyuan(family: str) -> Family:
    layers = ("norm1", "norm2", "nonlinearity", "conv1", "conv1.conv", "conv2", "conv_shortcut")
    changes = {
        "a-replaced-conv-forward": conv_twice(lambda m: m.conv1.conv),
        "another-norm": sets("norm1", nn.Identity),
        "another-activation": sets("nonlinearity", nn.Tanh),
        "another-mode": sets("conv2.pad_mode", lambda: "reflect"),
        "another-shortcut": sets("conv_shortcut", _shortcut),
    }
    fused = [(hunyuan_video_15, "convolve"), (wrapped_conv, "convolve")]
    block = Block(partial(hunyuan_block, family), (1, 6, 3, 3, 4), layers, changes, fused)
    few = {"latents": (1, 2)}
    return Family(
        partial(hunyuan_autoencoder, family),
        lambda: [(decode_of, codes(2, **few)), (encode_of, pixels(4, 3, **few))],
        lambda: [(decode_of, codes(3, latents=(17, 23))), (encode_of, pixels(4, 9, latents=(17, 23)))],
        block,
    )


# ---- Flux2

FLUX2 = {
    "block_out_channels": (8, 16),
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
    "layers_per_block": 1,
    "latent_channels": 4,
    "norm_num_groups": 4,
    "sample_size": 8,  # of a tile
}


def flux2_autoencoder(**options: Any) -> Any:
    return small(diffusers.AutoencoderKLFlux2, **{**FLUX2, **options})


def flux2_calls(H: int, W: int) -> Calls:
    z, x = (cases.noise(1, channels, H * s, W * s, mean=0.0) for channels, s in ((4, 1), (3, 2)))
    return [(decode_of, z), (encode_of, x)]


FAMILIES = {
    "easyanimate": Family(
        easyanimate_autoencoder,
        lambda: [(decode_of, codes(2, latents=(1, 2))), (encode_of, pixels(2, 3))],
        lambda: [(decode_of, codes(3, latents=(17, 23))), (encode_of, pixels(2, 9, latents=(17, 23)))],
        EASYANIMATE_BLOCK,
    ),
    **{f"hunyuan-{name}": _of_hunyuan(name) for name, file in HUNYUAN_FILES.items() if file is not None},
    **(
        {"flux2": Family(flux2_autoencoder, lambda: flux2_calls(4, 6), lambda: flux2_calls(17, 23))}
        if hasattr(diffusers, "AutoencoderKLFlux2")
        else {}
    ),
}
