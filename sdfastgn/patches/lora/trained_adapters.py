"""Runs frozen linear layers with LoRA adapters in training, with fewer passes over their results.

The forward of peft's LoRA layer runs the model's own layer. Then, for each adapter, it runs two small layers
(A and B), multiplies their result by a scale, and adds the product to the own layer's result. Under autocast
the own layer and each A cast the input separately. Here the input is cast once, and the matrix product with B
adds to the own layer's result in place.

Layers that read the same input can run as one layer: one matrix product with their weights, which lie side by
side in memory (``layers/packed_weights.py``), one with all A, and one with all B. All operations are
PyTorch's own, so autograd knows their derivatives.

Numerics: scaled products with B are not rounded before they are added. peft rounds each product, its multiple
by the scale, and each sum.

peft's own code runs

- for adapters that ``source_of`` refuses, such as adapters with dropout or hooks, and DoRA;
- for LoRA layers without active adapters;
- for adapters with biases, and for convolutions;
- for layers whose own weights are trained;
- if dtypes differ, except under autocast;
- under compilers, in traces, and where sdfastgn's kernels do not run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sdfastgn.kernels.common import dispatch
from sdfastgn.patches.lora.sources import Source, source_of
from sdfastgn.patches.lora.wrappers import is_wrapper
from sdfastgn.patches.swap.fusion import is_unhooked, parameters_of

# Linear layers with the same input run as one matrix product if the ranks of all their LoRA adapters add up
# to at most this. The matrices B of all adapters then form one block-diagonal matrix. With larger ranks the
# multiplications by its zeros cost more time than fewer matrix products save.
_MOST_RANKS = 64


def trained(layer: Any, x: Tensor) -> Tensor | None:
    """Computes ``layer(x)`` for peft's LoRA layer in training. Returns None if peft's own code must run."""
    sources = trained_sources((layer,), x)
    return None if sources is None else adapted(x, sources[0].weight, sources[0].bias, sources)


def trained_sources(layers: Sequence[Any], x: Tensor) -> list[Source] | None:
    """Returns the weights and adapters (``Source``) of each of ``layers``, which all have the input x.

    A plain ``nn.Linear`` among them has a ``Source`` without adapters. Returns None if the layers must be
    called one by one, or if none of them has an adapter.
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
    # If no adapter is active, peft's code runs, which may have to subtract adapters that were fused into the
    # weight.
    is_trained = not isinstance(source, str) and type(source.base) is nn.Linear and source.pairs
    return source if is_trained else None  # type: ignore[return-value]


def adapted(x: Tensor, weight: Tensor, bias: Tensor | None, sources: Sequence[Source]) -> Tensor:
    """Computes linear layers with LoRA adapters at once. Returns (..., columns of all layers together).

    Args:
        x: (..., K), the input of all layers.
        weight, bias: the weights of all layers, concatenated, and their biases.
        sources: the result of ``trained_sources``, which has each layer's adapters.
    """
    dtype = torch.get_autocast_dtype(x.device.type) if dispatch.is_autocast(x) else x.dtype
    rows = x.to(dtype).reshape(-1, x.shape[-1])
    a, b, scale = _joined(sources)
    # The input ``rows`` is 2-D, so that y is no view. Otherwise autograd would copy the gradient of
    # ``addmm_``.
    y = F.linear(rows, weight.to(dtype), None if bias is None else bias.to(dtype))
    y.addmm_(F.linear(rows, a.to(dtype)), b.to(dtype).t(), alpha=scale)
    return y.view(*x.shape[:-1], y.shape[1])


def _joined(sources: Sequence[Source]) -> tuple[Tensor, Tensor, float]:
    """Returns (A of all adapters as one matrix, their B as one matrix, scale of the product with B).

    The shapes are (sum of all ranks, K) and (columns of all layers, sum of all ranks). The second matrix is
    block-diagonal, with one block for each layer. If the adapters have different scales, each B is multiplied
    by its own scale, and the returned scale is 1.
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
