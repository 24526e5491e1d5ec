"""``sdfastgn generate``: an image for each line of a file, drawn by one process or by several.

An image depends on its own settings and seed. Processes and batches change its rounding alone.
Every check of an option or a line comes before a model is loaded.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from PIL import Image
from PIL.PngImagePlugin import PngInfo

import sdfastgn
from sdfastgn.bench import checks, options, processes, terminal
from sdfastgn.bench.documents import OptionError
from sdfastgn.bench.environment import installed_versions
from sdfastgn.bench.models.configurations import SEEDS
from sdfastgn.bench.models.pipelines import load_pipeline
from sdfastgn.bench.models.workload import DTYPES
from sdfastgn.kernels.common.failures import one_line
from sdfastgn.program import program

# The key of a PNG's text chunk. It holds JSON: the settings and the versions of the packages.
METADATA = "sdfastgn"


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


def _is_finished(path: Path, settings: Mapping[str, Any]) -> bool:
    """Whether the whole image is there. Raises OptionError where another is, or no image of ours."""
    if not path.exists() or not path.stat().st_size:  # a machine that goes down may leave it empty
        return False
    what = "cannot be read as an image"
    try:
        with Image.open(path) as picture:
            what = f"is a {picture.format} without sdfastgn's settings"
            found = dict(json.loads(picture.info[METADATA])["settings"])  # of a PNG before its pixels
            is_whole = _is_whole(picture)
    except Exception:  # Pillow has many errors
        raise OptionError(f"--out: {str(path)!r} {what}; choose another folder, or move it") from None
    for name, now in settings.items():
        if (was := found.get(name, "unknown")) != now:
            why = f"has another image, whose {name} is {was!r} and not {now!r}"
            raise OptionError(f"--out: {str(path)!r} {why}; choose another folder, or delete it")
    return is_whole


def _is_whole(picture: Image.Image) -> bool:
    try:
        picture.verify()
    except Exception:  # cut off, for which Pillow has many errors
        return False
    return True


def _save(picture: Image.Image, path: Path, text: str) -> None:
    """The whole file or none."""
    info = PngInfo()
    info.add_text(METADATA, text)
    part = path.with_suffix(".part")
    try:
        picture.save(part, format="PNG", pnginfo=info)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


@dataclass(frozen=True)
class _Run:
    """What the command line asked for, checked."""

    prompts: Path
    out: Path
    wanted: dict[int, Settings]
    batch_size: int
    model: str
    variant: str | None
    dtype: str
    stock: bool

    def path(self, line: int) -> Path:
        return self.out / f"{line:05}.png"

    def asked(self, line: int) -> dict[str, Any]:
        """All that the image depends on besides versions, as its metadata has it."""
        model = {name: getattr(self, name) for name in ("model", "variant", "dtype", "stock")}
        return {**asdict(self.wanted[line]), **model}

    def complain(self, line: int, problem: str) -> None:
        print(f"{program()}: {self.prompts}:{line}: {problem}", file=sys.stderr)

    def draw(self, lines: Sequence[int], device: str) -> int:
        """Returns how many could not be drawn."""
        pipe = load_pipeline("--model", self.model, DTYPES[self.dtype], device, self.variant)
        pipe.set_progress_bar_config(disable=True)
        if not self.stock:
            sdfastgn.optimize(pipe, missing_ok=True)
        failed = 0
        with terminal.watched(len(lines), quiet=not processes.is_main()) as (on_start, on_done):
            for batch in batches(self.wanted, lines, self.batch_size):
                on_start(f"lines {', '.join(map(str, batch))}")
                left = list(batch)
                try:
                    for line, picture in zip(batch, self._pictures(pipe, batch), strict=True):
                        versions = {"sdfastgn": sdfastgn.__version__, **installed_versions()}
                        content = {"settings": self.asked(line), "versions": versions}
                        _save(picture, self.path(line), json.dumps(content, ensure_ascii=False))
                        left.remove(line)
                        on_done(f"wrote {self.path(line)}")
                except Exception as error:  # too little memory for one size is no reason to stop
                    failed += len(left)
                    for line in left:
                        self.complain(line, one_line(error))
                        on_done("")
        return failed

    def _pictures(self, pipe: Any, lines: Sequence[int]) -> list[Image.Image]:
        each = [self.wanted[line] for line in lines]
        negative = None if each[0].negative_prompt is None else [one.negative_prompt for one in each]
        images: list[Image.Image] = pipe(
            prompt=[one.prompt for one in each],
            negative_prompt=negative,
            # One for each image, on the CPU: the same noise in any batch and on any device.
            generator=[torch.Generator("cpu").manual_seed(one.seed) for one in each],
            **each[0].shared(),
        ).images
        return images


def run(
    *,
    model: str,
    prompts: Path,
    out: Path,
    settings: Mapping[str, Any],
    batch_size: int = 1,
    variant: str | None = None,
    dtype: str | None = None,
    device: str | None = None,
    stock: bool = False,
) -> int:
    """Draws what is not there yet; returns 0, or 1 where a line could not be drawn.

    ``settings`` are what a line may leave out; a size may be None, for the model's own.
    """
    checks.weights_source("--model", model, words=())
    native, scale = options.text_to_image("--model", model)
    device = options.device_name("--device", device)
    dtype = options.dtype_name("--dtype", dtype, device)
    checks.positive("--batch-size", batch_size)
    sizes = {name: native if settings[name] is None else settings[name] for name in ("width", "height")}
    for name, size in sizes.items():
        checks.image_size(f"--{name}", size, scale)
    checks.positive("--steps", settings["steps"])
    wanted, problems = read_prompts(prompts, {**settings, **sizes}, scale)
    checks.made_folder("--out", out, f"{os.getpid()}.part")  # each process tries a file of its own
    if (where := Path(model).expanduser()).exists():
        model = str(where.resolve())  # one name, however the path is spelled
    job = _Run(prompts, out, wanted, batch_size, model, variant, dtype, stock)
    todo = [line for line in wanted if not _is_finished(job.path(line), job.asked(line))]
    for line in problems if processes.is_main() else ():
        job.complain(line, problems[line])
    with processes.joined(device) as (state, own_device):
        state.wait_for_everyone()  # all have looked for finished images before the first is written
        with state.split_between_processes(shares(wanted, todo, state.num_processes)) as share:
            failed = job.draw(share, own_device) if share else 0
        failed = sum(gather_object([failed]))
    if processes.is_main():
        there, bad = len(wanted) - len(todo), len(problems) + failed
        print(f"{len(todo) - failed} images drawn, {there} were there, {bad} lines failed: {out}")
    return 1 if problems or failed else 0
