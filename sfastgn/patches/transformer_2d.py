"""diffusers' ``Transformer2DModel``: tokens go back to images as a channels-last view, without the copy to channels-first.

Upstream ends a block with ``.permute(0, 3, 1, 2).contiguous()``, which undoes channels-last for everything that follows.
"""

from __future__ import annotations

from diffusers.models.transformers.transformer_2d import Transformer2DModel
from torch import Tensor

from sfastgn.patches.fusion import ClassSwap

__all__ = ["FUSION", "FusedTransformer2DModel"]


class FusedTransformer2DModel(Transformer2DModel):
    """``Transformer2DModel`` whose continuous output is channels-last."""

    def _get_output_for_continuous_inputs(
        self, hidden_states: Tensor, residual: Tensor, batch_size: int, height: int, width: int, inner_dim: int
    ) -> Tensor:
        def to_image(tokens: Tensor) -> Tensor:
            return tokens.reshape(batch_size, height, width, -1).permute(0, 3, 1, 2)

        if self.use_linear_projection:
            return to_image(self.proj_out(hidden_states)) + residual
        return self.proj_out(to_image(hidden_states)) + residual


def _check(model: Transformer2DModel) -> str | None:
    return None if model.is_input_continuous else "its input is not an image, so that there is no layout to keep"


FUSION = ClassSwap(
    "transformer_2d",
    Transformer2DModel,
    FusedTransformer2DModel,
    ("forward", "_operate_on_continuous_inputs", "_get_output_for_continuous_inputs"),
    _check,
)
