"""Products in E4M3, by the algorithm that a rehearsal has chosen; on a GPU every algorithm is right."""

from contextlib import contextmanager

import pytest
import torch

from sdfastgn.kernels.common.e4m3 import E4M3
from sdfastgn.kernels.product import cublaslt, op
from sdfastgn.kernels.product.e4m3 import row_scaled_product, scaled_product
from tests.kernels.samples import BOUNDS, HALVES, error

SMALL = (24, 48, 32)
# Sums on Hopper keep about 14 bits. Each instruction adds 32 products, and truncates the sum. The errors of
# several instructions partly cancel: over a depth of 5120, an H100 gave an error of 0.0015 in fp16. It stayed
# below 0.001 over depths of 320 and 1280. So for each instruction 2 ** -17 is allowed.
FAST_SUMS = 2.0**-17 / 32


def make(shape=SMALL, dtype=torch.float16, device="cpu"):
    """x and weight in E4M3, their scales, and what the product is added to."""
    rows, columns, depth = shape
    g = torch.Generator().manual_seed(0)
    x, weight = torch.randn((rows, depth), generator=g) + 1, torch.randn((columns, depth), generator=g)
    total = torch.randn((rows, columns), generator=g).to(dtype)
    scales = torch.tensor([0.5]), torch.tensor([0.125])
    return [
        x.to(E4M3).to(device),
        weight.to(E4M3).to(device),
        tuple(s.to(device) for s in scales),
        total.to(device),
    ]


def make_rows(shape=SMALL, dtype=torch.bfloat16, device="cpu"):
    """x and weight in E4M3, a scale for each of their rows, and a bias."""
    x, weight, _, total = make(shape, dtype, device)
    scales = tuple(torch.rand(len(t), generator=torch.Generator().manual_seed(1)) + 0.1 for t in (x, weight))
    return x, weight, tuple(s.to(device) for s in scales), total[0].clone()


def truth(x, weight, scales):
    a, b = (s.double().unsqueeze(1) for s in scales)
    return (x.double() * a) @ (weight.double() * b).t()


class Library:
    """Stands for cuBLASLt: algorithms by name, their times and their errors, and who was called."""

    def __init__(self, **algorithms):
        self.found, self.called = algorithms, []

    def algorithms(self, shape, device):
        assert shape.is_e4m3
        if "none at all" in self.found:
            raise cublaslt.Refused("no products in E4M3")
        return list(self.found)

    def multiply(self, shape, algorithm, x, weight, bias, out, scales):
        self.called.append(algorithm)
        if self.found[algorithm][1] is None:
            raise cublaslt.Refused("not for this product")
        product = truth(x, weight, scales) + (out.double() if shape.adds else 0)
        product += 0 if bias is None else bias.double()
        out.copy_(product + self.found[algorithm][1])

    @contextmanager
    def prepared(self, *arguments):
        yield lambda: self.multiply(*arguments)

    def microseconds(self, way):
        self.called.clear()
        way()
        return self.found[self.called[-1]][0] if self.called else 10.0


@pytest.fixture
def library(monkeypatch):
    def install(**algorithms):
        made = Library(**algorithms)
        for name in ("algorithms", "multiply", "prepared"):
            monkeypatch.setattr(op, name, getattr(made, name))
        monkeypatch.setattr(op, "_microseconds", made.microseconds)
        return made

    monkeypatch.setattr(op, "_chosen", op.PlanCache())
    monkeypatch.setattr(op, "_FEWEST_ROWS", 1)
    monkeypatch.setattr(op, "_ALIGNMENT", 1)
    monkeypatch.setattr(op.gpu, "is_current", lambda device: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return install


@pytest.mark.parametrize("dtype", HALVES)
def test_products_and_sums(dtype):
    x, weight, scales, total = make(dtype=dtype)
    y = op.linear_e4m3(x.view(2, 12, 32), weight, scales, dtype)
    assert (y.shape, y.dtype) == ((2, 12, 48), dtype)
    assert error(y.view(24, 48), truth(x, weight, scales)) < BOUNDS[dtype]
    expected = truth(x, weight, scales) + total
    op.add_linear_e4m3_(total, x, weight, scales)
    assert error(total, expected) < 2 * BOUNDS[dtype]


@pytest.mark.parametrize(
    ("algorithms", "chosen"),
    [
        pytest.param({"slow": (12.0, 0.0), "fast": (8.0, 0.0)}, "fast", id="the fastest"),
        pytest.param({"fast": (8.0, 0.0), "other": (5.0, 0.1)}, "fast", id="not one with other bits"),
        pytest.param({"far": (5.0, 9.0), "fast": (8.0, 0.0)}, "fast", id="not one that is far off"),
        pytest.param({"refused": (5.0, None), "fast": (8.0, 0.0)}, "fast", id="not one that is refused"),
        pytest.param({"hardly": (9.9, 0.0)}, None, id="not for two percent"),
        pytest.param({}, None, id="no library"),
        pytest.param({"none at all": (5.0, 0.0)}, None, id="a library without E4M3"),
    ],
)
def test_what_is_chosen(library, monkeypatch, algorithms, chosen):
    stub = library(**algorithms)
    x, weight, scales, total = make()

    def call():
        sums = total.clone()
        op.add_linear_e4m3_(sums, x, weight, scales)
        return sums

    with op.chosen_after():
        call()
    stub.called.clear()
    assert torch.equal(call(), total + scaled_product(x, weight, scales, torch.float16))
    assert stub.called == []  # in an eager call PyTorch is quicker
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert error(call(), truth(x, weight, scales) + total) < 2 * BOUNDS[torch.float16]
    assert stub.called == ([chosen] if chosen else [])


@pytest.mark.parametrize("has_bias", [True, False])
def test_products_with_a_scale_for_each_row(has_bias):
    x, weight, scales, bias = make_rows()
    bias = bias if has_bias else None
    y = op.linear_of_rows(x.view(2, 12, 32), weight, (scales[0].view(2, 12), scales[1]), bias, torch.bfloat16)
    assert (y.shape, y.dtype) == ((2, 12, 48), torch.bfloat16)
    expected = truth(x, weight, scales) + (bias.double() if has_bias else 0)
    assert error(y.view(24, 48), expected) < BOUNDS[torch.bfloat16]


@pytest.mark.parametrize(
    ("algorithms", "chosen"),
    [
        pytest.param({"slow": (12.0, 0.0), "fast": (8.0, 0.0)}, "fast", id="the fastest"),
        pytest.param({"near": (8.0, 0.1), "other": (5.0, 0.2)}, "near", id="the bits of the first near one"),
        pytest.param({"far": (5.0, 200.0), "fast": (8.0, 0.0)}, "fast", id="not one that is far off"),
        pytest.param({"none at all": (5.0, 0.0)}, None, id="a library without E4M3"),
    ],
)
def test_what_is_chosen_for_rows(library, monkeypatch, algorithms, chosen):
    stub = library(**algorithms)
    x, weight, scales, bias = make_rows()

    def call():
        return op.linear_of_rows(x, weight, scales, bias, torch.bfloat16)

    with op.chosen_after():
        call()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    stub.called.clear()
    assert error(call(), truth(x, weight, scales) + bias.double()) < 0.05
    assert stub.called == ([chosen] if chosen else [])


def test_an_algorithm_with_one_scale_for_all_rows_is_never_chosen(library):
    def multiply(shape, algorithm, x, weight, bias, out, scales):
        out.copy_(truth(x, weight, [s[:1].expand_as(s) for s in scales]) + bias.double())

    library(wrong=(5.0, 0.0)).multiply = multiply
    with op.chosen_after():
        x, weight, scales, bias = make_rows()
        op.linear_of_rows(x, weight, scales, bias, torch.bfloat16)
    assert list(op._chosen.values()) == [None]


# ---- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("shape", [(8192, 960, 320), (2048, 1280, 5120), (2048, 10240, 1280)], ids=str)
def test_every_algorithm_against_fp64(shape, dtype):
    x, weight, scales, total = make(shape, dtype, "cuda")
    product = truth(x, weight, scales)
    for adds in (False, True):
        kind = cublaslt.Shape(*shape, dtype, False, adds, is_e4m3=True)
        found = cublaslt.algorithms(kind, x.device)
        assert found
        for algorithm in found:
            out = total.clone() if adds else torch.full_like(total, torch.nan)
            cublaslt.multiply(kind, algorithm, x, weight, None, out, scales)
            assert error(out, product + total if adds else product) < 2 * BOUNDS[dtype] + FAST_SUMS * shape[2]


@pytest.mark.gpu
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("shape", [(4096, 1536, 6144), (1111, 3072, 3072), (4608, 9216, 3072)], ids=str)
def test_every_algorithm_of_rows_against_fp64(shape, has_bias):
    x, weight, scales, bias = make_rows(shape, device="cuda")
    bias = bias if has_bias else None
    expected = truth(x, weight, scales) + (bias.double() if has_bias else 0)
    most = 2 * BOUNDS[torch.bfloat16] + FAST_SUMS * shape[2]
    assert error(row_scaled_product(x, weight, scales, bias, torch.bfloat16), expected) < most
    kind = cublaslt.Shape(*shape, torch.bfloat16, has_bias, False, is_e4m3=True, has_row_scales=True)
    try:
        found = cublaslt.algorithms(kind, x.device)
    except cublaslt.Refused as refused:
        pytest.skip(f"no scales for rows in this cuBLASLt: {refused}")
    assert found
    for algorithm in found:
        out = torch.full_like(expected, torch.nan, dtype=torch.bfloat16)
        cublaslt.multiply(kind, algorithm, x, weight, bias, out, scales)
        assert error(out, expected) < most
