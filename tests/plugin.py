"""Fixtures that tests request by name, and what the markers of ``pyproject.toml`` do.

No folder of tests has a ``conftest.py`` with fixtures of its own, because pytest 9.1 can lose such fixtures.
It happens when the command line names files of that folder, then a file of the parent folder, then further
files of that folder.
pytest loads this file before the tests of any folder. So sdfastgn and most modules of the tests are imported
inside the fixtures that use them.
"""

import zlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.devices import DEVICES

# ---- markers


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Marks the cases of a test that its marker ``drawn`` leaves out with ``slow``."""
    tests = {}
    for item in items:
        marker = item.get_closest_marker("drawn")
        if marker and not item.get_closest_marker("gpu") and not item.get_closest_marker("slow"):
            tests.setdefault(item.nodeid.partition("[")[0], (*marker.args, []))[1].append(item)
    for count, cases in tests.values():
        drawn = draw({item.name: set(item.callspec.indices.items()) for item in cases}, count)
        for item in cases:
            if item.name not in drawn:
                item.add_marker("slow")


def draw(cases, count):
    """``count`` names of ``cases``, a dict of {name: its values}, always the same ones.

    They have as many values as possible between them, so each value of each parameter if ``count`` allows it.
    """
    left = sorted(cases, key=lambda name: zlib.crc32(name.encode()))
    drawn, seen = [], set()
    while left and len(drawn) < count:
        name = max(left, key=lambda name: len(cases[name] - seen))
        left.remove(name)
        drawn.append(name)
        seen |= cases[name]
    return drawn


def apply_markers(node, monkeypatch):
    """Does what the markers ``fused_on_cpu``, ``without_kernels`` and ``multiprocessors`` of a test say."""
    markers = {marker.name: marker for marker in reversed([*node.iter_markers()])}
    if "fused_on_cpu" in markers:
        pack_on_cpu(monkeypatch)
        if "without_kernels" not in markers:
            run_fused_on_cpu(monkeypatch)
    if "multiprocessors" in markers and not torch.cuda.is_available():
        (count,) = markers["multiprocessors"].args
        monkeypatch.setattr("sdfastgn.kernels.common.gpu.num_sms", lambda device: count)


def pack_on_cpu(monkeypatch):
    """Lets sdfastgn pack weights on CPUs too, so that tests on a CPU find what packing breaks."""
    monkeypatch.setattr("sdfastgn.kernels.product.packed.PACKED_DEVICES", ("cuda", "cpu"))


def run_fused_on_cpu(monkeypatch):
    """Lets optimized modules run their fused forwards on CPU tensors, with ops in plain PyTorch."""
    from sdfastgn.kernels.common import dispatch

    has_kernels = dispatch.has_kernels
    monkeypatch.setattr(
        dispatch,
        "has_kernels",
        lambda x: dispatch.is_on() and x.dtype in dispatch.KERNEL_DTYPES if x.is_cpu else has_kernels(x),
    )


# ---- fixtures of any folder


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    """Starts Chromium for tests of HTML pages, and yields its Selenium driver."""
    from tests.browser import started

    driver = started(tmp_path_factory.mktemp("browser"))
    yield driver
    driver.quit()


@pytest.fixture(params=DEVICES)
def device(request):
    """Each device on which kernels are tested; tests create their tensors there."""
    return request.param


@pytest.fixture
def no_tables_of_positions(monkeypatch):
    """Tables of positions are zeros: SD3.5's has 226 million values, and shapes do not depend on them."""
    table = "diffusers.models.embeddings.get_2d_sincos_pos_embed"
    monkeypatch.setattr(table, lambda width, size, **_: torch.zeros(()).expand(size * size, width))


@pytest.fixture
def poisoned_memory():
    """Fills uninitialized memory with NaN, so that a test sees an element that no kernel has written."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before)


# ---- fixtures of tests/patches


@pytest.fixture(params=DEVICES)
def on_each_device(request, monkeypatch):
    """Runs the test once per device, with kernels launched as in plain inference on a GPU.

    On the CPU Triton's interpreter runs the kernels. ``tests.patches.cases`` makes its tensors on the device.
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
    """Makes kernels store statistics for tensors of any size, also where this does not pay."""
    monkeypatch.setattr("sdfastgn.patches.layers.statistics.statistics_pay", lambda C, HW: True)


@pytest.fixture
def held(monkeypatch):
    """Makes the strips of a decode small. Returns the list of the maps that are held from now on."""
    from sdfastgn.patches.fusions import strip_chain, strips

    monkeypatch.setattr(strips, "LEAST_ROWS", 4)
    for name in ("MAPS_OF_A_TILE", "MAPS_OF_ATTENTION", "MOST_BYTES"):
        monkeypatch.setattr(strip_chain, name, 0)
    found = []

    def note(layer, **options):
        found.append(layer.shape)
        return strips.hold(layer, **options)

    monkeypatch.setattr(strip_chain, "hold", note)
    return found


@pytest.fixture
def pipeline_fused_on_cpu(monkeypatch):
    """Lets the fusions of a scheduler and an image processor run on the CPU too, to compare their numbers.

    On the CPU they save no time, because no copy makes the host wait.
    """
    from sdfastgn.patches.pipeline import image_processor, pinned_copies

    monkeypatch.setattr(pinned_copies, "WAITED_FOR", ("cuda", "cpu", "meta"))
    if not torch.cuda.is_available():
        monkeypatch.setattr(pinned_copies, "_pinned", Tensor.clone)
    monkeypatch.setattr(image_processor, "_DEVICES", ("cuda", "cpu"))


@pytest.fixture
def linear_calls(monkeypatch):
    """Returns a list that collects the linear layers that are called as modules, in the order of calls."""
    calls = []
    stock = nn.Linear.forward
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: calls.append(self) or stock(self, x))
    return calls


@pytest.fixture
def products(monkeypatch):
    """Returns a list that collects the arguments of each matrix product of PyTorch: x, weight and bias.

    Optimized modules compute plain linear layers and 1x1 convolutions by ``private.linear``, and stock's
    layers call ``nn.functional.linear``.
    """
    from sdfastgn.kernels.common import private

    found = []
    linear = nn.functional.linear
    for owner in (nn.functional, private):
        monkeypatch.setattr(owner, "linear", lambda *a: found.append(a) or linear(*a))
    return found


class Launches(list[tuple[str, Any, dict[str, Any]]]):
    """A list of launched kernels as (name, launch, {argument: tensor}).

    ``runs``: set it to False to record kernels without launching them.
    """

    runs = True


@pytest.fixture
def launches(monkeypatch):
    """Returns a ``Launches`` that collects the kernels launched during the test."""
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
    """Returns a function: ``ran(name)`` is the number of launches of the pass ``name`` so far."""
    from tests.patches.cases import passes

    return lambda name: passes(launches)[name]


@pytest.fixture
def gpu_at_hand(monkeypatch):
    """Makes sdfastgn's report on a ComfyUI model read as on a machine with a GPU."""
    from sdfastgn.patches.comfyui import report

    monkeypatch.setattr(report, "_has_gpu", lambda: True)


@pytest.fixture
def attention_of_pytorch(monkeypatch):
    """Makes ComfyUI's autoencoders use PyTorch's attention on the CPU too, as on a GPU."""
    monkeypatch.setattr("comfy.model_management.pytorch_attention_enabled_vae", lambda: True)
