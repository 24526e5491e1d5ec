"""Compile kernels of known models for several GPUs, as the package sdfastgn-compiled. Needs no GPU.

python -m scripts.build_compiled --output build/compiled

The output folder is a project for ``python -m build``. It has the files of ``integrations/compiled``, and an
archive of kernels for each compute capability. The archives are for the Triton of this environment. If the
output folder has archives of other versions of the kernels' source, they are deleted. Archives of the same
source for another Triton stay.

To find the kernels, the script calls each model on the device meta, in the way in which ``optimize`` would
run it. It records the kernel launches instead of making them. Some tile sizes depend on a GPU's number of
multiprocessors, so this is done for several GPUs of each compute capability.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import sdfastgn
from sdfastgn.bench.workload import BenchConfig, build_video, component, step_inputs
from sdfastgn.kernels.act_linear import shared
from sdfastgn.kernels.common import archive, dispatch, gpu
from sdfastgn.kernels.common.launch import Launch
from sdfastgn.kernels.common.layout import laid_out
from sdfastgn.kernels.common.observers import observed_by
from sdfastgn.kernels.product import packed
from sdfastgn.models.configurations import VIDEO_NETWORKS
from sdfastgn.plans.install import gets_plans
from sdfastgn.plans.preview import plans_of

ROOT = Path(__file__).resolve().parents[1]
PROJECT = ROOT / "integrations" / "compiled"
# Generation of GPUs (compute capability) -> numbers of multiprocessors of its GPUs. A GPU whose number is
# between two of these numbers needs few kernels that are not compiled. Source: NVIDIA's data sheets.
# Not listed are A10 with 72 multiprocessors, A40 with 84, L4 with 58 and L40S with 142.
MULTIPROCESSORS = {
    "sm_80": (108,),  # A100
    "sm_86": (28, 46, 68, 82),  # multiprocessors of RTX 3060, 3070, 3080 and 3090
    "sm_89": (24, 34, 46, 66, 128),  # multiprocessors of RTX 4060, 4060 Ti, 4070, 4070 Ti Super, 4090
    "sm_90": (114, 132),  # multiprocessors of H100 PCIe, and of H100 and H200
    "sm_100": (148,),  # B200
    "sm_120": (36, 48, 70, 170, 188),  # multiprocessors of RTX 5060 Ti, 5070, 5070 Ti, 5090, PRO 6000
}
Size = tuple[int, int]
# Model -> (height, width) of its images in pixels. SDXL was trained with these and more elongated sizes.
IMAGES: dict[str, tuple[Size, ...]] = {
    "sd15": ((512, 512), (512, 768), (768, 512), (768, 768)),
    "sdxl": ((1024, 1024), (896, 1152), (1152, 896), (832, 1216), (1216, 832)),
    "tiny": ((64, 64),),
}
# Models of which only the autoencoder's kernels are compiled.
VIDEOS = tuple(name for name, parts in VIDEO_NETWORKS.items() if "vae" in parts)
# Models whose kernels are compiled if the user gives no --model.
MODELS = ("sd15", "sdxl", "wan", "qwen_image", "hunyuan_video", "cogvideox", "svd")


class CompilerDriver:
    """Replaces Triton's GPU driver, because no GPU is needed: it tells Triton for which GPU to compile."""

    def __init__(self, generation: str) -> None:
        from triton.backends.compiler import GPUTarget

        self._target = GPUTarget("cuda", int(generation.removeprefix("sm_")), 32)

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class ConvolutionLayouts(TorchDispatchMode):
    """Gives the results of convolutions on the device meta the memory layout that they would have on a GPU.

    On a GPU a result is channels-last if x or the weight is channels-last. PyTorch's kernel for the device
    meta always returns channels-first.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        y = func(*args, **(kwargs or {}))
        if func is not torch.ops.aten.convolution.default or y.dim() < 4:
            return y
        # A slice of the channels of a channels-last tensor also counts as channels-last.
        is_last = any(t.stride(1) == 1 < t.stride(-1) for t in args[:2])
        return laid_out(y, is_last)


class Job(NamedTuple):
    """What one process compiles: the kernels of a model for a GPU."""

    generation: str
    multiprocessors: int
    model: str


def capability(generation: str) -> tuple[int, int]:
    """Returns the compute capability of a generation: (9, 0) for ``sm_90``."""
    return divmod(int(generation.removeprefix("sm_")), 10)


def compiled(job: Job) -> dict[str, archive.Kernel]:
    """Compile the kernels of a job into Triton's cache. Returns hash -> description of these kernels.

    The function replaces functions of sdfastgn and Triton's driver, so each job needs a process of its own.
    """
    import triton

    from sdfastgn.kernels.common.nothing import nothing

    gpu.META_CAPABILITY.set(capability(job.generation))
    for module, name, value in stand_ins(job.multiprocessors):
        vars(module)[name] = value
    found = launches(job.model)
    triton.runtime.driver.set_active(CompilerDriver(job.generation))
    with archive.recording() as recorded:
        nothing.warmup(torch.float32, grid=(1,))
        for launch, dtypes in found:
            launch.kernel.warmup(*dtypes, *launch.numbers, grid=(1,), **launch.constants, **launch.options)
    return recorded


def stand_ins(multiprocessors: int) -> list[tuple[Any, str, Any]]:
    """Returns (module, name, value) for each attribute to replace, so that the device meta acts as a GPU."""
    # ``is_autocast_enabled`` raises an error for the device meta. Its replacement returns False for meta.
    has_autocast = torch.is_autocast_enabled

    def move(parts: Sequence[torch.Tensor]) -> torch.UntypedStorage:
        size = sum(part.nbytes for part in parts)
        allocation = torch.empty(size, dtype=torch.uint8, device="meta").untyped_storage()
        for part in parts:
            part.data = part.new_empty(0).set_(allocation, 0, part.shape, part.stride())
        return allocation

    def joined(parts: Sequence[torch.Tensor]) -> torch.Tensor | None:
        rows, columns = sum(map(len, parts)), parts[0].shape[1:]
        memories = {StorageWeakRef(part.untyped_storage()).cdata for part in parts}
        return parts[0].new_empty((rows, *columns)) if len(memories) == 1 else None

    return [
        (gpu, "num_sms", lambda device: multiprocessors),
        (dispatch, "is_supported", lambda x: x.dtype in dispatch.KERNEL_DTYPES),
        (torch, "is_autocast_enabled", lambda *kind: kind != ("meta",) and has_autocast(*kind)),
        (packed, "PACKED_DEVICES", ("meta",)),
        # ``packed`` puts weights side by side. Its own functions read addresses, which are all 0 on meta.
        (packed, "_move", move),
        (packed, "joined", joined),
        (packed, "span", lambda allocation, parts: joined(parts)),
    ]


def launches(model: str) -> list[tuple[Launch, tuple[torch.dtype | None, ...]]]:
    """Returns (launch, dtypes of its tensors) for each kernel that an optimized model needs.

    Launches of the same kernel with the same dtypes, constants and options need one compiled kernel.
    """
    found: dict[tuple[Any, ...], tuple[Launch, tuple[torch.dtype | None, ...]]] = {}

    def write_down(launch: Launch, stream: int, tensors: tuple[torch.Tensor | None, ...]) -> None:
        dtypes = tuple(None if t is None else t.dtype for t in tensors)
        key = launch.kernel, dtypes, *launch.constants.values(), *launch.options.items()
        found.setdefault(key, (launch, dtypes))

    calls = _video_calls(model) if model in VIDEOS else _image_calls(model)
    with torch.no_grad():
        for call in calls:
            with observed_by(write_down), ConvolutionLayouts(), shared.rehearsed():
                call()
    return list(found.values())


def _image_calls(model: str) -> Iterator[Any]:
    """Yields functions that run steps of a UNet with guidance and decodes of its VAE, at all image sizes.

    They compute in fp16. SDXL's VAE is also called in fp32.
    """
    for part in ("unet", "vae"):
        for dtype in ("fp16", "fp32") if (model, part) == ("sdxl", "vae") else ("fp16",):
            config = BenchConfig(model, part, 64, 2 if part == "unet" else 1, dtype, "meta", 1)
            network, scale = component(config, part)
            network.eval()
            channels = component(config, "vae")[0].config.latent_channels
            calls = []
            for height, width in IMAGES[model]:
                shape = config.batch, channels, height // scale, width // scale
                latents = torch.empty(shape, dtype=config.torch_dtype, device="meta")
                if part == "vae":
                    calls.append(functools.partial(network.decode, latents))
                else:
                    inputs = {**step_inputs(config, network, scale), "sample": latents}
                    calls.append(functools.partial(network, **inputs))
            yield from as_optimized(network, calls)


def _video_calls(model: str) -> Iterator[Any]:
    """Yields functions that run a decode of a video autoencoder, in the dtype and size of the benchmarks."""
    network = VIDEO_NETWORKS[model]["vae"]
    size: dict[str, Any] = {"frames": network.frames, "width": network.width}
    config = BenchConfig(model, "vae", network.height, network.batch, network.dtype, "meta", 1, **size)
    workload = build_video(config)
    yield from as_optimized(workload.target, [workload.call])


def as_optimized(network: Any, calls: Sequence[Any]) -> Iterator[Any]:
    """Optimizes ``network``. Yields functions that launch the same kernels as ``calls`` of this network.

    If the network gets plans (traced and rewritten lists of kernels), each function runs a plan. Otherwise
    the functions are ``calls``, which then run fused blocks.
    """
    _optimize(network)
    if not gets_plans(network):
        yield from calls
        return
    kind = "hopper" if gpu.META_CAPABILITY.get() == capability("sm_90") else "other"
    for each in plans_of(network, lambda: [call() for call in calls], kind):
        if each.plan is None:
            raise ValueError(f"build_compiled: a call of {each.path or each.kind} has no plan: {each.reason}")
        metas = [node.meta for node in each.plan.given[1]]
        inputs = [torch.empty(meta["shape"], dtype=meta["dtype"], device="meta") for meta in metas]
        yield functools.partial(each.plan.run, inputs)


def _optimize(network: Any) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "sdfastgn.optimize: no kernel runs on this machine")
        sdfastgn.optimize(network)


def build(generations: Sequence[str], models: Sequence[str], output: Path, processes: int) -> None:
    """Write the project with an archive for each of ``generations``, and print the archives' sizes."""
    shutil.copytree(PROJECT, output, dirs_exist_ok=True)
    shutil.copy(ROOT / "LICENSE", output)
    (output / "VERSION").write_text(f"{sdfastgn.__version__}\n")
    folder = output / archive.PACKAGE
    for path in folder.glob("*.zip"):
        if not archive.is_of_these_kernels(path):
            path.unlink()
    # Jobs of the same generation and model share kernels, so they should not run at the same time. The list
    # keeps them apart: a later job then finds the kernels in Triton's cache.
    rounds = itertools.zip_longest(*(MULTIPROCESSORS[each] for each in generations))
    pairs = [pair for counts in rounds for pair in zip(generations, counts, strict=True) if pair[1]]
    jobs = [Job(*pair, model) for pair in pairs for model in models]
    start = time.perf_counter()
    recorded: dict[str, dict[str, archive.Kernel]] = {each: {} for each in generations}
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        # A forked process need not import the modules again. Each job has a new process, which has no plans
        # of other jobs.
        with multiprocessing.get_context("fork").Pool(processes, maxtasksperchild=1) as pool:
            for job, found in zip(jobs, pool.imap(compiled, jobs, chunksize=1), strict=True):
                recorded[job.generation] |= found
        for generation, kernels in recorded.items():
            path = folder / archive.file_name(capability(generation))
            count = archive.export(path, capability(generation), kernels)
            print(f"{path}: {count} kernels, {path.stat().st_size / 2**20:.2f} MiB")
    total = sum(path.stat().st_size for path in folder.glob("*.zip"))
    seconds = time.perf_counter() - start
    print(f"{output}: {total / 2**20:.2f} MiB, Triton {gpu.triton.__version__}, {seconds:.0f} s")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("build/compiled"), help="folder to write")
    parser.add_argument("--generation", action="append", choices=MULTIPROCESSORS, help="default: all")
    parser.add_argument(
        "--model", action="append", choices=(*IMAGES, *VIDEOS), help=f"default: {', '.join(MODELS)}"
    )
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="default: the number of CPUs")
    options = parser.parse_args(arguments)
    if options.processes < 1:
        parser.error(f"--processes must be at least 1, got {options.processes}")
    if gpu.triton is None:
        parser.error("Triton is not installed")
    output: Path = options.output
    if output.exists() and not (output / archive.PACKAGE).is_dir() and any(output.iterdir()):
        parser.error(f"--output: {str(output)!r} is not empty and holds no earlier build")
    if gpu.triton.knobs.runtime.interpret:
        parser.error("TRITON_INTERPRET is set, and then Triton compiles nothing")
    build(options.generation or list(MULTIPROCESSORS), options.model or MODELS, output, options.processes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
