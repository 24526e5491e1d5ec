"""Fixtures of the kernel tests."""

import pytest
import torch


@pytest.fixture
def poisoned_memory():
    """Uninitialised memory is NaN: an element that no kernel writes shows."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before)
