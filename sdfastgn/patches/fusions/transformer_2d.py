"""diffusers' ``Transformer2DModel``: returns a channels-last image, without a copy of the tokens.

diffusers' forward ends with ``.permute(0, 3, 1, 2).contiguous()``, so all later layers get channels-first
images. Here the image stays channels-last. The kernel of the sum with the residual also stores the statistics
of its result. In fp16 and bf16, the 1x1 convolutions before and after the blocks run as matrix products.
"""

from __future__ import annotations

from diffusers.models.transformers.transformer_2d import Transformer2DModel
from torch import Tensor

from sdfastgn.kernels.common import dispatch
from sdfastgn.patches.layers.convolution import pointwise_tokens
from sdfastgn.patches.layers.group_norm import norm_tokens
from sdfastgn.patches.layers.linear import call_linear
from sdfastgn.patches.layers.rounding import rounded
from sdfastgn.patches.layers.statistics import add
from sdfastgn.patches.swap.fusion import ClassSwap, layer_of
from sdfastgn.patches.swap.tested_sources import tested


class FusedTransformer2DModel(Transformer2DModel):
    """``Transformer2DModel`` whose output, if it is an image, is channels-last."""

    def _operate_on_continuous_inputs(self, hidden_states: Tensor) -> tuple[Tensor, int]:
        if not dispatch.has_kernels(hidden_states):
            return super()._operate_on_continuous_inputs(hidden_states)
        _, C, H, W = hidden_states.shape
        norm, proj_in = layer_of(self, "norm"), layer_of(self, "proj_in")
        tokens = rounded(norm_tokens, norm, hidden_states, readers=(proj_in,))
        if self.use_linear_projection:
            return call_linear(proj_in, tokens), C
        tokens = pointwise_tokens(proj_in, tokens, H, W)
        return tokens, tokens.shape[2]

    def _get_output_for_continuous_inputs(
        self,
        hidden_states: Tensor,
        residual: Tensor,
        batch_size: int,
        height: int,
        width: int,
        inner_dim: int,
    ) -> Tensor:
        if not dispatch.has_kernels(hidden_states):
            return super()._get_output_for_continuous_inputs(
                hidden_states, residual, batch_size, height, width, inner_dim
            )
        proj_out = layer_of(self, "proj_out")
        if self.use_linear_projection:
            tokens = call_linear(proj_out, hidden_states)
        else:
            tokens = pointwise_tokens(proj_out, hidden_states, height, width)
        return add(tokens.reshape(batch_size, height, width, -1).permute(0, 3, 1, 2), residual)


def _check(model: Transformer2DModel) -> str | None:
    return (
        None if model.is_input_continuous else "its input is not an image, so that there is no layout to keep"
    )


FUSION = ClassSwap(
    "transformer_2d",
    Transformer2DModel,
    FusedTransformer2DModel,
    sources=(
        tested(
            Transformer2DModel,
            "forward",
            "_operate_on_continuous_inputs",
            "_get_output_for_continuous_inputs",
        ),
    ),
    check=_check,
)
