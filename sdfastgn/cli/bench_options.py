"""Checks the options of ``bench`` and makes a ``BenchConfig`` for each measurement. Builds no model.

Checks raise OptionError. The checks that need no torch are in ``checks.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sdfastgn.bench.documents import images_path
from sdfastgn.bench.presets import PRESETS
from sdfastgn.bench.tables.plots import plot_reason
from sdfastgn.bench.variants import EVERY_PART, PARTS, VARIANTS, Variant
from sdfastgn.bench.workload import BenchConfig
from sdfastgn.cli.checks import (
    file_paths,
    image_size,
    one_of,
    positive,
    some_of,
    warn_of_path,
    weights_source,
    whole_numbers,
)
from sdfastgn.cli.loading import device_name, dtype_name, pipeline_reason, saved_pipeline
from sdfastgn.models import architectures
from sdfastgn.models.configurations import MODELS, TEXT_TO_IMAGE, UNETS, VAES, VIDEO_NETWORKS
from sdfastgn.models.saved import native_size, unet_config
from sdfastgn.program import OptionError

# All values of the option --model of ``sdfastgn bench``.
EVERY_MODEL = (*MODELS, *VIDEO_NETWORKS)
# Defaults of options. ``GPU_REPEATS`` and ``CPU_REPEATS`` have the default of ``--repeats`` for each part.
# ``GUIDED_BATCH`` is the default of ``--batch`` for a UNet step with guidance. ``STEPS`` is the default of
# ``--steps`` for a pipeline.
GPU_REPEATS = {"unet": 50, "vae": 30, "transformer": 30, "pipeline": 5, "train": 30}
CPU_REPEATS = {"unet": 5, "vae": 5, "transformer": 5, "pipeline": 2, "train": 3}
GUIDED_BATCH = 2
STEPS = 30
# Options that only a pipeline uses. For other parts they are refused.
PIPELINE_OPTIONS = ("steps", "scheduler", "guidance", "prompt")
# The parts that can be timed of a saved pipeline with a transformer.
SAVED_PARTS = ("transformer", "pipeline")


def _model_facts(model: str | None, weights: str, parts: Sequence[str]) -> tuple[str, int, int, int]:
    """Returns (name, native size, scale of the latents, default batch of a UNet step) of a model.

    The native size is that of the model's images, in pixels. The scale is the number of pixels along a side
    that one position of the latent covers.

    ``model``: the name that the user gave. If it is None, the name of a known model with the same UNet is
    returned. If no known model has this UNet, the last part of the path ``weights`` is returned as the name.

    Raises OptionError if ``weights`` are of another model than ``model``, or have a UNet that cannot be
    timed. Also raises it if ``parts`` has a pipeline and ``weights`` are no text-to-image pipeline.
    """
    if weights == "random":
        name = model or "tiny"
        is_guided = not UNETS[name].get("time_cond_proj_dim")
        return name, VAES[name]["sample_size"], 8, GUIDED_BATCH if is_guided else 1
    config = unet_config("--weights", weights)
    # SD-Turbo has the UNet of SD2, which is no known model. So weights with this UNet count as sd_turbo only
    # if the user has named sd_turbo.
    named = [known for known in MODELS if known == model or known in TEXT_TO_IMAGE]
    same = [known for known in named if not architectures.unet_difference(config, known)]
    if model is not None and model not in same:
        difference = architectures.unet_difference(config, model)
        hint = f"; --model {same[0]} fits" if same else ""
        raise OptionError(f"--model: the UNet of {weights!r} is not {model!r}'s: {difference}{hint}")
    if reason := architectures.unet_reason(config):
        raise OptionError(f"--weights: the UNet of {weights!r} cannot be timed: {reason}")
    if "pipeline" in parts and (reason := pipeline_reason(weights, config)):
        raise OptionError(f"--part: 'pipeline' needs {reason}")
    native, scale = native_size(weights, config, without_vae=8 if same else 1)
    # With guidance a UNet gets each image twice. A UNet without text, or to which guidance is an input, gets
    # it once.
    is_guided = config.get("_class_name") != "UNet2DModel" and not config.get("time_cond_proj_dim")
    name = model or (same[0] if same else Path(weights).expanduser().resolve().name)
    return name, native, scale, GUIDED_BATCH if is_guided else 1


def _model_of(model: str | None, weights: str) -> str | None:
    """The name in ``VIDEO_NETWORKS`` of a saved pipeline with a transformer; ``model`` for other weights.

    ``model``: the name that the user gave, or None. Raises OptionError if the name is unknown, if ``weights``
    have no transformer of this model, or if the benchmark cannot time their transformer.
    """
    if model is not None:
        one_of("--model", model, EVERY_MODEL)
    saved = None if weights == "random" or model in MODELS else saved_pipeline(weights)
    kind = "" if saved is None else saved.transformer
    if not kind and (weights == "random" or model not in VIDEO_NETWORKS):
        return model
    known = {
        name: parts["transformer"].cls for name, parts in VIDEO_NETWORKS.items() if "transformer" in parts
    }
    names = [name for name, cls in known.items() if cls == kind]
    if model is not None and model not in names:
        other = f": it has a {kind}" if kind else ""
        raise OptionError(f"--weights: there is no transformer of {model!r} in {weights!r}{other}")
    if not names:
        choice = ", ".join(known.values())
        raise OptionError(f"--weights: cannot time the {kind} in {weights!r}; choose from {choice}")
    return names[0]


def _parts(model: str | None, parts: Sequence[str] | None, *, is_saved: bool = False) -> list[str]:
    """Returns ``parts``, what to time ("unet", "vae", ...), without repetitions.

    If ``parts`` is None, returns the first part that the benchmark can time for this model. ``is_saved``:
    True for a saved pipeline with a transformer. Raises OptionError if one of ``parts`` cannot be
    timed.
    """
    networks = SAVED_PARTS if is_saved else tuple(VIDEO_NETWORKS.get(model or "", ()))
    if parts is None:
        return [next(iter(networks or PARTS))]
    chosen = some_of("--part", parts, EVERY_PART)
    if not networks and "transformer" in chosen:
        models = ", ".join(name for name, found in VIDEO_NETWORKS.items() if "transformer" in found)
        raise OptionError(f"--part: 'transformer' needs --model with one of {models}")
    if networks and (others := [part for part in chosen if part not in networks]):
        choice = ", ".join(networks)
        raise OptionError(f"--part: cannot time {others[0]!r} of the model {model!r}; choose from {choice}")
    return chosen


def _sizes(
    model: str | None, weights: str, parts: Sequence[str], size: int | None
) -> tuple[str, dict[str, dict[str, Any]]]:
    """Returns (the model's name, {part: the fields of BenchConfig that say how large a call is}).

    ``size``: the value of ``--size``. Raises OptionError for a wrong size, and for weights that do not fit
    ``model`` or ``parts``.
    """
    if model not in VIDEO_NETWORKS:
        name, native, scale, unet_batch = _model_facts(model, weights, parts)
        side = image_size("--size", native if size is None else size, scale)
        return name, {part: {"size": side, "batch": unet_batch if part == "unet" else 1} for part in parts}
    sizes: dict[str, dict[str, Any]] = {}
    for part in parts:
        network = VIDEO_NETWORKS[model]["transformer" if part == "pipeline" else part]
        height, width = (network.height, network.width) if size is None else (image_size("--size", size),) * 2
        # A saved pipeline has its own guidance, which may double the batch of a step.
        own: dict[str, Any] = (
            {"batch": network.batch} if weights == "random" else {"batch": 1, "guidance": None}
        )
        sizes[part] = {"size": height, "width": width, "frames": network.frames, **own}
    return model, sizes


def scheduler_name(option: str, value: str) -> str:
    """Return ``value`` if it is empty or the name of a scheduler class in diffusers."""
    if value:
        import diffusers

        if not (value.endswith("Scheduler") and hasattr(diffusers, value)):
            example = "give a class such as EulerDiscreteScheduler"
            raise OptionError(f"{option}: diffusers has no scheduler {value!r}; {example}")
    return value


def png_path(option: str, value: Path | None, unless: str = "") -> Path | None:
    """Return the path ``value`` of a picture, or None if it is None.

    Raises OptionError if the path does not end in .png, or if no picture can be drawn. ``unless``: the reason
    why this command draws no picture, with "{}" in the place of the path; empty if it can draw one.
    """
    if value is None:
        return None
    if unless:
        raise OptionError(f"{option}: {unless.format(repr(str(value)))}")
    if value.suffix.lower() != ".png":
        raise OptionError(f"{option}: must end in .png, got {str(value)!r}")
    if (reason := plot_reason()) is not None:
        raise OptionError(f"{option}: {reason}")
    return value


def _check_lora_rank(value: int | None, parts: Sequence[str]) -> None:
    if value is None:
        return
    positive("--lora-rank", value)
    if list(parts) != ["train"]:
        raise OptionError(f"--lora-rank: is for --part train, got --part {', '.join(parts)}")
    if find_spec("peft") is None:
        raise OptionError("--lora-rank: needs peft, which is not installed")


def bench_configs(
    *,
    model: str | None,
    parts: Sequence[str] | None = None,
    size: int | None = None,
    batch: int | str | None = None,
    steps: int | str | None = None,
    dtype: str | None = None,
    device: str | None = None,
    weights: str = "random",
    repeats: int | None = None,
    scheduler: str | None = None,
    profile: bool = False,
    lora_rank: int | None = None,
    **others: Any,
) -> list[BenchConfig]:
    """Check the options, and make a config for each part, batch and (of a pipeline) number of steps.

    Args:
        batch, steps: a number, or a comma-separated list.
        others: fields of BenchConfig that need no check. None means the field's default.

    All other arguments are options of ``bench``; None means the option's default.
    """
    weights = weights_source("--weights", weights)
    model = _model_of(model, weights)
    chosen = _parts(model, parts, is_saved=model in VIDEO_NETWORKS and weights != "random")
    device = device_name("--device", device)
    on_cpu = device == "cpu"
    on_gpu = next(iter(VIDEO_NETWORKS[model].values())).dtype if model in VIDEO_NETWORKS else "fp16"
    dtype = dtype_name("--dtype", dtype, device, on_gpu)
    every_steps = whole_numbers("--steps", STEPS if steps is None else steps)
    scheduler = scheduler_name("--scheduler", scheduler or "")
    name, sizes = _sizes(model, weights, chosen, size)
    _check_lora_rank(lora_rank, chosen)
    others = {field: value for field, value in others.items() if value is not None}
    counts = CPU_REPEATS if on_cpu else GPU_REPEATS
    return [
        BenchConfig(
            model=name,
            part=part,
            dtype=dtype,
            device=device,
            repeats=positive("--repeats", counts[part] if repeats is None else repeats),
            steps=count,
            weights=weights,
            scheduler=scheduler,
            lora_rank=lora_rank,
            # A pipeline is profiled only if no other part is timed, because its profile takes minutes. The
            # profiles of other parts already show where a pipeline's time goes.
            profile=profile and (part != "pipeline" or len(chosen) == 1),
            **(sizes[part] | {"batch": images} | others),
        )
        for part in chosen
        for images in whole_numbers("--batch", sizes[part]["batch"] if batch is None else batch)
        for count in (every_steps if part == "pipeline" else every_steps[:1])
    ]


def _check_used(given: Mapping[str, Any], configs: Sequence[BenchConfig]) -> None:
    """Raise OptionError if the user has given an option that none of ``configs`` uses."""
    pipelines = [config for config in configs if config.part == "pipeline"]
    for option in PIPELINE_OPTIONS:
        if option in given and not pipelines:
            parts = ", ".join(dict.fromkeys(config.part for config in configs))
            raise OptionError(f"--{option}: is for --part pipeline, got --part {parts}")
    for config in [each for each in pipelines if each.frames is None] if "guidance" in given else ():
        is_random = config.weights == "random"
        unet = UNETS[config.model] if is_random else unet_config("--weights", config.weights)
        if unet.get("time_cond_proj_dim"):
            own = f"the UNet of {config.model!r} takes guidance as an input, and is timed with its own"
            raise OptionError(f"--guidance: {own}, got {given['guidance']}")


def preset_configs(name: str | None, **given: Any) -> list[BenchConfig]:
    """The configs of the preset ``name``. If ``name`` is None, the configs that the options ask for.

    ``given``: the options of the user; None for an option that was not given. They replace the preset's
    settings. If the user gives a model, only the preset's cases for this model are used. If there are none,
    the preset's first case is used with the user's model.

    Raises OptionError also for an option that no config uses.
    """
    given = {option: value for option, value in given.items() if value is not None}
    configs = _configs(name, given)
    _check_used(given, configs)
    model = given.get("model")
    if model is not None and configs[0].weights == "random" and Path(model).exists():
        warn_of_path("--model", model, f"--weights ./{model}")
    return configs


def _configs(name: str | None, given: Mapping[str, Any]) -> list[BenchConfig]:
    if name is None:
        return bench_configs(**{"model": None, **given})
    cases = [case.settings for case in PRESETS[one_of("--preset", name, PRESETS)].cases]
    model = given.get("model")
    if model is not None:
        one_of("--model", model, EVERY_MODEL)
        cases = [each for each in cases if each["model"] == model] or cases[:1]
    configs = []
    for case in cases:
        settings = {"parts": [case["part"]], **case, **given, "preset": name}
        settings.pop("part")
        configs += bench_configs(**settings)
    return configs


def variant_list(option: str, text: str) -> list[Variant]:
    """The variants (ways to run the model) in the list ``text``, in the order of ``VARIANTS``.

    ``all`` means every variant except those that are timed only if the user names them.
    """
    every = [name for name, variant in VARIANTS.items() if variant.is_in_all]
    names = every if text == "all" else some_of(option, text, VARIANTS)
    return [variant for name, variant in VARIANTS.items() if name in names]


def check_outputs(*, json: Path | None, html: Path | None, plot: Path | None, profile: bool) -> None:
    """Check that each output file of ``bench`` can be written, and that no two files have the same path."""
    png_path("--plot", plot, "" if profile else "draws the breakdown of --profile, got {} without --profile")
    images = json and html and images_path(json)
    file_paths({"--json": json, "--json's images": images, "--html": html, "--plot": plot})
