"""What the report says about a UNet without graphs, whose kernels Python starts one by one."""

from dataclasses import replace

import pytest
import torch
from accelerate import cpu_offload

import sdfastgn
from tests.patches.graphs.cases import make, run

pytestmark = pytest.mark.fused_on_cpu

SLOW = "without CUDA graphs a UNet is hardly faster than stock's: UNet2DConditionModel"


def as_on_a_gpu(model):
    return str(replace(sdfastgn.report(model), runs_kernels=True))


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    ("mode", "spoil"),
    [
        (False, lambda u: sdfastgn.optimize(u, cuda_graphs=False, plans=False)),
        (True, lambda u: u.mid_block.register_forward_pre_hook(lambda m, a: None)),
        (True, lambda u: cpu_offload(u, torch.device("cpu"))),
    ],
    ids=["turned off", "hook", "offload"],
)
def test_the_report_says_that_a_unet_gains_nothing(mode, spoil):
    unet, _, inputs = make(mode=mode)
    spoil(unet)
    run(unet, inputs)
    assert SLOW in as_on_a_gpu(unet)
    assert SLOW not in str(sdfastgn.report(unet))  # no kernel runs: that is said instead
    assert SLOW not in as_on_a_gpu(sdfastgn.restore(unet))


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    "how", ["first call", "replayed", "plan", "training", "gradients", "compiled", "block"]
)
def test_the_report_does_not_say_so_of_other_calls(how):
    unet, _, inputs = make(mode=False if how in ("plan", "compiled") else "auto")
    unet.train(how == "training")
    if how in ("compiled", "block"):
        (unet if how == "compiled" else unet.mid_block).compile(backend="eager")
    with torch.set_grad_enabled(how == "gradients"):
        if how != "compiled":
            unet(**inputs)
    if how in ("replayed", "plan"):
        run(unet, inputs)
    assert SLOW not in as_on_a_gpu(unet)
