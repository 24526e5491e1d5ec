"""The package of compiled kernels: which kernels, for which GPUs, and that they are found."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import zipfile
from collections import Counter
from pathlib import Path

import pytest
import torch

import sdfastgn
from scripts import build_compiled
from sdfastgn.kernels.common import archive, dispatch, gpu
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


@pytest.fixture
def gpu_of_meta(monkeypatch):
    """Kernels are launched on the device meta, as on an H200."""
    token = gpu.META_CAPABILITY.set((9, 0))
    enabled = torch.is_autocast_enabled
    monkeypatch.setattr(dispatch, "is_supported", lambda x: x.dtype in dispatch.KERNEL_DTYPES)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *kind: kind != ("meta",) and enabled(*kind))
    yield
    gpu.META_CAPABILITY.reset(token)


def test_the_kernels_of_a_model_are_found_once_each(gpu_of_meta) -> None:
    found = build_compiled.launches("tiny")
    keys = [
        (id(launch.kernel), dtypes, *launch.constants.values(), *launch.options.items())
        for launch, dtypes in found
    ]
    assert len(set(keys)) == len(keys)
    names = Counter(launch.kernel.fn.__name__ for launch, _ in found)
    # Of norms, time embeddings and feed-forward; attention with so few channels is PyTorch's.
    assert names.keys() >= {"small_kernel", "_rows_kernel", "_act_linear_kernel", "_statistics_kernel"}
    assert names.keys() >= {"_geglu_kernel", "_upsample_kernel"}  # the second one only in the decoder's plan
    assert not build_compiled.launches("tiny")[0][0].direct()


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


# What a process with an empty cache compiles while the package has a model's kernels.
COMPILES = """
import json, torch, triton, sdfastgn
from sdfastgn.kernels.common import archive
from sdfastgn.models.architectures import build_unet, build_vae
from sdfastgn.model_inputs import unet_inputs
where = {"dtype": torch.float16, "device": "cuda"}
unet, vae = build_unet("tiny", **where), build_vae("tiny", **where)
inputs = unet_inputs(unet.config, size=64, batch=2, scale=8, seed=0, **where)
misses = []
triton.knobs.compilation.listener = lambda *, src, cache_hit, **_: cache_hit or misses.append(src.name)
with torch.no_grad():
    for model in (unet, vae):
        sdfastgn.optimize(model)
    for _ in range(3):
        unet(**inputs)
        vae.decode(torch.randn(1, 4, 8, 8, **where))
print(json.dumps([misses, archive.state(torch.device("cuda", 0)), str(sdfastgn.report(unet).backend)]))
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
    assert misses == []
    assert state.startswith("compiled kernels from sdfastgn_compiled: ")
    assert state in backend
