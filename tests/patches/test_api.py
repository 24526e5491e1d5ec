"""``optimize``, ``restore``, ``optimized`` and ``report`` on module trees, pipelines and bad input."""

import contextlib
import copy
import dataclasses
import functools
import gc
import inspect
import json
import weakref
from types import SimpleNamespace

import pytest
import torch
from accelerate import cpu_offload_with_hook
from accelerate.hooks import remove_hook_from_module
from diffusers import DDIMScheduler, DiffusionPipeline
from peft import LoraConfig
from torch import nn

import sdfastgn
from sdfastgn import api
from sdfastgn.models.architectures import build_unet, build_vae
from sdfastgn.models.pipelines import build_pipeline
from sdfastgn.patches import patcher
from sdfastgn.patches.graphs import install as cuda_graphs
from sdfastgn.patches.layout import channels_last
from sdfastgn.patches.offload.moves import follow, is_followed
from sdfastgn.patches.swap.class_forward import is_offloaded_whole
from sdfastgn.patches.swap.instance_entries import InstanceEntry
from sdfastgn.survey import Options
from tests.controlnet import build_controlnet
from tests.small_pipelines import text_encoder

pytestmark = pytest.mark.fused_on_cpu


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv_in = nn.Conv2d(3, 8, 3, padding=1)
        self.body = nn.Sequential(nn.GroupNorm(2, 8), nn.SiLU(), nn.Conv2d(8, 8, 3, padding=1))
        self.conv_out = nn.Conv2d(8, 3, 3, padding=1)

    def forward(self, x):
        return self.conv_out(self.body(self.conv_in(x)))


@pytest.mark.parametrize("call", ["optimize", "restore", "report"])
@pytest.mark.parametrize(
    "bad",
    [3, "unet", None, [nn.GroupNorm(1, 2)], DDIMScheduler(), torch.ones(4, 4)],
    ids=lambda bad: type(bad).__name__,
)
def test_neither_pipeline_nor_module(call, bad):
    with pytest.raises(TypeError) as caught:
        getattr(sdfastgn, call)(bad)
    message = str(caught.value)
    expected = f"expected a diffusers pipeline or a torch.nn.Module, got {type(bad).__name__} "
    assert message.startswith(f"sdfastgn.{call}: {expected}")
    assert "\n" not in message
    assert len(message) < 200


def convolutions():
    """A model without norms and attention."""
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())


class PlainPipeline(DiffusionPipeline):
    """A pipeline whose models have nothing to optimize, but whose scheduler has."""

    def __init__(self, vae, scheduler):
        super().__init__()
        self.register_modules(vae=vae, scheduler=scheduler)


NOTHING = "no GroupNorm and no other part that sdfastgn can fuse in {}, nothing to optimize"


def test_a_module_with_nothing_to_optimize():
    module = convolutions()
    nothing = NOTHING.format("Sequential")
    with pytest.raises(ValueError, match=rf"^sdfastgn\.optimize: {nothing} \(missing_ok=True returns it"):
        sdfastgn.optimize(module)
    report = sdfastgn.report(module)
    assert report.entries == ()
    assert nothing in " ".join(str(report).split())


def test_a_loop_over_models_of_which_one_has_nothing_to_optimize(recwarn):
    models = (Net(), convolutions())
    classes = [type(m) for m in models[1].modules()]
    for module in models:
        assert sdfastgn.optimize(module, missing_ok=True, strict=True) is module
        with sdfastgn.optimized(module, missing_ok=True) as inside:
            assert inside is module
        assert sdfastgn.restore(module) is module
    assert [type(m) for m in models[1].modules()] == classes
    assert not recwarn


def test_a_pipeline_with_nothing_to_optimize(recwarn):
    pipe = PlainPipeline(convolutions(), DDIMScheduler())
    classes = [type(part) for part in (pipe, pipe.scheduler)]
    assert sdfastgn.optimize(pipe) is pipe
    with sdfastgn.optimized(pipe) as inside:
        assert inside is pipe
        assert [type(part) for part in (pipe, pipe.scheduler)] == classes
    nothing = NOTHING.format("PlainPipeline")
    warned = [str(w.message) for w in recwarn]
    assert warned == [f"sdfastgn.{call}: {nothing}" for call in ("optimize", "optimized")]
    assert {(w.category, w.filename) for w in recwarn} == {(UserWarning, __file__)}
    report = sdfastgn.report(pipe)
    assert report.entries == ()
    assert nothing in " ".join(str(report).split())
    with pytest.raises(ValueError, match=nothing):
        sdfastgn.optimize(pipe, strict=True)
    recwarn.clear()
    assert sdfastgn.optimize(pipe, missing_ok=True, strict=True) is pipe
    assert not recwarn


def test_a_traced_part_is_left_as_it_is():
    x = torch.randn(1, 8, 6, 6)
    traced = torch.jit.trace(nn.Conv2d(8, 8, 3, padding=1).eval(), x)
    net = nn.Sequential(nn.GroupNorm(2, 8), nn.SiLU(), nn.Conv2d(8, 8, 1), traced).eval()
    expected = net(x)
    torch.testing.assert_close(sdfastgn.optimize(sdfastgn.optimize(net))(x), expected)
    assert torch.equal(sdfastgn.restore(net)(x), expected)


def test_the_with_block_on_nothing_keeps_parts_that_were_optimized_before():
    pipe = PlainPipeline(convolutions(), DDIMScheduler())
    other = SimpleNamespace(components={"unet": Net(), "scheduler": pipe.scheduler})
    sdfastgn.optimize(other)
    fused = type(pipe.scheduler)
    assert fused is not DDIMScheduler
    with sdfastgn.optimized(pipe, missing_ok=True):
        pass
    assert type(pipe.scheduler) is fused


def test_the_with_block_undoes_only_its_own_work():
    net = Net()
    with sdfastgn.optimized(net) as inside:
        assert inside is net
        assert sdfastgn.report(net).fused
    assert not sdfastgn.report(net).fused
    with pytest.raises(RuntimeError, match="inside"), sdfastgn.optimized(net):
        raise RuntimeError("inside")
    assert not sdfastgn.report(net).fused
    sdfastgn.optimize(net)
    with sdfastgn.optimized(net):
        pass
    assert sdfastgn.report(net).fused


def pipeline_with_an_optimized_unet():
    """A pipeline with an optimized UNet and a stock ControlNet, made from another pipeline's parts."""
    unet = sdfastgn.optimize(build_unet("tiny", torch.float32, "cpu"), cuda_graphs=True)
    return SimpleNamespace(
        components={"unet": unet, "controlnet": build_controlnet("tiny", torch.float32, "cpu")}
    )


def assert_only_the_unet_is_optimized(pipe):
    report = sdfastgn.report(pipe)
    assert {e.component for e in report.fused} == {"unet"}
    assert {e.component for e in report.fusable} == {"controlnet"}
    assert {g.kind: g.mode for g in report.graphs} == {
        "UNet2DConditionModel": "True",
        "ControlNetModel": "False",
    }
    assert channels_last.converted_weights(pipe.components["controlnet"]) == 0


@pytest.mark.drawn(1)
@pytest.mark.parametrize("mode", ["auto", True, False])
def test_the_with_block_leaves_each_component_as_it_was(mode):
    pipe = pipeline_with_an_optimized_unet()
    forward = pipe.components["unet"].forward
    with sdfastgn.optimized(pipe, cuda_graphs=mode):
        assert {e.component for e in sdfastgn.report(pipe).fused} == {"unet", "controlnet"}
        assert {g.mode for g in sdfastgn.report(pipe).graphs} == {str(mode)}
    assert_only_the_unet_is_optimized(pipe)
    assert (pipe.components["unet"].forward is forward) == (mode is not False)


def test_a_failure_leaves_each_component_as_it_was(monkeypatch):
    pipe = pipeline_with_an_optimized_unet()

    def fail_on_the_controlnet(root, mode, install=cuda_graphs.install):
        if root is pipe.components["controlnet"] and mode is not False:
            raise RuntimeError("no")
        install(root, mode)

    monkeypatch.setattr(cuda_graphs, "install", fail_on_the_controlnet)
    with pytest.raises(RuntimeError, match="no"):
        sdfastgn.optimize(pipe)
    assert_only_the_unet_is_optimized(pipe)


@pytest.fixture(params=[False, True], ids=["off", "on"])
def first_options(request):
    return {"merge_adapters": request.param, "exact_tiling": request.param}


def pipeline_with(options):
    """An optimized UNet with a LoRA, and an optimized VAE."""
    unet = build_unet("tiny", torch.float32, "cpu")
    unet.add_adapter(LoraConfig(r=2, target_modules=["to_q"], init_lora_weights=False))
    pipe = SimpleNamespace(components={"unet": unet, "vae": build_vae("tiny", torch.float32, "cpu")})
    return sdfastgn.optimize(pipe, **options)


def options_of(pipe):
    """The options of which ``report`` shows that they are on."""
    report = sdfastgn.report(pipe)
    has_tiles = "tiled_decode" in {entry.fusion for entry in report.fused}
    return {"merge_adapters": bool(report.merged), "exact_tiling": has_tiles}


@pytest.mark.drawn(1)
def test_the_with_block_keeps_earlier_options(first_options):
    pipe = pipeline_with(first_options)
    skipped = sdfastgn.report(pipe).skipped
    with sdfastgn.optimized(pipe):
        assert options_of(pipe) == {"merge_adapters": True, "exact_tiling": True}
    assert options_of(pipe) == first_options
    assert sdfastgn.report(pipe).skipped == skipped


@pytest.mark.drawn(1)
def test_a_call_that_fails_keeps_earlier_options(first_options, monkeypatch):
    pipe = pipeline_with(first_options)
    seen = []

    def fail_on_the_vae(root, mode, install=cuda_graphs.install):
        if root is pipe.components["vae"] and not seen:
            seen.append(options_of(pipe))
            raise RuntimeError("no")
        install(root, mode)

    monkeypatch.setattr(cuda_graphs, "install", fail_on_the_vae)
    others = {name: not value for name, value in first_options.items()}
    with pytest.raises(RuntimeError, match="no"):
        sdfastgn.optimize(pipe, **others)
    assert seen == [others]
    assert options_of(pipe) == first_options


def test_the_with_block_keeps_the_options_of_inner_modules():
    off = {"merge_adapters": False, "exact_tiling": False}
    model = nn.ModuleDict(pipeline_with(off).components)
    unet, vae = model["unet"], model["vae"]
    sdfastgn.optimize(model, **off)
    for module in (unet.mid_block, vae):
        sdfastgn.optimize(module)
    merged = sdfastgn.report(unet).merged
    assert merged
    with sdfastgn.optimized(model):
        assert sdfastgn.report(unet).merged != merged
    assert sdfastgn.report(unet).merged == merged
    assert "tiled_decode" in {entry.fusion for entry in sdfastgn.report(vae).fused}


def test_the_with_block_keeps_a_component_in_which_nothing_could_be_fused():
    net = Net()
    for module in (net.body, net.body[0]):
        module.forward = functools.partial(module.forward)
    sdfastgn.optimize(net)
    assert not sdfastgn.report(net).fused
    with sdfastgn.optimized(net):
        pass
    assert sdfastgn.report(net).channels_last_weights == 3


def test_the_with_block_gives_an_inner_model_its_graphs_back():
    encoder = build_pipeline("tiny_xl", dtype=torch.float32, device="cpu").text_encoder_2
    sdfastgn.optimize(encoder.text_model, cuda_graphs=True)
    with sdfastgn.optimized(encoder):
        assert "forward" not in vars(encoder.text_model)
    assert "forward" not in vars(encoder)
    assert encoder.text_model.forward.mode is True


def test_the_with_block_restores_what_was_taken_out_of_the_pipeline_meanwhile():
    one, other = Net(), sdfastgn.optimize(Net())
    pipe = SimpleNamespace(components={"unet": one})
    with sdfastgn.optimized(pipe):
        pipe.components["unet"] = other
    assert not sdfastgn.report(one).fused
    assert sdfastgn.report(other).fused


@pytest.mark.parametrize(
    ("obj", "options", "error"),
    [
        pytest.param(3, {}, TypeError, id="type"),
        pytest.param(Net(), {"cuda_graphs": 0}, ValueError, id="mode"),
        pytest.param(Net(), {"strict": "no"}, ValueError, id="strict"),
        pytest.param(nn.Linear(2, 2), {}, ValueError, id="nothing"),
    ],
)
def test_the_with_block_is_named_in_its_errors(obj, options, error):
    with pytest.raises(error, match=r"^sdfastgn\.optimized: "), sdfastgn.optimized(obj, **options):
        pass


def test_optimize_and_optimized_take_the_same_arguments():
    ours, block = (inspect.signature(getattr(sdfastgn, name)) for name in ("optimize", "optimized"))
    assert block.parameters == ours.parameters
    defaults = {name: p.default for name, p in ours.parameters.items() if name != "obj"}
    assert {field.name: field.default for field in dataclasses.fields(Options)} == defaults
    assert dataclasses.asdict(Options(**defaults)) == defaults


# Option -> a value for the block. FP8 has a test of its own.
IN_A_BLOCK = {
    "strict": True,
    "cuda_graphs": False,
    "missing_ok": True,
    "verify": True,
    "fold_batch_norm": True,
    "merge_adapters": False,
    "exact_tiling": False,
    "precision": None,
    "plans": False,
    "trust": ("a_package",),
}


def test_the_with_block_is_tried_with_each_option():
    assert [field.name for field in dataclasses.fields(Options)] == list(IN_A_BLOCK)


@pytest.mark.drawn(1)
@pytest.mark.parametrize("option", IN_A_BLOCK)
def test_the_with_block_takes_every_option(option, first_options):
    """Afterwards the pipeline has its former options."""
    options = {option: IN_A_BLOCK[option]}
    pipe = pipeline_with(first_options)
    pipe.components["net"] = nn.Sequential(nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), nn.GroupNorm(2, 8)).eval()
    sdfastgn.optimize(pipe.components["net"])
    before = [(e.path, e.fusion, e.status) for e in sdfastgn.report(pipe).entries]
    with sdfastgn.optimized(pipe, **options):
        inside = sdfastgn.report(pipe)
        expected = {"merge_adapters": True, "exact_tiling": True}
        assert options_of(pipe) == expected | {k: v for k, v in options.items() if k in expected}
        assert ("batch_norm" in {e.fusion for e in inside.fused}) == ("fold_batch_norm" in options)
    assert options_of(pipe) == first_options
    assert [(e.path, e.fusion, e.status) for e in sdfastgn.report(pipe).entries] == before


def test_the_with_block_refuses_fp8_as_optimize_does():
    for name in ("optimize", "optimized"):
        with (
            pytest.raises(ValueError, match=rf'^sdfastgn\.{name}: precision="fp8" is impossible'),
            contextlib.nullcontext(getattr(sdfastgn, name)(Net(), precision="fp8")) as block,
            block,
        ):
            pass


def test_the_with_block_is_a_decorator():
    net = Net()

    @sdfastgn.optimized(net)
    def fused(*args, **options):
        """Say what is fused."""
        return args, options, bool(sdfastgn.report(net).fused)

    assert (fused.__name__, fused.__doc__) == ("fused", "Say what is fused.")
    for _ in range(2):
        assert fused(1, two=2) == ((1,), {"two": 2}, True)
        assert not sdfastgn.report(net).fused


def test_one_with_block_can_be_used_again_also_inside_of_itself():
    net = Net()
    block = sdfastgn.optimized(net)
    for _ in range(2):
        with block:
            with block:
                pass
            assert sdfastgn.report(net).fused
        assert not sdfastgn.report(net).fused


INSTEAD = r"use it with `with sdfastgn.optimized\(...\):`, or call sdfastgn.optimize$"


@pytest.mark.parametrize(
    ("args", "options"),
    [(("a cat",), {}), ((), {}), ((), {"prompt": "a cat"}), ((torch.ones(1), 2), {}), ((len,), {"steps": 2})],
    ids=["prompt", "nothing", "keyword", "tensors", "function-and-keyword"],
)
def test_what_optimized_returns_is_not_the_pipeline(args, options):
    block = sdfastgn.optimized(Net())
    with pytest.raises(TypeError, match=f"^sdfastgn.optimized: what it returns cannot be called; {INSTEAD}"):
        block(*args, **options)


def test_what_optimized_returns_has_nothing_of_the_pipeline():
    net = Net()
    block = sdfastgn.optimized(net)
    with pytest.raises(AttributeError, match=rf"^sdfastgn.optimized: .* no attribute 'body'; {INSTEAD}"):
        _ = block.body
    assert not hasattr(block, "body")
    assert getattr(block, "body", None) is None
    assert isinstance(block, contextlib.AbstractContextManager)
    assert inspect.signature(block)
    assert inspect.unwrap(block) is block
    assert inspect.getmembers(block)
    assert not inspect.isfunction(block)
    repr(block)
    for twin in (copy.copy(block), copy.deepcopy(block)):
        with twin as inside:
            assert sdfastgn.report(inside).fused
        assert not sdfastgn.report(inside).fused
        assert isinstance(inside, Net)
    assert not hasattr(object.__new__(type(block)), "_obj")


@pytest.mark.parametrize(
    ("call", "name", "hint"),
    [
        ("optimize", "cuda_graph", "did you mean 'cuda_graphs'?"),
        ("optimize", "precison", "did you mean 'precision'?"),
        ("optimized", "merge_adapter", "did you mean 'merge_adapters'?"),
        ("optimized", "zzz", "it takes obj, strict, cuda_graphs, missing_ok, verify, fold_batch_norm, "
         "merge_adapters, exact_tiling, precision, plans, trust"),
        ("restore", "strict", "it takes obj"),
        ("report", "details", "it takes obj"),
    ],
)  # fmt: skip
def test_a_misspelt_argument(call, name, hint):
    net = Net()
    with pytest.raises(TypeError) as caught:
        getattr(sdfastgn, call)(net, **{name: True})
    assert str(caught.value) == f"sdfastgn.{call}: no argument is called {name!r}; {hint}"
    assert not sdfastgn.report(net).fused


@pytest.mark.parametrize("name", ["strict", "missing_ok", "verify", "fold_batch_norm", "exact_tiling"])
def test_options_that_are_no_bools(name):
    with pytest.raises(ValueError, match=rf"^sdfastgn\.optimize: {name}='no' must be True or False"):
        sdfastgn.optimize(Net(), **{name: "no"})


def test_a_failure_half_way_leaves_the_module_as_it_was(monkeypatch):
    net = Net()
    strides, classes = [p.stride() for p in net.parameters()], [type(m) for m in net.modules()]
    calls = []

    def fail_on_the_last(module, convert=channels_last._convert):
        calls.append(module)
        if module is net.conv_out:
            raise RuntimeError("out of memory")
        convert(module)

    monkeypatch.setattr(channels_last, "_convert", fail_on_the_last)
    with pytest.raises(RuntimeError, match="out of memory"):
        sdfastgn.optimize(net)
    assert len(calls) == 3
    assert [p.stride() for p in net.parameters()] == strides
    assert [type(m) for m in net.modules()] == classes
    assert not net.conv_in._forward_pre_hooks


@pytest.mark.parametrize("step", ["layout", "graphs"])
def test_a_second_call_that_fails_keeps_what_the_first_did(step, monkeypatch):
    net = sdfastgn.optimize(Net(), cuda_graphs=True)
    new = net.body[0] = nn.GroupNorm(4, 8)
    net.conv_out = nn.Conv2d(8, 3, 3, padding=1)
    before = {e.path: e.status for e in sdfastgn.report(net).entries}
    strides = [p.stride() for p in net.parameters()]
    assert before["body.0"] == "fusable"

    def fail_at_the_end(root, *rest, apply=channels_last.apply):
        apply(root)
        raise RuntimeError("no")

    where, name = (channels_last, "apply") if step == "layout" else (cuda_graphs, "install")
    monkeypatch.setattr(where, name, fail_at_the_end)
    with pytest.raises(RuntimeError, match="no"):
        sdfastgn.optimize(net)
    assert {e.path: e.status for e in sdfastgn.report(net).entries} == before
    assert type(new) is nn.GroupNorm
    assert [p.stride() for p in net.parameters()] == strides
    assert channels_last.leave not in net.conv_out._forward_hooks.values()
    assert channels_last.enter in net.conv_in._forward_pre_hooks.values()


def test_a_failure_in_one_component_restores_the_others(monkeypatch):
    pipe = SimpleNamespace(components={"unet": Net(), "vae": Net()})
    apply = patcher.apply

    def fail_on_the_vae(root, *rest, **options):
        if root is pipe.components["vae"]:
            raise RuntimeError("no")
        apply(root, *rest, **options)

    monkeypatch.setattr(patcher, "apply", fail_on_the_vae)
    with pytest.raises(RuntimeError, match="no"):
        sdfastgn.optimize(pipe)
    assert not sdfastgn.report(pipe).fused


def test_strict_names_every_reason_and_changes_nothing():
    net = Net()
    net.body.forward = functools.partial(net.body.forward)
    message = (
        r"sdfastgn.optimize: strict=True and 1 part cannot be fused: "
        r"other code replaced .*: body \(sequential\)"
    )
    with pytest.raises(ValueError, match=message):
        sdfastgn.optimize(net, strict=True)
    assert not sdfastgn.report(net).fused
    assert sdfastgn.optimize(net) is net


def test_components_without_a_group_norm_are_left_alone():
    text_encoder, scheduler = nn.Sequential(nn.Conv2d(3, 3, 3)), object()
    pipe = SimpleNamespace(
        components={"unet": Net(), "text_encoder": text_encoder, "scheduler": scheduler, "none": None}
    )
    strides = text_encoder[0].weight.stride()
    sdfastgn.optimize(pipe)
    assert text_encoder[0].weight.stride() == strides
    assert {e.component for e in sdfastgn.report(pipe).entries} == {"unet"}
    assert all(e.path.startswith("unet.") for e in sdfastgn.report(pipe).entries)


def pipeline_with_a_model_that_stays_stock():
    """Its text encoder has nothing to fuse."""
    return SimpleNamespace(components={"unet": Net(), "text_encoder": nn.Sequential(nn.Linear(8, 8))})


def is_stock(model):
    return not any(isinstance(value, InstanceEntry) for value in vars(model).values())


@pytest.mark.parametrize("alone", [False, True], ids=["pipeline", "model"])
def test_models_that_stay_stock_are_offloaded_faster(alone):
    pipe = pipeline_with_a_model_that_stays_stock()
    sdfastgn.optimize(pipe, strict=True)
    text_encoder = pipe.components["text_encoder"]
    assert is_followed(text_encoder)
    assert "offloaded" not in str(sdfastgn.report(pipe))
    for model in pipe.components.values():
        cpu_offload_with_hook(model, torch.device("cpu"))
    assert sdfastgn.report(pipe).offloaded == ("unet", "text_encoder")
    assert "offloaded, with faster copies: unet, text_encoder" in str(sdfastgn.report(pipe))
    remove_hook_from_module(text_encoder)
    sdfastgn.restore(text_encoder if alone else pipe)
    assert is_stock(text_encoder)
    assert is_followed(pipe.components["unet"]) == alone


@pytest.mark.slow
def test_a_compiled_model_is_offloaded_faster():
    pipe = pipeline_with_a_model_that_stays_stock()
    compiled = pipe.components["text_encoder"] = torch.compile(pipe.components["text_encoder"])
    sdfastgn.optimize(pipe)
    cpu_offload_with_hook(compiled, torch.device("cpu"))
    assert sdfastgn.report(pipe).offloaded == ("text_encoder",)
    assert is_offloaded_whole(compiled)


def test_the_with_block_holds_no_model_that_stays_stock():
    pipe = pipeline_with_a_model_that_stays_stock()
    with sdfastgn.optimized(pipe):
        text_encoder = weakref.ref(pipe.components.pop("text_encoder"))
        gc.collect()
        assert text_encoder() is None


def test_the_with_block_follows_models_that_stay_stock_only_inside():
    pipe = pipeline_with_a_model_that_stays_stock()
    text_encoder = pipe.components["text_encoder"]
    with sdfastgn.optimized(pipe):
        assert is_followed(text_encoder)
    assert is_stock(text_encoder)
    sdfastgn.optimize(pipe)
    with sdfastgn.optimized(pipe):
        pass
    assert is_followed(text_encoder)


def test_the_with_block_without_graphs_keeps_following():
    """``graphs.remove`` ends what ``graphs.install`` has begun, but the pipeline was optimized before."""
    pipe = SimpleNamespace(components={"unet": Net(), "text_encoder": text_encoder()})
    sdfastgn.optimize(pipe, cuda_graphs=False)
    with sdfastgn.optimized(pipe, cuda_graphs=True):
        pass
    assert is_followed(pipe.components["text_encoder"])


@pytest.mark.slow
@pytest.mark.parametrize("wrap", [nn.Sequential, torch.compile], ids=["module", "compiled"])
def test_a_followed_model_that_is_wrapped_later(wrap):
    pipe = pipeline_with_a_model_that_stays_stock()
    text_encoder = pipe.components["text_encoder"]
    sdfastgn.optimize(pipe)
    pipe.components["text_encoder"] = wrap(text_encoder)
    with sdfastgn.optimized(pipe):
        pass
    assert is_followed(text_encoder)
    sdfastgn.restore(pipe)
    assert all(map(is_stock, pipe.components["text_encoder"].modules()))


def test_a_failure_follows_no_model(monkeypatch):
    pipe = pipeline_with_a_model_that_stays_stock()

    def fail_at_the_last(model):
        follow(model)
        if model is pipe.components["text_encoder"]:
            raise RuntimeError("no")

    monkeypatch.setattr(api, "follow", fail_at_the_last)
    with pytest.raises(RuntimeError, match="no"):
        sdfastgn.optimize(pipe)
    assert is_stock(pipe.components["text_encoder"])
    assert not sdfastgn.report(pipe).fused


def test_a_component_under_two_names_is_one():
    net = Net()
    pipe = SimpleNamespace(components={"unet": net, "unet_again": net})
    assert {e.component for e in sdfastgn.report(sdfastgn.optimize(pipe)).entries} == {"unet"}


@pytest.mark.drawn(1)
@pytest.mark.parametrize("names", [("vae", "part"), ("part", "vae")], ids=["outer-first", "inner-first"])
@pytest.mark.parametrize("part", ["decoder", "decoder.mid_block"])
def test_a_component_within_another(part, names):
    vae = build_vae("tiny", torch.float32, "cpu")
    modules = {"vae": vae, "part": vae.get_submodule(part)}
    pipe = SimpleNamespace(components={name: modules[name] for name in names})
    latents = torch.randn(1, 4, 4, 4)
    with torch.no_grad():
        before = vae.decode(latents).sample
        after = sdfastgn.optimize(pipe).components["vae"].decode(latents).sample
    torch.testing.assert_close(after, before, atol=2e-5, rtol=2e-5)
    report = sdfastgn.report(pipe)
    assert {e.component for e in report.entries} == {"vae"}
    assert len(report.entries) == len({(e.path, e.fusion) for e in report.fused})
    assert not sdfastgn.report(sdfastgn.restore(pipe)).fused
    with torch.no_grad():
        assert torch.equal(vae.decode(latents).sample, before)


def test_components_that_share_a_part():
    one, other = (build_vae("tiny", torch.float32, "cpu") for _ in range(2))
    other.decoder = one.decoder
    pipe = SimpleNamespace(components={"vae": one, "other": other})
    latents = torch.randn(1, 4, 4, 4)
    with torch.no_grad():
        before = [vae.decode(latents).sample for vae in (one, other)]
        sdfastgn.optimize(pipe)
        for vae, image in zip((one, other), before, strict=True):
            torch.testing.assert_close(vae.decode(latents).sample, image, atol=2e-5, rtol=2e-5)
        sdfastgn.restore(pipe)
        assert all(
            torch.equal(v.decode(latents).sample, i) for v, i in zip((one, other), before, strict=True)
        )


def test_layout_inside_and_at_the_doors():
    net = sdfastgn.optimize(Net())
    seen = []
    net.body[2].register_forward_hook(
        lambda m, i, o: seen.append(i[0].is_contiguous(memory_format=torch.channels_last))
    )
    y = net(torch.randn(2, 3, 8, 8))
    assert seen == [True]
    assert y.is_contiguous()
    assert all(
        m.weight.is_contiguous(memory_format=torch.channels_last)
        for m in net.modules()
        if isinstance(m, nn.Conv2d)
    )


def test_parameters_keep_their_identity_and_survive_a_change_of_dtype():
    net = Net()
    parameters = list(net.parameters())
    strides = [p.stride() for p in parameters]
    values = [p.detach().clone() for p in parameters]
    sdfastgn.optimize(net).to(torch.bfloat16)
    assert net(torch.randn(1, 3, 8, 8, dtype=torch.bfloat16)).dtype is torch.bfloat16
    sdfastgn.restore(net)
    assert [id(p) for p in net.parameters()] == [id(p) for p in parameters]
    assert [p.stride() for p in net.parameters()] == strides
    assert all(torch.equal(p, v.to(torch.bfloat16)) for p, v in zip(net.parameters(), values, strict=True))


def test_report_as_text_and_as_data():
    net = Net()
    net.body.forward = functools.partial(net.body.forward)
    text = str(sdfastgn.report(sdfastgn.optimize(net)))
    assert "Net" in text
    assert "skipped: other code replaced this instance's forward (sequential)\n  body\n" in text
    assert "plain PyTorch" in text or "Triton" in text
    data = json.loads(json.dumps(sdfastgn.report(net).to_dict()))
    assert data["channels_last_weights"] == 3
    assert {e["status"] for e in data["entries"]} == {"fused", "skipped"}


def test_triton_is_prepared_on_the_gpus_of_a_model(monkeypatch):
    """Without a GPU only the devices of the parameters can be named."""
    prepared = []
    monkeypatch.setattr(sdfastgn.api, "prepare", prepared.append)
    monkeypatch.setattr(
        sdfastgn.api, "_prepare_triton", functools.partial(on_a_gpu, sdfastgn.api._prepare_triton)
    )
    sdfastgn.optimize(build_unet("tiny", torch.float32, "cpu"))
    assert prepared == [torch.device("cuda", 0)]


def on_a_gpu(call, devices):
    assert list(devices) == [torch.device("cpu")]
    call([torch.device("cuda", 0), *devices])
