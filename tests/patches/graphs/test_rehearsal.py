"""The rehearsal before the first call of a kind compiles its kernels in parallel, and has no other effect."""

import contextlib

import pytest
import torch

import sdfastgn
from sdfastgn.patches.fp8 import models as fp8
from sdfastgn.patches.graphs import capture, forward
from sdfastgn.patches.graphs.watch import Watch
from tests.patches import samples
from tests.patches.graphs.cases import make, replaced_parameter, run, same_results, state
from tests.patches.graphs.tape import TapeBackend

pytestmark = pytest.mark.fused_on_cpu


class Processor:
    """A processor of other code, which counts its calls."""

    calls = 0

    def __call__(self, attn, hidden_states, *args, **kwargs):
        self.calls += 1
        return hidden_states


@pytest.mark.drawn(1)
@pytest.mark.parametrize("mode", ["auto", True])
def test_once_for_each_kind(mode):
    backend = TapeBackend()
    unet, stock, inputs = make(mode=mode, backend=backend)
    same_results(unet, stock, inputs, calls=3)
    assert backend.rehearsals == 1
    text = inputs["encoder_hidden_states"]
    for _ in range(2):
        run(unet, {**inputs, "encoder_hidden_states": text[:, :5]})
    assert backend.rehearsals == 2


def test_the_model_is_recorded_once(monkeypatch):
    """The first capture, and rehearsals of further kinds, use the record of the first rehearsal."""
    records = []
    monkeypatch.setattr(forward, "Watch", lambda *a, **k: records.append(Watch(*a, **k)) or records[-1])
    unet, stock, inputs = make(backend=TapeBackend())
    same_results(unet, stock, inputs, calls=3)
    other = {**inputs, "encoder_hidden_states": inputs["encoder_hidden_states"][:, :5]}
    same_results(unet, stock, other, calls=3)
    assert (state(unet).captured, len(records)) == (2, 1)


def test_a_change_after_the_rehearsal_is_noticed():
    backend = TapeBackend()
    unet, stock, inputs = make(backend=backend)
    run(unet, inputs)
    for model in (unet, stock):
        replaced_parameter(model)
    same_results(unet, stock, inputs, calls=3)
    for model in (unet, stock):
        with torch.no_grad():
            model.conv_in.bias += 1
    same_results(unet, stock, inputs, calls=2)
    assert (backend.rehearsals, backend.captures) == (1, 1)


def test_not_again_when_the_model_changes():
    backend = TapeBackend()
    unet, stock, inputs = make(backend=backend)
    run(unet, inputs, calls=2)
    for model in (unet, stock):
        replaced_parameter(model)
    same_results(unet, stock, inputs, calls=2)
    assert (backend.rehearsals, backend.captures) == (1, 2)


def test_again_when_fp8_is_turned_on_but_not_for_other_weights(monkeypatch):
    backend = TapeBackend()
    unet, _, inputs = make(backend=backend)
    rehearsals = []
    for generation, is_on in ((0, False), (1, True), (2, True), (3, False)):
        monkeypatch.setattr(fp8, "generation", lambda model, now=generation: now)
        monkeypatch.setattr(fp8, "is_allowed", lambda model, now=is_on: now)
        run(unet, inputs, calls=2)
        rehearsals.append(backend.rehearsals)
    assert rehearsals == [1, 2, 2, 2]


def test_code_that_might_count_calls_is_not_rehearsed():
    backend = TapeBackend()
    unet, _, inputs = make(backend=backend)
    processor = Processor()
    unet.mid_block.attentions[0].transformer_blocks[0].attn1.set_processor(processor)
    run(unet, inputs)
    assert (backend.rehearsals, processor.calls) == (0, 1)


def test_hooks_run_once():
    backend, calls = TapeBackend(), []
    unet, _, inputs = make(backend=backend)
    unet.mid_block.register_forward_hook(lambda *_: calls.append(1))
    run(unet, inputs)
    assert (backend.rehearsals, len(calls)) == (0, 1)


def test_a_rehearsal_that_fails_costs_nothing():
    backend = TapeBackend()
    unet, stock, inputs = make(backend=backend)

    def fails(fn):
        raise torch.OutOfMemoryError("for a test")

    backend.rehearse = fails
    same_results(unet, stock, inputs, calls=3)
    assert (state(unet).captured, state(unet).replays) == (1, 2)


def test_algorithms_are_loaded_while_kernels_are_compiled(monkeypatch):
    backend, order = object.__new__(capture.CudaBackend), []
    backend._device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(capture, "load_algorithms", lambda: order.append("load"))
    monkeypatch.setattr(capture, "rehearse", lambda fn, device: (fn(), order.append("wait for kernels")))
    backend.rehearse(lambda: order.append("call"))
    assert order == ["call", "load", "wait for kernels"]


@pytest.mark.gpu
def test_no_kernel_is_compiled_after_the_rehearsal(monkeypatch, tmp_path):
    """The numbers of channels are in no other test, so every kernel is new."""
    import triton

    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    rehearse, inside, compiled = capture.rehearse, [], {True: 0, False: 0}

    def noted(fn, device):
        inside.append(True)
        rehearse(fn, device)
        inside.clear()

    def compiles(**_):
        compiled[bool(inside)] += 1

    monkeypatch.setattr(capture, "rehearse", noted)
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", compiles)
    torch.manual_seed(0)
    unet = samples.unet(
        block_out_channels=(72, 152), norm_num_groups=8, cross_attention_dim=40, attention_head_dim=8
    )
    unet = unet.to("cuda", torch.float16).eval()
    inputs = {
        "sample": torch.randn(2, 4, 24, 24, device="cuda").half(),
        "timestep": 7,
        "encoder_hidden_states": torch.randn(2, 11, 40, device="cuda").half(),
    }
    expected = run(unet, inputs)
    sdfastgn.optimize(unet)
    for _ in range(3):
        torch.testing.assert_close(run(unet, inputs), expected, atol=2e-2, rtol=2e-2)
    assert compiled[True] > 10
    assert compiled[False] == 0
