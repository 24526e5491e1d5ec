"""CUDA graphs of transformers, which capture their plans. On the CPU, tapes are in place of the graphs."""

import copy
import pickle

import pytest
import torch
from peft import LoraConfig
from torch import nn
from torch.utils import _pytree as pytree

import sdfastgn
from sdfastgn.patches.graphs import forward as graphs_forward
from sdfastgn.patches.graphs import install as cuda_graphs
from sdfastgn.patches.graphs.capture import is_idle
from sdfastgn.patches.graphs.forward import GraphedForward
from sdfastgn.patches.lora.contents import Contents
from sdfastgn.plans import forward
from sdfastgn.plans import install as planning
from sdfastgn.plans.forward import SHORT_LIFE, PlannedForward
from sdfastgn.plans.run.plan import Plan
from tests.patches.graphs.cases import DEVICES, state
from tests.patches.graphs.tape import TapeBackend
from tests.plans.engine import often_captured
from tests.plans.models import CALLS
from tests.plans.programs import relative

pytestmark = [pytest.mark.fused_on_cpu, pytest.mark.usefixtures("without_gradients")]

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.03}
CALL = {call.cls: call._replace(method="__call__") for call in CALLS if call.method == "forward"}
SD3 = "SD3Transformer2DModel"
NO_PLAN = "it had no plan yet"
WAITS = "so far the GPU has not waited for Python"


@pytest.fixture(autouse=True)
def captured(monkeypatch):
    often_captured(monkeypatch)


def optimized(model, mode="auto", backend=None):
    sdfastgn.optimize(model, cuda_graphs=mode)
    if next(model.parameters()).device.type == "cpu":
        cuda_graphs.set_mode(model, mode, backend or TapeBackend())
        planning.install(model, True, frozenset(), mode)
    return model


class Pair:
    """An optimized transformer, and its stock copy."""

    def __init__(self, name=SD3, device="cpu", mode="auto", backend=None, dtype=torch.float32):
        self.call, self.device, self.dtype = CALL[name], device, dtype
        self.stock = self.call.model().to(device, dtype)
        self.model = optimized(copy.deepcopy(self.stock), mode, backend)

    def inputs(self, seed, **others):
        drawn = {**self.call.drawn(seed), **others}
        return pytree.tree_map(lambda x: self.moved(x) if isinstance(x, torch.Tensor) else x, drawn)

    def moved(self, x):
        return x.to(self.device, self.dtype if x.is_floating_point() else x.dtype)

    def agree(self, *seeds, **others):
        """The results of calls with other inputs are stock's, and stay as they are."""
        inputs = [self.inputs(seed, **others) for seed in seeds]
        ours, theirs = ([x for i in inputs for x in self.call.run(m, **i)] for m in (self.model, self.stock))
        assert max(map(relative, ours, theirs)) <= TOLERANCE[self.dtype]

    @property
    def counts(self):
        found = state(self.model)
        return found.captured, found.alive, found.replays


@pytest.mark.drawn(1)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["FluxTransformer2DModel", SD3, "QwenImageTransformer2DModel"])
def test_a_plan_is_captured_once_the_gpu_has_waited_twice(name, device):
    pair = Pair(name, device)
    pair.agree(0, 1, 2)
    assert state(pair.model).eager == {NO_PLAN: 1, WAITS: 2}
    pair.agree(3, 4, 5)
    assert pair.counts == (1, 1, 3)
    (planned,) = vars(pair.model)["forward"].planned
    assert (planned.traces, len(planned.plans), planned.own) == (1, 1, {})
    assert "0 alive" not in str(sdfastgn.report(pair.model))


def test_calls_that_keep_the_gpu_busy_are_not_captured(monkeypatch):
    pair = Pair()
    monkeypatch.setattr(forward, "is_idle", lambda device: False)
    pair.agree(*range(6))
    assert state(pair.model).eager == {NO_PLAN: 1, WAITS: 5}
    found = iter([True, False, True, True])
    monkeypatch.setattr(forward, "is_idle", lambda device: next(found))
    pair.agree(*range(4))
    assert pair.counts == (0, 0, 0)
    pair.agree(0, 1)
    assert pair.counts == (1, 1, 2)


@pytest.mark.drawn(1)
@pytest.mark.parametrize("others", [0, 6])
def test_calls_that_are_not_captured_compare_adapters_once(others, monkeypatch):
    """The plan compares them beside the GPU. What graphs compare would wait for the GPU first."""
    pair = Pair()
    lora(pair)
    for seed in range(others):  # other calls may have graphs
        pair.agree(seed)
    monkeypatch.setattr(forward, "is_idle", lambda device: False)
    size = {"hidden_states": torch.randn(2, 4, 4, 8)}
    pair.agree(*range(4), **size)
    found = []
    for name in ("note", "are_same"):
        monkeypatch.setattr(Contents, name, lambda *args, name=name: found.append(name))
    monkeypatch.setattr(graphs_forward, "AdapterSurvey", lambda *args: found.append("AdapterSurvey"))
    pair.agree(*range(3), **size)
    assert found == []
    assert pair.counts[1] == bool(others)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["FluxTransformer2DModel", SD3, "QwenImageTransformer2DModel"])
def test_graphs_in_bf16(name):
    pair = Pair(name, "cuda", dtype=torch.bfloat16)
    pair.agree(*range(8))
    assert pair.counts == (1, 1, 5)


@pytest.mark.gpu
def test_an_idle_gpu():
    device = torch.device("cuda", 0)
    torch.cuda._sleep(10**9)
    assert not is_idle(device)
    torch.cuda.synchronize()
    assert is_idle(device)


class WithTable(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(16, elementwise_affine=False)
        self.proj = nn.Linear(16, 16)
        self.table = torch.randn(20)

    def forward(self, x):
        return self.proj(self.norm(x)) * self.table.to(x.device)[:16].sin()


@pytest.mark.gpu
def test_a_table_on_the_cpu_is_never_stale():
    stock = WithTable().cuda().eval()
    model = sdfastgn.optimize(copy.deepcopy(stock), trust=("tests",))

    def agree():
        for _ in range(SHORT_LIFE):
            x = torch.randn(2, 9, 16, device="cuda")
            torch.testing.assert_close(model(x), stock(x), atol=1e-4, rtol=1e-4)

    agree()
    (plan,) = vars(model)["forward"].planned[0].plans
    assert (plan.others, plan.copies_from_cpu) == ([], False)
    for each in (model, stock):
        each.table.mul_(2)
    agree()
    for each in (model, stock):
        each.table = each.table + 1
    agree()
    assert vars(model)["forward"].planned[0].plans


@pytest.mark.drawn(1)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("mode", "calls"), [("auto", (3, 3)), (True, (0, 6))])
def test_each_call_counts_once(mode, calls, device):
    """The calls with copies of the arguments, which a capture makes, are not the user's."""
    pair = Pair(device=device, mode=mode)
    pair.agree(*range(6))
    (planned,) = vars(pair.model)["forward"].planned
    assert (planned.calls, state(pair.model).replays) == calls
    assert f"plans of {SD3}: 1 alive, {calls[0]} calls" in sdfastgn.report(pair.model).details()


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("calls", [SHORT_LIFE, SHORT_LIFE - 1])
def test_changes_make_pauses_only_if_an_image_has_few_calls(calls, device):
    """Graphs run most of an image's steps, and what they ran counts as use of the plan."""
    pair = Pair(device=device)
    for image in range(4):
        for each in (pair.model, pair.stock):
            each.norm_out.norm.eps = (1 + image) * 1e-6
        pair.agree(*range(calls))
    (planned,) = vars(pair.model)["forward"].planned
    reasons = [*planned.own, *state(pair.model).eager]
    assert any("too often" in reason for reason in reasons) == (calls < SHORT_LIFE)
    assert (planned.traces, pair.counts[0]) == (4, 4)


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_other_sizes_have_graphs_of_their_own(device):
    pair = Pair(SD3, device)
    (name, size) = next((k, v) for k, v in pair.call.inputs.items() if getattr(v, "shape", ())[2:])
    wide = torch.randn(*size.shape[:3], 2 * size.shape[3])
    pair.agree(*range(4))
    pair.agree(*range(4), **{name: wide})
    pair.agree(4)
    assert pair.counts == (2, 2, 3)


@pytest.mark.parametrize("device", DEVICES)
def test_the_first_call_is_captured_if_asked(device):
    pair = Pair(SD3, device, mode=True)
    pair.agree(0, 1)
    assert pair.counts == (1, 1, 2)


@pytest.mark.slow
def test_a_first_call_that_fills_tables_is_captured_later():
    pair = Pair("ZImageTransformer2DModel", mode=True)
    pair.agree(0, 1, 2)
    assert state(pair.model).eager == {NO_PLAN: 1}
    assert pair.counts == (1, 1, 2)


@pytest.mark.slow
def test_a_model_without_a_plan_keeps_the_plans_of_its_blocks():
    pair = Pair("Lumina2Transformer2DModel")
    pair.agree(*range(6))
    assert state(pair.model).eager == {NO_PLAN: 6}
    assert {each.path for each in sdfastgn.report(pair.model).plans if each.calls} >= {"layers.0", "layers.1"}
    lora(pair)
    pair.agree(0)
    assert sdfastgn.report(pair.model).merged


@pytest.mark.slow
def test_a_tensor_that_is_given_twice():
    pair = Pair("ZImageTransformer2DModel")
    prompt = torch.randn_like(pair.inputs(0)["cap_feats"][0])
    pair.agree(*range(6), x=[torch.randn_like(pair.inputs(0)["x"][0]) for _ in range(2)], t=torch.rand(2),
               cap_feats=[prompt, prompt])  # fmt: skip
    assert state(pair.model).eager["a tensor occurs twice in its arguments"]
    assert pair.counts == (0, 0, 0)


# ---- changes


def lora(pair, *models):
    for each in models or (pair.model, pair.stock):
        torch.manual_seed(0)
        each.add_adapter(LoraConfig(r=2, target_modules=["to_q", "proj_out"], init_lora_weights=False))
        each.eval()


def without_lora(pair):
    for each in (pair.model, pair.stock):
        each.delete_adapters("default")
        each.unload_lora()


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_a_lora_runs_merged_and_without_graph(device):
    pair = Pair(SD3, device)
    pair.agree(*range(5))
    lora(pair)
    pair.agree(*range(3))
    assert state(pair.model).alive == 0
    assert sdfastgn.report(pair.model).merged
    for each in (pair.model, pair.stock):
        for name, weight in each.named_parameters():
            if "lora_B" in name:
                weight.mul_(3)
    pair.agree(*range(3))
    without_lora(pair)
    pair.agree(*range(12))
    assert state(pair.model).alive == 1


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_changes_are_noticed(device):
    pair = Pair(SD3, device)
    pair.agree(*range(5))
    for each in (pair.model, pair.stock):
        each.proj_out.weight.mul_(2)
    pair.agree(5)
    assert pair.counts == (1, 1, 3)  # a graph reads weights in place
    for each in (pair.model, pair.stock):
        each.proj_out.weight.data = each.proj_out.weight.data * 2
    pair.agree(6, 7, 8)
    assert state(pair.model).captured == 2
    for each in (pair.model, pair.stock):
        each.transformer_blocks[0].norm1.norm.eps = 0.5
    pair.agree(*range(8))
    assert pair.counts[:2] == (3, 1)
    assert "eps" in state(pair.model).last_change


@pytest.mark.slow
def test_tables_that_were_written_need_a_new_graph(monkeypatch):
    pair = Pair()
    pair.agree(*range(4))
    (plan,) = vars(pair.model)["forward"].planned[0].plans
    monkeypatch.setattr(Plan, "is_current", lambda each: each is not plan)
    pair.agree(4)
    assert pair.counts == (1, 0, 1)
    pair.agree(*range(5))
    assert pair.counts[:2] == (2, 1)


def test_plans_that_copy_from_the_cpu_are_not_captured():
    pair = Pair()
    pair.agree(0)
    (plan,) = vars(pair.model)["forward"].planned[0].plans
    plan.copies_from_cpu = True
    pair.agree(*range(4))
    assert state(pair.model).eager["its plan copies tensors from the CPU"]
    assert pair.counts == (0, 0, 0)


def test_a_graph_that_leaves_too_little_memory_is_not_kept():
    backend = TapeBackend()
    backend.room = False
    pair = Pair(backend=backend)
    pair.agree(*range(6))
    assert (backend.captures, pair.counts[1:]) == (1, (0, 0))
    assert state(pair.model).eager["memory was short"] == 3


def test_a_capture_never_runs_the_models_own_code(monkeypatch):
    pair = Pair()
    pair.agree(*range(3))
    change = lambda graphed, current: setattr(current.module, "is_changed", True)  # noqa: E731
    monkeypatch.setattr(GraphedForward, "_rehearse", change)
    pair.agree(3)
    assert pair.counts == (0, 0, 0)
    assert list(state(pair.model).eager)[-1].startswith("the model has changed")


# ---- on and off


def entries(model):
    found = [vars(part).get("forward") for part in model.modules()]
    return {type(entry) for entry in found if entry is not None}


def test_without_graphs_and_without_plans():
    pair = Pair()
    assert entries(pair.model) == {GraphedForward, PlannedForward}
    sdfastgn.optimize(pair.model, cuda_graphs=False)
    assert entries(pair.model) == {PlannedForward}
    pair.agree(0, 1)
    assert vars(pair.model)["forward"].calls == 2
    sdfastgn.optimize(pair.model)
    assert entries(pair.model) == {GraphedForward, PlannedForward}
    for mode in ("auto", True):
        sdfastgn.optimize(pair.model, cuda_graphs=mode, plans=False)
        assert not entries(pair.model)
        sdfastgn.optimize(pair.model)
    sdfastgn.optimize(pair.model, cuda_graphs=True, plans=False)
    assert "would be CUDA graphs" not in str(sdfastgn.report(pair.model))


@pytest.mark.slow
def test_torch_compile_sees_the_models_own_code():
    """diffusers has allowed the class of this model in graphs of torch.compile."""
    pair = Pair("LTXVideoTransformer3DModel")
    pair.model = torch.compile(pair.model, backend="eager", fullgraph=True)
    pair.agree(0, 1)


def test_a_block_leaves_graphs_as_they_were():
    pair = Pair()
    pair.agree(*range(4))
    with sdfastgn.optimized(pair.model, cuda_graphs=False):
        assert entries(pair.model) == {PlannedForward}
    assert state(pair.model).mode == "auto"
    pair.agree(0)
    assert sum(each.calls for each in sdfastgn.report(pair.model).plans) == 1
    sdfastgn.restore(pair.model)
    with sdfastgn.optimized(pair.model):
        assert entries(pair.model) == {GraphedForward, PlannedForward}
    assert not entries(pair.model)


@pytest.mark.drawn(1)
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_have_graphs_of_their_own(copied):
    pair = Pair()
    pair.agree(*range(4))
    pair.model = copied(pair.model)
    assert pair.counts == (0, 0, 0)
    pair.agree(*range(2))
    assert vars(pair.model)["forward"].planned[0].calls == 2


def test_the_report_before_the_first_call():
    pair = Pair()
    text = str(sdfastgn.report(pair.model))
    assert "runs as plans where kernels run: SD3Transformer2DModel" in text
    assert "transformer_blocks" not in text


HUNYUAN = "HunyuanVideoTransformer3DModel"


def masks_of(*rows):
    return [{"encoder_attention_mask": torch.tensor([[*map(int, row)]]).bool()} for row in rows]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["auto", True])
def test_graphs_read_as_many_keys_as_the_masks_show(mode):
    pair = Pair(HUNYUAN, mode=mode)
    one, two = masks_of("1110000", "1111100")
    pair.agree(*range(8), **one)
    (planned,) = vars(pair.model)["forward"].planned
    (made,) = [made for plans in planned._by_state.values() for made in plans.made.values()]
    assert len(made.unmasked) == 1
    first = pair.counts
    assert first[2]
    pair.agree(*range(8), **two)
    assert pair.counts[0] == first[0] + 1
    for seed in range(6):  # two prompts take turns
        pair.agree(seed, **one)
        pair.agree(seed, **two)
    assert pair.counts[0] == first[0] + 1
    assert len(made.unmasked) == 1
    assert planned.own == {}


@pytest.mark.slow
def test_a_mask_that_is_written_between_replays():
    pair = Pair(HUNYUAN)
    (one,) = masks_of("1110000")
    pair.agree(*range(8), **one)
    for row in ("1111100", "1111111", "1000000"):
        one["encoder_attention_mask"][:] = masks_of(row)[0]["encoder_attention_mask"]
        pair.agree(*range(6), **one)
    assert pair.counts[2] > 12


@pytest.mark.slow
def test_masks_that_are_new_in_each_call_have_one_graph():
    pair = Pair(HUNYUAN)
    for seed in range(10):
        pair.agree(seed, **masks_of("1" * (seed % 7 + 1) + "0" * (6 - seed % 7))[0])
    assert pair.counts[:2] == (1, 1)
    assert pair.counts[2] > 5
