"""Weights of offloaded models on a GPU: values, memory and images over several returns to main memory.

These tests do not have the marker ``fused_on_cpu``. It would also let weights be packed in main memory, which
gives them other addresses.
"""

import contextlib
import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate import cpu_offload_with_hook
from transformers import T5Config, T5EncoderModel

import sdfastgn
from sdfastgn.models.loras import add_lora
from sdfastgn.models.pipelines import build_pipeline
from sdfastgn.patches.offload import offloaded
from tests.patches.graphs.cases import make, run
from tests.small_pipelines import SIZE, generate

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def small_weights_too(monkeypatch):
    """Small weights are staged and kept too, also in a process that has only one CPU thread."""
    monkeypatch.setattr(offloaded, "_MIN_BYTES", 64)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)


def large_weights(model):
    return [weight for weight in model.parameters() if offloaded._is_large(weight)]


def addresses(model):
    assert {weight.device.type for weight in model.parameters()} == {"cpu"}
    return [weight.data_ptr() for weight in large_weights(model)]


def offloaded_unet():
    """(optimized UNet after its first return from the GPU, its hook, stock UNet, arguments)"""
    unet, stock, inputs = make("cuda", mode=True)
    _, hook = cpu_offload_with_hook(unet, "cuda")
    run(unet, inputs)
    hook.offload()
    return unet, hook, stock, inputs


@pytest.mark.parametrize("context", [contextlib.nullcontext, torch.inference_mode])
def test_a_unet_gets_its_memory_back(context):
    unet, hook, stock, inputs = offloaded_unet()
    expected = run(stock, inputs)
    home = addresses(unet)
    for _ in range(2):
        with context():
            torch.testing.assert_close(run(unet, inputs), expected, rtol=1e-3, atol=1e-3)
            assert unet in offloaded._kept
            hook.offload()
        assert addresses(unet) == home
        assert unet not in offloaded._kept
    for ours, theirs in zip(unet.parameters(), stock.parameters(), strict=True):
        assert torch.equal(ours.cuda(), theirs)


def loras(model):
    add_lora(model, rank=4, name="a", seed=1)
    model.fuse_lora()


def load(model):
    model.load_state_dict({name: 1.1 * value for name, value in model.state_dict().items()})


def write_data(model):
    for weight in model.parameters():
        weight.data.mul_(1.1)


@pytest.mark.parametrize("where", ["gpu", "main memory"])
@pytest.mark.parametrize("change", [loras, load, write_data])
def test_changes_are_never_lost(change, where):
    unet, hook, stock, inputs = offloaded_unet()
    run(unet, inputs)
    if where == "main memory":
        hook.offload()
        stock.cpu()  # on another device, LoRAs would get other random weights
    for model in (unet, stock):
        change(model)
    expected = run(stock.cuda(), inputs)
    for _ in range(2):
        torch.testing.assert_close(run(unet, inputs), expected, rtol=2e-3, atol=2e-3)
        hook.offload()
    ours, theirs = unet.state_dict(), stock.state_dict()
    assert all(torch.equal(ours[name].cuda(), theirs[name].cuda()) for name in theirs)


def test_weights_are_staged_both_ways(monkeypatch):
    staged = {"to_gpu": [], "to_cpu": []}
    for name, found in staged.items():
        copy_of = getattr(offloaded.StagedCopy, name)

        def listed(stage, weight, found=found, copy_of=copy_of):
            found.append(weight)
            return copy_of(stage, weight)

        monkeypatch.setattr(offloaded.StagedCopy, name, listed)
    unet, hook, stock, inputs = offloaded_unet()
    staged["to_gpu"].clear()
    output = run(unet, inputs)
    assert list(map(id, staged["to_gpu"])) == list(map(id, large_weights(unet)))
    torch.testing.assert_close(output, run(stock, inputs), rtol=1e-3, atol=1e-3)
    for ours, theirs in zip(unet.parameters(), stock.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    staged["to_cpu"].clear()
    changed = large_weights(unet)[0]
    changed.data.mul_(2)
    hook.offload()
    assert list(map(id, staged["to_cpu"])) == [id(changed)]
    run(unet, inputs)
    changed.data.div_(2)
    staged["to_cpu"].clear()
    offloaded.forget(unet)
    hook.offload()
    assert list(map(id, staged["to_cpu"])) == list(map(id, large_weights(unet)))
    for ours, theirs in zip(unet.parameters(), stock.parameters(), strict=True):
        assert torch.equal(ours, theirs.cpu())


def test_weights_and_checksums_are_ready_for_other_streams(monkeypatch):
    unet, hook, _, _ = offloaded_unet()
    sums_of = offloaded.checksums
    # The GPU is still busy after the last checksum is queued, unless ``unet.to`` waits for it.
    monkeypatch.setattr(offloaded, "checksums", lambda weights: torch.cuda._sleep(10**8) or sums_of(weights))
    for _ in range(2):
        unet.to("cuda")
        assert unet in offloaded._kept
        assert torch.cuda.current_stream().query()
        hook.offload()


def test_restore_frees_what_is_kept():
    unet, hook, stock, inputs = offloaded_unet()
    run(unet, inputs)
    assert unet in offloaded._kept
    sdfastgn.restore(unet)
    assert unet not in offloaded._kept
    hook.offload()
    for ours, theirs in zip(unet.parameters(), stock.parameters(), strict=True):
        assert torch.equal(ours, theirs.cpu())
        assert ours.stride() == theirs.stride()


def test_copies_keep_nothing():
    unet, hook, _, inputs = offloaded_unet()
    expected = run(unet, inputs)
    other = copy.deepcopy(unet)
    assert other not in offloaded._kept
    hook.offload()
    assert torch.equal(run(other.cuda(), inputs), expected)


def test_images_of_an_offloaded_pipeline():
    pipe = build_pipeline("tiny", dtype=torch.float16, device="cuda")
    pipe.to("cpu")
    expected = {name: copy.deepcopy(getattr(pipe, name).state_dict()) for name in ("unet", "vae")}
    sdfastgn.optimize(pipe)
    pipe.enable_model_cpu_offload()
    images = [generate(pipe, **SIZE)]
    home = {name: addresses(getattr(pipe, name)) for name in ("unet", "vae", "text_encoder")}
    for _ in range(3):
        images.append(generate(pipe, **SIZE))
        assert home == {name: addresses(getattr(pipe, name)) for name in home}
    assert all(np.array_equal(image, images[0]) for image in images)
    for name, values in expected.items():
        assert all(torch.equal(v, values[k]) for k, v in getattr(pipe, name).state_dict().items())
    pipe.remove_all_hooks()
    pipe.to("cuda")
    assert np.array_equal(generate(pipe, **SIZE), images[0])


def test_a_model_that_stays_stock_gets_its_memory_back():
    config = T5Config(vocab_size=20, d_model=64, d_kv=32, d_ff=128, num_layers=2, num_heads=2)
    encoder = T5EncoderModel(config).eval()
    unet, _, _ = make("cuda", mode=True)
    pipe = SimpleNamespace(components={"unet": unet, "text_encoder": encoder})
    tokens = torch.arange(20, device="cuda")[None]
    stock = copy.deepcopy(encoder).cuda()
    sdfastgn.optimize(pipe)
    _, hook = cpu_offload_with_hook(encoder, "cuda")
    home = None
    for _ in range(3):
        with torch.no_grad():
            assert torch.equal(encoder(tokens).last_hidden_state, stock(tokens).last_hidden_state)
        hook.offload()
        home = home or addresses(encoder)
        assert addresses(encoder) == home
    sdfastgn.restore(pipe)
    with torch.no_grad():
        assert torch.equal(encoder(tokens).last_hidden_state, stock(tokens).last_hidden_state)
    hook.offload()
    assert encoder not in offloaded._returned
    assert all(
        torch.equal(value, stock.state_dict()[name].cpu()) for name, value in encoder.state_dict().items()
    )
