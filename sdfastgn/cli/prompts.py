"""What ``sdfastgn generate`` is asked to draw: its options and the lines of a file of prompts, checked.

Nothing here imports torch, and diffusers only for a Hub id, so that a bad option is told at once.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from sdfastgn.cli import checks
from sdfastgn.models.configurations import DTYPES, SEEDS
from sdfastgn.models.saved import native_size, unet_config
from sdfastgn.program import OptionError


@dataclass(frozen=True)
class Settings:
    """What one image is drawn from."""

    prompt: str
    negative_prompt: str | None
    width: int
    height: int
    steps: int
    guidance: float
    seed: int

    def shared(self) -> dict[str, Any]:
        """The pipeline's arguments that all images of a call share."""
        size = {"width": self.width, "height": self.height}
        return {**size, "num_inference_steps": self.steps, "guidance_scale": self.guidance}


# What JSON may have where a field has this type. A bool is an int too, and no number of steps.
_KINDS = {"str": (str,), "str | None": (str, type(None)), "int": (int,), "float": (int, float)}


def _settings(given: Any, defaults: Mapping[str, Any], scale: int) -> Settings:
    """Of one line. Raises ValueError, which says what is wrong with it."""
    kinds = {field.name: str(field.type) for field in fields(Settings)}
    if not isinstance(given, dict) or "prompt" not in given:
        raise ValueError(f"must be an object with a prompt, got {given!r}")
    for name in given:
        checks.one_of("setting", name, kinds)
    values = {**defaults, **given}
    for name, kind in kinds.items():
        if type(values[name]) not in _KINDS[kind]:
            raise ValueError(f"{name}: must be of type {kind}, got {values[name]!r}")
        # JSON can have half a character, which a tokenizer refuses with all prompts of its batch.
        if any("\ud800" <= each <= "\udfff" for each in str(values[name])):
            raise ValueError(f"{name}: must be Unicode text, got {values[name]!r}")
    checks.image_size("width", values["width"], scale)
    checks.image_size("height", values["height"], scale)
    checks.positive("steps", values["steps"])
    if not math.isfinite(values["guidance"]):
        raise ValueError(f"guidance: must be finite, got {values['guidance']!r}")
    if values["seed"] not in SEEDS:
        raise ValueError(f"seed: must be a whole number of 64 bits, got {values['seed']!r}")
    return Settings(**{**values, "guidance": float(values["guidance"])})


def read_prompts(
    path: Path, defaults: Mapping[str, Any], scale: int
) -> tuple[dict[int, Settings], dict[int, str]]:
    """What to draw by number of line, and what is wrong with the other lines; empty ones are no lines.

    A line is a prompt, or in a file named ``.jsonl`` an object of settings. The default of its seed
    is that of ``defaults`` and its number.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise OptionError(f"--prompts: cannot read {str(path)!r}: {error.strerror or error}") from None
    found, problems = {}, {}
    for number, line in enumerate(lines, 1):
        try:
            if text := line.decode("utf-8-sig").strip():
                given = json.loads(text) if path.suffix.lower() == ".jsonl" else {"prompt": text}
                found[number] = _settings(given, {**defaults, "seed": defaults["seed"] + number}, scale)
        except json.JSONDecodeError as error:
            problems[number] = f"no JSON: {error.msg} at column {error.colno}"
        except (ValueError, OverflowError, RecursionError) as error:
            problems[number] = str(error)
    if not (found or problems):
        raise OptionError(f"--prompts: no prompt in {str(path)!r}")
    return found, problems


def batches(wanted: Mapping[int, Settings], lines: Iterable[int], size: int) -> Iterator[list[int]]:
    """Those of ``lines`` that are drawn in one call, at most ``size``."""
    alike: dict[tuple[Any, ...], list[int]] = {}
    for line in lines:
        each = wanted[line]
        # Without a negative prompt SDXL has zeros in its place, and with an empty one it has not.
        alike.setdefault((each.negative_prompt is None, *each.shared().values()), []).append(line)
    for same in alike.values():
        yield from (same[first : first + size] for first in range(0, len(same), size))


def shares(wanted: Mapping[int, Settings], lines: Iterable[int], count: int) -> list[int]:
    """``lines`` in an order of which ``count`` equal parts have as many images of each size."""
    ordered = [line for (line,) in batches(wanted, lines, 1)]
    return [line for first in range(count) for line in ordered[first::count]]


@dataclass(frozen=True)
class Job:
    """What the command line asked for, checked.

    Attributes:
        out: the folder of the images. It or its parent exists.
        wanted: what to draw, by number of the line.
        problems: what is wrong with the other lines, by number.
        dtype: of ``DTYPES``; None for the device's own.
    """

    prompts: Path
    out: Path
    wanted: dict[int, Settings]
    problems: dict[int, str]
    batch_size: int
    model: str
    variant: str | None
    dtype: str | None
    stock: bool

    def path(self, line: int) -> Path:
        return self.out / f"{line:05}.png"

    def asked(self, line: int) -> dict[str, Any]:
        """All that the image depends on besides versions, as its metadata has it."""
        model = {name: getattr(self, name) for name in ("model", "variant", "dtype", "stock")}
        return {**asdict(self.wanted[line]), **model}


def checked_job(
    *,
    model: str,
    prompts: Path,
    out: str,
    settings: Mapping[str, Any],
    batch_size: int = 1,
    variant: str | None = None,
    dtype: str | None = None,
    stock: bool = False,
) -> Job:
    """``settings`` are what a line may leave out; a size may be None, for the model's own."""
    checks.weights_source("--model", model, words=())
    place = checks.folder("--out", out)
    if dtype is not None:
        checks.one_of("--dtype", dtype, DTYPES)
    checks.positive("--batch-size", batch_size)
    checks.positive("--steps", settings["steps"])
    native, scale = native_size(model, unet_config("--model", model), without_vae=8)
    sizes = {name: native if settings[name] is None else settings[name] for name in ("width", "height")}
    for name, size in sizes.items():
        checks.image_size(f"--{name}", size, scale)
    wanted, problems = read_prompts(prompts, {**settings, **sizes}, scale)
    if (where := Path(model).expanduser()).exists():
        model = str(where.resolve())  # one name, however the path is spelled
    return Job(prompts, place, wanted, problems, batch_size, model, variant, dtype, stock)
