"""Time decodes of large images in tiles and in one piece, stock and optimized, and measure their memory.

python -m scripts.publish.tiled_decode --json tiled_decode.json
python -m scripts.publish.tiled_decode --model Flux --size 2048 --json tiled_decode_flux.json

The autoencoder has random weights. The standard deviation of the latents grows from left to right, so that
tiles have different means and variances, as the tiles of a photo do. ``optimize`` is called without CUDA
graphs, because a graph would hold the memory of a large decode. ``cudnn.benchmark`` is off, as PyTorch's
default is, so cuDNN does not try several algorithms.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL
from torch import Tensor, nn

import sdfastgn
from scripts.publish.real_sizes import MAX_ERROR
from scripts.publish.runs import finite, release_memory
from scripts.publish.tables.tiled_decode import KIND, DecodeRow
from sdfastgn.bench import documents, timing
from sdfastgn.bench.environment import environment
from sdfastgn.bench.images import relative_error
from sdfastgn.cli.session import exit_code
from sdfastgn.kernels.common.failures import one_line
from sdfastgn.model_inputs import randn
from sdfastgn.models.architectures import with_random_weights
from sdfastgn.models.configurations import TINY_AUTOENCODERS, VAES
from sdfastgn.models.saved import latent_scale

# Model -> the configuration of its ``AutoencoderKL``.
AUTOENCODERS: dict[str, dict[str, Any]] = {
    **{model: config for model, config in VAES.items() if model not in TINY_AUTOENCODERS},
    "Flux": {
        **VAES["sdxl"],
        "latent_channels": 16,
        "use_quant_conv": False,
        "use_post_quant_conv": False,
    },
}
SIZES = (2048, 4096)
# Pixels along a side of the largest image that is also decoded in fp32. In fp32 a decode of 4096 x 4096
# pixels with stock's code would need about all memory of an H100.
MAX_FP32_SIZE = 2048
# The decodes that are measured: (is the autoencoder optimized?, size of a tile divided by the autoencoder's
# own tile size; None for a decode without tiles). All images are compared with the image of the first decode.
WAYS: tuple[tuple[bool, float | None], ...] = (
    (False, None),
    (True, None),
    (False, 1.0),
    (True, 1.0),
    (True, 1.5),
)


def latents(model: str, size: int, device: torch.device) -> Tensor:
    """Returns latents in fp32 whose standard deviation grows from left to right.

    Their shape is (1, C, pixels, pixels). C is the autoencoder's number of latent channels, and ``pixels`` is
    ``size`` divided by the autoencoder's scale.
    """
    config = AUTOENCODERS[model]
    shape = config.get("latent_channels", 4), *(size // latent_scale(config),) * 2
    z = randn(1, *shape, seed=0, dtype=torch.float32, device=device)
    return z * torch.linspace(0.2, 2.0, shape[-1], device=device)


def decode(vae: Any, z: Tensor, tile: int | None = None) -> Tensor:
    """Decodes ``z`` in tiles of ``tile`` pixels, or without tiles if ``tile`` is None."""
    vae.use_tiling = tile is not None
    if tile is not None:
        vae.tile_sample_min_size = tile
        vae.tile_latent_min_size = tile // latent_scale(vae.config)
    with torch.no_grad():
        return vae.decode(z, return_dict=False)[0]


def exact_image(stock: nn.Module, z: Tensor) -> Tensor:
    """Returns the image that ``stock`` decodes from ``z``, if both are cast to fp32. TF32 is off."""
    with timing.global_switches(cudnn_benchmark=False, cudnn_tf32=False):
        image = decode(nn.Module.float(copy.deepcopy(stock)), z.float())
    release_memory()
    return image


def timed(vae: Any, z: Tensor, tile: int | None) -> tuple[Tensor, float, float | None]:
    """Decodes twice. Returns (image, seconds, peak GiB) of the second call.

    The peak does not count tensors that existed before this call. It is None on the CPU.
    """
    release_memory()
    decode(vae, z, tile)
    if not z.is_cuda:
        seconds, image = timing.time_once(lambda: decode(vae, z, tile), z.device)
        return image, seconds, None
    torch.cuda.reset_peak_memory_stats(z.device)
    before = torch.cuda.memory_allocated(z.device)
    seconds, image = timing.time_once(lambda: decode(vae, z, tile), z.device)
    return image, seconds, (torch.cuda.max_memory_allocated(z.device) - before) / 2**30


def measured(model: str, size: int, dtype: torch.dtype, device: torch.device) -> Iterator[DecodeRow]:
    """Decodes the same latents stock and optimized, in tiles and without tiles (``WAYS`` lists the decodes).

    Yields the row of each decode as soon as it is measured.
    """
    config = AUTOENCODERS[model]
    stock = with_random_weights(lambda: AutoencoderKL(**config), dtype, device, seed=0)
    ours = sdfastgn.optimize(copy.deepcopy(stock), cuda_graphs=False)
    z = latents(model, size, device).to(dtype)
    exact = exact_image(stock, z) if size <= MAX_FP32_SIZE else None
    expected = None
    for way in WAYS:
        is_optimized, factor = way
        tile = None if factor is None else int(factor * config["sample_size"])
        row = DecodeRow(size, is_optimized, tile)
        try:
            image, seconds, peak = timed(ours if is_optimized else stock, z, tile)
        except Exception as error:  # a decode without tiles may need too much memory
            yield replace(row, status=documents.FAILED, reason=one_line(error))
            continue
        difference = None if expected is None else relative_error(image, expected)
        row = replace(
            row,
            difference=None if difference is None else finite(difference),
            error=None if exact is None else finite(relative_error(image, exact)),
        )
        if way == WAYS[0]:
            expected = image
        if not is_optimized:
            yield replace(row, seconds=seconds, peak_gib=peak)
        elif difference is None:
            yield replace(row, status=documents.FAILED, reason="stock made no image to compare with")
        elif difference < MAX_ERROR:
            yield replace(row, seconds=seconds, peak_gib=peak)
        else:
            yield replace(row, status=documents.WRONG)
        del image


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command. Returns the exit code: 1 if an image was wrong or every decode failed, else 0."""
    parser = argparse.ArgumentParser(
        "python -m scripts.publish.tiled_decode",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", type=Path, required=True, help="file for the result")
    parser.add_argument("--model", choices=AUTOENCODERS, default="sdxl", help="whose autoencoder decodes")
    parser.add_argument("--size", type=int, action="append", help="image size in pixels; can be repeated")
    parser.add_argument("--device", default="cuda", help="device of the autoencoder")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    config = {"model": options.model, "dtype": "fp16" if dtype == torch.float16 else "fp32"}
    rows: list[DecodeRow] = []
    with timing.global_switches(cudnn_benchmark=False) as switches:
        where = environment(device, switches)
        timing.spin_up(device)
        for size in options.size or SIZES:
            for row in measured(options.model, size, dtype, device):
                rows.append(row)
                print(row, flush=True)
                # The file is written after each decode, so that an interrupted run has written its results.
                documents.write_json(options.json, documents.document(KIND, where, config, rows))
    return exit_code(rows)


if __name__ == "__main__":
    sys.exit(main())
