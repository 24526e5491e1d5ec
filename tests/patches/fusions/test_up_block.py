"""The fused up blocks: the concatenation stores statistics, unusual calls run upstream's forward."""

import pytest
import torch
from diffusers.models.unets.unet_2d_blocks import CrossAttnUpBlock2D, UpBlock2D

from sdfastgn.patches.layers import statistics
from tests.patches.cases import agree, image, noise
from tests.patches.cases import random_twins as twins

pytestmark = [
    pytest.mark.fused_on_cpu,
    pytest.mark.usefixtures("on_each_device", "without_gradients", "statistics_always_pay"),
]


SIZES = {
    "in_channels": 4,
    "prev_output_channel": 8,
    "out_channels": 6,
    "temb_channels": 8,
    "resnet_groups": 2,
}


def up_block(cross, **options):
    if cross:
        options = {"num_attention_heads": 2, "cross_attention_dim": 12, **options}
    return (CrossAttnUpBlock2D if cross else UpBlock2D)(**SIZES, num_layers=1, add_upsample=False, **options)


def up_inputs(cross):
    skips = image(2, 5, 2, 3), image(2, 4, 2, 3, seed=2)
    inputs = {
        "hidden_states": image(2, 8, 2, 3, seed=4),
        "res_hidden_states_tuple": skips,
        "temb": noise(2, 8),
    }
    return inputs | ({"encoder_hidden_states": noise(2, 3, 12, seed=5)} if cross else {})


both = pytest.mark.parametrize("cross", [False, True], ids=["up", "cross-attention"])


@both
def test_an_up_block_concatenates_with_statistics(ran, cross):
    fused, stock = twins(up_block(cross))
    agree(fused(**up_inputs(cross)), stock(**up_inputs(cross)), 5e-5)
    assert ran("cat") == 1
    assert ran("statistics") == 0


@pytest.mark.parametrize(("cross", "stage"), [(False, 2), (True, 0)])
def test_freeu(ran, launches, cross, stage):
    """FreeU's in-place writes make the statistics invalid, and upstream's forward runs."""
    fused, stock = twins(up_block(cross, resolution_idx=stage))
    plain = fused(**up_inputs(cross))
    for model in (fused, stock):
        model.s1, model.s2, model.b1, model.b2 = 0.9, 0.2, 1.4, 1.6
    launches.clear()
    inputs, expected = up_inputs(cross), stock(**up_inputs(cross))
    inputs["hidden_states"] = statistics.add(*[inputs["hidden_states"] / 2] * 2)
    got = fused(**inputs)
    agree(got, expected, 5e-5)
    assert ran("cat") == 0
    assert torch.allclose(got, plain, atol=1e-3) == (stage == 2)
    for model in (fused, stock):
        model.s1 = model.s2 = model.b1 = model.b2 = None
    agree(fused(**up_inputs(cross)), plain, 5e-5)
    assert ran("cat") == 1


@both
def test_gradient_checkpointing_of_up_blocks(ran, cross):
    fused, stock = twins(up_block(cross))
    checkpoints = []
    for model in (fused, stock):
        model.gradient_checkpointing = True
        model._gradient_checkpointing_func = lambda f, *args: checkpoints.append(f) or f(*args)
    agree(fused(**up_inputs(cross)), stock(**up_inputs(cross)), 5e-5)
    assert not checkpoints
    assert ran("cat") == 1
    with torch.enable_grad():
        agree(fused(**up_inputs(cross)).detach(), stock(**up_inputs(cross)).detach(), 5e-5)
    assert len(checkpoints) == 2
    assert ran("cat") == 1


@both
def test_gradients_of_an_up_block_run_upstreams_forward(ran, cross):
    fused, _ = twins(up_block(cross))
    inputs = up_inputs(cross)
    inputs["res_hidden_states_tuple"][-1].requires_grad_()
    with torch.enable_grad():
        fused(**inputs).sum().backward()
    assert ran("cat") == 0
    assert inputs["res_hidden_states_tuple"][-1].grad is not None


def test_deprecated_arguments_run_upstreams_forward(ran):
    fused, stock = twins(up_block(True))
    options = {"cross_attention_kwargs": {"scale": 0.5}}
    agree(fused(**up_inputs(True), **options), stock(**up_inputs(True), **options), 5e-5)
    fused, stock = twins(up_block(False))
    with pytest.warns(FutureWarning, match="scale"):
        agree(fused(**up_inputs(False), scale=1.0), stock(**up_inputs(False)), 5e-5)
    assert ran("cat") == 0
