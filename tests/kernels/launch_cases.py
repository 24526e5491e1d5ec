"""Calls that launch every kernel of the package once or more, and their launches, without a GPU."""

import functools
import math
from unittest import mock

import torch

import sdfastgn
from sdfastgn.kernels.act_linear import shared
from sdfastgn.kernels.act_linear.op import act_linear
from sdfastgn.kernels.ada_norm.op import Norm as RowNorm
from sdfastgn.kernels.ada_norm.op import ada_norm, ada_norm_in_e4m3
from sdfastgn.kernels.attention import wide_heads_kernels
from sdfastgn.kernels.attention.few_keys import attend_to_few
from sdfastgn.kernels.attention.over_frames import attend_in_samples, attend_over_frames
from sdfastgn.kernels.attention.wide_heads import wide_attention
from sdfastgn.kernels.batch_norm.fold import Folded, fold_batch_norm
from sdfastgn.kernels.channel_norm.op import channel_norm
from sdfastgn.kernels.checksum.op import checksums
from sdfastgn.kernels.common.launch import Launch
from sdfastgn.kernels.geglu.gated import gated
from sdfastgn.kernels.geglu.op import geglu
from sdfastgn.kernels.layer_norm.grouped import Groups, grouped_layer_norm
from sdfastgn.kernels.low_rank.op import Factors, Sum, add_low_rank, rank_blocks
from sdfastgn.kernels.pad_frames.op import GroupNorm, Norm, pad_frames
from sdfastgn.kernels.quantize_rows.op import quantize_rows
from sdfastgn.kernels.rotate.op import rotate
from sdfastgn.kernels.statistics.config import statistics_pay
from sdfastgn.kernels.statistics.op import add_kernel, cat_kernel
from sdfastgn.kernels.upsample.conv_kernels import launch_interleave, launch_phase_weights
from sdfastgn.kernels.upsample.nearest import upsample_nearest_2x

HALF = torch.float16

# Shapes by what takes them: all for the oldest generation and for the H200's, a few for the others.

# Images of a UNet: small and split ones, the last two with chunks of several tiles.
IMAGES = [
    (2, 1280, 8, 8),
    (2, 2560, 16, 16),
    (2, 640, 32, 32),
    (2, 320, 64, 64),
    (2, 960, 128, 128),
    (1, 512, 256, 256),
]
SMALL, SPLIT = IMAGES[0], IMAGES[3]
# Groups of one channel each, small and split.
ONE_CHANNEL = [(2, 64, 16, 16), (2, 64, 128, 128)]
# Enough of large groups that the backward walks through each.
WALKED = (80, 512, 56, 56)
# Rows that are no whole number of tiles.
ODD_ROWS = (2, 320, 56, 56)
# Batches: a small one, ResNet-50's, one of few channels, and rows that are no whole number of tiles.
BATCHES = [(2, 64, 8, 8), (32, 256, 14, 14), (32, 256, 56, 56), (8, 2, 320, 320)]
ODD_BATCH = (33, 96, 28, 28)
# So many samples that gradients of parameters are summed in parts.
SAMPLES = (100000, 32)
# (rows, D) of LayerNorm: tokens of a UNet, rows that are far too short or too long for a warp.
TOKENS = [(8192, 320), (2048, 1280), (10**7, 10), (10, 10**7)]
# A text encoder's, and the longest rows that stay in registers.
MORE_TOKENS = [(154, 768), (4096, 1000), (64, 8192), (64, 16384), (2048, 333)]
# (rows, D) of the first feed-forward layers of SD1.5 and of SDXL's most frequent block.
GATED = [(8192, 1280), (2048, 5120)]
# Odd and short rows.
MORE_GATED = [(77, 333), (10**6, 10)]
# (samples, rows, D) of transformers: Flux's, two samples of SD3.5, Wan's, and short rows.
MODULATED = [(1, 4608, 3072), (2, 4096, 1536), (1, 14040, 1536)]
MORE_MODULATED = [(1, 4096, 3840), (2, 333, 333), (1, 77, 64)]
# (N, C, K) of time embeddings: SD1.5's and SDXL's in a ResNet block, with the most rows, and the
# longest ones.
FEW_ROWS = [(2, 1280, 1280), (2, 320, 1280), (16, 1280, 1280), (2, 1280, 2816)]
MORE_FEW_ROWS = [(1, 640, 1280), (2, 2560, 1280), (3, 1280, 320), (4, 77, 333), (4, 1280, 8192)]
# (queries, keys, channels of a head): SD1.5's and SDXL's cross-attention.
PROMPTS = [(4096, 77, 40), (1024, 77, 64), (64, 77, 80), (64, 128, 128)]
# Heads that need products from shared memory.
MORE_PROMPTS = [(256, 77, 160), (256, 128, 256)]
# (frames, pixels, channels of a head): SVD's and AnimateDiff's attention over frames.
FRAMES = [(14, 9216, 64), (16, 4096, 40), (16, 256, 160), (25, 144, 64), (3, 6240, 512)]
# Chunks of Wan's VAE, from the middle to the last level.
VIDEOS = [(1, 384, 1, 60, 104), (1, 192, 4, 240, 416), (1, 96, 4, 480, 832)]
# Of Wan 2.2's, and channels that no vector divides.
MORE_VIDEOS = [(1, 1024, 1, 30, 52), (1, 30, 2, 17, 19)]
# (tokens, channels) of a VAE's mid block at 512^2, at 1024^2, and at 2048^2, where a row of scores
# does not fit into registers.
ATTENDED = [(4096, 512), (16384, 512), (65536, 512)]

# Generations that convert to E4M3.
WITH_E4M3 = ("sm_89", "sm_90", "sm_100", "sm_120")
# The weight of a layer.
WEIGHT = (1280, 640)


def cases(generation):
    """(shape, dtype, kind) of what is compiled for a generation; ``kind`` is a key of ``KINDS``."""
    every = generation in ("sm_75", "sm_90")
    found = [(shape, HALF, kind) for shape, kind in _shapes(every=every)]
    found.append((WEIGHT, HALF, "weights"))
    if every:
        found += [(SPLIT, torch.float32, "channels_last"), (SPLIT, HALF, "channels_first")]
    if generation.startswith("gfx"):  # AMD's: attention is PyTorch's own
        return [case for case in found if case[2] != "wide"]
    if generation == "sm_75":  # which has no instruction for bf16
        found += [(shape, torch.bfloat16, kind) for shape, kind in _shapes(every=False)]
    else:
        found += [(shape, HALF, "attention") for shape in PROMPTS]
        found += [(shape, HALF, "over_frames") for shape in FRAMES]
    if generation in WITH_E4M3:
        found += [(shape, HALF, "e4m3") for shape in (*TOKENS[:2], TOKENS[-1])]
    if generation in ("sm_90", "sm_100"):
        found += [(shape, torch.bfloat16, "attention") for shape in MORE_PROMPTS]
        found += [(shape, torch.bfloat16, "over_frames") for shape in FRAMES]
    return found + (_only_on_the_h200() if generation == "sm_90" else [])


def _shapes(*, every):
    """What is compiled in fp16: every shape, or one for each way through the kernels."""
    lists = {
        "channels_last": (IMAGES, [SMALL, SPLIT]),
        "one_channel": (ONE_CHANNEL, ONE_CHANNEL[:1]),
        "tokens": (TOKENS, [TOKENS[0], TOKENS[-1]]),
        "gated": (GATED, GATED[:1]),
        "modulated": (MODULATED, MODULATED[1:2]),
        "few_rows": (FEW_ROWS, FEW_ROWS[:1]),
        "wide": (ATTENDED, ATTENDED[1:]),
        "walked": ([WALKED], [WALKED]),
        "batch": (BATCHES, BATCHES[:2]),
        "samples": ([SAMPLES], [SAMPLES]),
        "video": (VIDEOS, VIDEOS[-1:]),
    }
    for kind, (all_shapes, representative) in lists.items():
        for shape in all_shapes if every else representative:
            yield shape, kind


def _only_on_the_h200():
    """Other dtypes and odd sizes: what they compile differs between generations as the rest does."""
    full, brain = torch.float32, torch.bfloat16
    return [
        (SMALL, HALF, "autocast"),
        (SMALL, HALF, "channels_first"),
        (SPLIT, brain, "channels_last"),
        (ONE_CHANNEL[0], full, "one_channel"),
        (WALKED, full, "walked"),
        *((shape, dtype, "batch") for shape in (*BATCHES[1:3], ODD_BATCH) for dtype in (brain, full)),
        *((ODD_ROWS, dtype, "channels_first") for dtype in (HALF, full)),
        *((shape, HALF, "few_rows") for shape in MORE_FEW_ROWS),
        *((shape, full, "few_rows") for shape in FEW_ROWS),
        (FEW_ROWS[0], brain, "few_rows"),
        *((shape, brain, "video") for shape in (*VIDEOS, *MORE_VIDEOS)),
        (VIDEOS[0], full, "video"),
        (ATTENDED[1], brain, "wide"),
        ((1111, 264), HALF, "wide"),
        *((shape, HALF, "tokens") for shape in MORE_TOKENS),
        *((shape, full, "tokens") for shape in (TOKENS[1], TOKENS[2], MORE_TOKENS[2])),
        *((shape, HALF, "gated") for shape in MORE_GATED),
        *((GATED[0], dtype, "gated") for dtype in (brain, full)),
        *((shape, brain, "modulated") for shape in (*MODULATED[:2], *MORE_MODULATED)),
        (MODULATED[0], full, "modulated"),
    ]


def launches(shape, dtype, kind):
    """(launch, its tensors) of every kernel that the public functions launch; nothing runs."""
    made = []
    with mock.patch.object(Launch, "__call__", lambda self, stream, *tensors: made.append((self, tensors))):
        KINDS[kind](shape, dtype)
    yield from made


def _differentiate(call, *operands, wanted):
    """Runs ``call`` and its backward, with gradients of the operands at ``wanted``."""
    operands = tuple(t.detach().requires_grad_(i in wanted) for i, t in enumerate(operands))
    results = call(*operands)
    results = results if isinstance(results, tuple) else (results,)
    results = tuple(y for y in results if y.requires_grad)
    dys = [torch.empty_like(y) for y in results]
    torch.autograd.grad(results, [operands[i] for i in wanted], dys)


def _layer_norms(shape, dtype):
    x = torch.empty(shape, dtype=dtype)
    weight = x.new_empty(shape[1])
    sdfastgn.layer_norm(x.detach().requires_grad_(), weight, weight)
    sdfastgn.add_layer_norm(x, x, weight, weight, total_bias=weight)
    if shape[1] <= 16384:
        for groups in (Groups(64, added=x[:2]), Groups(64, position=x[:2])):
            for residual in (None, x):
                grouped_layer_norm(x, weight, weight, 1e-5, groups, residual=residual, total_bias=weight)

    def add(x, residual, weight, bias, add_bias):
        return sdfastgn.add_layer_norm(x, residual, weight, bias, add_bias=add_bias)

    for wanted in ((0, 2, 3, 4), (0,)):
        _differentiate(add, x, x, weight, weight, weight, wanted=wanted)


@torch.no_grad()
def _in_e4m3(shape, dtype):
    x, quantizer = torch.empty(shape, dtype=dtype), torch.empty(8)
    weight = x.new_empty(shape[1])
    sdfastgn.layer_norm(x, weight, weight, quantizer=quantizer)
    sdfastgn.add_layer_norm(x, x, weight, weight, total_bias=weight, quantizer=quantizer)
    geglu(x, weight, quantizer=quantizer)
    quantize_rows(x[None])
    quantize_rows(x[None], "identity", x[None], "gelu_tanh")
    quantize_rows(x[None], "silu", x[None], multiplies=True)
    for norm in (RowNorm("layer"), RowNorm("rms", weight)):
        ada_norm_in_e4m3(x[None], x[None], weight[None, None], None, norm, weight[None, None])


def _few_keys(shape, dtype):
    L, S, D = shape
    q, k = (torch.empty((2, rows, 8, D), dtype=dtype).transpose(1, 2) for rows in (L, S))
    assert attend_to_few(q, k, k) is not None


def _over_frames(shape, dtype):
    T, P, D = shape
    qkv = torch.empty((2, T * P, 3 * 8, D), dtype=dtype).transpose(1, 2)
    attend_over_frames(*qkv.chunk(3, 1), T)
    in_samples = torch.empty((P, T, 3 * 8, D), dtype=dtype).transpose(1, 2)
    assert attend_in_samples(*in_samples.chunk(3, 1), is_causal=True) is not None


def _gated(shape, dtype):
    x = torch.empty((shape[0], 2 * shape[1]), dtype=dtype)
    bias = x.new_empty(2 * shape[1])
    geglu(x)
    with torch.no_grad():
        for activation in ("silu", "gelu", "gelu_tanh"):
            gated(*x.chunk(2, -1), activation)
    for wanted in ((0, 1), (0,), (1,)):
        _differentiate(geglu, x, bias, wanted=wanted)


def _modulated(shape, dtype):
    x = torch.empty(shape, dtype=dtype)
    for modulation in (x[:, :1], x[:, :1].float()):
        layer, rms = RowNorm("layer"), RowNorm("rms", x[0, 0])
        ada_norm(x, x, modulation, None, layer, modulation, modulation, plus_one=True)
        ada_norm(x, x, modulation, rms, rms, modulation, tanh=True, plus_one=True)
    ada_norm(x, x, modulation, None, RowNorm("layer", x[0, 0], x[0, 0]))
    ada_norm(x, x, modulation, RowNorm("none", None, x[0, 0]))
    ada_norm(x, x, modulation)
    ada_norm(x, norm=rms)
    if shape[2] % 64 == 0:
        heads = x.view(*shape[:2], -1, 64)
        table = torch.empty((1, shape[1], 1, 64))
        rotate(heads, table, table)
        rotate(heads, table, table, halves=True)
        rotate(heads, table[..., ::2], table[..., 1::2])
        weight = torch.empty(64, dtype=dtype)
        rotate(heads, table, table, weight, out=torch.empty_like(heads))
        rotate(heads, table[..., ::2], table[..., 1::2], weight)
        rotate(heads, table, None, weight)
        rotate(heads, None, None, weight)
        rotate(heads, None, None)
        for halves in (False, True):
            rotate(heads, table, table, halves=halves, layer=True)
            rotate(heads, table, table, weight, halves=halves, bias=weight, layer=True)


def _few_rows(shape, dtype):
    N, C, K = shape
    x, weight, bias = (torch.empty(size, dtype=dtype) for size in ((N, K), (C, K), (C,)))
    act_linear(x, weight, bias)
    with shared.rehearsed():
        act_linear(x, weight, bias, "silu", extra_bias=bias)


def _wide_heads(shape, dtype):
    q = torch.empty((1, 1, *shape), dtype=dtype)
    with mock.patch.object(wide_heads_kernels, "_multiply"):  # cuBLAS's
        wide_attention(q, q, q)


def _group_norms(shape, dtype, memory_format):
    x, head, tail = (
        torch.empty((shape[0], C, *shape[2:]), dtype=dtype).to(memory_format=memory_format)
        # The skip connection of an up block: 2x960x64x64 is 640 + 320 channels.
        for C in (shape[1], shape[1] - shape[1] // 3 // 8 * 8, shape[1] // 3 // 8 * 8)
    )
    weight = x.new_empty(shape[1])

    def norm(x, weight, bias):
        return sdfastgn.group_norm(x, 32, weight, bias, activation="silu")

    if statistics_pay(shape[1], math.prod(shape[2:])):
        sdfastgn.add_with_statistics(x, x, weight)
        sdfastgn.cat_with_statistics(head, tail)
        add_kernel(x, None, weight, 1.0, out=x)
    add_kernel(x, x, weight, 1.0, emits=False)
    add_kernel(x, x, weight, 1.0, emits=False, activation="silu")
    add_kernel(x, None, weight, 1.0, emits=False, out=x, activation="silu")
    add_kernel(x, x, weight, 1.0, factors=torch.empty((2, len(x))))
    add_kernel(x, None, x.new_empty(x.shape[:2]), 1.0, out=x)
    if memory_format is torch.channels_last:
        cat_kernel(head, tail, emits=False)
        _around_an_upsampled_convolution(x)
        _differentiate(upsample_nearest_2x, x, wanted=(0,))
    _differentiate(norm, x, weight, weight, wanted=(0, 1, 2))


def _in_both_layouts(shape, dtype, groups, activations, *, shift):
    """Gradients in both layouts, with every activation; with ``shift`` also those of a shift."""
    weight = torch.empty(shape[1], dtype=dtype)
    for memory_format in (torch.channels_last, torch.contiguous_format):
        x = torch.empty(shape, dtype=dtype, memory_format=memory_format)
        for activation in activations:

            def norm(x, w, b, activation=activation):
                return sdfastgn.group_norm(x, groups, w, b, activation=activation)

            _differentiate(norm, x, weight, weight, wanted=(0, 1, 2))
        if shift:

            def shifted(x, w, b, shift):
                return sdfastgn.group_norm(x, groups, w, b, shift=shift)

            _differentiate(shifted, x, weight, weight, weight, wanted=(0, 1, 2, 3))


def _batch_norms(shape, dtype):
    """In training and in eval, with and without a residual."""
    weight = torch.empty(shape[1])  # fp32 as a rule, whatever x is
    x = torch.empty(shape, dtype=dtype, memory_format=torch.channels_last)

    def norm(training, activation, x, w, b, *residual):
        (added,) = residual or (None,)
        averages = weight, weight
        return sdfastgn.batch_norm(x, *averages, w, b, training, 0.1, 1e-5, activation, residual=added)

    relu_in_training = functools.partial(norm, True, "relu")
    for image in (x, x.contiguous()):
        _differentiate(relu_in_training, image, weight, weight, image, wanted=(0, 1, 2, 3))
    _differentiate(functools.partial(norm, True, "silu"), x, weight, weight, wanted=(0, 1, 2))
    _differentiate(functools.partial(norm, False, "relu"), x, weight, weight, x, wanted=(0,))


def _fp32_results(shape, dtype):
    x = torch.empty(shape, dtype=dtype, memory_format=torch.channels_last)
    with mock.patch.object(torch, "is_autocast_enabled", return_value=True):
        sdfastgn.group_norm(x.requires_grad_(), 32, activation="silu")


def _around_an_upsampled_convolution(x):
    """What runs before and behind the convolution, which would take long here."""
    N, C, H, W = x.shape
    weight, bias = x.new_empty((C, C, 3, 3)), x.new_empty(C)
    for w in (weight, weight.to(memory_format=torch.channels_last)):
        launch_phase_weights(w, x.new_empty((4 * C, 2, 2, C)))
    y = x.new_empty((N, C, 2 * H, 2 * W))
    for statistics in (None, bias):
        launch_interleave(x.new_empty((N, H + 1, W + 1, 4 * C)), bias, y, statistics)


def _samples(shape, dtype):
    x = torch.empty(shape, dtype=dtype)
    weight = x.new_empty(shape[1])
    _differentiate(lambda x, w, b: sdfastgn.group_norm(x, 8, w, b), x, weight, weight, wanted=(0, 1, 2))


def _channel_norms(shape, dtype):
    x = torch.empty(shape, dtype=dtype, memory_format=torch.channels_last_3d)
    weight = x.new_empty(shape[1])

    def norm(x, weight, bias):
        return channel_norm(x, weight, bias, shape[1] ** 0.5, activation="silu")

    channel_norm(x, weight)
    silu = Norm(weight, activation="silu")
    pad_frames(x, front=2, keep=1)
    pad_frames(x, x[:, :, :1].contiguous(memory_format=torch.channels_last_3d), front=2, norm=silu, keep=2)
    padded = {"front": 2, "border": (1, 1), "mode": "replicate"}
    groups = 5 if shape[1] % 32 else 32
    pad_frames(x, norm=silu, shift=weight, **padded)
    pad_frames(x, front=2, window=3, norm=silu, keep=2, shift=weight)
    pad_frames(x, upsample=(2, 2, 2), **padded)
    pad_frames(x, front=1, back=1, mode="replicate", norm=silu._replace(added=1e-6))
    pad_frames(x, front=2, border=(1, 1), mode="reflect", norm=silu)
    if shape[1] <= 512:  # no model has a GroupNorm of more channels in its videos
        grouped = GroupNorm(groups, weight, weight, activation="silu")
        pad_frames(x, norm=grouped, shift=weight, **padded)
        pad_frames(x, norm=grouped._replace(modulation=torch.cat((x, x), 1)), **padded)
        pad_frames(x, norm=grouped._replace(framewise=True), **padded)
    for wanted in ((0, 1, 2), (0,)):
        _differentiate(norm, x, weight, weight, wanted=wanted)


def _weights(shape, dtype):
    """One call for each kernel that LoRA adapters of ranks up to 1024 need."""
    weight = torch.empty(shape, dtype=dtype)
    of_one_dtype = [(each, each) for each in (dtype, torch.bfloat16, torch.float32)]
    for types in (*of_one_dtype, (dtype, torch.float32)):
        ranks = {rank_blocks(rank, *types): rank for rank in range(1, 1025)}
        for rank in ranks.values():
            a = torch.empty((rank, shape[1]), dtype=types[0])
            pair = Factors(a, torch.empty((shape[0], rank), dtype=types[1]), 1.0)
            add_low_rank([Sum(torch.empty_like(weight), weight, (pair,))])
    checksums([weight])
    vector = weight.new_empty(shape[0])
    for bias in (None, vector):
        fold_batch_norm(Folded(weight, bias, vector, vector, vector, vector), 1e-5)


KINDS = {
    "channels_last": lambda shape, dtype: _group_norms(shape, dtype, torch.channels_last),
    "channels_first": lambda shape, dtype: _group_norms(shape, dtype, torch.contiguous_format),
    "one_channel": lambda shape, dtype: _in_both_layouts(shape, dtype, shape[1], ("silu",), shift=False),
    "walked": lambda shape, dtype: _in_both_layouts(
        shape, dtype, 32, ("identity", "silu", "gelu"), shift=True
    ),
    "batch": _batch_norms,
    "samples": _samples,
    "autocast": _fp32_results,
    "tokens": _layer_norms,
    "video": _channel_norms,
    "gated": _gated,
    "e4m3": _in_e4m3,
    "few_rows": _few_rows,
    "modulated": _modulated,
    "weights": _weights,
    "attention": _few_keys,
    "over_frames": _over_frames,
    "wide": _wide_heads,
}
