"""Packed weights are never stale, no code that looks at parameters notices them, and they are undone."""

import copy
import gc

import pytest
import torch
from diffusers.models.attention_processor import Attention
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import sdfastgn
from sdfastgn.patches.layers import packed_weights as packing
from tests.patches import changes
from tests.patches.layers.packing_cases import (
    DIM,
    NAMES,
    X,
    attention,
    call,
    check,
    describe,
    is_packed,
    linears,
)
from tests.patches.writers import WRITERS

pytestmark = pytest.mark.fused_on_cpu


def alive(model):
    return packing._allocation(model) is not None


@pytest.mark.parametrize("bias", [False, True], ids=["no-bias", "bias"])
def test_parameters_are_what_they_were_but_for_their_addresses(bias):
    model = attention(bias=bias)
    before, stock = describe(model), copy.deepcopy(model)
    sdfastgn.optimize(model)
    assert is_packed(model)
    addresses = [m.weight.data_ptr() for m in linears(model)]
    size = model.to_q.weight.nbytes
    assert addresses == [addresses[0] + i * size for i in range(3)]
    assert describe(model) == before
    check(model, stock)
    sdfastgn.restore(model)
    assert describe(model) == before
    assert len({p.untyped_storage().data_ptr() for p in model.parameters()}) == len(before)
    assert not alive(model)
    assert not is_packed(model)
    assert all(map(torch.equal, model.parameters(), stock.parameters()))
    assert torch.equal(call(model), call(stock))


# --- changes after which the weights are still side by side ---------------------------------------


def of_all(change):
    """A function that makes ``change`` to each of the three layers."""

    def changed(model):
        for name in NAMES:
            change(model, name)

    changed.__name__ = change.__name__
    return changed


def trained(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(X).square().mean().backward()
    optimizer.step()
    model.zero_grad()


@torch.no_grad()
def lora_and_back(model):
    changes.lora(model, "to_k")
    model.to_k.merge()
    model.to_k.unmerge()
    model.to_k = model.to_k.base_layer


def projections_fused_and_back(model):
    processor = model.processor
    model.fuse_projections()
    model.set_processor(type(processor)())


STILL_PACKED = [
    *map(of_all, changes.WRITTEN),
    trained,
    lora_and_back,
    projections_fused_and_back,
]


@pytest.mark.parametrize("writer", WRITERS.values(), ids=WRITERS)
def test_what_any_code_writes_into_the_weights_is_seen(writer):
    model = attention()
    stock = copy.deepcopy(model)
    sdfastgn.optimize(model)
    before = call(model)
    for each in (model, stock):
        writer([linear.weight for linear in linears(each)])
    assert is_packed(model)
    check(model, stock)
    assert not torch.allclose(before, call(model), atol=1e-3)


@pytest.mark.parametrize("change", STILL_PACKED, ids=lambda f: f.__name__)
def test_what_is_written_into_the_weights_is_seen(change):
    model, stock = attention(), attention()
    sdfastgn.optimize(model)
    call(model)
    for m in (model, stock):
        change(m)
    assert is_packed(model)
    # Merging and training compute on weights at other addresses with the same bits.
    check(model, stock)
    sdfastgn.restore(model)
    assert torch.equal(call(model), call(stock))


# --- changes after which they are not -------------------------------------------------------------


def of(change):
    """A function that makes ``change`` to one of the three layers."""

    def changed(model):
        change(model, "to_v")

    changed.__name__ = change.__name__
    return changed


def replaced_bias(model):
    model.to_v.bias.data = model.to_v.bias.data * 2


def replaced_layer(model):
    torch.manual_seed(6)
    model.to_v = nn.Linear(DIM, DIM)


def removed_bias(model):
    model.to_v.bias = None


def swapped(model):
    """Both weights are in the allocation, but in each other's place."""
    k, v = model.to_k.weight.data, model.to_v.weight.data
    model.to_k.weight.data, model.to_v.weight.data = v, k


def transposed(model):
    for m in linears(model):
        m.weight.data = m.weight.data.T


# What makes it a layer that has to be called, but for a tensor subclass, which ``.to()`` does not
# know.
CALLED = [of(change) for change in changes.NOT_PLAIN if change is not changes.quantized]
MOVED = [of(change) for change in changes.MOVED]
APART = [*MOVED, *CALLED, replaced_bias, replaced_layer, removed_bias, swapped, transposed]


@pytest.mark.parametrize("change", APART, ids=lambda f: f.__name__)
def test_weights_that_lie_elsewhere_are_used(change):
    model, stock = attention(), attention()
    before = call(stock)
    sdfastgn.optimize(model)
    call(model)
    for m in (model, stock):
        change(m)
    assert not torch.allclose(call(stock), before, atol=1e-3)
    check(model, stock)
    for m in (model, stock):
        m.to(torch.float64)
    check(model, stock, X.double())
    sdfastgn.restore(model)
    assert torch.equal(call(model, X.double()), call(stock, X.double()))


@pytest.mark.parametrize("change", MOVED, ids=lambda f: f.__name__)
def test_the_next_move_packs_again(change):
    model = sdfastgn.optimize(attention())
    change(model)
    assert not is_packed(model)
    call(model)
    # Not in a call: a CUDA graph may have been captured with the weights where they are.
    assert not is_packed(model)
    model.to(torch.float64)
    assert is_packed(model)


def test_dtypes_change_to_and_fro():
    """SDXL's VAE does this in the middle of a call."""
    model, stock = (
        attention(norm_num_groups=4, residual_connection=True),
        attention(norm_num_groups=4, residual_connection=True),
    )
    sdfastgn.optimize(model)
    for dtype in (torch.float64, torch.bfloat16, torch.float32):
        for m in (model, stock):
            m.to(dtype)
        assert is_packed(model)
        assert not any(p.untyped_storage().nbytes() > p.nbytes for p in model.parameters())
        x = X.transpose(1, 2).reshape(2, DIM, 7, 1).to(dtype)
        bound = 0.1 if dtype is torch.bfloat16 else 1e-5
        torch.testing.assert_close(call(model, x), call(stock, x), atol=bound, rtol=bound)


# --- memory ---------------------------------------------------------------------------------------


def test_nothing_keeps_the_allocation():
    model = sdfastgn.optimize(attention())
    for m in linears(model):  # one by one, as offloading does
        for p in m.parameters():
            assert alive(model)
            p.data = p.data.clone()
    assert not alive(model)
    model = sdfastgn.optimize(attention())
    reference = packing._allocations[model]
    del model, m, p
    gc.collect()
    assert reference.expired()


def test_a_tensor_of_it_stays_valid_when_the_model_is_gone():
    model, stock = sdfastgn.optimize(attention()), attention()
    kept = model.state_dict()
    sdfastgn.restore(model)
    del model
    gc.collect()
    assert all(map(torch.equal, kept.values(), stock.state_dict().values()))


# --- what is not packed ---------------------------------------------------------------------------


def tied_parameter(model):
    model.to_v.weight = model.to_k.weight


def tied_storage(model):
    model.to_v.weight = nn.Parameter(model.to_k.weight.data)


def held_elsewhere(model):
    model.extra = [model.to_q.weight.data]


def flat(model):
    buffer = torch.cat([m.weight.detach().flatten() for m in linears(model)])
    for m, part in zip(linears(model), buffer.chunk(3), strict=True):
        m.weight.data = part.view(DIM, DIM)


def mixed_dtypes(model):
    model.to_k.bias = nn.Parameter(model.to_k.bias.detach().double())


def on_meta(model):
    model.to("meta")


def out_of_inference_mode(model):
    with torch.inference_mode():
        for m in linears(model):
            m.weight = nn.Parameter(torch.randn(DIM, DIM), requires_grad=False)


NOT_PACKED = [
    # The layers inside of adapters are packed, for training.
    *(change for change in CALLED if change.__name__ != "lora"),
    of(changes.quantized),
    tied_parameter,
    tied_storage,
    held_elsewhere,
    flat,
    mixed_dtypes,
    on_meta,
    out_of_inference_mode,
    transposed,
]


@pytest.mark.parametrize("change", NOT_PACKED, ids=lambda f: f.__name__)
def test_weights_that_are_not_memory_of_their_own_stay(change):
    model = attention()
    change(model)
    before = [(id(p), p.data_ptr(), p.untyped_storage().data_ptr()) for p in model.parameters()]
    sdfastgn.optimize(model)
    assert [(id(p), p.data_ptr(), p.untyped_storage().data_ptr()) for p in model.parameters()] == before
    assert not alive(model)
    if change not in (on_meta, mixed_dtypes):
        stock = attention()
        change(stock)
        torch.manual_seed(0)
        if change is out_of_inference_mode:
            stock.load_state_dict(model.state_dict(), assign=True)
        torch.testing.assert_close(call(model), call(stock), atol=1e-5, rtol=1e-5)


def test_parts_begin_where_a_product_can_read_sixteen_bytes():
    model = sdfastgn.optimize(Attention(6, heads=1, dim_head=3))
    assert not alive(model)
    model.to(torch.float64)
    assert is_packed(model)


@pytest.mark.parametrize("call_in_between", [False, True], ids=["alone", "with-a-call"])
def test_inference_mode_leaves_no_mark(call_in_between):
    model, stock = attention(), attention()
    with torch.inference_mode():
        sdfastgn.optimize(model)
        assert is_packed(model)
        if call_in_between:
            torch.testing.assert_close(model(X), stock(X))
    assert not any(p.is_inference() for p in model.parameters())
    for m in (model, stock):
        trained(m)
    with torch.inference_mode():
        sdfastgn.restore(model)
    assert not any(p.is_inference() for p in model.parameters())
    assert torch.equal(call(model), call(stock))


def test_parts_of_another_dtype_are_no_part():
    """Another 16-bit dtype has the same size. The layers are called and raise PyTorch's own error."""
    model = sdfastgn.optimize(attention().half())
    assert is_packed(model)
    model.to_k.weight.data = model.to_k.weight.data.view(torch.bfloat16)
    assert not is_packed(model)
    with pytest.raises(RuntimeError, match="dtype"):
        call(model, X.half())


def test_a_full_gpu_holds_the_model_unpacked(monkeypatch):
    model, stock = attention(), attention()

    def full(*_, **__):
        raise torch.OutOfMemoryError("full")

    with monkeypatch.context() as patch:
        patch.setattr(packing.torch, "empty", full)
        sdfastgn.optimize(model)
    assert not alive(model)
    check(model, stock)


def test_a_move_to_where_they_are_leaves_them_there():
    model = sdfastgn.optimize(attention())
    before = [p.data_ptr() for p in model.parameters()]
    model.to(model.to_q.weight.device)
    assert [p.data_ptr() for p in model.parameters()] == before


def test_nothing_moves_under_a_dispatch_mode():
    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    with Mode():
        model = sdfastgn.optimize(attention())
    assert not alive(model)
    check(model, attention())


def test_only_gpus_pack(monkeypatch):
    monkeypatch.undo()
    model = sdfastgn.optimize(attention())
    assert not alive(model)
    check(model, attention())


@pytest.mark.gpu
def test_a_model_that_moves_to_a_gpu_is_packed_there(monkeypatch):
    monkeypatch.undo()
    model = sdfastgn.optimize(attention())
    assert not alive(model)
    model.to("cuda", torch.float16)
    assert is_packed(model)
    model.to("cpu")
    assert not alive(model)


def requested():
    """Bytes on the GPU that tensors asked for. Cached blocks are larger by a varying amount."""
    return torch.cuda.memory_stats()["requested_bytes.all.current"]


@pytest.mark.gpu
def test_packing_costs_no_memory():
    gc.collect()  # what earlier tests left goes now, not while memory is compared
    others = requested()
    model = nn.ModuleList(Attention(1280, heads=20, dim_head=64) for _ in range(4)).to("cuda", torch.float16)
    before = requested()
    sdfastgn.optimize(model)
    assert is_packed(model[0])
    assert requested() == before
    model.to("cpu")
    assert requested() - others < (before - others) / 10
