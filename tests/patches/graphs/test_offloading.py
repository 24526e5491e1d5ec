"""Models that accelerate offloads as a whole: graphs for the calls of an image, until the weights move."""

import copy

import pytest
import torch
from accelerate import cpu_offload_with_hook
from accelerate.hooks import remove_hook_from_module
from transformers import CLIPTextConfig, CLIPTextModel

import sdfastgn
from sdfastgn.models.pipelines import build_pipeline
from tests.patches.graphs.cases import agree, built, make, optimized, reasons_of, run, same_results, state
from tests.small_pipelines import SIZE, generate, psnr

pytestmark = pytest.mark.fused_on_cpu

CPU = torch.device("cpu")


def offloaded(when):
    """(optimized UNet with an offload hook, stock UNet, arguments). ``when``: the hook's turn."""
    unet, stock, inputs = make()
    if when == "before":
        unet = copy.deepcopy(built("tiny", "cpu"))
        cpu_offload_with_hook(unet, CPU)
        optimized(unet)
    else:
        cpu_offload_with_hook(unet, CPU)
    return unet, stock, inputs


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_offloaded_model_has_graphs(when):
    unet, stock, inputs = offloaded(when)
    same_results(unet, stock, inputs, calls=4)
    assert (state(unet).captured, state(unet).replays) == (1, 3)
    assert "other code" not in str(sdfastgn.report(unet))


@pytest.mark.parametrize("when", ["before", "after"])
def test_the_hook_runs_at_each_call(when):
    unet, _, inputs = offloaded(when)
    calls = []
    before = unet._hf_hook.pre_forward
    unet._hf_hook.pre_forward = lambda *args, **kwargs: calls.append(1) or before(*args, **kwargs)
    run(unet, inputs, calls=3)
    assert state(unet).replays == 2
    assert len(calls) == 3


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_pipeline_renews_the_hooks_after_each_image(when):
    unet, stock, inputs = offloaded(when)
    for _ in range(3):
        same_results(unet, stock, inputs, calls=2)
        remove_hook_from_module(unet)
        cpu_offload_with_hook(unet, CPU)
    assert (state(unet).captured, state(unet).replays) == (1, 5)


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
    config = CLIPTextConfig(
        vocab_size=20, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    encoder = CLIPTextModel(config).eval()
    cpu_offload_with_hook(encoder, CPU)
    optimized(encoder, mode=True)
    with torch.no_grad():
        encoder(torch.arange(5)[None])
    assert (state(encoder).captured, reasons_of(encoder)) == (
        0,
        "it is offloaded, and an image calls it only once or twice",
    )


@pytest.mark.gpu
@pytest.mark.parametrize("when", ["before", "after"])
def test_each_image_of_an_offloaded_pipeline_has_graphs(when):
    steps = 6  # the scheduler calls the UNet once more
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
        assert (unet.captured, unet.alive, unet.replays) == (image, 0, image * steps)
