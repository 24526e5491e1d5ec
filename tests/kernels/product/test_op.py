"""Which algorithm a product gets and when; on a GPU that each is right, and graphs keep PyTorch's bits."""

import itertools
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F

from sdfastgn.kernels.product import cublaslt, op
from tests.kernels.samples import BOUNDS, HALVES, PLACES, error, kernels

# (rows, columns, depth)
SMALL = (24, 40, 16)


def make(shape=SMALL, dtype=torch.float16, device="cpu"):
    """x with a mean away from zero, a weight, a bias, and what the product is added to."""
    rows, columns, depth = shape
    g = torch.Generator().manual_seed(0)
    x = torch.randn((rows, depth), generator=g) + 1
    weight = torch.randn((columns, depth), generator=g) / depth**0.5
    bias, total = torch.randn(columns, generator=g), torch.randn((rows, columns), generator=g)
    return [t.to(dtype).to(device) for t in (x, weight, bias, total)]


class Library:
    """Stands for cuBLASLt and the GPU: algorithms by name, their times, their errors, and who was called."""

    def __init__(self, own=10.0, **algorithms):
        self.times = {"own": own} | {name: time for name, (time, _) in algorithms.items()}
        self.errors = {name: error for name, (_, error) in algorithms.items()}
        self.timed, self.called = 0, []

    def algorithms(self, shape, device):
        return list(self.errors)

    def multiply(self, shape, algorithm, x, weight, bias, out):
        if self.errors[algorithm] is None:
            raise cublaslt.Refused("not for this product")
        self.called.append(algorithm)
        product = F.linear(x, weight, bias)
        out.copy_(out.addmm(x, weight.t()) if shape.adds else product).add_(self.errors[algorithm])

    @contextmanager
    def prepared(self, *arguments):
        yield lambda: self.multiply(*arguments)

    def microseconds(self, way):
        self.timed += 1
        self.called.clear()
        way()
        return self.times[self.called[-1] if self.called else "own"]


def captures(monkeypatch, is_capturing=True):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: is_capturing)


@pytest.fixture
def library(monkeypatch):
    """Installs a ``Library``; kernels run as on a GPU, and every product is large enough."""

    def install(**algorithms):
        made = Library(**algorithms)
        monkeypatch.setattr(op, "algorithms", made.algorithms)
        for name in ("multiply", "prepared"):
            monkeypatch.setattr(op, name, getattr(made, name))
        monkeypatch.setattr(op, "_microseconds", made.microseconds)
        return made

    captures(monkeypatch, False)
    monkeypatch.setattr(op, "_chosen", op.PlanCache())
    monkeypatch.setattr(op, "_FEWEST_ROWS", 1)
    monkeypatch.setattr(op, "_ALIGNMENT", 1)
    with kernels(direct=True), torch.no_grad():
        yield install


def rehearse(*args):
    with op.chosen_after():
        return op.linear(*args)


@pytest.mark.parametrize(
    ("algorithms", "chosen"),
    [
        pytest.param({"slow": (12.0, 0.0), "fast": (8.0, 0.0)}, "fast", id="the fastest"),
        pytest.param({"other": (5.0, 0.1), "fast": (8.0, 0.0)}, "fast", id="not one with other bits"),
        pytest.param({"refused": (5.0, None), "fast": (8.0, 0.0)}, "fast", id="not one that is refused"),
        pytest.param({"slow": (12.0, 0.0)}, None, id="PyTorch's own"),
        pytest.param({"hardly": (9.9, 0.0)}, None, id="not for two percent"),
        pytest.param(dict.fromkeys("abcd", (12.0, 0.0)) | {"e": (8.0, 0.0)}, "e", id="the fifth"),
        pytest.param(dict.fromkeys("abcde", (12.0, 0.0)) | {"f": (8.0, 0.0)}, None, id="not the sixth"),
        pytest.param({}, None, id="no library"),
    ],
)
@pytest.mark.parametrize("has_bias", [True, False])
def test_what_is_chosen(library, monkeypatch, algorithms, chosen, has_bias):
    stub = library(**algorithms)
    x, weight, bias, _ = make()
    operands = (x.view(2, 12, 16), weight, bias if has_bias else None)
    expected = F.linear(*operands)
    assert torch.equal(rehearse(*operands), expected)
    stub.called.clear()
    assert torch.equal(op.linear(*operands), expected)
    assert stub.called == []  # in an eager call PyTorch is quicker
    captures(monkeypatch)
    assert torch.equal(op.linear(*operands), expected)
    assert stub.called == ([chosen] if chosen else [])


def test_a_sum_is_added_to_in_place(library, monkeypatch):
    stub = library(fast=(8.0, 0.0))
    x, weight, _, total = make()
    expected = total.addmm(x, weight.t())
    for in_capture, called in ((False, []), (True, ["fast"])):
        captures(monkeypatch, in_capture)
        ours = total.clone()
        with op.chosen_after():
            op.add_linear_(ours, x, weight)
        assert torch.equal(ours, expected)
        stub.called.clear()
        ours = total.clone()
        op.add_linear_(ours, x, weight)
        assert torch.equal(ours, expected)
        assert stub.called == called


def test_algorithms_are_loaded_before_they_are_timed(library):
    stub = library(fast=(8.0, 0.0))
    with op.chosen_after():
        op.linear(*make()[:3])
        op.load_algorithms()
        assert stub.called == ["fast"]
        assert stub.timed == 0
    assert set(op._chosen.values()) == {"fast"}
    op.load_algorithms()  # outside of a rehearsal there is nothing to load


class Clock:
    """Stands for a GPU whose sleep of ``_HEAD_START`` ends when the CPU has queued ``late`` rounds."""

    def __init__(self, monkeypatch, late):
        self.sleeps, self.late = [], late
        monkeypatch.setattr(op, "sleep", self.sleeps.append)
        monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: self)

    def record(self):
        pass

    def synchronize(self):
        pass

    def query(self):
        return len(self.sleeps) <= self.late

    def elapsed_time(self, end):
        return 0.001 * len(self.sleeps) * op._LAUNCHES


@pytest.mark.parametrize(("late", "rounds"), [(0, 1), (2, 3), (99, 5)])
def test_a_round_whose_launches_came_late_is_repeated(monkeypatch, late, rounds):
    """On a slow CPU the GPU would wait for launches, and a fast algorithm would look slow."""
    clock, calls = Clock(monkeypatch, late), []
    assert op._microseconds(lambda: calls.append(1)) == pytest.approx(rounds)
    assert clock.sleeps == [op._HEAD_START * 2**i for i in range(rounds)]
    assert len(calls) == rounds * op._LAUNCHES


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, cublaslt.Refused])
def test_algorithms_that_cannot_be_loaded_are_loaded_when_they_are_timed(library, monkeypatch, error):
    stub = library(fast=(8.0, 0.0))
    ways = op._ways

    def short(kind, launches):
        monkeypatch.setattr(op, "_ways", ways)
        raise error

    monkeypatch.setattr(op, "_ways", short)
    with op.chosen_after():
        op.linear(*make()[:3])
        op.load_algorithms()
        assert stub.called == []
    assert set(op._chosen.values()) == {"fast"}


def test_each_kind_is_timed_once(library):
    stub = library(fast=(8.0, 0.0))
    x, weight, bias, _ = make()
    rehearse(x, weight, bias)
    once = stub.timed
    assert once > 0
    rehearse(x, weight, bias)
    assert stub.timed == once
    rehearse(x[:8], weight, bias)
    assert stub.timed == 2 * once


def test_switches_of_pytorch_are_part_of_a_kind(library, monkeypatch):
    stub = library(fast=(8.0, 0.0))
    x, weight, bias, _ = make()
    rehearse(x, weight, bias)
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_fp16_reduced_precision_reduction", False)
    captures(monkeypatch)
    stub.called.clear()
    op.linear(x, weight, bias)
    assert stub.called == []


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
def test_operands_with_gaps_stay_with_pytorch(library, place):
    stub = library(fast=(8.0, 0.0))
    x, weight, _, _ = make()
    for operands in ((place(x), weight), (x, place(weight))):
        if all(t.is_contiguous() for t in operands):
            continue
        assert torch.equal(rehearse(*operands), F.linear(*operands))
    assert stub.timed == 0


@pytest.mark.parametrize(
    ("name", "value"), [("_FEWEST_ROWS", 25), ("_MOST_ELEMENTS", 24 * 40 - 1), ("_ALIGNMENT", 2**20)]
)
def test_small_large_and_unaligned_products_stay_with_pytorch(library, monkeypatch, name, value):
    stub = library(fast=(8.0, 0.0))
    monkeypatch.setattr(op, name, value)
    rehearse(*make()[:3])
    assert stub.timed == 0


def test_what_does_not_fit_is_pytorchs_to_refuse(library, monkeypatch):
    stub = library(fast=(8.0, 0.0))
    x, weight, bias, total = make()
    rehearse(x, weight, bias)
    captures(monkeypatch)
    stub.called.clear()
    for operands in ((x[:, :8].clone(), weight), (x, weight, bias[:8].clone()), (x, weight[:, :8].clone())):
        with pytest.raises(RuntimeError):
            op.linear(*operands)
    with pytest.raises(RuntimeError):
        op.add_linear_(total[:8].clone(), x, weight)
    assert op.linear(x[:0], weight, bias).shape == (0, 40)
    assert torch.equal(op.linear(x, weight[0]), F.linear(x, weight[0]))
    assert stub.called == []


def test_fp32_and_gradients_stay_with_pytorch(library):
    stub = library(fast=(8.0, 0.0))
    rehearse(*make(dtype=torch.float32)[:3])
    x, weight, bias, _ = make()
    with torch.enable_grad():
        y = rehearse(x, weight.requires_grad_(), bias)
    assert y.requires_grad
    assert stub.timed == 0


def test_without_cublaslt_there_are_no_algorithms(monkeypatch):
    shape = cublaslt.Shape(*SMALL, torch.float16, has_bias=True, adds=False)
    for version in (None, "99.9"):
        cublaslt._library.cache_clear()
        monkeypatch.setattr(torch.version, "cuda", version)
        assert cublaslt.algorithms(shape, torch.device("cuda", 0)) == []
    cublaslt._library.cache_clear()


# ---- on a GPU

# Of SD1.5 and SDXL, and odd ones: sizes that no vector divides, a single row.
SHAPES = [
    (8192, 320, 320),
    (2048, 1280, 640),
    (154, 1280, 768),
    (1, 1280, 320),
    (77, 136, 40),
    (33, 24, 1288),
]
gpu = pytest.mark.gpu


@gpu
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
def test_every_algorithm_against_fp64(shape, dtype):
    x, weight, bias, total = make(shape, dtype, "cuda")
    product = x.double() @ weight.double().t()
    for b, adds in ((bias, False), (None, False), (None, True)):
        kind = cublaslt.Shape(*shape, dtype, b is not None, adds)
        found = cublaslt.algorithms(kind, x.device)
        assert found
        expected = product + (total if adds else 0 if b is None else b)
        for algorithm in found:
            out = total.clone() if adds else torch.full_like(total, torch.nan)
            cublaslt.multiply(kind, algorithm, x, weight, b, out)
            assert error(out, expected) < 2 * BOUNDS[dtype]


@gpu
@pytest.mark.parametrize("dtype", HALVES)
def test_a_graph_has_pytorchs_bits(monkeypatch, dtype):
    """Also where another algorithm is taken for every product that has one with the same bits."""
    taken = []
    multiply = op.multiply
    monkeypatch.setattr(op, "multiply", lambda *args: taken.append(args[1]) or multiply(*args))
    monkeypatch.setattr(op, "_WORTHWHILE", float("inf"))
    counter = itertools.count(1)
    monkeypatch.setattr(op, "_microseconds", lambda way: 1 / next(counter))  # the last one wins
    monkeypatch.setattr(op, "_chosen", op.PlanCache())
    x, weight, bias, total = make((2048, 640, 640), dtype, "cuda")

    def call():
        sums = total.clone()
        op.add_linear_(sums, x, weight)
        return op.linear(x, weight, bias), op.linear(x, weight), sums

    with torch.no_grad():
        with op.chosen_after():
            call()
        random = torch.cuda.get_rng_state()
        for how in op._chosen.values():
            assert how is not None
        call()
        graph, before = torch.cuda.CUDAGraph(), len(taken)
        with torch.cuda.graph(graph):
            results = call()
        assert len(taken) == before + 3
        for _ in range(2):
            x.mul_(-0.5)
            for result in results:
                result.fill_(torch.nan)
            graph.replay()
            expected = F.linear(x, weight, bias), F.linear(x, weight), total.addmm(x, weight.t())
            for ours, theirs in zip(results, expected, strict=True):
                assert torch.equal(ours, theirs)
        assert torch.equal(torch.cuda.get_rng_state(), random)


@gpu
def test_choosing_takes_no_random_numbers_and_no_memory():
    x, weight, bias, _ = make((4096, 648, 320), device="cuda")
    with torch.no_grad():
        F.linear(x, weight, bias)
        random, memory = torch.cuda.get_rng_state(), torch.cuda.memory_allocated()
        with op.chosen_after():
            op.linear(x, weight, bias)
        assert torch.equal(torch.cuda.get_rng_state(), random)
        assert torch.cuda.memory_allocated() == memory
    assert any(kind.shape[:3] == (4096, 648, 320) for kind in op._chosen)
