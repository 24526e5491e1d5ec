"""``sdfastgn generate``: draws an image for each line of a file, in one process or in several.

An image depends only on its settings and its seed, up to rounding: the number of processes and the batch size
change no more than that.
"""

from __future__ import annotations

import json
import secrets
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from PIL import Image
from PIL.PngImagePlugin import PngInfo

import sdfastgn
from sdfastgn.cli import checks, loading, processes, terminal
from sdfastgn.cli.prompts import Job, batches, shares
from sdfastgn.kernels.common.failures import one_line
from sdfastgn.models.architectures import DTYPES
from sdfastgn.models.pipelines import load_pipeline
from sdfastgn.program import OptionError, counted, is_main, program
from sdfastgn.versions import installed_versions

# Key of the text in a PNG file that holds the settings and the packages' versions, as JSON.
METADATA = "sdfastgn"
# Part of the names of this process's unfinished files. The process number is unique on one machine only.
OWN = secrets.token_hex(4)


def _is_finished(path: Path, settings: Mapping[str, Any]) -> bool:
    """Whether ``path`` is already the whole image with these ``settings``.

    Raises OptionError if ``path`` is an image with other settings, or no image that sdfastgn wrote.
    """
    if not path.exists() or not path.stat().st_size:  # a crash of the machine may leave an empty file
        return False
    what = "cannot be read as an image"
    try:
        with Image.open(path) as picture:
            what = f"is a {picture.format} without sdfastgn's settings"
            found = dict(json.loads(picture.info[METADATA])["settings"])  # comes before the pixels in a PNG
            is_whole = _is_whole(picture)
    except Exception:  # Pillow raises errors of many classes
        raise OptionError(f"--out: {str(path)!r} {what}; choose another folder, or move it") from None
    for name, now in settings.items():
        if (was := found.get(name, "unknown")) != now:
            why = f"is another image: its {name} is {was!r}, not {now!r}"
            raise OptionError(f"--out: {str(path)!r} {why}; choose another folder, or delete it")
    return is_whole


def _is_whole(picture: Image.Image) -> bool:
    try:
        picture.verify()
    except Exception:  # the file is cut off: Pillow raises errors of many classes
        return False
    return True


def _save(picture: Image.Image, path: Path, text: str) -> None:
    """Write the whole file, or nothing if the process is interrupted."""
    info = PngInfo()
    info.add_text(METADATA, text)
    part = path.with_suffix(f".{OWN}.part")
    try:
        picture.save(part, format="PNG", pnginfo=info)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def run(job: Job, device: str | None = None) -> int:
    """Draw the images that do not exist yet. Returns 0, or 1 if a line could not be drawn."""
    device = loading.device_name("--device", device)
    loading.text_to_image("--model", job.model)
    job = replace(job, dtype=loading.dtype_name("--dtype", job.dtype, device))
    checks.made_folder("--out", job.out, f"{OWN}.part")
    finished = [line for line in job.wanted if _is_finished(job.path(line), job.asked(line))]
    for part in job.out.glob("[0-9]*.*.part"):  # of processes that were killed
        part.unlink(missing_ok=True)
    for line in job.problems if is_main() else ():
        _print_problem(job, line, job.problems[line])
    with processes.joined(device) as (state, own_device):
        # All have looked before the first image is written. An image that one of them has found is
        # there: machines may see a shared folder at different times, or have folders of their own.
        finished = sorted(set(gather_object(finished)))
        todo = sorted(job.wanted.keys() - finished)
        with state.split_between_processes(shares(job.wanted, todo, state.num_processes)) as share:
            failed = _draw(job, share, own_device) if share else 0
        failed = sum(gather_object([failed]))
    if is_main():
        drawn, there, bad = len(todo) - failed, len(finished), len(job.problems) + failed
        print(
            f"{counted(drawn, 'image')} drawn, {there} there before, {counted(bad, 'line')} failed: {job.out}"
        )
    return 1 if job.problems or failed else 0


def _print_problem(job: Job, line: int, problem: str) -> None:
    print(f"{program()}: {job.prompts}:{line}: {problem}", file=sys.stderr)


def _draw(job: Job, lines: Sequence[int], device: str) -> int:
    """Draw the images of ``lines``. Returns how many could not be drawn."""
    pipe = load_pipeline("--model", job.model, DTYPES[str(job.dtype)], device, job.variant)
    pipe.set_progress_bar_config(disable=True)
    if not job.stock:
        sdfastgn.optimize(pipe, missing_ok=True)
    failed = 0
    with terminal.watched(len(lines), quiet=not is_main()) as (on_start, on_done):
        for batch in batches(job.wanted, lines, job.batch_size):
            on_start(f"lines {', '.join(map(str, batch))}")
            left = list(batch)
            try:
                for line, picture in zip(batch, _pictures(job, pipe, batch), strict=True):
                    versions = {"sdfastgn": sdfastgn.__version__, **installed_versions()}
                    content = {"settings": job.asked(line), "versions": versions}
                    _save(picture, job.path(line), json.dumps(content, ensure_ascii=False))
                    left.remove(line)
                    on_done(f"wrote {job.path(line)}")
            except Exception as error:  # go on: one size may need too much memory, others may not
                failed += len(left)
                for line in left:
                    _print_problem(job, line, one_line(error))
                    on_done("")
    return failed


def _pictures(job: Job, pipe: Any, lines: Sequence[int]) -> list[Image.Image]:
    each = [job.wanted[line] for line in lines]
    negative = None if each[0].negative_prompt is None else [one.negative_prompt for one in each]
    images: list[Image.Image] = pipe(
        prompt=[one.prompt for one in each],
        negative_prompt=negative,
        # A generator for each image, on the CPU, gives the same noise in any batch and on any device.
        generator=[torch.Generator("cpu").manual_seed(one.seed) for one in each],
        **each[0].shared(),
    ).images
    return images
