"""Switches for tests on a GPU."""

from __future__ import annotations

import pytest
import torch


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
