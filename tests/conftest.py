"""Shared set-up: kernels run in Triton's interpreter where there is no GPU."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports triton

# Two workers on two cores: more threads only wait for each other.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seeded():
    """The same random numbers in every test, whatever ran before it."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def no_tf32(request):
    """fp32 as it is on the CPU: with TF32 two ways to one convolution differ in the third digit."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = request.node.get_closest_marker("gpu") is None and before
    yield
    torch.backends.cudnn.allow_tf32 = before


@pytest.fixture
def poisoned_memory():
    """Uninitialised memory is NaN: an element that no kernel writes shows."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before)


# Here, because pytest's importlib mode forgets a folder's own conftest.py when files of other folders are named in between.
@pytest.fixture(autouse=True)
def packed_on_the_cpu_too(request, monkeypatch):
    """Weights are packed on GPUs alone, where it is of use; what packing must not break breaks on a CPU too."""
    if request.path.parent.name == "patches":
        monkeypatch.setattr("sfastgn.patches.packing.PACKED_DEVICES", ("cuda", "cpu"))
