"""Parameters that are moved side by side."""

import gc

import pytest
import torch
from torch import nn

from sdfastgn.kernels.product import packed

SIZES = (8, 4, 12)


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch):
    monkeypatch.setattr(packed, "PACKED_DEVICES", ("cuda", "cpu"))


def row(*sizes, columns=4):
    return [nn.Parameter(torch.randn(n, columns)) for n in sizes or SIZES]


def test_parameters_keep_all_but_their_addresses():
    weights, biases = row(), [nn.Parameter(torch.randn(n)) for n in SIZES]
    before = [(id(p), p.detach().clone(), p.stride(), p.storage_offset()) for p in (*weights, *biases)]
    assert packed.pack(weights, biases) is not None
    for p, (identity, value, stride, offset) in zip((*weights, *biases), before, strict=True):
        assert (id(p), p.stride(), p.storage_offset()) == (identity, stride, offset)
        assert torch.equal(p, value)
        assert p.untyped_storage().nbytes() == p.nbytes
    assert torch.equal(packed.joined(weights), torch.cat(weights))
    assert torch.equal(packed.joined(biases), torch.cat(biases))
    assert packed.joined(weights).data_ptr() == weights[0].data_ptr()
    assert packed.joined(weights[1:]) is None
    assert packed.joined([weights[1], weights[0]]) is None
    assert packed.joined([weights[0], weights[2]]) is None


def test_writes_into_the_joined_parameters_are_seen():
    weights = row()
    packed.pack(weights)
    weights[1].data.zero_()
    assert packed.joined(weights)[8:12].count_nonzero() == 0


def test_a_parameter_that_was_moved_is_not_joined():
    weights = row()
    packed.pack(weights)
    weights[1].data = weights[1].data.clone()
    assert packed.joined(weights) is None
    assert packed.are_packed(weights) == [True, False, True]


def test_unpacking():
    weights = row()
    packed.pack(weights)
    values, others = [p.detach().clone() for p in weights], row()
    addresses = [p.data_ptr() for p in others]
    packed.unpack([*others, *weights])
    assert packed.joined(weights) is None
    assert packed.are_packed(weights) == [False] * 3
    assert all(map(torch.equal, weights, values))
    assert [p.data_ptr() for p in others] == addresses


def test_freed_allocations_are_forgotten():
    gc.collect()
    packed.are_packed([])
    before = len(packed._allocations)
    weights, others = row(), row()
    reference = packed.pack(weights)
    assert len(packed._allocations) == before + 1
    del weights
    assert reference.expired()
    packed.pack(others)
    assert len(packed._allocations) == before + 1


def test_memory_after_a_freed_allocation_is_not_joined():
    weights = row()
    packed.pack(weights)
    address = weights[0].data_ptr()
    reference = packed._allocations[address]
    del weights
    others = row()
    packed._allocations[others[0].data_ptr()] = reference  # as if they were allocated at its address
    assert packed.joined(others) is None
    assert packed.are_packed(others) == [False] * 3


def tied(weights):
    weights[2] = weights[0]


def of_one_storage(weights):
    whole = torch.randn(24, 4)
    for p, part in zip(weights, whole.split(SIZES), strict=True):
        p.data = part


def of_another_dtype(weights):
    weights[1] = nn.Parameter(torch.randn(4, 4, dtype=torch.float64))


def transposed(weights):
    weights[1].data = torch.randn(4, 4).t()


def on_meta(weights):
    weights[:] = [nn.Parameter(p.detach().to("meta")) for p in weights]


def out_of_inference_mode(weights):
    with torch.inference_mode():
        weights[1] = nn.Parameter(torch.randn(4, 4), requires_grad=False)


def odd_bytes(weights):
    weights[:] = row(3, 3, columns=1)


@pytest.mark.parametrize(
    "change", [tied, of_one_storage, of_another_dtype, transposed, on_meta, out_of_inference_mode, odd_bytes]
)
def test_parameters_that_stay_where_they_are(change):
    weights = row()
    change(weights)
    addresses = [p.data_ptr() for p in weights]
    assert packed.pack(weights) is None
    assert [p.data_ptr() for p in weights] == addresses


def test_only_gpus_pack(monkeypatch):
    monkeypatch.undo()
    assert packed.pack(row()) is None


def test_no_memory_for_the_allocation(monkeypatch):
    def full(*args, **kwargs):
        raise torch.OutOfMemoryError("full")

    weights = row()
    monkeypatch.setattr(torch, "empty", full)
    assert packed.pack(weights) is None
