"""Offload hooks and wrappers that keep a module's bound ``forward`` while its class changes."""

import copy
import functools

import diffusers
import pytest
import torch
from accelerate import cpu_offload, cpu_offload_with_hook
from accelerate.hooks import remove_hook_from_module, remove_hook_from_submodules
from diffusers.hooks import HookRegistry, ModelHook
from packaging.version import Version
from torch import nn

import sdfastgn
from sdfastgn.models.architectures import build_unet, unet_inputs
from tests.patches import samples
from tests.patches.graphs import cases as graph_cases
from tests.patches.samples import each_copy, snapshot

pytestmark = pytest.mark.fused_on_cpu

CPU = torch.device("cpu")
_, CALL = samples.sample("conv_norm_out-unet")


def output(model):
    with torch.no_grad():
        return CALL(model)


GROUPS_ON_CPU = pytest.mark.skipif(
    Version(diffusers.__version__) < Version("0.41.0") and not torch.accelerator.is_available(),
    reason="before 0.41 diffusers offloads groups of layers only where there is an accelerator",
)


def group_offload(level, **options):
    return lambda model: model.enable_group_offload(CPU, CPU, offload_type=level, **options)


class Double(ModelHook):
    def post_forward(self, module, output):
        return output * 2


class Halve(ModelHook):
    """A hook that replaces ``forward``, and keeps the module's own elsewhere."""

    def new_forward(self, module, *args, **kwargs):
        return self.fn_ref.original_forward(*args, **kwargs) / 2


def registered(model):
    for module in norms_and_blocks(model):
        registry = HookRegistry.check_if_exists_or_initialize(module)
        registry.register_hook(Double(), "double")
        registry.register_hook(Halve(), "halve")
        registry.register_hook(Double(), "again")


def norms_and_blocks(model):
    return [
        m
        for m in model.modules()
        if isinstance(m, nn.GroupNorm) or type(m).__name__ in ("ResnetBlock2D", "SiLU")
    ]


def closures(model):
    for module in norms_and_blocks(model):
        module.forward = (lambda forward: lambda *args, **kwargs: forward(*args, **kwargs) * 2)(
            module.forward
        )


def partials(model):
    def doubled(forward, *args, **kwargs):
        return forward(*args, **kwargs) * 2

    for i, module in enumerate(norms_and_blocks(model)):
        if i % 2:
            module.forward = functools.partial(doubled, module.forward)
        else:
            module.forward = functools.partial(
                lambda *args, forward, **kwargs: doubled(forward, *args), forward=module.forward
            )


class Wrapper:
    def __init__(self, forward):
        self.forward = forward

    def __call__(self, *args, **kwargs):
        return self.forward(*args, **kwargs) * 2


def objects(model):
    for i, module in enumerate(norms_and_blocks(model)):
        wrapper = Wrapper(module.forward)
        module.forward = wrapper if i % 2 else wrapper.__call__


def helper(model):
    """Wraps all forwards as DeepCache does, and keeps the originals in one dict."""
    kept = Wrapper(None)
    kept.forwards, kept.list = {}, []
    for i, module in enumerate(norms_and_blocks(model)):
        kept.forwards[i] = module.forward
        kept.list.append(module.forward)
        module.forward = lambda *args, i=i, **kwargs: (
            kept.forwards[i](*args, **kwargs) + kept.list[i](*args, **kwargs)
        )


KEEPERS = [
    pytest.param(lambda model: cpu_offload(model, CPU), id="accelerate"),
    pytest.param(group_offload("leaf_level"), id="leaf-level", marks=GROUPS_ON_CPU),
    pytest.param(group_offload("block_level", num_blocks_per_group=1), id="block-level", marks=GROUPS_ON_CPU),
    pytest.param(registered, id="three-hooks"),
    pytest.param(closures, id="closure"),
    pytest.param(partials, id="partial"),
    pytest.param(objects, id="object"),
    pytest.param(helper, id="helper"),
]


def twins_with(change):
    """(optimized, stock) with the same weights, both changed afterwards."""
    model = samples.randomize(samples.unet())
    stock = copy.deepcopy(model)
    change(sdfastgn.optimize(model)), change(stock)
    return model, stock


@pytest.mark.drawn(1)
@pytest.mark.parametrize("keep", KEEPERS)
def test_a_hooked_model_after_restore_is_the_stock_one_with_the_same_hooks(keep):
    model, stock = twins_with(keep)
    torch.testing.assert_close(output(model), output(stock), atol=2e-4, rtol=2e-3)
    sdfastgn.restore(model)
    for _ in range(2):
        assert torch.equal(output(model), output(stock))


def removed_from_accelerate(model):
    cpu_offload(model, CPU)
    output(model)
    remove_hook_from_submodules(model)


def removed_from_the_registry(model):
    registered(model)
    for module in norms_and_blocks(model):
        for name in ("halve", "double", "again"):
            module._diffusers_hook.remove_hook(name, recurse=False)


REMOVED = [
    pytest.param(removed_from_accelerate, id="accelerate"),
    pytest.param(removed_from_the_registry, id="diffusers"),
]


@pytest.mark.parametrize("hooks", REMOVED)
def test_hooks_that_came_and_went_while_it_was_optimized(hooks):
    model, stock = twins_with(hooks)
    torch.testing.assert_close(output(model), output(stock), atol=2e-5, rtol=2e-5)
    assert not sdfastgn.report(model).skipped
    sdfastgn.restore(model)
    assert torch.equal(output(model), output(stock))
    for ours, theirs in zip(model.modules(), stock.modules(), strict=True):
        assert type(ours) is type(theirs)
        assert vars(ours).keys() ^ vars(theirs).keys() <= {"forward"}
        assert ours.forward == type(ours).forward.__get__(ours)


def test_hooks_that_go_after_restore_leave_the_stock_forward():
    model = samples.randomize(samples.unet())
    before = output(model)
    cpu_offload(sdfastgn.optimize(model), CPU)
    sdfastgn.restore(model)
    remove_hook_from_submodules(model)
    assert torch.equal(output(model), before)
    assert all(m.forward == type(m).forward.__get__(m) for m in model.modules())


class Around(ModelHook):
    def new_forward(self, module, *args, **kwargs):
        return self.fn_ref.original_forward(*args, **kwargs)


def test_diffusers_hooks_that_go_after_restore_leave_the_stock_forward():
    """They kept the ``GraphedForward`` of a model with graphs."""
    model = samples.randomize(samples.unet())
    before = output(model)
    registry = HookRegistry.check_if_exists_or_initialize(sdfastgn.optimize(model))
    for name, hook in (("first", ModelHook()), ("around", Around()), ("last", ModelHook())):
        registry.register_hook(hook, name)
    sdfastgn.restore(model)
    assert torch.equal(output(model), before)
    for name in ("around", "first", "last"):
        registry.remove_hook(name)
    assert torch.equal(output(model), before)
    assert model.forward == type(model).forward.__get__(model)


def offloaded_before(recurse):
    """A UNet whose offload hooks were removed. accelerate leaves modules' own forwards in the instances."""
    unet = build_unet("tiny", torch.float32, "cpu")
    stock = copy.deepcopy(unet)
    cpu_offload(unet, CPU) if recurse else cpu_offload_with_hook(unet, CPU)
    remove_hook_from_module(unet, recurse=recurse)
    return unet, stock, unet_inputs("tiny", size=64, batch=1, dtype=torch.float32, device="cpu", seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("recurse", [False, True], ids=["model", "sequential"])
def test_offloading_that_ended_leaves_nothing_out(recurse):
    unet, stock, inputs = offloaded_before(recurse)
    before = snapshot(unet)
    assert "forward" in vars(unet)
    for _ in range(2):
        graph_cases.optimized(unet)
        report = sdfastgn.report(unet)
        assert not report.skipped
        assert len(report.fused) == len(sdfastgn.report(stock).fusable)
        for _ in range(3):
            graph_cases.agree(graph_cases.run(unet, inputs), graph_cases.run(stock, inputs))
        assert (graph_cases.state(unet).captured, graph_cases.state(unet).replays) == (1, 2)
        sdfastgn.restore(unet)
        assert snapshot(unet) == before
        assert torch.equal(graph_cases.run(unet, inputs), graph_cases.run(stock, inputs))


def test_the_report_without_graphs_blames_nobody():
    unet, _, _ = offloaded_before(recurse=False)
    sdfastgn.optimize(unet, cuda_graphs=False)
    assert graph_cases.state(unet).eager == {}
    unet.forward = functools.partial(unet.forward)
    assert graph_cases.reasons_of(unet) == "other code replaced its forward"


@each_copy
@pytest.mark.parametrize("has_own", [False, True], ids=["class-only", "own-forward"])
def test_a_copy_with_graphs_is_restored_to_what_was_there(copied, has_own):
    unet = build_unet("tiny", torch.float32, "cpu")
    if has_own:
        unet.forward = unet.forward
    twin = sdfastgn.restore(copied(sdfastgn.optimize(unet)))
    assert ("forward" in vars(twin)) is has_own
    assert twin.forward == type(twin).forward.__get__(twin)


@pytest.mark.slow
def test_compilers_see_through_an_own_forward():
    stock = samples.randomize(samples._resnet())
    x, temb = samples.image(2, 20, 6, 8), samples.image(2, 16, 1, 1)[:, :, 0, 0]
    fused = copy.deepcopy(stock)
    for module in fused.modules():
        module.forward = module.forward
    compiled = torch.compile(sdfastgn.optimize(fused), backend="eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x, temb), stock(x, temb), atol=2e-5, rtol=2e-5)
