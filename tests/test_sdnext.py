"""The example for SD.Next: its models run fused, and its pipelines stay what SD.Next takes them for."""

from __future__ import annotations

import gc
import importlib.util
import re
import sys
import types
import weakref
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from diffusers import (
    AutoencoderKL,
    AutoPipelineForImage2Image,
    AutoPipelineForText2Image,
    DiffusionPipeline,
    UNet2DConditionModel,
)
from diffusers.pipelines import auto_pipeline
from torch import nn

import sdfastgn
from sdfastgn.bench.images import psnr
from sdfastgn.patches.graphs import install as graphs
from tests.command_line import ROOT
from tests.small_pipelines import IMAGE, SIZE, generate, pipeline

pytestmark = pytest.mark.fused_on_cpu


class Server:
    """SD.Next's modules, as far as the extension uses them, and what SD.Next does with a model."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.errors = folder, []
        self.shared: Any = types.ModuleType("modules.shared")
        self.shared.opts = types.SimpleNamespace(diffusers_offload_mode="none")
        self.log = mock.Mock()
        self._callbacks: dict[str, list[Any]] = {}

    def modules(self) -> dict[str, types.ModuleType]:
        modules, callbacks, logger = (types.ModuleType(name) for name in ("modules", "callbacks", "logger"))
        for event in ("model_loaded", "before_process", "script_unloaded"):
            self._callbacks[event] = []
            setattr(callbacks, f"on_{event}", self._callbacks[event].append)
        vars(modules).update(shared=self.shared, script_callbacks=callbacks)
        vars(logger).update(log=self.log)
        return {"modules": modules, "modules.logger": logger}

    def call(self, event: str, *arguments: Any) -> None:
        for callback in self._callbacks[event]:
            try:
                callback(*arguments)
            except Exception as error:
                self.errors.append(error)

    def load(self) -> Any:
        """Free the old model, and load the saved one."""
        if getattr(self.shared, "sd_model", None) is not None:
            self.shared.sd_model.to("cpu")
            self.shared.sd_model.to("meta")
        self.shared.sd_model = quiet(DiffusionPipeline.from_pretrained(self.folder))
        self.call("model_loaded", self.shared.sd_model)
        return self.shared.sd_model

    def switch(self, to: Any) -> Any:
        self.shared.sd_model = quiet(to.from_pipe(self.shared.sd_model))
        return self.shared.sd_model

    def draw(self, **options: Any) -> np.ndarray:
        self.call("before_process", object())
        return generate(self.shared.sd_model, **options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    pipeline().save_pretrained(folder)
    return folder


@pytest.fixture
def server(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Server:
    server = Server(folder)
    for name, module in server.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    spec = importlib.util.spec_from_file_location("sdnext.py", ROOT / "docs" / "examples" / "sdnext.py")
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    return server


@pytest.fixture
def stock(folder: Path) -> Any:
    return quiet(DiffusionPipeline.from_pretrained(folder))


def quiet(pipe: Any) -> Any:
    pipe.set_progress_bar_config(disable=True)
    return pipe


def fused(pipe: Any) -> set[str]:
    """The components with fused parts."""
    return {entry.component for entry in sdfastgn.report(pipe).fused}


@pytest.mark.slow
def test_a_loaded_pipeline_is_optimized(server: Server, stock: Any) -> None:
    pipe = server.load()
    assert fused(pipe) == {"unet", "vae"}
    assert psnr(server.draw(**SIZE), generate(stock, **SIZE)) > 80
    said = [call.args[0] for call in server.log.info.call_args_list]
    assert any(re.match(r"sdfastgn: unet of StableDiffusionPipeline: \d+ parts fused", text) for text in said)
    assert not server.log.exception.called
    assert not server.errors


@pytest.mark.slow
def test_a_switch_to_another_pipeline_keeps_models_and_classes(server: Server, stock: Any) -> None:
    """SD.Next looks the class up in diffusers' tables, to find out what a pipeline does."""
    server.load()
    first = server.draw(**SIZE)
    pipe = server.switch(AutoPipelineForImage2Image)
    options = {"image": IMAGE, "strength": 0.6}
    image = server.draw(**options)
    assert type(pipe) in auto_pipeline.AUTO_IMAGE2IMAGE_PIPELINES_MAPPING.values()
    assert fused(pipe) == {"unet", "vae"}
    assert psnr(image, generate(quiet(AutoPipelineForImage2Image.from_pipe(stock)), **options)) > 80
    pipe = server.switch(AutoPipelineForText2Image)
    assert np.array_equal(server.draw(**SIZE), first)
    assert type(pipe) in auto_pipeline.AUTO_TEXT2IMAGE_PIPELINES_MAPPING.values()


@pytest.mark.slow
def test_a_model_that_replaces_another_is_optimized_before_the_next_image(server: Server) -> None:
    pipe = server.load()
    reports = server.log.info.call_count
    pipe.vae = AutoencoderKL.from_pretrained(server.folder, subfolder="vae")
    assert fused(pipe) == {"unet"}
    server.draw(**SIZE)
    assert fused(pipe) == {"unet", "vae"}
    server.draw(**SIZE)
    assert server.log.info.call_count == reports + 1


def test_a_model_without_any_part_to_fuse_is_no_error(server: Server) -> None:
    pipe = server.load()
    pipe.text_encoder = nn.Linear(2, 2)
    server.call("before_process", object())
    assert not server.log.exception.called
    assert not server.errors


@pytest.mark.slow
@pytest.mark.parametrize("inference", [False, True])
def test_weights_with_a_fused_lora(server: Server, stock: Any, inference: bool) -> None:
    """SD.Next gives each layer a new parameter, also for the way back."""
    pipe = server.load()
    first = server.draw(**SIZE)
    before = {name: weight.clone() for name, weight in pipe.unet.named_parameters()}

    def fuse(model: nn.Module, scale: float) -> None:
        generator = torch.Generator().manual_seed(0)
        with torch.inference_mode(inference):
            for name, layer in model.named_modules():
                if type(layer) in (nn.Linear, nn.Conv2d):
                    delta = torch.randn(layer.weight.shape, generator=generator)
                    layer.weight = nn.Parameter(before[f"{name}.weight"] + scale * delta, requires_grad=False)

    for model in (pipe.unet, stock.unet):
        fuse(model, 0.02)
    drawn = server.draw(**SIZE)
    assert psnr(drawn, first) < 40
    assert psnr(drawn, generate(stock, **SIZE)) > 80
    fuse(pipe.unet, 0.0)
    assert psnr(server.draw(**SIZE), first) > 80


@pytest.mark.slow
def test_another_model_frees_the_first_and_is_optimized(server: Server) -> None:
    pipe = server.load()
    first = server.draw(**SIZE)
    models = [weakref.ref(model) for model in (pipe.unet, pipe.vae, pipe.text_encoder)]
    del pipe
    pipe = server.load()
    gc.collect()
    assert [model() for model in models] == [None] * 3
    assert fused(pipe) == {"unet", "vae"}
    assert np.array_equal(server.draw(**SIZE), first)
    assert not server.errors


def test_a_failure_leaves_the_model_as_it_was(
    server: Server, stock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The failure comes after the model was changed."""
    install = graphs.install

    def fail(root: nn.Module, *options: Any) -> None:
        if type(root) is UNet2DConditionModel:
            raise RuntimeError("no such model")
        install(root, *options)

    monkeypatch.setattr(graphs, "install", fail)
    pipe = server.load()
    assert fused(pipe) == {"vae"}
    assert [type(m) for m in pipe.unet.modules()] == [type(m) for m in stock.unet.modules()]
    server.draw(**SIZE)
    [call] = server.log.exception.call_args_list
    assert call.args == ("sdfastgn could not optimize unet of StableDiffusionPipeline",)
    assert not server.errors


@pytest.mark.parametrize("mode", ["balanced", "group", "sequential"])
def test_nothing_is_done_in_modes_with_hooks(server: Server, mode: str) -> None:
    server.shared.opts.diffusers_offload_mode = mode
    pipe = server.load()
    server.draw(**SIZE)
    assert not fused(pipe)
    [call] = server.log.warning.call_args_list
    assert mode in call.args[0]


def test_what_is_no_pipeline_is_left_alone(server: Server) -> None:
    for other in (None, object(), nn.Linear(2, 2), pipeline().unet):
        server.call("model_loaded", other)
        server.shared.sd_model = other
        server.call("before_process", object())
    assert not server.errors
    assert server.log.mock_calls == []


def test_models_are_restored_when_the_scripts_are_unloaded(server: Server, stock: Any) -> None:
    pipe = server.load()
    server.draw(**SIZE)
    server.call("script_unloaded")
    assert not fused(pipe)
    assert np.array_equal(generate(pipe, **SIZE), generate(stock, **SIZE))
