"""``sdfastgn generate``: draws an image for each line of a file, in one process or in several.

An image depends only on its settings and its seed. With another number of processes or another batch size,
images differ only by rounding.
"""

from __future__ import annotations

import itertools
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
from sdfastgn.models.configurations import ARGUMENTS
from sdfastgn.models.pipelines import load_pipeline
from sdfastgn.program import OptionError, counted, is_main, program, writing
from sdfastgn.versions import installed_versions

# Key in the PNG files' metadata. Its value is JSON: the image's settings and the packages' versions.
METADATA = "sdfastgn"
# A random part of the names of this process's unfinished files, so that no other process uses the same names.
# The process id is not used, because a process on another machine may write to the same folder and have the
# same id.
OWN = secrets.token_hex(4)


def _is_finished(path: Path, settings: Mapping[str, Any]) -> bool:
    """True if the file ``path`` exists and is the complete image with these ``settings``.

    Raises OptionError if the file is an image with other settings, or was not written by sdfastgn.
    """
    if not path.exists() or not path.stat().st_size:  # a file that a crash has left empty is not finished
        return False
    what = "cannot be read as an image"
    try:
        with Image.open(path) as picture:
            what = f"is a {picture.format} without sdfastgn's settings"
            # In a file, the settings come before the pixels. So they can be read even if the file is cut off.
            found = dict(json.loads(picture.info[METADATA])["settings"])
            is_whole = _is_whole(picture)
    except Exception:  # for damaged files Pillow raises errors of many classes
        raise OptionError(f"--out: {str(path)!r} {what}; choose another folder, or move it") from None
    for name, now in settings.items():
        if (was := found.get(name, "unknown")) != now:
            why = f"is another image: its {name} is {was!r}, not {now!r}"
            raise OptionError(f"--out: {str(path)!r} {why}; choose another folder, or delete it")
    return is_whole


def _is_whole(picture: Image.Image) -> bool:
    try:
        picture.verify()
    except Exception:  # for files that are cut off Pillow raises errors of many classes
        return False
    return True


def _save(picture: Image.Image, path: Path, text: str) -> None:
    """Save ``picture`` at ``path``, with ``text`` as metadata. No incomplete image is ever at ``path``.

    The folder is made here, so that there is none if no image can be drawn.
    """
    info = PngInfo()
    info.add_text(METADATA, text)
    part = path.with_suffix(f".{OWN}.part")
    with writing(path):
        path.parent.mkdir(exist_ok=True)
        try:
            picture.save(part, format="PNG", pnginfo=info)
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)


def run(job: Job, device: str | None = None) -> int:
    """Draw the images of ``job`` that do not exist yet. Each line of the file of prompts asks for one image.

    Returns 0 if every line has its image now, else 1.
    """
    device = loading.device_name("--device", device)
    loading.text_to_image("--model", job.model)
    job = replace(job, dtype=loading.dtype_name("--dtype", job.dtype, device))
    job, note = _with_own_settings(job)
    checks.folder_file("--out", job.out, f"{OWN}.part")
    finished = [line for line in job.wanted if _is_finished(job.path(line), job.asked(line))]
    # Unfinished files, which killed processes may have left, are deleted.
    for part in job.out.glob("[0-9]*.*.part"):
        part.unlink(missing_ok=True)
    for line in job.problems if is_main() else ():
        _print_problem(job, line, job.problems[line])
    with processes.joined(device) as (state, own_device):
        # Each process has looked for finished images. They may have found different ones: machines may see
        # changes in a shared folder at different times, or each machine may have its own folder. An image
        # that any process has found counts as finished. Otherwise processes would disagree on the remaining
        # lines.
        finished = sorted(set(gather_object(finished)))
        todo = sorted(job.wanted.keys() - finished)
        with state.split_between_processes(shares(job.wanted, todo, state.num_processes)) as share:
            failed = _draw(job, share, own_device, note) if share else 0
        failed = sum(gather_object([failed]))
    if is_main():
        drawn, there, bad = len(todo) - failed, len(finished), len(job.problems) + failed
        print(
            f"{counted(drawn, 'image')} drawn, {there} there before, {counted(bad, 'line')} failed: {job.out}"
        )
    return 1 if job.problems or failed else 0


def _with_own_settings(job: Job) -> tuple[Job, str]:
    """Gives ``job`` the pipeline's own steps and guidance, where the user has given none.

    Returns (the new job, a line of text that names these settings; empty if there are none).
    """
    missing = [
        field for field in ARGUMENTS if any(getattr(each, field) is None for each in job.wanted.values())
    ]
    if not missing:
        return job, ""
    own = loading.own_settings("--model", job.model, missing)
    told = ", ".join(f"{field} {value}" for field, value in own.items())
    return job.filled(own), f"settings that are not given are the pipeline's own: {told}" if told else ""


def _print_problem(job: Job, line: int, problem: str) -> None:
    print(f"{program()}: {job.place(line)}: {problem}", file=sys.stderr)


def _draw(job: Job, lines: Sequence[int], device: str, note: str) -> int:
    """Draw the images of ``lines``. Returns the number of images that could not be drawn.

    ``note``: a line that is printed before the first image, or empty.
    """
    pipe = load_pipeline("--model", job.model, DTYPES[str(job.dtype)], device, job.variant)
    pipe.set_progress_bar_config(disable=True)
    if note and is_main():
        print(note, file=sys.stderr)
    if not job.stock:
        sdfastgn.optimize(pipe, missing_ok=True)
    failed, number, time_left = 0, itertools.count(1), terminal.TimeLeft(len(lines))
    with terminal.watched(len(lines), quiet=not is_main()) as (on_start, on_done):
        for batch in batches(job.wanted, lines, job.batch_size):
            on_start(f"lines {', '.join(map(str, batch))}")
            left = list(batch)
            try:
                pictures = _pictures(job, pipe, batch)
                eta = time_left.after(len(batch))
                for line, picture in zip(batch, pictures, strict=True):
                    versions = {"sdfastgn": sdfastgn.__version__, **installed_versions()}
                    content = {"settings": job.asked(line), "versions": versions}
                    _save(picture, job.path(line), json.dumps(content, ensure_ascii=False))
                    left.remove(line)
                    on_done(f"{next(number)}/{len(lines)}{eta}: wrote {job.path(line)}")
            except OptionError:  # if one image cannot be written, no other image can
                raise
            except Exception as error:  # this batch failed, perhaps for lack of memory; the next may work
                failed += len(left)
                time_left.after(len(left))
                for line in left:
                    next(number)
                    _print_problem(job, line, one_line(error))
                    on_done("")
    return failed


def _pictures(job: Job, pipe: Any, lines: Sequence[int]) -> list[Image.Image]:
    each = [job.wanted[line] for line in lines]
    # Some pipelines, such as LCM's, take no negative prompt.
    has_negative = each[0].negative_prompt is not None
    negative = {"negative_prompt": [one.negative_prompt for one in each]} if has_negative else {}
    images: list[Image.Image] = pipe(
        prompt=[one.prompt for one in each],
        **negative,
        # Each image has its own CPU generator, so its noise is the same in every batch and on every device.
        generator=[torch.Generator("cpu").manual_seed(one.seed) for one in each],
        **each[0].shared(),
    ).images
    return images
