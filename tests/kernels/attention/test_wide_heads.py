"""Wide attention in chunks against fp64, and where it leaves the work to PyTorch."""

import pytest
import torch
import torch.nn.functional as F

from sdfastgn.kernels.attention import wide_heads, wide_heads_kernels
from sdfastgn.kernels.attention.config import ChunksConfig
from sdfastgn.kernels.attention.wide_heads import attend, wide_attention
from sdfastgn.kernels.common.launch import Launch
from tests.kernels.ops import true_attention
from tests.kernels.samples import HALVES, error, first_alone, in_fp64, interpreted, kernels, skip_cut_off

pytestmark = pytest.mark.usefixtures("poisoned_memory")

# Weights and result are rounded; Triton's interpreter cuts bf16 off instead.
BOUNDS = {torch.float16: 6e-4, torch.bfloat16: 8e-3}
# (N, heads, L, D), keys, (rows of a chunk, splits of the keys) or None for those of an H200.
CASES = [
    pytest.param((1, 1, 7, 264), 16, None, id="one-chunk"),
    pytest.param((1, 1, 21, 264), 33, (8, 1), id="odd-keys-and-a-shorter-last-chunk"),
    pytest.param((2, 1, 16, 264), 24, (8, 1), id="equal-chunks-of-two-images"),
    pytest.param((3, 2, 3, 512), 5, None, id="all-heads-in-a-chunk"),
    pytest.param((3, 1, 4, 264), 9, (2, 4, 1), id="a-last-chunk-of-fewer-images"),
    pytest.param((1, 1, 5, 264), 64, (4, 4), id="parts-of-the-keys"),
    pytest.param((1, 2, 5, 333), 48, (5, 2), id="parts-and-odd-channels"),
    pytest.param((1, 1, 1, 264), 1, None, id="one-key"),
]
each_case = pytest.mark.parametrize(("shape", "keys", "chunks"), CASES)


@pytest.fixture(autouse=True)
def in_chunks(monkeypatch):
    """Every size runs in chunks; ``in_chunks((rows, splits))`` makes them small."""
    monkeypatch.setattr(wide_heads, "pays", lambda *sizes: True)
    monkeypatch.setattr(wide_heads_kernels, "_plans", {})

    def patch(chunks, block=None):
        monkeypatch.setattr(wide_heads_kernels, "_plans", {})
        if chunks is not None:
            matrices, rows, splits = (1, *chunks)[-3:]
            monkeypatch.setattr(
                wide_heads_kernels,
                "chunks_config",
                lambda count, L, keys, *_: ChunksConfig(matrices, rows, -(-keys // 8) * 8, splits),
            )
        if block is not None:
            monkeypatch.setattr(wide_heads_kernels, "softmax_config", lambda keys: (block, 1, keys <= block))

    return patch


def make(shape, keys, dtype=torch.float16, device="cpu", mean=1.0, std=1.0, seed=0):
    """q, k, v, of which v has a mean away from zero; ``std`` is that of the scaled scores, about."""
    g = torch.Generator().manual_seed(seed)
    N, heads, _, D = shape
    q, k, v = (torch.randn(size, generator=g) for size in (shape, (N, heads, keys, D), (N, heads, keys, D)))
    return [t.to(dtype).to(device) for t in (q * std, k, v + mean)]


run = kernels(direct=True)(wide_attention)
truth = in_fp64(true_attention)


@pytest.fixture
def launches(monkeypatch):
    """One entry a call that runs in chunks."""
    found = []
    stock = wide_heads_kernels.launch_wide_attention
    monkeypatch.setattr(wide_heads_kernels, "launch_wide_attention", lambda *a: found.append(1) or stock(*a))
    return found


# --- the kernels --------------------------------------------------------------


@each_case
@pytest.mark.parametrize("dtype", first_alone(HALVES))
def test_every_way(in_chunks, launches, shape, keys, chunks, dtype, device):
    in_chunks(chunks)
    tensors = make(shape, keys, dtype, device)
    before = [t.clone() for t in tensors]
    y = run(*tensors)
    assert all(map(torch.equal, tensors, before))
    assert (y.shape, y.dtype) == (torch.Size(shape), dtype)
    assert y.is_contiguous()
    assert error(y, truth(*tensors)) < BOUNDS[dtype]
    assert len(launches) == 1
    assert torch.equal(run(*tensors), y)
    assert error(run(*tensors, scale=0.3), truth(*tensors, scale=0.3)) < 2 * BOUNDS[dtype]


@pytest.mark.parametrize("keys", [16, 17, 40, 41], ids=lambda n: f"{n}keys")
def test_rows_that_are_read_twice(in_chunks, keys, device):
    tensors = make((1, 1, 6, 264), keys, device=device, std=20.0)
    whole = run(*tensors)
    in_chunks((4, 1), block=16)
    y = run(*tensors)
    assert error(y, truth(*tensors)) < BOUNDS[torch.float16]
    torch.testing.assert_close(y, whole, atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    ("std", "mean"),
    [
        pytest.param(1.0, 0.0, id="usual"),
        pytest.param(1.0, 8.0, id="values-far-from-zero"),
        pytest.param(0.01, 8.0, id="nearly-equal-weights"),
        pytest.param(60.0, 1.0, id="large-logits"),
        pytest.param(600.0, 1.0, id="huge-logits"),
    ],
)
def test_no_less_exact_than_pytorch(in_chunks, dtype, std, mean, device):
    skip_cut_off(dtype, device)
    in_chunks((16, 2))
    tensors = make((1, 1, 24, 320), 96, dtype, device, mean, std)
    expected = truth(*tensors)
    assert error(run(*tensors), expected) <= error(F.scaled_dot_product_attention(*tensors), expected) * 1.02


@pytest.mark.parametrize("block", [None, 16], ids=["whole-rows", "rows-read-twice"])
def test_sums_are_of_the_rounded_weights(in_chunks, monkeypatch, block, device):
    in_chunks(None, block)
    arguments = []

    class Recorded(Launch):
        def __call__(self, stream, *tensors):
            super().__call__(stream, *tensors)
            arguments.append([t.clone() for t in tensors])

    monkeypatch.setattr(wide_heads_kernels, "Launch", Recorded)
    run(*make((1, 1, 9, 264), 51, device=device, std=3.0))
    scores, weights, sums = arguments[0]
    scores, weights = (t[: 9 * 56].view(9, 56)[:, :51].double() for t in (scores, weights))
    exact = ((scores - scores.amax(1, keepdim=True)) * 264**-0.5).exp()
    torch.testing.assert_close(weights, exact, atol=1e-7, rtol=2**-11 + 1e-5)
    torch.testing.assert_close(sums.double(), weights.sum(1), atol=0, rtol=3e-7)
    assert ((sums / exact.sum(1) - 1).abs() > 1e-6).all()  # which no other sum would be


@pytest.mark.parametrize("offset", [0.0, 60.0, -60.0])
def test_rows_of_equal_scores_are_averages(offset, device):
    q, k, v = make((1, 1, 4, 264), 48, device=device)
    q, k = torch.full_like(q, offset / 264**0.5), k[:, :, :1].abs().expand(-1, -1, 48, -1)
    torch.testing.assert_close(
        run(q, k, v)[0, 0], v[0, 0].double().mean(0).half().expand(4, -1), atol=0, rtol=1e-3
    )


@pytest.mark.parametrize("block", [None, 16], ids=["whole-rows", "rows-read-twice"])
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")], ids=str)
@pytest.mark.parametrize("where", ["q", "k", "v"])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, under the interpreter
def test_what_is_not_finite_goes_where_pytorch_lets_it_go(in_chunks, where, bad, block, device):
    in_chunks((4, 2), block)
    tensors = dict(zip("qkv", make((1, 1, 6, 264), 32, device=device), strict=True))
    tensors[where][0, 0, 3, 5] = bad
    y, expected = run(**tensors), truth(**tensors)
    assert not expected.isfinite().all()
    assert torch.equal(y.isnan(), expected.isnan())
    assert torch.equal(y.isinf(), expected.isinf())
    finite = expected.isfinite()
    assert not finite.any() or error(y[finite], expected[finite]) < 1e-3


@pytest.mark.parametrize(
    "lay_out",
    [
        pytest.param(lambda t: torch.cat((t, t), -1)[..., : t.shape[-1]], id="gaps"),
        pytest.param(lambda t: t.mT.contiguous().mT, id="channels-apart"),
        pytest.param(lambda t: t.transpose(1, 2).contiguous().transpose(1, 2), id="tokens-of-all-heads"),
        pytest.param(lambda t: torch.cat((t[0, 0, 0, :1], t.flatten()))[1:].view(t.shape), id="unaligned"),
    ],
)
def test_operands_in_any_layout(in_chunks, lay_out, device):
    in_chunks((4, 2))
    tensors = make((2, 2, 5, 264), 32, device=device)
    assert torch.equal(run(*map(lay_out, tensors)), run(*tensors))


def test_memory_is_one_chunks(in_chunks, monkeypatch, device):
    in_chunks((4, 2))
    made = []
    stock = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **o: made.append(stock(*a, **o)) or made[-1])
    run(*make((2, 1, 64, 264), 1056, device=device))
    own = sorted(t.numel() for t in made if t.numel() != 2 * 64 * 264)
    assert own == [4, 4 * 1056, 4 * 1056]


# --- the public function ------------------------------------------------------


@interpreted
def test_what_does_not_pay_is_pytorchs(launches, monkeypatch):
    tensors = make((1, 2, 5, 264), 7)
    assert torch.equal(wide_attention(*tensors), F.scaled_dot_product_attention(*tensors))
    monkeypatch.setattr(wide_heads, "pays", lambda L, keys, D: L > 5)
    run(*tensors)
    run(*(t.float() for t in make((1, 2, 6, 264), 7)))
    with monkeypatch.context() as amd:
        amd.setattr(torch.version, "hip", "7.0")
        run(*make((1, 2, 6, 264), 7))
    assert not launches
    run(*make((1, 2, 6, 264), 7))
    assert launches


def test_the_result_is_contiguous_also_where_pytorchs_is_not():
    q, k, v = (torch.randn(1, 30, 4, 8).transpose(1, 2) for _ in range(3))
    assert run(q, k, v).is_contiguous()


def test_attend_is_traced_as_pytorchs(launches, recwarn):
    tensors = make((1, 1, 5, 264), 7)
    with kernels(direct=True):
        traced = torch.jit.trace(attend, tensors, check_trace=False)
    assert "scaled_dot_product_attention" in str(traced.graph)
    assert not [w for w in recwarn if issubclass(w.category, torch.jit.TracerWarning)]
    assert not launches


@interpreted
@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("f", [attend, wide_attention], ids=["attend", "wide_attention"])
def test_gradients_transforms_and_autocast_are_pytorchs(launches, f):
    tensors = make((1, 1, 5, 264), 7)
    with kernels(direct=True):
        f(*tensors)
        assert len(launches) == 1
        leaves = [t.clone().requires_grad_() for t in tensors]
        stock = [t.clone().requires_grad_() for t in tensors]
        f(*leaves).float().sum().backward()
        F.scaled_dot_product_attention(*stock).float().sum().backward()
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(leaves, stock, strict=True))
        torch.vmap(f)(*(t[None] for t in tensors))
        with torch.autocast("cpu", torch.bfloat16):
            assert f(*tensors).dtype is F.scaled_dot_product_attention(*tensors).dtype
        assert len(launches) == 1
        with torch.no_grad(), torch.autocast("cpu", torch.float16):
            f(*leaves)
        assert len(launches) == 2


@interpreted
def test_attend_is_pytorchs_where_shapes_or_dtypes_differ(launches):
    q, k, v = make((2, 1, 5, 264), 7)
    with kernels(direct=True):
        narrow = v[..., :100]
        assert torch.equal(attend(q, k, narrow), F.scaled_dot_product_attention(q, k, narrow))
        assert torch.equal(attend(q, k[:1], v[:1]), F.scaled_dot_product_attention(q, k[:1], v[:1]))
        with pytest.raises(RuntimeError):
            attend(q, k, v.float())
        assert not launches
        assert error(attend(q, k, v), truth(q, k, v)) < 6e-4
        assert launches


@pytest.mark.parametrize("shape", [(0, 1, 3, 8), (1, 1, 0, 8)], ids=str)
def test_empty_tensors(shape, device):
    assert run(*make(shape, 4, device=device)).shape == shape


# --- GPU ----------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("std", [1.0, 30.0], ids=lambda s: f"std{s:g}")
@pytest.mark.parametrize(
    "shape",
    [(1, 1, 4096, 512), (1, 1, 9216, 512), (1, 1, 16384, 512), (3, 1, 1024, 512), (1, 1, 20001, 320)],
    ids=str,
)
def test_real_shapes_on_the_gpu(shape, std, dtype):
    g = torch.Generator("cuda").manual_seed(0)
    q, k, v = (torch.randn(shape, generator=g, device="cuda") for _ in range(3))
    q, k, v = (q * std).to(dtype), k.to(dtype), (v + 2).to(dtype)
    y, stock = wide_attention(q, k, v), F.scaled_dot_product_attention(q, k, v)
    some = torch.arange(
        0, shape[2], max(1, shape[2] // 500), device="cuda"
    )  # all of them in fp64 take gigabytes
    expected = truth(q[:, :, some], k, v)
    assert error(y[:, :, some], expected) <= error(stock[:, :, some], expected) * 1.02


@pytest.mark.gpu
def test_peak_memory():
    q, k, v = (torch.randn((1, 1, 16384, 512), device="cuda").half() for _ in range(3))
    wide_attention(q, k, v)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    y = wide_attention(q, k, v)
    assert torch.cuda.max_memory_allocated() - before - y.nbytes < 100 * 2**20
