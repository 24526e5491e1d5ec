"""Factors: products with them have stock's bits, and code that was not tested gets plain numbers."""

import copy
import threading

import numpy as np
import pytest
import torch
from diffusers import ControlNetXSAdapter, UNet2DConditionModel, UNetControlNetXSModel
from diffusers.models.unets import unet_2d_blocks
from diffusers.utils.torch_utils import apply_freeu

from sdfastgn.models.architectures import randomize
from sdfastgn.models.configurations import UNETS
from sdfastgn.patches.graphs.arguments import Call, Number, Unsupported
from sdfastgn.patches.graphs.factors import Factor, Factors
from tests.controlnet import build_controlnet
from tests.patches.graphs.cases import (
    agree,
    inputs_after,
    ip_adapter,
    ip_adapter_scale,
    make,
    optimized,
    run,
    same_results,
    state,
)

pytestmark = pytest.mark.fused_on_cpu

VALUE = 1.2345678
NUMPY = [np.float64, np.float32, np.float16, np.int64]
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def factor_of(memory_value, value=VALUE):
    memory = torch.tensor([memory_value], dtype=torch.float64)
    return Factor(value, memory, memory.float())


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_product_has_stocks_bits(dtype):
    x = torch.randn(1000).to(dtype).view(2, 20, 5, 5).to(memory_format=torch.channels_last)
    for found in (x * factor_of(VALUE), factor_of(VALUE) * x, torch.mul(x, factor_of(VALUE))):
        assert torch.equal(found, x * VALUE)
        assert found.stride() == x.stride()
    assert torch.equal(x[0, 0, 0, 0] * factor_of(VALUE), x[0, 0, 0, 0] * VALUE)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gradient_of_a_product_has_stocks_bits(dtype):
    x, grad = torch.randn(2, 1000).to(dtype)
    x.requires_grad_()
    found, expected = (torch.autograd.grad(x * by, x, grad)[0] for by in (factor_of(VALUE), VALUE))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_freeu_of_factors_has_stocks_bits(dtype):
    values = {"s1": 0.9, "s2": 0.2, "b1": 1.3, "b2": 1.4}
    factors = {name: factor_of(value) for name, value in values.items()}
    for stage in (0, 1):
        x, skip = (torch.randn(2, 6, 8, 8).to(dtype) for _ in range(2))
        expected = apply_freeu(stage, x.clone(), skip, **values)
        found = apply_freeu(stage, x.clone(), skip, **factors)
        assert all(map(torch.equal, found, expected))


def test_operations_read_the_memory_and_python_the_number():
    factor, x = factor_of(3.0, value=2.0), torch.ones(4)
    assert torch.equal(x * factor, torch.full((4,), 3.0))
    x[1:2] = factor
    assert x.tolist() == [1.0, 3.0, 1.0, 1.0]
    assert factor == 2.0
    assert isinstance(factor, float)


def test_another_thread_reads_the_number():
    """Another thread may call the model eagerly while this thread captures."""
    factor, found = factor_of(3.0, value=2.0), []
    thread = threading.Thread(target=lambda: found.append(torch.ones(1) * factor))
    thread.start()
    thread.join()
    assert found == [torch.full((1,), 2.0)]


@pytest.mark.parametrize(
    "operation",
    [lambda x, f: x + f, lambda x, f: f - x, lambda x, f: x / f, lambda x, f: torch.mul(other=f, input=x)],
)
def test_an_operation_that_no_tested_code_runs(operation):
    with pytest.raises((TypeError, ValueError)):
        operation(torch.ones(2), factor_of(VALUE))


def test_a_value_that_another_thread_sets_during_a_capture_stays():
    block = unet_2d_blocks.UpBlock2D(8, 8, 8, 8, resnet_groups=2)
    block.s1 = block.s2 = block.b1 = block.b2 = 0.5
    factors = Factors()
    assert factors.add("up", block) == ("s1", "s2", "b1", "b2")
    factors.freeze()
    factors.allocate(torch.device("cpu"))
    with factors.captured():
        assert {type(vars(block)[name]) for name in ("s1", "s2", "b1", "b2")} == {Factor}
        block.s1 = 0.75
    assert (block.s1, block.s2) == (0.75, 0.5)
    assert type(block.s2) is float


def test_freeu_of_other_code_is_captured_anew(monkeypatch):
    """Users' "FreeU v2" replaces diffusers' function ``apply_freeu``, and adds the numbers to others."""

    def apply_other(stage, x, skip, **values):
        return x * (values["b1"] - 1 + values["b2"]), skip

    monkeypatch.setattr(unet_2d_blocks, "apply_freeu", apply_other)
    unet, stock, inputs = make()
    for b1 in (1.5, 1.1):
        unet.enable_freeu(0.9, 0.2, b1, 1.6), stock.enable_freeu(0.9, 0.2, b1, 1.6)
        same_results(unet, stock, inputs, calls=3)
    assert state(unet).captured == 2


@pytest.mark.drawn(1)
@pytest.mark.parametrize("kind", NUMPY)
def test_freeu_with_numbers_of_numpy(kind):
    unet, stock, inputs = make()
    for b1 in (kind(1), kind(2), kind(1.5)):
        for model in (unet, stock):
            model.enable_freeu(0.9, 0.2, b1, kind(3))
        same_results(unet, stock, inputs, calls=2)
    assert (state(unet).captured, state(unet).eager) == (1, {"first call of its kind": 1})


@pytest.mark.drawn(1)
@pytest.mark.parametrize("kind", NUMPY)
def test_scales_of_an_ip_adapter_as_numbers_of_numpy(kind):
    unet, stock, inputs = make()
    for model in (unet, stock):
        ip_adapter(model)
    inputs = inputs_after(ip_adapter, inputs)
    for scale in (kind(1), kind(2), kind(3)):
        for model in (unet, stock):
            ip_adapter_scale(model, scale)
        same_results(unet, stock, inputs, calls=2)
    assert (state(unet).captured, state(unet).eager) == (1, {"first call of its kind": 1})


@pytest.mark.drawn(1)
@pytest.mark.parametrize("kind", NUMPY)
def test_an_attribute_that_is_a_number_of_numpy(kind):
    """It is no factor, so a new value leads to a new capture."""
    unet, stock, inputs = make()
    for captured, value in enumerate((kind(1), kind(2)), 1):
        for model in (unet, stock):
            model.mid_block.resnets[0].output_scale_factor = value
        same_results(unet, stock, inputs, calls=3)
        assert state(unet).captured == captured
    assert "output_scale_factor" in state(unet).last_change


def test_arguments_that_are_numbers_of_numpy():
    def key_of(value, number=None):
        return Call((torch.ones(2),), {"value": value}, {} if number is None else {"value": number}).key

    timestep, factor = Number(1, torch.float64), Number(1, is_factor=True)
    for kind in (np.int8, np.int64, np.uint16):
        assert key_of(kind(3), timestep) == key_of(7, timestep)
    assert key_of(np.float64(3.5), timestep) == key_of(7.5, timestep)
    for kind in NUMPY:
        assert key_of(kind(3), factor) == key_of(0.5, factor)
        assert key_of([kind(3)], factor) == key_of([0.5], factor)
    for kind in (*NUMPY, np.longdouble, np.uint8, np.complex64):
        assert key_of(kind(3)) == key_of(kind(3)) != key_of(kind(2))
    assert key_of(np.bool_(True)) == key_of(np.bool_(True)) != key_of(np.bool_(False))
    with pytest.raises(Unsupported, match="value has a ndarray"):
        key_of(np.array(3.0))


def test_a_list_of_scales_as_a_union_of_controlnets_takes_it():
    numbers, x = {"scale": Number(1, is_factor=True)}, torch.ones(2)
    calls = [Call((x,), {"scale": scales}, numbers) for scales in ([0.5, 2], [0.25, 3])]
    assert calls[0].key == calls[1].key
    assert calls[0].key != Call((x,), {"scale": [0.5]}, numbers).key
    buffers = calls[0].buffers()
    calls[0].fill(buffers)
    _, options = calls[0].rebuild(buffers)
    calls[1].fill(buffers)
    _, later = calls[1].rebuild(buffers)
    assert (options["scale"], later["scale"]) == ([0.5, 2], [0.25, 3])
    assert [(x * factor).tolist() for factor in later["scale"]] == [[0.25, 0.25], [3.0, 3.0]]


@pytest.mark.drawn(1)
@pytest.mark.parametrize("kind", [float, *NUMPY])
@pytest.mark.parametrize("guess_mode", [False, True])
def test_a_controlnets_scale(guess_mode, kind):
    controlnet, stock = (build_controlnet("tiny", torch.float32, "cpu") for _ in range(2))
    optimized(controlnet)
    inputs = {**make()[2], "controlnet_cond": torch.ones(1, 3, 64, 64), "guess_mode": guess_mode}
    outputs = []
    for scale in map(kind, (3, 0.5, 0, 1, 0.7)):
        with torch.no_grad():
            found, expected = (
                model(**inputs, conditioning_scale=scale, return_dict=False) for model in (controlnet, stock)
            )
        for a, b in zip([*found[0], found[1]], [*expected[0], expected[1]], strict=True):
            agree(a, b)
        outputs.append(found[1])
    assert (state(controlnet).captured, state(controlnet).replays) == (1, 4)
    assert not torch.equal(outputs[0], outputs[1])


def controlnet_xs():
    """(optimized ControlNet-XS around a tiny UNet, a stock one with the same weights)"""
    unet = UNet2DConditionModel(**{**UNETS["tiny"], "use_linear_projection": True, "layers_per_block": 2})
    sizes = {"conditioning_embedding_out_channels": (8, 8, 16, 16), "learn_time_embedding": True}
    adapter = ControlNetXSAdapter.from_unet(unet, size_ratio=1, **sizes)
    stock = randomize(UNetControlNetXSModel.from_unet(unet, adapter), 0).eval()
    return optimized(copy.deepcopy(stock)), stock


@pytest.mark.slow
def test_a_scale_of_a_controlnet_xs():
    model, stock = controlnet_xs()
    inputs = {**make()[2], "controlnet_cond": torch.ones(1, 3, 64, 64)}
    outputs = []
    for scale in (0.9, 0.5, 0, 1):
        outputs.append(run(model, {**inputs, "conditioning_scale": scale}))
        agree(outputs[-1], run(stock, {**inputs, "conditioning_scale": scale}))
    assert (state(model).captured, state(model).replays) == (1, 3)
    assert not torch.equal(outputs[0], outputs[1])
