"""Checks the options of ``sdfastgn generate`` and the lines of its file of prompts.

This file does not import torch, and imports diffusers only if the model is a Hub id. So a bad option is
reported at once.
"""

from __future__ import annotations

import codecs
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from sdfastgn.cli import checks
from sdfastgn.models.configurations import ARGUMENTS, SEEDS
from sdfastgn.models.saved import native_size, unet_config
from sdfastgn.program import OptionError


@dataclass(frozen=True)
class Settings:
    """The settings of one image. If ``steps`` or ``guidance`` are None, the pipeline's own are meant."""

    prompt: str
    negative_prompt: str | None
    width: int
    height: int
    steps: int | None
    guidance: float | None
    seed: int

    def shared(self) -> dict[str, Any]:
        """Those arguments of the pipeline that must be the same for all images of one call."""
        numbers = {name: getattr(self, field) for field, name in ARGUMENTS.items()}
        numbers = {name: value for name, value in numbers.items() if value is not None}
        return {"width": self.width, "height": self.height, **numbers}


# Type of a field in ``Settings`` -> classes that its value in JSON may have. Subclasses are not allowed: bool
# is a subclass of int, but True is not a number of steps.
_KINDS = {
    "str": (str,),
    "str | None": (str, type(None)),
    "int": (int,),
    "int | None": (int, type(None)),
    "float | None": (int, float, type(None)),
}


def _settings(given: Any, defaults: Mapping[str, Any], scale: int) -> Settings:
    """Check the settings of one line and return them.

    Args:
        given: the settings in the line.
        defaults: the values of settings that the line leaves out.
        scale: number of pixels along a side that one position of the latent covers.

    Raises ValueError, which says what is wrong.
    """
    kinds = {field.name: str(field.type) for field in fields(Settings)}
    if not isinstance(given, dict) or "prompt" not in given:
        raise ValueError(f"must be an object with a prompt, got {given!r}")
    for name in given:
        checks.one_of("setting", name, kinds)
    values = {**defaults, **given}
    for name, kind in kinds.items():
        if type(values[name]) not in _KINDS[kind]:
            raise ValueError(f"{name}: must be of type {kind}, got {values[name]!r}")
        # A text in JSON may contain half of a surrogate pair. A tokenizer would raise an error, and no image
        # of the batch would be drawn.
        if any("\ud800" <= each <= "\udfff" for each in str(values[name])):
            raise ValueError(f"{name}: must be Unicode text, got {values[name]!r}")
    checks.image_size("width", values["width"], scale)
    checks.image_size("height", values["height"], scale)
    if values["steps"] is not None:
        checks.positive("steps", values["steps"])
    if values["guidance"] is not None:
        values["guidance"] = float(values["guidance"])
        if not math.isfinite(values["guidance"]):
            raise ValueError(f"guidance: must be finite, got {values['guidance']!r}")
    if values["seed"] not in SEEDS:
        raise ValueError(f"seed: must be a whole number of 64 bits, got {values['seed']!r}")
    return Settings(**values)


def read_prompts(
    path: Path, defaults: Mapping[str, Any], scale: int
) -> tuple[dict[int, Settings], dict[int, str]]:
    """Read the file of prompts. Returns ({line number: settings}, {line number: what is wrong with it}).

    A line is a prompt, or in a ``.jsonl`` file a JSON object of settings. Empty lines are ignored. The
    default seed of a line is the seed in ``defaults`` plus the line number.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise OptionError(f"--prompts: cannot read {str(path)!r}: {error.strerror or error}") from None
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):  # UTF-16 read as UTF-8 is garbage
        raise OptionError(f"--prompts: {str(path)!r} is in UTF-16; save it as UTF-8")
    found, problems = {}, {}
    for number, line in enumerate(content.splitlines(), 1):
        try:
            if text := line.decode("utf-8-sig").strip():
                given = json.loads(text) if path.suffix.lower() == ".jsonl" else {"prompt": text}
                found[number] = _settings(given, {**defaults, "seed": defaults["seed"] + number}, scale)
        except UnicodeDecodeError:
            problems[number] = "not UTF-8; save the file as UTF-8"
        except json.JSONDecodeError as error:
            problems[number] = f"no JSON: {error.msg} at column {error.colno}"
        except (ValueError, OverflowError, RecursionError) as error:
            problems[number] = str(error)
    if not (found or problems):
        raise OptionError(f"--prompts: no prompt in {str(path)!r}")
    return found, problems


def batches(wanted: Mapping[int, Settings], lines: Iterable[int], size: int) -> Iterator[list[int]]:
    """Divide ``lines`` into batches that one call of the pipeline can draw, of at most ``size`` lines.

    The images of a batch have the same size, number of steps and guidance scale.
    """
    alike: dict[tuple[Any, ...], list[int]] = {}
    for line in lines:
        each = wanted[line]
        # Lines with and without a negative prompt cannot share a call, even if the negative prompt is an
        # empty text: SDXL encodes an empty text, but uses zeros if there is no negative prompt.
        alike.setdefault((each.negative_prompt is None, *each.shared().values()), []).append(line)
    for same in alike.values():
        yield from (same[first : first + size] for first in range(0, len(same), size))


def shares(wanted: Mapping[int, Settings], lines: Iterable[int], count: int) -> list[int]:
    """Return ``lines`` in an order in which ``count`` processes can divide them fairly.

    If the result is cut into ``count`` equal parts, all parts have about the same number of images of each
    size.
    """
    ordered = [line for (line,) in batches(wanted, lines, 1)]
    return [line for first in range(count) for line in ordered[first::count]]


@dataclass(frozen=True)
class Job:
    """The checked options of ``generate``, and the settings in the checked lines of its file.

    Attributes:
        prompts: the file, or None if the prompt was an option. Such a prompt counts as line 1.
        out: the folder of the images. The folder or its parent exists.
        wanted: line number -> settings of the image.
        problems: line number -> what is wrong with this line.
        dtype: a name in ``DTYPES``, or None for the device's default.
    """

    prompts: Path | None
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

    def place(self, line: int) -> str:
        """Names the place of a line's prompt in errors: the file and the line, or the option."""
        return "--prompt" if self.prompts is None else f"{self.prompts}:{line}"

    def filled(self, own: Mapping[str, Any]) -> Job:
        """This job with ``own``, {field: value}, in the place of settings that are None."""
        wanted = {
            line: replace(each, **{name: own[name] for name in own if getattr(each, name) is None})
            for line, each in self.wanted.items()
        }
        return replace(self, wanted=wanted)

    def asked(self, line: int) -> dict[str, Any]:
        """All settings on which a line's image depends. They are saved in the image's metadata."""
        model = {name: getattr(self, name) for name in ("model", "variant", "dtype", "stock")}
        return {**asdict(self.wanted[line]), **model}


def _read(
    path: Path | None, prompt: str | None, defaults: Mapping[str, Any], scale: int
) -> tuple[dict[int, Settings], dict[int, str]]:
    """Reads and checks the file of prompts. If ``path`` is None, ``prompt`` is checked as its only line.

    Returns ({line number: settings}, {line number: what is wrong with it}).
    """
    if path is not None:
        return read_prompts(path, defaults, scale)
    try:
        return {1: _settings({"prompt": prompt}, {**defaults, "seed": defaults["seed"] + 1}, scale)}, {}
    except ValueError as error:
        raise OptionError(f"--prompt: {error}") from None


def checked_job(
    *,
    model: str,
    prompts: Path | None = None,
    prompt: str | None = None,
    out: str,
    settings: Mapping[str, Any],
    batch_size: int = 1,
    variant: str | None = None,
    dtype: str | None = None,
    stock: bool = False,
) -> Job:
    """Check the options of ``generate`` and read its file of prompts, unless it has a single ``prompt``.

    ``settings``: the values of settings that a line leaves out. A width or height of None means the model's
    own size.
    """
    if (prompts is None) == (prompt is None):
        got = "neither" if prompt is None else "both"
        raise OptionError(f"--prompt: give --prompt TEXT or --prompts FILE, got {got}")
    checks.weights_source("--model", model, words=())
    place = checks.folder("--out", out)
    if dtype is not None:
        dtype = checks.dtype_word("--dtype", dtype)
    checks.positive("--batch-size", batch_size)
    if settings["steps"] is not None:
        checks.positive("--steps", settings["steps"])
    native, scale = native_size(model, unet_config("--model", model), without_vae=8)
    sizes = {name: native if settings[name] is None else settings[name] for name in ("width", "height")}
    for name, size in sizes.items():
        checks.image_size(f"--{name}", size, scale)
    wanted, problems = _read(prompts, prompt, {**settings, **sizes}, scale)
    if (where := Path(model).expanduser()).exists():
        model = str(where.resolve())  # the model's path in images' metadata is always absolute
    return Job(prompts, place, wanted, problems, batch_size, model, variant, dtype, stock)
