"""Plans of models with adapters: layers with merged weights are traced as the plain layers that run."""

import copy
import pickle

import pytest
import torch
from peft import LoHaConfig, LoraConfig, inject_adapter_in_model
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F

import sdfastgn
from sdfastgn.kernels.product import packed
from sdfastgn.patches.lora import adapter_survey
from sdfastgn.patches.lora.adapter_survey import AdapterSurvey
from sdfastgn.patches.lora.merged_weights import records
from sdfastgn.patches.lora.merging import frozen, give_back, scaled
from sdfastgn.plans.forward import SHORT_LIFE, PlannedForward
from sdfastgn.plans.run.bake import Baked
from tests.patches.cases import agree
from tests.patches.code.foreign import replaced
from tests.patches.transformers import CHANGES, FEW, TRANSFORMERS, add_lora, add_two, weights
from tests.plans.models import CALLS

pytestmark = [
    pytest.mark.fused_on_cpu,
    pytest.mark.usefixtures("without_gradients"),
    pytest.mark.filterwarnings("ignore:::peft"),
]

SD3 = TRANSFORMERS["sd3"]


def twins(name="sd3", add=None, **options):
    """(optimized model, its stock copy), both with the adapters that ``add`` adds."""
    stock = TRANSFORMERS[name].build()
    model = sdfastgn.optimize(copy.deepcopy(stock), **options)
    for each in (model, stock) if add else ():
        add(each)
    return model, stock


def planned(model) -> PlannedForward:
    """In the first state of the code; before the first call of a model with graphs, one without plans."""
    forward = vars(model)["forward"]
    if isinstance(forward, PlannedForward):
        return forward
    return forward.planned[0] if forward.planned else PlannedForward(model)


def follows(model, stock, calls=2, run=SD3.run):
    """The model gives the results of its stock copy. Returns these, and how many calls were plans."""
    expected, before = run(stock), planned(model).calls
    for _ in range(calls):
        agree(run(model), expected, 2e-4)
    return expected, planned(model).calls - before


@pytest.fixture
def runs(monkeypatch):
    """A list that grows with each run of a plan."""
    run, found = Baked.run, []
    monkeypatch.setattr(Baked, "run", lambda *args, **options: found.append(0) or run(*args, **options))
    return found


@pytest.mark.drawn(1)
@pytest.mark.parametrize("name", ["flux", "sd3", "z_image", "ltx", "wan"])
def test_layers_are_traced_as_plain_ones(name):
    """Calls with different scales share a plan."""
    kind = TRANSFORMERS[name]
    model, stock = twins(name)
    for _ in range(2 if name == "z_image" else 0):  # its first call makes a table that it keeps
        kind.run(model), kind.run(stock)
    for each in (model, stock):
        add_lora(each, "a")
    for _ in range(2):  # if there is a plan, the first call notices that layers have changed
        kind.run(model, 0.7)
    traces = planned(model).traces
    for each in (model, stock):
        weights(["a"], [0.8])(each)
    for scale in (None, 0.5, 0.0, None, -1.0):
        expected = kind.run(stock, scale)
        agree(kind.run(model, scale), expected, 1e-4)
    assert planned(model).calls >= 5
    assert planned(model).traces == traces
    (plan,) = planned(model).plans
    assert sum(step.target in ("linear", "linears", "linear_gelu") for step in plan.steps) > 5
    assert not any(step.target in ("mm", "addmm", "matmul") for step in plan.steps)
    assert sdfastgn.report(model).merged[0].layers == len([m for m in model.modules() if m in records])
    sdfastgn.restore(model)
    assert torch.equal(kind.run(model, -1.0), expected)


KEEP_THE_PLAN = [
    *("other-adapter", "both", "weights", "scale", "written", "data", "off", "off-and-on", "fused"),
    *("fused-and-unfused", "third", "deleted"),
]


@pytest.mark.slow
def test_changes_of_adapters_keep_the_plan(runs):
    model, stock = twins(add=add_two)
    before, _ = follows(model, stock)
    runs.clear()
    for name in KEEP_THE_PLAN:
        for each in (model, stock):
            CHANGES[name](each)
        now, calls = follows(model, stock)
        assert calls == 2, name
        is_same = name in ("fused-and-unfused", "deleted")
        assert is_same or (now - before).abs().max() > 1e-3, name
        # A write is found beside the plan, which has read old weights then. "off-and-on" has a call.
        assert len(runs) == (3 if name in ("written", "data", "off-and-on") else 2), name
        before = now
        runs.clear()
    assert planned(model).traces == 1


def stepped(model):
    parameters = [p for name, p in model.named_parameters() if ".lora_" in name]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    torch.optim.AdamW(parameters, lr=0.05, fused=True).step()


def loaded(model):
    model.load_state_dict({name: value * 1.1 for name, value in model.state_dict().items()})


def assigned(model):
    model.load_state_dict({name: value * 0.9 for name, value in model.state_dict().items()}, assign=True)


def moved(model):
    model.to(torch.float64).to(torch.float32).proj_out.base_layer.weight.mul_(1.5)


def unloaded(model):
    model.unload_lora()


def on_other_layers(model):
    add_lora(model, "c", 7, targets=["to_k", "linear_1"])


@pytest.mark.slow
@torch.no_grad()
def test_other_changes_show_in_the_next_call():
    model, stock = twins(add=add_two)
    before, _ = follows(model, stock)
    for change in (stepped, loaded, assigned, moved, unloaded, on_other_layers):
        for each in (model, stock):
            change(each)
        # After short lives of plans there would be a pause.
        now, calls = follows(model, stock, calls=SHORT_LIFE + 1)
        assert calls >= SHORT_LIFE, change.__name__
        assert (now - before).abs().max() > 1e-3
        before = now


def other_kind(model):
    torch.manual_seed(0)
    inject_adapter_in_model(LoHaConfig(r=2, target_modules=FEW, init_weights=False), model)


def for_each_sample(model):
    """A hook passes names of adapters to a layer, one for each sample."""
    add_lora(model, "a", targets=FEW)

    def choose(module, args, kwargs):
        return args, {**kwargs, "adapter_names": ["a"] * len(args[0])}

    model.proj_out.register_forward_pre_hook(choose, with_kwargs=True)


UNMERGED = {
    "its adapter is a variant of LoRA": lambda m: add_lora(m, "a", targets=FEW, use_dora=True),
    "its adapter has a dropout": lambda m: add_lora(m, "a", targets=FEW, lora_dropout=0.1) or m.eval(),
    "its kind of adapter is not merged": other_kind,
    "it has hooks": for_each_sample,
}


@pytest.mark.drawn(1)
@pytest.mark.parametrize("why", UNMERGED)
def test_adapters_that_cannot_be_merged_have_no_plan(why):
    model, stock = twins()
    follows(model, stock)
    for each in (model, stock):
        UNMERGED[why](each)
    _, calls = follows(model, stock)
    assert calls == 0
    (reason,) = [each for each in planned(model).own if each.startswith("it has layers with adapters")]
    assert why in reason


def test_an_adapter_that_cannot_be_merged_any_more():
    """A DoRA that was off is set on, and off again."""

    def add(model):
        add_lora(model, "a", targets=FEW)
        add_lora(model, "dora", targets=FEW, use_dora=True)
        model.set_adapter("a")

    model, stock = twins(add=add)
    assert follows(model, stock)[1] == 2
    for names, calls in (("dora", 0), ("a", 1)):
        for each in (model, stock):
            each.set_adapter(names)
        assert follows(model, stock)[1] >= calls
        assert bool(planned(model).plans) == bool(calls)


def test_merging_can_be_forbidden_and_allowed_again():
    model, stock = twins(add=add_two)
    follows(model, stock)
    sdfastgn.optimize(model, merge_adapters=False)
    assert follows(model, stock)[1] == 0
    assert not sdfastgn.report(model).merged
    sdfastgn.optimize(model)
    assert follows(model, stock, calls=3)[1] >= 1


def test_a_scale_that_is_no_number():
    model, stock = twins(add=add_two)
    follows(model, stock)
    scale = torch.tensor(0.3)
    agree(SD3.run(model, scale), SD3.run(stock, scale))
    assert "the scale of its adapters is no number" in planned(model).own
    follows(model, stock)


def test_code_that_is_replaced_runs():
    """A merged layer would call ``F.linear`` once, peft's code calls it three times."""
    model, stock = twins(add=add_two)
    follows(model, stock)
    embedding = torch.tensor([500.0]), torch.randn(1, 64)
    model.time_text_embed(*embedding)
    with replaced(F, "linear"):
        assert follows(model, stock)[1] == 0
        for _ in range(2):  # a part that is called by itself
            found, expected = (each.time_text_embed(*embedding) for each in (model, stock))
            assert torch.equal(found, expected)
    assert follows(model, stock)[1] >= 1


def test_another_thread_writes_merged_weights_while_a_plan_runs(monkeypatch):
    model, stock = twins(add=add_two)
    follows(model, stock)
    run, scales = Baked.run, iter((0.5, -0.5))

    def interrupted(self, inputs, **options):
        results = run(self, inputs, **options)
        scale = next(scales, None)
        if scale is not None:
            weights(["a"], [scale])(model)
        return results

    monkeypatch.setattr(Baked, "run", interrupted)
    agree(SD3.run(model), weights(["a"], [-0.5])(stock) or SD3.run(stock), 1e-4)


def test_plans_let_go_of_merged_weights_that_are_freed():
    model, stock = twins(add=add_two)
    follows(model, stock)
    record = records[model.proj_out]
    memory = StorageWeakRef(record.layer.weight.untyped_storage())
    assert not memory.expired()
    give_back(model)
    assert memory.expired()
    assert follows(model, stock)[1] == 0
    sdfastgn.optimize(model)
    assert follows(model, stock, calls=3)[1] >= 1


def test_packed_merged_weights_get_new_scales(monkeypatch):
    """One product reads queries, keys and values, whose merged weights lie side by side."""
    monkeypatch.setattr(packed, "PACKED_DEVICES", ("cpu",))
    model, stock = twins(add=add_two)
    follows(model, stock)
    layer = records[model.transformer_blocks[0].attn.to_q].layer
    (made,) = planned(model).plans
    before = layer.weight.data_ptr()
    for reader in records[model.proj_out].readers:
        reader.release()
    made.pack()
    sums, made_of = [], adapter_survey.LowRankSums
    monkeypatch.setattr(adapter_survey, "LowRankSums", lambda *args: sums.append(0) or made_of(*args))
    assert layer.weight.data_ptr() != before
    assert packed.are_packed([layer.weight]) == [True]
    for scale in (1.5, -0.5, 0.3):
        for each in (model, stock):
            weights(["a"], [scale])(each)
        assert follows(model, stock)[1] == 2
        assert len(sums) == 1  # they keep addresses of weights, so there must be new ones after the move
    assert planned(model).traces == 1


def test_a_capture_reads_what_its_graph_has_written():
    """Before a capture the survey of the graph writes the merged weights, and not that of the plan."""
    model, stock = twins(add=add_two)
    follows(model, stock)
    graphs = AdapterSurvey(model)
    weights(["a"], [0.5])(model), weights(["a"], [0.5])(stock)
    for factor in (1.0, 0.5):
        assert graphs.refresh(factor)
        before = planned(model).calls
        with frozen(), scaled(factor):
            agree(SD3.run(model), SD3.run(stock, factor), 1e-4)
        assert planned(model).calls == before + 1
    with frozen(), pytest.raises(RuntimeError, match="an adapter changed during the call"):
        SD3.run(model)
    assert follows(model, stock)[1] == 2


class Block(nn.Module):
    """``chooses``: its layer gets the names of adapters, one for each sample."""

    def __init__(self, chooses=False):
        super().__init__()
        self.chooses = chooses
        self.norm = nn.GroupNorm(2, 8)
        self.conv = nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x):
        options = {"adapter_names": ["default"] * len(x)} if self.chooses else {}
        return x + self.conv(F.silu(self.norm(x)), **options)


def blocks(*made):
    """(optimized model of ``made``, its stock copy), with adapters on their convolutions."""
    torch.manual_seed(0)
    stock = nn.Sequential(*made).eval()
    inject_adapter_in_model(LoraConfig(r=2, target_modules=["conv"], init_lora_weights=False), stock)
    return sdfastgn.optimize(copy.deepcopy(stock)), stock


def test_names_of_adapters_for_each_sample_among_the_arguments_of_a_layer():
    model, stock = blocks(Block(chooses=True))
    x = torch.randn(2, 8, 4, 4)
    for scale in (1.0, 0.5):
        for each in (model, stock):
            each[0].conv.set_scale("default", scale)
        assert follows(model, stock, run=lambda m: m(x))[1] == 0
    assert "a layer with an adapter runs its own code" in planned(model).own


def test_a_move_frees_merged_weights_and_keeps_the_plan():
    model, stock = blocks(Block(), Block())
    x = torch.randn(2, 8, 4, 4)
    assert follows(model, stock, run=lambda m: m(x))[1] == 2
    memory = StorageWeakRef(records[model[0].conv].layer.weight.untyped_storage())
    model.to(torch.float64)
    assert memory.expired()
    assert not sdfastgn.report(model).merged
    model(x.double())  # runs peft's code
    model.to(torch.float32)
    for scale in (1.0, 0.5):
        for each in (model, stock):
            each[0].conv.set_scale("default", scale)
        assert follows(model, stock, run=lambda m: m(x))[1] == 2
    assert planned(model).traces == 1


class Drawing(Block):
    def forward(self, x):
        return super().forward(x) + torch.rand(x.shape, device=x.device)


def through_data(model):
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            parameter.data.mul_(1.5)


def test_a_plan_that_draws_numbers_runs_once(runs):
    model, stock = blocks(Drawing())
    x = torch.randn(2, 8, 4, 4)

    def run(model):
        torch.manual_seed(1)
        return model(x), torch.rand(3)

    run(model)
    for each in (model, stock):
        through_data(each)
    runs.clear()
    for found, expected in zip(run(model), run(stock), strict=True):
        agree(found, expected, 1e-4)
    assert len(runs) == 1


class Keeping(Block):
    def forward(self, x, kept):
        kept[0] = super().forward(x + kept[0])
        return kept[0] * 2


def test_a_plan_that_replaces_its_arguments_may_run_twice(runs):
    model, stock = blocks(Keeping())
    model, stock = model[0], stock[0]
    sdfastgn.optimize(model)
    x, start = torch.randn(2, 8, 4, 4), torch.randn(2, 8, 4, 4)

    def run(model):
        kept = [start.clone()]
        return torch.stack([model(x, kept), kept[0]])

    assert follows(model, stock, run=run)[1] == 2
    for each in (model, stock):
        through_data(each)
    runs.clear()
    assert follows(model, stock, calls=1, run=run)[1] == 1
    assert len(runs) == 2


class Writing(Block):
    """With stock's strides of the convolution, ``flatten`` is a view of its result."""

    def forward(self, x):
        y = self.conv(F.silu(self.norm(x)))
        y.flatten(1).add_(1)
        return x + y


def test_merged_weights_count_with_stocks_strides():
    model, stock = blocks(Writing())
    x = torch.randn(2, 8, 4, 4)
    assert follows(model, stock, run=lambda m: m(x))[1] == 2


def test_layers_with_adapters_have_no_plans_of_their_own():
    model, _ = twins(add=add_two)
    sdfastgn.optimize(model)
    assert not any("forward" in vars(layer) for layer in model.modules() if layer in records)
    assert any(isinstance(vars(each).get("forward"), PlannedForward) for each in model.children())


def test_inside_of_a_model_layers_with_adapters_have_no_plans_of_their_own():
    model, stock = blocks(Block(), Block())
    for each in (model, stock):
        each[0].norm.register_forward_hook(lambda module, args, y: 2 * y)
    x = torch.randn(2, 8, 4, 4)
    assert follows(model, stock, run=lambda m: m(x))[1] == 0
    assert vars(model[1])["forward"].calls == 2
    assert not any("forward" in vars(part) for part in model[0].conv.modules())


@pytest.mark.slow
def test_copies_and_pickles():
    model, stock = twins(add=add_two, verify=True)
    follows(model, stock)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert follows(other, stock)[1] == 2
        weights(["a"], [0.5])(other)
        assert (SD3.run(other) - SD3.run(stock)).abs().max() > 1e-3
    assert follows(model, stock)[1] == 2


def test_plans_with_adapters_are_not_kept_on_disk(monkeypatch, tmp_path):
    monkeypatch.setenv("SDFASTGN_PLAN_CACHE", str(tmp_path / "plans"))
    model, stock = twins(add=add_two)
    assert follows(model, stock)[1] == 2
    assert planned(model).plans
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_convolutions_of_an_autoencoder():
    call = next(each for each in CALLS if each.name == "AutoencoderDC.decode")
    stock = call.model()
    model = copy.deepcopy(stock)
    targets = [path for path, m in stock.named_modules() if type(m) is torch.nn.Conv2d and m.groups == 1]
    for each in (model, stock):
        torch.manual_seed(0)
        config = LoraConfig(r=2, target_modules=targets, init_lora_weights=False)
        inject_adapter_in_model(config, each)
    sdfastgn.optimize(model)
    for seed in range(3):
        for layer in (m for each in (model, stock) for m in each.modules() if hasattr(m, "set_scale")):
            layer.set_scale("default", 0.5 * seed)
        (found,), (expected,) = (call.run(each, **call.drawn(seed)) for each in (model, stock))
        agree(found, expected, 1e-4)
    (of_decoder,) = [each for each in sdfastgn.report(model).plans if each.calls]
    assert (of_decoder.calls, of_decoder.traces) == (3, 1)
    assert of_decoder.steps["conv"] > 5
