"""Models that accelerate offloads as a whole: graphs for the calls of an image, until the weights move."""

import copy
from dataclasses import replace

import pytest
import torch
from accelerate import cpu_offload_with_hook
from accelerate.hooks import remove_hook_from_module

import sdfastgn
from sdfastgn.models.pipelines import build_pipeline
from sdfastgn.patches.graphs.policy import FEW_CALLS
from tests.patches.graphs.cases import agree, built, make, optimized, reasons_of, run, same_results, state
from tests.small_pipelines import SIZE, generate, psnr, text_encoder

pytestmark = pytest.mark.fused_on_cpu

CPU = torch.device("cpu")


def offloaded(when, mode=True):
    """(optimized UNet with an offload hook, stock UNet, arguments). ``when``: the hook's turn."""
    unet, stock, inputs = make(mode=mode)
    if when == "before":
        unet = copy.deepcopy(built("tiny", "cpu"))
        cpu_offload_with_hook(unet, CPU)
        optimized(unet, mode)
    else:
        cpu_offload_with_hook(unet, CPU)
    return unet, stock, inputs


@pytest.mark.drawn(1)
@pytest.mark.parametrize("when", ["before", "after"])
def test_an_offloaded_model_has_graphs_after_several_calls(when):
    unet, stock, inputs = offloaded(when, mode="auto")
    same_results(unet, stock, inputs, calls=9)
    assert (state(unet).captured, state(unet).replays) == (1, 3)
    assert state(unet).eager == {"first call of its kind": 1, FEW_CALLS: 5}
    assert "other code" not in str(sdfastgn.report(unet))


@pytest.mark.slow
def test_calls_count_from_the_last_move():
    """The weights move after each six calls, so no call is the seventh since a move, and none is captured."""
    unet, stock, inputs = offloaded("after", mode="auto")
    for _ in range(3):
        same_results(unet, stock, inputs, calls=6)
        for parameter in unet.parameters():
            parameter.data = parameter.data.clone()
    assert state(unet).captured == 0
    assert state(unet).eager == {"first call of its kind": 3, FEW_CALLS: 15}


def test_few_calls_are_no_reason_to_warn():
    unet, _, inputs = offloaded("after", mode="auto")
    run(unet, inputs, calls=3)
    report = replace(sdfastgn.report(unet), runs_kernels=True)
    assert "without CUDA graphs" not in str(report)


@pytest.mark.parametrize("when", ["before", "after"])
def test_the_hook_runs_at_each_call(when):
    unet, _, inputs = offloaded(when)
    calls = []
    before = unet._hf_hook.pre_forward
    unet._hf_hook.pre_forward = lambda *args, **kwargs: calls.append(1) or before(*args, **kwargs)
    run(unet, inputs, calls=3)
    assert state(unet).replays == 3
    assert len(calls) == 3


@pytest.mark.drawn(1)
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_pipeline_renews_the_hooks_after_each_image(when):
    unet, stock, inputs = offloaded(when)
    for _ in range(3):
        same_results(unet, stock, inputs, calls=2)
        remove_hook_from_module(unet)
        cpu_offload_with_hook(unet, CPU)
    assert (state(unet).captured, state(unet).replays) == (1, 6)


@pytest.mark.drawn(1)
@pytest.mark.parametrize("first", ["hook", "sdfastgn"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_both_are_removed_in_any_order(when, first):
    unet, stock, inputs = offloaded(when)
    run(unet, inputs, calls=2)
    for what in ("hook", "sdfastgn") if first == "hook" else ("sdfastgn", "hook"):
        remove_hook_from_module(unet) if what == "hook" else sdfastgn.restore(unet)
    assert unet.forward == type(unet).forward.__get__(unet)
    assert "_old_forward" not in vars(unet)
    assert torch.equal(run(unet, inputs), run(stock, inputs))


def test_a_change_below_the_hook_is_noticed():
    unet, stock, inputs = offloaded("after")
    run(unet, inputs, calls=2)
    for model in (unet, stock):
        model.conv_out.weight = torch.nn.Parameter(model.conv_out.weight.detach() * 2)
    agree(run(unet, inputs), run(stock, inputs))
    assert state(unet).dropped == 1


def test_a_forward_around_the_hook_is_other_code():
    unet, _, inputs = make(mode=False)
    cpu_offload_with_hook(unet, CPU)
    unet._old_forward = unet._old_forward.__call__
    optimized(unet, mode=True)
    run(unet, inputs, calls=2)
    assert state(unet).captured == 0
    assert reasons_of(unet) == "other code replaced its forward"


def test_an_offloaded_text_encoder_has_none():
    """It would be captured at the second of two calls, and then leave the GPU."""
    encoder = text_encoder()
    cpu_offload_with_hook(encoder, CPU)
    optimized(encoder)
    with torch.no_grad():
        for _ in range(2):
            encoder(torch.arange(5)[None])
    assert (state(encoder).captured, reasons_of(encoder)) == (0, f"first call of its kind | {FEW_CALLS}")


@pytest.mark.gpu
@pytest.mark.parametrize("when", ["before", "after"])
def test_each_image_of_an_offloaded_pipeline_has_graphs(when):
    steps = 12  # the scheduler calls the UNet once more
    pipe = build_pipeline("tiny", dtype=torch.float16, device="cuda")
    expected = generate(pipe, num_inference_steps=steps, **SIZE)
    pipe.to("cpu")
    if when == "after":
        sdfastgn.optimize(pipe)
    pipe.enable_model_cpu_offload()
    if when == "before":
        sdfastgn.optimize(pipe)
    for image in range(1, 4):
        assert psnr(generate(pipe, num_inference_steps=steps, **SIZE), expected) > 35
        unet = state(pipe.unet)
        assert (unet.captured, unet.alive, unet.replays) == (image, 0, image * 7)
