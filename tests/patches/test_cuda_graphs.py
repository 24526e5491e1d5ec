"""CUDA graphs: replayed where nothing changed, never stale. On the CPU a tape of operations stands for a graph, on a GPU it is one."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
import threading
import weakref

import pytest
import torch
from accelerate import cpu_offload
from accelerate.hooks import remove_hook_from_submodules
from diffusers.models.attention_processor import AttnProcessor
from peft import LoraConfig
from torch import nn

import sfastgn
from sfastgn.bench.architectures import build_controlnet, build_unet, build_vae, unet_inputs
from sfastgn.patches import cuda_graphs, graph_state, graphed_forward
from tests.patches.graph_tape import TapeBackend

DEVICES = [pytest.param("cpu", id="tape"), pytest.param("cuda", id="graph", marks=pytest.mark.gpu)]


def make(device="cpu", mode="auto", model="tiny"):
    """(optimised UNet, the same one stock, arguments)"""
    unet = build_unet(model, torch.float32, device)
    unet = copy.deepcopy(unet)
    stock = copy.deepcopy(unet)
    sfastgn.optimize(unet, cuda_graphs=mode)
    if device == "cpu":
        cuda_graphs.install(unet, mode, TapeBackend())
    return unet, stock, unet_inputs(model, size=64, batch=1, dtype=torch.float32, device=device, seed=0)


def run(model, inputs):
    with torch.no_grad():
        return model(**inputs).sample


def agree(a, b):
    torch.testing.assert_close(a, b, atol=2e-4, rtol=2e-3)


def state(model):
    (graphs,) = sfastgn.report(model).graphs
    return graphs


# ---- what must never be stale: change -> (change, what a stale graph would have said is wrong by much)


def lora(unet):
    torch.manual_seed(5)
    unet.add_adapter(LoraConfig(r=2, target_modules=["to_q", "conv1"], init_lora_weights=False), adapter_name="a")


def two_loras(unet):
    lora(unet)
    torch.manual_seed(6)
    unet.add_adapter(LoraConfig(r=2, target_modules=["to_q"], init_lora_weights=False), adapter_name="b")


def scale_lora(unet):
    for module in unet.modules():
        if hasattr(module, "set_scale"):
            module.set_scale("a", 0.3)


def nothing(unet):
    pass


def all_weights(unet):
    for p in unet.parameters():
        p.data = p.data * 1.1


def one_parameter(unet):
    unet.conv_out.weight = nn.Parameter(unet.conv_out.weight * 2)


def in_place(unet):
    with torch.no_grad():
        unet.conv_out.weight.mul_(2)


def a_module(unet):
    unet.mid_block.resnets[0].norm1 = copy.deepcopy(unet.mid_block.resnets[0].norm2)


def attribute(unet):
    unet.mid_block.resnets[0].output_scale_factor = 2.0


def group_norm_eps(unet):
    unet.mid_block.resnets[0].norm1.eps = 0.5


def circular(unet):
    for module in unet.modules():
        if isinstance(module, nn.Conv2d):
            module.padding_mode = "circular"


def processor_scale(unet):
    unet.mid_block.attentions[0].transformer_blocks[0].attn1.scale *= 2


CHANGES = {
    "lora-load": (nothing, lora),
    "lora-scale": (lora, scale_lora),
    "lora-fuse-and-delete": (lora, lambda u: (u.fuse_lora(), u.unfuse_lora(), u.delete_adapters("a"))),
    "lora-disable": (lora, lambda u: u.disable_adapters()),
    "lora-set-adapter": (two_loras, lambda u: u.set_adapter("a")),
    "freeu-on": (nothing, lambda u: u.enable_freeu(s1=0.9, s2=0.2, b1=1.5, b2=1.6)),
    "freeu-values": (lambda u: u.enable_freeu(0.9, 0.2, 1.5, 1.6), lambda u: u.enable_freeu(0.9, 0.2, 1.1, 1.6)),
    "freeu-off": (lambda u: u.enable_freeu(0.9, 0.2, 1.5, 1.6), lambda u: u.disable_freeu()),
    "weights-data": (nothing, all_weights),
    "weights-replaced": (nothing, one_parameter),
    "weights-assigned": (nothing, lambda u: u.load_state_dict({k: v * 1.1 for k, v in u.state_dict().items()}, assign=True)),
    "module-replaced": (nothing, a_module),
    "attribute": (nothing, attribute),
    "eps": (nothing, group_norm_eps),
    "circular-padding": (nothing, circular),
    "attention-scale": (nothing, processor_scale),
    "inner-hook": (nothing, lambda u: u.mid_block.register_forward_hook(lambda m, i, o: o * 2)),
    "inner-forward": (nothing, lambda u: setattr(u.mid_block, "forward", lambda h, *a, **k: h)),
    "skipped-block": (nothing, lambda u: u.down_blocks[0].attentions[0].transformer_blocks[0].set_chunk_feed_forward(1, 1)
                      or setattr(u.mid_block, "attentions", nn.ModuleList([None]))),
}  # fmt: skip
# Changes of the model that leave a graph right, or right numbers by another way.
HARMLESS = {
    "in-place": in_place,
    "attention-processor": lambda u: u.set_attn_processor(AttnProcessor()),
    "to-double-and-back": lambda u: u.to(torch.float64).to(torch.float32),
}
ALL = [pytest.param(before, change, id=name) for name, (before, change) in CHANGES.items()]
ALL += [pytest.param(nothing, change, id=name) for name, change in HARMLESS.items()]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("before", "change"), ALL)
def test_never_stale(before, change, device):
    unet, stock, inputs = make(device)
    before(unet), before(stock)
    for _ in range(3):
        agree(run(unet, inputs), run(stock, inputs))
    assert state(unet).replays == 2
    change(unet), change(stock)
    for _ in range(3):
        agree(run(unet, inputs), run(stock, inputs))


@pytest.mark.parametrize(("before", "change"), [pytest.param(b, c, id=name) for name, (b, c) in CHANGES.items()])
def test_the_changes_show_without_the_watch(before, change, monkeypatch):
    """So that the test above can fail."""
    unet, stock, inputs = make()
    before(unet), before(stock)
    for _ in range(3):
        run(unet, inputs)
    monkeypatch.setattr(graph_state.Watch, "unchanged", lambda self, root: True)
    change(unet), change(stock)
    assert (run(unet, inputs) - run(stock, inputs)).abs().max() > 5e-3


def test_weights_changed_in_place_are_read_by_the_replay():
    unet, stock, inputs = make()
    for _ in range(2):
        run(unet, inputs)
    in_place(unet), in_place(stock)
    agree(run(unet, inputs), run(stock, inputs))
    assert (state(unet).captured, state(unet).replays) == (1, 2)


# ---- arguments and results


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "make_timestep", [int, float, torch.tensor, lambda t: torch.tensor([t])], ids=["int", "float", "0-d", "1-d"]
)
def test_new_values_in_the_same_graph(make_timestep, device):
    unet, stock, inputs = make(device)
    for t in (900, 500, 100):
        timestep = make_timestep(t)
        values = {**inputs, "sample": torch.randn_like(inputs["sample"])}
        values["timestep"] = timestep.to(device) if isinstance(timestep, torch.Tensor) and timestep.dim() else timestep
        agree(run(unet, values), run(stock, values))
    assert (state(unet).captured, state(unet).replays) == (1, 2)


def variants(inputs):
    x, text = inputs["sample"], inputs["encoder_hidden_states"]
    yield {**inputs, "sample": torch.cat([x, x])[:, :, :8], "encoder_hidden_states": torch.cat([text, text])}
    yield {**inputs, "encoder_hidden_states": text[:, :5]}
    yield {**inputs, "encoder_hidden_states": text[:, :1].expand(-1, 4, -1)}
    yield {**inputs, "sample": x.contiguous(memory_format=torch.channels_last)}
    yield {**inputs, "encoder_attention_mask": torch.ones(1, text.shape[1], device=x.device)}
    yield {**inputs, "cross_attention_kwargs": {"scale": 0.5}}


def test_each_kind_of_call_has_a_graph_of_its_own():
    unet, stock, inputs = make()
    lora(unet), lora(stock)
    for _ in range(3):
        for values in (inputs, *variants(inputs)):
            agree(run(unet, values), run(stock, values))
    assert (state(unet).captured, state(unet).replays) == (7, 14)


def test_nested_arguments_of_a_controlnet_and_sdxl():
    unet, stock, inputs = make(model="tiny_xl")
    for i in range(3):
        with torch.no_grad():
            controlnet = build_controlnet("tiny_xl", torch.float32, "cpu")
            image = torch.randn(1, 3, 64, 64, generator=torch.Generator().manual_seed(i))
            down, mid = controlnet(**inputs, controlnet_cond=image, return_dict=False)
        values = {**inputs, "down_block_additional_residuals": tuple(down), "mid_block_additional_residual": mid}
        agree(run(unet, values), run(stock, values))
    assert state(unet).replays == 2


def test_results_stay_what_they_were():
    unet, _, inputs = make()
    run(unet, inputs)
    first = unet_output = run(unet, inputs)
    kept = first.clone()
    second = run(unet, {**inputs, "sample": inputs["sample"] * 2})
    assert state(unet).replays == 2
    assert torch.equal(first, kept)
    assert not torch.equal(second, unet_output)


def test_both_kinds_of_output():
    unet, stock, inputs = make()
    for _ in range(3):
        with torch.no_grad():
            output, (sample,) = unet(**inputs), unet(**inputs, return_dict=False)
            assert type(output) is type(stock(**inputs))
            assert torch.equal(output.sample, output[0])
            agree(output.sample, sample)
    assert state(unet).replays == 4


@pytest.mark.parametrize("device", DEVICES)
def test_vae_and_controlnet(device):
    vae, controlnet = build_vae("tiny", torch.float32, device), build_controlnet("tiny", torch.float32, device)
    inputs = unet_inputs("tiny", size=64, batch=1, dtype=torch.float32, device=device, seed=0)
    calls = {
        vae: lambda m: m(torch.ones(1, 3, 32, 32, device=device)).sample,
        controlnet: lambda m: m(**inputs, controlnet_cond=torch.ones(1, 3, 64, 64, device=device))[1],
    }
    for model, call in calls.items():
        stock = copy.deepcopy(model)
        sfastgn.optimize(model)
        if device == "cpu":
            cuda_graphs.install(model, "auto", TapeBackend())
        with torch.no_grad():
            for _ in range(3):
                agree(call(model), call(stock))
        assert {g.replays for g in sfastgn.report(model).graphs} == {2}


# ---- what runs without a graph, and why


def reasons_of(unet):
    return " | ".join(state(unet).eager)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        pytest.param(lambda u: u.train(), "training mode", id="training"),
        pytest.param(lambda u: u.mid_block.register_forward_pre_hook(lambda m, a: None), "a forward hook on mid_block", id="hook"),
        pytest.param(lambda u: cpu_offload(u, torch.device("cpu")), "accelerate's hooks", id="offload"),
        pytest.param(lambda u: setattr(u.mid_block, "forward", u.mid_block.__class__.forward.__get__(u.mid_block).__call__), "replaced the forward of mid_block", id="forward"),
        pytest.param(lambda u: u.add_module("extra", Foreign()), "extra has Foreign of ", id="foreign"),
    ],
)  # fmt: skip
def test_not_captured_with_a_reason(spoil, reason):
    unet, stock, inputs = make(mode=True)
    spoil(unet)
    for _ in range(2):
        agree(run(unet, inputs), run(stock, inputs))
    assert state(unet).captured == 0
    assert reason in reasons_of(unet)
    assert reason in str(sfastgn.report(unet))


class Foreign(nn.Module):
    pass


def test_gradients_are_as_without_graphs():
    unet, stock, inputs = make(mode=True)
    for model in (unet, stock):
        model(**inputs).sample.square().mean().backward()
    agree(unet.conv_in.weight.grad, stock.conv_in.weight.grad)
    assert "gradients are enabled" in reasons_of(unet)


def test_a_failed_capture_is_not_tried_again():
    unet, stock, inputs = make()
    backend = TapeBackend()
    cuda_graphs.install(unet, "auto", backend)
    backend.fail = RuntimeError("operation not permitted when stream is capturing\nmore")
    for _ in range(2):
        agree(run(unet, inputs), run(stock, inputs))
    backend.fail = None
    run(unet, inputs)
    assert backend.captures == 0
    assert "capture failed: RuntimeError: operation not permitted when stream is capturing" in reasons_of(unet)
    one_parameter(unet)
    for _ in range(2):
        run(unet, inputs)
    assert backend.captures == 1


def test_within_the_capture_of_someone_else():
    unet, _, inputs = make(mode=True)
    backend = TapeBackend()
    cuda_graphs.install(unet, True, backend)
    backend.busy = True
    run(unet, inputs)
    assert "captured by other code" in reasons_of(unet)
    assert backend.captures == 0


def test_a_forward_that_counts_its_calls():
    unet, stock, inputs = make(mode=True)
    block = unet.mid_block.resnets[0].__class__

    class Counting(block):
        def forward(self, *args, **kwargs):
            self.calls = getattr(self, "calls", 0) + 1
            return super().forward(*args, **kwargs)

    Counting.__module__ = block.__module__
    unet.mid_block.resnets[0].__class__ = Counting
    for _ in range(6):
        agree(run(unet, inputs), run(stock, inputs))
    assert unet.mid_block.resnets[0].calls >= 6
    assert state(unet).captured == 0


@pytest.mark.parametrize(("mode", "captured"), [("auto", 1), (True, 1), (False, 0)])
def test_modes(mode, captured):
    unet, _, inputs = make(mode=mode)
    for call in range(3):
        run(unet, inputs)
        if mode is not False and call == 0:
            assert state(unet).captured == (mode is True)
    assert state(unet).captured == captured


@pytest.mark.parametrize("bad", ["always", None, 3], ids=repr)
def test_no_such_mode(bad):
    with pytest.raises(ValueError, match=r"^sfastgn\.optimize: cuda_graphs=.* must be"):
        sfastgn.optimize(nn.Sequential(nn.GroupNorm(1, 2)), cuda_graphs=bad)


def test_on_a_cpu_nothing_is_captured():
    unet = sfastgn.optimize(build_unet("tiny", torch.float32, "cpu"), cuda_graphs=True)
    run(unet, unet_inputs("tiny", size=64, batch=1, dtype=torch.float32, device="cpu", seed=0))
    assert state(unet).eager == {"there are no graphs on cpu": 1}


# ---- memory, copies, undo, threads


def test_the_number_of_graphs_is_bounded():
    unet, _, inputs = make(mode=True)
    text = inputs["encoder_hidden_states"]
    for tokens in range(1, graphed_forward.MAX_GRAPHS + 3):
        run(unet, {**inputs, "encoder_hidden_states": text[:, :tokens]})
    assert (state(unet).alive, state(unet).dropped) == (graphed_forward.MAX_GRAPHS, 2)
    assert sfastgn.report(unet).graph_memory_bytes == 1 << 20


COPIES = [
    pytest.param(copy.deepcopy, id="deepcopy"),
    pytest.param(lambda m: pickle.loads(pickle.dumps(m)), id="pickle"),
]


@pytest.mark.parametrize("copied", COPIES)
def test_a_copy_is_independent(copied):
    unet, stock, inputs = make()
    for _ in range(3):
        run(unet, inputs)
    twin = copied(unet)
    one_parameter(unet)
    for _ in range(3):
        agree(run(twin, inputs), run(stock, inputs))
    assert unet.forward.module is unet
    assert twin.forward.module is twin


def test_saved_models_are_stock(tmp_path):
    unet, _, inputs = make()
    for _ in range(2):
        run(unet, inputs)
    unet.save_pretrained(tmp_path)
    loaded = type(unet).from_pretrained(tmp_path)
    agree(run(loaded, inputs), run(unet, inputs))
    assert "forward" not in vars(loaded)


def test_restore_is_exact():
    unet, stock, inputs = make()
    for _ in range(3):
        run(unet, inputs)
    sfastgn.restore(unet)
    assert set(vars(unet)) == set(vars(stock))
    assert torch.equal(run(unet, inputs), run(stock, inputs))
    assert all(g.mode == "False" for g in sfastgn.report(unet).graphs)


@pytest.mark.parametrize("order", ["restore-first", "hooks-first"])
def test_restore_beneath_offload_hooks(order):
    unet, stock, inputs = make()
    cpu_offload(unet, torch.device("cpu"))
    if order == "restore-first":
        sfastgn.restore(unet)
        remove_hook_from_submodules(unet)
    else:
        remove_hook_from_submodules(unet)
        sfastgn.restore(unet)
    assert not isinstance(vars(unet).get("forward"), graphed_forward.GraphedForward)
    assert "_old_forward" not in vars(unet)


def test_restore_below_a_wrapper_of_other_code():
    unet, stock, inputs = make(mode=True)
    graphed = unet.forward
    unet.forward = lambda *args, **kwargs: graphed(*args, **kwargs)
    run(unet, inputs)
    sfastgn.restore(unet)
    one_parameter(unet), one_parameter(stock)
    agree(run(unet, inputs), run(stock, inputs))
    assert graphed.eager["they are turned off"] == 1


def test_a_dropped_model_goes_at_once():
    unet, _, inputs = make()
    for _ in range(3):
        run(unet, inputs)
    weight = weakref.ref(unet.conv_in.weight)
    gc.disable()
    try:
        del unet
        assert weight() is None
    finally:
        gc.enable()


def test_the_signature_is_the_stock_one():
    unet, stock, _ = make()
    assert inspect.signature(unet.forward) == inspect.signature(stock.forward)


def test_threads_do_not_mix_their_values():
    unet, stock, inputs = make()
    samples = [torch.randn_like(inputs["sample"]) for _ in range(3)]
    wrong = []

    def work(sample):
        values = {**inputs, "sample": sample}
        expected = run(stock, values)
        wrong.extend(i for i in range(4) if not torch.allclose(run(unet, values), expected, atol=1e-3))

    threads = [threading.Thread(target=work, args=(sample,)) for sample in samples]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert not wrong
    assert state(unet).captured == 1


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"])
def test_modes_of_pytorch_do_not_share_graphs(mode):
    unet, stock, inputs = make()
    for context in (torch.no_grad, torch.inference_mode, mode, mode, torch.inference_mode, torch.no_grad):
        with context():
            output = unet(**inputs).sample
            assert output.is_inference() == (context is torch.inference_mode)
            agree(output, stock(**inputs).sample)
