"""The package of compiled kernels: which kernels, for which GPUs, and that they are found."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import zipfile
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sdfastgn
from scripts import build_compiled
from sdfastgn.kernels.act_linear import shared
from sdfastgn.kernels.common import archive, dispatch, gpu
from sdfastgn.kernels.common.launch import Launch
from sdfastgn.kernels.product import packed
from sdfastgn.model_inputs import unet_inputs
from sdfastgn.models.architectures import build_unet, build_vae
from tests.command_line import ROOT
from tests.processes import process

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or not archive.can_record(),
    reason="Triton is not installed, or older than archives need",
)
# ``python -m scripts.build_compiled`` with the first two kernels of each job.
TWO_KERNELS = (
    "import sys; from scripts import build_compiled as script; every = script.launches;"
    "script.launches = lambda model: every(model)[:2]; sys.exit(script.main())"
)
BUILD_WHEEL = "import sys, setuptools.build_meta as backend; backend.build_wheel(sys.argv[1])"


@contextmanager
def meta_as_gpu():
    """A context in which kernels are launched on the device meta, as on an H200."""
    token = gpu.META_CAPABILITY.set((9, 0))
    with pytest.MonkeyPatch.context() as patch:
        for module, name, value in build_compiled.stand_ins(132):
            patch.setattr(module, name, value)
        yield
    gpu.META_CAPABILITY.reset(token)


@pytest.fixture
def gpu_of_meta():
    with meta_as_gpu():
        yield


def signature(launch: Launch, dtypes: tuple[torch.dtype | None, ...]) -> str:
    """All that decides a compiled kernel."""
    return f"{launch.kernel.fn.__name__} {dtypes} {launch.constants} {launch.options}"


@pytest.mark.slow
def test_the_kernels_of_a_model_are_found_once_each(gpu_of_meta) -> None:
    found = build_compiled.launches("tiny")
    signatures = [signature(*each) for each in found]
    assert len(set(signatures)) == len(signatures)
    names = Counter(launch.kernel.fn.__name__ for launch, _ in found)
    # Of norms, time embeddings, feed-forward and upsampling.
    assert names.keys() >= {"small_kernel", "_rows_kernel", "_statistics_kernel"}
    assert names.keys() >= {"_act_linear_kernel", "_geglu_kernel", "_upsample_kernel"}
    assert names["_shared_kernel"] == 1  # runs only in CUDA graphs
    again = build_compiled.launches("tiny")
    assert not again[0][0].direct()
    assert [signature(*each) for each in again] == signatures


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    ("model", "names"),
    [
        ("qwen_image", {"_channel_norm_kernel", "_frames_kernel", "_softmax_kernel"}),
        ("svd", {"apply_kernel", "_statistics_kernel", "_softmax_kernel"}),
    ],
)
def test_the_kernels_of_a_decoder_are_found(model: str, names: set[str], gpu_of_meta) -> None:
    assert {launch.kernel.fn.__name__ for launch, _ in build_compiled.launches(model)} >= names


@pytest.mark.slow
def test_keys_and_values_of_a_prompt_are_packed_as_on_a_gpu(gpu_of_meta, monkeypatch) -> None:
    monkeypatch.setitem(build_compiled.IMAGES, "sd15", ((128, 128),))
    found = [launch.constants for launch, _ in build_compiled.launches("sd15")]
    rows = {(each["Q_L"], each["K_L"], each["V_L"]) for each in found if "K_L" in each}
    assert rows == {(channels, 2 * channels, 2 * channels) for channels in (320, 640, 1280)}


@pytest.mark.slow
def test_the_kernels_are_those_that_calls_with_memory_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, convolutions on the CPU choose layouts, and weights have addresses and are packed."""
    with meta_as_gpu():
        expected = {signature(*each) for each in build_compiled.launches("tiny")}
    launched = set()

    def launch(self: Launch, stream: int, *tensors: torch.Tensor | None) -> None:
        launched.add(signature(self, tuple(None if t is None else t.dtype for t in tensors)))

    monkeypatch.setattr(Launch, "__call__", launch)
    monkeypatch.setattr(gpu, "compute_capability", lambda device: (9, 0))
    monkeypatch.setattr(dispatch, "is_supported", lambda x: x.dtype in dispatch.KERNEL_DTYPES)
    monkeypatch.setattr(packed, "PACKED_DEVICES", ("cpu",))
    monkeypatch.setattr(shared, "_ready", shared.PlanCache())
    with shared.rehearsed():
        call_tiny("cpu")
    assert launched == expected


@pytest.mark.slow
def test_the_package_is_built_and_its_kernels_are_found(tmp_path: Path) -> None:
    output = tmp_path / "compiled"
    folder = output / archive.PACKAGE
    folder.mkdir(parents=True)
    other, old = folder / "sm_90-triton-9.9.9.zip", folder / "sm_90-triton-9.9.8.zip"
    for path, source in ((other, archive._source_hash()), (old, "other kernels")):
        with zipfile.ZipFile(path, "w") as file:
            file.writestr("manifest.json", json.dumps({"source of the kernels": source}))
    options = ("--output", str(output), "--model", "tiny", "--generation", "sm_100", "--processes", "1")
    done = process(sys.executable, "-c", TWO_KERNELS, *options, PYTHONPATH=str(ROOT), TRITON_INTERPRET="")
    assert done.returncode == 0, done.stderr
    name = archive.file_name((10, 0))
    assert f"{folder / name}: 3 kernels, 0.0" in done.stdout  # with the one of the preparation
    assert {path.name for path in folder.glob("*.zip")} == {name, other.name}
    done = process(sys.executable, "-c", BUILD_WHEEL, str(tmp_path), cwd=output)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name == f"sdfastgn_compiled-{sdfastgn.__version__}-py3-none-any.whl"
    assert {f"{archive.PACKAGE}/{name}", f"{archive.PACKAGE}/{other.name}"} <= set(
        zipfile.ZipFile(wheel).namelist()
    )


@pytest.mark.parametrize("generation", build_compiled.MULTIPROCESSORS)
def test_the_file_of_a_generation_is_that_of_its_capability(generation: str) -> None:
    assert archive.file_name(build_compiled.capability(generation)).startswith(f"{generation}-triton-")


def call_tiny(device: str, calls: int = 1) -> nn.Module:
    """Optimize the smallest UNet and VAE, and call them. Returns the UNet."""
    where: Any = {"dtype": torch.float16, "device": device}
    unet, vae = build_unet("tiny", **where), build_vae("tiny", **where)
    inputs = unet_inputs(unet.config, size=64, batch=2, scale=8, seed=0, **where)
    with torch.no_grad():
        for model in (unet, vae):
            sdfastgn.optimize(model)
        for _ in range(calls):
            unet(**inputs)
            vae.decode(torch.randn(1, 4, 8, 8, **where))
    return unet


# What a process with an empty cache compiles while the package has a model's kernels.
COMPILES = """
import json, torch, triton, sdfastgn
from sdfastgn.kernels.common import archive
from tests.scripts.test_build_compiled import call_tiny
misses = []
def compiled(*, src, cache_hit, **_):
    constants = {src.fn.arg_names[path[0]]: value for path, value in src.constants.items()}
    pointers = [kind for kind in src.signature.values() if kind.startswith("*")]
    cache_hit or misses.append(f"{src.name} {pointers} {constants}")
triton.knobs.compilation.listener = compiled
backend = str(sdfastgn.report(call_tiny("cuda", 3)).backend)
print(json.dumps([misses, archive.state(torch.device("cuda", 0)), backend]))
"""


@pytest.mark.gpu
def test_nothing_is_left_to_compile(tmp_path: Path) -> None:
    generation = "sm_{}{}".format(*torch.cuda.get_device_capability())
    if generation not in build_compiled.MULTIPROCESSORS:
        pytest.skip(f"the package has no kernels for {generation}")
    output = tmp_path / "compiled"
    options = ("--output", str(output), "--model", "tiny", "--generation", generation)
    done = process(sys.executable, "-m", "scripts.build_compiled", *options)
    assert done.returncode == 0, done.stderr
    found = os.pathsep.join([str(output), str(ROOT), os.environ.get("PYTHONPATH", "")])
    paths = {"PYTHONPATH": found, "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    done = process(sys.executable, "-c", COMPILES, **paths)
    assert done.returncode == 0, done.stderr
    misses, state, backend = json.loads(done.stdout)
    assert str(state).startswith("compiled kernels from sdfastgn_compiled: ")
    assert state in backend
    assert not misses, f"{len(misses)} kernels were compiled:\n" + "\n".join(misses)
