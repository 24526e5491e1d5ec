"""Models that draw random numbers: users get the same numbers as without graphs."""

import copy
import threading

import pytest
import torch
from torch import nn

import sdfastgn
from sdfastgn.patches.graphs.arguments import Unsupported
from sdfastgn.patches.graphs.random_numbers import undrawn
from tests.patches.graphs.cases import DEVICES, agree, make, reasons_of, run, same_results, state
from tests.patches.graphs.tape import TapeBackend

pytestmark = pytest.mark.fused_on_cpu


class ActiveDropout(nn.Module):
    def forward(self, x):
        return nn.functional.dropout(x, 0.5, training=True)


def random_states(device):
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if device == "cuda" else [])]


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", ["auto", True])
@pytest.mark.parametrize("when", ["first", "later"])
def test_random_numbers_are_those_without_graphs(when, mode, device, monkeypatch):
    """Rehearsals, cold calls before a capture and captures leave the generators as they were."""
    monkeypatch.setattr(ActiveDropout, "__module__", "torch.dropout")
    unet, _, inputs = make(device, mode=mode)
    plain = copy.deepcopy(unet)
    sdfastgn.optimize(plain, cuda_graphs=False)
    found = {}
    for model in (unet, plain):
        if when == "later":
            run(model, inputs, calls=3)
        model.mid_block.resnets[0].dropout = ActiveDropout()
        torch.manual_seed(0)
        found[model] = [run(model, inputs) for _ in range(3)], random_states(device)
    for ours, theirs in zip(*(results for results, _ in found.values()), strict=True):
        agree(ours, theirs)
    for ours, theirs in zip(*(states for _, states in found.values()), strict=True):
        assert torch.equal(ours, theirs)
    assert state(unet).alive == 0
    assert "its forward draws random numbers" in reasons_of(unet)


def test_random_numbers_of_another_thread_are_left_alone():
    """If PyTorch's generator has changed during a capture, another thread may have drawn from it."""

    class Meanwhile(TapeBackend):
        def capture(self, fn):
            thread = threading.Thread(target=lambda: drawn.append(torch.rand(2)))
            thread.start()
            thread.join()
            return super().capture(fn)

    drawn = []
    unet, stock, inputs = make(backend=Meanwhile())
    torch.manual_seed(0)
    same_results(unet, stock, inputs, calls=3)
    assert state(unet).replays == 2
    assert len(drawn) == 1
    assert not torch.equal(drawn[0], torch.rand(2))


def test_attention_without_dropout_draws_nothing():
    x = torch.ones(1, 1, 4, 8)

    def attend(p):
        return nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=p)

    with undrawn(x.device, lambda: attend(0.0)):
        torch.rand(1)  # as by another thread
    with pytest.raises(Unsupported, match="draws random numbers"), undrawn(x.device, lambda: attend(0.5)):
        attend(0.5)
