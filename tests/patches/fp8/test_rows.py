"""The weights in E4M3 that plans read: what CUDA graphs ask about them."""

import gc
import threading

import pytest
import torch
from torch import nn

from sdfastgn.kernels.quantize_rows.op import quantize_rows
from sdfastgn.patches.fp8 import models as fp8

pytestmark = [pytest.mark.fused_on_cpu, pytest.mark.usefixtures("without_gradients")]


@pytest.fixture
def model():
    found = nn.Sequential(nn.Linear(32, 48), nn.Linear(48, 16)).bfloat16().requires_grad_(False)
    fp8.allow_rows(found)
    yield found
    fp8.forget_all(found)


def copies_of(model):
    return [fp8.row_weights(model).copy_of(layer._parameters, "weight") for layer in model]


def assert_current(model, copies):
    for layer, copy in zip(model, copies, strict=True):
        y, scales = quantize_rows(layer.weight.detach()[None])
        assert torch.equal(copy[0].float(), y[0].float())
        assert torch.equal(copy[1], scales[0])


def test_one_copy_of_each_weight(model):
    first, second = copies_of(model), copies_of(model)
    assert all(map(lambda a, b: a is b, first, second))
    assert fp8.is_outdated(model)
    fp8.refresh(model)
    assert fp8.generation(model) == 0  # no graph has read other memory
    assert not fp8.is_outdated(model)
    assert_current(model, first)
    assert fp8.row_weights(model).count == 2
    assert fp8.row_weights(model).nbytes == 32 * 48 + 48 * 16 + 4 * (48 + 16)
    del first, second
    gc.collect()
    assert fp8.row_weights(model).count == 0
    assert not fp8.is_outdated(model)


def test_a_write_keeps_memory_and_graphs(model):
    copies = copies_of(model)
    fp8.refresh(model)
    places, before = [t.data_ptr() for copy in copies for t in copy], fp8.generation(model)
    model[0].weight.mul_(2)
    assert fp8.is_outdated(model)
    fp8.refresh(model)
    assert_current(model, copies)
    assert [t.data_ptr() for copy in copies for t in copy] == places
    assert fp8.generation(model) == before


def test_a_write_that_nobody_counts_is_noticed_while_a_graph_runs(model):
    copies = copies_of(model)
    fp8.refresh(model)
    model[1].weight.data.add_(1)
    assert not fp8.is_outdated(model)
    fp8.note_replay(model)
    assert not fp8.has_same_contents(model)
    assert fp8.is_outdated(model)
    fp8.refresh(model)
    assert_current(model, copies)
    fp8.note_replay(model)
    assert fp8.has_same_contents(model)
    model[1].weight.data.add_(1)
    fp8.compare(model)
    assert fp8.is_outdated(model)


def test_graphs_that_read_freed_memory_are_invalid(model):
    copies = copies_of(model)
    fp8.refresh(model)
    before = fp8.generation(model)
    model.to("meta")
    fp8.row_weights(model).moved()
    assert copies == [[], []]
    assert fp8.generation(model) != before


def test_a_new_weight_of_another_size_gets_other_memory(model):
    copies = copies_of(model)
    fp8.refresh(model)
    before = fp8.generation(model)
    model[0].weight = nn.Parameter(torch.randn(64, 32).bfloat16(), requires_grad=False)
    fp8.refresh(model)
    assert_current(model, copies)
    assert fp8.generation(model) != before


def test_threads_refresh_once(model):
    copies = copies_of(model)
    weights = fp8.row_weights(model)
    threads = [threading.Thread(target=weights.refresh) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert_current(model, copies)
    assert weights.replaced == 0


def test_a_model_that_hooks_offload_frees_them(model):
    copies = copies_of(model)
    fp8.refresh(model)
    model[0]._hf_hook = type("Hook", (), {"offload": True})()
    try:
        (found,) = fp8.state_of(model, "")
    finally:
        del model[0]._hf_hook
    assert found.offloading == "accelerate's offloading"
    assert (found.products, found.bytes) == (0, 0)
    assert copies == [[], []]
