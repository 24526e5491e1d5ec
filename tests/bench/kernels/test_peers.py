"""Kernels of other packages: why they cannot run, and how they are called, on stand-ins."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from sdfastgn.bench.kernels.suites import EPS, GROUPS, SUITES

X, WEIGHT, BIAS = torch.randn(2, 64, 4, 4), torch.randn(64), torch.randn(64)


def plain(x: torch.Tensor, groups: int, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    return F.silu(F.group_norm(x, groups, weight, bias, eps))


def stand_in(monkeypatch: pytest.MonkeyPatch, name: str, **members: Any) -> None:
    module = types.ModuleType(name)
    vars(module).update(members)
    monkeypatch.setitem(sys.modules, name, module)


def test_why_a_package_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = SUITES["inference"].providers["gnnhwc"].reason
    assert reason(torch.device("cuda")) == "package gnnhwc is not installed"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    assert reason(torch.device("cuda")) is None
    assert reason(torch.device("cpu")) == "gnnhwc needs CUDA; the device is cpu"


def test_peers_run_only_where_they_are_named() -> None:
    providers = SUITES["inference"].providers
    assert not any(providers[name].by_default for name in ("gnnhwc", "apex"))


def test_gnnhwc_is_told_to_fuse_silu(monkeypatch: pytest.MonkeyPatch) -> None:
    def apply(x: Any, weight: Any, bias: Any, groups: int, eps: float, activation: int) -> torch.Tensor:
        assert activation == 2
        return plain(x, groups, weight, bias, eps)

    stand_in(monkeypatch, "gnnhwc", GN_NHWC_Func=types.SimpleNamespace(apply=apply))
    build = SUITES["inference"].providers["gnnhwc"].build
    assert torch.equal(build(X, WEIGHT, BIAS)(X, WEIGHT, BIAS), plain(X, GROUPS, WEIGHT, BIAS, EPS))


@pytest.mark.parametrize(("size", "kernel"), [(32, "one"), (33, "two")])
def test_apex_takes_the_kernel_that_its_layer_would(
    monkeypatch: pytest.MonkeyPatch, size: int, kernel: str
) -> None:
    called = []

    def pass_of(name: str) -> Any:
        def run(x: Any, groups: int, weight: Any, bias: Any, eps: float, activation: str) -> torch.Tensor:
            called.append((name, activation))
            return plain(x, groups, weight, bias, eps)

        return run

    for name in ("apex", "apex.contrib", "apex.contrib.group_norm"):
        stand_in(monkeypatch, name)
    members = {f"cuda_group_norm_nhwc_{name}_pass": pass_of(name) for name in ("one", "two")}
    stand_in(monkeypatch, "apex.contrib.group_norm.group_norm", **members)
    x = torch.randn(1, 64, 32, size)
    y = SUITES["inference"].providers["apex"].build(x, WEIGHT, BIAS)(x, WEIGHT, BIAS)
    assert called == [(kernel, "silu")]
    assert torch.equal(y, plain(x, GROUPS, WEIGHT, BIAS, EPS))
