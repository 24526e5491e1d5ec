"""LoRA in models without fused parts: their layers run with merged weights."""

import copy
import pickle
import threading
import warnings
from unittest import mock

import pytest
import torch
from peft.tuners.lora import layer as lora
from torch import nn
from torch.nn import functional as F

import sdfastgn
from sdfastgn.kernels.common import dispatch
from sdfastgn.patches.code import checked
from sdfastgn.patches.graphs.forward import GraphedForward
from sdfastgn.patches.layout import channels_last
from sdfastgn.patches.lora import merged_weights, merging
from sdfastgn.patches.lora.merged_weights import records
from sdfastgn.patches.lora.merging import is_merged
from sdfastgn.patches.swap import exclusive
from tests.coverage import networks
from tests.patches.cases import agree, noise
from tests.patches.code.foreign import replaced
from tests.patches.transformers import CHANGES, FEW, TRANSFORMERS, add_lora, add_two, weights

pytestmark = [
    pytest.mark.fused_on_cpu,
    pytest.mark.filterwarnings("ignore:.*nothing to optimize"),
    pytest.mark.filterwarnings("ignore:::peft"),
]

SD3 = TRANSFORMERS["sd3"]


def wrappers(model):
    return [module for module in model.modules() if hasattr(module, "set_scale")]


def twins(name="sd3"):
    """(optimized model without plans, stock's copy), without adapters."""
    model = TRANSFORMERS[name].build()
    return sdfastgn.optimize(copy.deepcopy(model), plans=False), model


def with_lora(name="sd3"):
    """``twins`` with two LoRAs."""
    pair = twins(name)
    for model in pair:
        add_two(model)
    return pair


def is_all_merged(model):
    [merged] = sdfastgn.report(model).merged
    return merged.layers == len(wrappers(model)) and all(map(is_merged, wrappers(model)))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sd3-before-optimize", *TRANSFORMERS])
@torch.no_grad()
def test_every_layer_is_merged(name):
    name, _, is_first = name.partition("-")
    kind = TRANSFORMERS[name]
    stock = kind.build()
    bare = copy.deepcopy(stock)
    model = copy.deepcopy(stock)
    if not is_first:
        sdfastgn.optimize(model)
        agree(kind.run(model), kind.run(stock))
    for each in (model, stock):
        add_lora(each, "a")
    if is_first:
        sdfastgn.optimize(model)
    classes = [type(module) for module in stock.modules()]
    for scale in (None, 0.5, 0.0, None):
        expected = kind.run(stock, scale)
        agree(kind.run(model, scale), expected, 1e-4)
    assert (expected - kind.run(bare)).abs().max() > 0.1
    assert is_all_merged(model)
    report = sdfastgn.report(model)
    assert report.merged[0].bytes == sum(t.nbytes for w in wrappers(model) for t in w.base_layer.parameters())
    assert not report.skipped
    assert f"merged LoRA in {kind.kind}: {len(wrappers(model))} layers" in str(report)
    assert bool(channels_last.laid_out(model.modules())) <= bool(report.fused or report.plans)
    sdfastgn.restore(model)
    assert [type(module) for module in model.modules()] == classes
    assert torch.equal(kind.run(model), expected)
    assert not sdfastgn.report(model).merged


class Full(nn.Module):
    """Finds no memory while ``others`` have merged weights."""

    def __init__(self, others):
        super().__init__()
        self.others = [others]  # not a child

    def forward(self):
        if any(map(is_merged, self.others[0].modules())):
            raise torch.OutOfMemoryError("for the test")


@pytest.mark.drawn(1)
@pytest.mark.parametrize("name", CHANGES)
@torch.no_grad()
def test_a_change_shows_in_the_next_call(name):
    model, stock = with_lora()
    agree(SD3.run(model), SD3.run(stock), 1e-4)
    memory = [records[layer].layer.weight.data_ptr() for layer in wrappers(model)]
    CHANGES[name](model), CHANGES[name](stock)
    expected = SD3.run(stock)
    for _ in range(2):
        agree(SD3.run(model), expected, 2e-4)
    assert is_all_merged(model)
    assert [records[layer].layer.weight.data_ptr() for layer in wrappers(model)] == memory


@torch.no_grad()
def test_a_lora_that_is_unloaded_and_another_on_other_layers():
    model, stock = with_lora()
    SD3.run(model)
    for each in (model, stock):
        each.unload_lora()
    assert torch.equal(SD3.run(model), SD3.run(stock))
    for targets in (FEW, ["to_k", "linear_1"]):
        for each in (model, stock):
            add_lora(each, targets[0], targets=targets)
        agree(SD3.run(model), SD3.run(stock), 1e-4)
        assert is_all_merged(model)


def test_gradients():
    model, stock = with_lora()
    with torch.no_grad():
        SD3.run(model)
    for each in (model, stock):
        SD3.run(each).square().mean().backward()
    found, expected = (
        {name: p.grad for name, p in each.named_parameters() if p.grad is not None} for each in (model, stock)
    )
    assert found
    assert found.keys() == expected.keys()
    for name in found:
        agree(found[name], expected[name], 1e-4)


@torch.no_grad()
def test_a_scale_that_cannot_be_merged_runs_pefts_code():
    model, stock = with_lora()
    agree(SD3.run(model, 0.3), SD3.run(stock, 0.3), 1e-4)
    scale = torch.tensor(0.3)
    assert torch.equal(SD3.run(model, scale), SD3.run(stock, scale))
    reasons = {entry.reason for entry in sdfastgn.report(model).skipped}
    assert len(reasons) == 1
    assert "the adapter's scale is a Tensor" in reasons.pop()


@torch.no_grad()
def test_adapters_that_cannot_be_merged_are_named():
    model, stock = twins()
    for each in (model, stock):
        add_lora(each, "a", targets=FEW, use_dora=True)
    agree(SD3.run(model), SD3.run(stock))
    report = sdfastgn.report(model)
    assert {entry.path for entry in report.skipped} == {
        path for path, layer in model.named_modules() if hasattr(layer, "set_scale")
    }
    assert "its adapter is a variant of LoRA, such as DoRA" in " ".join(str(report).split())
    with pytest.raises(
        ValueError, match=r"^sdfastgn\.optimize: strict=True and \d+ parts .* variant of LoRA"
    ):
        sdfastgn.optimize(model, strict=True)


@torch.no_grad()
def test_copies_and_pickles():
    model, stock = with_lora()
    expected = SD3.run(stock)
    agree(SD3.run(model), expected, 1e-4)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        agree(SD3.run(other), expected, 1e-4)
        assert is_all_merged(other)
        add_lora(other, "c", 9)
        add_lora(stock, "c", 9)
        agree(SD3.run(other), SD3.run(stock), 1e-4)
        stock.delete_adapters("c"), stock.set_adapter("a")
        sdfastgn.restore(other)
        assert "_call_impl" not in vars(other)
    agree(SD3.run(model), expected, 1e-4)


@torch.no_grad()
def test_moves():
    model, stock = with_lora()
    SD3.run(model)
    for dtype in (torch.float64, torch.float32):
        model.to(dtype), stock.to(dtype)
    agree(SD3.run(model), SD3.run(stock), 1e-4)
    assert is_all_merged(model)


@torch.no_grad()
def test_where_no_kernels_run_nothing_is_merged_until_they_do():
    model, stock = with_lora()
    with dispatch.stock_code():
        assert torch.equal(SD3.run(model), SD3.run(stock))
    assert not sdfastgn.report(model).merged
    reasons = {entry.reason for entry in sdfastgn.report(model).skipped}
    next_call = "its adapter (LoRA) is not merged yet: the next call of its model without gradients merges it"
    assert reasons == {next_call}
    agree(SD3.run(model), SD3.run(stock), 1e-4)
    assert is_all_merged(model)


@torch.no_grad()
def test_merge_adapters_false_also_for_later_adapters():
    model, stock = with_lora()
    SD3.run(model)
    sdfastgn.optimize(model, merge_adapters=False)
    for each in (model, stock):
        add_lora(each, "c", 7)
    assert torch.equal(SD3.run(model), SD3.run(stock))
    report = sdfastgn.report(model)
    assert not report.merged
    assert {entry.path for entry in report.skipped} == {
        path for path, layer in model.named_modules() if hasattr(layer, "set_scale")
    }
    sdfastgn.optimize(model)
    agree(SD3.run(model), SD3.run(stock), 1e-4)
    assert is_all_merged(model)
    sdfastgn.optimize(model, merge_adapters=False)
    sdfastgn.restore(model)
    assert merging.is_allowed(model)


@torch.no_grad()
def test_the_with_block_keeps_what_was_before_it():
    model, stock = with_lora()
    with sdfastgn.optimized(model):
        SD3.run(model)
    SD3.run(model)
    assert is_all_merged(model)
    bits = SD3.run(stock)
    with sdfastgn.optimized(stock):
        agree(SD3.run(stock), bits, 1e-4)
        assert is_all_merged(stock)
    assert "_call_impl" not in vars(stock)
    assert torch.equal(SD3.run(stock), bits)


@torch.no_grad()
def test_without_memory_for_merged_weights_pefts_code_runs(monkeypatch):
    def fail(*args):
        raise torch.OutOfMemoryError("for the test")

    model, stock = with_lora()
    with monkeypatch.context() as short:
        short.setattr(merged_weights, "_stand_in", fail)
        assert torch.equal(SD3.run(model), SD3.run(stock))
    assert "no memory for merged weights" in sdfastgn.report(model).skipped[0].reason


@torch.no_grad()
def test_a_call_without_memory_frees_the_merged_weights(monkeypatch):
    model, stock = with_lora()
    SD3.run(model)
    forward = nn.LayerNorm.forward

    def tight(self, x):
        if any(map(is_merged, model.modules())):
            raise torch.OutOfMemoryError("for the test")
        return forward(self, x)

    expected = SD3.run(stock)
    monkeypatch.setattr(nn.LayerNorm, "forward", tight)
    assert torch.equal(SD3.run(model), expected)
    assert not sdfastgn.report(model).merged
    monkeypatch.setattr(
        nn.LayerNorm, "forward", mock.Mock(side_effect=torch.OutOfMemoryError("for the test"))
    )
    with pytest.raises(torch.OutOfMemoryError):  # there is nothing to free
        SD3.run(model)


@torch.no_grad()
def test_a_graph_without_memory_frees_the_merged_weights_of_all_models():
    model, stock = with_lora()
    SD3.run(model)
    full = Full(model)
    GraphedForward(full)()
    assert not sdfastgn.report(model).merged
    assert torch.equal(SD3.run(model), SD3.run(stock))


@pytest.mark.drawn(1)
@pytest.mark.parametrize("holder", [(F, "linear"), (lora.Linear, "forward")], ids=["torch", "peft"])
@torch.no_grad()
def test_replaced_code_runs(holder):
    """A merged layer would call ``F.linear`` once, peft's code calls it three times."""
    model, stock = with_lora()
    agree(SD3.run(model), SD3.run(stock), 1e-4)
    with replaced(*holder):
        assert torch.equal(SD3.run(model), SD3.run(stock))
    agree(SD3.run(model), SD3.run(stock), 1e-4)


@pytest.mark.slow
@torch.no_grad()
def test_compiled_as_one_graph():
    """diffusers allows its blocks in graphs, so torch.compile cannot look into their class."""
    flux = TRANSFORMERS["flux"]
    model, stock = twins("flux")
    for each in (model, stock):
        add_lora(each, "a")
    agree(flux.run(model), flux.run(stock), 1e-4)
    sdfastgn.optimize(model)
    torch._dynamo.reset()
    model.compile(backend="eager", fullgraph=True)
    agree(flux.run(model), flux.run(stock), 1e-4)


@torch.no_grad()
def test_without_adapters_no_code_is_compared(monkeypatch):
    monkeypatch.setattr(checked, "States", mock.Mock(side_effect=AssertionError))
    stock = SD3.build()
    model = sdfastgn.optimize(copy.deepcopy(stock), plans=False)
    assert torch.equal(SD3.run(model), SD3.run(stock))


def test_a_thread_that_changes_scales_gets_its_own_while_others_call():
    model, stock = with_lora()
    scales = (0.5, -1.0)
    with torch.no_grad():
        expected = [weights(["a"], [scale])(stock) or SD3.run(stock) for scale in scales]
    weights(["a"], [scales[0]])(model)
    done = threading.Event()

    def draw():
        with torch.no_grad():
            while not done.is_set():
                SD3.run(model)

    threads = [threading.Thread(target=draw) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        with torch.no_grad():
            for i in range(10):
                weights(["a"], [scales[i % 2]])(model)
                agree(SD3.run(model), expected[i % 2], 1e-4)
    finally:
        done.set()
        for thread in threads:
            thread.join()


def test_optimize_waits_for_no_call(monkeypatch):
    monkeypatch.setattr(exclusive, "_MAX_WAIT", 0.1)
    model = SD3.build()
    begun, goes_on = threading.Event(), threading.Event()
    model.pos_embed.register_forward_hook(lambda *args: (begun.set(), goes_on.wait())[0])
    thread = threading.Thread(target=SD3.run, args=(model,))
    thread.start()
    try:
        begun.wait()
        sdfastgn.optimize(model, plans=False)
    finally:
        goes_on.set()
        thread.join()


def test_a_model_alone_with_nothing_but_adapters():
    nothing = r"^sdfastgn\.optimize: no GroupNorm .* in SD3Transformer2DModel, nothing to optimize"
    model = SD3.build()
    with pytest.warns(UserWarning, match=nothing + "; LoRA adapters that it gets will be merged$"):
        assert sdfastgn.optimize(model, plans=False) is model
    with pytest.raises(ValueError, match=nothing):
        sdfastgn.optimize(model, strict=True, plans=False)
    with pytest.raises(ValueError, match=r"in Linear, nothing to optimize \(missing_ok=True"):
        sdfastgn.optimize(model.proj_out)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sdfastgn.optimize(model, missing_ok=True, plans=False)
        add_lora(model, "a")
        sdfastgn.optimize(model, plans=False)
    assert is_all_merged(model)


@pytest.mark.slow
def test_a_whole_pipeline():
    """The pipeline's argument reaches the transformer, whose LoRA was added after ``optimize``."""
    row = next(row for row in networks.transformers if row.name == "Flux")
    results = []
    for is_optimized in (True, False):
        pipe = row.build().obj
        if is_optimized:
            sdfastgn.optimize(pipe)
        add_lora(pipe.transformer, "a")
        inputs = {"prompt_embeds": noise(1, 5, 32), "pooled_prompt_embeds": noise(1, 32)}
        size = {"num_inference_steps": 2, "height": 16, "width": 16, "output_type": "latent"}
        for scale in (1.0, 0.4):
            seed = torch.Generator().manual_seed(0)
            options = {"joint_attention_kwargs": {"scale": scale}, "generator": seed}
            results.append(pipe(**inputs, **size, **options).images)
        if is_optimized:
            report = sdfastgn.report(pipe)
            assert [merged.path for merged in report.merged] == ["transformer"]
            assert not report.left
    agree(results[0], results[2], 1e-4)
    agree(results[1], results[3], 1e-4)
    assert (results[0] - results[1]).abs().max() > 0.01
