"""``sdfastgn generate``: an image for each line of a file, drawn by one process or by several.

An image depends on its own settings and seed. Processes and batches change its rounding alone.
"""

from __future__ import annotations

import json
import os
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

# The key of a PNG's text chunk. It holds JSON: the settings and the versions of the packages.
METADATA = "sdfastgn"


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


def run(job: Job, device: str | None = None) -> int:
    """Draws what is not there yet; returns 0, or 1 where a line could not be drawn."""
    device = loading.device_name("--device", device)
    loading.text_to_image("--model", job.model)
    job = replace(job, dtype=loading.dtype_name("--dtype", job.dtype, device))
    checks.made_folder("--out", job.out, f"{os.getpid()}.part")  # each process tries a file of its own
    todo = [line for line in job.wanted if not _is_finished(job.path(line), job.asked(line))]
    for line in job.problems if is_main() else ():
        _complain(job, line, job.problems[line])
    with processes.joined(device) as (state, own_device):
        state.wait_for_everyone()  # all have looked for finished images before the first is written
        with state.split_between_processes(shares(job.wanted, todo, state.num_processes)) as share:
            failed = _draw(job, share, own_device) if share else 0
        failed = sum(gather_object([failed]))
    if is_main():
        drawn, there, bad = len(todo) - failed, len(job.wanted) - len(todo), len(job.problems) + failed
        print(
            f"{counted(drawn, 'image')} drawn, {there} there before, {counted(bad, 'line')} failed: {job.out}"
        )
    return 1 if job.problems or failed else 0


def _complain(job: Job, line: int, problem: str) -> None:
    print(f"{program()}: {job.prompts}:{line}: {problem}", file=sys.stderr)


def _draw(job: Job, lines: Sequence[int], device: str) -> int:
    """Returns how many could not be drawn."""
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
            except Exception as error:  # too little memory for one size is no reason to stop
                failed += len(left)
                for line in left:
                    _complain(job, line, one_line(error))
                    on_done("")
    return failed


def _pictures(job: Job, pipe: Any, lines: Sequence[int]) -> list[Image.Image]:
    each = [job.wanted[line] for line in lines]
    negative = None if each[0].negative_prompt is None else [one.negative_prompt for one in each]
    images: list[Image.Image] = pipe(
        prompt=[one.prompt for one in each],
        negative_prompt=negative,
        # One for each image, on the CPU: the same noise in any batch and on any device.
        generator=[torch.Generator("cpu").manual_seed(one.seed) for one in each],
        **each[0].shared(),
    ).images
    return images
