"""Calls of transformers with masks: attention without masks that hide no key, or all after the first ones."""

import copy
import pickle
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

import sdfastgn
from sdfastgn.plans import masks
from sdfastgn.plans.run.bake import Baked
from sdfastgn.plans.run.steps import tokens
from tests.plans.engine import forward_of
from tests.plans.models import CALLS
from tests.plans.programs import relative

pytestmark = [pytest.mark.fused_on_cpu, pytest.mark.usefixtures("without_gradients")]

TOLERANCE = 1e-5
CALL = {call.cls: call._replace(method="__call__") for call in CALLS if call.method == "forward"}
HUNYUAN, LTX = "HunyuanVideoTransformer3DModel", "LTXVideoTransformer3DModel"
CHROMA = "ChromaTransformer2DModel"
MASK = {HUNYUAN: "encoder_attention_mask", LTX: "encoder_attention_mask", CHROMA: "attention_mask"}
FIRST, SECOND = "1110000", "1111100"


@pytest.fixture
def seen(monkeypatch):
    """Counts questions about masks, and attentions with a mask ("masked") or by their number of keys."""
    found = Counter()
    asked, attention = masks.Masks._asked, tokens.scaled_dot_product_attention

    def spied_asked(self, tensors):
        found["asked"] += 1
        return asked(self, tensors)

    def spied_attention(q, k, v, mask, *args, **kwargs):
        found[k.shape[-2] if mask is None else "masked"] += 1
        return attention(q, k, v, mask, *args, **kwargs)

    monkeypatch.setattr(masks.Masks, "_asked", spied_asked)
    monkeypatch.setattr(tokens, "scaled_dot_product_attention", spied_attention)
    monkeypatch.setattr(Baked, "run", lambda self, inputs, frees=False: self.plan.run(inputs))
    return found


class Pair:
    """An optimized transformer, and its stock copy."""

    def __init__(self, name, **options):
        self.call, self.name, self.seed = CALL[name], MASK[name], 0
        self.stock = self.call.model()
        self.model = sdfastgn.optimize(copy.deepcopy(self.stock), cuda_graphs=False, **options)

    def mask(self, *rows: str) -> Tensor:
        """A mask with these rows, such as "1110000", in the dtype of the call's mask."""
        return torch.tensor([[*map(int, row)] for row in rows]).to(self.call.inputs[self.name].dtype)

    def step(self, mask: Tensor) -> None:
        """Both models compute the same in a call with this mask, and with other inputs than before."""
        self.seed += 1
        inputs = {**self.call.drawn(self.seed), self.name: mask}
        found, wanted = (self.call.run(each, **inputs) for each in (self.model, self.stock))
        assert max(map(relative, found, wanted)) <= TOLERANCE

    def counts(self, seen: Counter, *given: Tensor) -> list[dict]:
        """What ``seen`` counts in a step with each of these masks."""
        found = []
        for mask in given:
            seen.clear()
            self.step(mask)
            found.append(dict(seen))
        return found


# Model, rows of its mask -> attentions in a call with the mask as it is, and without what hides nothing. Two
# of each model read the mask. HunyuanVideo has another mask in its text's own attention, and LTX has two
# attentions of the video alone.
SHOWN = [
    (HUNYUAN, ["1111111"], {"masked": 3}, {15: 2, 7: 1}),
    (HUNYUAN, [FIRST], {"masked": 3}, {"masked": 1, 11: 2}),
    (HUNYUAN, ["1011100"], {"masked": 3}, {"masked": 1, 12: 2}),  # which counts the keys alone
    (LTX, ["1111111"] * 2, {"masked": 2, 8: 2}, {7: 2, 8: 2}),
    (LTX, [FIRST] * 2, {"masked": 2, 8: 2}, {3: 2, 8: 2}),
    (LTX, [FIRST, SECOND], {"masked": 2, 8: 2}, {3: 2, 5: 2, 8: 2}),
    (LTX, [FIRST, "1111111"], {"masked": 2, 8: 2}, {3: 2, 7: 2, 8: 2}),
    (LTX, [FIRST, "1011100"], {"masked": 2, 8: 2}, {"masked": 2, 8: 2}),
    (LTX, ["1011100"] * 2, {"masked": 2, 8: 2}, {"masked": 2, 8: 2}),
    (LTX, ["0000000"] * 2, {"masked": 2, 8: 2}, {"masked": 2, 8: 2}),
    (CHROMA, ["1" * 23], {"masked": 2}, {23: 2}),
    (CHROMA, ["1110000" + "1" * 16], {"masked": 2}, {"masked": 2}),
]


@pytest.mark.drawn(2)
@pytest.mark.parametrize(("name", "rows", "as_it_is", "without"), SHOWN)
def test_masks_that_hide_nothing_go(name, rows, as_it_is, without, seen):
    pair = Pair(name)
    mask = pair.mask(*rows)
    asked = {**without, "asked": 1}
    assert pair.counts(seen, mask, mask, mask) == [as_it_is, asked, without]
    mask.copy_(mask.clone())
    assert pair.counts(seen, mask, mask, mask) == [as_it_is, asked, without]
    assert forward_of(pair.model).own == {}
    assert forward_of(pair.model).traces == 1


MASKED, ASKED = {"masked": 3}, {"masked": 1, "asked": 1}


def test_two_prompts_take_turns(seen):
    pair = Pair(HUNYUAN)
    one, two = pair.mask(FIRST), pair.mask(SECOND)
    assert pair.counts(seen, one, two, one, two) == [MASKED, MASKED, ASKED | {11: 2}, ASKED | {13: 2}]
    assert pair.counts(seen, one, two) == [{"masked": 1, 11: 2}, {"masked": 1, 13: 2}]
    (made,) = [made for plans in forward_of(pair.model)._by_state.values() for made in plans.made.values()]
    assert len(made.unmasked) == 1  # the number of keys is no part of a plan


def test_masks_that_are_new_in_each_call_are_not_asked(seen):
    pair = Pair(HUNYUAN)
    assert pair.counts(seen, *(pair.mask(FIRST) for _ in range(12))) == [MASKED] * 12


def test_a_mask_that_is_written_is_asked_again(seen):
    pair = Pair(HUNYUAN)
    mask = pair.mask(FIRST)
    pair.counts(seen, mask, mask)
    mask[:, 3:5] = True
    assert pair.counts(seen, mask, mask) == [MASKED, ASKED | {13: 2}]
    mask.view(-1)[:] = pair.mask("1" * 7)  # by a view
    assert pair.counts(seen, mask, mask)[1] == {"asked": 1, 15: 2, 7: 1}
    mask.data = pair.mask(FIRST)  # another memory
    assert pair.counts(seen, mask, mask) == [MASKED, ASKED | {11: 2}]


def test_another_mask_at_the_same_address(seen):
    pair = Pair(HUNYUAN)
    memory = pair.mask(FIRST).numpy()
    one = torch.from_numpy(memory)
    pair.counts(seen, one, one)
    memory[:] = pair.mask(SECOND).numpy()
    two = torch.from_numpy(memory)
    assert pair.counts(seen, two, two) == [MASKED, ASKED | {13: 2}]


def test_inference_tensors_are_not_asked(seen):
    """They do not count what is written into them."""
    pair = Pair(HUNYUAN)
    with torch.inference_mode():
        mask = pair.mask(FIRST)
    assert pair.counts(seen, mask, mask) == [MASKED] * 2
    with torch.inference_mode():
        mask[:] = pair.mask(SECOND)
    assert pair.counts(seen, mask) == [MASKED]


def test_captures_of_other_code_read_the_masks(seen, monkeypatch):
    pair = Pair(HUNYUAN)
    mask = pair.mask(FIRST)
    pair.counts(seen, mask, mask)
    monkeypatch.setattr("sdfastgn.plans.forward._is_capturing", lambda device: True)
    assert pair.counts(seen, mask) == [MASKED]


def test_baked_plans_read_other_numbers_of_keys():
    """A recording has the layout of one result, and another number of keys may run another kernel."""
    pair = Pair(LTX)
    rows = (FIRST, "1" * 6 + "0", "1000000")
    for mask in [pair.mask(row, row) for row in rows] + [pair.mask(*rows[:2]), pair.mask(*rows[1:])]:
        for _ in range(4):
            pair.step(mask)
    (made,) = [made for plans in forward_of(pair.model)._by_state.values() for made in plans.made.values()]
    (without,) = made.unmasked.values()
    assert without.baked.recorded == 1
    assert not without.baked.declined


@pytest.mark.drawn(1)
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_find_out_for_themselves(copied, seen):
    pair = Pair(HUNYUAN)
    mask = pair.mask(FIRST)
    pair.counts(seen, mask, mask)
    pair.model = copied(pair.model)
    assert pair.counts(seen, mask, mask) == [MASKED, ASKED | {11: 2}]
    sdfastgn.restore(pair.model)
    pair.step(mask)


@pytest.mark.slow
def test_another_plan_than_the_models_code_is_refused(monkeypatch):
    pair = Pair(HUNYUAN, verify=True)
    mask = pair.mask(FIRST)
    pair.step(mask)
    monkeypatch.setattr(masks.Masks, "numbers", lambda self, lengths: [torch.tensor([2])])
    for _ in range(3):
        pair.step(mask)
    (reason,) = forward_of(pair.model).own
    assert "differs from its own code" in reason


def test_the_model_may_change(seen):
    pair = Pair(HUNYUAN)
    mask = pair.mask(FIRST)
    pair.counts(seen, mask, mask)
    for each in (pair.model, pair.stock):
        each.transformer_blocks[0].norm1.norm.eps = 0.5
    for _ in range(4):
        pair.step(mask)
    assert "eps" in forward_of(pair.model).last_change
    assert pair.counts(seen, mask) == [{"masked": 1, 11: 2}]


@pytest.mark.slow
def test_threads_with_masks_of_their_own():
    pair = Pair(HUNYUAN)
    inputs = pair.call.drawn(0)

    def run(row):
        with torch.no_grad():
            given = {**inputs, pair.name: pair.mask(row)}
            (wanted,) = pair.call.run(pair.stock, **given)
            return [relative(pair.call.run(pair.model, **given)[0], wanted) for _ in range(6)]

    with ThreadPoolExecutor(3) as threads:
        errors = threads.map(run, ("1000000", FIRST, SECOND))
    assert max(e for each in errors for e in each) <= TOLERANCE
