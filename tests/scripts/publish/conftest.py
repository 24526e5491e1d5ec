"""For all tests of ``scripts.publish``."""

import gc

import pytest


@pytest.fixture(scope="module", autouse=True)
def no_collections():
    """The scripts call ``gc.collect`` between measurements. In a process with many tests it takes long."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "collect", lambda generation=2: 0)
        yield
