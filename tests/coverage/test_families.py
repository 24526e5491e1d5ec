"""Pipelines of each family: fused blocks or plans run, the same output, an exact restore."""

import re

import pytest
import torch

import sdfastgn
from sdfastgn.bench.images import relative_error
from sdfastgn.patches.swap.fusion import stock_class
from tests.coverage import parts
from tests.coverage.families import FAMILIES
from tests.coverage.releases import skipped_if_missing
from tests.coverage.run import attributes, output
from tests.coverage.transformers import check_report
from tests.kernels.samples import kernels

pytestmark = [pytest.mark.slow, pytest.mark.fused_on_cpu]


def stock_forwards(monkeypatch, pipe, kinds):
    """A set of the ``kinds`` of fused modules that call stock's forward from now on."""
    found = set()

    def noted(stock, forward):
        def call(self, *args, **options):
            if type(self) is not stock:
                found.add(stock.__name__)
            return forward(self, *args, **options)

        return call

    networks = [c for c in pipe.components.values() if isinstance(c, torch.nn.Module)]
    for stock in {stock_class(m) for network in networks for m in network.modules()}:
        if stock.__name__ in kinds:
            monkeypatch.setattr(stock, "forward", noted(stock, stock.forward))
    return found


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: re.sub(r"\W+", "_", f.name))
def test_same_output_and_exact_restore(family, device, launches, monkeypatch):
    on_gpu = device == "cuda"
    monkeypatch.setitem(parts.WHERE, "device", device)
    monkeypatch.setitem(parts.WHERE, "dtype", torch.float16 if on_gpu else torch.float32)
    with skipped_if_missing():
        pipe, call = family.build()
        expected = output(call)
    assert expected.double().std() > 0.05
    before = attributes(pipe)
    sdfastgn.optimize(pipe, strict=True)
    fused = [e for e in sdfastgn.report(pipe).fused if e.fusion.startswith(family.fusions)]
    assert all(any(e.fusion.startswith(name) for e in fused) for name in family.fusions)
    with monkeypatch.context() as patches, kernels(direct=True):
        stock = stock_forwards(patches, pipe, {e.kind for e in fused})
        for _ in range(1 + on_gpu):  # the second call may be a replay of a CUDA graph
            assert relative_error(output(call), expected) < (3e-2 if on_gpu else family.bound)
    assert stock <= set(family.stock)
    report = sdfastgn.report(pipe)
    assert family.fusions or any(plans.calls for plans in report.plans)
    check_report(family.name, pipe, report)
    assert launches
    assert attributes(sdfastgn.restore(pipe)) == before
    assert torch.equal(output(call), expected)
