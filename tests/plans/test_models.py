"""Small models of diffusers: what a plan of each call computes is what upstream's code computes."""

import pytest
import torch

from sdfastgn.plans.trace.traced import Untraceable
from tests.plans.engine import everything_pays, in_channels_last, planned
from tests.plans.models import CALLS
from tests.plans.programs import relative

pytestmark = [pytest.mark.fused_on_cpu, pytest.mark.usefixtures("without_gradients")]

# Largest relative difference in fp32. The kernels add up in another order than PyTorch does.
TOLERANCE = 1e-5


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    "call", [pytest.param(call, id=call.name, marks=[pytest.mark.slow] * call.is_slow) for call in CALLS]
)
def test_a_plan_computes_what_the_model_computes(call, monkeypatch):
    everything_pays(monkeypatch)
    model = in_channels_last(call.model())
    call.run(model, **call.drawn(0))  # models may keep tables from their first call
    if call.why_not:
        with pytest.raises(Untraceable, match=call.why_not):
            planned(model, lambda **inputs: call.run(model, **inputs), **call.drawn(0))
        return
    plan = planned(model, lambda **inputs: call.run(model, **inputs), **call.drawn(0))
    earlier = []
    for seed in (1, 2, 3):
        expected = call.run(model, **call.drawn(seed))
        found = plan(**call.drawn(seed))
        assert [(x.shape, x.dtype) for x in found] == [(x.shape, x.dtype) for x in expected]
        assert max(map(relative, found, expected)) <= TOLERANCE
        assert all(torch.equal(x, y) for x, y in earlier)  # no later call writes into an earlier result
        earlier += [(x, x.clone()) for x in found]
    first, second = earlier[0][0], earlier[len(expected)][0]
    assert not torch.equal(first, second)  # the inputs matter
