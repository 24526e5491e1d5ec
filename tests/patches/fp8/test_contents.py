"""``Contents``: which writes a comparison notices."""

import copy

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model

import sdfastgn
from sdfastgn.kernels.common.e4m3 import quantized
from sdfastgn.patches.fp8 import models as fp8
from sdfastgn.patches.lora import contents, merging
from sdfastgn.patches.lora.contents import Calls, Contents
from tests.devices import DEVICES
from tests.patches.cases import WHERE, noise
from tests.patches.fp8.blocks import DIM, call, error, learn, state, twins
from tests.patches.writers import WRITERS


@pytest.mark.parametrize("device", DEVICES)
def test_a_small_write_into_a_large_weight_is_noticed_once_in_all_windows(device):
    large = torch.zeros(64 * 2048 * 4, dtype=torch.float16, device=device)
    small = torch.zeros(3, device=device)
    compared = Contents([small, large], [True, False])
    for place in (0, len(large) // 2, len(large) - 1):
        assert all(compared.are_same([small, large]) for _ in range(contents.WINDOWS))
        large.data[place] = 1
        same = [compared.are_same([small, large]) for _ in range(contents.WINDOWS)]
        assert same.count(False) == 1
        compared.note([small, large])
    small.data[2] = 1
    assert not any(compared.are_same([small, large]) for _ in range(3))


@pytest.mark.parametrize("device", DEVICES)
def test_other_memory_is_no_same_content(device):
    x = torch.zeros(8, device=device)
    compared = Contents([x], [True])
    assert not compared.are_same([x.clone()])


@pytest.mark.gpu
def test_a_look_sees_writes_that_are_queued_and_waits_for_no_later_work():
    x = torch.zeros(2**20, device="cuda")
    compared = Contents([x], [True])
    torch.cuda._sleep(10**8)
    x.data += 1
    compared.begin()
    torch.cuda._sleep(2 * 10**9)
    done = torch.cuda.Event()
    done.record()
    compared.look([x])
    assert not compared.looked_same()
    assert not done.query()


def test_a_call_begins_with_the_part_that_began_the_last_one():
    a, b, c = object(), object(), object()
    calls = Calls()
    assert [calls.begins(part) for part in (a, b, b, c, b, a, b, c, a)] == [1, 0, 0, 0, 0, 1, 0, 0, 1]
    alone = Calls()
    assert [alone.begins(a) for _ in range(3)] == [True] * 3
    # If the first part never runs again, the next calls begin with another one.
    assert sum(calls.begins(b) for _ in range(20)) > 5


@pytest.mark.drawn(1)
@pytest.mark.usefixtures("on_each_device", "without_gradients", "few_calls")
@pytest.mark.fused_on_cpu
@pytest.mark.parametrize("writer", WRITERS)
def test_copies_in_e4m3(writer):
    fused, _, stock = twins()
    learn(fused)
    fp8.refresh(fused)
    names = ("attn1.to_q.weight", "attn1.to_k.weight", "ff.net.2.weight")
    before = call(stock)
    if (WHERE["device"], writer) == ("cpu", "SGD-fused"):
        pytest.skip("on a CPU PyTorch's fused SGD writes nothing in fp16")
    for _ in range(2):
        for block in (fused, stock):
            WRITERS[writer]([block.get_parameter(name) for name in names])
        assert error(call(stock), before) > 0.08
        assert error(call(fused), call(stock)) < 0.05
    assert state(fused).in_e4m3 == 4
    fp8.refresh(fused)
    fp8.note_replay(fused)
    assert fp8.has_same_contents(fused)
    for block in (fused, stock):
        WRITERS[writer]([block.get_parameter(name) for name in names])
    # As before a replay: what ``is_outdated`` does not notice, ``has_same_contents`` does.
    was_noticed = fp8.is_outdated(fused)
    fp8.note_replay(fused)
    assert not fp8.has_same_contents(fused)
    assert fp8.is_outdated(fused)
    assert was_noticed == (writer in ("AdamW-plain", "AdamW-foreach", "SGD-plain", "SGD-foreach"))
    fp8.refresh(fused)
    product = fp8.product_of(fused.ff.net[2], [fused.ff.net[2].weight])
    x = noise(2, 24, 4 * DIM, dtype=torch.float16)
    assert error(product(quantized(x, product.quantizer)), x @ fused.ff.net[2].weight.t()) < 0.05


@pytest.mark.slow
@pytest.mark.usefixtures("on_each_device", "without_gradients", "few_calls")
@pytest.mark.fused_on_cpu
def test_copies_in_e4m3_of_merged_weights():
    """A new scale of an adapter leads to new copies of its layers only."""
    fused, plain, _ = twins()
    config = LoraConfig(r=2, target_modules=["to_q", "net.2"], init_lora_weights=False)
    for block, precision in ((fused, "fp8"), (plain, None)):
        torch.manual_seed(3)
        inject_adapter_in_model(config, block).to(WHERE["device"], torch.float16)
        sdfastgn.optimize(block, precision=precision)
    learn(fused)
    call(plain)
    for _ in range(3):
        for block in (fused, plain):
            for name, parameter in block.named_parameters():
                if "lora_B" in name:
                    parameter.data += 0.1
        assert 0 < error(call(fused), call(plain)) < 0.06


@pytest.mark.fused_on_cpu
@torch.no_grad()
def test_a_copy_of_a_model_with_merged_weights():
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(12, 20), torch.nn.Linear(20, 20))
    config = LoraConfig(target_modules=["0", "1"], r=2, init_lora_weights=False)
    model, x = inject_adapter_in_model(config, model), torch.randn(3, 12)
    merging.adopt(model)
    model(x)
    other, stock = copy.deepcopy(model), copy.deepcopy(model)
    merging.release(stock)
    for _ in range(2):
        for each in (other, stock):
            other(x)
            for name, parameter in each.named_parameters():
                if "lora_B" in name:
                    parameter.data += 1.0
        torch.testing.assert_close(other(x), stock(x))
