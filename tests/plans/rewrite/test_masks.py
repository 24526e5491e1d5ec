"""Masks of attention: what they show, and graphs without them."""

import math
import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from sdfastgn.plans.disk import content
from sdfastgn.plans.masks import Masks
from sdfastgn.plans.outcome import Outcome
from sdfastgn.plans.rewrite.masks import keys_seen
from sdfastgn.plans.rewrite.passes import rewrite
from sdfastgn.plans.run import steps
from sdfastgn.plans.run.plan import Plan
from sdfastgn.plans.trace.tracer import trace
from tests.plans.engine import plan_of
from tests.plans.programs import relative
from tests.plans.wrong_rules import Wrong, changed_codes, put_in

pytestmark = [pytest.mark.fused_on_cpu, pytest.mark.usefixtures("without_gradients")]

INF = math.inf


@pytest.mark.parametrize(
    ("mask", "keys"),
    [
        ([[1, 1, 1]], 3),
        ([[1, 1, 0]], 2),
        ([[1, 0, 0], [1, 0, 0]], 1),
        ([[1, 0, 0], [1, 1, 0]], -1),
        ([[1, 0, 1]], -1),
        ([[0, 1, 1]], -1),
        ([[0, 0, 0]], -1),
        ([[1, 1, 0], [0, 0, 0]], -1),
        ([[1]], 1),
    ],
)
def test_keys_of_masks_of_booleans(mask, keys):
    assert keys_seen(torch.tensor(mask).bool()).tolist() == [keys]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("mask", "keys"),
    [
        ([[0, 0, 0]], 3),
        ([[0, 0, -10000]], 2),
        ([[0, -INF, -INF], [0, -10000, -20000]], 1),
        ([[1, 1, 1], [0, 0, 0]], 3),
        ([[1, 1, -10000], [-2, -2, -INF]], 2),
        ([[1, 1, 0]], -1),
        ([[0, 0, -1000]], -1),
        ([[0, -10000, 0]], -1),
        ([[0, 0, -10000], [0, -10000, -10000]], -1),
        ([[-10000, -10000, -10000]], -1),
        ([[-INF, -INF, -INF]], -1),
        ([[-10000, 0, 0]], -1),
        ([[100, 100, 100]], -1),
        ([[0, 0, math.nan]], -1),
        ([[math.nan, 0, 0]], -1),
        ([[0, 0, INF]], -1),
    ],
)
def test_keys_of_masks_of_numbers(mask, keys, dtype):
    assert keys_seen(torch.tensor(mask, dtype=dtype)).tolist() == [keys]


# ---- random functions with random masks

B, H, N, D, K = 2, 2, 5, 4, 6


def seen_from_lengths(m):
    """Two keys of an image, which are always seen, and then those of a text."""
    length = m[:, 2:].sum(1) + 2
    return (torch.arange(K) < length[:, None])[:, None, None]


# How models make a mask of m (B, K), which is 1 for a key that is seen.
SPELLINGS = [
    lambda m: m.bool()[:, None, None],
    lambda m: m.bool()[:, None, None] & torch.ones(N, 1).bool(),
    lambda m: torch.cat((torch.ones(B, 2), m[:, 2:]), 1).bool()[:, None, None],
    lambda m: ((1 - m) * -10000.0)[:, None, None].repeat_interleave(H, 1),
    lambda m: torch.zeros(B, K).masked_fill(m == 0, -INF)[:, None, None].expand(B, H, N, K),
    lambda m: m[:, None, None] * torch.linspace(0, 1, N).round()[:, None],
    lambda m: m[:, None, None] * 1.0,
    lambda m: m[:1].bool(),
    seen_from_lengths,
]


def rows(kind, draw):
    full = [1.0] * K
    if kind == "none":
        return [[0.0] * K] * B
    lengths = [draw.randint(1, K) for _ in range(B)]
    if kind == "first":
        lengths = lengths[:1] * B
    if kind in ("first", "lengths"):
        return [[1.0] * n + [0.0] * (K - n) for n in lengths]
    return [full] * B if kind == "all" else [[float(draw.random() < 0.7) for _ in full] for _ in range(B)]


class Function(nn.Module):
    """Two attentions with random masks. The second one, and the result, may read masks too."""

    def __init__(self, seed):
        super().__init__()
        self.draw = random.Random(seed)
        self.one, self.two = (self.draw.choice(SPELLINGS) for _ in range(2))
        self.is_returned, self.has_second = (self.draw.random() < 0.3 for _ in range(2))

    def masks(self, m, m2):
        return [self.one(m), self.two(m2)] if self.has_second else [self.one(m)]

    def forward(self, q, k, m, m2):
        y = q * 2
        for mask in self.masks(m, m2):
            y = F.scaled_dot_product_attention(y, k, k + 1, mask)
        return (y, self.masks(m, m2)[0] * 1) if self.is_returned else (y,)

    def inputs(self):
        kinds = (self.draw.choice(("all", "first", "first", "lengths", "holes", "none")) for _ in range(2))
        masks = [torch.tensor(rows(kind, self.draw)) for kind in kinds]
        return torch.randn(B, H, N, D), torch.randn(B, H, K, D), *masks


def lengths_of(mask):
    """What should be found, by the weights that the mask gives to equal scores."""
    if mask.dtype is torch.bool:
        mask = torch.zeros(mask.shape).masked_fill(~mask, -INF)
    found = tuple(map(length_of, mask if mask.dim() == 4 else mask[None]))
    return None if None in found else found


def length_of(mask):
    weights = mask.double().softmax(-1).flatten(0, -2)
    count = int(weights[0].count_nonzero())
    wanted = torch.zeros(K).double()
    wanted[:count] = 1 / count
    is_small = mask.amax(-1).abs().max() < 20
    return count if is_small and torch.allclose(weights, wanted.expand_as(weights), atol=1e-6) else None


def fault(seed):
    """What is wrong in the plans of a random function; empty if nothing is."""
    function = Function(seed)
    inputs = function.inputs()
    plan = plan_of(function, function, *inputs)
    masks = Masks(plan)
    for _ in range(2):
        inputs = function.inputs()
        lengths = masks.lengths(inputs, 1) or (None,) * len(masks)
        wanted = [*map(lengths_of, function.masks(*inputs[2:]))]
        if {*lengths} - {None} != {*wanted} - {None}:
            return f"found {lengths}, not {wanted}"
        unmasked = masks.plan(masks.seen(lengths))
        needed = {n.args[3] for n in unmasked.graph.nodes if n.target is steps.attention} - {None}
        if len(needed) > sum(n is None for n in lengths):
            return "attention reads a mask that hides nothing else"
        found = unmasked.run([*inputs, *masks.numbers(lengths)])
        for a, b in zip(found, function(*inputs), strict=True):
            if not torch.equal(a.isnan(), b.isnan()) or relative(a.nan_to_num(), b.nan_to_num()) > 1e-5:
                return "another result"
    return ""


@pytest.mark.slow
def test_random_masks():
    for seed in range(60):
        assert not fault(seed), seed


WRONG = [
    Wrong("the first query decides", "masks", "(is_seen == is_first)", "(is_seen == is_first)[:1]"),
    Wrong("the first sample decides", "masks", "count[:, None, None]", "count[:1, None, None]"),
    Wrong("any keys are seen", "masks", "(is_seen == is_first) & ", ""),
    Wrong("any lower bias hides", "masks", "first - _HIDES", "first - 0.5"),
    Wrong("no key is hidden", "masks", "(is_seen | is_hidden)", "is_hidden.logical_or(is_seen | True)"),
    Wrong("the first key may be hidden", "masks", " & starts)", ")"),
    Wrong("all keys are read", "masks", "if mask in numbers:", "if False:"),
    Wrong("the first mask counts for all", "masks", "numbers[mask], *more", "[*numbers.values()][0], *more"),
]


@pytest.mark.drawn(1)
@pytest.mark.parametrize("wrong", [pytest.param(wrong, id=wrong.name) for wrong in WRONG])
def test_a_wrong_rule_is_seen(wrong, monkeypatch):
    put_in(monkeypatch, changed_codes(wrong))
    assert any(map(fault, range(100)))


# ---- which masks are asked


class WithTable(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Buffer(torch.ones(K).bool())


@pytest.mark.parametrize(("samples", "count"), [(2, 1), (1, 0)])
def test_samples_have_keys_of_their_own(samples, count):
    q, k, m = torch.randn(B, H, N, D), torch.randn(samples, H, K, D), torch.ones(B, 1, 1, K).bool()
    plan = plan_of(nn.Module(), lambda q, k, m: F.scaled_dot_product_attention(q, k, k, m), q, k, m)
    assert len(Masks(plan)) == count


@pytest.mark.parametrize(
    ("mask", "count"),
    [
        (lambda own, q, m: m.bool(), 1),
        (lambda own, q, m: own.table[None], 0),
        (lambda own, q, m: own.table & m.bool(), 0),
        (lambda own, q, m: torch.ones(N, K).bool(), 0),
    ],
)
def test_masks_depend_on_arguments_alone(mask, count):
    own, q, m = WithTable(), torch.randn(1, H, N, D), torch.ones(N, K)
    k = torch.randn(1, H, K, D)
    plan = plan_of(own, lambda q, m: F.scaled_dot_product_attention(q, k, k, mask(own, q, m)), q, m)
    assert len(Masks(plan)) == count


def test_masks_of_a_plan_from_disk():
    function = Function(1)
    inputs = function.inputs()
    traced = trace(function, function, *inputs)
    outcome = Outcome(inputs, {}, inputs)
    outcome.finish(None)
    text = content.text_of(function, traced, rewrite(traced.graph.graph), outcome)
    masks = Masks(Plan(*content.read(text, function, [*inputs])[:2]))
    lengths = [lengths_of(mask) for mask in function.masks(*inputs[2:])]
    assert masks.lengths(inputs, 1) == tuple(lengths)
    found = masks.plan(masks.seen(lengths)).run([*inputs, *masks.numbers(lengths)])
    assert max(map(relative, found, function(*inputs))) < 1e-5
