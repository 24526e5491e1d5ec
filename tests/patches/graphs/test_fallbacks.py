"""Calls that are not replayed: they run eagerly, and the report says why."""

import contextlib
import copy
import gc
import os
import re
import threading
import warnings
import weakref

import numpy as np
import pytest
import torch
from accelerate import cpu_offload
from diffusers import UNet2DConditionModel
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

import sdfastgn
from sdfastgn.models.architectures import build_unet, unet_inputs
from sdfastgn.patches.fp8 import models as fp8
from sdfastgn.patches.fp8 import products as fp8_products
from sdfastgn.patches.graphs import capture, install
from tests.patches import samples
from tests.patches.graphs.cases import (
    agree,
    built,
    make,
    optimized,
    reasons_of,
    replaced_parameter,
    run,
    same_results,
    state,
)
from tests.patches.graphs.tape import TapeBackend

pytestmark = pytest.mark.fused_on_cpu


class Foreign(nn.Module):
    pass


class Marked(torch.Tensor):
    pass


class Odd:
    """An object with an attribute that raises when it is read."""

    __module__ = "torch.odd"

    @property
    def func(self):
        raise LookupError("not now")


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        pytest.param(
            lambda u: u.add_module("extra", nn.BatchNorm2d(2)), "extra is in training mode", id="batch norm"
        ),
        pytest.param(
            lambda u: u.add_module("extra", spectral_norm(nn.Linear(2, 2))),
            "extra.parametrizations.weight.0 is in training mode",
            id="spectral norm",
        ),
        pytest.param(
            lambda u: u.mid_block.register_forward_pre_hook(lambda m, a: None),
            "a forward hook on mid_block",
            id="hook",
        ),
        pytest.param(lambda u: cpu_offload(u, torch.device("cpu")), "accelerate's hooks", id="offload"),
        pytest.param(
            lambda u: setattr(u.mid_block, "forward", u.mid_block.forward.__call__),
            "replaced the forward of",
            id="forward",
        ),
        pytest.param(lambda u: u.add_module("extra", Foreign()), "extra has Foreign of ", id="foreign"),
        pytest.param(
            lambda u: setattr(u, "extra", Odd()),
            "its state cannot be watched: LookupError: not now",
            id="odd",
        ),
        pytest.param(
            lambda u: setattr(u, "extra", memoryview(b"1")), "extra has a memoryview", id="no-attributes"
        ),
        pytest.param(
            lambda u: u.mid_block.compile(backend="eager"),
            "mid_block is compiled by torch.compile",
            id="compiled-block",
        ),
        pytest.param(
            lambda u: u.add_module("extra", torch.jit.script(nn.Identity())),
            "extra is compiled by TorchScript",
            id="scripted",
        ),
        pytest.param(
            lambda u: u.register_buffer("extra", torch.empty(1, device="meta")),
            "extra is a Tensor on meta",
            id="meta",
        ),
    ],
)
def test_not_captured_with_a_reason(spoil, reason):
    unet, stock, inputs = make(mode=True)
    spoil(unet)
    same_results(unet, stock, inputs, calls=2)
    assert state(unet).captured == 0
    assert reason in reasons_of(unet)
    assert reason in str(sdfastgn.report(unet))


def test_each_call_that_cannot_be_captured_runs_once():
    """Another run would show: what a hook does happens once in each call."""
    unet, _, inputs = make(mode=True)
    calls = []
    unet.mid_block.register_forward_pre_hook(lambda m, args: calls.append(1))
    run(unet, inputs, calls=3)
    assert len(calls) == 3


def test_a_model_in_training_mode():
    """diffusers' pipelines leave the UNets of AnimateDiff and ControlNet-XS in this mode."""
    unet, stock, inputs = make()
    for toggle in (nn.Module.train, nn.Module.eval):
        toggle(unet), toggle(stock)
        same_results(unet, stock, inputs, calls=3)
    assert (state(unet).captured, state(unet).eager) == (2, {"first call of its kind": 2})


@pytest.mark.slow
def test_a_dropout_in_training_mode_draws_as_without_graphs():
    unet, stock, inputs = make()
    eager = optimized(stock, mode=False)
    for model in (unet, eager):
        model.train().mid_block.resnets[0].dropout.p = 0.5
    for seed in range(4):
        outputs = []
        for model in (unet, eager):
            torch.manual_seed(seed)
            outputs.append(run(model, inputs))
        agree(*outputs)
    assert (state(unet).captured, state(unet).replays) == (1, 0)
    assert "its forward draws random numbers" in reasons_of(unet)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["compile", "wrapper", "blocks"])
def test_compiled_models(how):
    stock = samples.one_level_unet(block_out_channels=(8,), norm_num_groups=4).eval()
    compiled = unet = optimized(copy.deepcopy(stock), mode=True)
    inputs = {"sample": torch.randn(1, 4, 4, 4), "timestep": 3, "encoder_hidden_states": torch.randn(1, 2, 8)}
    if how == "compile":
        unet.compile(backend="eager", fullgraph=True)
    elif how == "wrapper":
        compiled = torch.compile(unet, backend="eager", fullgraph=True)
    else:
        if not hasattr(unet, "compile_repeated_blocks"):
            pytest.skip("diffusers 0.34 compiles no blocks")
        unet.compile_repeated_blocks(backend="eager", fullgraph=True)
    same_results(compiled, stock, inputs, calls=2)
    assert state(unet).captured == 0
    assert how == "wrapper" or "compiled by torch.compile" in reasons_of(unet)


def test_gradients_are_as_without_graphs():
    unet, stock, inputs = make(mode=True)
    for model in (unet, stock):
        model(**inputs).sample.square().mean().backward()
    agree(unet.conv_in.weight.grad, stock.conv_in.weight.grad)
    assert "gradients are enabled" in reasons_of(unet)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        pytest.param(
            lambda v: v["encoder_hidden_states"].to("meta"),
            "encoder_hidden_states has a tensor on meta",
            id="device",
        ),
        pytest.param(
            lambda v: v["encoder_hidden_states"].to_sparse(),
            "a tensor of layout torch.sparse_coo",
            id="layout",
        ),
        pytest.param(
            lambda v: v["encoder_hidden_states"].as_subclass(Marked),
            "encoder_hidden_states has a Marked",
            id="type",
        ),
    ],
)
def test_arguments_that_no_graph_takes(change, reason):
    unet, _, inputs = make(mode=True)
    with contextlib.suppress(RuntimeError, NotImplementedError):  # what the stock model does with it
        run(unet, {**inputs, "encoder_hidden_states": change(inputs)})
    assert state(unet).captured == 0
    assert reason in reasons_of(unet)


def test_a_list_that_the_forward_empties():
    """Such a list has a T2I-Adapter's residuals. A rehearsal must not take anything from it."""
    backend = TapeBackend()
    unet, stock, inputs = make(mode=True, backend=backend)
    for value in (1.0, 2.0, 3.0):
        residuals = [torch.full((1, 40, 8, 8), value), torch.ones(1, 80, 4, 4), torch.ones(1)]
        ours, theirs = list(residuals), list(residuals)
        agree(
            run(unet, {**inputs, "down_intrablock_additional_residuals": ours}),
            run(stock, {**inputs, "down_intrablock_additional_residuals": theirs}),
        )
        assert list(map(id, ours)) == list(map(id, theirs)) == [id(residuals[-1])]
    assert (state(unet).captured, state(unet).replays, backend.rehearsals) == (1, 3, 1)


def test_a_list_that_a_discarded_replay_would_empty():
    unet, stock, inputs = make(mode=True)
    for factor in (1.0, 3.0):
        unet.mid_block.resnets[0].output_scale_factor = stock.mid_block.resnets[0].output_scale_factor = (
            factor
        )
        residuals = [torch.ones(1, 40, 8, 8), torch.ones(1, 80, 4, 4)]
        ours, theirs = list(residuals), list(residuals)
        agree(
            run(unet, {**inputs, "down_intrablock_additional_residuals": ours}),
            run(stock, {**inputs, "down_intrablock_additional_residuals": theirs}),
        )
        assert ours == theirs == []
    assert state(unet).dropped == 1


@pytest.mark.parametrize(
    "change", [lambda items: items.pop(), lambda items: items.reverse(), lambda items: items.append(1)]
)
def test_a_forward_that_changes_a_list_in_another_way(change, monkeypatch):
    def forward(self, sample, timestep, encoder_hidden_states, items):
        change(items)
        return (sample + 1,)

    unet, _, inputs = make(mode=True)
    monkeypatch.setattr(UNet2DConditionModel, "forward", forward)
    with torch.no_grad():
        items, expected = ([1, 2, inputs["sample"]] for _ in range(2))
        unet(**inputs, items=items)
    change(expected)
    assert list(map(id, items)) == list(map(id, expected))
    assert "changes the lists" in reasons_of(unet)


def test_a_forward_that_writes_into_its_arguments(monkeypatch):
    def forward(self, sample, timestep, encoder_hidden_states):
        return (sample.add_(1),)

    unet, _, inputs = make(mode=True)
    monkeypatch.setattr(UNet2DConditionModel, "forward", forward)
    with torch.inference_mode():
        x = inputs["sample"].clone()
        expected = x + 2
        for _ in range(2):
            unet(**{**inputs, "sample": x})
        torch.testing.assert_close(x, expected)
    assert "writes into its arguments" in reasons_of(unet)


def test_a_failed_capture_is_not_tried_again():
    backend = TapeBackend()
    unet, stock, inputs = make(backend=backend)
    backend.fail = RuntimeError("operation not permitted when stream is capturing\nmore")
    same_results(unet, stock, inputs, calls=2)
    backend.fail = None
    run(unet, inputs)
    assert backend.captures == 0
    assert "capture failed: RuntimeError: operation not permitted when stream is capturing" in reasons_of(
        unet
    )
    replaced_parameter(unet)
    run(unet, inputs, calls=2)
    assert backend.captures == 1


def test_a_capture_that_was_not_warm_is_tried_again_after_a_call(monkeypatch):
    class Cold(TapeBackend):
        def capture(self, fn):
            if calls[0] < 2:
                raise RuntimeError("cold")
            return super().capture(fn)

    calls = [0]
    unet, stock, inputs = make(backend=Cold())
    forward = UNet2DConditionModel.forward

    def counted(self, *args, **kwargs):
        calls[0] += self is unet
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(UNet2DConditionModel, "forward", counted)
    same_results(unet, stock, inputs, calls=3)
    assert calls[0] == 3  # the first call, the one before the second capture, and that capture
    assert (state(unet).captured, state(unet).replays) == (1, 2)


def test_within_the_capture_of_someone_else():
    backend = TapeBackend()
    unet, _, inputs = make(mode=True, backend=backend)
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
    same_results(unet, stock, inputs, calls=6)
    assert unet.mid_block.resnets[0].calls >= 6
    assert state(unet).captured == 0


@pytest.mark.drawn(1)
@pytest.mark.parametrize(("mode", "captured"), [("auto", 1), (True, 1), (False, 0)])
def test_modes(mode, captured):
    unet, _, inputs = make(mode=mode)
    for call in range(3):
        run(unet, inputs)
        if mode is not False and call == 0:
            assert state(unet).captured == (mode is True)
    assert state(unet).captured == captured


@pytest.mark.parametrize(
    "bad", ["always", None, 3, 0, 1, 1.0, np.False_, np.str_("auto"), ["auto"]], ids=repr
)
def test_no_such_mode(bad):
    with pytest.raises(ValueError, match=rf"^sdfastgn\.optimize: cuda_graphs={re.escape(repr(bad))} must be"):
        sdfastgn.optimize(nn.Sequential(nn.GroupNorm(1, 2)), cuda_graphs=bad)


def test_on_a_cpu_nothing_is_captured():
    unet = sdfastgn.optimize(build_unet("tiny", torch.float32, "cpu"), cuda_graphs=True)
    run(unet, unet_inputs("tiny", size=64, batch=1, dtype=torch.float32, device="cpu", seed=0))
    assert state(unet).eager == {"there are no graphs on cpu": 1}


def with_a_graph(stock, inputs):
    """Another model with a graph, whose memory can be freed."""
    twin = optimized(copy.deepcopy(stock))
    run(twin, inputs, calls=2)
    return twin


def test_memory_of_graphs_is_given_up_where_it_is_short(monkeypatch):
    unet, stock, inputs = make()
    twin = with_a_graph(stock, inputs)
    forward, calls = UNet2DConditionModel.forward, []

    def short(self, *args, **kwargs):
        calls.append(self)
        if state(twin).alive:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(UNet2DConditionModel, "forward", short)
    agree(run(unet, inputs), run(unet, inputs))
    assert calls[:2] == [unet, unet]
    assert (state(twin).alive, state(twin).dropped) == (0, 1)
    run(twin, inputs)
    assert "memory was short" in reasons_of(twin)
    for _ in range(3):  # nor is the model captured that ran out of memory, which had no graph
        run(unet, inputs)
    assert state(unet).captured == 0
    assert "memory was short" in reasons_of(unet)
    monkeypatch.setattr(
        UNet2DConditionModel, "forward", lambda *a, **k: (_ for _ in ()).throw(torch.OutOfMemoryError("x"))
    )
    with pytest.raises(torch.OutOfMemoryError):
        run(twin, inputs)


def test_a_capture_that_failed_holds_no_memory():
    """Its memory is free while the capture is tried again, and in the eager call."""

    class Memory:
        pass

    held, alive = [], []

    class Failing(TapeBackend):
        def capture(self, fn):
            alive.append(sum(each() is not None for each in held))
            memory = Memory()
            held.append(weakref.ref(memory))
            raise torch.OutOfMemoryError("CUDA out of memory")

    unet, stock, inputs = make(backend=Failing())
    gc.disable()  # which would find it in the end
    try:
        same_results(unet, stock, inputs, calls=2)
        assert [each() for each in held] == [None] * 2
    finally:
        gc.enable()
    assert alive == [0, 0]
    assert "capture failed: OutOfMemoryError" in reasons_of(unet)


def test_a_call_made_again_has_the_arguments_of_the_first(monkeypatch):
    """Each call pops a T2I-Adapter's residuals from the caller's list."""
    unet, stock, inputs = make()
    twin = with_a_graph(stock, inputs)
    forward, failed = UNet2DConditionModel.forward, []

    def short(self, *args, **kwargs):
        output = forward(self, *args, **kwargs)
        kwargs["added_cond_kwargs"]["nested"][0].pop("once")
        if self is unet and state(twin).alive:
            failed.append(kwargs["down_intrablock_additional_residuals"])
            raise torch.OutOfMemoryError("CUDA out of memory")
        return output

    monkeypatch.setattr(UNet2DConditionModel, "forward", short)

    def arguments():
        residuals = [torch.ones(1, 40, 8, 8), torch.ones(1, 80, 4, 4), torch.ones(1)]
        return {
            **inputs,
            "down_intrablock_additional_residuals": residuals,
            "added_cond_kwargs": {"nested": ({"once": 1, "more": 2},)},
        }

    ours, theirs = arguments(), arguments()
    agree(run(unet, ours), run(stock, theirs))
    assert failed[-1] is ours["down_intrablock_additional_residuals"]
    assert (
        len(ours["down_intrablock_additional_residuals"])
        == len(theirs["down_intrablock_additional_residuals"])
        < 3
    )
    assert ours["added_cond_kwargs"] == theirs["added_cond_kwargs"] == {"nested": ({"more": 2},)}


def test_a_forked_process_waits_for_no_lock_of_its_parent(monkeypatch):
    class Backend:
        lock = threading.RLock()

    backend = Backend()
    monkeypatch.setitem(capture._backends, torch.device("cuda", 7), backend)
    held, done = threading.Event(), threading.Event()

    def hold():
        with backend.lock, capture._backends_lock:
            held.set()
            done.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(60)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python 3.12: this process has threads
        child = os.fork()
    if child == 0:
        free = backend.lock.acquire(timeout=5) and capture._backends_lock.acquire(timeout=5)
        os._exit(0 if free else 1)
    done.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_the_reason_to_leave_a_model_is_looked_for_once(monkeypatch):
    walks = []
    monkeypatch.setattr(
        install, "reason_of_cudnn", lambda modules: walks.append(list(modules)) or "it is left"
    )
    root = nn.ModuleList(copy.deepcopy(built("tiny", "cpu")) for _ in range(3))
    assert [graphs.eager for graphs, _ in install.inspect(root)] == [{"it is left": 0}] * 3
    assert walks == [list(root.modules())]


def test_a_call_that_compares_scales_of_fp8_runs_without_a_graph(monkeypatch):
    unet, stock, inputs = make()
    same_results(unet, stock, inputs, 3)
    before, copies = state(unet), []
    reasons = [fp8_products.COMPARE_REASON, None]
    monkeypatch.setattr(fp8, "reason_now", lambda model: reasons.pop(0))
    monkeypatch.setattr(fp8, "copy_counts", copies.append)
    same_results(unet, stock, inputs, 2)
    assert state(unet).eager[fp8_products.COMPARE_REASON] == 1
    assert (state(unet).replays, state(unet).captured) == (before.replays + 1, before.captured)
    assert copies == [unet]  # after the replay only
