"""``optimize(transformer, precision="fp8")``: plans with products in E4M3, and their weights."""

import copy
import gc
import pickle
import re
import types
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree

import sdfastgn
from sdfastgn.patches.fp8 import models as fp8
from sdfastgn.patches.fp8 import rows
from sdfastgn.plans import install
from sdfastgn.plans.rewrite import e4m3
from tests.patches.transformers import add_lora, weights
from tests.plans.engine import forward_of as planned
from tests.plans.models import CALLS

pytestmark = [pytest.mark.fused_on_cpu, pytest.mark.usefixtures("without_gradients")]

CALL = {call.cls: call for call in CALLS if call.method == "forward"}
# Rows' errors of tiny models of two layers against fp32.
MEDIAN, MOST = 0.08, 0.15


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Small products count as large, and the CPU has E4M3."""
    monkeypatch.setattr(e4m3, "FEWEST_ROWS", 8)
    monkeypatch.setattr(e4m3, "FEWEST_COLUMNS", 32)
    monkeypatch.setattr(install, "FEWEST_COLUMNS", 32)
    monkeypatch.setattr(fp8, "device_reason", lambda device: None)


def made(name="SD3Transformer2DModel"):
    return CALL[name].model().bfloat16()


def run(model, seed=0, name="SD3Transformer2DModel"):
    """The result of a call in the dtype of the model, on its device."""
    (y,) = CALL[name].run(model, **inputs_of(model, seed, name))
    return y


def inputs_of(model, seed=0, name="SD3Transformer2DModel"):
    like = next(model.parameters())

    def moved(value):
        if not isinstance(value, torch.Tensor):
            return value
        return value.to(like.device, like.dtype if value.is_floating_point() else value.dtype)

    return pytree.tree_map(moved, CALL[name].drawn(seed))


def plan_of(model):
    (plan,) = planned(model).plans
    return plan


def errors(y, truth):
    """The relative error of each row, as (median, 95th percentile)."""
    y, truth = y.float().flatten(1), truth.float().flatten(1)
    y, truth = (t.reshape(-1, 16) for t in (y, truth))
    found = (y - truth).norm(dim=1) / truth.norm(dim=1)
    return found.quantile(0.5).item(), found.quantile(0.95).item()


NAMES = ["FluxTransformer2DModel", "SD3Transformer2DModel", "QwenImageTransformer2DModel"]


@pytest.mark.drawn(1)
@pytest.mark.parametrize("name", NAMES)
def test_transformers_in_e4m3(name):
    model = made(name)
    stock = copy.deepcopy(model)
    sdfastgn.optimize(model, precision="fp8")
    exact = copy.deepcopy(stock).float()
    for seed in range(3):
        median, most = errors(run(model, seed, name), run(exact, seed, name))
        assert 0 < median < MEDIAN
        assert most < MOST
    assert planned(model).calls >= 2
    targets = [step.target for step in plan_of(model).steps]
    assert targets.count("linear_e4m3") >= 6
    assert "quantize_weight" not in targets
    (found,) = sdfastgn.report(model).fp8
    assert found.in_e4m3 == found.products >= 6
    assert found.bytes > 0
    assert "each row of inputs and weights has a scale" in sdfastgn.report(model).details()
    sdfastgn.restore(model)
    assert torch.equal(run(model, 5, name), run(stock, 5, name))
    assert not sdfastgn.report(model).fp8


# Class -> the layers that stay in the model's dtype. Nobody reads what the last layers of Qwen-Image's texts
# compute.
OUTSIDE = r"norm_out\.linear|proj_out|time_text_embed\..*"
KEPT = {
    "FluxTransformer2DModel": rf"{OUTSIDE}|(x|context)_embedder|.*norm1?(_context)?\.linear",
    "SD3Transformer2DModel": rf"{OUTSIDE}|context_embedder|.*norm1(_context)?\.linear",
    "QwenImageTransformer2DModel": rf"{OUTSIDE}|(img|txt)_in|.*(img|txt)_mod\.1"
    r"|.*1\.(attn\.to_add_out|txt_mlp.*)",
    "ZImageTransformer2DModel": r"(all_x|cap|t)_embedder\..*|.*adaLN_modulation\..*|all_final_layer\..*",
}


@pytest.mark.drawn(1)
@pytest.mark.parametrize("name", KEPT)
def test_sensitive_layers_stay_in_the_models_dtype(name, monkeypatch):
    """Embeddings, modulations and the last layer, of which all but modulations may have many rows here."""
    monkeypatch.setattr(e4m3, "FEWEST_ROWS", 3)
    for limit in ("FEWEST_COLUMNS", "_SIZES"):
        monkeypatch.setattr(e4m3, limit, 1)
    model = made(name)
    for _ in range(2):  # the first call of some models fills tables
        run(model, 0, name)
    run(sdfastgn.optimize(model, precision="fp8"), 0, name)
    copied = {id(copy.holder) for copy, _ in plan_of(model).copies}
    layers = {path: layer for path, layer in model.named_modules() if isinstance(layer, nn.Linear)}
    kept = {path for path, layer in layers.items() if id(layer._parameters) not in copied}
    assert kept == {path for path in layers if re.fullmatch(KEPT[name], path)}


@pytest.mark.slow
def test_adapters_are_merged_into_the_weights_in_e4m3():
    """A change of scales is quantized again, for the same plan."""
    model = made()
    for seed, name in enumerate("ab"):
        add_lora(model, name, seed, ["to_q", "to_k", "to_out.0", "linear_1"])
    model.set_adapter("a")
    stock = copy.deepcopy(model).float()
    sdfastgn.optimize(model, precision="fp8")
    changes = [lambda m: None, weights(["a"], [-1.5]), weights(["a", "b"], [0.5, 2.0])]
    changes += [lambda m: m.disable_adapters(), lambda m: m.enable_adapters()]
    for change in changes:
        for each in (model, stock):
            change(each)
        for seed in range(2):
            median, _ = errors(run(model, seed), run(stock, seed))
            assert median < MEDIAN
    assert planned(model).traces == 1
    plain = in_e4m3(made())
    assert len(plan_of(model).copies) == len(plan_of(plain).copies) > 0


def in_e4m3(model, **options):
    """``model`` with a plan in E4M3."""
    run(model)  # so that no trace finds new state
    run(sdfastgn.optimize(model, precision="fp8", **options))
    assert plan_of(model).copies
    return model


def fresh(model):
    """What a new copy of ``model`` computes in E4M3."""
    other = copy.deepcopy(model)
    sdfastgn.restore(other)
    return run(in_e4m3(other), 1)


def scaled(model):
    weight = model.transformer_blocks[0].ff.net[0].proj.weight
    weight.mul_(1.5)


def written_through_data(model):
    """As ``fuse_lora`` writes: PyTorch does not count it."""
    for block in model.transformer_blocks:
        block.attn.to_q.weight.data.add_(0.3 * torch.ones(32, 1) @ torch.randn(1, 32))


def replaced_data(model):
    weight = model.transformer_blocks[1].attn.to_q.weight
    weight.data = weight.data * -2


def loaded(model):
    weights = {k: v * 1.25 for k, v in model.state_dict().items() if "ff.net" in k}
    model.load_state_dict(weights, assign=True, strict=False)


def made_strong(model):
    """As a strong LoRA: some rows of a weight are a hundred times as large."""
    model.transformer_blocks[0].attn.to_v.weight[::7] *= 100


@pytest.mark.slow
@pytest.mark.parametrize("change", [scaled, written_through_data, replaced_data, loaded, made_strong])
def test_changed_weights_are_quantized_again(change):
    model = in_e4m3(made())
    before, plan = run(model, 1), plan_of(model)
    change(model)
    found = [run(model, 1) for _ in range(2)]
    assert not torch.equal(found[0], before)
    assert torch.equal(found[0], fresh(model))
    assert torch.equal(*found)
    assert (plan_of(model) is plan) == (change is not loaded)  # which puts other parameters into the model


@pytest.mark.slow
@pytest.mark.parametrize("change", [scaled, replaced_data])
def test_counted_writes_and_moves_are_noticed_before_a_call(change, monkeypatch):
    """Without a comparison of contents, and without a second run."""
    model = in_e4m3(made())
    monkeypatch.setattr(rows.RowWeights, "has_same_contents", lambda self: True)
    change(model)
    assert torch.equal(run(model, 1), fresh(model))


def test_weights_that_do_not_change_are_quantized_once(monkeypatch):
    model = in_e4m3(made())
    monkeypatch.setattr(rows, "quantize_rows", None)
    for seed in range(3):
        run(model, seed)


@pytest.mark.slow
def test_plans_of_other_sizes_share_the_weights():
    model = in_e4m3(made())
    before = sdfastgn.report(model).fp8
    x = torch.randn(1, 4, 4, 8).bfloat16()
    inputs = {k: v[:1] for k, v in inputs_of(model).items()}
    model(**{**inputs, "hidden_states": x})
    assert len(planned(model).plans) == 2
    assert sdfastgn.report(model).fp8 == before


@pytest.mark.slow
def test_plans_on_disk(monkeypatch, tmp_path):
    """A plan with products in E4M3 is another one than that without."""
    stock = made()
    run(stock)
    monkeypatch.setenv("SDFASTGN_PLAN_CACHE", str(tmp_path))
    first, second, other = (copy.deepcopy(stock) for _ in range(3))
    for model, precision, loads in ((first, "fp8", 0), (other, None, 0), (second, "fp8", 1)):
        run(sdfastgn.optimize(model, precision=precision))
        assert planned(model).loads == loads
    assert plan_of(second).copies
    assert torch.equal(run(first, 1), run(second, 1))
    assert not torch.equal(run(first, 1), run(other, 1))


@pytest.mark.slow
def test_the_weights_are_freed_with_the_plans():
    model = in_e4m3(made())
    weights = planned(model).weights
    assert weights.count
    sdfastgn.optimize(model)
    gc.collect()
    assert weights.count == 0
    run(model)
    assert planned(model).weights is None
    assert not plan_of(model).copies


@pytest.mark.slow
def test_copies_of_the_model_run_without(tmp_path):
    model = in_e4m3(made())
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        y = run(twin, 1)
        assert planned(twin).weights is None
        assert not plan_of(twin).copies
        assert not torch.equal(y, run(model, 1))


@pytest.mark.slow
def test_a_block_ends_with_the_state_before_it():
    model = made()
    run(model)
    with sdfastgn.optimized(model, precision="fp8"):
        y = run(model, 1)
        with sdfastgn.optimized(model):
            other = run(model, 1)
            assert planned(model).weights is None
        assert torch.equal(run(model, 1), y)
        assert not torch.equal(y, other)
        assert plan_of(model).copies
    assert "forward" not in vars(model)
    assert not sdfastgn.report(model).fp8


def test_a_model_that_moves_away_frees_its_weights():
    model = in_e4m3(made())
    plan, weights = plan_of(model), planned(model).weights
    run(model, 1)
    model.to("meta")
    assert weights.nbytes == 0
    assert not any(copy for copy, _ in plan.copies)
    assert planned(model)._by_state  # plans stay


def test_weights_of_a_moved_model_are_not_kept_by_its_plans():
    model = in_e4m3(made())
    run(model, 1)
    memory = StorageWeakRef(model.proj_out.weight.untyped_storage())
    model.float()
    assert memory.expired()


def test_hooks_that_move_weights_in_each_call_free_them():
    model = in_e4m3(made())
    weights = planned(model).weights
    layer = next(m for m in model.modules() if isinstance(m, nn.Linear))
    layer._hf_hook = types.SimpleNamespace(offload=True)
    run(model, 1)
    assert weights.nbytes == 0
    own = [
        reason for module in model.modules() if "forward" in vars(module) for reason in planned(module).own
    ]
    assert any("accelerate's offloading moves" in reason for reason in own)
    del layer._hf_hook
    run(model, 1)
    run(model, 1)
    assert weights.nbytes > 0


def test_no_memory_runs_the_models_own_code(monkeypatch):
    model = in_e4m3(made())
    stock = sdfastgn.restore(copy.deepcopy(model))

    def fails(x):
        raise torch.OutOfMemoryError("as on a GPU")

    scaled(model)
    scaled(stock)
    with monkeypatch.context() as patch:
        patch.setattr(rows, "quantize_rows", fails)
        torch.testing.assert_close(run(model, 1), run(stock, 1), atol=0.03, rtol=0)
    assert "memory was short" in " ".join(planned(model).own)


@pytest.mark.slow
def test_verified_plans_in_e4m3():
    model = made()
    run(model)
    sdfastgn.optimize(model, precision="fp8", verify=True)
    run(model)
    assert plan_of(model).copies
    assert planned(model).calls == 1


@pytest.mark.parametrize(
    ("dtype", "options", "text"),
    [
        (torch.float16, {}, "its weights are torch.float16, and FP8 in plans needs bf16"),
        (torch.float32, {}, "its weights are torch.float32, and not fp16 or bf16"),
        (torch.bfloat16, {"plans": False, "missing_ok": True}, "it has no transformer blocks"),
    ],
)
def test_refusals(dtype, options, text):
    model = made().to(dtype)
    before = dict(vars(model))
    with pytest.raises(ValueError, match=rf'^sdfastgn\.optimize: precision="fp8" is impossible: {text}'):
        sdfastgn.optimize(model, precision="fp8", **options)
    assert vars(model) == before


def test_a_model_without_blocks_is_refused():
    model = nn.Module()
    model.norm, model.linear = nn.LayerNorm(64, elementwise_affine=False), nn.Linear(64, 64)
    text = r'precision="fp8" is impossible: it has no transformer blocks'
    with pytest.raises(ValueError, match=text):
        sdfastgn.optimize(model.bfloat16(), precision="fp8")
    model.blocks = nn.ModuleList([nn.Sequential(model.norm, model.linear)])
    sdfastgn.optimize(model, precision="fp8")


def test_a_device_without_e4m3_is_refused(monkeypatch):
    monkeypatch.setattr(fp8, "device_reason", lambda device: "GPU has compute capability 8.0, below 8.9")
    with pytest.raises(ValueError, match=r"compute capability 8\.0, below 8\.9"):
        sdfastgn.optimize(made(), precision="fp8")


def baked_of(model):
    (plans,) = planned(model)._by_state.values()
    (found,) = plans.made.values()
    return found.baked


def test_the_steps_are_baked():
    model = in_e4m3(made())
    first = run(model, 1)
    assert torch.equal(run(model, 1), first)
    baked = baked_of(model)
    assert baked.recorded == 1
    assert not any("e4m3" in step or "quantize" in step for step in baked.left)
    written_through_data(model)
    assert not torch.equal(run(model, 1), first)
    assert baked.recorded == 1


def test_threads_share_the_weights():
    model = in_e4m3(made())
    expected = [run(model, seed) for seed in range(4)]
    model.transformer_blocks[0].attn.to_q.weight.mul_(2).div_(
        2
    )  # the copies are made again by the first call
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(torch.no_grad()(lambda i: run(model, i % 4)), range(12)))
    assert all(torch.equal(y, expected[i % 4]) for i, y in enumerate(found))


# ---- on a GPU


@pytest.fixture
def on_gpu():
    """A plan in E4M3 on a GPU, and a copy of its model in fp32."""
    model = made().cuda()
    exact = copy.deepcopy(model).float()
    return in_e4m3(model, cuda_graphs=False), exact


@pytest.mark.gpu
def test_kernels_and_products_of_a_gpu(on_gpu):
    model, exact = on_gpu
    for seed in range(3):
        median, most = errors(run(model, seed), run(exact, seed))
        assert 0 < median < MEDIAN
        assert most < MOST
    baked = baked_of(model)
    assert baked.recorded == 1
    assert not baked.declined
    assert not any("e4m3" in step or "quantize" in step for step in baked.left)


@pytest.mark.gpu
@pytest.mark.parametrize("change", [scaled, written_through_data, replaced_data, made_strong])
def test_changes_on_a_gpu(change, on_gpu):
    model, _ = on_gpu
    torch.manual_seed(0)
    with torch.device("cuda"):
        change(model)
    other = copy.deepcopy(model)
    sdfastgn.restore(other)
    found = run(model, 1)
    run(sdfastgn.optimize(other, precision="fp8"), 1)
    assert torch.equal(found, run(other, 1))


@pytest.mark.gpu
def test_a_graph_of_other_code_has_the_rows_of_its_own_inputs(on_gpu):
    model, _ = on_gpu
    inputs = inputs_of(model)
    CALL["SD3Transformer2DModel"].run(model, **inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        (y,) = CALL["SD3Transformer2DModel"].run(model, **inputs)
    inputs["hidden_states"].mul_(100)
    graph.replay()
    (expected,) = CALL["SD3Transformer2DModel"].run(model, **inputs)
    assert torch.equal(y, expected)
