"""One kernel for the time embedding's projections of all ResNet blocks, and conv1's biases with them.

How they share it is said in ``one_product.py``.

SD1.5 has 22 of them, each 4.7 us and a gap between two kernels; the 52 MB of weights that they read together take 15 us.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from sdfastgn.kernels.act_linear.config import has_few_rows
from sdfastgn.kernels.act_linear.op import act_linear
from sdfastgn.kernels.common import dispatch
from sdfastgn.patches.core.convolution import bias_can_move
from sdfastgn.patches.core.fusion import activation_of, is_plain
from sdfastgn.patches.shared.one_product import Sharing
from sdfastgn.patches.shared.packed_weights import Columns, plain_parameters

__all__ = ["EMBEDDING"]


class _Projections:
    def key(self, part: Any) -> Any:
        """Blocks that add the embedding to conv1's output; others scale with it, or have an embedding of their own."""
        act = activation_of(part.nonlinearity)
        if act is None or part.time_embedding_norm != "default" or part.skip_time_act:
            return None
        return type(part), act, getattr(part.time_emb_proj, "in_features", None)

    def columns(self, key: Any, parts: Sequence[Any]) -> Columns | None:
        _, activation, _ = key
        weights: list[Tensor] = []
        biases: list[Tensor] = []
        extra_biases: list[Tensor] = []
        for part in parts:
            act, conv1 = part.nonlinearity, part.conv1
            adds = part.time_embedding_norm == "default" and not part.skip_time_act
            found = plain_parameters((part.time_emb_proj,))
            if found is None or not found[1] or not adds or not bias_can_move(conv1):
                return None
            if activation_of(act) != activation or not is_plain(act):
                return None
            [weight], [bias] = found
            if (conv1.bias.shape, conv1.bias.dtype) != (bias.shape, bias.dtype):
                return None
            weights.append(weight)
            biases.append(bias)
            extra_biases.append(conv1.bias)
        return weights, biases, extra_biases

    def pays(self, x: Tensor, parts: int) -> bool:
        return x.dim() == 2 and has_few_rows(x.shape[0]) and dispatch.runs_in_triton(x)

    def product(self, x: Tensor, together: Sequence[Any], part: Any) -> Tensor:
        weight, bias, extra_bias = together
        return act_linear(x, weight, bias, activation_of(part.nonlinearity) or "", extra_bias=extra_bias)


EMBEDDING = Sharing(_Projections())
