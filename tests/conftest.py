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
