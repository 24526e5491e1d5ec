"""Other code's classes: subclasses of blocks, and classes that it puts over or under a fused one."""

import copy
import warnings

import pytest
import torch
from diffusers.models import UNet2DConditionModel
from diffusers.models.attention_processor import Attention
from diffusers.models.transformers.transformer_hidream_image import HiDreamAttention
from torch import nn

import sdfastgn
from sdfastgn.models.pipelines import build_pipeline
from sdfastgn.patches import patcher
from sdfastgn.patches.layers import packed_weights as packing
from tests.patches import samples
from tests.patches.samples import each_fusion, output, snapshot, stock_and_output

pytestmark = pytest.mark.fused_on_cpu


def put_over(module):
    """Derive a class from the module's class, put it on the module and remember the old, as tomesd does."""

    class Over(type(module)):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs)

    module._parent = type(module)
    module.__class__ = Over


def take_off(root):
    for module in root.modules():
        if type(module).__name__ == "Over":
            module.__class__ = vars(module).pop("_parent")


def restored(obj):
    """Restore ``obj``, and return the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert sdfastgn.restore(obj) is obj
    return [str(w.message) for w in caught]


def found(root, status):
    return {(e.path, e.fusion) for e in getattr(sdfastgn.report(root), status)}


def over_fused(root):
    modules = {path: m for path, m in root.named_modules() if type(m).__name__ == "Over"}
    return {path for path, m in modules.items() if "Fused" in m._parent.__qualname__}


@pytest.mark.drawn(3)
@each_fusion
@pytest.mark.parametrize(
    "order", ["optimize put take restore", "put optimize take restore", "put optimize restore take"]
)
def test_another_class_over_ours_or_under_it(build, call, order):
    module, before = stock_and_output(build, call)
    state, targets = snapshot(module), {f.module for f in patcher.inspect(module)}
    for step in order.split():
        if step == "put":
            for target in targets:
                put_over(target)
        elif step == "take":
            take_off(module)
        elif step == "optimize":
            sdfastgn.optimize(module)
        else:
            assert restored(module) == []
        torch.testing.assert_close(output(module, call), before, atol=2e-5, rtol=2e-5)
    assert snapshot(module) == state
    assert torch.equal(output(module, call), before)


@pytest.mark.drawn(20)
@each_fusion
def test_restore_says_what_it_cannot_undo_and_finishes_later(build, call):
    module, before = stock_and_output(build, call)
    state, targets = snapshot(module), {f.module for f in patcher.inspect(module)}
    sdfastgn.optimize(module)
    for target in targets:
        put_over(target)
    over = over_fused(module)
    for twin in (module, copy.deepcopy(module)):
        warned = restored(twin)
        assert len(warned) == bool(over)
        parts = f"{len(over)} part{'s' * (len(over) != 1)}"
        assert all(f"sdfastgn.restore: {parts} could not be restored" in w for w in warned)
        torch.testing.assert_close(output(twin, call), before, atol=2e-5, rtol=2e-5)
        take_off(twin)
        assert {path for path, m in twin.named_modules() if "Fused" in type(m).__qualname__} == over
        assert restored(twin) == []
        assert torch.equal(output(twin, call), before)
    assert snapshot(module) == state


@pytest.mark.drawn(20)
@each_fusion
def test_subclasses_are_reported_and_left_alone(build, call):
    module, before = stock_and_output(build, call)
    claimed = found(module, "fusable")
    for target in {f.module for f in patcher.inspect(module)}:
        put_over(target)
    assert found(module, "skipped") == claimed
    assert all(".Over is a subclass of " in e.reason for e in sdfastgn.report(module).skipped)
    classes = [type(m) for m in module.modules()]
    with pytest.raises(ValueError, match=r"strict=True and .*\.Over is a subclass of "):
        sdfastgn.optimize(module, strict=True)
    assert [type(m) for m in sdfastgn.optimize(module).modules()] == classes
    assert not sdfastgn.report(module).fused
    torch.testing.assert_close(output(module, call), before, atol=2e-5, rtol=2e-5)


@pytest.mark.drawn(20)
@each_fusion
def test_a_class_over_ours_is_reported(build, call):
    module = sdfastgn.optimize(samples.randomize(build()))
    fused = found(module, "fused")
    for path, _ in fused:
        if type(module.get_submodule(path)).__name__ != "Over":
            put_over(module.get_submodule(path))
    over = over_fused(module)
    # A tiled decode is left to stock because its decoder has another class.
    skipped = [e for e in sdfastgn.report(module).skipped if e.fusion != "tiled_decode"]
    assert {e.path for e in skipped} == over
    # A model's hooks work with any class.
    assert found(module, "skipped") | found(module, "fused") == fused
    assert all("other code changed its fused class to " in e.reason for e in skipped)
    if over:
        with pytest.raises(ValueError, match=r"strict=True and .* other code changed its fused class"):
            sdfastgn.optimize(module, strict=True)


def transformer_blocks(unet):
    return [m for m in unet.modules() if type(m).__name__ == "BasicTransformerBlock"]


def test_the_rest_of_a_pipeline_is_restored():
    pipe = build_pipeline("tiny", dtype=torch.float32, device="cpu")
    classes = {path: type(m) for path, m in pipe.unet.named_modules()}
    sdfastgn.optimize(pipe)
    for block in transformer_blocks(pipe.unet):
        put_over(block)
    [message] = restored(pipe)
    assert " 4 parts " in message
    first = "unet.down_blocks.0.attentions.0.transformer_blocks.0"
    assert f"{__name__}.put_over.<locals>.Over at {first}, " in message
    assert " and 1 more. Undo that, then call sdfastgn.restore again." in message
    changed = [m for path, m in pipe.unet.named_modules() if type(m) is not classes[path]]
    assert [type(m).__name__ for m in changed] == ["Over"] * 4
    report = sdfastgn.report(pipe)
    assert (report.fused, report.channels_last_weights, len(report.skipped)) == ((), 0, 4)


def test_the_with_block_warns_where_it_stands():
    unet = samples.unet()
    with (
        pytest.warns(UserWarning, match=r"^sdfastgn\.optimized: 4 parts could not be restored") as warned,
        sdfastgn.optimized(unet),
    ):
        [put_over(block) for block in transformer_blocks(unet)]
    assert [w.filename for w in warned] == [__file__]
    take_off(unet)
    assert len(found(unet, "fused")) == 4
    assert restored(unet) == []
    assert not sdfastgn.report(unet).fused


def test_a_parametrization_outlives_restore():
    """PyTorch also changes the class of a module when it adds a parametrization."""

    class Double(nn.Module):
        def forward(self, w):
            return 2 * w

    build, call = samples.sample("resnet_block")
    module, before = stock_and_output(build, call)
    sdfastgn.optimize(module)
    nn.utils.parametrize.register_parametrization(module.norm1, "weight", Double())
    [message] = restored(module)
    assert "ParametrizedGroupNorm at norm1." in message
    assert torch.equal(module.norm1.weight, 2 * module.norm1.parametrizations.weight.original)
    nn.utils.parametrize.remove_parametrizations(module.norm1, "weight", leave_parametrized=False)
    assert restored(module) == []
    assert type(module.norm1) is nn.GroupNorm
    assert torch.equal(output(module, call), before)


def test_a_class_over_a_scheduler():
    pipe = build_pipeline("tiny", dtype=torch.float32, device="cpu")
    stock = type(pipe.scheduler)
    sdfastgn.optimize(pipe)
    fused = type(pipe.scheduler)
    pipe.scheduler.__class__ = type("Over", (fused,), {})
    [skipped] = sdfastgn.report(pipe).skipped
    assert skipped.reason == f"other code changed its class to {__name__}.Over"
    [message] = restored(pipe)
    assert f"{__name__}.Over at scheduler. Undo that" in message
    pipe.scheduler.__class__ = fused
    assert restored(pipe) == []
    assert type(pipe.scheduler) is stock


def test_weights_are_unpacked_if_other_code_set_the_stock_class_back():
    attention = sdfastgn.optimize(samples._attention())
    weights = [linear.weight for linear in (attention.to_q, attention.to_k, attention.to_v)]
    assert packing.joined(attention, packing.Parameters(weights, [])) is not None
    attention.__class__ = Attention
    sdfastgn.restore(nn.Sequential(attention))
    assert packing.joined(attention, packing.Parameters(weights, [])) is None


def test_a_class_over_a_model_may_use_its_last_norm_alone():
    class NormOut(UNet2DConditionModel):
        def forward(self, x):
            return self.conv_norm_out(x)

    unet, x = samples.randomize(samples.unet()), samples.image(2, 20, 8, 8)
    expected = unet.conv_norm_out(x)
    sdfastgn.optimize(unet, cuda_graphs=False)
    unet.__class__ = NormOut
    torch.testing.assert_close(unet(x), expected)
    unet.__class__ = UNet2DConditionModel
    assert restored(unet) == []
    assert not unet._forward_pre_hooks


def test_hooks_come_off_a_model_of_another_class():
    unet = samples.unet()
    sdfastgn.optimize(unet)
    unet.__class__ = type("Own", (UNet2DConditionModel,), {})
    assert restored(unet) == []
    assert not unet._forward_pre_hooks
    assert not unet._forward_hooks


def test_what_other_code_has_moved_is_restored_too():
    unet = sdfastgn.optimize(samples.unet())
    unet.spare, unet.conv_act = unet.conv_act, nn.SiLU()
    sdfastgn.restore(unet)
    assert type(unet.spare) is nn.SiLU


def test_upstreams_own_subclasses_are_nothing_that_is_left_out():
    module = nn.Sequential(nn.GroupNorm(2, 4), HiDreamAttention(query_dim=16, heads=2, dim_head=8))
    sdfastgn.optimize(module, strict=True)
    assert {e.path for e in sdfastgn.report(module).entries} == {"0"}


def test_a_subclass_with_an_init_of_its_own_stops_nobody():
    class Bare(Attention):
        def __init__(self):
            nn.Module.__init__(self)

    module = nn.Sequential(nn.GroupNorm(2, 4), Bare())
    assert {e.path for e in sdfastgn.report(sdfastgn.optimize(module)).fused} == {"0"}
