import pytest

from sdfastgn.patches.fp8 import models as fp8
from sdfastgn.patches.fp8 import product as fp8_product
from tests.patches.fp8 import blocks as fp8_blocks


@pytest.fixture
def few_calls(monkeypatch):
    """Products in FP8 learn their scales in only ``CALLS`` calls. Every device passes the check for E4M3."""
    monkeypatch.setattr(fp8_product, "CALLS", fp8_blocks.CALLS)
    monkeypatch.setattr(fp8, "device_reason", lambda device: None)
