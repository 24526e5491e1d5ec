"""Kernels that these tests launch by hand are not noted for the archive of compiled kernels."""

import pytest

from sdfastgn.kernels.common import archive


@pytest.fixture(autouse=True)
def nothing_noted(monkeypatch):
    monkeypatch.setattr(archive, "_launched", {})
