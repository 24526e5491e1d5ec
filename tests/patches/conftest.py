"""Switches for all tests of patches."""

from __future__ import annotations

import pytest
import torch

from sfastgn.patches import packing


@pytest.fixture(autouse=True)
def packed_on_the_cpu_too(monkeypatch):
    """Weights are packed on GPUs alone, where it is of use; what packing must not break breaks on a CPU too."""
    monkeypatch.setattr(packing, "PACKED_DEVICES", ("cuda", "cpu"))


@pytest.fixture(autouse=True)
def no_tf32(request):
    """fp32 as it is on the CPU: two layouts of one convolution differ in the third digit with TF32."""
    if request.node.get_closest_marker("gpu") is None:
        yield
        return
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = before
