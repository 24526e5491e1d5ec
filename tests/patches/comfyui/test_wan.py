"""ComfyUI's autoencoders of Wan: whole ones in chunks, and what they keep for the next chunk."""

import copy

import pytest
import torch
import torch.nn.functional as F

from tests.patches import cases
from tests.patches.comfyui import comfy_checkout

comfy_checkout.import_for_cpu()

import comfy.ops  # noqa: E402
import comfy.sd  # noqa: E402
from comfy import model_management  # noqa: E402
from comfy.ldm.wan import vae, vae2_2  # noqa: E402

from scripts.publish.comfyui_models import random_weights  # noqa: E402
from sdfastgn.patches.comfyui import causal  # noqa: E402
from sdfastgn.patches.comfyui.inject import inject  # noqa: E402
from sdfastgn.patches.comfyui.model_patcher import optimize_vae  # noqa: E402
from sdfastgn.patches.comfyui.report import parts_of  # noqa: E402
from tests.patches.children import are_called_as_in_stock, each_place  # noqa: E402
from tests.patches.comfyui import carried_cases  # noqa: E402
from tests.patches.comfyui.carried_cases import agree, twins  # noqa: E402
from tests.patches.comfyui.comfy_models import close, snapshot, with_random_parameters  # noqa: E402
from tests.patches.video_cases import recorded  # noqa: E402

pytestmark = [
    pytest.mark.fused_on_cpu,
    pytest.mark.usefixtures("attention_of_pytorch", "on_each_device", "without_gradients"),
]


def wan(levels=1):
    sizes = {"dim": 8, "z_dim": 4, "dim_mult": [1] + [2] * levels, "num_res_blocks": 1}
    return vae.WanVAE(**sizes, temperal_downsample=[True] * levels)


def wan_22(_=1):
    sizes = {"dim": 8, "dec_dim": 12, "z_dim": 4, "dim_mult": [2, 2], "num_res_blocks": 1}
    return vae2_2.WanVAE(**sizes, temperal_downsample=[True])


FAMILIES = [wan, wan_22]
each_family = pytest.mark.parametrize("build", FAMILIES)


def decode_of(frames, batch=1):
    return lambda model: model.decode(cases.noise(batch, 4, frames, 2, 3, mean=0.0))


def encode_of(frames, batch=1):
    return lambda model: model.encode(cases.noise(batch, 3, frames, 4, 8, mean=0.0))


# (number of resamplings, call). Four latents are decoded as 1, 2 and 1, or each alone. With two resamplings
# of frames the encoder of newer releases lets a chunk of one frame wait for the next.
CALLS = {
    "decode": (1, decode_of(4)), "decode-an-image": (1, decode_of(1)), "decode-two": (1, decode_of(3, 2)),
    "encode": (2, encode_of(13)), "encode-an-image": (2, encode_of(1)), "encode-two": (2, encode_of(9, 2)),
}  # fmt: skip
each_call = pytest.mark.parametrize(("levels", "call"), CALLS.values(), ids=CALLS)
a_decode_and_an_encode = pytest.mark.parametrize(
    ("levels", "call"), [CALLS["decode"], CALLS["encode"]], ids=["decode", "encode"]
)


@each_family
@each_call
def test_as_stock(build, levels, call, launches):
    models = fused, stock = twins(build(levels))
    assert not parts_of(fused)[1]
    agree(models, call)
    names = [name for name, *_ in launches]
    # No norm of a convolution's input runs by itself: only attention's, once in a chunk.
    assert names.count("channel_norm") == len(chunks_of(call, stock)) <= names.count("frames")
    carried_cases.is_stock_after_ejection(models, call)


@each_family
@a_decode_and_an_encode
@each_place
def test_children_are_called_as_in_stock(build, levels, call, place, launches):
    launches.runs = False  # only the calls are compared
    are_called_as_in_stock(with_random_parameters(build(levels)), inject, call, place)


def chunks_of(call, model):
    """The inputs of the middle's attention in a call."""
    found = []
    handles = [
        half.middle[1].register_forward_hook(lambda m, args, y: found.append(args[0].shape))
        for half in (model.encoder, model.decoder)
    ]
    call(model)
    for handle in handles:
        handle.remove()
    return found


@each_family
def test_ejected_as_before(build):
    carried_cases.ejected_as_before(build())


@each_family
@a_decode_and_an_encode
def test_convolutions_of_windows(build, levels, call, monkeypatch):
    monkeypatch.setattr(causal, "is_faster_in_2d", lambda conv, x: conv.kernel_size[0] > conv.stride[0])
    found = recorded(monkeypatch, causal, "convolve_windows")
    agree(twins(build(levels)), call)
    assert found


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_no_less_exact_than_stock(dtype):
    stock = with_random_parameters(vae.ResidualBlock(8, 12)).to(dtype)
    x = cases.noise(1, 8, 3, 4, 6, dtype=dtype)
    exact = copy.deepcopy(stock).double()(x.double())
    fused = copy.deepcopy(stock)
    inject(fused)
    ours, theirs = ((model(x) - exact).square().mean() for model in (fused, stock))
    assert ours < 1.2 * theirs


def entries_after(half, call, model):
    """The entries of ``feat_cache`` after each chunk of ``half`` in a call, and checks that they stay."""
    found, alive = [], []

    def keep(module, args, options, output):
        for entry, copied in alive:
            assert torch.equal(entry, copied), "an entry was written to"
        cache = options["feat_cache"] or []
        found.append([t.clone() if isinstance(t, torch.Tensor) else t for t in cache])
        alive.extend((t, t.clone()) for t in cache if isinstance(t, torch.Tensor))

    handle = getattr(model, half).register_forward_hook(keep, with_kwargs=True)
    call(model)
    handle.remove()
    return found


@each_family
@pytest.mark.parametrize("name", ["decode", "encode", "decode-two"])
def test_the_cache_is_stocks_after_each_chunk(build, name):
    half = "decoder" if "decode" in name else "encoder"
    levels, call = CALLS[name]
    ours, theirs = (entries_after(half, call, model) for model in twins(build(levels)))
    assert len(ours) == len(theirs) > 1
    for a, b in zip(ours, theirs, strict=True):
        assert [type(t) for t in a] == [type(t) for t in b]
        for x, y in zip(a, b, strict=True):
            if isinstance(x, torch.Tensor):
                cases.agree(x, y, 1e-4)
            else:
                assert x == y


@each_family
def test_injected_between_two_chunks(build):
    fused, stock = twins(build())
    z = cases.noise(1, 4, 2, 2, 3, mean=0.0).split(1, 2)
    found = []
    for second in fused, stock:
        caches = [None] * 64
        for model, part in zip((stock, second), z, strict=True):
            result = model.decoder(part, feat_cache=caches, feat_idx=[0])
        found.append(torch.cat(result, 2) if isinstance(result, list) else result)
    cases.agree(*found, 1e-4)


@pytest.mark.parametrize(("call", "runs"), [(decode_of(3), 0), (encode_of(9), 1)], ids=["up", "down"])
def test_shortcuts_are_added_in_place(call, runs, monkeypatch):
    models = twins(wan_22())
    found = []
    for cls in vae2_2.DupUp3D, vae2_2.AvgDown3D:
        forward = cls.forward
        monkeypatch.setattr(
            cls, "forward", lambda self, *a, _run=forward, **o: found.append(self) or _run(self, *a, **o)
        )
    agree(models, call)
    own = [each for each in found if any(each is module for module in models[0].modules())]
    # Two down blocks. The one that resamples pads the first frame by another.
    assert len(own) == runs


@pytest.mark.parametrize("layer", ["avg_shortcut", "upsamples.1", "upsamples.2"])
def test_a_hook_in_an_up_block_sees_what_it_saw(layer):
    models = twins(wan_22())
    seen = [], []
    for model, found in zip(models, seen, strict=True):
        part = model.decoder.upsamples[0].get_submodule(layer)
        part.register_forward_hook(lambda m, args, y, found=found: found.append(y))
    agree(models, decode_of(2))
    for ours, theirs in zip(*seen, strict=True):
        cases.agree(ours, theirs, 1e-4)


# --- ComfyUI's own VAE ------------------------------------------------------------------


def loaded_wan():
    """ComfyUI's VAE from the weights of a small model. Its number of layers is fixed, not its channels."""
    sizes = {"dim": 8, "z_dim": 16, "dim_mult": [1, 2, 4, 4], "num_res_blocks": 2}
    with torch.device("meta"):
        model = vae.WanVAE(**sizes, temperal_downsample=[False, True, True])
    return comfy.sd.VAE(sd=random_weights(model, torch.float32, "cpu"))


def test_from_a_vae_to_the_frames():
    if cases.WHERE["device"] != "cpu":
        pytest.skip("ComfyUI was started for a CPU")
    model = loaded_wan()
    optimized = optimize_vae(model)
    latent = torch.randn(1, model.latent_channels, 2, 1, 1, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = model.decode(latent)
        close(optimized.decode(latent), expected)
        assert not parts_of(optimized.first_stage_model)[1]
        # The VAE that came in is stock's, also right after the other one ran.
        assert torch.equal(model.decode(latent), expected)
    model_management.unload_all_models()


# --- convolutions ---------------------------------------------------------------------


@each_family
def test_the_fault_of_cudnn_is_avoided(build, monkeypatch):
    """ComfyUI calls cuDNN itself where PyTorch would not call it for a 3-D convolution."""
    fused = twins(build())[0].bfloat16()
    called, conv3d = [], F.conv3d

    def cudnn_convolution(x, weight, padding, stride, dilation, groups, **_):
        called.append(weight.shape)
        return conv3d(x, weight, None, stride, padding, dilation, groups)

    monkeypatch.setattr(comfy.ops, "NVIDIA_MEMORY_CONV_BUG_WORKAROUND", True)
    monkeypatch.setattr(torch, "cudnn_convolution", cudnn_convolution)
    monkeypatch.setattr(F, "conv3d", lambda *a, **o: pytest.fail("PyTorch's convolution ran"))
    fused.decode(cases.noise(1, 4, 2, 2, 3, mean=0.0, dtype=torch.bfloat16))
    assert called


def test_a_cudnn_that_is_wrong_leaves_stocks_code(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91002)
    model = with_random_parameters(wan()).bfloat16()
    before = snapshot(model)
    inject(model)
    assert snapshot(model) == before


# --- what runs stock's code -------------------------------------------------------------


def test_convolutions_that_cast(launches):
    stock = with_random_parameters(wan())
    for conv in stock.modules():
        if isinstance(conv, vae.CausalConv3d):
            conv.comfy_cast_weights = True
    fused = copy.deepcopy(stock)
    inject(fused)
    [(reason, parts)] = parts_of(fused)[1].items()
    assert reason == "it casts its weights at each call"
    assert parts.keys() == {"causal convolutions"}
    agree((fused, stock), decode_of(4), last_is_fused=False)
    agree((fused, stock), encode_of(5), last_is_fused=False)
    assert "frames" not in {name for name, *_ in launches}


@pytest.mark.parametrize(
    "layer", ["conv2", "conv1", "head.2", "middle.0.residual.0", "middle.0.residual.6", "middle.0.shortcut",
              "middle.1.to_qkv", "upsamples.2", "upsamples.2.resample.0", "upsamples.2.time_conv"],
)  # fmt: skip
def test_a_hook_sees_what_it_saw(layer):
    models = twins(wan())
    seen = [], []
    for model, found in zip(models, seen, strict=True):
        part = model if layer == "conv2" else model.decoder
        part.get_submodule(layer).register_forward_hook(
            lambda m, args, y, found=found: found.append(y.clone())
        )
    agree(models, decode_of(2), last_is_fused=False)
    for ours, theirs in zip(*seen, strict=True):
        cases.agree(ours, theirs, 1e-4)


def test_another_number_of_cached_frames(monkeypatch):
    monkeypatch.setattr(vae, "CACHE_T", 3)
    model = wan()
    inject(model)
    [(reason, parts)] = parts_of(model)[1].items()
    assert reason == "its cache has 3 frames, and sdfastgn was tested with 2"
    assert parts.keys() == {"ResNet blocks", "upsampling", "encoder", "decoder"}


def test_a_run_is_interrupted():
    carried_cases.stops_when_interrupted(twins(wan())[0], decode_of(1))
