"""Switches for all tests of patches."""

from __future__ import annotations

import pytest

from sfastgn.patches import packing


@pytest.fixture(autouse=True)
def packed_on_the_cpu_too(monkeypatch):
    """Weights are packed on GPUs alone, where it is of use; what packing must not break breaks on a CPU too."""
    monkeypatch.setattr(packing, "PACKED_DEVICES", ("cuda", "cpu"))
