"""Keys and values from a product that cross-attentions share are never stale: whatever changes
between or within calls.
"""

from __future__ import annotations

import copy

import pytest
import torch
from diffusers.models.attention_processor import AttnProcessor, AttnProcessor2_0
from torch import nn

import sdfastgn
from sdfastgn.kernels.common import gpu
from sdfastgn.patches.fusions import cross_attention
from sdfastgn.patches.shared import one_product
from tests.patches import changes
from tests.patches.fusions import prompt_cases as cases

SDXL, TEXT, XL_INPUTS = cases.SDXL, cases.TEXT, cases.XL_INPUTS
agree, call, context, members, noise, twins, widths = (
    cases.agree,
    cases.call,
    cases.context,
    cases.members,
    cases.noise,
    cases.twins,
    cases.widths,
)


@pytest.fixture
def products():
    return cases.Products()


# --- never stale ----------------------------------------------------------------------------------


def of_all(change, layer):
    """``change`` of one layer of each cross-attention."""

    def changed(model, states):
        for path, m in model.named_modules():
            if m in members(model):
                change(model, f"{path}.{layer}")

    changed.__name__ = change.__name__
    return changed


def other_values(model, states):
    states.mul_(2)


def values_through_data(model, states):
    states.data += 1


def other_processor_and_back(model, states):
    model.set_attn_processor(AttnProcessor())
    call(model, states)
    model.set_attn_processor(AttnProcessor2_0())


STILL_ONE = [
    *(of_all(change, "to_v") for change in changes.WRITTEN),
    other_values,
    values_through_data,
    other_processor_and_back,
]


@pytest.mark.parametrize("change", STILL_ONE, ids=lambda f: f.__name__)
def test_changes_between_two_calls_with_the_same_tensor(products, change):
    fused, stock = twins()
    ours, theirs = context(), context()
    before = call(fused, ours)
    change(fused, ours)
    change(stock, theirs)
    agree(call(fused, ours), call(stock, theirs))
    assert change is other_processor_and_back or not torch.allclose(call(stock, theirs), before, atol=1e-3)
    assert products.of(fused, ours) == [sum(widths(fused))]


def of_one(change):
    """``change`` of a layer of the cross-attention in the middle."""

    def changed(model):
        change(model, "mid_block.attentions.0.transformer_blocks.0.attn2.to_v")

    changed.__name__ = change.__name__
    return changed


def replaced_attention(model):
    torch.manual_seed(6)
    block = model.mid_block.attentions[0].transformer_blocks[0]
    block.attn2 = copy.deepcopy(block.attn2)
    with torch.no_grad():
        block.attn2.to_v.weight.mul_(3)


def restored_part(model):
    sdfastgn.restore(model.mid_block)
    with torch.no_grad():
        members(model)[1].to_v.weight.mul_(3)


def swapped(model):
    a, b = members(model)[1].to_k.weight, members(model)[1].to_v.weight
    a.data, b.data = b.data, a.data


APART = [
    *map(of_one, (*changes.MOVED, changes.lora, changes.hooked)),
    replaced_attention,
    restored_part,
    swapped,
]


@pytest.mark.parametrize("change", APART, ids=lambda f: f.__name__)
def test_attentions_that_are_not_what_they_were_end_the_sharing(products, change):
    fused, stock = twins()
    states = context()
    before = call(fused, states)
    for model in (fused, stock):
        change(model)
    agree(call(fused, states), call(stock, states))
    assert not torch.allclose(call(stock, states), before, atol=1e-4)
    assert sum(widths(fused)) not in products.of(fused, states)


def test_another_processor_on_one_leaves_the_others_theirs(products):
    fused, stock = twins()
    states = context()
    for model in (fused, stock):
        members(model)[1].set_processor(AttnProcessor())
    agree(call(fused, states), call(stock, states))
    width = widths(fused)[1] // 2
    assert products.of(fused, states) == [sum(widths(fused)), width, width]
    assert products.alive() == 0


WRITE = of_all(changes.through_data, "to_v")


# --- within a call --------------------------------------------------------------------------------


def of_the_last(change):
    """``change`` of a layer of the attention that takes its columns last."""

    def changed(model, states):
        path = next(p for p, m in model.named_modules() if m is members(model)[3])
        change(model, f"{path}.to_v")

    changed.__name__ = change.__name__
    return changed


def writes_the_context(model, states):
    states.mul_(2)


def writes_a_view_of_the_context(model, states):
    states[:, 1:2].detach().transpose(0, 1).add_(1)


WITHIN = [
    *map(of_the_last, (changes.in_place, changes.replaced_parameter, changes.replaced_data, changes.hooked)),
    writes_the_context,
    writes_a_view_of_the_context,
]


@pytest.mark.parametrize("change", WITHIN, ids=lambda f: f.__name__)
def test_changes_in_the_middle_of_a_call(change):
    """After the first attentions have taken theirs, before the last one does."""
    fused, stock = twins()
    outputs, before = [], call(stock, context())
    for model in (fused, stock):
        states = context()
        model.mid_block.register_forward_hook(
            lambda m, i, y, model=model, states=states: change(model, states)
        )
        outputs.append(call(model, states))
    agree(*outputs)
    assert not torch.allclose(outputs[1], before, atol=1e-5)


def test_another_tensor_for_one_of_them(products):
    fused, stock = twins()
    other = noise(2, 5, TEXT, seed=7) + 1

    def swap(module, args, kwargs):
        return args, {**kwargs, "encoder_hidden_states": other}

    for model in (fused, stock):
        members(model)[0].register_forward_pre_hook(swap, with_kwargs=True)
    agree(call(fused, context()), call(stock, context()))
    assert products.of(fused, context()) == [sum(widths(fused)), *widths(fused)[1:]]


def test_a_tensor_that_is_written_at_each_block_costs_few_products(products):
    fused, stock = twins(SDXL)
    outputs, counts = [], []
    for model in (fused, stock):
        states = context()
        for m in members(model):
            m.register_forward_pre_hook(lambda m, i, states=states: (states.mul_(1.1), None)[1])
        outputs.append(call(model, states, **XL_INPUTS))
        counts.append(products.of(model, states, **XL_INPUTS).count(sum(widths(model))))
    agree(*outputs)
    assert counts == [3, 0]


def test_a_forward_that_runs_again_within_a_call(products):
    """As to warm up and to be captured."""
    fused, stock = twins()
    states = context()

    class Twice(nn.Module):
        def forward(self, *args):
            cross_attention.begin(fused, args)
            first, second = (fused.forward(*args) for _ in range(2))
            cross_attention.end(fused, args, None)
            assert torch.equal(first.sample, second.sample)
            return second

    assert products.of(Twice(), states) == [sum(widths(fused))] * 2
    agree(call(Twice(), states), call(stock, states))


def test_another_stream_or_a_capture_takes_nothing(products, monkeypatch):
    fused, stock = twins()
    states, streams = context(), iter(range(100))
    monkeypatch.setattr(gpu, "current_stream", lambda device: next(streams))
    agree(call(fused, states), call(stock, states))
    assert products.of(fused, states).count(sum(widths(fused))) == 3


# --- calls that are broken off, or leave blocks out -----------------------------------------------


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_call_that_is_broken_off_leaves_nothing_to_the_next(products, error):
    fused, stock = twins()
    states = context()

    def stop(*_):
        raise error

    handle = fused.mid_block.register_forward_pre_hook(stop)
    with pytest.raises(error):
        call(fused, states)
    handle.remove()
    if error is RuntimeError:
        assert one_product._running.call is None
    for model in (fused, stock):
        WRITE(model, states)
    agree(call(fused, states), call(stock, states))
    assert products.of(fused, states) == [sum(widths(fused))]
    assert one_product._running.call is None


def test_blocks_that_are_left_out(products):
    """As DeepCache does: their slices are never taken."""
    fused, stock = twins()
    states = context()
    for model in (fused, stock):
        model.mid_block.stock, model.mid_block.forward = model.mid_block.forward, lambda x, *a, **k: x
    agree(call(fused, states), call(stock, states))
    assert products.of(fused, states) == [sum(widths(fused))]
    assert products.alive() == 0
    for model in (fused, stock):
        model.mid_block.forward = model.mid_block.stock
        WRITE(model, states)
    agree(call(fused, states), call(stock, states))


def test_parts_called_by_themselves_share_nothing(products):
    fused, _ = twins()
    states, hidden = context(), noise(2, 7, 40)

    class Part(nn.Module):
        def forward(self, *args):
            members(fused)[1](hidden, states)
            with torch.no_grad():
                return fused.forward(*args)

    assert products.of(Part(), states) == [widths(fused)[1], *widths(fused)]


# --- wrapped by a module that is no layer -----------------------------------------------------------


class Wrapped(nn.Module):
    """What adapters and quantizers put around a layer: it has no ``in_features``."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return 2 * self.layer(x)


@pytest.mark.parametrize("layers", [("to_q",), ("to_k", "to_v")], ids="-".join)
@pytest.mark.parametrize("of_a_copy", [False, True], ids=["before", "copy"])
def test_a_wrapped_layer_leaves_its_attention_out(of_a_copy, layers):
    stock = cases.unet(SDXL)
    fused = copy.deepcopy(stock)
    if of_a_copy:
        fused = copy.deepcopy(sdfastgn.optimize(fused, cuda_graphs=False))
    for model in (stock, fused):
        for layer in layers:
            setattr(members(model)[0], layer, Wrapped(getattr(members(model)[0], layer)))
    if not of_a_copy:
        sdfastgn.optimize(fused, cuda_graphs=False)
    agree(call(fused, context(), **XL_INPUTS), call(stock, context(), **XL_INPUTS))
