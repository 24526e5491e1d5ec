import pytest

from sdfastgn.patches.core import fp8, fp8_product
from tests.patches.core import fp8_blocks


@pytest.fixture
def few_calls(monkeypatch):
    """Products in FP8 learn their scales in only ``CALLS`` calls. Every device passes the check for E4M3."""
    monkeypatch.setattr(fp8_product, "CALLS", fp8_blocks.CALLS)
    monkeypatch.setattr(fp8, "device_reason", lambda device: None)
