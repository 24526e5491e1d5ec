"""CUDA graphs of training: they give the losses, gradients and weights of eager calls, or run eagerly."""

from __future__ import annotations

import copy
import functools
import pickle
import threading
import time
from functools import partial
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig
from torch.utils.checkpoint import checkpoint

import sdfastgn
from sdfastgn.patches.graphs import install as cuda_graphs
from sdfastgn.patches.graphs import training
from tests.controlnet import build_controlnet
from tests.copies import Original
from tests.patches.graphs.cases import DEVICES, built, make, optimized, original, settled
from tests.patches.graphs.tape import TapeBackend, TapeHandle

pytestmark = pytest.mark.fused_on_cpu

STEPS = 6


def lora(unet, name="a", seed=5):
    torch.manual_seed(seed)
    unet.add_adapter(
        LoraConfig(r=2, target_modules=["to_q", "to_v", "conv1"], init_lora_weights=False), adapter_name=name
    )


def with_lora(unet):
    unet.requires_grad_(False)
    lora(unet)


# What is trained -> function that prepares a UNet for it.
TRAINED = {"lora": with_lora, "all": lambda unet: None}


@functools.cache
def prepared(device, prepare):
    """The UNet "tiny" after ``prepare``, in train mode."""
    unet = original("tiny", device).copy()
    prepare(unet)
    return Original(unet.train())


def pair(device="cpu", prepare=with_lora):
    """(UNet with graphs of training, the same UNet optimized without graphs, function: seed -> batch)"""
    unet, other = (prepared(device, prepare).copy() for _ in range(2))
    optimized(unet, "training")
    sdfastgn.optimize(other, cuda_graphs=False)

    def batch(seed, **more):
        generator = torch.Generator().manual_seed(seed)
        draw = lambda *shape: torch.randn(*shape, generator=generator).to(device)  # noqa: E731
        width = unet.config.cross_attention_dim
        steps = torch.randint(0, 1000, (2,), generator=generator).to(device)
        return {
            "sample": draw(2, 4, 8, 8),
            "timestep": steps,
            "encoder_hidden_states": draw(2, 7, width),
        } | more

    return unet, other, batch


def trained_state(model):
    """What the report says about the graphs of calls with gradients."""
    *_, (graphs, _) = cuda_graphs.inspect(model)
    return graphs


def parameters(model):
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def loss_of(model, inputs):
    return F.mse_loss(model(**inputs).sample, torch.zeros_like(inputs["sample"]) + 0.3)


def gradients(model, *losses):
    """The gradients of the sum of ``losses``, by parameter."""
    model.zero_grad(set_to_none=True)
    for loss in losses:
        loss.backward()
    return {name: None if p.grad is None else p.grad.clone() for name, p in parameters(model).items()}


def same(found, expected):
    assert found.keys() == expected.keys()
    assert any(value is not None for value in expected.values())
    for name, value in expected.items():
        assert (found[name] is None) == (value is None), name
        if value is not None:
            torch.testing.assert_close(found[name], value, atol=2e-5, rtol=2e-3)


def warm(*models, batch, calls=3):
    """Train until the calls are replayed."""
    for number in range(calls):
        for model in models:
            gradients(model, loss_of(model, batch(number)))


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("what", TRAINED)
@pytest.mark.parametrize("set_to_none", [False, True])
def test_a_training_run_is_as_without_graphs(what, set_to_none, device):
    unet, other, batch = pair(device, TRAINED[what])
    losses = []
    for model in (unet, other):
        optimizer = torch.optim.AdamW(list(parameters(model).values()), lr=1e-3)
        losses.append([])
        for number in range(STEPS):
            loss = loss_of(model, batch(number))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
            losses[-1].append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=2e-3)
    same(dict(parameters(unet)), dict(parameters(other)))
    state = trained_state(unet)
    assert (state.captured, state.replays) == (1, STEPS - 1)
    assert state.eager == {"first call of its kind": 1}


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_gradients_are_accumulated(device):
    unet, other, batch = pair(device)
    warm(unet, other, batch=batch)
    found = []
    for model in (unet, other):
        model.zero_grad()
        for number in (7, 8):
            (loss_of(model, batch(number)) / 2).backward()
        found.append({name: p.grad for name, p in parameters(model).items()})
    same(*found)


@pytest.mark.slow
def test_two_calls_before_their_backwards():
    unet, other, batch = pair()
    warm(unet, other, batch=batch)
    replays = trained_state(unet).replays
    found = [gradients(m, *[loss_of(m, batch(number)) for number in (7, 8)]) for m in (unet, other)]
    same(*found)
    state = trained_state(unet)
    assert state.replays == replays + 1
    assert state.eager["the backward of an earlier call has not run"] == 1


@pytest.mark.slow
def test_a_call_without_a_backward_frees_the_graph():
    unet, other, batch = pair()
    warm(unet, other, batch=batch)
    replays = trained_state(unet).replays
    for number in range(3):
        found, expected = (loss_of(model, batch(number)).item() for model in (unet, other))
        assert found == pytest.approx(expected, rel=1e-3)
    assert trained_state(unet).replays == replays + 3


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("is_checkpointed", [False, True], ids=["plain", "checkpointed"])
@pytest.mark.parametrize("what", TRAINED)
def test_a_backward_that_runs_again(what, is_checkpointed, device):
    """On a GPU the first backward overwrites what the forward has saved."""
    unet, other, batch = pair(device, TRAINED[what])
    for model in (unet, other) if is_checkpointed else ():
        model.enable_gradient_checkpointing()
    warm(unet, other, batch=batch)
    replays = trained_state(unet).replays
    found = {unet: [], other: []}
    for model, those in found.items():
        for number in (7, 8):
            sample = model(**batch(number)).sample
            losses = [F.mse_loss(sample, torch.ones_like(sample)), sample.abs().mean(), sample.sin().mean()]
            model.zero_grad()
            for loss in losses:  # each gradient is added to those before it
                loss.backward(retain_graph=True)
                those.append({name: p.grad.clone() for name, p in parameters(model).items()})
            wanted = parameters(model)
            those.append(
                dict(zip(wanted, torch.autograd.grad(losses[0], list(wanted.values())), strict=True))
            )
    for a, b in zip(found[unet], found[other], strict=True):
        same(a, b)
    assert trained_state(unet).replays == replays + 2


@pytest.mark.slow
def test_a_backward_that_runs_again_after_another_call():
    unet, other, batch = pair()
    warm(unet, other, batch=batch)
    loss = loss_of(unet, batch(7))
    loss.backward(retain_graph=True)
    same(*(gradients(model, loss_of(model, batch(8))) for model in (unet, other)))
    before = {name: p.grad.clone() for name, p in parameters(unet).items()}
    with pytest.raises(RuntimeError, match=r'the model was called since then.*cuda_graphs="auto"'):
        loss.backward()
    same({name: p.grad for name, p in parameters(unet).items()}, before)


@pytest.mark.slow
def test_a_backward_that_runs_again_after_a_call_that_failed(monkeypatch):
    """The failed call has overwritten the arguments that the forward would read again."""
    unet, _, batch = pair()
    warm(unet, batch=batch)
    loss = loss_of(unet, batch(7))
    loss.backward(retain_graph=True)
    with monkeypatch.context() as patched:
        patched.setattr(TapeHandle, "replay", mock.Mock(side_effect=RuntimeError("no replay")))
        with pytest.raises(RuntimeError, match="no replay"):
            loss_of(unet, batch(8))
    with pytest.raises(RuntimeError, match="the model was called since then"):
        loss.backward()


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_losses_of_single_outputs(device):
    """As in eager calls, a parameter that does not affect the loss gets no gradient, and not zeros."""
    found = []
    for mode in ("training", False):
        controlnet = build_controlnet("tiny", torch.float32, device).train()
        optimized(controlnet, mode)
        inputs = {**make(device)[2], "controlnet_cond": torch.ones(1, 3, 64, 64, device=device)}
        call = partial(controlnet, **inputs, return_dict=False)
        for _ in range(3):
            down, mid = call()
            gradients(controlnet, sum(output.square().mean() for output in (*down, mid)))
        down, mid = call()
        losses = [output.square().mean() for output in (mid, down[0], down[-1])]
        wanted = parameters(controlnet)
        for loss in losses:
            grads = torch.autograd.grad(loss, list(wanted.values()), retain_graph=True, allow_unused=True)
            found.append(dict(zip(wanted, grads, strict=True)))
        controlnet.zero_grad()
        for loss in losses:
            loss.backward(retain_graph=True)
            found.append({name: None if p.grad is None else p.grad.clone() for name, p in wanted.items()})
        if mode:
            assert trained_state(controlnet).replays == 3
    for a, b in zip(found[:6], found[6:], strict=True):
        same(a, b)
        assert any(value is None for value in b.values())


@pytest.mark.gpu
def test_a_backward_while_another_thread_captures(monkeypatch):
    """The backward waits in the thread that runs all backwards of the GPU. The capture must not need it."""
    (unet, other, batch), (captured, expected, _) = pair("cuda"), pair("cuda")
    warm(unet, other, batch=batch)
    warm(captured, expected, batch=batch, calls=1)
    loss = loss_of(unet, batch(7))
    torch.cuda.synchronize()
    holds_lock, run, found = threading.Event(), training._gradients, []

    def late(*arguments):
        holds_lock.set()
        time.sleep(0.3)  # until the backward of the other thread waits for the lock
        return run(*arguments)

    monkeypatch.setattr(training, "_gradients", late)
    thread = threading.Thread(target=lambda: found.append(gradients(captured, loss_of(captured, batch(8)))))
    thread.start()
    holds_lock.wait(60)
    same(gradients(unet, loss), gradients(other, loss_of(other, batch(7))))
    thread.join(60)
    same(*found, gradients(expected, loss_of(expected, batch(8))))
    assert trained_state(captured).replays == 1


@pytest.mark.slow
def test_no_second_derivative():
    unet, _, batch = pair()
    warm(unet, batch=batch)
    (grad,) = torch.autograd.grad(
        loss_of(unet, batch(7)), next(iter(parameters(unet).values())), create_graph=True
    )
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_a_write_between_a_call_and_its_backward_is_an_error():
    unet, _, batch = pair()
    warm(unet, batch=batch)
    loss = loss_of(unet, batch(7))
    with torch.no_grad():
        unet.conv_in.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.slow
def test_weights_that_move_between_a_call_and_its_backward_are_an_error():
    unet, _, batch = pair()
    warm(unet, batch=batch)
    loss = loss_of(unet, batch(7))
    unet.conv_in.weight.data = unet.conv_in.weight.data.clone()
    with pytest.raises(RuntimeError, match="or moved"):
        loss.backward()


def unfrozen(unet):
    unet.conv_in.weight.requires_grad_(True)


def scaled(unet):
    for module in unet.modules():
        if hasattr(module, "set_scale"):
            module.set_scale("a", 0.3)


CHANGES = {
    "unfrozen": unfrozen,
    "frozen": lambda unet: next(iter(parameters(unet).values())).requires_grad_(False),
    "scaled": scaled,
    "second-adapter": lambda unet: lora(unet, "b", 6),
    "attribute": lambda unet: setattr(unet.mid_block.resnets[0], "output_scale_factor", 2.0),
    "eval": lambda unet: unet.eval(),
    "checkpointing": lambda unet: unet.enable_gradient_checkpointing(),
}


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_the_model_shows_in_the_next_step(change, device):
    unet, other, batch = pair(device)
    warm(unet, other, batch=batch)
    for model in (unet, other):
        CHANGES[change](model)
    for number in range(3):
        same(*(gradients(model, loss_of(model, batch(number))) for model in (unet, other)))
    assert trained_state(unet).captured == 2


@pytest.mark.slow
def test_arguments_that_require_gradients():
    unet, other, batch = pair()
    warm(unet, other, batch=batch)
    found = []
    for model in (unet, other):
        for number in range(3):
            inputs = batch(number)
            inputs["encoder_hidden_states"].requires_grad_(True)
            loss_of(model, inputs).backward()
        found.append({"text": inputs["encoder_hidden_states"].grad})
    same(*found)
    assert trained_state(unet).captured == 2


@pytest.mark.slow
def test_under_autocast():
    unet, other, batch = pair()
    found = []
    for model in (unet, other):
        for number in range(4):
            with torch.autocast("cpu", torch.bfloat16):
                loss = loss_of(model, batch(number))
            found.append(gradients(model, loss))
    for a, b in zip(found[:4], found[4:], strict=True):
        assert a.keys() == b.keys()
        # While the CPU's backend records a call, peft's own code runs the adapters, and rounds more often
        # than ``trained_adapters.py``.
        difference, whole = (
            torch.stack([t.norm() for t in those]).norm()
            for those in ([a[name] - value for name, value in b.items()], b.values())
        )
        assert difference <= 0.03 * whole
    assert trained_state(unet).replays == 3


@pytest.mark.slow
def test_calls_without_gradients_between_steps():
    unet, other, batch = pair()
    for number in range(4):
        same(*(gradients(model, loss_of(model, batch(number))) for model in (unet, other)))
        for model in (unet, other):
            model.eval()
        with torch.no_grad():
            a, b = (model(**batch(number)).sample for model in (unet, other))
        torch.testing.assert_close(a, b, atol=2e-4, rtol=2e-3)
        for model in (unet, other):
            model.train()
    inference, training = sdfastgn.report(unet).graphs
    assert (inference.replays, training.replays) == (3, 3)
    assert training.path == "UNet2DConditionModel, calls with gradients"
    assert sdfastgn.report(unet).graph_memory_bytes > 0


def dropout(unet):
    unet.mid_block.resnets[0].dropout.p = 0.5


def hooked(unet):
    unet.mid_block.register_full_backward_hook(lambda *_: None)


def checkpointed_dropout(unet):
    dropout(unet)
    unet.enable_gradient_checkpointing()


def own_checkpointing(unet):
    unet.enable_gradient_checkpointing(lambda block, *args: checkpoint(block, *args, use_reentrant=False))


def checkpointing_with_options(unet):
    options = {"use_reentrant": False, "preserve_rng_state": False}
    unet.enable_gradient_checkpointing(partial(checkpoint, **options))


REASONS = [
    (dropout, "random numbers"),
    (checkpointed_dropout, "random numbers"),
    (own_checkpointing, "gradient_checkpointing_func"),
    (checkpointing_with_options, "gradient checkpointing is unknown"),
    (hooked, "backward hooks"),
]


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("change", "reason"), REASONS)
def test_some_models_run_eagerly_for_a_reason(change, reason, device):
    unet, other, batch = pair(device)
    for model in (unet, other):
        change(model)
    for number in range(3):
        found = []
        for model in (unet, other):
            torch.manual_seed(number)
            found.append(gradients(model, loss_of(model, batch(number))))
        same(*found)
    assert any(reason in text for text in trained_state(unet).eager)
    assert trained_state(unet).replays == 0


reentrant = partial(checkpoint, use_reentrant=True)


class Captures(TapeBackend):
    """Like a CUDA graph, it refuses to read the state of a random generator. Notes the sizes of graphs."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def capture(self, fn, pool=None):
        with mock.patch.object(torch, "get_rng_state", side_effect=RuntimeError("in a capture")):
            handle = super().capture(fn, pool)
        self.sizes.append(len(handle.entries))
        return handle


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("function", [None, reentrant], ids=["diffusers", "reentrant"])
def test_gradient_checkpointing(function, device):
    unet, other, batch = pair(device)
    sdfastgn.restore(unet)
    backend = Captures()
    optimized(unet, "training", backend)
    for is_checkpointed in (False, True):
        if is_checkpointed:
            for model in (unet, other):
                model.enable_gradient_checkpointing(function)
        for number in range(3):
            found = []
            for model in (unet, other):
                inputs = batch(number)
                inputs["sample"].requires_grad_(True)
                found.append(gradients(model, loss_of(model, inputs)) | {"sample": inputs["sample"].grad})
            same(*found)
    assert (trained_state(unet).captured, trained_state(unet).replays) == (2, 4)
    if device == "cpu":
        forward, backward, checkpointed, recomputed = backend.sizes
        assert checkpointed <= forward
        assert recomputed > backward + 0.5 * forward


@pytest.mark.slow
def test_reentrant_checkpointing_gives_no_gradient_where_no_argument_requires_one():
    def prepare(unet):
        unet.conv_in.requires_grad_(False)
        unet.time_embedding.requires_grad_(False)
        unet.enable_gradient_checkpointing(reentrant)

    unet, other, batch = pair(prepare=prepare)
    for number in range(3):
        found, expected = (gradients(model, loss_of(model, batch(number))) for model in (unet, other))
        same(found, expected)
        assert expected["down_blocks.0.resnets.0.conv1.weight"] is None
    assert trained_state(unet).replays == 2


@pytest.mark.gpu
def test_graphs_with_gradient_checkpointing_take_less_memory():
    sizes = []
    for is_checkpointed in (False, True):
        unet, _, batch = pair("cuda")
        if is_checkpointed:
            unet.enable_gradient_checkpointing()
        for number in range(2):
            inputs = batch(number, sample=torch.ones(2, 4, 64, 64, device="cuda"))
            gradients(unet, loss_of(unet, inputs))
        assert trained_state(unet).replays == 1
        sizes.append(unet.forward.training.pool_bytes().popitem()[1])
        sdfastgn.restore(unet)
        settled()
    assert sizes[1] < 0.8 * sizes[0]


@pytest.mark.slow
def test_saved_tensors_hooks_and_anomaly_mode_run_eagerly():
    unet, other, batch = pair()
    warm(unet, other, batch=batch)
    replays = trained_state(unet).replays
    for context in (torch.autograd.graph.save_on_cpu(), torch.autograd.set_detect_anomaly(True)):
        with context:
            same(*(gradients(model, loss_of(model, batch(7))) for model in (unet, other)))
    assert trained_state(unet).replays == replays


@pytest.mark.slow
def test_an_error_in_the_capture_leaves_the_step_eager():
    unet, other, batch = pair()
    sdfastgn.restore(unet)
    backend = TapeBackend()
    backend.fail = RuntimeError("no capture")
    optimized(unet, "training", backend)
    for number in range(3):
        same(*(gradients(model, loss_of(model, batch(number))) for model in (unet, other)))
    assert any("no capture" in reason for reason in trained_state(unet).eager)


@pytest.mark.drawn(1)
@pytest.mark.parametrize("fails", [False, True])
def test_a_capture_does_not_reach_the_gradients_of_the_parameters(fails, monkeypatch):
    """On a GPU a result of an earlier call, which is still alive here, would make the capture fail."""
    unet, _, batch = pair()
    before = dict(unet.named_parameters())
    reached, in_other_threads, grad = [], [], torch.autograd.grad

    def noted(ends, wanted, *rest, **options):
        in_other_threads.append(torch._C._is_multithreading_enabled())
        reached.extend(map(id, wanted))
        if fails:
            raise RuntimeError("no backward")
        return grad(ends, wanted, *rest, **options)

    monkeypatch.setattr(torch.autograd, "grad", noted)
    loss = None
    for number in range(3):
        loss = loss_of(unet, batch(number))
        loss.backward()
    assert reached
    assert not any(in_other_threads)
    assert not set(map(id, before.values())) & set(reached)
    after = dict(unet.named_parameters())
    assert list(after) == list(before)
    assert all(after[name] is parameter for name, parameter in before.items())
    assert trained_state(unet).captured == (not fails)


@pytest.mark.slow
def test_a_graph_for_each_of_four_kinds_of_calls():
    unet, other, batch = pair()
    for size in (8, 16, 24, 32, 40):
        for number in range(3):
            inputs = batch(number, sample=torch.full((1, 4, size, 8), 0.1), timestep=torch.tensor([5]))
            inputs["encoder_hidden_states"] = inputs["encoder_hidden_states"][:1]
            same(*(gradients(model, loss_of(model, inputs)) for model in (unet, other)))
    state = trained_state(unet)
    assert (state.captured, state.dropped) == (4, 0)
    assert state.eager["there are graphs for 4 other kinds of calls"] >= 1


@pytest.mark.drawn(1)
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda unet: pickle.loads(pickle.dumps(unet))])
def test_copies_train_too(copied):
    unet, other, batch = pair()
    warm(unet, other, batch=batch)
    twin = copied(unet)
    same(gradients(twin, loss_of(twin, batch(7))), gradients(other, loss_of(other, batch(7))))


def test_restored_exactly():
    unet, _, batch = pair()
    before = dict(vars(built("tiny", "cpu")))
    warm(unet, batch=batch)
    sdfastgn.restore(unet)
    assert "forward" not in vars(unet)
    assert set(vars(unet)) - {"peft_config", "_hf_peft_config_loaded"} == set(before)


@pytest.mark.slow
def test_other_modes_have_no_graphs_of_training():
    unet, _, batch = pair()
    sdfastgn.restore(unet)
    optimized(unet, "auto")
    warm(unet, batch=batch)
    (state,) = sdfastgn.report(unet).graphs
    assert (state.captured, state.eager) == (0, {"gradients are enabled": 3})


@pytest.mark.slow
def test_new_values_of_freeu_before_a_backward():
    """The backward must use the values that its own forward used, not the new ones."""
    unet, other, batch = pair()
    for model in (unet, other):
        model.enable_freeu(0.9, 0.2, 1.5, 1.6)
    warm(unet, other, batch=batch)
    found = []
    for model in (unet, other):
        first = loss_of(model, batch(7))
        model.enable_freeu(0.5, 0.7, 1.1, 2.0)
        found.append(gradients(model, first, loss_of(model, batch(8))))
    same(*found)
    same(*(gradients(model, loss_of(model, batch(9))) for model in (unet, other)))
    assert "changed from" in trained_state(unet).last_change


@pytest.mark.slow
def test_a_controlnets_scale_is_an_input():
    controlnet, other = (build_controlnet("tiny", torch.float32, "cpu").train() for _ in range(2))
    optimized(controlnet, "training")
    inputs = {**make()[2], "controlnet_cond": torch.ones(1, 3, 64, 64)}

    def loss(model, scale):
        down, mid = model(**inputs, conditioning_scale=scale, return_dict=False)
        return sum(residual.square().mean() for residual in (*down, mid))

    for scale in (0.9, 0.5, 0.25):
        same(*(gradients(model, loss(model, scale)) for model in (controlnet, other)))
    assert (trained_state(controlnet).captured, trained_state(controlnet).replays) == (1, 2)
