"""``optimize``'s option ``precision``: gives models products in FP8, and takes them away.

``fp8/product.py`` explains products of transformer blocks, which ``transformer_block.py`` finds in a model.
``fp8/rows.py`` has the weights that plans read.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor, nn

from sdfastgn.patches.fp8 import models as fp8
from sdfastgn.patches.graphs import install as graphs


def check(call: str, roots: Iterable[nn.Module], in_rows: Sequence[Tensor]) -> None:
    """Raise ValueError if products of ``roots`` cannot run in FP8.

    That is, if there are no such products, or if the device or dtype of one of their weights does not fit.

    ``call``: the name of the public function, for the error. ``in_rows``: weights that plans would read.
    """
    found = [weights for root in roots for _, weights in _products_in(root)]
    reason = fp8.reason_to_refuse([*found, in_rows]) or fp8.reason_to_refuse_rows(in_rows)
    if reason is not None:
        raise ValueError(f'sdfastgn.{call}: precision="fp8" is impossible: {reason}')


def set_precision(root: nn.Module, precision: str | None, *, has_rows: bool = False) -> None:
    """Give the models in ``root`` products in FP8, or drop them. Graphs of changed models are dropped.

    ``has_rows``: True if plans of ``root`` compute the products.
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
    """Give the models in ``root`` the products again that ``fp8.kept_in`` has found in ``root``."""
    for model in _models_in(root):
        if not fp8.has_kept(model, kept.get(model)):
            graphs.remove(model)
            fp8.forget_all(model)
    for model, former in kept.items():
        if not fp8.has_kept(model, former):
            fp8.give_back(model, former)


def _products_in(model: nn.Module) -> list[tuple[nn.Module, list[Tensor]]]:
    """The products of ``model`` that can run in FP8, as (owner, weights)."""
    if sys.modules.get("diffusers") is None:  # it may not be installed; no model has its blocks then
        return []
    from sdfastgn.patches.fusions.transformer_block import products_in

    return [(owner, weights) for owner, weights in products_in(model) if fp8.can_quantize(weights)]


def _models_in(root: nn.Module) -> list[nn.Module]:
    """The models in ``root`` that can have graphs; ``root`` itself if there is none."""
    return [model for _, model in graphs.outermost(root)] or [root]
