"""One product for keys and values of all cross-attentions that read the same encoder_hidden_states.

How they share it is said in ``one_product.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from sdfastgn.patches.shared.one_product import Sharing
from sdfastgn.patches.shared.packed_weights import Columns, plain_parameters

__all__ = ["CONTEXT", "pays"]

_MAX_ROWS = 1024


def pays(rows: int, members: int) -> bool:
    """True if one product of ``rows`` rows should be computed for ``members`` attentions.

    Few rows are few tiles, and the weights are most of what is read. Many fill a GPU one product at a time, and leave much to be kept.
    """
    return members > 1 and 0 < rows <= _MAX_ROWS


class _KeysAndValues:
    def key(self, part: Any) -> Any:
        # Where queries read as many channels, they may read the same tensor, and be in one product with keys and values.
        channels, own = (getattr(linear, "in_features", None) for linear in (part.to_k, part.to_q))
        return None if channels == own else (type(part), channels)

    def columns(self, key: Any, parts: Sequence[Any]) -> Columns | None:
        return plain_parameters(linear for part in parts for linear in (part.to_k, part.to_v))

    def pays(self, x: Tensor, parts: int) -> bool:
        return x.dim() == 3 and pays(x.shape[0] * x.shape[1], parts)

    def product(self, x: Tensor, together: Sequence[Any], part: Any) -> Tensor:
        return F.linear(x, *together)


CONTEXT = Sharing(_KeysAndValues())
