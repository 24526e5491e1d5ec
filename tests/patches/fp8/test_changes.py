"""What products in E4M3 do if weights, adapters, dtypes or devices change, or if memory runs out."""

import contextlib
import copy
import weakref

import pytest
import torch
from accelerate import cpu_offload, cpu_offload_with_hook
from accelerate.hooks import remove_hook_from_submodules
from diffusers.hooks import apply_group_offloading
from diffusers.utils.peft_utils import recurse_remove_peft_layers
from peft import LoraConfig, inject_adapter_in_model
from torch import nn

import sdfastgn
from sdfastgn.kernels.common.e4m3 import quantized
from sdfastgn.patches.fp8 import models as fp8
from sdfastgn.patches.fp8 import product as fp8_product
from sdfastgn.patches.fp8 import products as fp8_products
from sdfastgn.patches.lora.adapter_survey import AdapterSurvey
from sdfastgn.patches.lora.merging import merged_layer
from tests.patches import changes
from tests.patches.cases import WHERE, noise
from tests.patches.fp8.blocks import CALLS, DIM, call, error, learn, made, state, twins

pytestmark = [
    pytest.mark.fused_on_cpu,
    pytest.mark.usefixtures("on_each_device", "without_gradients", "few_calls"),
]


@pytest.fixture
def no_memory():
    """A context in which each write of weights in E4M3 ends with an out-of-memory error."""

    @contextlib.contextmanager
    def context():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(fp8_product, "written_now", out_of_memory)
            yield

    def out_of_memory(device):
        raise torch.OutOfMemoryError

    return context


def test_products_without_memory_learn_again(no_memory):
    fused, plain, _ = twins()
    with no_memory():
        for _ in range(CALLS + 1):
            assert fp8.reason_now(fused) == fp8_products.REASON
            assert torch.equal(call(fused), call(plain))
    found = state(fused)
    assert (found.in_e4m3, found.learning, found.short, found.bytes) == (0, 4, 4, 0)
    assert "4 of these found no memory" in str(sdfastgn.report(fused))
    call(fused)
    found = state(fused)
    assert (found.in_e4m3, found.learning, found.short) == (4, 0, 0)


def test_a_copy_that_was_written_in_part_is_written_again(no_memory):
    fused, _, _ = twins()
    learn(fused)
    before = call(fused)
    fp8.refresh(fused)
    assert not fp8.is_outdated(fused)
    layer = fused.ff.net[2]
    weight = layer.weight
    layer.weight = nn.Parameter(-2 * weight.detach())
    with no_memory(), pytest.raises(torch.OutOfMemoryError):
        call(fused)
    layer.weight = weight
    assert fp8.is_outdated(fused)
    fp8.refresh(fused)
    assert not fp8.is_outdated(fused)
    assert torch.equal(call(fused), before)


@pytest.mark.slow
def test_restore_and_another_precision_are_exact():
    fused, plain, stock = twins()
    before = {name: p.clone() for name, p in stock.state_dict().items()}
    learn(fused)
    quick = call(fused)
    assert not torch.equal(quick, call(plain))
    assert torch.equal(call(copy.deepcopy(fused)), call(plain))
    with sdfastgn.optimized(fused, precision="fp8"):
        assert torch.equal(call(fused), quick)
    sdfastgn.optimize(fused, precision="fp8")
    assert torch.equal(call(fused), quick)
    sdfastgn.optimize(fused)
    assert torch.equal(call(fused), call(plain))
    sdfastgn.optimize(fused, precision="fp8")
    learn(fused)
    assert torch.equal(call(fused), quick)
    sdfastgn.restore(fused)
    assert all(torch.equal(p, before[name]) for name, p in fused.state_dict().items())
    assert torch.equal(call(fused), call(stock))
    assert sdfastgn.report(fused).fp8 == ()


def test_the_with_block_turns_fp8_on_and_off_inside_only():
    fused, plain, stock = twins()
    with sdfastgn.optimized(plain, precision="fp8"):
        learn(plain)
        quick = call(plain)
        assert state(plain).in_e4m3 == 4
    assert sdfastgn.report(plain).fp8 == ()
    learn(fused)
    assert torch.equal(call(fused), quick)
    while fp8.reason_now(fused) is not None:
        pass
    with sdfastgn.optimized(fused):
        assert sdfastgn.report(fused).fp8 == ()
        assert torch.equal(call(fused), call(plain))
        for block in (fused, stock):
            block.ff.net[2].weight.data.mul_(-0.5)  # noticed, because FP8 is off meanwhile
    assert state(fused).in_e4m3 == 4  # with the scales that it had learned
    assert fp8.reason_now(fused) is None  # graphs go on at once
    assert error(call(fused), call(stock)) < 0.05


@pytest.mark.parametrize("path", ["attn1.to_k", "attn2.to_q", "ff.net.0.proj", "ff.net.2"])
def test_written_weights_are_quantized_again(path):
    fused, _, stock = twins()
    learn(fused)
    for block in (fused, stock):
        block.get_submodule(path).weight.mul_(-0.5)
    assert error(call(fused), call(stock)) < 0.05
    assert state(fused).in_e4m3 == 4


def test_graphs_get_new_weights_before_a_replay():
    fused, _, _ = twins()
    config = LoraConfig(r=2, target_modules=["net.2"], init_lora_weights=False)
    inject_adapter_in_model(config, fused).to(WHERE["device"], torch.float16)
    survey, wrapper = AdapterSurvey(fused), fused.ff.net[2]
    learn(fused)
    merged, x = merged_layer(wrapper), noise(2, 24, 4 * DIM, dtype=torch.float16)
    product = fp8.product_of(wrapper.get_base_layer(), [merged.weight])
    fp8.refresh(fused)

    def check():
        assert error(product(quantized(x, product.quantizer)), x @ merged.weight.t()) < 0.05

    check()
    before = merged.weight.clone()
    wrapper.set_scale("default", -20.0)
    assert not fp8.is_outdated(fused)
    assert survey.refresh()
    assert error(merged.weight, before) > 0.2
    assert fp8.is_outdated(fused)
    fp8.refresh(fused)
    assert not fp8.is_outdated(fused)
    check()
    generation = fp8.generation(fused)
    fused.attn1.to_q.weight.mul_(2)
    assert fp8.is_outdated(fused)
    fp8.refresh(fused)
    assert (fp8.is_outdated(fused), fp8.generation(fused)) == (False, generation)
    fused.attn1.to_q.weight = nn.Parameter(fused.attn1.to_q.weight.detach().clone())
    call(fused)
    assert fp8.generation(fused) > generation


@pytest.mark.parametrize("change", changes.MOVED, ids=lambda f: f.__name__)
def test_replaced_weights(change):
    fused, plain, stock = twins()
    learn(fused)
    for block in (fused, plain, stock):
        change(block, "ff.net.2")
    assert error(call(fused), call(stock)) < 0.05


@pytest.mark.drawn(1)
@pytest.mark.parametrize("merges", [True, False], ids=["merged", "separate"])
@pytest.mark.parametrize("options", [{}, {"lora_bias": True}], ids=["plain", "bias"])
def test_layers_with_adapters(merges, options):
    fused, plain, _ = twins()
    learn(fused)
    quick = call(fused)
    config = LoraConfig(r=2, target_modules=["to_q", "net.2"], init_lora_weights=False, **options)
    for block, precision in ((fused, "fp8"), (plain, None)):
        torch.manual_seed(3)
        inject_adapter_in_model(config, block)
        block.to(WHERE["device"], torch.float16)
        sdfastgn.optimize(block, precision=precision, merge_adapters=merges)
    y, expected = call(fused), call(plain)
    # If peft's code runs one linear layer of the feed-forward network, the other runs in fp16 too.
    assert (0 < error(y, expected) < 0.05) if merges else torch.equal(y, expected)
    assert error(y, quick) > 0.05
    assert (state(fused).in_e4m3, state(fused).adapted) == ((4, 0) if merges else (1, 3))
    assert merges or "3 have LoRA adapters" in str(sdfastgn.report(fused))


@pytest.mark.drawn(1)
@pytest.mark.parametrize("calls", [0, 1])
def test_adapters_that_were_fused_and_unloaded(calls):
    """peft writes through ``.data``, so the version counters of the weights do not change."""
    fused, plain, _ = twins()
    learn(fused)
    quick = call(fused)
    fp8.refresh(fused)
    assert not fp8.is_outdated(fused)
    config = LoraConfig(r=2, target_modules=["to_q", "net.2"], init_lora_weights=False)
    for block in (fused, plain):
        torch.manual_seed(3)
        inject_adapter_in_model(config, block)
        block.to(WHERE["device"], torch.float16)
        for _ in range(calls):
            call(block)
        for module in [module for module in block.modules() if hasattr(module, "merge")]:
            module.merge()
        recurse_remove_peft_layers(block)
    assert fp8.is_outdated(fused)
    y = call(fused)
    assert 0 < error(y, call(plain)) < 0.05 < error(y, quick)
    assert state(fused).in_e4m3 == 4


def test_the_hook_that_sees_new_layers_goes_with_the_last_product(monkeypatch):
    monkeypatch.setattr(fp8, "_products", weakref.WeakKeyDictionary())  # not those of other tests
    monkeypatch.setattr(fp8, "_hook", None)
    hooks = nn.modules.module._global_module_registration_hooks
    before = len(hooks)
    first, second = (sdfastgn.optimize(made(), precision="fp8") for _ in range(2))
    assert len(hooks) == before + 1
    sdfastgn.restore(first)
    assert len(hooks) == before + 1
    sdfastgn.optimize(second, precision=None)
    assert len(hooks) == before


@pytest.fixture(params=[False, True], ids=["data", "swap"])
def swaps(request):
    """Both ways in which ``.to()`` changes parameters: it replaces their ``.data``, or swaps the tensors."""
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(request.param)
    yield
    torch.__future__.set_swap_module_params_on_conversion(before)


@pytest.mark.drawn(1)
@pytest.mark.usefixtures("swaps")
def test_a_model_that_changes_its_dtype_and_back():
    fused, plain, _ = twins()
    learn(fused)
    before = call(fused)
    for block in (fused, plain):
        block.to(torch.float32)
    assert torch.equal(call(fused), call(plain))
    copy.deepcopy(fused).to(torch.float16)
    assert torch.equal(call(fused.to(torch.float16)), before)
    sdfastgn.restore(fused)
    assert not any(name in vars(m) for m in fused.modules() for name in ("_apply", "__getstate__"))


@pytest.mark.drawn(1)
@pytest.mark.usefixtures("swaps")
@pytest.mark.parametrize("merges", [False, True], ids=["plain", "merged"])
def test_a_model_that_moves_away_frees_its_weights_in_e4m3(merges):
    fused, _, _ = twins()
    learn(fused)
    if merges:
        config = LoraConfig(r=2, target_modules=["to_q", "net.2"], init_lora_weights=False)
        inject_adapter_in_model(config, fused).to(WHERE["device"], torch.float16)
        sdfastgn.optimize(fused, precision="fp8", merge_adapters=True)
    before, weights = call(fused), [p.detach().clone() for p in fused.parameters()]
    fp8.refresh(fused)
    size, generation = state(fused).bytes, fp8.generation(fused)
    assert size > 0
    fused.to(WHERE["device"])
    copy.deepcopy(fused).to("meta")
    assert (state(fused).bytes, fp8.generation(fused)) == (size, generation)
    fused.to("meta")
    assert state(fused).bytes == 0
    assert fp8.generation(fused) > generation  # no graph reads the freed memory
    fused.to_empty(device=WHERE["device"])
    for p, weight in zip(fused.parameters(), weights, strict=True):
        p.data.copy_(weight)
    assert torch.equal(call(fused), before)
    assert (state(fused).bytes, state(fused).in_e4m3) == (size, 4)


def sequential(block):
    cpu_offload(block, WHERE["device"])


def in_groups(kind):
    def hook(block):
        device, cpu = torch.device(WHERE["device"]), torch.device("cpu")
        apply_group_offloading(block, device, cpu, offload_type=kind, num_blocks_per_group=1)

    return hook


def unhook(block):
    remove_hook_from_submodules(block)
    for module in block.modules():
        if hasattr(module, "_diffusers_hook"):
            module._diffusers_hook.remove_hook("group_offloading", recurse=False)
    block.to(WHERE["device"])


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    ("hook", "text"),
    [
        pytest.param(sequential, "accelerate's offloading", id="sequential"),
        pytest.param(in_groups("leaf_level"), "diffusers' group offloading", id="leaves"),
        pytest.param(in_groups("block_level"), "diffusers' group offloading", id="blocks"),
    ],
)
def test_hooks_that_move_weights_in_each_call(hook, text):
    fused, plain, _ = twins()
    learn(fused)
    before, generation = call(fused), fp8.generation(fused)
    hook(fused)
    for _ in range(2):
        assert error(call(fused), call(plain)) < 0.002  # hooked layers are not fused
        fp8.refresh(fused)
    found = state(fused)
    assert (found.in_e4m3, found.bytes, found.offloading) == (0, 0, text)
    assert f"{text} moves their weights in each call" in str(sdfastgn.report(fused))
    assert fp8.generation(fused) > generation  # no graph reads the freed memory
    unhook(fused)
    assert torch.equal(call(fused), before)
    assert (state(fused).in_e4m3, state(fused).offloading) == (4, "")


def test_a_model_that_hooks_move_does_not_learn():
    fused, plain, _ = twins()
    in_groups("block_level")(fused)
    assert fp8.reason_now(fused) is None
    assert torch.equal(call(fused), call(plain))
    assert (state(fused).learning, state(fused).bytes) == (0, 0)
    unhook(fused)
    assert fp8.reason_now(fused) == fp8_products.REASON
    learn(fused)
    assert state(fused).in_e4m3 == 4


def test_a_model_that_is_offloaded_as_a_whole_runs_in_e4m3():
    fused, _, _ = twins()
    learn(fused)
    before = call(fused)
    cpu_offload_with_hook(fused, WHERE["device"])
    assert torch.equal(call(fused), before)
    assert (state(fused).in_e4m3, state(fused).offloading) == (4, "")


def test_weights_that_return_to_their_address_are_quantized_again():
    """A move does not change a weight's version counter, and may end at the weight's old address."""
    fused, _, stock = twins()
    learn(fused)
    weight = fused.ff.net[2].weight
    old, version = weight.data, weight._version
    fused.to(torch.float32)
    stock.ff.net[2].weight.mul_(-2)
    weight.data = old.copy_(stock.ff.net[2].weight)
    assert (weight.data_ptr(), weight._version) == (old.data_ptr(), version)
    fused.to(torch.float16)
    assert error(call(fused), call(stock)) < 0.05
