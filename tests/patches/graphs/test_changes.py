"""The words for what changed in a model since its capture."""

import pytest
import torch
from torch import nn

import sdfastgn
from sdfastgn.patches.graphs import watch as graph_state
from sdfastgn.patches.graphs.watch import Watch
from tests.patches.graphs.cases import HARMLESS, make, run, state

pytestmark = pytest.mark.fused_on_cpu

# A set that iterates in another order once it is built again from its own items.
PAIRS = ({a, b} for a in range(64) for b in range(a))
TURNING = next(pair for pair in PAIRS if list(set(dict.fromkeys(pair))) != list(pair))


class Plain:
    """An object with attributes, as attention processors are."""

    __module__ = "torch.for_tests"

    def __init__(self):
        self.scale = 1.0
        self.names = ["a"]


class Other(Plain):
    __module__ = "torch.for_tests"


class Block(nn.Module):
    __module__ = "torch.for_tests"

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 1)
        self.norm = nn.BatchNorm2d(4).eval()
        self.steps = torch.zeros(32)
        self.factor = 1.0
        self.processor = Plain()
        self.scaling = {"a": 1.0}
        self.sizes = list(range(40))
        self.device_of_use = torch.device("cpu")
        self.kinds = TURNING.copy()


class Model(nn.Sequential):
    __module__ = "torch.for_tests"

    def __init__(self):
        super().__init__(Block(), nn.Linear(2, 2))
        self.factor = 1.0
        self[1].register_forward_hook(harmless)


class Renamed(Model):
    pass


def harmless(module, args, output):
    pass


def without(model, name):
    delattr(model, name)


# (change of a Model, what is said of it)
WORDS = [
    (lambda m: setattr(m, "__class__", Renamed), "the class of the model changed from Model to Renamed"),
    (lambda m: setattr(m, "factor", 2.0), "attribute factor of the model changed from 1.0 to 2.0"),
    (lambda m: setattr(m, "extra", 2.0), "attribute extra of the model was added"),
    (lambda m: without(m, "factor"), "attribute factor of the model was removed"),
    (lambda m: m.append(nn.Identity()), "module 2 was added"),
    (lambda m: setattr(m, "0", nn.Identity()), "module 0 changed from Block to Identity"),
    (lambda m: setattr(m[0], "factor", None), "attribute factor of 0 changed from 1.0 to None"),
    (
        lambda m: setattr(m[0], "factor", "x" * 50),
        "attribute factor of 0 changed from 1.0 to str",
    ),
    (
        lambda m: setattr(m[0], "device_of_use", torch.device("meta")),
        "attribute device_of_use of 0 changed from device(type='cpu') to device(type='meta')",
    ),
    (lambda m: setattr(m[0], "processor", Plain()), "attribute processor of 0 was replaced by another Plain"),
    (
        lambda m: setattr(m[0].processor, "__class__", Other),
        "the class of 0.processor changed from Plain to Other",
    ),
    (
        lambda m: setattr(m[0].processor, "scale", 0.5),
        "attribute scale of 0.processor changed from 1.0 to 0.5",
    ),
    (lambda m: setattr(m[0].processor, "bias", 0.5), "attribute bias of 0.processor was added"),
    (lambda m: m[0].processor.names.append("b"), "0.processor.names changed from ['a'] to ['a', 'b']"),
    (lambda m: m[0].sizes.append(1), "the items of 0.sizes changed"),
    (lambda m: m[0].kinds.clear(), f"0.kinds changed from {set(dict.fromkeys(TURNING))} to set()"),
    # a name that is LoRA's, of a module that is not
    (lambda m: m[0].scaling.update(a=0.5), "0.scaling['a'] changed from 1.0 to 0.5"),
    (lambda m: m[0].scaling.update(b=0.5), "0.scaling['b'] was added"),
    (lambda m: m[0].scaling.pop("a"), "0.scaling['a'] was removed"),
    (
        lambda m: setattr(m[0].conv, "bias", None),
        "parameter bias of 0.conv changed from Parameter to None",
    ),
    (lambda m: m[1].register_parameter("more", nn.Parameter(torch.ones(1))), "parameter more of 1 was added"),
    (lambda m: without(m[1], "bias"), "parameter bias of 1 was removed"),
    (lambda m: m[1].register_buffer("more", torch.ones(1)), "buffer more of 1 was added"),
    (lambda m: without(m[0].norm, "running_mean"), "buffer running_mean of 0.norm was removed"),
    (
        lambda m: setattr(m[0].norm, "running_mean", torch.ones(4)),
        "buffer running_mean of 0.norm was replaced by another Tensor",
    ),
    (lambda m: m[0].steps.add_(1), "the steps of 0 was written into"),
    (lambda m: m[0].norm.num_batches_tracked.add_(1), "0.norm.num_batches_tracked changed from 0 to 1"),
    (
        lambda m: setattr(m[1].weight, "data", torch.ones(2, 2)),
        "the weight of 1 has other memory (.to or param.data = ...)",
    ),
    (lambda m: m[0].register_forward_pre_hook(harmless), "a forward hook of 0 was added"),
    (lambda m: m[1]._forward_hooks.clear(), "a forward hook of 1 was removed"),
]


@pytest.mark.parametrize(("change", "words"), WORDS, ids=[words for _, words in WORDS])
def test_what_changed(change, words):
    model = Model()
    watch = Watch(model, lambda hook: hook is harmless, torch.device("cuda"))
    assert watch.reason is None
    assert watch.unchanged(model)
    change(model)
    assert not watch.unchanged(model)
    hint = " (load_state_dict(assign=True) or an assignment)"
    assert watch.what_changed(model).removesuffix(hint) == words


def test_nothing_is_named_that_did_not_change():
    model = Model()
    watch = Watch(model, lambda hook: hook is harmless, torch.device("cuda"))
    assert watch.what_changed(model) == "something in the model changed"


class Tricky(float):
    """Neither equal to itself nor anything else, and not to be shown."""

    def __eq__(self, other):
        raise ArithmeticError

    __hash__ = float.__hash__
    __repr__ = __eq__


def test_values_of_any_class():
    model = Model()
    watch = Watch(model, lambda hook: hook is harmless)
    model[0].factor = Tricky()
    assert watch.what_changed(model) == "attribute factor of 0 changed from 1.0 to Tricky"


def test_a_model_that_changes_while_it_is_looked_at(monkeypatch):
    """The call goes on without a name for the change."""

    def changing(*args):
        raise RuntimeError("dictionary changed size during iteration")

    model = Model()
    watch = Watch(model, lambda hook: hook is harmless)
    for name in ("difference_of", "_own_values"):
        monkeypatch.setattr(graph_state, name, changing)
    model.factor = 2.0
    assert not watch.unchanged(model)
    assert watch.what_changed(model) == "something in the model changed"


def test_no_one_looks_twice_while_nothing_changes(monkeypatch):
    def what_changed(self, root):
        raise AssertionError

    monkeypatch.setattr(Watch, "what_changed", what_changed)
    unet, _, inputs = make()
    run(unet, inputs, calls=4)
    for harmless_change in ("in-place", "training-and-back"):
        HARMLESS[harmless_change](unet)
        run(unet, inputs)
    assert (state(unet).replays, state(unet).last_change) == (5, "")


def test_the_report_tells_the_last_change():
    unet, _, inputs = make()
    block = unet.mid_block.resnets[0]
    for factor in (2.0, 3.0):
        run(unet, inputs, calls=4)
        block.output_scale_factor = factor
    run(unet, inputs)
    text = " ".join(str(sdfastgn.report(unet)).split())
    words = "last recapture: attribute output_scale_factor of mid_block.resnets.0 changed from 2.0 to 3.0"
    assert words in text
    assert words in " ".join(sdfastgn.report(unet).details().split())
    assert words.partition(": ")[2] == state(unet).last_change


def test_a_change_that_dropped_no_graph_is_no_recapture():
    unet, _, inputs = make(mode=True)
    hook = unet.mid_block.register_forward_hook(harmless)
    run(unet, inputs)
    hook.remove()  # from now on the model can be captured
    run(unet, inputs)
    assert (state(unet).captured, state(unet).last_change) == (1, "")


@pytest.mark.parametrize("held", [True, False], ids=["kept", "freed"])
def test_the_names_hold_no_memory(held):
    model = Model()
    watch = Watch(model, lambda hook: hook is harmless)
    weight = model[1].weight
    storage = torch.multiprocessing.reductions.StorageWeakRef(weight.data.untyped_storage())
    kept = weight.data if held else None
    weight.data = torch.ones(2, 2)
    assert storage.expired() != held
    assert "the weight of 1 has other memory" in watch.what_changed(model)
    del kept
