"""``sdfastgn warm-up``: fills Triton's cache with a model's kernels, so that later runs need not compile.

Images are drawn twice. The first time is a rehearsal: it compiles all kernels in parallel, and its images are
meaningless, because kernels that are not compiled yet do not run. The second time runs all kernels. So an
error that the rehearsal has ignored is raised or reported then.
"""

from __future__ import annotations

import contextlib
import re
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import sdfastgn
from sdfastgn.backend import triton_cache
from sdfastgn.cli import checks, loading
from sdfastgn.kernels.act_linear import shared
from sdfastgn.kernels.common import archive as kernel_archive
from sdfastgn.kernels.common import dispatch
from sdfastgn.kernels.common.compile_ahead import rehearse
from sdfastgn.kernels.common.gpu import triton
from sdfastgn.models import pipelines
from sdfastgn.models.architectures import DTYPES
from sdfastgn.models.configurations import PROMPT, TEXT_TO_IMAGE, VAES
from sdfastgn.models.saved import latent_scale
from sdfastgn.program import OptionError, counted, program, writing

# Number of denoising steps of each image. Some schedulers fail with a single step.
_STEPS = 2
# Suffixes of the files that hold compiled kernels in Triton's cache, on GPUs of NVIDIA and of AMD.
_CODE = {".cubin", ".hsaco"}
_SIZE = re.compile(rf"({checks.DIGITS})(?:x({checks.DIGITS}))?")


def run(
    *,
    model: str,
    sizes: Sequence[str] = (),
    batch: int = 1,
    dtype: str | None = None,
    device: str | None = None,
    export: Path | None = None,
    archive: Path | None = None,
) -> int:
    """Compile a model's kernels into Triton's cache, and print their number and the cache's size.

    Returns 0, or 1 if a kernel cannot be compiled. The caller has already made the checks that need no torch.

    Args:
        model: a name of ``TEXT_TO_IMAGE``, which gets random weights, or a saved text-to-image pipeline.
        sizes: pixels of the images, ``512`` or ``768x512`` (width first). Empty: the model's own size.
        batch: images per call. With guidance the UNet gets each image twice.
        dtype, device: the values of the options ``--dtype`` and ``--device``; None if they were not given.
            Kernels are compiled for GPUs of the same generation as ``device``.
        export: the file to which the model's compiled kernels are written.
        archive: a file that an earlier run wrote as ``export``. Its kernels are added to the cache first.

    Raises OptionError for a bad option.
    """
    if model in TEXT_TO_IMAGE:
        native, scale = VAES[model]["sample_size"], latent_scale(VAES[model])
    else:
        native, scale = loading.text_to_image("MODEL", model)
    wanted = [_size(text, scale) for text in sizes or [str(native)]]
    device = _gpu("--device", device)
    if export is not None and not kernel_archive.can_record():
        raise OptionError(f"--export: needs a later Triton than {triton.__version__}")
    if archive is not None:
        add_archive(archive, device)
    weights = DTYPES[loading.dtype_name("--dtype", dtype, device)]
    if model in TEXT_TO_IMAGE:
        pipe = pipelines.build_pipeline(model, dtype=weights, device=device)
    else:
        pipe = pipelines.load_pipeline("MODEL", model, weights, device)
    cache = triton_cache()
    before, start = _code(cache), time.perf_counter()
    with contextlib.ExitStack() as stack:
        recorded = {} if export is None else stack.enter_context(kernel_archive.recording())
        count = fill(pipe, wanted, batch)
    seconds = time.perf_counter() - start
    if dispatch.why_off is not None:
        print(f"{program()}: {dispatch.why_off}", file=sys.stderr)
        return 1
    for op, reason in dispatch.ops_without_kernels().items():
        print(f"{program()}: {op}: {reason}", file=sys.stderr)
    size = sum(path.stat().st_size for path in cache.rglob("*") if path.is_file())
    print(
        f"{counted(count, 'kernel')}, {len(_code(cache) - before)} of them compiled now, in {seconds:.1f} s"
    )
    print(f"{cache}: {size / 2**20:.1f} MiB")
    if (used := kernel_archive.state(next(pipe.unet.parameters()).device)) is not None:
        print(used)
    if export is not None:
        with writing(export):
            written = kernel_archive.export(export, torch.cuda.get_device_capability(device), recorded)
        print(f"{export}: {counted(written, 'kernel')}, {export.stat().st_size / 2**20:.1f} MiB")
    return 1 if dispatch.ops_off else 0


def add_archive(path: Path, device: str | None) -> None:
    """Add the kernels in the file ``path``, which ``--export`` wrote, to Triton's cache. Print how many."""
    device = _gpu("--device", device)
    try:
        added, present = kernel_archive.load(path, torch.device(device))
    except (kernel_archive.ArchiveError, OSError) as error:
        raise OptionError(f"--import: {error}") from None
    print(f"{triton_cache()}: {counted(added, 'kernel')} added from {path}, {present} were there")


def fill(pipe: Any, sizes: Sequence[tuple[int, int]], batch: int) -> int:
    """Compile all kernels that a pipeline needs to draw images of some sizes. Returns the number of kernels.

    Raises any error of the pipeline's calls.

    Args:
        pipe: a text-to-image pipeline, which is optimized here.
        sizes: (width, height) of the images.
        batch: images per call.
    """
    sdfastgn.optimize(pipe, cuda_graphs=False)
    pipe.set_progress_bar_config(disable=True)

    def draw() -> None:
        for width, height in sizes:
            size = {"width": width, "height": height, "num_inference_steps": _STEPS}
            pipe(prompt=[PROMPT] * batch, output_type="pt", **size)

    with warnings.catch_warnings():
        # In the rehearsal, kernels that are not compiled yet do not run. So its images are meaningless, and
        # warnings of NaN in these images are ignored.
        warnings.simplefilter("ignore")
        with shared.rehearsed():  # finds a kernel that only runs in CUDA graphs
            count = rehearse(draw, next(pipe.unet.parameters()).device)
    draw()
    return count


def _gpu(option: str, value: str | None) -> str:
    device = loading.device_name(option, value)
    if torch.device(device).type != "cuda":
        why = "" if torch.cuda.is_available() else " (torch sees no CUDA GPU)"
        raise OptionError(f"{option}: kernels can only be compiled on a CUDA GPU, got {device!r}{why}")
    return device


def _size(text: str, scale: int) -> tuple[int, int]:
    found = _SIZE.fullmatch(text)
    if found is None:
        raise OptionError(f"--size: must be like 512 or 768x512 (width first), got {text!r}")
    width, height = (
        checks.image_size("--size", int(side), scale) for side in (found[1], found[2] or found[1])
    )
    return width, height


def _code(cache: Path) -> set[Path]:
    return {path for path in cache.rglob("*") if path.suffix in _CODE}
