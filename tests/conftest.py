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
