"""Runs frozen linear layers with LoRA adapters in training, with fewer passes over their results.

peft replaces a layer of the model by a *wrapper*. Its forward calls the layer, two small layers (A and B) for
each adapter, a product with the scale, and a sum. Under autocast the layer and A also cast the input, each
for itself. Here the input is cast once, and the matrix product of B adds to the layer's result in place.

Layers that read the same input run as one: their weights lie side by side (``shared/packed_weights.py``),
all A are rows of one matrix, and all B are blocks of another. All steps are PyTorch's own, so autograd knows
their derivatives.

Numerics: B's product is not rounded before it is added. Otherwise as in peft.

peft's own code runs for adapters that cannot be merged either (``source_of``: dropout, hooks, DoRA), for
adapters with biases, for layers whose own weights are trained, and without autocast if dtypes differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sdfastgn.kernels.common import dispatch
from sdfastgn.patches.core.adapter_sources import Source, source_of
from sdfastgn.patches.core.fusion import is_unhooked, parameters_of
from sdfastgn.patches.core.merged_adapters import is_wrapper

__all__ = ["adapted", "trained", "trained_sources"]

# Layers run as one if their adapters have at most this rank together. The zeros beside the blocks of B are
# multiplied too, which takes longer than it saves for large ranks.
_MOST_RANKS = 64


def trained(layer: Any, x: Tensor) -> Tensor | None:
    """Computes ``layer(x)`` for a wrapper in training. None if peft's own code must run."""
    sources = trained_sources((layer,), x)
    return None if sources is None else adapted(x, sources[0].weight, sources[0].bias, sources)


def trained_sources(layers: Sequence[Any], x: Tensor) -> list[Source] | None:
    """The sources of ``layers``, which read the same x. None if the layers must be called one by one.

    Some may be plain layers, whose sources have no adapters. At least one must be a wrapper.
    """
    if not torch.is_grad_enabled() or torch.compiler.is_compiling() or not dispatch.has_kernels(x):
        return None
    sources = [_source(layer) for layer in layers]
    found = [source for source in sources if source is not None]
    if len(found) < len(sources) or not any(source.pairs for source in found):
        return None
    frozen = [t for source in found for t in (source.weight, source.bias) if t is not None]
    factors = [t for source in found for pair in source.pairs for t in pair[:2]]
    dtypes = {t.dtype for t in (x, *frozen, *factors)}
    fits = (
        not any(t.requires_grad for t in frozen)
        and all(pair[2] is None for source in found for pair in source.pairs)
        and (len(dtypes) == 1 or dispatch.is_autocast(x))
        and (len(found) == 1 or sum(map(len, factors[::2])) <= _MOST_RANKS)
        and dispatch.is_untraced(x, (*frozen, *factors))
    )
    return found if fits else None


def _source(layer: Any) -> Source | None:
    if type(layer) is nn.Linear:
        return Source(layer, *parameters_of(layer), ()) if is_unhooked(layer) else None
    if not is_wrapper(layer):
        return None
    source = source_of(layer)
    # Without active adapters peft's forward may have to subtract fused ones first.
    is_trained = not isinstance(source, str) and type(source.base) is nn.Linear and source.pairs
    return source if is_trained else None  # type: ignore[return-value]


def adapted(x: Tensor, weight: Tensor, bias: Tensor | None, sources: Sequence[Source]) -> Tensor:
    """Computes the concatenated results of all layers with these ``sources``, (..., columns of all layers).

    Args:
        x: (..., K).
        weight, bias: those of all layers, concatenated.
        sources: the result of ``trained_sources``.
    """
    dtype = torch.get_autocast_dtype(x.device.type) if dispatch.is_autocast(x) else x.dtype
    rows = x.to(dtype).reshape(-1, x.shape[-1])
    a, b, scale = _joined(sources)
    # y is a matrix and no view: for an ``addmm_`` of a view autograd would copy the gradient.
    y = F.linear(rows, weight.to(dtype), None if bias is None else bias.to(dtype))
    y.addmm_(F.linear(rows, a.to(dtype)), b.to(dtype).t(), alpha=scale)
    return y.view(*x.shape[:-1], y.shape[1])


def _joined(sources: Sequence[Source]) -> tuple[Tensor, Tensor, float]:
    """Returns all A as one matrix (rank, K), all B as one (columns of all layers, rank), and their scale.

    In the second matrix each layer's B is a block beside zeros, at the columns of the layer.
    """
    pairs = [pair for source in sources for pair in source.pairs]
    if len(pairs) == len(sources) == 1:
        a, b, _, scale = pairs[0]
        return a, b, scale
    scales = {scale for *_, scale in pairs}
    common = scales.pop() if len(scales) == 1 else None
    blocks = []
    for source in sources:
        bs = [b if common is not None else b * scale for _, b, _, scale in source.pairs]
        blocks.append(torch.cat(bs, 1) if bs else source.weight.new_empty(len(source.weight), 0))
    return torch.cat([a for a, *_ in pairs]), torch.block_diag(*blocks), 1.0 if common is None else common
