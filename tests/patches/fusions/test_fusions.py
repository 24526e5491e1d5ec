"""What every fusion of the registry promises, tested with the samples of ``samples.py``."""

import copy
import functools
import pickle
import types
import weakref

import pytest
import torch
from diffusers.models.activations import GEGLU
from diffusers.models.attention_processor import Attention
from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.upsampling import Upsample2D
from torch import nn

import sdfastgn
from sdfastgn.patches import patcher
from sdfastgn.patches.layers import group_norm, residual
from sdfastgn.patches.layers.group_norm import fused_activation
from sdfastgn.patches.layers.group_norm_subclass import SubclassSwap
from sdfastgn.patches.registry import FUSIONS
from sdfastgn.patches.swap import fusion as fusion_module
from sdfastgn.patches.swap.fusion import ClassSwap
from tests.kernels.samples import kernels
from tests.patches import cases, samples
from tests.patches.samples import each_copy, each_fusion, each_sample, output, snapshot, stock_and_output

pytestmark = pytest.mark.fused_on_cpu


def test_every_fusion_has_a_sample():
    names = {name.split("-")[0] for name, _, _ in samples.SAMPLES}
    assert names == {fusion.name for fusion in FUSIONS}
    assert len(FUSIONS) == len(names)


def test_a_new_fusion_is_a_file_and_a_line(monkeypatch):
    """``report``, ``optimize`` and ``restore`` use every fusion of the registry."""

    class FusedTanh(nn.Tanh):
        def forward(self, input):
            return super().forward(input) + 1

    monkeypatch.setattr(fusion_module, "_stock_of", dict(fusion_module._stock_of))
    fusion = ClassSwap("tanh", nn.Tanh, FusedTanh)
    monkeypatch.setattr(patcher, "FUSIONS", (*FUSIONS, fusion))
    module, x = nn.Sequential(nn.Tanh()), torch.randn(3)
    assert [(e.path, e.fusion) for e in sdfastgn.report(module).fusable] == [("0", "tanh")]
    assert torch.equal(sdfastgn.optimize(module, strict=True)(x), x.tanh() + 1)
    assert [(e.path, e.fusion) for e in sdfastgn.report(module).fused] == [("0", "tanh")]
    assert torch.equal(sdfastgn.restore(module)(x), x.tanh())
    assert type(module[0]) is nn.Tanh


@each_sample
def test_same_output_fused_and_bit_identical_after_restore(build, call, request):
    module, before = stock_and_output(build, call)
    stock = snapshot(module)
    weights = {k: v.clone() for k, v in module.state_dict().items()}
    # ``compile_repeated_blocks``, device maps and LoRA trainers compare names.
    names = [type(m).__name__ for m in module.modules()]
    fusion = request.node.callspec.id.split("-")[0]
    assert fusion in {e.fusion for e in sdfastgn.report(module).fusable}
    assert not sdfastgn.report(module).fused

    assert sdfastgn.optimize(module) is module
    torch.testing.assert_close(output(module, call), before, atol=2e-5, rtol=2e-5)
    report = sdfastgn.report(module)
    assert fusion in {e.fusion for e in report.fused}
    assert not report.fusable
    assert not report.skipped
    assert [type(m).__name__ for m in module.modules()] == names
    assert list(module.state_dict()) == list(weights)
    assert all(torch.equal(v, weights[k]) for k, v in module.state_dict().items())

    assert sdfastgn.restore(module) is module
    assert torch.equal(output(module, call), before)
    assert snapshot(module) == stock


@pytest.mark.drawn(5)
@each_fusion
def test_twice_is_once(build, call):
    module, before = stock_and_output(build, call)
    other = samples.randomize(build())
    stock, others = snapshot(module), snapshot(other)
    sdfastgn.optimize(module)
    once = snapshot(module)
    sdfastgn.optimize(module)
    assert snapshot(module) == once
    assert snapshot(other) == others  # another instance stays stock
    sdfastgn.restore(module)
    sdfastgn.restore(module)
    assert snapshot(module) == stock
    assert torch.equal(output(module, call), before)


@pytest.mark.drawn(3)
@pytest.mark.parametrize("assign", [False, True], ids=["copied", "assigned"])
@each_fusion
def test_weights_that_are_loaded_stay(build, call, assign):
    module, stock = samples.randomize(build()), build().eval()
    weights = {k: v * 0.5 for k, v in module.state_dict().items()}
    sdfastgn.optimize(module).load_state_dict({k: v.clone() for k, v in weights.items()}, assign=assign)
    stock.load_state_dict(weights)
    cases.agree(output(module, call), output(stock, call))
    sdfastgn.restore(module)
    assert all(torch.equal(v, weights[k]) for k, v in module.state_dict().items())
    assert torch.equal(output(module, call), output(stock, call))


@pytest.mark.drawn(2)
@each_fusion
@each_copy
def test_copies_of_a_fused_module_are_fused_and_can_be_restored(build, call, copied):
    module, before = stock_and_output(build, call)
    sdfastgn.optimize(module)
    other = copied(module)
    # Not always the same bits: an attention that was unpickled runs its products one by one until
    # it moves.
    torch.testing.assert_close(output(other, call), output(module, call), atol=2e-6, rtol=2e-6)
    sdfastgn.restore(other)
    assert torch.equal(output(other, call), before)
    assert sdfastgn.report(module).fused
    assert not sdfastgn.report(other).fused


@pytest.mark.drawn(4)
@each_sample
def test_gradients_of_a_fused_module(build, call):
    """The modules are in train mode. Dropout is 0 in all samples."""
    module = samples.randomize(build()).train()

    def gradients():
        module.zero_grad()
        call(module).square().mean().backward()
        return {k: p.grad.clone() for k, p in module.named_parameters() if p.grad is not None}

    before = gradients()
    sdfastgn.optimize(module)
    after = gradients()
    assert after.keys() == before.keys()
    for key, grad in after.items():
        torch.testing.assert_close(grad, before[key], atol=1e-5, rtol=2e-3, msg=lambda m, k=key: f"{k}: {m}")


@pytest.mark.drawn(8)
@each_sample
def test_hooks_on_inner_modules_see_what_they_saw(build, call):
    """A hook on a norm or an activation gets the stock value, although the two run as one."""
    module = samples.randomize(build())
    watched = {
        n: m
        for n, m in module.named_modules()
        if isinstance(m, (nn.GroupNorm, nn.LayerNorm, nn.SiLU, nn.GELU, nn.ReLU))
    }

    def record():
        seen = []
        hooks = [
            m.register_forward_hook(lambda m, i, o, n=n: seen.append((n, o.detach().clone())))
            for n, m in watched.items()
        ]
        output(module, call)
        for hook in hooks:
            hook.remove()
        return seen

    before = record()
    sdfastgn.optimize(module)
    after = record()
    assert [n for n, _ in after] == [n for n, _ in before]
    for (name, got), (_, want) in zip(after, before, strict=True):
        torch.testing.assert_close(got, want, atol=5e-5, rtol=5e-5, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.slow
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", ["attention", "geglu", "transformer_block", "upsample_2d"])
def test_under_a_compiler_the_graph_is_diffusers_own(name, training):
    build, call = samples.sample(name)
    with kernels(direct=True), torch.set_grad_enabled(training):
        cases.compiles_to_stocks_graph(cases.twins(samples.randomize(build()).train(training)), call)


@pytest.mark.drawn(4)
@each_fusion
def test_edits_after_optimize_count(build, call):
    """eps and weights that change after ``optimize`` are used."""
    module, _ = stock_and_output(build, call)
    twin = copy.deepcopy(module)
    sdfastgn.optimize(module)
    for m in (module, twin):
        for norm in (n for n in m.modules() if isinstance(n, (nn.GroupNorm, nn.LayerNorm))):
            norm.eps = 0.5
            if norm.weight is not None:
                norm.weight = nn.Parameter(norm.weight.detach() * 3 + 1)
    torch.testing.assert_close(output(module, call), output(twin, call), atol=2e-5, rtol=2e-5)


@each_fusion
def test_a_foreign_forward_is_left_alone_and_reported(build, call):
    module = samples.randomize(build())
    claimed = [f for f in patcher.inspect(module) if isinstance(f.fusion, (ClassSwap, SubclassSwap))]
    for finding in claimed:
        finding.module.forward = functools.partial(finding.module.forward)
    state, before = snapshot(module), output(module, call)
    sdfastgn.optimize(module)
    torch.testing.assert_close(output(module, call), before, atol=2e-5, rtol=2e-5)
    skipped = {(e.path, e.fusion): e.reason for e in sdfastgn.report(module).skipped}
    for finding in claimed:
        assert "forward" in skipped[finding.path, finding.fusion.name]
    with pytest.raises(ValueError, match="strict=True"):
        sdfastgn.optimize(sdfastgn.restore(module), strict=True)
    assert snapshot(module) == state


def test_another_method_of_the_instance_is_called():
    stock = GEGLU(6, 8)
    stock.gelu = torch.relu
    fused = sdfastgn.optimize(copy.deepcopy(stock))
    (skipped,) = sdfastgn.report(fused).skipped
    assert skipped.reason == "other code replaced this instance's gelu"
    x = torch.randn(2, 3, 6)
    with kernels(direct=True), torch.no_grad():
        cases.agree(fused(x), stock(x))


@pytest.mark.drawn(1)
@each_fusion
def test_an_own_forward_in_the_instance_changes_nothing(build, call):
    """Hooks that were removed leave a ``forward`` in the instance."""
    module, before = stock_and_output(build, call)
    fused = {(e.path, e.fusion) for e in sdfastgn.report(sdfastgn.optimize(copy.deepcopy(module))).fused}
    paths = [path for path, m in module.named_modules() if not isinstance(m, nn.ModuleList)]
    for path in paths:
        module.get_submodule(path).forward = module.get_submodule(path).forward
    state = snapshot(module)
    for twin in (module, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        sdfastgn.optimize(twin)
        assert {(e.path, e.fusion) for e in sdfastgn.report(twin).fused} == fused
        assert not sdfastgn.report(twin).skipped
        torch.testing.assert_close(output(twin, call), before, atol=2e-5, rtol=2e-5)
        sdfastgn.restore(twin)
        assert torch.equal(output(twin, call), before)
        own = [twin.get_submodule(path) for path in paths]
        assert all(vars(m)["forward"] == type(m).forward.__get__(m) for m in own)
    assert snapshot(module) == state


def test_an_unknown_upstream_source_is_left_alone(monkeypatch):
    module = samples.randomize(samples._resnet())
    samples.make_unknown(monkeypatch, "ResnetBlock2D.forward")
    sdfastgn.optimize(module)
    skipped = {e.fusion: e.reason for e in sdfastgn.report(module).skipped}
    assert "not a version that sdfastgn was tested with" in skipped["resnet_block"]
    assert {e.fusion for e in sdfastgn.report(module).fused} == {"group_norm"}


def wrapped_by_other_code(forward):
    return functools.wraps(forward)(lambda *args, **kwargs: forward(*args, **kwargs) * 0.5)


def unlike(forward):
    return lambda *args, **kwargs: forward(*args, **kwargs) * 0.5


@pytest.mark.parametrize(
    "patch",
    [
        pytest.param(unlike, id="replaced"),
        pytest.param(wrapped_by_other_code, id="wrapped"),
        pytest.param(lambda f: torch.no_grad()(wrapped_by_other_code(f)), id="wrapped-below-torchs"),
        pytest.param(lambda f: torch.no_grad()(f), id="torchs-but-not-diffusers"),
        pytest.param(
            lambda f: types.FunctionType(f.__code__, globals(), f.__name__), id="same-source-elsewhere"
        ),
    ],
)
def test_a_patched_upstream_class_is_left_alone(patch, monkeypatch):
    module = samples.randomize(samples._resnet())
    sdfastgn.optimize(copy.deepcopy(module))  # what an earlier call found says nothing about this one
    monkeypatch.setattr(ResnetBlock2D, "forward", patch(ResnetBlock2D.forward))
    assert (
        "ResnetBlock2D.forward"
        in {e.fusion: e.reason for e in sdfastgn.report(module).skipped}["resnet_block"]
    )
    sdfastgn.optimize(module)
    assert type(module) is ResnetBlock2D
    monkeypatch.undo()
    assert not sdfastgn.report(module).skipped


def test_a_patch_of_upstream_is_not_kept_alive(monkeypatch):
    """A patched function may refer to a pipeline."""
    patch = unlike(ResnetBlock2D.forward)
    with monkeypatch.context() as patches:
        patches.setattr(ResnetBlock2D, "forward", patch)
        sdfastgn.report(samples._resnet())
    gone = weakref.ref(patch)
    del patch
    assert gone() is None


NORM = {"eps": 1e-5, "elementwise_affine": True}
NOT_CLAIMED = {
    "attention-norms-of-queries": lambda: samples._attention(qk_norm="layer_norm"),
    "attention-norm-of-the-context": lambda: samples._attention(cross_attention_norm="layer_norm"),
    "attention-spatial-norm": lambda: Attention(32, heads=2, dim_head=16, spatial_norm_dim=32),
    "attention-shared-keys": lambda: samples._attention(kv_heads=1),
    "attention-added-projections": lambda: samples._attention(added_kv_proj_dim=8),
    "transformer_block-ada-zero": lambda: samples._block(norm_type="ada_norm_zero", num_embeds_ada_norm=10),
    "transformer_block-ada-single": lambda: samples._block(norm_type="ada_norm_single"),
    "transformer_block-positions": lambda: samples._block(
        positional_embeddings="sinusoidal", num_positional_embeddings=9
    ),
    "upsample_2d-transposed": lambda: Upsample2D(12, use_conv=True, use_conv_transpose=True),
    "upsample_2d-layer-norm": lambda: Upsample2D(12, use_conv=True, norm_type="ln_norm", **NORM),
    "upsample_2d-rms-norm": lambda: Upsample2D(12, use_conv=True, norm_type="rms_norm", **NORM),
    "upsample_2d-no-interpolation": lambda: Upsample2D(12, use_conv=True, interpolate=False),
}


@pytest.mark.parametrize("name", NOT_CLAIMED)
def test_other_modules_are_not_claimed(name):
    entries = sdfastgn.report(NOT_CLAIMED[name]()).entries
    assert not [e for e in entries if e.path == "" or e.fusion == name.split("-")[0]]


def test_an_activation_without_a_fused_form_keeps_the_norms_fused():
    module = samples.randomize(samples._resnet())
    module.nonlinearity = nn.Tanh()
    sdfastgn.optimize(module)
    report = sdfastgn.report(module)
    assert [e.fusion for e in report.fused] == ["group_norm", "group_norm"]
    assert "Tanh" in report.skipped[0].reason


def test_a_resnet_block_asks_of_each_norm_once_whether_it_can_be_fused(monkeypatch):
    block = sdfastgn.optimize(samples.randomize(samples._resnet()))
    asked = []
    for module in (group_norm, residual):
        monkeypatch.setattr(
            module, "fused_activation", lambda norm, act: asked.append(norm) or fused_activation(norm, act)
        )
    block(samples.image(2, 20, 6, 8), torch.randn(2, 16))
    assert asked == [block.norm1, block.norm2]


BLOCK = "mid_block.attentions.0.transformer_blocks.0"


@pytest.mark.drawn(3)
@pytest.mark.parametrize("beside", [True, False], ids=["beside-the-layer", "instead-of-it"])
@pytest.mark.parametrize(
    "path",
    [
        *(f"mid_block.resnets.0.{name}" for name in ("norm1", "nonlinearity", "conv2", "time_emb_proj")),
        *(f"mid_block.attentions.0.{name}" for name in ("norm", "proj_in", "proj_out")),
        *(f"{BLOCK}.{name}" for name in ("norm1", "attn1", "ff", "ff.net", "ff.net.0.proj")),
        *(f"{BLOCK}.attn2.{name}" for name in ("to_q", "to_v", "to_out")),
    ],
)
def test_what_other_code_puts_in_the_place_of_a_layer_is_called(path, beside):
    """An entry of the instance's ``__dict__``, which Python finds before a registered submodule."""
    stock = samples.randomize(samples.unet())
    unet = sdfastgn.optimize(copy.deepcopy(stock))
    inputs = samples.image(2, 4, 8, 8), 10, torch.randn(2, 3, 12)
    with torch.no_grad():
        before = unet(*inputs).sample
        for model in (stock, unet):
            place, _, name = path.rpartition(".")
            parent, layer = model.get_submodule(place), model.get_submodule(path)
            several = isinstance(layer, nn.ModuleList)
            if not beside:
                delattr(parent, name)
            vars(parent)[name] = [doubled(layer[0]), *layer[1:]] if several else doubled(layer)
        expected = stock(*inputs).sample
        assert (before - expected).abs().max() > 1e-4
        torch.testing.assert_close(unet(*inputs).sample, expected, atol=2e-5, rtol=2e-5)


def doubled(layer):
    return lambda *args, **kwargs: 2 * layer(*args, **kwargs)


class Doubled(nn.Module):
    """Like ``nn.Identity``, it has no ``p``."""

    def forward(self, x):
        return 2 * x


@pytest.mark.parametrize("name", ["resnet_block"])
def test_a_layer_in_the_place_of_a_dropout_is_called(name):
    build, call = samples.sample(name)
    models = cases.random_twins(build())
    for model in models:
        for path, layer in list(model.named_modules()):
            if isinstance(layer, nn.Dropout):
                model.set_submodule(path, Doubled())
        model.train()
    cases.agree(*(output(model, call) for model in models))


def test_conv_norm_out_called_by_itself_is_only_a_norm():
    unet = samples.randomize(samples.unet())
    x = samples.image(2, 20, 8, 8)
    norm, act = unet.conv_norm_out(x), unet.conv_act(x)
    sdfastgn.optimize(unet)
    torch.testing.assert_close(unet.conv_norm_out(x), norm)
    assert torch.equal(unet.conv_act(x), act)


def test_conv_norm_out_is_disarmed_after_an_exception():
    unet = sdfastgn.optimize(samples.randomize(samples.unet()))
    with pytest.raises(Exception, match=r"."):
        unet(torch.randn(2, 3, 8, 8), 10, torch.randn(2, 3, 12))
    x = samples.image(2, 20, 8, 8)
    assert unet.conv_norm_out(x).min() < -0.3  # below anything that SiLU gives
