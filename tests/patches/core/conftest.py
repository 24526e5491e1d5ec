import pytest

from sdfastgn.patches.core import fp8, fp8_product
from tests.patches.core import fp8_blocks


@pytest.fixture
def few_calls(monkeypatch):
    """Products learn in few calls, and the CPU counts as a GPU that has products in E4M3."""
    monkeypatch.setattr(fp8_product, "CALLS", fp8_blocks.CALLS)
    monkeypatch.setattr(fp8, "device_reason", lambda device: None)
