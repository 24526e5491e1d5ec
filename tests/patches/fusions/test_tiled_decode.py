"""A large latent is decoded in strips: the image of a decode in one piece, in bounded memory."""

import copy
import gc
import weakref

import pytest
import torch
from diffusers import AutoencoderKL
from peft import LoHaConfig, LoraConfig, inject_adapter_in_model
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import sdfastgn
from sdfastgn.models.architectures import build_vae
from sdfastgn.patches.fusions import strip_chain, tiled_decode
from tests.patches.cases import agree
from tests.patches.samples import randomize

pytestmark = [pytest.mark.fused_on_cpu, pytest.mark.usefixtures("without_gradients")]

TILE = 4  # latents along a side of a tile


@pytest.fixture(scope="module")
def stock():
    sizes = {"block_out_channels": (8, 16, 16), "norm_num_groups": 4, "sample_size": 4 * TILE}
    down, up = ("DownEncoderBlock2D",) * 3, ("UpDecoderBlock2D",) * 3
    vae = AutoencoderKL(**sizes, down_block_types=down, up_block_types=up)
    return randomize(vae)


def latents(*shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def tiled(vae):
    vae = copy.deepcopy(vae)
    vae.enable_tiling()
    return vae


def optimized(stock, **options):
    return sdfastgn.optimize(tiled(stock), **options)


def shapes(h, w, *maps):
    return [(channels, scale * h, scale * w) for channels, scale in maps]


# The maps of the decoder after the middle block, as (channels, scale), in the order in which they are made.
_ALL = [(16, 1)] * 2 + [(16, 2)] * 3 + [(16, 4)] + [(8, 4)] * 2


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    ("most", "maps"),
    [
        pytest.param(1 << 30, [], id="in-one-piece"),
        pytest.param(160_000, _ALL[2:], id="all-held"),
        pytest.param(85_000, _ALL[:5] + _ALL[6:], id="without-the-widest"),
        pytest.param(50_000, _ALL[:5], id="half-of-the-size"),
        pytest.param(0, _ALL[:2], id="only-the-smallest"),
    ],
)
def test_the_image_is_that_of_a_decode_in_one_piece(stock, held, monkeypatch, most, maps):
    monkeypatch.setattr(strip_chain, "MOST_BYTES", most)
    z = latents(1, 4, 11, 9)
    vae = optimized(stock)
    expected = stock.decode(z).sample
    agree(vae.decode(z).sample, expected)
    assert held == shapes(11, 9, *maps)
    assert (tiled(stock).decode(z).sample - expected).abs().max() > 0.05


@pytest.mark.drawn(1)
@pytest.mark.parametrize("shape", [(2, 4, 9, 5), (1, 4, 1, 17), (1, 4, 17, 1), (3, 4, 4, 5)])
@pytest.mark.parametrize("slicing", [False, True], ids=["whole-batch", "sliced"])
def test_any_size_and_batch(stock, held, shape, slicing):
    vae, z = optimized(stock), latents(*shape)
    vae.use_slicing = slicing
    agree(vae.decode(z).sample, stock.decode(z).sample)
    agree(vae.tiled_decode(z, return_dict=False)[0], stock.decode(z).sample)
    assert held


def test_in_inference_mode(stock, held):
    with torch.inference_mode():
        z, vae = latents(1, 4, 9, 6), optimized(stock)
        agree(vae.decode(z).sample, stock.decode(z).sample)
    assert held


def test_in_16_bits_the_error_is_that_of_stock(stock, held):
    z = latents(1, 4, 9, 6)
    expected, half = stock.decode(z).sample, copy.deepcopy(stock).half()
    error = (half.decode(z.half()).sample.float() - expected).abs().max()
    found = optimized(half).decode(z.half()).sample
    assert found.dtype is torch.float16
    assert (found.float() - expected).abs().max() < 2 * error


def test_a_latent_of_one_tile_is_decoded_as_before(stock, held):
    vae, z = optimized(stock), latents(1, 4, TILE, TILE)
    agree(vae.decode(z).sample, stock.decode(z).sample)
    assert not held


def test_layers_may_need_another_dtype_than_the_middle_block(stock, held):
    """Pipelines of older releases run only the layers after it in fp32."""
    vae, z = copy.deepcopy(stock).half(), latents(1, 4, 9, 6)
    vae.decoder.up_blocks.float()
    vae.decoder.conv_norm_out.float()
    vae.decoder.conv_out.float()
    agree(optimized(vae).decode(z.half()).sample, stock.decode(z).sample, 5e-2)


# ---- memory


class Live(TorchDispatchMode):
    """Adds up the sizes of all tensors that are made inside it and are alive.

    ``peak``: the maximum. ``largest``: the size of the largest tensor.
    """

    def __init__(self):
        super().__init__()
        self.sizes, self.now, self.peak, self.largest = {}, 0, 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            storage = tensor.untyped_storage() if isinstance(tensor, torch.Tensor) else None
            if storage is not None and storage.data_ptr() not in self.sizes:
                self._add(storage)
        return result

    def _add(self, storage):
        key, size = storage.data_ptr(), storage.nbytes()
        self.sizes[key] = size
        self.now += size
        self.peak, self.largest = max(self.peak, self.now), max(self.largest, size)
        weakref.finalize(storage, self._remove, key)

    def _remove(self, key):
        self.now -= self.sizes.pop(key)


def memory_of(vae, z):
    gc.disable()  # a map in a cycle of references would stay until a garbage collection
    try:
        with Live() as live:
            image = vae.decode(z).sample
        return live.peak - image.nbytes, live.largest, image
    finally:
        gc.enable()


@pytest.mark.slow
def test_memory_is_bounded_by_the_held_maps_and_a_few_strips(stock, held, monkeypatch):
    vae, z = optimized(stock), latents(1, 4, 32, 24)
    of_half = 4 * 16 * 64 * 48  # a map at half of the image's size
    whole = memory_of(stock, z)[0]
    for most in (3 * of_half, 5 * of_half):
        monkeypatch.setattr(strip_chain, "MOST_BYTES", most)
        peak, _, image = memory_of(vae, z)
        agree(image, stock.decode(z).sample)
        strip = max(most // strip_chain.STRIPS, 4 * (4 + 2) * 16 * 96)
        # PyTorch's form of a norm has more maps than a kernel.
        assert peak < most + 8 * strip < whole
    monkeypatch.setattr(strip_chain, "MOST_BYTES", 2 * of_half)
    peak, largest, _ = memory_of(vae, z)
    assert largest == of_half  # no map of the image's size was held
    assert peak < whole / 4


def test_what_may_be_held_grows_with_the_tile_and_with_the_middle_block():
    parts = tiled_decode._parts(build_vae("sdxl", torch.float16, "meta").decoder)
    x = torch.empty((1, 512, 256, 256), dtype=torch.float16, device="meta")
    assert strip_chain._held_bytes(parts, x, 128**2) == strip_chain.MOST_BYTES
    assert strip_chain._held_bytes(parts, x.float(), 128**2) == 3 * 256 * 1024**2 * 4
    assert strip_chain._held_bytes(parts, x.repeat(1, 1, 4, 4), 128**2) == 7 * 16 * x.nbytes
    assert strip_chain._held_bytes(parts, x, 192**2) == 3 * 256 * 1536**2 * 2


# ---- when stock's tiles are decoded


def same_as_stocks_tiles(vae, stock, z):
    found, expected = vae.decode(z).sample, tiled(stock).decode(z).sample
    agree(found, expected)
    assert (found - stock.decode(z).sample).abs().max() > 0.05


def reasons(vae):
    return [entry.reason for entry in sdfastgn.report(vae).skipped]


@pytest.mark.slow
def test_it_can_be_turned_off_and_on_again(stock, held):
    z = latents(1, 4, 9, 6)
    vae = optimized(stock, exact_tiling=False, strict=True)
    same_as_stocks_tiles(vae, stock, z)
    assert "tiled_decode" not in {entry.fusion for entry in sdfastgn.report(vae).entries}
    agree(sdfastgn.optimize(vae).decode(z).sample, stock.decode(z).sample)
    assert "tiled_decode" in {entry.fusion for entry in sdfastgn.report(vae).fused}
    same_as_stocks_tiles(sdfastgn.optimize(vae, exact_tiling=False), stock, z)
    assert "tiled_decode" in {entry.fusion for entry in sdfastgn.report(sdfastgn.restore(vae)).fusable}


def test_restored_it_decodes_exactly_as_stock(stock, held):
    z, before = latents(1, 4, 9, 6), tiled(stock)
    vae = sdfastgn.restore(optimized(stock))
    assert torch.equal(vae.decode(z).sample, before.decode(z).sample)
    assert vars(vae).keys() == vars(before).keys()


@pytest.mark.slow
def test_a_copy_decodes_without_the_original(stock, held):
    z, vae = latents(1, 4, 9, 6), optimized(stock)
    copied, shallow = copy.deepcopy(vae), copy.copy(vae)
    del vae
    gc.collect()
    agree(copied.decode(z).sample, stock.decode(z).sample)
    same_as_stocks_tiles(shallow, stock, z)


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("decoder", "decoder has a hook, and would run in strips"),
        (
            "decoder.up_blocks.1.resnets.0.conv1",
            "decoder.up_blocks.1.resnets.0.conv1 has a hook, and would run in strips",
        ),
    ],
)
def test_a_hook_in_the_decoder_sees_stocks_tiles(stock, held, path, reason):
    vae, z = optimized(stock), latents(1, 4, 9, 6)
    hook = vae.get_submodule(path).register_forward_hook(lambda *args: None)
    same_as_stocks_tiles(vae, stock, z)
    assert reasons(vae) == [reason]
    hook.remove()
    agree(vae.decode(z).sample, stock.decode(z).sample)
    assert not reasons(vae)


def test_a_replaced_forward_in_the_decoder_runs_on_stocks_tiles(stock, held):
    vae, z = optimized(stock), latents(1, 4, 9, 6)
    conv = vae.decoder.conv_in
    conv.forward = lambda x: nn.Conv2d.forward(conv, x)
    same_as_stocks_tiles(vae, stock, z)
    assert reasons(vae) == ["other code replaced the forward of decoder.conv_in"]


def test_training_decodes_stocks_tiles(stock, held):
    vae, z = optimized(stock), latents(1, 4, 9, 6)
    with torch.enable_grad():
        same_as_stocks_tiles(vae, stock, z)
    same_as_stocks_tiles(vae.train(), stock, z)
    assert reasons(vae) == ["it is in training mode"]


@pytest.mark.slow
def test_without_memory_stocks_tiles_are_decoded(stock, held, monkeypatch):
    def hold(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    z = latents(2, 4, 11, 9)
    vae = optimized(stock)
    monkeypatch.setattr(strip_chain, "hold", hold)
    agree(vae.decode(z).sample, tiled(stock).decode(z).sample)


@pytest.mark.without_kernels
def test_without_kernels_stocks_tiles_are_decoded(stock, held):
    same_as_stocks_tiles(optimized(stock), stock, latents(1, 4, 9, 6))
    assert not held


class OtherNorm(nn.GroupNorm):
    pass


class OtherAutoencoder(AutoencoderKL):
    pass


def _other_norm(vae):
    vae.decoder.conv_norm_out.__class__ = OtherNorm


def _other_class(vae):
    vae.__class__ = OtherAutoencoder


def _other_method(vae):
    vae.tiled_decode = vae.tiled_decode


def _other_padding(vae):
    vae.decoder.conv_out.padding_mode = "circular"


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_other_norm, "its decoder has a norm that is no nn.GroupNorm"),
        (_other_class, f"its class {__name__}.OtherAutoencoder is a subclass of AutoencoderKL"),
        (_other_method, "other code replaced this instance's tiled_decode"),
        (_other_padding, "its decoder has a convolution that is no 3 x 3 nn.Conv2d with a border of zeros"),
    ],
)
def test_other_decoders_are_left_alone(stock, held, change, reason):
    vae = tiled(stock)
    change(vae)
    sdfastgn.optimize(vae)
    assert reason in [e.reason for e in sdfastgn.report(vae).skipped if e.fusion == "tiled_decode"]
    vae.decode(latents(1, 4, 9, 6))
    assert not held


def test_a_decoder_that_changes_after_optimize_is_decoded_in_stocks_tiles(stock, held):
    vae, z = optimized(stock), latents(1, 4, 9, 6)
    _other_padding(vae)
    vae.decode(z)
    assert not held
    assert len(reasons(vae)) == 1


def test_unknown_code_of_diffusers_is_left_alone(stock, held, monkeypatch):
    def tiled_decode_of_tomorrow(self, z, return_dict=True):
        return AutoencoderKL.tiled_decode(self, z, return_dict)

    monkeypatch.setattr(AutoencoderKL, "tiled_decode", tiled_decode_of_tomorrow)
    vae = sdfastgn.optimize(copy.deepcopy(stock))
    assert reasons(vae) == [
        "AutoencoderKL.tiled_decode of this diffusers is not a version that sdfastgn was tested with"
    ]


# ---- adapters

_CONVOLUTIONS = {
    "all": r"decoder\..*(conv|conv1|conv2|conv_in|conv_out|conv_shortcut|to_q)",
    "in-blocks": r"decoder\..*conv[12]",
    "shortcuts": r"decoder\..*conv_shortcut",
    "upsampling": r"decoder\..*upsamplers\.0\.conv",
    "last": r"decoder\.conv_out",
}
each_order = pytest.mark.parametrize("order", ["before-optimize", "after-optimize"])


def adapted(stock, config, order="stock", **options):
    """(tiled VAE with an adapter, the same VAE without tiles); only the first one is optimized."""
    vae, whole = tiled(stock), copy.deepcopy(stock)
    if order == "after-optimize":
        sdfastgn.optimize(vae, **options)
    for each in (vae, whole):
        torch.manual_seed(2)
        inject_adapter_in_model(config, each)
    if order == "before-optimize":
        sdfastgn.optimize(vae, **options)
    return vae, whole


def reason_of_strips(vae):
    """Why strips do not run, by the report; None if they do."""
    [entry] = [e for e in sdfastgn.report(vae).entries if e.fusion == "tiled_decode"]
    return entry.reason or None


@pytest.mark.slow
@each_order
@pytest.mark.parametrize("layers", _CONVOLUTIONS.values(), ids=_CONVOLUTIONS)
def test_a_lora_runs_in_strips(stock, held, layers, order):
    z = latents(1, 4, 9, 6)
    config = LoraConfig(r=2, target_modules=layers, init_lora_weights=False)
    vae, whole = adapted(stock, config, order)
    assert reason_of_strips(vae) is None
    expected = whole.decode(z).sample
    for _ in range(2):
        agree(vae.decode(z).sample, expected)
        assert held
        held.clear()
    with torch.enable_grad():
        assert reason_of_strips(vae) is None
    assert (expected - stock.decode(z).sample).abs().max() > 0.01
    for each in (vae, whole):
        [layer.scale_layer(3) for layer in each.modules() if isinstance(layer, BaseTunerLayer)]
    agree(vae.decode(z).sample, whole.decode(z).sample)


_UNMERGED = {
    "dora": (LoraConfig(use_dora=True), {}, "its adapter is a variant of LoRA, such as DoRA"),
    "loha": (LoHaConfig(init_weights=False), {}, "its kind of adapter is not merged"),
    "not-merged": (LoraConfig(init_lora_weights=False), {"merge_adapters": False}, "merge_adapters is False"),
}


@pytest.mark.drawn(1)
@each_order
@pytest.mark.parametrize(("config", "options", "reason"), _UNMERGED.values(), ids=_UNMERGED)
def test_an_adapter_that_is_not_merged_runs_in_stocks_tiles(stock, held, config, options, reason, order):
    z, config = latents(1, 4, 9, 6), copy.copy(config)
    config.r, config.target_modules = 2, _CONVOLUTIONS["in-blocks"]
    vae, whole = adapted(stock, config, order, **options)
    found, expected = vae.decode(z).sample, adapted(stock, config)[0].decode(z).sample
    agree(found, expected)
    assert (found - whole.decode(z).sample).abs().max() > 0.05
    assert not held
    path = "decoder.up_blocks.0.resnets.0.conv1"
    assert reason_of_strips(vae) == f"the adapter of {path} is not merged: {reason}"
    for layer in vae.decoder.modules():
        for name, child in [*layer.named_children()]:
            if isinstance(child, BaseTunerLayer):
                setattr(layer, name, child.get_base_layer())
    assert reason_of_strips(vae) is None
    agree(vae.decode(z).sample, stock.decode(z).sample)
    assert held


# ---- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_on_a_gpu_the_image_is_that_of_a_decode_in_one_piece(dtype):
    exact = build_vae("sdxl", torch.float32, "cuda").eval()
    z = (latents(1, 4, 160, 136) * torch.linspace(0.1, 2, 136)).cuda()  # tiles have other statistics
    expected = exact.decode(z).sample
    stock = exact.to(dtype)
    error = (stock.decode(z.to(dtype)).sample.float() - expected).abs().max().item()
    found = optimized(stock).decode(z.to(dtype)).sample.float()
    assert (found - expected).abs().max().item() < 2 * error + 5e-3


@pytest.mark.gpu
def test_on_a_gpu_it_needs_about_the_memory_of_stocks_tiles():
    stock = tiled(build_vae("sdxl", torch.float16, "cuda").eval())
    z, found = latents(1, 4, 256, 256, dtype=torch.float16).cuda(), []
    for vae in (stock, optimized(stock)):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        vae.decode(z)
        found.append(torch.cuda.max_memory_allocated() - before)
    assert found[1] < 1.5 * found[0]
    assert found[1] < 1.5 * strip_chain.MOST_BYTES


@pytest.mark.gpu
@each_order
def test_on_a_gpu_a_lora_runs_in_strips(stock, held, order):
    config = LoraConfig(r=2, target_modules=_CONVOLUTIONS["all"], init_lora_weights=False)
    vae, whole = adapted(copy.deepcopy(stock).cuda(), config, order)
    z = latents(1, 4, 9, 6).cuda()
    for _ in range(3):
        agree(vae.decode(z).sample, whole.decode(z).sample, 1e-3)
        assert held
        held.clear()
    assert reason_of_strips(vae) is None
