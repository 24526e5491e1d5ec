"""Makes diffusers' ``VaeImageProcessor`` convert images to bytes on the GPU, before it copies them.

diffusers copies the floats to the CPU, and multiplies, rounds and converts them in numpy. On the host of an
H200 this takes 6 ms for 512^2 pixels and 21 ms for 1024^2. The code here takes 0.6 ms and 1.4 ms, because the
GPU computes faster and fewer bytes are copied. The bytes are the same, because both numpy and the GPU
multiply in fp32 and round halves to even numbers.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from diffusers.image_processor import VaeImageProcessor
from PIL import Image
from torch import Tensor

from sdfastgn.patches.pipeline.object_fusion import ObjectFusion
from sdfastgn.patches.swap.tested_sources import tested

# Types of device from which images are copied to the CPU.
_DEVICES = ("cuda",)
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_SOURCE = tested(
    VaeImageProcessor,
    "postprocess",
    "_denormalize_conditionally",
    "denormalize",
    "pt_to_numpy",
    "numpy_to_pil",
)


def _is_ours(processor: Any, image: Any, output_type: Any, do_denormalize: Any) -> bool:
    if (
        output_type != "pil"
        or type(image) is not Tensor
        or image.device.type not in _DEVICES
        or image.requires_grad
    ):
        return False
    if any(name in vars(processor) for name in _SOURCE.methods):  # a method of ``processor`` was replaced
        return False
    # Denormalizing limits values to [0, 1]. Without it, diffusers' code must run: some values do not fit into
    # a byte, and a CPU and a GPU convert such values differently.
    is_denormalized = processor.config.do_normalize if do_denormalize is None else all(do_denormalize)
    return (
        bool(is_denormalized)
        and image.dtype in _DTYPES
        and image.dim() == 4
        and image.shape[1] == 3
        and len(image) > 0
    )


def _bytes_of(processor: Any, image: Tensor, do_denormalize: Any) -> Any:
    """The images as an array of bytes (N, H, W, 3); None if diffusers' own code must convert them."""
    try:
        # ``unit`` is a new tensor with values from 0 to 1. No other code has it, so it may be overwritten.
        unit = processor._denormalize_conditionally(image, do_denormalize)
        has_nan = unit.isnan().any()
        pixels = unit.permute(0, 2, 3, 1).float().mul_(255).round_().to(torch.uint8).contiguous().cpu()
    # Memory may be short if the image was decoded in tiles. Then diffusers' code converts it on the CPU.
    except torch.OutOfMemoryError:
        return None
    # If there are NaNs, diffusers' own code must run, because numpy then warns.
    return None if has_nan.item() else pixels.numpy()


def _overrides(stock: Any) -> dict[str, Any]:
    @functools.wraps(stock.postprocess)
    def postprocess(self: Any, image: Any, output_type: str = "pil", do_denormalize: Any = None) -> Any:
        is_ours = _is_ours(self, image, output_type, do_denormalize)
        pixels = _bytes_of(self, image, do_denormalize) if is_ours else None
        if pixels is None:
            return stock.postprocess(self, image, output_type, do_denormalize)
        return [Image.fromarray(picture) for picture in pixels]

    return {"postprocess": postprocess}


FUSION = ObjectFusion("image_bytes", module=__name__, sources=(_SOURCE,), overrides=_overrides)
