"""The producers of statistics in front of a norm: gradients and compile."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import sdfastgn
from tests.kernels.samples import LAYOUTS, make


def image(*shape, **options):
    return make(shape, **options)[0]


# --- gradients ----------------------------------------------------------------


def test_the_gradient_of_a_bias_of_another_dtype():
    x, bias = image(2, 6, 30, 40, dtype=torch.float16), torch.randn(6, requires_grad=True)
    sdfastgn.add_with_statistics(x, x, bias, scale=0.5)[0].sum().backward()
    assert bias.grad.dtype is torch.float32
    torch.testing.assert_close(bias.grad, torch.full((6,), 2 * 30 * 40 * 0.5))


def test_statistics_carry_no_gradient():
    x = image(2, 6, 3, 4).requires_grad_()
    y, statistics = sdfastgn.add_with_statistics(x, x)
    joined, joined_statistics = sdfastgn.cat_with_statistics(x, x)
    assert y.requires_grad
    assert joined.requires_grad
    for t in (statistics, joined_statistics, sdfastgn.channel_statistics(x)):
        assert not t.requires_grad


def test_gradients_through_a_norm_that_is_given_statistics_are_whole():
    """As if it had taken them itself: the statistics depend on x too."""
    x, r = (
        image(2, 6, 3, 4, dtype=torch.float64).requires_grad_(),
        image(2, 6, 3, 4, dtype=torch.float64, seed=1),
    )

    def loss(statistics):
        y, found = sdfastgn.add_with_statistics(x, r)
        return (
            sdfastgn.group_norm(y, 3, statistics=found if statistics else None, activation="silu")
            .square()
            .sum()
        )

    given, taken = (torch.autograd.grad(loss(statistics), x)[0] for statistics in (True, False))
    torch.testing.assert_close(given, taken)


# --- tracing ------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_fake_tensors_have_the_real_number_of_chunks(layout):
    x = image(1, 6, 90, 100, layout=layout)
    for f in (sdfastgn.channel_statistics, lambda x: sdfastgn.add_with_statistics(x, x)[1]):
        with FakeTensorMode() as mode:
            fake = f(mode.from_tensor(x))
        assert fake.shape == f(x).shape
        assert fake.shape[2] > 1


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_compiles_without_a_graph_break(layout):
    def block(x, r, bias):
        y, statistics = sdfastgn.add_with_statistics(x, r, bias, scale=0.5)
        y, statistics = sdfastgn.cat_with_statistics(sdfastgn.group_norm(y, 3, statistics=statistics), r)
        y = sdfastgn.group_norm(y, 3, activation="silu", statistics=statistics)
        return sdfastgn.group_norm(y, 3, statistics=sdfastgn.channel_statistics(y), tokens=True)

    leaves = [
        image(2, 6, 4, 5, layout=layout).requires_grad_(),
        image(2, 6, 4, 5, layout=layout, seed=1).requires_grad_(),
    ]
    leaves.append(torch.randn(6, requires_grad=True))
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*leaves), block(*leaves))
    found, expected = (torch.autograd.grad(f(*leaves).pow(3).sum(), leaves) for f in (compiled, block))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
