"""A step copies tensors to the GPU through pinned memory."""

import pytest
import torch

from sdfastgn.patches.pipeline import pinned_copies

pytestmark = [pytest.mark.fused_on_cpu, pytest.mark.usefixtures("pipeline_fused_on_cpu")]


def test_what_moves_in_a_step_is_what_it_was(monkeypatch):
    monkeypatch.setattr(pinned_copies, "WAITED_FOR", ("meta",))
    values = torch.tensor([0.1, 2.0], dtype=torch.float64)
    with pinned_copies.PinnedCopies() as copies:
        there = values.to("meta", torch.float16)
        by_name = values.to(device="meta", dtype=torch.float16)
        made = torch.tensor([1, 2], device="meta", dtype=torch.int32)
        here = values.to("cpu")
        changed = values.to(torch.float32)
    assert {t.dtype for t in (there, by_name)} == {torch.float16}
    assert (made.device.type, made.dtype) == ("meta", torch.int32)
    assert here is values
    assert (changed.device.type, changed.dtype) == ("cpu", torch.float32)
    assert torch.equal(copies.on_host(by_name), values.half())
    assert copies.on_host(values) is None
