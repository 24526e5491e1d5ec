"""``optimize``'s option ``precision``: lets the matrix products of models run in FP8, or ends this.

There are two kinds of such matrix products. The fused transformer blocks compute some of their linear layers
in FP8 (``fp8/product.py``). Plans, which are traced lists of kernels that replace a model's Python, compute
their large linear layers in FP8, with a scale for each row of the weights (``fp8/rows.py``).
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor, nn

from sdfastgn.patches.fp8 import models as fp8
from sdfastgn.patches.graphs import install as graphs


def check(call: str, roots: Iterable[nn.Module], in_rows: Sequence[Tensor]) -> None:
    """Raise ValueError if the models in ``roots`` cannot compute matrix products in FP8.

    The reason may be that they have no such products, or that the device or dtype of a weight does not fit.

    ``call``: the name of the public function, for the error. ``in_rows``: weights that plans (traced lists of
    kernels) would quantize row by row.
    """
    found = [weights for root in roots for _, weights in _products_in(root)]
    reason = fp8.reason_to_refuse([*found, in_rows]) or fp8.reason_to_refuse_rows(in_rows)
    if reason is not None:
        raise ValueError(f'sdfastgn.{call}: precision="fp8" is impossible: {reason}')


def set_precision(root: nn.Module, precision: str | None, *, has_rows: bool = False) -> None:
    """Let matrix products of the models in ``root`` run in FP8, or end this if ``precision`` is None.

    The CUDA graphs of changed models are removed. ``has_rows``: True if ``root`` runs as plans (traced lists
    of kernels), which compute the products with a scale for each row.
    """
    if precision is not None and has_rows:
        if fp8.row_weights(root) is None:
            graphs.remove(root)
            fp8.allow_rows(root)
        return
    for model in _models_in(root):
        found = [] if precision is None else _products_in(model)
        if found and not fp8.has_all(model, found):
            graphs.remove(model)
            fp8.allow(model, found)
        elif not found and fp8.is_allowed(model):
            graphs.remove(model)
            fp8.forget_all(model)


def put_back(root: nn.Module, kept: Mapping[nn.Module, fp8.Kept]) -> None:
    """Give the models in ``root`` their former matrix products in FP8 again, with their scales.

    ``kept``: the former products of each model, as ``fp8.kept_in`` returned them.
    """
    for model in _models_in(root):
        if not fp8.has_kept(model, kept.get(model)):
            graphs.remove(model)
            fp8.forget_all(model)
    for model, former in kept.items():
        if not fp8.has_kept(model, former):
            fp8.give_back(model, former)


def _products_in(model: nn.Module) -> list[tuple[nn.Module, list[Tensor]]]:
    """Returns (module, weights) for each matrix product of ``model`` that can run in FP8.

    ``module`` is a linear layer, or contains the layers with the same input that one product computes.
    """
    # Only diffusers has blocks with such products. If it was not imported, no model has such a block. It may
    # also not be installed.
    if sys.modules.get("diffusers") is None:
        return []
    from sdfastgn.patches.fusions.transformer_block import products_in

    return [(owner, weights) for owner, weights in products_in(model) if fp8.can_quantize(weights)]


def _models_in(root: nn.Module) -> list[nn.Module]:
    """The models in ``root`` that can have CUDA graphs, except for models inside of others.

    Only ``root`` itself if there are none.
    """
    return [model for _, model in graphs.outermost(root)] or [root]
