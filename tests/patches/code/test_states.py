"""Optimized models whose code is replaced: each result is the one that stock gives at that moment."""

import contextlib
import copy
import gc
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor

import diffusers
import peft
import pytest
import torch
from diffusers.models import attention_processor, resnet
from torch import nn
from torch.nn import functional as F

import sdfastgn
from sdfastgn.patches.code.states import MAX_STATES, reason_of_code
from sdfastgn.patches.graphs import forward
from sdfastgn.patches.graphs import install as cuda_graphs
from sdfastgn.patches.swap.exclusive import call_entry
from tests.patches.code.foreign import OF_UNETS, of_package, replaced, sage
from tests.patches.graphs.cases import DEVICES, agree, lora, make, reasons_of, run, state

pytestmark = pytest.mark.fused_on_cpu

MODES = ["auto", True, False]


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


def made(device, mode):
    unet, stock, inputs = make(device, mode) if mode is not False else make(device, "auto")
    if mode is False:
        sdfastgn.optimize(unet, cuda_graphs=False)
    for model in (unet, stock):
        model.set_attn_processor(attention_processor.AttnProcessor2_0())
    return unet, stock, inputs


def differ(a, b):
    return (a - b).abs().max() > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", OF_UNETS, ids=lambda case: f"{case[0].__name__}.{case[1]}")
def test_code_replaced_after_some_calls(device, case, mode):
    unet, stock, inputs = made(device, mode)
    usual = run(stock, inputs)
    for _ in range(3):
        agree(run(unet, inputs), usual)
    with replaced(*case):
        expected = run(stock, inputs)
        assert differ(expected, usual)  # so that this test can fail
        for _ in range(4):
            agree(run(unet, inputs), expected)
    for _ in range(3):
        agree(run(unet, inputs), usual)
    if mode is not False:
        assert state(unet).alive == 2
        assert state(unet).captured == 2
        assert state(unet).last_change.startswith("other code has replaced ")


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", OF_UNETS, ids=lambda case: f"{case[0].__name__}.{case[1]}")
def test_code_replaced_before_the_first_call(device, case, mode):
    """And put back later: nothing of it stays in a graph."""
    with replaced(*case):
        unet, stock, inputs = made(device, mode)
        expected = run(stock, inputs)
        for _ in range(3):
            agree(run(unet, inputs), expected)
    usual = run(stock, inputs)
    assert differ(expected, usual)
    for _ in range(3):
        agree(run(unet, inputs), usual)


@pytest.mark.slow
def test_code_that_is_exchanged_within_each_image(device):
    """As in a pipeline that turns SageAttention on for some steps: one graph for each state."""
    unet, stock, inputs = made(device, "auto")
    for _ in range(3):
        for context in (contextlib.nullcontext, sage):
            for _ in range(3):
                with context():
                    agree(run(unet, inputs), run(stock, inputs))
    assert (state(unet).captured, state(unet).alive, state(unet).dropped) == (2, 2, 0)
    assert state(unet).replays > 10


def scaled(factor):
    return lambda stock: of_package(lambda *args, **kwargs: stock(*args, **kwargs) * factor)


@pytest.mark.slow
def test_too_many_states(device):
    """Then the model has no graphs any more, and the report says why."""
    unet, stock, inputs = made(device, "auto")
    for factor in range(1, MAX_STATES + 3):
        with replaced(F, "group_norm", scaled(factor)):
            for _ in range(3):
                agree(run(unet, inputs), run(stock, inputs))
    assert state(unet).alive == 0
    assert "in too many ways" in reasons_of(unet)
    agree(run(unet, inputs), run(stock, inputs))
    assert state(unet).alive == 0


def test_replaced_attention_runs_in_fused_blocks(device):
    """Fused blocks call PyTorch's function by its name, so they need not become slower."""
    unet, stock, inputs = made(device, "auto")
    with sage():
        agree(run(unet, inputs, calls=3), run(stock, inputs))
        assert reason_of_code(unet) is None


def test_code_replaced_during_the_capture(device):
    """A processor's code that puts other code into place does not stay in the graph."""
    unet, stock, inputs = made(device, "auto")
    usual = run(stock, inputs)
    agree(run(unet, inputs), usual)
    with replaced(nn.GroupNorm, "forward"):
        run(unet, inputs)
    for _ in range(3):
        agree(run(unet, inputs), usual)


def test_the_report_names_replaced_code(device):
    unet, _, inputs = made(device, "auto")
    run(unet, inputs)
    with replaced(F, "interpolate"):
        run(unet, inputs)
        skipped = [entry for entry in sdfastgn.report(unet).entries if entry.status == "skipped"]
        assert {entry.reason for entry in skipped} == {
            "other code has replaced torch.nn.functional.interpolate"
        }
    assert not [entry for entry in sdfastgn.report(unet).entries if entry.status == "skipped"]


def test_the_report_names_changed_functions_too(device, monkeypatch):
    """Which only a comparison with an earlier call shows."""
    unet, _, inputs = made(device, "auto")
    run(unet, inputs)
    with monkeypatch.context() as patch:
        patch.setattr(resnet.ResnetBlock2D.forward, "__defaults__", (1,))
        reasons = {entry.reason for entry in sdfastgn.report(unet).entries if entry.status == "skipped"}
        assert any("the code of diffusers.models.resnet.ResnetBlock2D.forward" in r for r in reasons)
    assert not [entry for entry in sdfastgn.report(unet).entries if entry.status == "skipped"]


class Own(nn.Module):
    """A model of a user, with parts that run fused."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.GroupNorm(2, 8), nn.SiLU()) for _ in range(2)])

    def forward(self, x):
        return self.blocks[1](self.blocks[0](x))


def images(device="cpu"):
    return torch.randn(2, 8, 16, 16, generator=torch.Generator().manual_seed(0)).to(device)


@pytest.mark.parametrize("call", [lambda m, x: m(x), lambda m, x: m.blocks[1](x)], ids=["root", "child"])
def test_models_that_have_no_graphs(device, call):
    model, x = Own().to(device), images(device)
    sdfastgn.optimize(model)
    usual = call(model, x)
    with replaced(F, "group_norm"):
        assert differ(call(model, x), usual)
    torch.testing.assert_close(call(model, x), usual)
    sdfastgn.restore(model)
    assert all(call_entry(module) is None for module in model.modules())


def test_autoencoders_that_have_no_graphs(device):
    """``decode`` calls the decoder by itself."""
    torch.manual_seed(0)
    vae = diffusers.AutoencoderKL(block_out_channels=(32, 32), norm_num_groups=4).to(device).eval()
    z = torch.randn(1, 4, 8, 8, device=device)
    sdfastgn.optimize(vae, cuda_graphs=False)
    with torch.no_grad(), replaced(nn.GroupNorm, "forward"):
        found = vae.decode(z).sample
        sdfastgn.restore(vae)
        agree(found, vae.decode(z).sample)


@pytest.mark.slow
def test_gradients_see_replaced_code(device):
    unet, stock, inputs = made(device, "training")

    def gradients(model):
        model.zero_grad()
        model(**inputs).sample.square().sum().backward()
        return model.conv_in.weight.grad.clone()

    for _ in range(3):
        torch.testing.assert_close(gradients(unet), gradients(stock), atol=2e-3, rtol=2e-3)
    with replaced(nn.GroupNorm, "forward"):
        for _ in range(3):
            torch.testing.assert_close(gradients(unet), gradients(stock), atol=2e-3, rtol=2e-3)
    torch.testing.assert_close(gradients(unet), gradients(stock), atol=2e-3, rtol=2e-3)


def test_a_model_under_change_keeps_its_checks(device):
    """``optimize`` puts gates into the same place while other threads may call the model."""
    model = Own().to(device)
    sdfastgn.optimize(model)
    before = call_entry(model)
    sdfastgn.optimize(model)
    assert call_entry(model) is before
    assert not list(cuda_graphs.outermost(model))


@pytest.mark.slow
def test_a_thread_that_waits_gets_the_result_of_the_present_code(device):
    """Its call has chosen a graph before another thread found out that the code has changed."""
    unet, stock, inputs = made(device, "auto")
    run(unet, inputs, calls=3)
    for factor in (0.5, 0.25):
        with replaced(F, "group_norm", scaled(factor)):
            expected = run(stock, inputs)
            for found in in_threads(3, lambda: run(unet, inputs)):
                agree(found, expected)


def in_threads(count, call):
    """The results of ``call`` in ``count`` threads at once."""
    with ThreadPoolExecutor(count) as pool:
        return [each.result() for each in [pool.submit(call) for _ in range(count)]]


def test_a_server_of_another_state_does_not_replay(device):
    """The state that was seen last belongs to all threads, so a call must compare with its own."""
    unet, stock, inputs = made(device, "auto")
    run(unet, inputs, calls=3)
    served = unet.forward._serve
    with replaced(F, "group_norm"):
        unet.forward._states.look()  # as another thread would
        with pytest.raises(forward._CodeChanged), torch.no_grad():
            served(unet, (), inputs, False)
        agree(run(unet, inputs), run(stock, inputs))


@pytest.mark.slow
@pytest.mark.parametrize("calls", [0, 1, 2])
def test_code_of_layers_that_came_later(device, calls):
    """peft's layers came after the model's code was read."""
    unet, stock, inputs = made(device, "auto")
    run(unet, inputs, calls=3)
    for model in (unet, stock):
        lora(model)
    run(unet, inputs, calls=calls) if calls else None
    with replaced(peft.tuners.lora.layer.Linear, "forward"):
        expected = run(stock, inputs)
        for _ in range(4):
            agree(run(unet, inputs), expected)
    agree(run(unet, inputs), run(stock, inputs))


@pytest.mark.parametrize("kind", [diffusers.AutoencoderKLWan, diffusers.AutoencoderKLQwenImage])
def test_encoders_beside_a_decode_with_graphs(device, kind):
    torch.manual_seed(0)
    vae = kind(base_dim=8, z_dim=4, dim_mult=[1, 1], num_res_blocks=1, temperal_downsample=[False])
    vae = vae.to(device).eval()
    stock, x = copy.deepcopy(vae), torch.randn(1, 3, 1, 16, 16, device=device)
    sdfastgn.optimize(vae)
    with torch.no_grad(), replaced(F, "silu"):
        agree(vae.encode(x).latent_dist.mean, stock.encode(x).latent_dist.mean)


CALLS = 0


def test_a_replacement_that_counts_its_calls(device):
    """Counters are no new states of the code."""

    def counting(stock):
        def counted(*args, **kwargs):
            global CALLS
            CALLS += 1
            return stock(*args, **kwargs) * 0.5

        return of_package(counted)

    unet, stock, inputs = made(device, "auto")
    with replaced(F, "scaled_dot_product_attention", counting):
        for _ in range(6):
            agree(run(unet, inputs), run(stock, inputs))
    agree(run(unet, inputs, calls=2), run(stock, inputs))
    assert "in too many ways" not in reasons_of(unet)


class Scaled(Own):
    """Its forward reads a tensor that is a global."""

    def forward(self, x):
        return super().forward(x) * FACTOR.mean()


FACTOR = torch.tensor([1.0, 2.0])


def test_a_global_tensor_that_changes(device, monkeypatch):
    """Comparing tensors gives no bool."""
    model, x = Scaled().to(device), images(device)
    sdfastgn.optimize(model)
    before = model(x)
    monkeypatch.setitem(Scaled.forward.__globals__, "FACTOR", FACTOR * 2)
    torch.testing.assert_close(model(x), before * 2)


def test_what_does_not_compute_may_be_replaced(device, monkeypatch):
    unet, _, inputs = made(device, "auto")
    run(unet, inputs)
    monkeypatch.setattr(torch.Tensor, "__repr__", of_package(lambda self: "a tensor"))
    monkeypatch.setattr(warnings, "warn", of_package(lambda *args, **kwargs: None))
    run(unet, inputs, calls=3)
    assert reason_of_code(unet) is None
    assert state(unet).replays == 3


def test_a_restored_model_is_freed(device):
    """Also if a replacement refers to it."""

    def used(model, x):
        def holding(stock):
            return of_package(lambda self, input: stock(self, input) * len(list(model.modules())))

        sdfastgn.optimize(model)
        model(x)
        with replaced(nn.GroupNorm, "forward", holding):
            model(x)
        model(x)
        return weakref.ref(sdfastgn.restore(model))

    gone = used(Own().to(device), images(device))
    gc.collect()
    assert gone() is None
