"""The fused autoencoders of Wan and Qwen-Image: whole ones in chunks, tiles and slices, and their cache."""

import itertools

import pytest
import torch
from diffusers import AutoencoderKLWan
from diffusers.models import autoencoders
from torch import nn

import sdfastgn
from sdfastgn.patches.fusions import causal
from sdfastgn.patches.fusions import wan as fusion
from tests.patches import cases, samples, video_cases
from tests.patches.samples import randomize
from tests.patches.video_cases import (
    codes,
    decode_of,
    drop_all,
    encode_of,
    hooks_see_the_same,
    is_no_less_exact,
    is_restored_bit_by_bit,
    recorded,
    video,
)

pytestmark = [pytest.mark.fused_on_cpu, pytest.mark.usefixtures("on_each_device", "without_gradients")]

SIZES = {"base_dim": 8, "z_dim": 4, "dim_mult": [1, 2], "num_res_blocks": 1, "temperal_downsample": [True]}
# Wan 2.2's blocks have shortcuts around their resampling, and its images are cut into patches.
RESIDUAL = {
    "is_residual": True,
    "in_channels": 12,
    "out_channels": 12,
    "patch_size": 2,
    "decoder_base_dim": 12,
}
THREE_LEVELS = {"dim_mult": [1, 2, 2], "temperal_downsample": [True, False]}


def wan():
    model = AutoencoderKLWan(**SIZES)
    model.spatial_compression_ratio = 2  # no argument before diffusers 0.35
    return model


def wan_22():
    return AutoencoderKLWan(**{**SIZES, **RESIDUAL, **THREE_LEVELS}, scale_factor_spatial=8)


def qwen_image():
    from diffusers import AutoencoderKLQwenImage

    return AutoencoderKLQwenImage(**SIZES)


needs_wan_22 = pytest.mark.skipif(
    not hasattr(autoencoders.vae, "AutoencoderMixin"),
    reason="before diffusers 0.36 its encoder refuses small images",
)
FAMILIES = [
    pytest.param(wan, id="wan-2.1"),
    pytest.param(wan_22, id="wan-2.2", marks=needs_wan_22),
    pytest.param(qwen_image, id="qwen-image",
                 marks=pytest.mark.skipif(fusion.qwen_image is None, reason="a diffusers before Qwen-Image")),
]  # fmt: skip
each_family = pytest.mark.parametrize("build", FAMILIES)


def twins(build, dtype=torch.float32, scale=0.5):
    """(fused, stock). The last convolution is scaled down: a decode is cut off at -1 and 1."""
    stock = randomize(build())
    for p in stock.decoder.conv_out.parameters():
        p.mul_(scale)
    return cases.twins(stock.to(cases.WHERE["device"], dtype))


def pixels(model, frames, batch=1, latents=(2, 3)):
    return video_cases.pixels(model.spatial_compression_ratio, frames, batch, latents)


def same(models, call):
    fused, stock = (call(model) for model in models)
    assert fused.abs().max() < 1 or "encode" in call.__name__
    assert fused.stride() == stock.stride()
    cases.agree(fused, stock)


@each_family
def test_a_video_in_chunks(build, launches):
    models = twins(build)
    sdfastgn.optimize(models[0], cuda_graphs=False)  # the rehearsal of a graph would launch too
    assert not sdfastgn.report(models[0]).skipped
    same(models, decode_of(codes(3)))
    assert {"frames", "upsample"} & {name for name, *_ in launches} == {"frames", "upsample"}
    # No norm of a convolution's input runs by itself: only attention's, in the encoder and in the decoder.
    assert sum(name == "channel_norm" for name, *_ in launches) == 3
    same(models, encode_of(pixels(models[0], 9)))


@each_family
def test_convolutions_of_windows(build, monkeypatch):
    found = []
    convolve = causal.convolve_windows
    monkeypatch.setattr(causal, "is_faster_in_2d", lambda conv, x: conv.kernel_size[0] > conv.stride[0])
    monkeypatch.setattr(causal, "convolve_windows", lambda *a: found.append(a) or convolve(*a))
    models = twins(build)
    same(models, decode_of(codes(3)))
    decoded = len(found)
    same(models, encode_of(pixels(models[0], 9)))
    assert len(found) > decoded > 0


@each_family
def test_an_image(build):
    models = twins(build)
    same(models, decode_of(codes(1)))
    same(models, encode_of(pixels(models[0], 1)))


@each_family
def test_slices_and_tiles(build):
    models = twins(build)
    for model in models:
        model.enable_slicing()
        sides = [model.spatial_compression_ratio * size for size in (4, 4, 3, 3)]
        model.enable_tiling(*sides)
    same(models, decode_of(codes(2, batch=2, latents=(1, 2))))
    same(models, encode_of(pixels(models[0], 5, batch=2, latents=(1, 2))))
    same(models, decode_of(codes(2, latents=(5, 4))))
    same(models, encode_of(pixels(models[0], 5, latents=(5, 4))))


@each_family
def test_calls_leave_nothing_for_the_next_one(build):
    fused, _ = twins(build)
    z = codes(2, latents=(1, 2))
    first = fused.decode(z).sample
    fused.decode(codes(3, latents=(1, 2)) + 1)
    assert torch.equal(fused.decode(z).sample, first)


@each_family
def test_restored_bit_by_bit(build):
    stock = randomize(build()).to(cases.WHERE["device"])
    is_restored_bit_by_bit(
        stock, decode_of(codes(2, latents=(1, 2))), encode_of(pixels(stock, 5, latents=(1, 2)))
    )


# --- the cache ----------------------------------------------------------------------


def block(family="wan", C_in=6, C_out=10):
    module = fusion.wan if family == "wan" else fusion.qwen_image
    name = "WanResidualBlock" if family == "wan" else "QwenImageResidualBlock"
    return randomize(getattr(module, name)(C_in, C_out)).to(cases.WHERE["device"])


def entries(cache):
    return [t for t in cache if isinstance(t, torch.Tensor)]


def same_cache(ours, theirs):
    assert [type(t) for t in ours] == [type(t) for t in theirs]
    for a, b in zip(entries(ours), entries(theirs), strict=True):
        assert a.shape == b.shape
        cases.agree(a, b)


# Chunks of frames, as encoder and decoder make them and as they do not.
CHUNKS = [(1,), (2,), (1, 1), (1, 1, 1), (1, 2, 1), (1, 4), (3, 1), (2, 2), (1, 1, 4)]


@pytest.mark.parametrize("chunks", CHUNKS, ids=str)
def test_the_cache_of_a_block_is_stocks(chunks):
    fused, stock = cases.twins(block())
    x = samples.video(1, 6, sum(chunks), 3, 4).to(cases.WHERE["device"])
    caches = [None] * 2, [None] * 2
    for part in x.split(chunks, 2):
        indices = [0], [0]
        found = [m(part, c, i) for m, c, i in zip((fused, stock), caches, indices, strict=True)]
        cases.agree(*found)
        assert indices == ([2], [2])
        same_cache(*caches)
        # An entry of its own: what the caller does with x and the result does not reach it.
        kept = [t.clone() for t in caches[0]]
        part.add_(1), found[0].add_(1)
        assert all(map(torch.equal, caches[0], kept))
        part.sub_(1)


@pytest.mark.parametrize("chunks", [(1,), (1, 1), (1, 1, 1), (1, 1, 2), (1, 2, 1), (2, 3)], ids=str)
def test_the_cache_of_an_upsampling_is_stocks(chunks):
    fused, stock = cases.twins(randomize(fusion.wan.WanResample(8, "upsample3d")).to(cases.WHERE["device"]))
    x = samples.video(2, 8, sum(chunks), 3, 4).to(cases.WHERE["device"])
    caches = [None], [None]
    for part in x.split(chunks, 2):
        cases.agree(*(m(part, c, [0]) for m, c in zip((fused, stock), caches, strict=True)))
        same_cache(*caches)
    assert caches[0] == ["Rep"] or len(chunks) > 1


@pytest.mark.parametrize("half", ["encoder", "decoder"])
def test_the_cache_of_a_half_is_stocks_after_each_chunk(half):
    models = [getattr(model, half) for model in twins(wan)]
    C = 3 if half == "encoder" else 4
    caches = [None] * 32, [None] * 32
    for part in cases.noise(1, C, 9, 4, 6, mean=0.0).split((1, 4, 4), 2):
        indices = [0], [0]
        cases.agree(
            *(m(part, feat_cache=c, feat_idx=i) for m, c, i in zip(models, caches, indices, strict=True))
        )
        assert indices[0] == indices[1]
        same_cache(*caches)


def test_stocks_cache_is_taken_and_left(monkeypatch):
    """A model that is optimized or restored between two chunks."""
    fused, stock = cases.twins(block())
    parts = video(1, 6, 4, 3, 4).split((1, 1, 2), 2)
    mixed, expected = [None] * 2, [None] * 2
    for part, model in zip(parts, (stock, fused, stock), strict=True):
        cases.agree(model(part, mixed, [0]), stock(part, expected, [0]))
        same_cache(mixed, expected)


# Each breaks one rule of the cache, and the tests above must tell.
def _nothing_is_read(convolve):
    return lambda conv, x, cache=None, **options: convolve(conv, x, None, **options)


def _one_frame_is_kept(convolve):
    return lambda *args, keep=0, **options: convolve(*args, keep=min(keep, 1), **options)


def _kept_before_the_norm(convolve):
    def mutant(conv, x, cache=None, *, keep=0, **options):
        y, kept = convolve(conv, x, cache, keep=keep, **options)
        return y, x[:, :, -1:] if keep == 1 else kept

    return mutant


def _an_older_frame_is_kept(convolve):
    def mutant(conv, x, cache=None, *, keep=0, **options):
        y, kept = convolve(conv, x, cache, keep=keep, **options)
        return y, cache if keep and cache is not None else kept

    return mutant


MUTANTS = [_nothing_is_read, _one_frame_is_kept, _kept_before_the_norm, _an_older_frame_is_kept]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__.strip("_"))
def test_a_wrong_cache_is_seen(mutant, monkeypatch):
    monkeypatch.setattr(causal, "convolve", mutant(causal.convolve))
    with pytest.raises(AssertionError):
        test_the_cache_of_a_block_is_stocks((1, 1, 1))


# --- what runs stock's code -----------------------------------------------------------


@pytest.fixture
def convolutions(monkeypatch):
    """A list of the convolutions that run fused."""
    return recorded(monkeypatch, causal, "convolve")


def test_a_block_is_three_convolutions(convolutions):
    fused, _ = cases.twins(block())
    fused(video(1, 6, 1, 3, 4))
    assert convolutions == [fused.conv_shortcut, fused.conv1, fused.conv2]


PARTS = ["norm1", "norm2", "nonlinearity", "conv1", "conv2", "conv_shortcut", "dropout"]


@pytest.mark.parametrize("name", PARTS)
def test_a_hook_on_a_layer_sees_what_it_saw(name):
    models = cases.twins(block())
    x = video(1, 6, 3, 3, 4)
    caches = [None] * 2, [None] * 2

    def call():
        for part in x.split((1, 2), 2):
            cases.agree(*(m(part, c, [0]) for m, c in zip(models, caches, strict=True)))

    hooks_see_the_same(models, name, call)
    same_cache(*caches)


CHANGES = {
    "a-replaced-conv-forward": lambda m: setattr(
        m.conv1, "_conv_forward", lambda x, w, b: nn.functional.conv3d(x, 2 * w, b)
    ),
    "another-norm": lambda m: setattr(m, "norm1", nn.Identity()),
    "a-norm-over-the-last-axis": lambda m: (
        setattr(m.norm1, "channel_first", False), setattr(m.norm1, "gamma", nn.Parameter(torch.ones(1)))
    ),
    "another-activation": lambda m: setattr(m, "nonlinearity", nn.Tanh()),
    "dropout": drop_all,
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_changed_layers_run_stocks_code(change):
    models = cases.twins(block())
    for model in models:
        change(model)
        model.to(cases.WHERE["device"])
    x = video(1, 6, 2, 3, 4)
    cases.agree(*(model(x) for model in models))


def test_an_activation_without_a_fused_form_is_skipped():
    block = fusion.wan.WanResidualBlock(6, 6)
    block.nonlinearity = nn.Tanh()
    model = sdfastgn.optimize(block)
    (skipped,) = sdfastgn.report(model).skipped
    assert skipped.reason == "activation Tanh has no fused form"
    assert {e.fusion for e in sdfastgn.report(model).fused} == {"wan_norm", "wan_conv"}


def test_another_number_of_cached_frames_is_skipped(monkeypatch):
    monkeypatch.setattr(fusion.wan, "CACHE_T", 3)
    reasons = {e.reason for e in sdfastgn.report(fusion.wan.WanResidualBlock(6, 6)).skipped}
    assert reasons == {"its cache has 3 frames, and sdfastgn was tested with 2"}


def test_gradients_are_stocks_and_only_norms_are_fused(convolutions):
    models = cases.twins(block())
    x = video(1, 6, 2, 3, 4)
    cases.same_gradients(models, x)
    assert not convolutions


def test_autocast_runs_stocks_code(convolutions):
    models = cases.twins(block())
    x = video(1, 6, 2, 3, 4)
    with torch.autocast(cases.WHERE["device"], torch.bfloat16):
        found = [model(x) for model in models]
    assert not convolutions
    cases.agree(*found, bound=2e-2)


def test_under_a_compiler_the_graph_is_diffusers_own():
    cases.compiles_to_stocks_graph(cases.twins(block()), lambda m: m(video(1, 6, 2, 3, 4)))


def test_a_cache_of_another_dtype_runs_stocks_code(convolutions):
    models = cases.twins(block())
    x = video(1, 6, 1, 3, 4)
    caches = [[cases.noise(1, C, 2, 3, 4).double() for C in (6, 10)] for _ in models]
    for model, cache in zip(models, caches, strict=True):
        with pytest.raises(RuntimeError):  # a convolution of fp64 frames with fp32 weights
            model(x, cache, [0])
    assert convolutions == [models[0].conv_shortcut]


def test_channels_first_frames(convolutions):
    models = cases.twins(block())
    cases.agree(*(m(samples.video(1, 6, 2, 3, 4).contiguous().to(cases.WHERE["device"])) for m in models))
    assert convolutions


@pytest.mark.parametrize(
    "layer", ["decoder.mid_block.resnets.0.conv1", "decoder.mid_block.attentions.0.to_qkv"]
)
def test_a_hook_within_a_whole_model(layer):
    models = twins(wan)
    for model in models:
        model.get_submodule(layer).register_forward_hook(lambda m, args, y: 2 * y)
    same(models, decode_of(codes(2, latents=(1, 2))))


# --- the blocks of Wan 2.2 ------------------------------------------------------------

# Channels of input and output, and whether frames are resampled too.
SHORTCUTS = [(8, 8, True), (8, 4, True), (4, 8, True), (8, 1, True), (8, 8, False), (8, 4, False),
             (4, 8, False), (3, 6, True), (2, 16, True)]  # fmt: skip


def residual_block(kind, C_in, C_out, temporal):
    if kind == "up":
        module = fusion.wan.WanResidualUpBlock(C_in, C_out, 1, temperal_upsample=temporal, up_flag=True)
    else:
        module = fusion.wan.WanResidualDownBlock(C_in, C_out, 0.0, 1, temporal, True)
    return randomize(module).to(cases.WHERE["device"])


@needs_wan_22
@pytest.mark.parametrize(("C_in", "C_out", "temporal"), SHORTCUTS, ids=str)
@pytest.mark.parametrize("kind", ["up", "down"])
def test_shortcuts_around_resampling(kind, C_in, C_out, temporal, monkeypatch):
    models = cases.twins(residual_block(kind, C_in, C_out, temporal))
    runs = []
    shortcut = models[0].avg_shortcut
    original = type(shortcut).forward
    monkeypatch.setattr(
        type(shortcut), "forward", lambda self, *a, **o: runs.append(self) or original(self, *a, **o)
    )
    parts = samples.video(2, C_in, 5, 4, 6).to(cases.WHERE["device"]).split((1, 4), 2)
    caches = [None] * 8, [None] * 8
    for i, part in enumerate(parts):
        options = {"first_chunk": i == 0} if kind == "up" else {}
        cases.agree(*(m(part, c, [0], **options) for m, c in zip(models, caches, strict=True)))
        same_cache(*caches)
    # The first frame of a pair is padded by stock.
    uneven = kind == "down" and temporal
    assert runs.count(shortcut) == int(uneven)


@needs_wan_22
@pytest.mark.parametrize("name", ["avg_shortcut", "upsampler", "resnets.1"])
def test_a_hook_in_a_residual_block_sees_what_it_saw(name):
    models = cases.twins(residual_block("up", 8, 4, True))
    seen = [], []
    for model, found in zip(models, seen, strict=True):
        model.get_submodule(name).register_forward_hook(lambda m, args, y, found=found: found.append(y))
    x = samples.video(1, 8, 1, 4, 6).to(cases.WHERE["device"])
    cases.agree(*(m(x, [None] * 8, [0], first_chunk=True) for m in models))
    cases.agree(*(found[0] for found in seen))


# --- numbers ------------------------------------------------------------------------


def of_32_channels():
    """On Hopper its largest frames have convolutions of windows."""
    model = AutoencoderKLWan(**{**SIZES, "base_dim": 32})
    model.spatial_compression_ratio = 2
    return model


@pytest.mark.gpu
@pytest.mark.parametrize("build", [*FAMILIES, of_32_channels])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_no_less_exact_than_stock(build, dtype):
    models = twins(build, dtype)
    x = pixels(models[1], 9, latents=(17, 23))
    is_no_less_exact(models, (decode_of, codes(3, latents=(17, 23))), (encode_of, x))


def test_every_pair_of_chunks_is_the_whole():
    """However a video is cut, a causal block gives the same."""
    fused, _ = cases.twins(block(C_out=6))
    x = video(1, 6, 4, 3, 4)
    whole = fused(x)
    for first, second in itertools.product((1, 2), (1, 2)):
        cases.agree(
            samples.in_chunks(fused, x, first, second, *([4 - first - second] if first + second < 4 else [])),
            whole,
        )
