"""CUDA graphs of models with merged adapters: a switch writes new weights, and keeps the graphs."""

import copy
import random
import threading

import diffusers
import numpy as np
import pytest
import torch
from diffusers.utils.peft_utils import set_weights_and_activate_adapters
from peft import LoraConfig
from peft.utils.hotswap import hotswap_adapter_from_state_dict

import sdfastgn
from sdfastgn.patches.graphs.capture import Graph
from sdfastgn.patches.graphs.models import lora_scale_of
from sdfastgn.patches.layout import channels_last
from sdfastgn.patches.lora import adapter_survey, merging
from sdfastgn.patches.lora.merged_weights import Record, records
from tests.patches.graphs.cases import (
    DEVICES,
    agree,
    inputs_after,
    ip_adapter,
    make,
    optimized,
    run,
    same_results,
    state,
)
from tests.patches.transformers import SANA

pytestmark = pytest.mark.fused_on_cpu

TARGETS = ["to_q", "to_k", "to_v", "to_out.0", "conv1", "proj_in", "net.0.proj", "net.2", "time_emb_proj"]
FEW = ["to_q", "conv1"]
ENDS = ["conv_in", "conv_out", "to_q"]


def add(unet, name, seed, targets=TARGETS, **options):
    torch.manual_seed(seed)
    options = {"r": 3, "lora_alpha": 4, "init_lora_weights": False, **options}
    unet.add_adapter(LoraConfig(target_modules=targets, **options), adapter_name=name)


def two(unet):
    add(unet, "a", 5)
    add(unet, "b", 6, FEW)
    unet.set_adapter("a")


def wrappers(unet):
    return [module for module in unet.modules() if hasattr(module, "set_scale")]


def hooks_of(unet):
    """Path of each module -> its forward hooks and forward pre-hooks."""
    return {
        path: [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
        for path, module in unet.named_modules()
    }


def weights(names, numbers):
    return lambda unet: set_weights_and_activate_adapters(unet, names, numbers)


@torch.no_grad()
def write_a(unet):
    for name, parameter in unet.named_parameters():
        if "lora_A.a" in name:
            parameter.mul_(2.0)


@torch.no_grad()
def write_weights(unet):
    for name, parameter in unet.named_parameters():
        if "base_layer.weight" in name:
            parameter.mul_(1.2)


def through_data(unet):
    for wrapper in wrappers(unet):
        wrapper.lora_B["a"].weight.data += 0.1


def other_memory(unet):
    for name, parameter in unet.named_parameters():
        if "lora_B.a" in name:
            parameter.data = parameter.data * 3


def same_address(unet):
    """New values at the address of the old ones, in another storage."""
    for name, parameter in unet.named_parameters():
        if "lora_B.a" in name:
            kept = parameter.data.mul(3)
            parameter.data = torch.empty(0, device=parameter.device)
            parameter.data = kept.clone()


def replaced(unet):
    for wrapper in wrappers(unet):
        wrapper.lora_B["a"].weight = torch.nn.Parameter(wrapper.lora_B["a"].weight.detach() * 2)


def loaded(unet):
    unet.load_state_dict({k: v * (2 if ".lora_B.a" in k else 1) for k, v in unet.state_dict().items()})


def hotswapped(unet):
    old = {k: v for k, v in unet.state_dict().items() if ".lora_" in k and ".a." in k}
    hotswap_adapter_from_state_dict(unet, {k: v * 2 for k, v in old.items()}, "a", unet.peft_config["a"])


def fused_and_unfused(unet):
    unet.fuse_lora(lora_scale=0.5)
    unet.unfuse_lora()


# Each changes the output. None changes the layers that have adapters.
SWITCHES = {
    "other-adapter": lambda u: u.set_adapter("b"),
    "both": lambda u: u.set_adapter(["a", "b"]),
    "weights": weights(["a", "b"], [0.3, -0.7]),
    "weight-0": weights(["a"], [0.0]),
    "scale": weights(["a"], [-0.5]),
    "off": lambda u: u.disable_adapters(),
    "fused": lambda u: u.fuse_lora(lora_scale=0.5),
    "fused-and-unfused": fused_and_unfused,
    "deleted": lambda u: u.delete_adapters("a"),
    "third": lambda u: add(u, "c", 7, FEW),
    "written": write_a,
    "weights-written": write_weights,
    "data": through_data,
    "other-memory": other_memory,
    "same-address": same_address,
    "replaced": replaced,
    "loaded": loaded,
}


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", SWITCHES)
def test_a_switch_keeps_the_graph(name, device, monkeypatch):
    unet, stock, inputs = make(device)
    two(unet), two(stock)
    same_results(unet, stock, inputs, 3)
    before = state(unet)
    SWITCHES[name](unet), SWITCHES[name](stock)
    expected = run(stock, inputs)
    with monkeypatch.context() as unrefreshed:  # so that this test can fail
        unrefreshed.setattr(adapter_survey.AdapterSurvey, "refresh", lambda self, *args: True)
        assert (run(unet, inputs) - expected).abs().max() > 2e-3
    for _ in range(2):
        agree(run(unet, inputs), expected)
    after = state(unet)
    assert (after.captured, after.dropped, after.last_change) == (before.captured, before.dropped, "")
    assert after.eager == before.eager


def test_an_active_adapter_of_one_layer_becomes_one_of_the_next_layer():
    """All active adapters, in the order of the layers, are the same as before: only their layers differ."""
    unet, stock, inputs = make()
    for each in (unet, stock):
        add(each, "a", 5, FEW), add(each, "b", 6, FEW)
        first, second, *_ = wrappers(each)
        first.set_adapter(["a", "b"]), second.set_adapter(["a"])
    same_results(unet, stock, inputs, 3)
    for each in (unet, stock):
        first, second, *_ = wrappers(each)
        first.set_adapter(["a"]), second.set_adapter(["b", "a"])
    agree(run(unet, inputs), run(stock, inputs))


@pytest.mark.slow
def test_hotswap():
    unet, stock, inputs = make()
    two(unet), two(stock)
    same_results(unet, stock, inputs, 3)
    hotswapped(unet), hotswapped(stock)
    same_results(unet, stock, inputs, 2)
    assert state(unet).captured == 1


@pytest.mark.slow
def test_every_switch_one_after_the_other():
    unet, stock, inputs = make()
    two(unet), two(stock)
    same_results(unet, stock, inputs, 2)
    for name in (
        "weights",
        "fused",
        "off",
        "written",
        "scale",
        "fused-and-unfused",
        "both",
        "third",
        "deleted",
    ):
        for model in (unet, stock):
            if name == "scale":
                model.enable_adapters()
            SWITCHES[name](model)
        same_results(unet, stock, inputs, 1)
    assert (state(unet).captured, state(unet).last_change) == (1, "")


@pytest.mark.slow
def test_new_scales_alone_look_at_no_layer_again(monkeypatch):
    unet, stock, inputs = make()
    for model in (unet, stock):
        add(model, "a", 5, lora_bias=True)
        add(model, "b", 6, FEW)
        weights(["a", "b"], [0.5, 0.5])(model)
    same_results(unet, stock, inputs, 3)
    looked, source_of = [], adapter_survey.source_of
    monkeypatch.setattr(adapter_survey, "source_of", lambda layer: looked.append(layer) or source_of(layer))
    for scale, factor in ((0.3, 1.0), (-0.7, 1.0), (2, 0.5), (2, -0.25), (0.0, 1.0)):
        for model in (unet, stock):
            weights(["a", "b"], [scale, 1 - scale])(model)
        values = {**inputs, "cross_attention_kwargs": {"scale": factor}}
        agree(run(unet, values), run(stock, values))
    assert looked == []
    assert (state(unet).captured, state(unet).last_change) == (1, "")
    # A write that PyTorch does not count is noticed after ``set_adapter`` too.
    for model in (unet, stock):
        weights(["a", "b"], [0.4, 0.4])(model)
        through_data(model)
    same_results(unet, stock, inputs, 2)
    assert looked


@pytest.mark.slow
def test_new_scales_in_another_model_look_at_no_layer_again(monkeypatch):
    (unet, stock, inputs), (other, _, more) = make(), make()
    two(unet), two(stock), two(other)
    same_results(unet, stock, inputs, 3)
    run(other, more, calls=3)
    looked, source_of = [], adapter_survey.source_of
    monkeypatch.setattr(adapter_survey, "source_of", lambda layer: looked.append(layer) or source_of(layer))
    for scale in (0.5, -0.7):
        weights(["a"], [scale])(other)
        run(other, more)
        same_results(unet, stock, inputs, 1)
    assert looked == []


@pytest.mark.slow
def test_known_adapters_are_switched_before_any_layer_is_looked_at(monkeypatch):
    unet, stock, inputs = make()
    two(unet), two(stock)
    for names in (["a"], ["b"], ["a", "b"]):
        for model in (unet, stock):
            weights(names, [0.5] * len(names))(model)
        same_results(unet, stock, inputs, 2)
    order = []
    for owner, name in ((Graph, "run"), (adapter_survey.AdapterSurvey, "_objects_now")):
        method = getattr(owner, name)
        monkeypatch.setattr(
            owner, name, lambda *args, name=name, method=method: order.append(name) or method(*args)
        )
    for names, factor in ((["b"], 1.0), (["a"], 1.0), (["b", "a"], 0.5), (["b", "a"], -0.25), (["a"], 2.0)):
        for model in (unet, stock):
            weights(names, [0.7, -0.3][: len(names)])(model)
        values = {**inputs, "cross_attention_kwargs": {"scale": factor}}
        agree(run(unet, values), run(stock, values))
        assert order == ["run", "_objects_now"]
        order.clear()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["written", "other-memory", "same-address", "replaced", "third", "deleted"])
def test_a_switch_together_with_another_change(name):
    """New adapters are merged before tensors are compared, and again if these have changed too."""
    unet, stock, inputs = make()
    two(unet), two(stock)
    same_results(unet, stock, inputs, 3)
    for model in (unet, stock):
        SWITCHES[name](model)
        weights(["b"], [0.5])(model)
    same_results(unet, stock, inputs, 2)
    for model in (unet, stock):
        weights(["b"] if name == "deleted" else ["a", "b"], [0.5, 0.7][: 1 + (name != "deleted")])(model)
    same_results(unet, stock, inputs, 2)
    assert (state(unet).captured, state(unet).last_change) == (1, "")


def drop_out(unet):
    for wrapper in wrappers(unet):
        if "b" in wrapper.lora_dropout:  # a read of ``lora_A`` would make the next call look at all layers
            wrapper.lora_dropout["b"] = torch.nn.Dropout(0.5)


@pytest.mark.slow
def test_an_inactive_adapter_that_cannot_be_merged_any_more():
    unet, _, inputs = make()
    two(unet)
    weights(["b"], [0.5])(unet)
    run(unet, inputs), run(unet, inputs)
    weights(["a"], [0.5])(unet)
    run(unet, inputs)
    layers = sdfastgn.report(unet).merged[0].layers
    drop_out(unet)
    weights(["b"], [0.5])(unet)
    run(unet, inputs), run(unet, inputs)
    assert not sdfastgn.report(unet).merged or sdfastgn.report(unet).merged[0].layers < layers


@pytest.mark.slow
def test_tensors_are_compared_while_the_graph_runs(monkeypatch):
    unet, stock, inputs = make()
    two(unet), two(stock)
    same_results(unet, stock, inputs, 3)
    order = []

    def noted(owner, name):
        method = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args: order.append(name) or method(*args))

    noted(Graph, "run")
    noted(adapter_survey.AdapterSurvey, "_settings_now")
    noted(adapter_survey.AdapterSurvey, "_objects_now")
    run(unet, inputs)
    assert order == ["_settings_now", "run", "_objects_now"]
    order.clear()
    other_memory(unet), other_memory(stock)
    agree(run(unet, inputs), run(stock, inputs))
    assert order.count("run") == 2  # the first result was discarded


@pytest.mark.slow
def test_a_graph_waits_for_weights_that_an_eager_call_has_written(monkeypatch):
    unet, stock, inputs = make()
    two(unet), two(stock)
    same_results(unet, stock, inputs, 3)
    for model in (unet, stock):
        weights(["a"], [-0.5])(model)
    with torch.no_grad():
        assert merging.merged_layer(wrappers(unet)[0]) is not None  # writes all weights
    waited, wait = [], Record.wait
    monkeypatch.setattr(Record, "wait", lambda self: waited.append(self) or wait(self))
    agree(run(unet, inputs), run(stock, inputs))
    assert set(waited) == {records[wrapper] for wrapper in wrappers(unet)}


@pytest.mark.slow
def test_a_scale_in_the_arguments_shares_the_graph():
    unet, stock, inputs = make()
    two(unet), two(stock)
    for scale in (1.0, 0.5, 0.25, -1.0, None, 2.0, 0.5):
        values = inputs if scale is None else {**inputs, "cross_attention_kwargs": {"scale": scale}}
        agree(run(unet, values), run(stock, values))
    assert (state(unet).captured, state(unet).replays) == (1, 6)


@torch.no_grad()
def test_a_scale_in_the_arguments_of_a_transformer_shares_the_graph():
    model = SANA.build()
    add(model, "a", 5, ["to_q", "linear_1", "proj_out"])
    stock = copy.deepcopy(model)
    optimized(model)
    for scale in (1.0, 0.5, 0.25, 0.0, None, 2.0, 0.5):
        agree(SANA.run(model, scale), SANA.run(stock, scale))
    assert (state(model).captured, state(model).replays) == (1, 6)


def test_classes_that_take_a_scale():
    """By the decorator of diffusers, or by name where older releases have none."""
    for kind, name in (
        (diffusers.UNet2DConditionModel, "cross_attention_kwargs"),
        (diffusers.SanaTransformer2DModel, "attention_kwargs"),
        (diffusers.FluxTransformer2DModel, "joint_attention_kwargs"),
        (diffusers.AutoencoderKL, None),
    ):
        with torch.device("meta"):
            module = kind.__new__(kind)
        assert lora_scale_of(module) == name


@pytest.mark.slow
@pytest.mark.parametrize("kind", [np.float64, np.float32, np.int64])
def test_scales_of_numpy(kind):
    unet, stock, inputs = make()
    two(unet), two(stock)
    same_results(unet, stock, inputs, 2)
    for scale in map(kind, (0.5, -1, 1)):
        weights(["a"], [scale])(unet), weights(["a"], [scale])(stock)
        same_results(unet, stock, inputs, 1)
        values = {**inputs, "cross_attention_kwargs": {"scale": kind(-1)}}
        agree(run(unet, values), run(stock, values))
    assert (state(unet).captured, state(unet).replays) == (1, 7)


@pytest.mark.parametrize("device", DEVICES)
def test_a_layer_whose_weight_is_read_in_each_call(device):
    """diffusers' ``ImageProjection`` reads the dtype of ``image_embeds.weight``."""
    unet, stock, inputs = make(device)
    inputs = inputs_after(ip_adapter, inputs)
    for model in (unet, stock):
        ip_adapter(model), add(model, "a", 5, ["image_embeds", "to_q"])
    same_results(unet, stock, inputs, 3)
    for model in (unet, stock):
        model.encoder_hid_proj.image_projection_layers[0].image_embeds.weight.data.mul_(3)
    same_results(unet, stock, inputs, 3)
    assert (state(unet).captured, state(unet).replays) == (1, 5)
    assert unet.encoder_hid_proj.image_projection_layers[0].image_embeds in records


@pytest.mark.slow
@pytest.mark.parametrize("is_first", [True, False], ids=["before-optimize", "after-optimize"])
def test_first_and_last_convolutions_are_merged(is_first):
    """They have sdfastgn's hooks, which change layouts. With merged weights, the hooks still run."""
    unet, stock, inputs = make()
    hooks = hooks_of(stock)
    if is_first:
        sdfastgn.restore(unet)
    add(unet, "a", 5, ENDS), add(stock, "a", 5, ENDS)
    if is_first:
        optimized(unet)
    for scale in (1.0, 0.5, -1.0, 0.5):
        values = {**inputs, "cross_attention_kwargs": {"scale": scale}}
        agree(run(unet, values), run(stock, values))
    assert (state(unet).captured, state(unet).replays) == (1, 3)
    report = sdfastgn.report(unet)
    assert (report.merged[0].layers, report.skipped) == (len(wrappers(unet)), ())
    sdfastgn.optimize(unet, strict=True)
    for model in (unet, stock):
        weights(["a"], [0.7])(model)
    same_results(unet, stock, inputs, 2)
    for model in (unet, stock):
        model.unload_lora()
    same_results(unet, stock, inputs, 2)
    assert channels_last.enter in unet.conv_in._forward_pre_hooks.values()
    assert channels_last.leave in unet.conv_out._forward_hooks.values()
    add(unet, "b", 6, ENDS), add(stock, "b", 6, ENDS)
    same_results(unet, stock, inputs, 2)
    sdfastgn.restore(unet)
    assert [type(m) for m in unet.modules()] == [type(m) for m in stock.modules()]
    assert not any(hooks_of(unet).values())
    assert torch.equal(run(unet, inputs), run(stock, inputs))
    unet.unload_lora()
    assert hooks_of(unet) == hooks


@pytest.mark.drawn(1)
@pytest.mark.parametrize("name", ["conv_in", "to_q"])
def test_a_hook_beside_sdfastgns_own_ends_the_graph(name):
    unet, stock, inputs = make()
    add(unet, "a", 5, ENDS), add(stock, "a", 5, ENDS)
    same_results(unet, stock, inputs, 3)
    for model in (unet, stock):
        layer = next(module for path, module in model.named_modules() if path.endswith(f"{name}.base_layer"))
        layer.register_forward_hook(lambda m, i, y: y * 2)
    same_results(unet, stock, inputs, 3)


@pytest.mark.slow
def test_scale_0_in_the_arguments_resets_the_scales_as_in_stock():
    unet, stock, inputs = make()
    for model in (unet, stock):
        two(model)
        weights(["a"], [0.3])(model)
    same_results(unet, stock, inputs, 2)
    zero = {**inputs, "cross_attention_kwargs": {"scale": 0.0}}
    agree(run(unet, zero), run(stock, zero))
    same_results(unet, stock, inputs, 2)
    assert state(unet).captured == 1


@pytest.mark.slow
def test_a_scale_in_the_arguments_beside_a_layer_that_is_not_merged():
    unet, stock, inputs = make()
    for model in (unet, stock):
        add(model, "a", 5, ["to_q", "conv1"])
        add(model, "b", 6, ["to_v"], use_dora=True)
        model.set_adapter(["a", "b"])
    same_results(unet, stock, inputs, 2)
    for scale in (0.5, 0.5, 0.25, 0.25):
        values = {**inputs, "cross_attention_kwargs": {"scale": scale}}
        agree(run(unet, values), run(stock, values))
    same_results(unet, stock, inputs, 2)


def circular(modules):
    for module in modules:
        if isinstance(module, torch.nn.Conv2d):
            module.padding_mode = "circular"


# Changes of the layers themselves: one new capture.
STRUCTURES = {
    "more-layers": lambda u: add(u, "c", 7, ["linear_1", "conv2"]),
    "unloaded": lambda u: u.unload_lora(),
    "hooked": lambda u: wrappers(u)[0].register_forward_hook(lambda m, i, y: y * 2),
    "inner-hook": lambda u: wrappers(u)[0].lora_A["a"].register_forward_hook(lambda m, i, y: y * 2),
    "dropout": lambda u: wrappers(u)[0].lora_dropout.update({"a": torch.nn.Dropout(0.5).eval()}),
    "dora": lambda u: add(u, "c", 7, FEW, use_dora=True),
    "moved": lambda u: u.to(torch.float64).to(torch.float32),
    "padding": lambda u: circular(w.base_layer for w in wrappers(u)),
    "seamless": lambda u: circular(u.modules()),
}


@pytest.mark.drawn(1)
@pytest.mark.parametrize("name", STRUCTURES)
def test_other_changes(name):
    unet, stock, inputs = make()
    two(unet), two(stock)
    same_results(unet, stock, inputs, 3)
    STRUCTURES[name](unet), STRUCTURES[name](stock)
    same_results(unet, stock, inputs, 4)
    weights(["b"], [0.5])(unet) if name != "unloaded" else None
    weights(["b"], [0.5])(stock) if name != "unloaded" else None
    same_results(unet, stock, inputs, 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("device", "calls"),
    [pytest.param("cpu", 60, id="tape"), pytest.param("cuda", 3000, id="graph", marks=pytest.mark.gpu)],
)
def test_a_thread_that_changes_adapters_between_calls(device, calls):
    """Each change is between two calls, but made by another thread. No result is stale or mixed."""
    unet, stock, inputs = make(device)
    two(unet), two(stock)
    states = [
        weights(["a"], [1.0]),
        weights(["a"], [-0.5]),
        weights(["a", "b"], [0.5, 1.0]),
        weights(["b"], [0.7]),
        weights(["b"], [0.0]),
    ]
    expected = []
    for change in states:
        change(stock)
        expected.append(run(stock, inputs))
    chance, turn = random.Random(3), threading.Barrier(2)
    chosen = [0]

    def keep_changing():
        for _ in range(calls):
            turn.wait()
            if chance.random() < 0.6:
                chosen[0] = chance.randrange(len(states))
                states[chosen[0]](unet)
            turn.wait()

    states[0](unet)
    thread = threading.Thread(target=keep_changing)
    thread.start()
    try:
        for _ in range(calls):
            turn.wait()
            turn.wait()
            agree(run(unet, inputs), expected[chosen[0]])
    finally:
        turn.abort()
        thread.join()
    assert state(unet).captured == 1


@pytest.mark.gpu
def test_streams_take_turns_with_new_scales():
    """The weights are written in one stream after another has read them, and read by the next one."""
    unet, stock, inputs = make("cuda")
    two(unet), two(stock)
    same_results(unet, stock, inputs, 3)
    scales = [0.2, 1.0, -0.4]
    expected = []
    for scale in scales:
        weights(["a"], [scale])(stock)
        expected.append(run(stock, inputs))
    streams = [torch.cuda.Stream() for _ in range(3)]
    results = []
    torch.cuda.synchronize()
    for i in range(300):
        weights(["a"], [scales[i % 3]])(unet)
        with torch.cuda.stream(streams[i % 2 if i % 5 else 2]):
            results.append(run(unet, inputs))
    torch.cuda.synchronize()
    for i, result in enumerate(results):
        agree(result, expected[i % 3])
    assert state(unet).captured == 1


@pytest.mark.slow
def test_the_report_and_restore():
    unet, stock, inputs = make()
    two(unet), two(stock)
    before = {name: value.clone() for name, value in unet.state_dict().items()}
    same_results(unet, stock, inputs, 3)
    report = sdfastgn.report(unet)
    [merged] = report.merged
    assert (merged.layers, merged.adapters) == (len(wrappers(unet)), ("a",))
    own = [w.base_layer for w in wrappers(unet)]
    assert merged.bytes == sum(p.nbytes for base in own for p in base.parameters())
    assert "merged LoRA in UNet2DConditionModel:" in str(report)
    assert not report.skipped
    sdfastgn.restore(unet)
    assert [type(m) for m in unet.modules()] == [type(m) for m in stock.modules()]
    after = unet.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert torch.equal(run(unet, inputs), run(stock, inputs))
    assert not sdfastgn.report(unet).merged


@pytest.mark.slow
def test_merged_weights_are_given_back_if_memory_is_short():
    unet, stock, inputs = make()
    two(unet), two(stock)
    same_results(unet, stock, inputs, 3)

    def run_out(*_):
        if any(map(merging.is_merged, unet.modules())):
            raise torch.OutOfMemoryError("for the test")

    unet.mid_block.register_forward_pre_hook(run_out)
    same_results(unet, stock, inputs, 2)
    report = sdfastgn.report(unet)
    assert not report.merged
    assert "no memory for merged weights" in report.skipped[0].reason


@pytest.mark.slow
def test_merged_weights_are_given_back_after_graphs():
    """The first call of a kind runs eagerly. First the graphs of other calls are dropped."""
    unet, stock, inputs = make()
    two(unet), two(stock)
    same_results(unet, stock, inputs, 3)
    forward, alive = type(unet).forward, []

    def run_out(model, *args, **kwargs):
        if model is unet and any(map(merging.is_merged, unet.modules())):
            alive.append(state(unet).alive)
            raise torch.OutOfMemoryError("for the test")
        return forward(model, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(unet), "forward", run_out)
        shorter = {**inputs, "encoder_hidden_states": inputs["encoder_hidden_states"][:, :5]}
        same_results(unet, stock, shorter, 1)
    assert alive[-2:] == [1, 0]


@pytest.mark.slow
def test_not_merged_if_not_wanted():
    unet, stock, inputs = make(merge_adapters=False)
    two(unet), two(stock)
    same_results(unet, stock, inputs, 3)
    assert not sdfastgn.report(unet).merged
    assert "(merge_adapters is False)" in str(sdfastgn.report(unet).skipped[0].reason)
    sdfastgn.optimize(unet)
    same_results(unet, stock, inputs, 3)
    assert sdfastgn.report(unet).merged
    sdfastgn.optimize(unet, merge_adapters=False)
    same_results(unet, stock, inputs, 3)
    assert not sdfastgn.report(unet).merged


@pytest.mark.slow
def test_a_copy_merges_for_itself():
    unet, stock, inputs = make()
    two(unet), two(stock)
    same_results(unet, stock, inputs, 3)
    other, other_stock = copy.deepcopy(unet), copy.deepcopy(stock)
    for model in (other, other_stock):
        model.set_adapter("b")
    same_results(other, other_stock, inputs, 3)
    same_results(unet, stock, inputs, 2)
