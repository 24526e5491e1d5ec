"""What the tests of a pipeline's parts share: changing one part, and running its fused code on the CPU."""

import pytest
import torch
from torch import Tensor

from sdfastgn.patches.pipeline import image_processor, pinned_copies

CUDA = pytest.param("cuda", id="gpu", marks=pytest.mark.gpu)


@pytest.fixture(autouse=True)
def on_the_cpu_too(monkeypatch):
    """Run the fused code on the CPU too. Nothing waits there, but the numbers can be compared."""
    monkeypatch.setattr(pinned_copies, "WAITED_FOR", ("cuda", "cpu", "meta"))
    if not torch.cuda.is_available():
        monkeypatch.setattr(pinned_copies, "_pinned", Tensor.clone)
    monkeypatch.setattr(image_processor, "_DEVICES", ("cuda", "cpu"))


def applied(rule, part):
    assert rule.reason_to_skip(part) is None
    rule.apply(part)
    assert rule.is_applied(part)
    return part
