"""What optimize changes around the models: scheduler and image processor, in a pipeline."""

import copy
import gc
import importlib
import inspect
import json
import pickle
import sys
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from diffusers import (
    AutoPipelineForImage2Image,
    DDIMScheduler,
    DiffusionPipeline,
    HeunDiscreteScheduler,
    PNDMScheduler,
    StableDiffusionPipeline,
)
from diffusers.image_processor import VaeImageProcessor

import sdfastgn
from sdfastgn.models.pipelines import build_pipeline
from sdfastgn.patches.pipeline import image_processor
from sdfastgn.patches.pipeline.object_fusion import ObjectFusion
from tests.patches import samples
from tests.patches.pipeline.cases import applied

pytestmark = [pytest.mark.fused_on_cpu, pytest.mark.usefixtures("pipeline_fused_on_cpu")]
STOCK = {"scheduler": PNDMScheduler, "image_processor": VaeImageProcessor}
PARTS = (*STOCK, "pipeline")


@pytest.fixture
def pipe():
    return build_pipeline("tiny", dtype=torch.float32, device="cpu")


def parts_of(pipe):
    return {e.path: e.status for e in sdfastgn.report(pipe).entries if e.path in PARTS}


def picture(pipe, **options):
    generator = torch.Generator().manual_seed(0)
    return np.asarray(pipe("a cat", num_inference_steps=4, generator=generator, **options).images[0])


@pytest.mark.slow
def test_optimize_and_restore(pipe):
    before = picture(pipe)
    attributes = set(vars(pipe.scheduler)), set(vars(pipe))
    assert set(parts_of(pipe).values()) == {"fusable"}
    sdfastgn.optimize(pipe, strict=True)
    assert parts_of(pipe) == dict.fromkeys(PARTS, "fused")
    after = picture(pipe)
    # fp32 norms add in another order.
    assert np.abs(after.astype(int) - before.astype(int)).max() <= 1
    assert "host_timesteps" in sdfastgn.report(pipe).details()
    sdfastgn.restore(pipe)
    assert type(pipe) is StableDiffusionPipeline
    assert {name: type(getattr(pipe, name)) for name in STOCK} == STOCK
    assert (set(vars(pipe.scheduler)), set(vars(pipe))) == attributes
    assert np.array_equal(picture(pipe), before)


@pytest.mark.slow
@pytest.mark.parametrize(
    "duplicate",
    [copy.copy, copy.deepcopy, lambda p: pickle.loads(pickle.dumps(p))],
    ids=["copy", "deepcopy", "pickle"],
)
def test_copies_are_their_own(pipe, duplicate):
    sdfastgn.optimize(pipe)
    before = picture(pipe)
    for original in (pipe.scheduler, pipe.image_processor):
        other = duplicate(original)
        assert type(other) is type(original)
        assert other is not original
    other = duplicate(pipe)
    assert np.array_equal(picture(other), before)
    scheduler = duplicate(pipe.scheduler)
    scheduler.set_timesteps(3)
    x = torch.randn(1, 4, 2, 2)
    scheduler.step(x, scheduler.timesteps[0], x)
    assert scheduler.counter == 1 != pipe.scheduler.counter
    assert len(pipe.scheduler.timesteps) == 5


def test_copies_of_a_class_that_is_derived_from_ours():
    part = applied(image_processor.FUSION, VaeImageProcessor())
    derived = type("Derived", (type(part),), {"__module__": __name__})()
    assert type(copy.copy(derived)) is type(derived)


def test_a_pickle_is_read_where_the_fusion_was_not_imported(pipe, monkeypatch):
    pickled = pickle.dumps(sdfastgn.optimize(pipe).scheduler)
    package = importlib.import_module("sdfastgn.patches.pipeline")
    monkeypatch.setattr(package, "scheduler", package.scheduler)  # the import sets another
    monkeypatch.delitem(sys.modules, "sdfastgn.patches.pipeline.scheduler")
    other = pickle.loads(pickled)
    assert type(other) is not PNDMScheduler
    fused = sdfastgn.report(SimpleNamespace(components={"unet": pipe.unet, "scheduler": other})).fused
    assert "host_timesteps" in {e.fusion for e in fused}


def test_a_pickle_for_another_diffusers_is_stock(pipe, monkeypatch):
    pickled = pickle.dumps(sdfastgn.optimize(pipe).scheduler)
    samples.make_unknown(monkeypatch, "PNDMScheduler.step")
    assert type(pickle.loads(pickled)) is PNDMScheduler


def test_what_is_made_by_way_of_the_class_is_stock(pipe):
    sdfastgn.optimize(pipe)
    assert type(type(pipe.scheduler).from_config(pipe.scheduler.config)) is PNDMScheduler
    assert type(type(pipe.image_processor)()) is VaeImageProcessor


def test_saved_as_what_it_was(pipe, tmp_path):
    before = picture(pipe, output_type="np")
    sdfastgn.optimize(pipe).save_pretrained(tmp_path)
    index = json.loads((tmp_path / "model_index.json").read_text())
    assert index["_class_name"] == "StableDiffusionPipeline"
    assert index["scheduler"] == ["diffusers", "PNDMScheduler"]
    assert (
        json.loads((tmp_path / "scheduler" / "scheduler_config.json").read_text())["_class_name"]
        == "PNDMScheduler"
    )
    loaded = DiffusionPipeline.from_pretrained(tmp_path)
    assert type(loaded) is StableDiffusionPipeline
    assert type(loaded.scheduler) is PNDMScheduler
    assert not sdfastgn.report(loaded).fused
    assert np.array_equal(picture(loaded, output_type="np"), before)


def test_what_pipelines_ask_their_parts(pipe):
    stock = PNDMScheduler.from_config(pipe.scheduler.config)
    sdfastgn.optimize(pipe)
    for name in ("step", "set_timesteps"):
        assert inspect.signature(getattr(pipe.scheduler, name)) == inspect.signature(getattr(stock, name))
    assert pipe.scheduler.config == stock.config
    assert pipe.scheduler.compatibles == stock.compatibles
    assert isinstance(pipe.scheduler, PNDMScheduler)
    other = AutoPipelineForImage2Image.from_pipe(pipe)
    assert type(other).__name__ == "StableDiffusionImg2ImgPipeline"
    assert other.config["scheduler"] == ("diffusers", "PNDMScheduler")
    assert set(pipe.components) == set(other.components)
    images = torch.rand(1, 3, 64, 64)
    assert other("a cat", image=images, strength=0.5, num_inference_steps=6).images[0].size == (64, 64)


@pytest.mark.slow
def test_a_scheduler_that_comes_later(pipe):
    sdfastgn.optimize(pipe)
    pipe.scheduler = DDIMScheduler.from_config(pipe.scheduler.config)
    assert parts_of(pipe)["scheduler"] == "fusable"
    picture(pipe)
    sdfastgn.optimize(pipe)
    assert parts_of(pipe)["scheduler"] == "fused"
    pipe.scheduler = HeunDiscreteScheduler.from_config(pipe.scheduler.config)
    assert "scheduler" not in parts_of(pipe)
    sdfastgn.restore(pipe)
    assert type(pipe.scheduler) is HeunDiscreteScheduler


def test_what_was_exchanged_is_restored(pipe):
    scheduler, processor = sdfastgn.optimize(pipe).scheduler, pipe.image_processor
    pipe.scheduler = DDIMScheduler.from_config(scheduler.config)
    pipe.image_processor = VaeImageProcessor()
    sdfastgn.restore(pipe)
    assert (type(scheduler), type(processor)) == (PNDMScheduler, VaeImageProcessor)


def test_what_was_exchanged_stays_in_another_pipeline_that_is_optimized(pipe):
    scheduler = sdfastgn.optimize(pipe).scheduler
    other = sdfastgn.optimize(StableDiffusionPipeline(**pipe.components, requires_safety_checker=False))
    pipe.scheduler = DDIMScheduler.from_config(scheduler.config)
    sdfastgn.restore(pipe)
    assert parts_of(other)["scheduler"] == "fused"
    sdfastgn.restore(other)
    assert type(scheduler) is PNDMScheduler


def test_a_pipeline_goes_though_its_scheduler_stays():
    pipe = sdfastgn.optimize(build_pipeline("tiny", dtype=torch.float32, device="cpu"))
    scheduler, gone = pipe.scheduler, weakref.ref(pipe)
    del pipe
    gc.collect()
    assert gone() is None
    assert type(scheduler) is not PNDMScheduler


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    "name", ["PNDMScheduler.step_plms", "VaeImageProcessor.denormalize", "DiffusionPipeline.device"]
)
def test_a_source_that_was_not_tested(pipe, monkeypatch, name):
    samples.make_unknown(monkeypatch, name)
    with pytest.raises(ValueError, match=f"strict=True and 1 part cannot be fused.*{name} of this diffusers"):
        sdfastgn.optimize(pipe, strict=True)
    assert set(parts_of(pipe).values()) == {"fusable", "skipped"}
    sdfastgn.optimize(pipe)
    assert sorted(parts_of(pipe).values()) == ["fused", "fused", "skipped"]
    picture(pipe)


def test_a_step_that_other_code_replaced(pipe):
    step = pipe.scheduler.step
    pipe.scheduler.step = lambda *args, **kwargs: step(*args, **kwargs)
    sdfastgn.optimize(pipe)
    [entry] = [e for e in sdfastgn.report(pipe).entries if e.path == "scheduler"]
    assert (entry.status, entry.reason) == ("skipped", "other code replaced this instance's step")
    assert type(pipe.scheduler) is PNDMScheduler


def test_a_failure_changes_nothing(pipe, monkeypatch):
    apply, done = ObjectFusion.apply, []

    def fail_on_the_last(self, part):
        if done:
            raise RuntimeError("no")
        apply(self, part)
        done.append(self.name)

    monkeypatch.setattr(ObjectFusion, "apply", fail_on_the_last)
    with pytest.raises(RuntimeError, match="no"):
        sdfastgn.optimize(pipe)
    assert len(done) == 1
    assert type(pipe) is StableDiffusionPipeline
    assert {name: type(getattr(pipe, name)) for name in STOCK} == STOCK
    assert not sdfastgn.report(pipe).fused


def test_optimized_puts_back_what_it_changed(pipe):
    scheduler = pipe.scheduler
    with sdfastgn.optimized(pipe):
        assert set(parts_of(pipe).values()) == {"fused"}
    assert set(parts_of(pipe).values()) == {"fusable"}
    sdfastgn.optimize(pipe)
    with sdfastgn.optimized(pipe):
        pass
    assert set(parts_of(pipe).values()) == {"fused"}
    assert pipe.scheduler is scheduler


def test_optimized_puts_back_what_came_inside(pipe):
    old = pipe.scheduler
    with sdfastgn.optimized(pipe):
        pipe.scheduler = DDIMScheduler.from_config(pipe.scheduler.config)
        sdfastgn.optimize(pipe)
        assert parts_of(pipe)["scheduler"] == "fused"
    assert type(pipe.scheduler) is DDIMScheduler
    assert type(old) is PNDMScheduler
