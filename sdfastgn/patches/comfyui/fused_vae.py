"""The class of an optimized VAE of ComfyUI. ``VAE`` is ComfyUI's object around an autoencoder, and no module.

The optimized class differs from ``VAE`` in three ways. The autoencoder stays fused between two calls
(``staying.py``). A tiled decode of images has no seams (``tiled_decode.py``). And decoded pixels reach the
CPU faster.

ComfyUI copies decoded pixels from the GPU into pageable memory, copies them once more on the CPU, and scales
and clamps them there. That took 69 of 215 ms of a decode of 17 frames of 480 x 832 (Wan's VAE, H200). Here
ComfyUI's ``decode`` scales and clamps on the GPU, because ``output_device`` is the GPU while ``decode`` runs.
The result has the same bits. It is copied to the CPU once, through pinned memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import comfy.sd
import torch
from torch import Tensor, nn

from sdfastgn.kernels.common.setting import setting
from sdfastgn.patches.comfyui import tiled_decode
from sdfastgn.patches.comfyui.staying import staying
from sdfastgn.patches.offload.staged_copy import StagedCopy

# The VAE whose ``decode`` leaves its pixels on the GPU at the moment, in this thread. None if there is none.
_on_gpu: ContextVar[FusedVAE | None] = ContextVar("_on_gpu", default=None)
# Decoded pixels are scaled and clamped on the GPU, and not on the CPU, if two copies of them in fp32 take at
# most this fraction of the memory that ComfyUI frees for the decode. The decode then needs no more memory
# than ComfyUI's decode: when the copies are made, the autoencoder has given back the memory of its layers.
_FRACTION = 1 / 8
# Decoded pixels are scaled on the GPU only if these are the types of ``VAE.device`` and
# ``VAE.output_device``.
_WAY = ("cuda", "cpu")


class FusedVAE(comfy.sd.VAE):
    """ComfyUI's ``VAE`` with an optimized autoencoder. It keeps the autoencoder fused between calls.

    Attributes:
        after_use: called with the autoencoder after each decode and encode.
    """

    after_use: Callable[[nn.Module], object] | None = None

    @property
    def output_device(self) -> torch.device:
        """The device to which ComfyUI's ``decode`` moves the pixels.

        While ``decode`` runs it may be the GPU; otherwise it is the device that ComfyUI has set.
        """
        given: torch.device = vars(self)["output_device"]
        return self.device if _on_gpu.get() is self else given

    @output_device.setter
    def output_device(self, device: torch.device) -> None:
        self.__dict__["output_device"] = device

    def decode(self, samples_in: Tensor, *args: Any, **options: Any) -> Any:
        stays = fit(self, samples_in)
        with self._in_use(), setting(_on_gpu, self if stays else None):
            pixels = super().decode(samples_in, *args, **options)
        return to_cpu(pixels) if stays else pixels

    def decode_tiled(self, *args: Any, **options: Any) -> Any:
        with self._in_use():
            return super().decode_tiled(*args, **options)

    def encode(self, *args: Any, **options: Any) -> Any:
        with self._in_use():
            return super().encode(*args, **options)

    def encode_tiled(self, *args: Any, **options: Any) -> Any:
        with self._in_use():
            return super().encode_tiled(*args, **options)

    @contextmanager
    def _in_use(self) -> Iterator[None]:
        with staying(self.patcher):
            yield
        if self.after_use is not None:
            self.after_use(self.first_stage_model)

    def decode_tiled_(self, *args: Any, **options: Any) -> Tensor:
        """Decode latents (N, C, H, W) in strips of the image, or in ComfyUI's tiles if strips are impossible.

        The arguments are those of ComfyUI's method.
        """
        # ``image_of`` takes the arguments of those versions of ComfyUI's ``decode_tiled_`` that were tested.
        # If another version is installed, no model is fused, and ComfyUI's method gets the arguments.
        fusions = tiled_decode.AUTOENCODERS
        is_fused = any(fusion.is_applied(self.first_stage_model) for fusion in fusions)
        image = tiled_decode.image_of(self, *args, **options) if is_fused else None
        return super().decode_tiled_(*args, **options) if image is None else image


def fit(vae: FusedVAE, latents: Tensor) -> bool:
    """True if the pixels that ``vae`` decodes from ``latents`` shall be scaled on the GPU.

    They are not if there are too many of them (``_FRACTION``), or with unusual devices (``_WAY``).
    """
    N, _, *sizes = latents.shape
    if (vae.device.type, vae.output_device.type) != _WAY or len(sizes) != vae.latent_dim:
        return False
    ratios = vae.upscale_ratio  # a number, or a tuple with a number or a function for each axis
    ratios = ratios if isinstance(ratios, tuple) else (ratios,) * len(sizes)
    pairs = zip(ratios, sizes, strict=True)
    pixels = N * math.prod(ratio(size) if callable(ratio) else ratio * size for ratio, size in pairs)
    copies = 2 * pixels * vae.output_channels * torch.float32.itemsize
    return bool(copies <= _FRACTION * vae.memory_used_decode(latents.shape, vae.vae_dtype))


def to_cpu(pixels: Tensor) -> Tensor:
    """Returns a copy in pageable memory of ``pixels`` (N, ..., channels), with the same strides."""
    # ComfyUI's ``decode`` has moved the channels of a contiguous tensor to the end.
    is_dense = pixels.movedim(-1, 1).is_contiguous()
    return StagedCopy(pixels.device).to_cpu(pixels) if is_dense else pixels.cpu()
