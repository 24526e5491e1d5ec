"""Every network whose real size is published: its configuration and its call fit each other."""

import pytest
import torch

from scripts.publish.networks import CASES, ENCODES, TRANSFORMERS
from scripts.publish.real_sizes import built


@pytest.mark.slow
@pytest.mark.usefixtures("no_tables_of_positions")
@pytest.mark.parametrize("case", CASES + ENCODES + TRANSFORMERS, ids=lambda case: case.name)
def test_a_call_without_weights(case):
    model, call = built(case, torch.device("meta"))
    assert call().device.type == "meta"
    assert {parameter.dtype for parameter in model.parameters()} == {case.dtype}


def test_each_network_has_a_name_of_its_own():
    cases = CASES + ENCODES + TRANSFORMERS
    assert len({case.name for case in cases}) == len(cases) > 20
