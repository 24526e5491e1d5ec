"""CUDA graphs of UNets for video."""

import pytest
import torch

from sdfastgn.patches.graphs import install as cuda_graphs
from tests import video_unets
from tests.patches.graphs.cases import agree, optimized, reasons_of, run, state
from tests.patches.graphs.tape import TapeBackend

pytestmark = pytest.mark.fused_on_cpu
NAMES = [pytest.param(name, id=name) for name in video_unets.UNETS]


def make(name):
    """(optimized UNet, stock UNet with the same weights)"""
    return tuple(video_unets.original(name).copy() for _ in range(2))


@pytest.mark.drawn(1)
@pytest.mark.parametrize("name", NAMES)
def test_new_values_in_the_same_graph(name):
    unet, stock = make(name)
    optimized(unet)
    for seed, timestep in enumerate((900, 500, 100)):
        values = {**video_unets.inputs(name, seed=seed), "timestep": timestep}
        agree(run(unet, values), run(stock, values))
    assert (state(unet).captured, state(unet).replays) == (1, 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_each_number_of_frames_has_its_graph(name):
    unet, stock = make(name)
    optimized(unet)
    for options in ({"frames": 3}, {"frames": 5}, {"batch": 1}, {"size": (6, 4)}):
        values = video_unets.inputs(name, **options)
        for _ in range(2):
            agree(run(unet, values), run(stock, values))
    assert (state(unet).captured, state(unet).replays) == (4, 4)


def changed_mix(unet):
    unet.mid_block.resnets[0].time_mixer.mix_factor.data.fill_(2.0)


def image_alone(unet):
    unet.mid_block.attentions[0].time_mixer.merge_strategy = "fixed"


@pytest.mark.slow
@pytest.mark.parametrize("change", [changed_mix, image_alone])
def test_a_new_mix_of_frames_takes_effect(change):
    unet, stock = make("svd")
    optimized(unet)
    values = video_unets.inputs("svd")
    before = run(unet, values, calls=2)
    for model in (unet, stock):
        change(model)
    assert not torch.equal(run(stock, values), before)
    for _ in range(3):
        agree(run(unet, values), run(stock, values))


@pytest.mark.slow
def test_a_graph_is_given_up_if_it_leaves_too_little_memory():
    unet, stock = make("animatediff")
    backend = TapeBackend()
    optimized(unet)
    cuda_graphs.install(unet, "auto", backend)
    backend.room = False
    values = video_unets.inputs("animatediff")
    for _ in range(3):
        agree(run(unet, values), run(stock, values))
    assert (state(unet).alive, state(unet).replays, backend.captures) == (0, 0, 1)
    assert "memory was short" in reasons_of(unet)
