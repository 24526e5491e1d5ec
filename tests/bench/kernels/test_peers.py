"""Kernels of other packages: why they cannot run, and how they are called, on stand-ins."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from sdfastgn.bench.kernels.suites import EPS, GROUPS, SUITES

WEIGHT, BIAS = torch.randn(64), torch.randn(64)


def test_why_a_package_cannot_run(monkeypatch):
    reason = SUITES["inference"].providers["gnnhwc"].reason
    assert reason(torch.device("cuda")) == "package gnnhwc is not installed"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    assert reason(torch.device("cuda")) is None
    assert reason(torch.device("cpu")) == "gnnhwc needs CUDA; the device is cpu"


# (provider, its module, the kernel in it, pixels of a side, what says SiLU)
CALLS = [
    ("gnnhwc", "gnnhwc", "GN_NHWC_Func", 4, 2),
    ("apex", "apex.contrib.group_norm.group_norm", "cuda_group_norm_nhwc_one_pass", 32, "silu"),
    ("apex", "apex.contrib.group_norm.group_norm", "cuda_group_norm_nhwc_two_pass", 33, "silu"),
]


@pytest.mark.parametrize(("name", "module", "kernel", "side", "silu"), CALLS, ids=["gnnhwc", "one", "two"])
def test_a_peer_is_told_to_fuse_silu(name, module, kernel, side, silu, monkeypatch):
    called = []

    def run(x: Any, *others: Any) -> torch.Tensor:
        called.append(others[-1])
        # gnNHWC takes the number of groups behind weight and bias, apex before them.
        weight, bias, groups = others[:3] if name == "gnnhwc" else (*others[1:3], others[0])
        return F.silu(F.group_norm(x, groups, weight, bias, others[3]))

    parts = module.split(".")
    for count in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:count]), types.ModuleType(parts[count - 1]))
    run.apply = run  # type: ignore[attr-defined]  # gnNHWC's is an autograd function
    others = dict.fromkeys(("cuda_group_norm_nhwc_one_pass", "cuda_group_norm_nhwc_two_pass"))
    vars(sys.modules[module]).update(others | {kernel: run})
    x = torch.randn(1, 64, 32, side)
    provider = SUITES["inference"].providers[name]
    assert not provider.by_default
    y = provider.build(x, WEIGHT, BIAS)(x, WEIGHT, BIAS)
    assert called == [silu]
    assert torch.equal(y, F.silu(F.group_norm(x, GROUPS, WEIGHT, BIAS, EPS)))
