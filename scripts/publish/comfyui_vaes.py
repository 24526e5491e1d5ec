"""Time decodes of ComfyUI's autoencoders, stock and with sdfastgn.

python -m scripts.publish.comfyui_vaes build/ComfyUI --json benchmarks/by_hand/comfyui_vaes.json

The autoencoders have the architectures of published models and random weights. Each release runs with its
default memory management, which is DynamicVRAM in ComfyUI 0.16 and later.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NamedTuple
from unittest.mock import patch

import torch
import typer
from safetensors.torch import save_file
from torch import Tensor, nn

from scripts.publish import comfyui_models
from scripts.publish.comfyui_images import end_of_node
from scripts.publish.comfyui_options import FoldersArgument, check_checkouts
from scripts.publish.runs import in_a_process, release_memory
from sdfastgn.bench import timing
from sdfastgn.bench.documents import FAILED, OK, document, write_json
from sdfastgn.bench.environment import environment
from sdfastgn.bench.images import relative_error
from sdfastgn.cli import comfyui_checkout
from sdfastgn.cli.options import JsonOption
from sdfastgn.kernels.common.failures import one_line

_HUNYUAN = "comfy.ldm.hunyuan_video.vae_refiner"


def _wan_21() -> nn.Module:
    from comfy.ldm.wan.vae import WanVAE

    return WanVAE(dim=96, z_dim=16, temperal_downsample=[False, True, True])


def _wan_22() -> nn.Module:
    from comfy.ldm.wan.vae2_2 import WanVAE

    return WanVAE(dim=160, z_dim=48, temperal_downsample=[False, True, True])


def _hunyuan_video() -> nn.Module:
    from comfy.ldm.models.autoencoder import AutoencoderKL

    sizes = {**comfyui_models.VAE, "z_channels": 16, "conv3d": True, "time_compress": 4}
    return AutoencoderKL(ddconfig=sizes, embed_dim=16)


def _hunyuan_video_15() -> nn.Module:
    from comfy.ldm.models.autoencoder import AutoencodingEngine

    sizes = {
        "block_out_channels": [128, 256, 512, 1024, 1024], "in_channels": 3, "out_channels": 3,
        "num_res_blocks": 2, "ffactor_spatial": 16, "ffactor_temporal": 4, "downsample_match_channel": True,
        "upsample_match_channel": True, "z_channels": 32,
    }  # fmt: skip
    return AutoencodingEngine(
        regularizer_config={"target": "comfy.ldm.models.autoencoder.EmptyRegularizer"},
        encoder_config={"target": f"{_HUNYUAN}.Encoder", "params": sizes},
        decoder_config={"target": f"{_HUNYUAN}.Decoder", "params": sizes},
    )


def _seedvr2() -> nn.Module:
    from comfy.ldm.seedvr.vae import VideoAutoencoderKLWrapper

    return VideoAutoencoderKLWrapper()


def _ltx() -> nn.Module:
    from comfy.ldm.lightricks.vae.causal_video_autoencoder import VideoVAE

    return VideoVAE(version=2)


def _mochi() -> nn.Module:
    from comfy.ldm.genmo.vae.model import VideoVAE

    return VideoVAE()


def _cogvideox() -> nn.Module:
    from comfy.ldm.cogvideo.vae import AutoencoderKLCogVideoX

    return AutoencoderKLCogVideoX(latent_channels=16)


def _cosmos() -> nn.Module:
    from comfy.ldm.cosmos.vae import CausalContinuousVideoTokenizer

    model = CausalContinuousVideoTokenizer(
        z_channels=16, latent_channels=16, z_factor=1, resolution=1024, in_channels=3, out_channels=3,
        channels=128, channels_mult=[2, 4, 4], num_res_blocks=2, attn_resolutions=[32], dropout=0.0,
        patch_size=4, num_groups=1, temporal_compression=8, spacial_compression=8,
    )  # fmt: skip
    # ComfyUI recognizes Cosmos' files by buffers of ``unpatcher3d``, which published files contain. The next
    # line makes the state dict of ``model`` contain them too.
    model.decoder.unpatcher3d._non_persistent_buffers_set.clear()
    return model


def _sd15() -> nn.Module:
    from comfy.ldm.models.autoencoder import AutoencoderKL

    return AutoencoderKL(ddconfig=comfyui_models.VAE, embed_dim=comfyui_models.VAE["z_channels"])


class Decode(NamedTuple):
    """A decode that is timed. ``build``: makes the autoencoder. ``latent``: the latent's shape.

    The shape is (1, channels, latent frames, H / scale, W / scale) for a video of H x W pixels, and
    (1, channels, H / 8, W / 8) for an image.
    """

    label: str
    build: Callable[[], nn.Module]
    latent: tuple[int, ...]


DECODES = (
    Decode("Wan 2.1, 17 x 480 x 832", _wan_21, (1, 16, 5, 60, 104)),
    Decode("Qwen-Image, 1024²", _wan_21, (1, 16, 1, 128, 128)),
    Decode("Wan 2.2, 17 x 704 x 1280", _wan_22, (1, 48, 5, 44, 80)),
    Decode("HunyuanVideo, 17 x 480 x 832", _hunyuan_video, (1, 16, 5, 60, 104)),
    Decode("HunyuanVideo 1.5, 17 x 480 x 832", _hunyuan_video_15, (1, 32, 5, 30, 52)),
    Decode("SeedVR2, 17 x 480 x 832", _seedvr2, (1, 16, 5, 60, 104)),
    Decode("LTX-Video, 17 x 512 x 768", _ltx, (1, 128, 3, 16, 24)),
    Decode("Mochi, 19 x 480 x 848", _mochi, (1, 12, 4, 60, 106)),
    Decode("CogVideoX, 17 x 480 x 720", _cogvideox, (1, 16, 5, 60, 90)),
    Decode("Cosmos, 17 x 704 x 1280", _cosmos, (1, 16, 3, 88, 160)),
    Decode("SD1.5, 512²", _sd15, (1, 4, 64, 64)),
)


def main(
    folders: FoldersArgument,
    rounds: Annotated[int, typer.Option(help="Repetitions of each decode.")] = 3,
    json_path: JsonOption = None,
) -> None:
    """Time decodes with each release of ComfyUI, in a separate process for each."""
    check_checkouts(folders)
    content = document("comfyui_vaes", environment(torch.device("cuda")), {"rounds": rounds}, [])
    for folder in folders:
        try:
            rows = in_a_process(rows_of, folder, rounds)
        except Exception as error:  # the run goes on after an error, whose text is in the release's row
            rows = [
                {"comfyui": comfyui_checkout.release_of(folder), "status": FAILED, "reason": one_line(error)}
            ]
        content["rows"] += rows
        if json_path is not None:
            write_json(json_path, content)


def rows_of(folder: Path, rounds: int) -> list[dict[str, Any]]:
    """Times each of ``DECODES`` with the checkout of ComfyUI in ``folder``. Returns a row for each.

    Call it in a fresh process.
    """
    release = comfyui_checkout.import_comfyui(str(folder), modules=["comfy.sd", "nodes"])
    is_dynamic = comfyui_checkout.has_dynamic_vram(folder)
    if is_dynamic and not comfyui_checkout.start_dynamic_vram():
        raise RuntimeError("comfy-aimdo does not work on this machine")
    rows = []
    for each in DECODES:
        row = {"comfyui": release, "dynamic_vram": is_dynamic, "model": each.label}
        try:
            with tempfile.TemporaryDirectory() as files:
                row |= {"status": OK, **times_of(each, rounds, Path(files))}
        except Exception as error:  # the run goes on after an error, whose text is in the decode's row
            row |= {"status": FAILED, "reason": one_line(error)}
        print(row, flush=True)
        rows.append(row)
        release_memory()
    return rows


@torch.inference_mode()
def times_of(each: Decode, rounds: int, files: Path) -> dict[str, Any]:
    """Returns milliseconds and peak memory in MiB of the decode ``each``, stock and with sdfastgn.

    ``files``: folder for the file with the weights. The folder must exist until the last decode, because
    under DynamicVRAM ComfyUI reads weights from the file at any time.

    The result also has ``difference`` (of sdfastgn's pixels from stock's, relative to the norm of stock's),
    ``is_exact_after_ejection`` (True if the stock VAE gives the same bits after the optimized VAE has run)
    and ``report`` (the lines of the text on sdfastgn's node).
    """
    from sdfastgn.plans.comfyui import optimize_vae, text_of

    stock = _loaded(each.build, files)
    latent = torch.randn(each.latent, generator=torch.Generator().manual_seed(0))
    expected, *stock_costs = _decoded(stock, latent, rounds)
    ours = optimize_vae(stock)
    found, *costs = _decoded(ours, latent, rounds)
    return {
        **dict(zip(("stock_ms", "stock_mib"), stock_costs, strict=True)),
        **dict(zip(("optimized_ms", "optimized_mib"), costs, strict=True)),
        "difference": relative_error(found, expected),
        "report": text_of(ours.patcher).splitlines(),
        "is_exact_after_ejection": torch.equal(_decode(stock, latent), expected),
    }


def _loaded(build: Callable[[], nn.Module], files: Path) -> Any:
    """A VAE as ComfyUI's node Load VAE makes it, from a file with random weights in bf16."""
    import folder_paths
    import nodes

    device = "cuda" if torch.cuda.is_available() else "cpu"
    # If DynamicVRAM is on (``aimdo_enabled``), ComfyUI's linear layers have no weights before they load some.
    memory = sys.modules.get("comfy.memory_management")
    with_weights = patch.object(memory, "aimdo_enabled", False) if memory else contextlib.nullcontext()
    # The autoencoder is not on the device meta, because Cosmos' constructor reads values.
    with with_weights, torch.device(device):
        module = build()
    save_file(comfyui_models.random_weights(module, torch.bfloat16, device), files / "vae.safetensors")
    folder_paths.add_model_folder_path("vae", str(files), is_default=True)
    (vae,) = nodes.VAELoader().load_vae("vae.safetensors")
    return vae


def _decoded(vae: Any, latent: Tensor, rounds: int) -> tuple[Tensor, float, float]:
    """Decodes ``latent``. Returns (pixels on the CPU, median ms of ``rounds`` decodes, peak memory in MiB).

    Two decodes before the timed ones compile kernels and allocate memory.
    """
    device = torch.device("cuda")
    for _ in range(2):
        pixels = _decode(vae, latent)
    torch.cuda.reset_peak_memory_stats()
    seconds = [timing.time_once(lambda: _decode(vae, latent), device)[0] for _ in range(rounds)]
    return pixels, 1e3 * statistics.median(seconds), torch.cuda.max_memory_allocated() / 2**20


def _decode(vae: Any, latent: Tensor) -> Tensor:
    """Decodes ``latent`` as the node VAE Decode does. Returns the pixels, on the CPU."""
    torch.manual_seed(0)  # LTX's decoder draws noise
    pixels = vae.decode(latent)
    end_of_node()
    return pixels


if __name__ == "__main__":
    typer.run(main)
