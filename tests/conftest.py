"""Shared set-up: kernels run in Triton's interpreter where there is no GPU."""

import importlib.util
import os
import warnings

import pytest
import torch

from tests.devices import DEVICES

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports triton
    if importlib.util.find_spec("triton") is not None:
        from tests.interpreter import make_quick

        make_quick()

# Two workers on two cores: more threads only wait for each other.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seeded():
    """The same random numbers in every test, whatever ran before it."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def no_terminal(monkeypatch):
    """Tables are as wide as in a pipe, however wide the terminal of whoever runs the tests."""
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture(scope="session", autouse=True)
def warned_once():
    """``optimize`` says once a process what a machine lacks: not in whichever test comes first."""
    from sdfastgn import api

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        api.warn_of_machine("optimize")


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    """Chromium, for tests of pages."""
    from tests.browser import started

    driver = started(tmp_path_factory.mktemp("browser"))
    yield driver
    driver.quit()


@pytest.fixture(autouse=True)
def no_tf32(request):
    """fp32 as it is on the CPU: with TF32 two ways to one convolution differ in the third digit."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = request.node.get_closest_marker("gpu") is None and before
    yield
    torch.backends.cudnn.allow_tf32 = before


@pytest.fixture(autouse=True)
def kernels_stay_on(monkeypatch):
    """A kernel that does not compile turns all off, and plain PyTorch would pass whatever comes next."""
    from sdfastgn.kernels.common import dispatch

    before = dispatch.why_off
    yield
    monkeypatch.undo()
    after, dispatch.why_off = dispatch.why_off, before
    assert after == before


@pytest.fixture
def gpu_at_hand(monkeypatch):
    """The report on a model of ComfyUI is made as on a machine with a GPU."""
    from sdfastgn.patches.comfyui import report

    monkeypatch.setattr(report, "_has_gpu", lambda: True)


@pytest.fixture(autouse=True)
def memory_given_back():
    """Test processes share one GPU, and PyTorch keeps what a test has freed for its own process."""
    yield
    if torch.cuda.is_available() and torch.cuda.memory_reserved() > 2**30:
        torch.cuda.empty_cache()


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


# These two stand here because pytest's importlib mode forgets a folder's own conftest.py when files
# of other folders are named in between.
@pytest.fixture(autouse=True)
def packed_on_the_cpu_too(request, monkeypatch):
    """Weights are packed on CPUs as on GPUs: what packing must not break breaks there too."""
    if "patches" in request.path.parts:
        monkeypatch.setattr("sdfastgn.patches.shared.packed_weights.PACKED_DEVICES", ("cuda", "cpu"))


# Files outside of tests/patches that are about what fused modules compute.
_FUSED = (
    "test_compile.py",
    "test_coverage.py",
    "test_digits_pipeline.py",
    "test_other_models.py",
    "test_pipelines.py",
    "test_train_digits.py",
    "test_training.py",
)


@pytest.fixture(autouse=True)
def fused_on_the_cpu_too(request, monkeypatch):
    """Optimized modules run their fused forwards on CPU tensors, in plain PyTorch.

    ``@pytest.mark.without_kernels`` leaves them stock's forwards, as users have them on a CPU.
    """
    about_fusions = "patches" in request.path.parts or request.path.name in _FUSED
    if about_fusions and request.node.get_closest_marker("without_kernels") is None:
        run_fused_on_the_cpu(monkeypatch)


def run_fused_on_the_cpu(monkeypatch):
    from sdfastgn.kernels.common import dispatch

    has_kernels = dispatch.has_kernels
    monkeypatch.setattr(
        dispatch,
        "has_kernels",
        lambda x: dispatch.is_on() and x.dtype in dispatch.KERNEL_DTYPES if x.is_cpu else has_kernels(x),
    )
