"""Modules that keep tensors between calls: a plan reads them, and stores what stock's code would store."""

import copy
import pickle
import weakref
from collections import OrderedDict

import pytest
import torch
import torch.nn.functional as F
from diffusers import AutoencoderVidTok
from torch import Tensor, nn

import sdfastgn
from sdfastgn.plans.preview import plans_of
from sdfastgn.plans.run.bake import Baked
from tests.patches.cases import agree, noise
from tests.patches.samples import randomize

pytestmark = [pytest.mark.fused_on_cpu, pytest.mark.usefixtures("without_gradients")]

TRUST = ("tests",)


def state_of(model):
    """(path, attribute) -> value, for each attribute of the modules that is no parameter, module or entry."""
    private = {
        *vars(nn.Module()),
        "forward",
        "_apply",
        "_call_impl",
        "__getstate__",
        "_replicate_for_data_parallel",
    }
    return {
        (path, name): value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if name not in private and not name.startswith("_sdfastgn")
    }


def is_same_kind(ours, theirs):
    """Assert that two values have the same type and structure, and that their tensors agree."""
    assert type(ours) is type(theirs)
    if isinstance(theirs, Tensor):
        assert (ours.shape, ours.dtype, ours.device) == (theirs.shape, theirs.dtype, theirs.device)
        agree(ours, theirs, 5e-5)
    elif isinstance(theirs, dict):
        assert list(ours) == list(theirs)
        for key in theirs:
            is_same_kind(ours[key], theirs[key])
    elif isinstance(theirs, list | tuple):
        assert len(ours) == len(theirs)
        for a, b in zip(ours, theirs, strict=True):
            is_same_kind(a, b)
    elif isinstance(theirs, bool | int | float | str | None):
        assert ours == theirs


def is_same_state(model, stock):
    ours, theirs = state_of(model), state_of(stock)
    assert ours.keys() ^ theirs.keys() == set()
    for key in theirs:
        is_same_kind(ours[key], theirs[key])


def planned(model):
    return vars(model)["forward"]


# ---- a decoder of diffusers


def vid_tok():
    sizes = {"ch": 32, "ch_mult": [1, 1, 1, 1], "num_res_blocks": 1, "z_channels": 4}
    return randomize(AutoencoderVidTok(**sizes)).eval()


def in_parts(model):
    """Lets ``model`` decode videos in parts of two frames of latents."""
    model.enable_tiling()
    model.num_latent_frames_batch_size = 2


@pytest.mark.slow
def test_videos_in_parts_with_a_cache():
    stock = vid_tok()
    model = sdfastgn.optimize(copy.deepcopy(stock))
    results = []
    for i, (frames, width) in enumerate([(3, 2), (3, 2), (5, 2), (5, 1), (5, 2)]):
        if i == 2:
            in_parts(model), in_parts(stock)
        z = noise(1, 4, frames, 1, width, seed=i)
        results.append((model.decode(z), stock.decode(z)))
        is_same_state(model, stock)
    for ours, theirs in results:
        agree(ours, theirs, 5e-5)
    decoder = planned(model.decoder)
    assert (decoder.own, decoder.last_change) == ({}, "")
    # Whole videos are one kind of call. In parts, each width has a first part, one in the middle and a last.
    assert (decoder.calls, len(decoder.plans), decoder.traces) == (2 + 9, 1 + 6, 2 + 6)


@pytest.mark.slow
def test_the_plan_of_a_model_with_a_cache_without_weights():
    model = vid_tok().to("meta")
    in_parts(model)
    z = torch.empty(1, 4, 5, 1, 2, device="meta")
    found = plans_of(model, lambda: model.decode(z), "hopper")
    assert [(plan.reason, plan.calls) for plan in found] == [("", 1)] * 3  # first, middle and last part


# ---- modules of the tests


class Cached(nn.Module):
    """A network of images whose module ``first`` keeps what ``keep`` says between calls."""

    def __init__(self, keep):
        super().__init__()
        self.first = Keeper(keep)
        self.norm = nn.GroupNorm(2, 8)
        self.conv = nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x):
        x = self.first(x)
        return self.conv(F.silu(self.norm(x)))


class Keeper(nn.Module):
    def __init__(self, keep):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.keep = keep
        self.is_first, self.kept, self.items, self.named, self.nested = True, None, [], {}, [[], []]

    def forward(self, x):
        return self.keep(self, self.conv(x))


def latest(self, y):
    before, self.kept = self.kept, y.clone()
    return y if before is None else y + before


def its_argument(self, y):
    before, self.kept = self.kept, y
    return y if before is None else y - before


def under_a_new_name(self, y):
    before = getattr(self, "late", None)
    self.late = y * 2
    return y if before is None else y * before


def beside_a_flag(self, y):
    if self.is_first:
        self.is_first, self.kept = False, y[:, :, :2].clone()
        return y
    out = torch.cat([self.kept, y], 2)[:, :, 2:]
    self.kept = y[:, :, -2:].clone()
    return out


def in_a_list(self, y):
    self.items.append(y.clone())
    if len(self.items) > 2:
        del self.items[0]
    return sum(self.items)


def in_lists_of_a_dict(self, y):
    self.named.setdefault("a", [None])
    before, self.named["a"][0] = self.named["a"][0], y.tanh()
    return y if before is None else y + before


def in_a_list_in_a_list(self, y):
    self.nested[1].append(y.sin())
    return sum(self.nested[1][-2:])


def in_place(self, y):
    if self.kept is None:
        self.kept = torch.zeros_like(y)
    self.kept.mul_(0.5).add_(y)
    return y + self.kept


def and_takes_it_away(self, y):
    if self.kept is None:
        self.kept = y.exp()
        return y
    out, self.kept = y * self.kept, None
    return out


def and_deletes_it(self, y):
    if hasattr(self, "late"):
        y = y * self.late
        del self.late
    else:
        self.late = y.exp()
    return y


def one_tensor_twice(self, y):
    total = y if self.kept is None else y + self.kept + self.items[0]
    self.kept = y * 3
    self.items[:] = [self.kept]
    return total


def a_part_of_a_large_one(self, y):
    before, self.kept = self.kept, y[:, :1].clone()
    return y * 2 if before is None else y * before


KEEPS = [
    latest, its_argument, under_a_new_name, beside_a_flag, in_a_list, in_a_list_in_a_list, in_lists_of_a_dict,
    in_place, and_deletes_it, and_takes_it_away, one_tensor_twice, a_part_of_a_large_one,
]  # fmt: skip


def pair_of(keep):
    stock = randomize(Cached(keep))
    return sdfastgn.optimize(copy.deepcopy(stock), trust=TRUST), stock


def image(seed, size=5):
    return noise(1, 3, size, 4, seed=seed)


@pytest.mark.drawn(3)
@pytest.mark.parametrize("keep", KEEPS, ids=lambda keep: keep.__name__)
def test_each_way_to_keep_a_tensor(keep):
    model, stock = pair_of(keep)
    results = []
    for seed in range(7):
        results.append((model(image(seed)), stock(image(seed))))
        is_same_state(model, stock)
    for ours, theirs in results:  # later calls did not write over them
        agree(ours, theirs)
    # The number of attributes is part of what is compared.
    assert planned(model).calls >= (0 if keep is and_deletes_it else 5)


def test_the_model_itself_keeps_a_tensor():
    class Root(Cached):
        def forward(self, x):
            y = super().forward(x)
            before, self.last = getattr(self, "last", None), y.clone()
            return y if before is None else y + before

    stock = randomize(Root(lambda self, y: y))
    model = sdfastgn.optimize(copy.deepcopy(stock), trust=TRUST)
    for seed in range(5):
        agree(model(image(seed)), stock(image(seed)))
        is_same_state(model, stock)
    assert planned(model).calls >= 4


def test_a_reset_other_sizes_and_errors_between_calls():
    model, stock = pair_of(beside_a_flag)
    for i, size in enumerate([5, 5, 6, 5, 5, 5]):
        if i in (2, 3):  # a new sequence
            for each in (model, stock):
                each.first.is_first, each.first.kept = True, None
        if i == 4:
            for each in (model, stock):
                with pytest.raises(RuntimeError):
                    each(image(0)[:, :2])
        agree(model(image(i, size)), stock(image(i, size)))
        is_same_state(model, stock)
    assert planned(model).last_change == ""


def test_no_plan_writes_over_what_is_kept():
    model, _ = pair_of(latest)
    kept = []
    for seed in range(4):
        model(image(seed))
        kept.append((model.first.kept, model.first.kept.clone()))
    assert all(torch.equal(a, b) for a, b in kept)
    assert len({a.data_ptr() for a, _ in kept}) == 4


def test_what_is_kept_does_not_keep_more_memory():
    model, _ = pair_of(a_part_of_a_large_one)
    for seed in range(3):
        model(image(seed))
    assert planned(model).calls > 0
    assert model.first.kept.untyped_storage().nbytes() == model.first.kept.nbytes


def test_what_a_call_replaces_is_let_go(monkeypatch):
    model, stock = pair_of(latest)
    for seed in range(3):
        agree(model(image(seed)), stock(image(seed)))
    run, gone = Baked.run, []

    def spied(self, inputs, *, frees=False):
        assert frees
        before = next(weakref.ref(t) for t in inputs if t.shape[1] == 8)
        results = run(self, inputs, frees=frees)
        gone.append((before() is None, model.first.kept))
        return results

    monkeypatch.setattr(Baked, "run", spied)
    agree(model(image(4)), stock(image(4)))
    assert gone == [(True, None)]
    is_same_state(model, stock)


def test_nothing_is_stored_if_the_model_has_changed():
    model, stock = pair_of(latest)
    for seed in range(3):
        agree(model(image(seed)), stock(image(seed)))
    for each in (model, stock):
        each.norm.eps = 0.5
    for seed in range(3):
        agree(model(image(seed)), stock(image(seed)))
        is_same_state(model, stock)


def test_a_module_with_state_is_replaced():
    model, stock = pair_of(latest)
    old = []
    for seed in range(6):
        if seed == 3:
            old += [model.first, stock.first]
            stock.first = randomize(Keeper(latest))
            model.first = copy.deepcopy(stock.first)
        agree(model(image(seed)), stock(image(seed)))
        is_same_state(model, stock)
    assert planned(model).plans
    is_same_kind(old[0].kept, old[1].kept)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_have_a_state_of_their_own(copied):
    model, stock = pair_of(latest)
    for seed in range(3):
        agree(model(image(seed)), stock(image(seed)))
    other, expected = copied(model), copy.deepcopy(stock)
    for seed in range(3):
        agree(other(image(9 - seed)), expected(image(9 - seed)))
    is_same_state(other, expected)
    is_same_state(model, stock)
    agree(model(image(4)), stock(image(4)))
    sdfastgn.restore(model)
    is_same_state(model, stock)
    agree(model(image(5)), stock(image(5)))


def test_a_plan_is_verified_without_a_change_of_the_state():
    stock = randomize(Cached(in_a_list))
    model = copy.deepcopy(stock)
    with pytest.warns(UserWarning, match="not verified"):
        sdfastgn.optimize(model, trust=TRUST, verify=True)
    for seed in range(4):
        agree(model(image(seed)), stock(image(seed)))
        is_same_state(model, stock)
    assert (planned(model).calls, planned(model).own) == (4, {})


# ---- state that no plan can have


def counts_only(self, y):
    self.is_first += 1
    return y


def in_a_buffer(self, y):
    self.buffer = y.clone()
    return y


def in_an_ordered_dict(self, y):
    self.named["a"] = y.clone()
    return y


def in_a_list_that_an_object_has(self, y):
    self.items.append(y.clone())
    return y * len(self.holder.items)


def counts(self, y):
    self.items = [y.clone()]
    self.is_first += 1
    return y


def new_names(self, y):
    setattr(self, f"kept_{sum(name.startswith('kept_') for name in vars(self))}", y.clone())
    return y


def shared(self, y):
    self.items.append(y.clone())
    return y + len(self.other.items)


def in_an_object(self, y):
    self.items[0].kept = y.clone()
    return y


class Holder:
    pass


def test_a_counter_beside_a_tensor_is_traced_less_and_less():
    model, stock = pair_of(counts)
    for seed in range(40):
        agree(model(image(seed)), stock(image(seed)))
    is_same_state(model, stock)
    assert planned(model).traces < 25
    assert list(planned(model).own) == ["its calls hardly repeat"]


@pytest.mark.slow
def test_names_that_never_repeat():
    model, stock = pair_of(new_names)
    traces = []
    for seed in range(80):
        agree(model(image(seed)), stock(image(seed)))
        traces.append(planned(model).traces)
    is_same_state(model, stock)
    assert traces[79] - traces[39] < 20  # and ever fewer


def test_a_list_of_two_modules():
    model, stock = pair_of(shared)
    for each in (model, stock):
        each.first.other = nn.Module()
        each.first.other.items = each.first.items
    for seed in range(4):
        agree(model(image(seed)), stock(image(seed)))
    assert len(model.first.items) == 4
    assert model.first.other.items is model.first.items
    assert list(planned(model).own) == [
        "a list or dict occurs twice in its arguments or the state of a module"
    ]


def with_buffer(keeper):
    keeper.register_buffer("buffer", None)


def with_ordered_dict(keeper):
    keeper.named = OrderedDict()


def with_object(keeper):
    keeper.holder = Holder()
    keeper.holder.items = keeper.items
    keeper.items.append(0)


def with_object_in_a_list(keeper):
    keeper.items.append(Holder())


@pytest.mark.parametrize(
    ("keep", "prepare", "reason"),
    [
        (counts_only, lambda keeper: None, "changes Keeper.is_first"),
        (in_a_buffer, with_buffer, "keeps a tensor in Keeper._buffers"),
        (in_an_ordered_dict, with_ordered_dict, "keeps a tensor in Keeper.named"),
        (in_a_list_that_an_object_has, with_object, "keeps a tensor in Keeper.items"),
        (in_an_object, with_object_in_a_list, "keeps a tensor in Holder.kept"),
    ],
)
def test_other_state_runs_the_models_own_code(keep, prepare, reason):
    model, stock = pair_of(keep)
    for each in (model, stock):
        prepare(each.first)
    for seed in range(4):
        agree(model(image(seed)), stock(image(seed)))
        is_same_state(model, stock)
    assert planned(model).calls == 0
    assert {each for each in planned(model).own if not each.startswith("the model ")} == {
        f"the call {reason}"
    }
