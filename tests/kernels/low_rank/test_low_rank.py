"""``add_low_rank`` against fp64: in the interpreter, or on a GPU if there is one."""

import pytest
import torch

from sdfastgn.kernels.low_rank import op
from sdfastgn.kernels.low_rank.op import Factors, Sum, add_low_rank
from tests.kernels.samples import DTYPES, kernels, skip_cut_off

pytestmark = pytest.mark.usefixtures("poisoned_memory")
run = kernels()(add_low_rank)

LAST = torch.channels_last
# name -> (shape of the weight, its memory format, ranks of the adapters)
LAYERS = {
    "linear": ((70, 136), None, (4,)),
    "no-adapter": ((33, 64), None, ()),
    "three-adapters": ((65, 40), None, (16, 5, 33)),
    "pointwise": ((24, 16, 1, 1), LAST, (8,)),
    "window": ((24, 16, 3, 3), LAST, (4, 20)),
    "window-channels-first": ((24, 10, 3, 3), None, (4,)),
    "bias": ((70,), None, (1,)),
    "odd": ((3, 7), None, (2,)),
}


def made(shape, memory_format, ranks, dtype, device, adapters=None, factors_last=False):
    g = torch.Generator().manual_seed(sum(shape))

    def normal(*sizes, dtype=dtype):
        return torch.randn(*sizes, generator=g).to(dtype).to(device)

    weight = normal(*shape)
    if memory_format is not None:
        weight = weight.contiguous(memory_format=memory_format)
    pairs = []
    for i, rank in enumerate(ranks):
        a = normal(*((rank, *shape[1:]) if len(shape) > 1 else (1, 1)), dtype=adapters or dtype)
        b = normal(shape[0], rank, *(1 for _ in shape[2:]), dtype=adapters or dtype)
        if factors_last and a.dim() == 4:
            a = a.contiguous(memory_format=LAST)
        pairs.append(Factors(a, b, (0.7, -1.3, 0.0)[i]))
    return Sum(torch.empty_like(weight), weight, tuple(pairs))


def in_fp64(total):
    y = total.weight.double()
    for a, b, scale in total.pairs:
        y = y + scale * (b.double().flatten(1) @ a.double().flatten(1)).view(y.shape)
    return y


def check(total):
    true = in_fp64(total)
    # The bound allows for the rounding of the result to its dtype, and of products and sums in fp32.
    eps = torch.finfo(total.weight.dtype).eps
    size = total.weight.double().abs() + sum(
        abs(s) * (b.double().abs().flatten(1) @ a.double().abs().flatten(1)).view(true.shape)
        for a, b, s in total.pairs
    )
    bound = 0.51 * eps * true.abs() + 8e-6 * size
    assert ((total.out.double() - true).abs() <= bound).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_layers_of_all_kinds_in_one_call(dtype, device):
    skip_cut_off(dtype, device)
    sums = [made(*layer, dtype, device) for layer in LAYERS.values()]
    run(sums)
    for total in sums:
        check(total)


@pytest.mark.parametrize("name", LAYERS)
def test_factors_in_fp32_and_channels_last(name, device):
    total = made(*LAYERS[name], torch.float16, device, adapters=torch.float32, factors_last=True)
    run([total])
    check(total)


@pytest.mark.parametrize("adapters", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("rank", [100, 300, 512, 1024])
def test_high_ranks(rank, adapters, device):
    total = made((9, 24), None, (rank, 4), torch.float16, device, adapters)
    run([total])
    check(total)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_a_loop_over_ranks_changes_no_bit(dtype, device, monkeypatch):
    total = made((65, 72), None, (64, 33), dtype, device)
    run([total])
    expected = total.out.clone()
    monkeypatch.setattr(op, "rank_blocks", lambda *_: (32, True))
    op._tables.cache_clear()
    run([total._replace(out=total.out.zero_())])
    op._tables.cache_clear()
    assert torch.equal(total.out, expected)


def test_factors_of_different_dtypes(device):
    total = made(*LAYERS["linear"], torch.float16, device)
    a, b, scale = total.pairs[0]
    mixed = total._replace(pairs=(Factors(a, b.float(), scale), Factors(a.float(), b, scale)))
    run([mixed])
    check(mixed)
    one = total._replace(pairs=(Factors(a.float(), b, scale),))
    run([one])
    check(one)


def test_autocast_changes_no_product(device):
    """The kernel does not take factors of different dtypes, so PyTorch computes their products."""
    total = made(*LAYERS["linear"], torch.float32, device)
    a, b, scale = total.pairs[0]
    mixed = total._replace(pairs=(total.pairs[0], Factors(a.half(), b.half(), scale)))
    with torch.autocast(torch.device(device).type, torch.bfloat16):
        run([mixed])
    check(mixed)


def test_a_scale_changes_and_the_tables_stay(device):
    total = made(*LAYERS["window"], torch.float16, device)
    for scale in (0.5, -2.0, 0.0):
        again = total._replace(pairs=tuple(p._replace(scale=scale) for p in total.pairs))
        run([again])
        check(again)


def test_strides_that_the_kernel_does_not_take(device):
    total = made(*LAYERS["linear"], torch.float16, device)
    a, b, scale = total.pairs[0]
    apart = torch.empty(*b.shape, 2, dtype=b.dtype, device=device)[..., 0].copy_(b)
    spread = total._replace(pairs=(Factors(a.t().contiguous().t(), apart, scale),))
    run([spread])
    check(spread)
