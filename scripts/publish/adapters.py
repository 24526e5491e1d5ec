"""Time a model's calls after changes that users make between two images, stock and optimized.

python -m scripts.publish.adapters --json adapters.json

The changes are LoRAs and their scales, FreeU, an IP-Adapter, the residuals of a ControlNet or T2I-Adapter,
another prompt, and other attention processors. They are made one after the other to the same UNet or
transformer, in the order of the list ``CHANGES``. Models in the dict ``FEWER`` get only some of the changes.
LoRAs and the IP-Adapter have random weights.
"""

from __future__ import annotations

import argparse
import gc
import inspect
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from diffusers.loaders import IPAdapterMixin
from diffusers.models.attention_processor import AttnProcessor2_0
from torch import Tensor

import sdfastgn
from scripts.publish.networks import BATCH
from scripts.publish.real_sizes import MAX_ERROR
from scripts.publish.tables.adapters import KIND, ChangeRow
from sdfastgn.bench import documents, timing
from sdfastgn.bench.environment import environment
from sdfastgn.bench.images import relative_error
from sdfastgn.cli.session import exit_code
from sdfastgn.model_inputs import unet_inputs
from sdfastgn.models import video
from sdfastgn.models.architectures import DTYPES, build_unet, build_video_network
from sdfastgn.models.configurations import UNETS, VIDEO_NETWORKS
from sdfastgn.models.loras import add_lora

RANK = 16
# An IP-Adapter gets an image as an embedding with IMAGE_CHANNELS channels, and makes IMAGE_TOKENS tokens from
# it.
IMAGE_CHANNELS, IMAGE_TOKENS = 1024, 4
# Number of timed calls after the second call, as many as an image with 30 steps makes. As in the steps of an
# image, the CPU does not wait for the GPU between these calls.
LATER = 30
# Number of timed calls of a stock model after the second call. It is smaller than ``LATER``, because a stock
# model has no CUDA graphs, so all of its calls take equally long.
STOCK_LATER = 10
# Number of calls that run before the timed calls, only for the change "new attention processors before each
# call". After so many calls an optimized UNet has stopped capturing CUDA graphs for a while (a pause), so the
# timed calls run eagerly.
CALLS_UNTIL_PAUSE = 78


@dataclass
class Step:
    """A UNet or transformer, and the keyword arguments of its call. Changes are made to both in place.

    ``before_call``: a function that runs before each call. Its argument is the call's number since the last
    change, from 0.
    """

    model: Any
    inputs: dict[str, Any]
    before_call: Callable[[int], object] = field(default=lambda number: None)

    @property
    def unet(self) -> Any:
        """The model. Functions of diffusers that expect a pipeline read the model from this attribute."""
        return self.model

    def call(self, number: int) -> Tensor:
        self.before_call(number)
        with torch.no_grad():
            return self.model(**self.inputs, return_dict=False)[0]

    def calls(self, numbers: Iterable[int]) -> Tensor:
        """Calls the model once for each of ``numbers``, the numbers of calls that ``before_call`` gets.

        Returns the output of the last call.
        """
        *_, last = map(self.call, numbers)
        return last


def set_scales(step: Step, names: Sequence[str], scales: Sequence[float]) -> None:
    step.model.set_adapters(list(names), weights=list(scales))


def scale_each_call(step: Step) -> None:
    step.before_call = lambda number: set_scales(step, ["first"], [0.5 + number / 100])


def scale_in_the_arguments(step: Step) -> None:
    def change(number: int) -> None:
        step.inputs[scale_argument(step)] = {"scale": 0.5 + number / 100}

    step.before_call = change


def scale_argument(step: Step) -> str:
    """The name of an argument of the model's call: a dict, in which the scale of LoRAs can be given."""
    names = inspect.signature(type(step.model).forward).parameters
    return next(name for name in names if name.endswith("attention_kwargs"))


def nothing_each_call(step: Step) -> None:
    step.before_call = lambda number: None
    step.inputs.pop(scale_argument(step), None)


def two_loras(step: Step) -> None:
    set_scales(step, ["first", "second"], [0.7, 0.6])


def remove_loras(step: Step) -> None:
    step.model.unfuse_lora()
    step.model.unload_lora()


def give_residuals(step: Step, seed: int) -> None:
    """Gives the UNet's call random residuals as arguments, with the shapes of a ControlNet's."""
    config, sample = step.model.config, step.inputs["sample"]
    widths, size = config.block_out_channels, sample.shape[-1]
    shapes = [(widths[0], size)]
    for index, width in enumerate(widths):
        shapes += [(width, size)] * config.layers_per_block
        if index < len(widths) - 1:
            size //= 2
            shapes.append((width, size))
    generator = torch.Generator(sample.device).manual_seed(seed)
    *down, mid = (0.1 * drawn(generator, sample, BATCH, c, s, s) for c, s in [*shapes, (widths[-1], size)])
    step.inputs["down_block_additional_residuals"] = tuple(down)
    step.inputs["mid_block_additional_residual"] = mid


def remove_residuals(step: Step) -> None:
    del step.inputs["down_block_additional_residuals"], step.inputs["mid_block_additional_residual"]


def give_adapter_residuals(step: Step, seed: int) -> None:
    """Gives the UNet's call random residuals as arguments, with the shapes of a T2I-Adapter's.

    A call of the UNet removes the residuals from the list that it is given. So each call gets a new list, as
    in diffusers' pipelines.
    """
    sample = step.inputs["sample"]
    generator = torch.Generator(sample.device).manual_seed(seed)
    residuals = [
        0.1 * drawn(generator, sample, BATCH, width, sample.shape[-1] >> level, sample.shape[-1] >> level)
        for level, width in enumerate(step.model.config.block_out_channels)
    ]

    def give(number: int) -> None:
        step.inputs["down_intrablock_additional_residuals"] = [each.clone() for each in residuals]

    step.before_call = give


def remove_adapter_residuals(step: Step) -> None:
    step.before_call = lambda number: None
    del step.inputs["down_intrablock_additional_residuals"]


def drawn(generator: torch.Generator, like: Tensor, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=like.dtype, device=like.device)


def add_ip_adapter(step: Step) -> None:
    """Loads an IP-Adapter with random weights into the UNet, and gives the call a random image embedding."""
    unet, sample = step.model, step.inputs["sample"]
    draw = partial(drawn, torch.Generator(sample.device).manual_seed(3), sample)
    width = unet.config.cross_attention_dim
    paths = [name.removesuffix(".processor") for name in unet.attn_processors if "attn2" in name]
    layers = {
        f"{2 * index + 1}.to_{side}_ip.weight": draw(unet.get_submodule(path).inner_dim, width) / width**0.5
        for index, path in enumerate(paths)
        for side in "kv"
    }
    projection = {
        "proj.weight": draw(IMAGE_TOKENS * width, IMAGE_CHANNELS) / IMAGE_CHANNELS**0.5,
        "proj.bias": draw(IMAGE_TOKENS * width),
        "norm.weight": 1 + 0.1 * draw(width),
        "norm.bias": draw(width),
    }
    unet._load_ip_adapter_weights([{"image_proj": projection, "ip_adapter": layers}])
    unet.requires_grad_(False)
    give_image(step, 1)


def give_image(step: Step, seed: int) -> None:
    sample = step.inputs["sample"]
    generator = torch.Generator(sample.device).manual_seed(seed)
    image = drawn(generator, sample, BATCH, 1, IMAGE_CHANNELS)
    step.inputs["added_cond_kwargs"] = {**step.inputs.get("added_cond_kwargs", {}), "image_embeds": [image]}


def set_image_scale(step: Step, scale: float) -> None:
    IPAdapterMixin.set_ip_adapter_scale(step, scale)


def image_scale_each_call(step: Step) -> None:
    step.before_call = lambda number: set_image_scale(step, 0.5 + number / 100)


def remove_ip_adapter(step: Step) -> None:
    nothing_each_call(step)
    IPAdapterMixin.unload_ip_adapter(step)
    del step.inputs["added_cond_kwargs"]["image_embeds"]


def processors_each_call(step: Step) -> None:
    """Sets new attention processors before each call. This drops the CUDA graphs of an optimized UNet.

    Also makes ``CALLS_UNTIL_PAUSE`` such calls. After them the UNet captures no CUDA graphs for a while, so
    the timed calls run without CUDA graphs.
    """
    step.before_call = lambda number: step.model.set_attn_processor(AttnProcessor2_0())
    step.calls(range(CALLS_UNTIL_PAUSE))


def another_prompt(step: Step) -> None:
    step.inputs["encoder_hidden_states"] = step.inputs["encoder_hidden_states"].flip(0).clone()


SCALE_ARGUMENT = "a new `scale` in each call's `cross_attention_kwargs` or `joint_attention_kwargs`"
# (description of a change, function that makes it), in the order in which the changes are made.
CHANGES: tuple[tuple[str, Callable[[Step], object]], ...] = (
    ("no LoRA", lambda step: None),
    ("another prompt", another_prompt),
    ("a ControlNet's residuals", lambda step: give_residuals(step, 1)),
    ("other residuals", lambda step: give_residuals(step, 2)),
    ("no residuals", remove_residuals),
    ("FreeU", lambda step: step.model.enable_freeu(s1=0.9, s2=0.2, b1=1.2, b2=1.4)),
    ("other values of FreeU", lambda step: step.model.enable_freeu(s1=0.9, s2=0.2, b1=1.1, b2=1.2)),
    ("no FreeU", lambda step: step.model.disable_freeu()),
    ("a T2I-Adapter's residuals", lambda step: give_adapter_residuals(step, 1)),
    ("the T2I-Adapter's residuals of another image", lambda step: give_adapter_residuals(step, 2)),
    ("no T2I-Adapter", remove_adapter_residuals),
    ("an IP-Adapter", add_ip_adapter),
    ("the IP-Adapter with another image", lambda step: give_image(step, 2)),
    ("`set_ip_adapter_scale`", lambda step: set_image_scale(step, 0.4)),
    ("`set_ip_adapter_scale` with a new scale before each call", image_scale_each_call),
    ("no IP-Adapter", remove_ip_adapter),
    ("one LoRA", lambda step: add_lora(step.model, rank=RANK, name="first", seed=1)),
    ("`set_adapters` with another scale", lambda step: set_scales(step, ["first"], [0.5])),
    ("`set_adapters` with a new scale before each call", scale_each_call),
    (SCALE_ARGUMENT, scale_in_the_arguments),
    ("a constant scale", nothing_each_call),
    ("a second LoRA is loaded", lambda step: add_lora(step.model, rank=RANK, name="second", seed=2)),
    ("two LoRAs, loaded before", two_loras),
    ("the second alone", lambda step: set_scales(step, ["second"], [1.0])),
    ("the two LoRAs again", two_loras),
    ("`fuse_lora`", lambda step: step.model.fuse_lora()),
    ("no LoRA again", remove_loras),
    ("new attention processors before each call", processors_each_call),
)
_ONE_LORA = (
    "no LoRA",
    "one LoRA",
    "`set_adapters` with another scale",
    "`set_adapters` with a new scale before each call",
    SCALE_ARGUMENT,
    "a constant scale",
    "a second LoRA is loaded",
    "`fuse_lora`",
    "no LoRA again",
)
# Model -> names of the changes that it gets, if it does not get all of ``CHANGES``.
FEWER = {
    "sdxl": (
        *_ONE_LORA,
        *("FreeU", "other values of FreeU", "no FreeU"),
        *("two LoRAs, loaded before", "the second alone", "the two LoRAs again"),
        "new attention processors before each call",
    ),
    **{name: _ONE_LORA for name, parts in VIDEO_NETWORKS.items() if "transformer" in parts},
}
MODELS = (*UNETS, *(name for name in FEWER if name not in UNETS))


def changes_of(model: str) -> list[tuple[str, Callable[[Step], object]]]:
    names = FEWER.get(model)
    return [(name, change) for name, change in CHANGES if names is None or name in names]


def measured(model: str, dtype: torch.dtype, device: torch.device) -> list[ChangeRow]:
    """Makes all changes for ``model`` to stock, then to an optimized model. Returns a row per change.

    ``model``: a key of ``UNETS``, or of ``VIDEO_NETWORKS`` for its transformer.
    """
    stock, ours = (measured_calls(model, dtype, device, optimize=optimize) for optimize in (False, True))
    rows = []
    for (change, _), (expected, stock_ms, stock_mib), (found, ours_ms, ours_mib) in zip(
        changes_of(model), stock, ours, strict=True
    ):
        error = relative_error(found, expected)
        status = documents.OK if error < MAX_ERROR else documents.WRONG
        rows.append(ChangeRow(model, change, stock_ms, ours_ms, stock_mib, ours_mib, error, status))
    return rows


def dtype_of(model: str, device: torch.device) -> torch.dtype:
    if device.type != "cuda":
        return torch.float32
    return torch.float16 if model in UNETS else DTYPES[VIDEO_NETWORKS[model]["transformer"].dtype]


def built(model: str, dtype: torch.dtype, device: torch.device) -> Step:
    if model in UNETS:
        unet = build_unet(model, dtype, device).requires_grad_(False)
        size = 8 * UNETS[model]["sample_size"]
        inputs = unet_inputs(unet.config, size=size, batch=BATCH, dtype=dtype, device=device, seed=0)
        return Step(unet, inputs)
    network = VIDEO_NETWORKS[model]["transformer"]
    transformer = build_video_network(network, dtype, device).requires_grad_(False)
    size = {"frames": network.frames, "height": network.height, "width": network.width}
    options: dict[str, Any] = {"batch": network.batch, "dtype": dtype, "device": device, "seed": 0}
    return Step(transformer, video.random_inputs(transformer, **size, **options))


def measured_calls(
    model: str, dtype: torch.dtype, device: torch.device, *, optimize: bool
) -> list[tuple[Tensor, list[float], float | None]]:
    """Makes the changes of ``changes_of(model)`` to one model, and calls it 2 + ``LATER`` times after each.

    A stock model is called only 2 + ``STOCK_LATER`` times.

    Returns a tuple for each change: (output of the last call, copied to the CPU; [ms of the first call, ms of
    the second, mean ms of the later calls]; MiB that tensors occupy on the GPU after the calls). On a CPU,
    None takes the place of the MiB.
    """
    step = built(model, dtype, device)
    if optimize:
        sdfastgn.optimize(step.model)
        for number in range(3):
            step.call(number)
    # Some changes depend on a call's number. The outputs of the last calls are compared, so the last call has
    # the same number for the stock and the optimized model.
    later = range(2 if optimize else 2 + LATER - STOCK_LATER, 2 + LATER)
    found = []
    for name, change in changes_of(model):
        change(step)
        times = [1e3 * timing.time_once(partial(step.call, number), device)[0] for number in range(2)]
        seconds, output = timing.time_once(partial(step.calls, later), device)
        times.append(1e3 * seconds / len(later))
        on_gpu = device.type == "cuda"
        mib = torch.cuda.memory_allocated(device) / 2**20 if on_gpu else None
        found.append((output.cpu(), times, mib))
        print(f"{model} {'optimized' if optimize else 'stock'}, {name}: {found[-1][1]}", flush=True)
    del step
    gc.collect()
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command. Returns the exit code: 1 if an output was wrong, else 0."""
    parser = argparse.ArgumentParser(
        "python -m scripts.publish.adapters",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", type=Path, required=True, help="file for the result")
    parser.add_argument("--model", action="append", choices=MODELS, help="model to time; can be repeated")
    parser.add_argument("--device", default="cuda", help="device of the models")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    rows: list[ChangeRow] = []
    with timing.global_switches() as switches:
        where = environment(device, switches)
        timing.spin_up(device)
        for model in options.model or ("sd15", "sdxl"):
            rows += measured(model, dtype_of(model, device), device)
            documents.write_json(options.json, documents.document(KIND, where, {}, rows))
    return exit_code(rows)


if __name__ == "__main__":
    sys.exit(main())
