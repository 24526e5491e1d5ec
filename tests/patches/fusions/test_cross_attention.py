"""One product for all cross-attentions of a call: how many there are, where, and what is left of
it.
"""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import threading
import weakref

import pytest
import torch
from diffusers import ControlNetModel
from torch import nn

import sdfastgn
from sdfastgn.patches.fusions import cross_attention
from sdfastgn.patches.shared import one_product
from sdfastgn.patches.shared import packed_weights as packing
from tests.patches.fusions import prompt_cases as cases

SD, SDXL, X, XL_INPUTS = cases.SD, cases.SDXL, cases.X, cases.XL_INPUTS
agree, call, context, members, noise, twins, unet, widths = (
    cases.agree,
    cases.call,
    cases.context,
    cases.members,
    cases.noise,
    cases.twins,
    cases.unet,
    cases.widths,
)


@pytest.fixture
def products():
    return cases.Products()


@pytest.mark.parametrize(
    ("sizes", "options", "count"),
    [pytest.param(SD, {}, 4, id="sd"), pytest.param(SDXL, XL_INPUTS, 8, id="sdxl")],
)
def test_one_product_for_all(products, sizes, options, count):
    fused, stock = twins(sizes)
    assert len(members(stock)) == count
    states = context()
    before = states.clone()
    agree(call(fused, states, **options), call(stock, states, **options))
    assert torch.equal(states, before)
    for _ in range(2):  # of the same tensor, at each step
        assert products.of(fused, states, **options) == [sum(widths(fused))]
    assert products.of(stock, states, **options) == [w // 2 for w in widths(stock) for _ in range(2)]


def test_a_controlnet_and_a_unet_with_the_same_tensor(products):
    fused, stock = twins()
    pairs = []
    for model in (fused, stock):
        torch.manual_seed(3)
        control = ControlNetModel(**{k: v for k, v in SD.items() if k != "up_block_types"}).eval()
        for layer in (*control.controlnet_down_blocks, control.controlnet_mid_block):
            nn.init.normal_(layer.weight)
        pairs.append((control, model))
    sdfastgn.optimize(pairs[0][0], cuda_graphs=False)
    states = context()

    def both(control, model):
        with torch.no_grad():
            down, mid = control(X, 3, states, noise(2, 3, 64, 64), return_dict=False)
        return call(model, states, down_block_additional_residuals=down, mid_block_additional_residual=mid)

    agree(both(*pairs[0]), both(*pairs[1]))

    class Both(nn.Module):
        def forward(self, *args):
            return type("", (), {"sample": both(*pairs[0])})

    assert products.of(Both(), states) == [sum(widths(pairs[0][0])), sum(widths(fused))]


@pytest.mark.parametrize("is_few", [True, False], ids=["few", "many"])
def test_many_rows_run_apart(products, monkeypatch, is_few):
    assert one_product._MAX_ROWS == 1024
    monkeypatch.setattr(one_product, "_MAX_ROWS", 9 + is_few)
    fused, stock = twins()
    agree(call(fused, context()), call(stock, context()))
    assert products.of(fused, context()) == ([sum(widths(fused))] if is_few else widths(fused))


# --- memory ---------------------------------------------------------------------------------------


def test_the_product_goes_with_the_last_slice(products):
    fused, _ = twins()
    seen = []
    fused.conv_out.register_forward_hook(lambda *_: seen.append(products.alive()))
    fused.mid_block.register_forward_hook(lambda *_: seen.append(products.alive()))
    assert products.of(fused, context()) == [sum(widths(fused))]
    assert seen == [1, 0]


def test_nothing_keeps_a_model_or_its_weights():
    fused, _ = twins()
    reference = packing._allocations[members(fused)[0]]
    call(fused, context())
    assert len({id(packing._allocations[m]) for m in members(fused)}) == 1
    model = weakref.ref(fused)
    del fused
    gc.collect()
    assert model() is None
    assert reference.expired()


def test_restore_leaves_nothing(products):
    fused, stock = twins()
    states = context()
    assert one_product.is_formed(fused)
    sdfastgn.restore(fused)
    assert not one_product.is_formed(fused)
    assert not fused._forward_pre_hooks
    assert not fused._forward_hooks
    assert all(p.untyped_storage().nbytes() == p.nbytes for p in fused.parameters())
    assert torch.equal(call(fused, states), call(stock, states))
    assert products.of(fused, states) == products.of(stock, states)
    sdfastgn.optimize(fused, cuda_graphs=False)
    assert products.of(fused, states) == [sum(widths(fused))]


def test_a_call_that_is_interrupted_keeps_no_weights():
    """Hooks that always run do so after exceptions, not after KeyboardInterrupt."""
    fused, _ = twins()
    reference = packing._allocations[members(fused)[0]]

    def stop(*_):
        raise KeyboardInterrupt

    fused.mid_block.register_forward_pre_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        call(fused, context())
    parts = [weakref.ref(part) for part in members(fused)]
    del fused
    gc.collect()
    assert not any(part() for part in parts)
    assert reference.expired()


def test_restore_of_a_model_that_has_lost_its_blocks():
    fused, _ = twins()
    fused.down_blocks, fused.up_blocks = nn.ModuleList(), nn.ModuleList()
    sdfastgn.restore(fused)
    assert not fused._forward_pre_hooks
    assert not one_product.is_formed(fused)


@pytest.mark.parametrize("part", ["all", "mid_block"])
def test_a_part_that_is_restored_and_optimized_again(products, part):
    fused, stock = twins()
    allocation = packing._allocation(members(fused)[0])
    start, end = allocation.data_ptr(), allocation.data_ptr() + allocation.nbytes()
    sdfastgn.restore(fused.mid_block)
    [alone] = [m for m in fused.mid_block.modules() if m in members(fused)]
    assert [m for m in members(fused) if not start <= m.to_k.weight.data_ptr() < end] == [alone]
    sdfastgn.optimize(fused if part == "all" else fused.mid_block, cuda_graphs=False)
    agree(call(fused, context()), call(stock, context()))
    assert products.of(fused, context()) == [sum(widths(fused))]


def test_a_hook_that_was_there_when_it_was_optimized(products):
    """The group is formed with it, and shares as soon as the model has moved without it."""
    stock = unet()
    fused = copy.deepcopy(stock)
    handle = members(fused)[1].to_k.register_forward_hook(lambda m, i, y: y)
    sdfastgn.optimize(fused, cuda_graphs=False)
    handle.remove()
    fused.half().float()
    agree(call(fused, context()), call(stock.half().float(), context()))
    assert products.of(fused, context()) == [sum(widths(fused))]


# --- modes, copies, threads -----------------------------------------------------------------------


def test_with_gradients_each_runs_alone():
    fused, stock = twins()
    grads = []
    for model in (fused, stock):
        model(X, 3, context()).sample.square().mean().backward()
        grads.append([p.grad for p in model.parameters()])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=2e-3)


def test_modes_in_which_each_runs_alone(products):
    fused, stock = twins()
    fused.requires_grad_(False)
    with torch.enable_grad():
        fused(X, 3, context())
    states = context()
    with torch.inference_mode():
        agree(fused(X, 3, states).sample, call(stock, states))
        assert products.of(fused, states) == [sum(widths(fused))]
        assert products.of(fused, context()) == widths(fused)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(call(fused, states), call(stock, states), atol=5e-2, rtol=5e-2)
        assert sum(widths(fused)) not in products.of(fused, states)


@pytest.mark.parametrize(
    "twin", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"]
)
def test_copies_share_after_their_next_move(products, twin):
    fused, stock = twins()
    states = context()
    other = twin(fused)
    agree(call(other, states), call(stock, states))
    assert sum(widths(other)) not in products.of(other, states)
    for model in (fused, other, stock):
        model.half().float()
    for model in (fused, other):
        agree(call(model, states), call(stock, states))
        assert products.of(model, states) == [sum(widths(model))]


def test_threads_with_one_tensor():
    states = context()
    pairs = [twins() for _ in range(2)]
    with torch.no_grad():
        pairs[1][0].mid_block.attentions[0].transformer_blocks[0].attn2.to_v.weight.mul_(2)
        pairs[1][1].mid_block.attentions[0].transformer_blocks[0].attn2.to_v.weight.mul_(2)
    barrier, found = threading.Barrier(2), [[], []]

    def work(i: int) -> None:
        barrier.wait()
        for _ in range(5):
            found[i].append(call(pairs[i][0], states))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for (_, stock), outputs in zip(pairs, found, strict=True):
        assert len(outputs) == 5
        for y in outputs:
            agree(y, call(stock, states))


def test_models_with_one_cross_attention_are_not_claimed():
    sizes = {**SD, "down_block_types": ("DownBlock2D",) * 2, "up_block_types": ("UpBlock2D",) * 2}
    assert not cross_attention.FUSION.claims(unet(sizes))
    assert cross_attention.FUSION.claims(unet())


def test_the_reason_when_attentions_cannot_be_fused():
    model = unet()
    for m in members(model):
        m.forward = functools.partial(m.forward)
    assert (
        cross_attention.FUSION.reason_to_skip(model) == "fewer than two of its cross-attentions can be fused"
    )


@pytest.mark.gpu
@pytest.mark.parametrize("cuda_graphs", [False, True], ids=["eager", "graphs"])
def test_on_a_gpu(products, cuda_graphs):
    stock = unet().to("cuda", torch.float16)
    fused = sdfastgn.optimize(copy.deepcopy(stock), cuda_graphs=cuda_graphs)
    states = context().to("cuda", torch.float16)
    for _ in range(3):
        with torch.no_grad():
            y, expected = (model(X.to(states), 3, states).sample for model in (fused, stock))
        torch.testing.assert_close(y, expected, atol=2e-2, rtol=2e-2)
        for model in (fused, stock):
            for m in members(model):
                m.to_v.weight.data += 0.3
        states.mul_(0.9)
