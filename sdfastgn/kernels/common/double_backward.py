"""The derivative of a backward op: of the plain PyTorch form that computes the same gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["second_derivative"]


def second_derivative(
    gradients: Callable[..., Iterable[Tensor | None]],
    saved: Sequence[Tensor | None],
    dgrads: Sequence[Tensor | None],
    needs: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """Gradients of ``saved`` through ``gradients(*saved)``, given those of its results.

    Args:
        gradients: what the op computes, in differentiable PyTorch; None among its results stands for what was not wanted.
        saved: the tensors that the op was called with, or None.
        dgrads: one for each result that is not None; None where no gradient comes from there.
        needs: for each of ``saved``, whether its gradient is wanted; the result has None for the others.
    """
    keep_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        # Aliases: dy itself may be a function of x, by a way that is not this op's to follow.
        inputs: tuple[Any, ...] = tuple(None if t is None else t.view_as(t) for t in saved)
        made = [g for g in gradients(*inputs) if g is not None]
        pairs = [(g, d) for g, d in zip(made, dgrads, strict=True) if d is not None and g.requires_grad]
    wanted = [t for t, need in zip(inputs, needs, strict=True) if need]
    found: Iterator[Tensor | None] = iter([None] * len(wanted))
    if pairs and wanted:
        outputs, along = zip(*pairs, strict=True)
        found = iter(torch.autograd.grad(outputs, wanted, along, create_graph=keep_graph, allow_unused=True))
    return tuple(next(found) if need else None for need in needs)
