"""What the tests of a pipeline's parts share: the parts changed one by one, on the CPU too."""

import pytest
import torch
from torch import Tensor

from sdfastgn.patches.pipeline import image_processor, pinned_copies

CUDA = pytest.param("cuda", id="gpu", marks=pytest.mark.gpu)


@pytest.fixture(autouse=True)
def on_the_cpu_too(monkeypatch):
    """On the CPU there is nothing to wait for; that the numbers stay the same shows there as well."""
    monkeypatch.setattr(pinned_copies, "WAITED_FOR", ("cuda", "cpu", "meta"))
    if not torch.cuda.is_available():
        monkeypatch.setattr(pinned_copies, "_pinned", Tensor.clone)
    monkeypatch.setattr(image_processor, "_DEVICES", ("cuda", "cpu"))


def applied(rule, part):
    assert rule.reason_to_skip(part) is None
    rule.apply(part)
    assert rule.is_applied(part)
    return part
