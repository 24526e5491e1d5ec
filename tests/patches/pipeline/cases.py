"""What the tests of a pipeline's parts share."""

import pytest

CUDA = pytest.param("cuda", id="gpu", marks=pytest.mark.gpu)


def applied(rule, part):
    assert rule.reason_to_skip(part) is None
    rule.apply(part)
    assert rule.is_applied(part)
    return part
