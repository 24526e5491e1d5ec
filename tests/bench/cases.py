"""A stock model too small to take time, and variants that break models."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from sdfastgn.bench.variants import Variant
from sdfastgn.bench.workload import Workload

MODEL, X = nn.Conv2d(3, 3, 1), torch.randn(1, 3, 4, 4)
SMALL = Workload(MODEL, lambda: MODEL(X), None)


def broken_variant(attach: Callable[[Any], Any]) -> Variant:
    """Fast and wrong: ``attach`` hooks into the target, and returns the hook's handle."""

    def apply(target: Any, part: str, undo: contextlib.ExitStack) -> None:
        undo.callback(attach(target).remove)

    return Variant("broken", "broken", lambda device: None, apply)


def scaled(factor: float) -> Variant:
    """Its output is ``factor`` times the right one."""
    return broken_variant(lambda target: target.register_forward_hook(lambda *call: call[2] * factor))


def failing(target: Any) -> Any:
    raise RuntimeError("no such\nkernel")
