"""What tests ask for by name: the markers of ``pyproject.toml`` that change how a test runs, and fixtures.

All of them are here and none in a ``conftest.py`` of a folder: pytest 9.1 loses such a file's fixtures for
the rest of the folder if the command line names a file of the folder above in between.
Modules of the package and of the tests are imported where they are used, because pytest loads this file
before the tests of any folder.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.devices import DEVICES

# ---- markers


@pytest.fixture(autouse=True)
def fused_on_cpu(request, monkeypatch):
    """What the markers ``fused_on_cpu`` and ``without_kernels`` do."""
    markers = {marker.name for marker in request.node.iter_markers()}
    if "fused_on_cpu" in markers:
        pack_on_cpu(monkeypatch)
        if "without_kernels" not in markers:
            run_fused_on_cpu(monkeypatch)


def pack_on_cpu(monkeypatch):
    """Weights are packed on CPUs as on GPUs: what packing must not break breaks there too."""
    monkeypatch.setattr("sdfastgn.patches.shared.packed_weights.PACKED_DEVICES", ("cuda", "cpu"))


def run_fused_on_cpu(monkeypatch):
    """Optimized modules run their fused forwards on CPU tensors, in plain PyTorch."""
    from sdfastgn.kernels.common import dispatch

    has_kernels = dispatch.has_kernels
    monkeypatch.setattr(
        dispatch,
        "has_kernels",
        lambda x: dispatch.is_on() and x.dtype in dispatch.KERNEL_DTYPES if x.is_cpu else has_kernels(x),
    )


@pytest.fixture(autouse=True)
def multiprocessors(request, monkeypatch):
    """What the marker ``multiprocessors`` does."""
    marker = request.node.get_closest_marker("multiprocessors")
    if marker is not None and not torch.cuda.is_available():
        monkeypatch.setattr("sdfastgn.kernels.common.gpu.num_sms", lambda device: marker.args[0])


# ---- fixtures of any folder


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    """Chromium, for tests of pages."""
    from tests.browser import started

    driver = started(tmp_path_factory.mktemp("browser"))
    yield driver
    driver.quit()


@pytest.fixture(params=DEVICES)
def device(request):
    """Of the tensors that kernels are given."""
    return request.param


@pytest.fixture
def poisoned_memory():
    """Uninitialized memory is NaN: an element that no kernel writes shows."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before)


# ---- fixtures of tests/patches


@pytest.fixture(params=DEVICES)
def on_each_device(request, monkeypatch):
    """Kernels are launched as in plain inference on a GPU, on each device. On the CPU they are interpreted.

    ``tests.patches.cases`` then makes its tensors on that device.
    """
    from tests.kernels.samples import kernels
    from tests.patches.cases import WHERE

    monkeypatch.setitem(WHERE, "device", request.param)
    with kernels(direct=True):
        yield


@pytest.fixture
def without_gradients():
    with torch.no_grad():
        yield


@pytest.fixture
def statistics_always_pay(monkeypatch):
    """Statistics are stored for tensors of any size."""
    monkeypatch.setattr("sdfastgn.patches.core.statistics.statistics_pay", lambda C, HW: True)


@pytest.fixture
def pipeline_fused_on_cpu(monkeypatch):
    """Fusions of a scheduler and an image processor run on the CPU too.

    Nothing waits for a copy there, but the numbers can be compared.
    """
    from sdfastgn.patches.pipeline import image_processor, pinned_copies

    monkeypatch.setattr(pinned_copies, "WAITED_FOR", ("cuda", "cpu", "meta"))
    if not torch.cuda.is_available():
        monkeypatch.setattr(pinned_copies, "_pinned", Tensor.clone)
    monkeypatch.setattr(image_processor, "_DEVICES", ("cuda", "cpu"))


@pytest.fixture
def linear_calls(monkeypatch):
    """A list of the linear layers that are called as modules, in the order of the calls."""
    calls = []
    stock = nn.Linear.forward
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: calls.append(self) or stock(self, x))
    return calls


@pytest.fixture
def products(monkeypatch):
    """A list of the matrix products that are made in place of a convolution."""
    found = []
    linear = nn.functional.linear
    monkeypatch.setattr(nn.functional, "linear", lambda *a: found.append(a) or linear(*a))
    return found


class Launches(list[tuple[str, Any, dict[str, Any]]]):
    """(name, launch, pointers by name) of each kernel. ``runs``: False: kernels are noted, not launched."""

    runs = True


@pytest.fixture
def launches(monkeypatch):
    """The ``Launches`` of the test so far."""
    from sdfastgn.kernels.common.launch import Launch

    found = Launches()
    launch = Launch.__call__

    def note(self, stream, *tensors):
        name = self.kernel.__name__.strip("_").removesuffix("_kernel")
        found.append((name, self, dict(zip(self.kernel.arg_names, tensors, strict=False))))
        if found.runs:
            launch(self, stream, *tensors)

    monkeypatch.setattr(Launch, "__call__", note)
    return found


@pytest.fixture
def ran(launches):
    """``ran(name)``: how often the pass ``name`` was launched."""
    from tests.patches.cases import passes

    return lambda name: passes(launches)[name]


@pytest.fixture
def gpu_at_hand(monkeypatch):
    """The report on a model of ComfyUI is made as on a machine with a GPU."""
    from sdfastgn.patches.comfyui import report

    monkeypatch.setattr(report, "_has_gpu", lambda: True)
