"""Plans of well-known networks read and write at their real size what ``bytes_at_real_size.json`` says.

If a rule no longer matches what a network does, its plan moves more bytes, and a user would only be slower.
"""

import json

import pytest

from tests.plans import real_sizes

KNOWN = json.loads(real_sizes.FILE.read_text())


@pytest.mark.drawn(5)
@pytest.mark.parametrize("name", real_sizes.NETWORKS)
def test_bytes_at_real_size(name):
    found = real_sizes.measured(real_sizes.NETWORKS[name])
    assert found == KNOWN[name], "if this is right, run: python -m tests.plans.real_sizes"


def test_no_network_is_left_over():
    assert list(KNOWN) == list(real_sizes.NETWORKS)
