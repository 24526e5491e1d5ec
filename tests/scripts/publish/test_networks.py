"""Every network whose real size is published: its configuration and its call fit each other."""

import pytest
import torch

from scripts.publish.networks import CASES, ENCODES, TRANSFORMERS
from scripts.publish.real_sizes import built


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES + ENCODES + TRANSFORMERS, ids=lambda case: case.name)
def test_a_call_without_weights(case, monkeypatch):
    # SD3.5's table of positions has 226 million values, which nobody reads here.
    table = "diffusers.models.embeddings.get_2d_sincos_pos_embed"
    monkeypatch.setattr(table, lambda width, size, **_: torch.zeros(()).expand(size * size, width))
    model, call = built(case, torch.device("meta"))
    assert call().device.type == "meta"
    assert {parameter.dtype for parameter in model.parameters()} == {case.dtype}


def test_each_network_has_a_name_of_its_own():
    cases = CASES + ENCODES + TRANSFORMERS
    assert len({case.name for case in cases}) == len(cases) > 20
