"""The GEGLU fusion with changes of its linear layer, and inside of transformer blocks."""

import copy

import pytest
import torch
from diffusers.models.attention import FeedForward

import sdfastgn
from sdfastgn.patches.fusions.geglu import FusedGEGLU
from tests.patches import changes

pytestmark = pytest.mark.fused_on_cpu

X = torch.randn(2, 6, 12)


def feed_forward(**options):
    torch.manual_seed(1)
    return FeedForward(12, **options).eval()


def test_the_bias_moves_into_the_kernel_unless_the_layer_is_watched(linear_calls):
    module = feed_forward()
    before = module(X)
    handle = sdfastgn.optimize(module).net[0].proj.register_forward_hook(lambda *_: None)
    for called in ([module.net[0].proj, module.net[2]], [module.net[2]]):
        linear_calls.clear()
        torch.testing.assert_close(module(X), before)
        assert linear_calls == called
        handle.remove()


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("change", changes.NOT_PLAIN, ids=lambda f: f.__name__)
def test_a_changed_linear_layer_is_called_as_it_is(change, order, linear_calls):
    module = feed_forward()
    plain, stock = module(X), copy.deepcopy(module)
    change(stock.net[0], "proj")
    if order == "after":
        sdfastgn.optimize(module)
    change(module.net[0], "proj")
    sdfastgn.optimize(module)
    assert type(module.net[0]) is FusedGEGLU
    expected = stock(X)
    linear_calls.clear()
    y = module(X)
    # In training a layer with LoRA is computed from its weights, without calls of its three linear layers.
    assert len(linear_calls) == (1 if change is changes.lora else 2)
    torch.testing.assert_close(y, expected)
    assert not torch.allclose(expected, plain, atol=1e-3)  # the change is one
    sdfastgn.restore(module)
    assert torch.equal(module(X), expected)


def test_the_deprecated_argument_gets_upstreams_words():
    module = sdfastgn.optimize(feed_forward())
    expected = module.net[0](X)
    with pytest.warns(FutureWarning, match="`scale` argument is deprecated"):
        found = module.net[0](X, scale=2.0)
    torch.testing.assert_close(found, expected)


def test_autocast_on_the_cpu():
    module = feed_forward()
    with torch.autocast("cpu", torch.bfloat16):
        before = module(X)
        sdfastgn.optimize(module)
        after = module(X)
    assert after.dtype is before.dtype is torch.bfloat16
    torch.testing.assert_close(after, before, atol=2e-2, rtol=2e-2)
