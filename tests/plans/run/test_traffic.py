"""The bytes of steps, from ``node.meta`` alone."""

import operator

import pytest
import torch

from sdfastgn.plans.run import steps
from sdfastgn.plans.run.aliases import base, copies, is_view, writes_over
from sdfastgn.plans.run.traffic import memory, peak, steps_of, table
from tests.plans.run.graphs import Drawn

aten = torch.ops.aten


def traffic(drawn):
    return {s.name: (s.read, s.written) for s in steps_of(drawn.graph)}


def only(drawn):
    (step,) = steps_of(drawn.graph)
    return step


def test_a_step_reads_its_operands_and_writes_its_result():
    drawn = Drawn((2, 3), (3,), dtype=torch.float16)
    drawn.add(aten.add.Tensor, *drawn.inputs)
    step = only(drawn)
    assert step == ("add_tensor", "aten.add.Tensor", "upstream", (2, 3), torch.float16, 12 + 6, 12)


def test_views_are_no_steps():
    drawn = Drawn((2, 3))
    x = drawn.inputs[0]
    for view in (
        drawn.add(steps.reshape, x, (6,), shape=(6,)),
        drawn.add(steps.permute, x, (1, 0), shape=(3, 2)),
        drawn.add(steps.expand, x, (4, 2, 3), shape=(4, 2, 3)),
        drawn.add(steps.cut, x, 0, 0, 1, shape=(1, 3)),
        drawn.add(aten.unsqueeze.default, x, 0, shape=(1, 2, 3)),
        *drawn.add(aten.split.Tensor, x, 1, items=[(1, 3), (1, 3)]),
    ):
        assert is_view(view)
        assert base(view) is x
    assert steps_of(drawn.graph) == []
    assert not is_view(x)
    assert not is_view(drawn.add(aten.relu_.default, x))
    assert not is_view(drawn.add(steps.cast, x, torch.float16))


def test_a_repeated_element_counts_once():
    drawn = Drawn((2, 1))
    x = drawn.inputs[0]
    wide = drawn.add(steps.expand, x, (2, 5), shape=(2, 5))
    turned = drawn.add(steps.permute, wide, (1, 0), shape=(5, 2))
    flat = drawn.add(steps.reshape, turned, (10,), shape=(10,))
    assert [memory(n) for n in (x, wide, turned, flat)] == [8, 8, 8, 8]
    drawn.add(aten.neg.default, flat)
    assert traffic(drawn) == {"neg_default": (8, 40)}


def test_a_part_counts_as_what_is_read_of_it():
    drawn = Drawn((2, 6))
    parts = [drawn.add(steps.cut, drawn.inputs[0], 1, i, 2, shape=(2, 2)) for i in (0, 2)]
    drawn.add(aten.neg.default, parts[0])
    drawn.add(aten.add.Tensor, *parts)
    assert traffic(drawn) == {"neg_default": (16, 16), "add_tensor": (32, 16)}


def test_memory_that_is_read_through_several_views_counts_once():
    drawn = Drawn((2, 2))
    x = drawn.inputs[0]
    drawn.add(aten.mul.Tensor, x, x)
    drawn.add(aten.add.Tensor, x, drawn.add(steps.permute, x, (1, 0), shape=(2, 2)))
    assert traffic(drawn) == {"mul_tensor": (16, 16), "add_tensor": (16, 16)}


def test_frames_read_x_and_cache_and_write_both_results():
    drawn = Drawn((1, 2, 3, 4, 4), (1, 2, 2, 4, 4), (2,), dtype=torch.bfloat16)
    x, cache, weight = drawn.inputs
    norm = steps.Group(1, weight, None, 1e-5, "silu")
    made = [(1, 2, 5, 6, 6), (1, 2, 2, 4, 4)]
    drawn.add(steps.frames, x, items=made, cache=cache, border=(1, 1), keep=2, norm=norm)
    step = only(drawn)
    assert (step.target, step.kind, step.shape, step.dtype) == ("frames", "kernel", made[0], torch.bfloat16)
    assert (step.read, step.written) == (2 * (96 + 64 + 2), 2 * (360 + 64))


def test_results_that_nobody_reads_are_not_counted():
    drawn = Drawn((1, 2, 4, 4), (1, 2, 4, 4))
    drawn.add(steps.add, *drawn.inputs, None, 1.0, False, items=[(1, 2, 4, 4)])
    assert traffic(drawn) == {"add": (256, 128)}


def test_the_most_bytes_at_once():
    drawn = Drawn((1, 2, 4, 4), (2,))  # 128 bytes
    x, bias = drawn.inputs
    y = drawn.add(aten.neg.default, x)
    view = drawn.add(steps.reshape, y, (2, 16), shape=(2, 16))
    assert peak(drawn.graph) == 128
    z = drawn.add(steps.group_norm, x)
    (w,) = drawn.add(steps.add_bias_, z, bias, False, items=[(1, 2, 4, 4)])  # over z
    assert peak(drawn.graph) == 128
    drawn.add(aten.mul.Tensor, w, drawn.add(aten.relu.default, view, shape=(2, 16)))
    assert peak(drawn.graph) == 3 * 128  # y until its view was read, then w, relu and mul
    drawn.graph.output([w, view])
    assert peak(drawn.graph) == 4 * 128


def test_in_place_steps_read_and_write():
    drawn = Drawn((1, 2, 4, 4), (2,))
    drawn.add(steps.add_bias_, *drawn.inputs, False, items=[(1, 2, 4, 4)])
    assert traffic(drawn) == {"add_bias_": (128 + 8, 128)}
    drawn = Drawn((3, 5), (3, 4), (5, 4))
    assert writes_over(drawn.add(steps.add_linear_, *drawn.inputs))
    assert traffic(drawn) == {"add_linear_": (60 + 48 + 80, 60)}


@pytest.mark.parametrize(
    ("target", "where"),
    [
        (steps.write_slice_, (0, 1, 3, 1)),
        (steps.write_select_, (0, 1)),
        (aten.copy_.default, ()),
    ],
)
def test_writers_of_a_part_do_not_read_the_rest(target, where):
    drawn = Drawn((9, 5), (2, 5))
    assert writes_over(drawn.add(target, *drawn.inputs, *where))
    assert (only(drawn).read, only(drawn).written) == (40, 40)


def test_a_selection_reads_what_it_selects():
    drawn = Drawn((1000, 8), (1, 3))
    table, tokens = drawn.inputs
    tokens.meta["dtype"] = torch.int64
    drawn.add(aten.embedding.default, table, tokens, shape=(1, 3, 8))
    assert traffic(drawn) == {"embedding_default": (96 + 24, 96)}


def test_a_convolution_of_the_last_slice_reads_that_slice():
    drawn = Drawn((1, 2, 1, 4, 4), (2, 2, 3, 1, 1))
    drawn.add(steps.conv_last_slice, *drawn.inputs, [1] * 3, [0] * 3, [1] * 3, 1)
    assert traffic(drawn) == {"conv_last_slice": (128 + 16, 128)}


def test_a_factory_reads_nothing():
    drawn = Drawn()
    drawn.add(aten.full.default, [4], 1.0, shape=(4,))
    assert traffic(drawn) == {"full_default": (0, 16)}


def test_the_table():
    drawn = Drawn((1, 2, 4, 4), (2, 2, 1, 1), device="meta")
    x, weight = drawn.inputs
    y = drawn.add(steps.group_norm, x, 1, None, None, 1e-5, "silu", None, None, False)
    y = drawn.add(steps.pointwise_conv, y, weight, None)
    y = drawn.add(steps.reshape, y, (1, 32), shape=(1, 32))
    y = drawn.add(aten.neg.default, drawn.add(aten.neg.default, y))
    drawn.add(steps.cast, y, torch.float16, dtype=torch.float16)
    *rows, total, ours, library, copies, upstream, left = table(steps_of(drawn.graph)).splitlines()
    assert [row.split()[:2] for row in rows] == [
        ["name", "step"],
        ["group_norm", "group_norm"],
        ["pointwise_conv", "pointwise_conv"],
        ["neg_default", "aten.neg.default"],
        ["neg_default_1", "aten.neg.default"],
        ["cast", "cast"],
    ]
    assert "float32[1, 2, 4, 4]" in rows[1]
    assert rows[-1].split()[-2:] == ["0.000", "0.000"]
    assert total == "5 steps, 0.001 MB"
    assert ours == "our kernels: 1 steps, 0.000 MB, 20.8%"
    assert library == "convolutions, products and attention: 1 steps, 0.000 MB, 22.1%"
    assert copies == "copies: 1 steps, 0.000 MB, 15.6%"
    assert upstream == "as upstream wrote it: 2 steps, 0.001 MB, 41.6%"
    assert left == "  2 x aten.neg.default"


def test_items_of_tuples_are_their_own_memory():
    drawn = Drawn((3, 4), (5, 4), (5, 4))
    x, *weights = drawn.inputs
    q, k = drawn.add(steps.linears, x, weights, [], items=[(3, 5), (3, 5)])
    assert base(q) is q
    assert q.target is operator.getitem
    drawn.add(aten.add.Tensor, q, k)
    assert traffic(drawn) == {"linears": (48 + 160, 120), "add_tensor": (120, 60)}


def joined(drawn, x, shape, *, first=None, dims=None):
    """``x`` reshaped to ``first``, permuted, and reshaped to ``shape``."""
    y = drawn.add(steps.reshape, x, first, shape=first) if first else x
    if dims:
        y = drawn.add(steps.permute, y, dims, shape=tuple(y.meta["shape"][d] for d in dims))
    return drawn.add(steps.reshape, y, shape, shape=shape)


def test_reshapes_that_copy():
    """Images are channels-last, and tokens are contiguous."""
    drawn = Drawn((2, 8, 3, 5))
    x = drawn.add(aten.neg.default, drawn.inputs[0], shape=(2, 8, 3, 5))
    assert copies(joined(drawn, x, (2, 2, 6, 10), first=(2, 2, 2, 2, 3, 5), dims=(0, 1, 4, 2, 5, 3)))
    assert copies(joined(drawn, x, (2, 24, 5)))
    assert not copies(joined(drawn, x, (2, 4, 2, 3, 5)))
    assert not copies(joined(drawn, x, (2, 15, 8), dims=(0, 2, 3, 1)))
    assert not copies(x)
    tokens = drawn.add(steps.linear, x, x, None, shape=(2, 3, 5, 8))
    assert not copies(joined(drawn, tokens, (2, 15, 8)))
    assert copies(joined(drawn, tokens, (2, 40, 3), dims=(0, 3, 2, 1)))
    three = drawn.add(steps.linears, x, (x, x, x), (), shape=(2, 3, 5, 8))
    item = drawn.add(operator.getitem, three, 0, shape=(2, 3, 5, 8))
    assert not copies(joined(drawn, item, (2, 15, 8)))
    attended = drawn.add(steps.attention, x, x, x, None, False, None, False, shape=(2, 8, 3, 5))
    assert not copies(joined(drawn, attended, (2, 3, 40), dims=(0, 2, 1, 3)))
    assert copies(joined(drawn, attended, (2, 24, 5)))
