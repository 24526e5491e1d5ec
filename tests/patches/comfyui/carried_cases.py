"""ComfyUI's autoencoders whose convolutions carry frames from chunk to chunk: what their tests share."""

import copy

import pytest
import torch
from comfy import model_management
from comfy.ldm.modules.diffusionmodules import model as comfy_model
from comfy.ops import disable_weight_init

from sdfastgn.patches.comfyui.inject import eject, inject
from tests.patches import cases
from tests.patches.comfyui.comfy_models import snapshot, with_random_parameters
from tests.patches.video_cases import hooks_see_the_same


def twins(model):
    """(injected, stock), with random parameters"""
    stock = with_random_parameters(model)
    fused = copy.deepcopy(stock)
    inject(fused)
    return fused, stock


def casting_twins(model):
    """``twins`` whose convolutions cast their weights at each call."""
    for conv in model.modules():
        if isinstance(conv, disable_weight_init.Conv3d):
            conv.comfy_cast_weights = True
    return twins(model)


def agree(models, call, *, last_is_fused=True):
    """The results agree. On a GPU a last convolution that runs stock's code returns the layout it gets."""
    ours, theirs = (call(model) for model in models)
    assert theirs.std() > 1e-2
    assert ours.stride() == theirs.stride() or not last_is_fused
    cases.agree(ours, theirs, 1e-4)


def ejected_as_before(model):
    """Ejection restores all that injection changes."""
    before = snapshot(with_random_parameters(model))
    inject(model)
    assert snapshot(model) != before
    eject(model)
    assert snapshot(model) == before


def is_stock_after_ejection(models, call):
    """Assert that after ejection the model has stock's classes, and that ``call`` returns stock's bits.

    ``models``: (injected, stock).
    """
    fused, stock = models
    expected = call(stock)
    eject(fused)
    assert [type(m) for m in fused.modules()] == [type(m) for m in stock.modules()]
    assert torch.equal(call(fused), expected)


def stops_when_interrupted(fused, call):
    model_management.interrupt_current_processing()
    with pytest.raises(model_management.InterruptProcessingException):
        call(fused)


def a_hook_sees_what_it_saw(models, layer, call):
    """``layer``: path of the layer in the decoder that gets a hook."""
    hooks_see_the_same(
        models, f"decoder.{layer}", lambda: agree(models, call, last_is_fused=False), bound=1e-4
    )


def carried_frames_stay(models, call):
    """Frames that a chunk leaves for the next one are never written to, and are those of stock."""
    kept = []
    for model in models:
        alive = []
        for block in (m for m in model.decoder.modules() if isinstance(m, comfy_model.ResnetBlock)):
            block.register_forward_hook(
                lambda m, args, y, alive=alive: (
                    alive.extend((t, t.clone()) for t in args[3] or ()) if len(args) > 3 else None
                )
            )
        call(model)
        assert all(torch.equal(entry, copied) for entry, copied in alive)
        kept.append([copied for _, copied in alive])
    assert len(kept[0]) == len(kept[1]) > 0
    for ours, theirs in zip(*kept, strict=True):
        cases.agree(ours, theirs, 1e-4)
