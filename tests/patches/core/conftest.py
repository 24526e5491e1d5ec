import pytest

from sdfastgn.patches.core import fp8, fp8_product
from tests.patches.core import fp8_blocks


@pytest.fixture
def few_calls(monkeypatch):
    """Matrix products learn in few calls, and every device counts as one that can run them in E4M3."""
    monkeypatch.setattr(fp8_product, "CALLS", fp8_blocks.CALLS)
    monkeypatch.setattr(fp8, "device_reason", lambda device: None)
