"""diffusers' ``Attention``: queries, keys and values in one matrix product, and fewer passes over tensors.

The fused forward computes what ``AttnProcessor2_0`` does, with four differences.

- Self-attention computes q, k and v in one matrix product; cross-attention computes k and v in one. The
  parameters stay the same objects (``layers/packed_weights.py``).
- Attention to the few keys of a prompt, and attention with the wide heads of a VAE, run in special kernels.
- There is no division by ``rescale_output_factor`` if this factor is 1. diffusers divides by 1 in a pass over
  the whole tensor.
- The processor's signature is not inspected at each call. In diffusers this takes longer than a kernel
  launch.

One product is faster than three if each of the three leaves a part of the GPU idle. For 2048 tokens of 1280
channels each product has 80 tiles of 128 x 256, and an H200 computes 132 tiles at a time. Three products take
three rounds, and one product of 240 tiles takes two rounds.

diffusers' own forward runs for other processors (IP-Adapter, xformers, sliced attention,
``fuse_qkv_projections``), with masks, with arguments that the processor warns about, under a compiler, and
where sdfastgn's kernels do not run.
The three layers are called one by one with gradients, under autocast, in traces, and if one of them has
hooks, quantized weights or an adapter that is not merged. There is one exception. If the layers are frozen
and their LoRA adapters are trained, one large matrix product computes the layers and two small ones compute
the adapters, also under autocast (``lora/trained_adapters.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from diffusers.models.attention_processor import Attention, AttnProcessor2_0
from torch import Tensor, nn

from sdfastgn.kernels.attention.few_keys import attend_to_few
from sdfastgn.kernels.attention.over_frames import attend_over_frames
from sdfastgn.kernels.attention.wide_heads import attend, is_replaced
from sdfastgn.kernels.common import dispatch
from sdfastgn.kernels.common.e4m3 import E4M3
from sdfastgn.kernels.product.op import linear
from sdfastgn.patches.fp8 import models as fp8
from sdfastgn.patches.fp8.product import ProductCall
from sdfastgn.patches.layers.linear import call_linear, is_plain_linear
from sdfastgn.patches.layers.packed_weights import (
    Parameters,
    is_one_product,
    joined,
    pack,
    plain_parameters,
)
from sdfastgn.patches.lora.merging import plain_layer, stand_in_of
from sdfastgn.patches.lora.trained_adapters import adapted, trained, trained_sources
from sdfastgn.patches.lora.wrappers import is_wrapper, wrapped_layer
from sdfastgn.patches.swap.fusion import (
    ClassSwap,
    dropped_out,
    drops_nothing,
    is_unhooked,
    kernels_may_run,
    layer_of,
)
from sdfastgn.patches.swap.tested_sources import tested


class FusedAttention(Attention):
    """``Attention`` with fewer kernel launches.

    hidden_states: (N, tokens, C) or (N, C, H, W). encoder_hidden_states: (N, tokens', C'), or None for
    self-attention. The result has the shape of hidden_states.
    """

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        **cross_attention_kwargs: Any,
    ) -> Tensor:
        if attention_mask is not None or not self._runs_fused(
            hidden_states, encoder_hidden_states, cross_attention_kwargs
        ):
            return super().forward(
                hidden_states, encoder_hidden_states, attention_mask, **cross_attention_kwargs
            )
        residual, shape = hidden_states, hidden_states.shape
        if len(shape) == 4:
            hidden_states = hidden_states.view(shape[0], shape[1], -1).transpose(1, 2)
        if self.group_norm is not None:
            hidden_states = self.group_norm(hidden_states.transpose(1, 2)).transpose(1, 2)
        query, key, value = self._project(hidden_states, encoder_hidden_states)
        h = _attend(query, key, value, is_prompt=encoder_hidden_states is not None)
        h = self._leave(h)
        if len(shape) == 4:
            h = h.transpose(1, 2).reshape(shape)
        if self.residual_connection:
            h = h + residual
        return h if self.rescale_output_factor == 1.0 else h / self.rescale_output_factor

    def readers(self) -> Sequence[Any] | None:
        """The layers that read ``hidden_states`` or the context; None if other code may read them too.

        If all these layers would round their inputs to half precision anyway, the caller may pass inputs that
        are rounded already (``layers/rounding.py``).
        """
        is_plain = (
            type(self) is FusedAttention
            and type(self.processor) is AttnProcessor2_0
            and is_unhooked(self)
            and _is_plain_attention(self)
            and self.group_norm is None
            and not self.residual_connection
        )
        return self._projections() if is_plain else None

    def of_one_token(self, context: Any) -> Tensor | None:
        """The result of attention to a single token, (N, C): each query of a sample gets the same vector.

        context: the token, (N, 1, C'). Returns None if ``context`` has another shape, or if a call of this
        module would do anything besides projections and attention.
        """
        if not is_one_token(context):
            return None
        # The softmax of one score is 1, so queries and keys do not matter: only to_v and to_out are computed,
        # for one token of each sample. If a layer of this module has a hook, or to_q, to_k or to_out is no
        # plain linear layer, diffusers' code must run. It calls every layer, with all tokens.
        if not (
            is_plain_linear(self.to_q)
            and is_plain_linear(self.to_k)
            and self._runs_in_order(context)
            and all(map(is_unhooked, self.modules()))
            and self._leaves_plainly()
        ):
            return None
        return self._leave(call_linear(self.to_v, context))[:, 0]

    def product(self, x: Tensor, context: Tensor | None) -> ProductCall | None:
        """Returns the matrix product in E4M3 (fp8) of the layers that read the tokens x (N, tokens, C).

        These layers compute q, k and v, or only q if there is a context. Returns None if this module has no
        such product, or if a call of this module would do anything besides projections and attention.
        """
        if not (fp8.is_used() and self._runs_in_order(x) and _fits(context, x)):
            return None
        linears = self._readers_of_tokens(context)
        found = plain_parameters(list(map(plain_layer, linears)))
        if found is None or found.biases or found.weights[0].dtype is not x.dtype:
            return None
        return fp8.product_of(self if context is None else wrapped_layer(linears[0]), found.weights)

    def with_product(self, product: ProductCall, x: Tensor, context: Tensor | None) -> Tensor:
        """Computes the result of this module for x (N, tokens, C), which is in the model's dtype or in E4M3.

        If x is in E4M3, the matrix product ``product`` runs. If x is in the model's dtype, the module is
        called as usual, and ``product`` only records the magnitude of x, to choose the scale of x in E4M3
        later.

        ``product``: the result of the method ``product`` for the same context.
        """
        if x.dtype is not E4M3:
            product.learn(x, [plain_layer(linear).weight for linear in self._readers_of_tokens(context)])
            return self(x, context)
        query, key, value = self._project(x, context, product)
        return self._leave(_attend(query, key, value, is_prompt=context is not None))

    def runs_over_frames(self, x: Tensor) -> bool:
        """True if the method ``over_frames`` can replace calls of this module. x: tokens, (N, tokens, C)."""
        is_self_attention = self.cross_attention_dim == self.query_dim
        return is_self_attention and self._runs_in_order(x) and not is_replaced()

    def over_frames(self, x: Tensor, frames: int) -> Tensor:
        """Self-attention of each pixel over the frames of its video.

        x and the result: (N, frames * pixels, C). Tokens are ordered by frame, then by pixel. diffusers' code
        needs the opposite order, and copies the tokens before and after attention. Call this method only if
        ``runs_over_frames(x)`` is True.
        """
        query, key, value = self._project(x, None)
        h = attend_over_frames(query, key, value, frames)
        return self._leave(h)

    def _runs_in_order(self, x: Tensor) -> bool:
        """True if a call with tokens x runs only the projections, attention and ``to_out``.

        It is False if the call also has a norm, a residual, a rescaling, hooks or gradients.
        """
        return self.readers() is not None and self.rescale_output_factor == 1.0 and kernels_may_run(x, dim=3)

    def _runs_fused(self, hidden_states: Tensor, context: Tensor | None, options: dict[str, Any]) -> bool:
        return (
            not torch.compiler.is_compiling()
            and dispatch.has_kernels(hidden_states)
            and type(self.processor) is AttnProcessor2_0
            and options.keys() <= {"temb"}  # temb is for ``spatial_norm``, which is None here
            and hidden_states.dim() in (3, 4)
            and _fits(context, hidden_states)
            and _is_plain_attention(self)
        )

    def _project(
        self, hidden_states: Tensor, context: Tensor | None, product: ProductCall | None = None
    ) -> tuple[Tensor, ...]:
        """Returns (queries, keys, values), each of the shape (N, heads, tokens, channels of a head).

        ``product``: None, or one matrix product in E4M3 (fp8) for all layers that read ``hidden_states``.
        With a product, ``hidden_states`` are in E4M3.
        """
        heads = self.heads
        if torch.is_grad_enabled() and any(map(is_wrapper, layers := self._projections())):
            if context is None:
                found = self._train(hidden_states, layers)
            else:
                found = [*self._train(hidden_states, layers[:1]), *self._train(context, layers[1:])]
            return tuple(_split(each, heads) for each in found)
        own_q, own_k, own_v = self._projections()
        to_k, to_v = plain_layer(own_k), plain_layer(own_v)
        # Weights that lie side by side in memory share an allocation, which is registered under a module, its
        # *owner*. Without adapters the owner is this attention module. With adapters, ``plain_layer`` returns
        # layers with merged weights, and the owner is the layer that it returns for ``to_v``.
        owner = self if to_v is own_v else to_v
        if context is None:
            if product is not None:
                return _parts(product(hidden_states), 3, heads)
            together = _joined(owner, hidden_states, (plain_layer(own_q), to_k, to_v))
            if together is not None:
                return _parts(linear(hidden_states, *together), 3, heads)
            context = hidden_states
        query = call_linear(own_q, hidden_states) if product is None else product(hidden_states)
        together = _joined(owner, context, (to_k, to_v))
        if together is None:
            return tuple(_split(y, heads) for y in (query, to_k(context), to_v(context)))
        return _split(query, heads), *_parts(linear(context, *together), 2, heads)

    def _projections(self) -> list[Any]:
        return [layer_of(self, name) for name in ("to_q", "to_k", "to_v")]

    def _readers_of_tokens(self, context: Tensor | None) -> list[Any]:
        """The layers that read ``hidden_states``: ``to_q``; without a context also ``to_k`` and ``to_v``."""
        return self._projections() if context is None else [layer_of(self, "to_q")]

    def _train(self, x: Tensor, layers: list[Any]) -> Sequence[Tensor]:
        """Computes the results of linear ``layers``, which may have adapters, for x with gradients.

        If possible, all layers are one matrix product (``lora/trained_adapters.py``).
        """
        sources = trained_sources(layers, x) if len(layers) > 1 else None
        if sources is not None:
            weights = [source.weight for source in sources]
            biases = [source.bias for source in sources if source.bias is not None]
            together = joined(self, Parameters(weights, biases)) if len(biases) in (0, len(weights)) else None
            if together is not None:
                return adapted(x, *together, sources).split(list(map(len, weights)), -1)
        return [_called(layer, x) for layer in layers]

    def _last_layers(self) -> tuple[Any, Any]:
        """Returns the linear layer of the output projection, and the dropout after it."""
        layers = layer_of(self, "to_out")
        # Indexing the ModuleList (``layers[0]``, ``layers[1]``) would take ten times the CPU time.
        project, dropout, *_ = layers._modules.values() if type(layers) is nn.ModuleList else layers
        return project, dropout

    def _leaves_plainly(self) -> bool:
        """True if the output projection is a plain linear layer, and dropout does nothing.

        Then each token of the result depends on a single token of the input.
        """
        project, dropout = self._last_layers()
        return is_plain_linear(plain_layer(project)) and drops_nothing(dropout)

    def _leave(self, h: Tensor) -> Tensor:
        project, dropout = self._last_layers()
        return dropped_out(dropout, _called(project, h))

    def _pack(self) -> None:
        pack(self, list(map(wrapped_layer, self._packed_linears())))

    def _packed_linears(self) -> tuple[Any, ...]:
        linears = (self.to_q, self.to_k, self.to_v)
        same = len({getattr(linear, "in_features", None) for linear in linears}) == 1
        return linears if same else linears[1:]

    def pack_merged(self) -> None:
        """Moves the merged weights of q, k and v side by side in memory, so that one product can use them.

        Merged weights are copies of weights to which adapters were added. The addresses of the merged weights
        change. So call this only if no CUDA graph reads the old ones.
        """
        linears = self._packed_linears()
        merged = [stand_in_of(linear) for linear in linears]
        if all(layer is not linear for layer, linear in zip(merged, linears, strict=True)):
            pack(merged[-1], merged)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """Moves the weights of q, k and v side by side in memory again after ``nn.Module._apply``.

        Methods such as ``.to()`` call ``_apply``, which may give each parameter separate memory.
        """
        module = super()._apply(*args, **kwargs)
        self._pack()
        return module

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Moves the weights of q, k and v side by side in memory again.

        In a deepcopy of the module each weight has separate memory.
        """
        super().__setstate__(state)
        self._pack()


def _fits(context: Tensor | None, x: Tensor) -> bool:
    """True if ``context`` is None, or is (N, tokens', C') with as many samples as x."""
    return context is None or (context.dim() == 3 and context.shape[0] == x.shape[0])


def _called(layer: Any, x: Tensor) -> Tensor:
    """Computes ``layer(x)``. In training, LoRA layers run in fewer passes (``lora/trained_adapters.py``)."""
    y = trained(layer, x) if torch.is_grad_enabled() and is_wrapper(layer) else None
    return call_linear(layer, x) if y is None else y


def is_one_token(context: Any) -> bool:
    """True if ``context`` is a tensor (N, 1, C). The context of an IP-Adapter is a tuple."""
    return isinstance(context, Tensor) and context.dim() == 3 and context.shape[1] == 1


def _attend(query: Tensor, key: Tensor, value: Tensor, *, is_prompt: bool) -> Tensor:
    """Computes scaled_dot_product_attention, with special kernels for few keys and for wide heads.

    query, key and value are (N, heads, tokens, channels). The result is (N, tokens, heads * channels).

    ``is_prompt``: True if the keys come from a prompt, so that their number does not depend on the image.
    """
    # The kernel for few keys is compiled for each number of keys. Self-attention of a small image also has
    # few keys, but the kernel would have to be compiled for each image size. So only prompts use it.
    fits = is_prompt and dispatch.is_plain_inference(query, (key, value))
    if fits and not (dispatch.is_autocast(query) or is_replaced()):
        found = attend_to_few(query, key, value)
        if found is not None:
            return found
    return attend(query, key, value).transpose(1, 2).flatten(2)


def _joined(owner: nn.Module, x: Tensor, linears: tuple[Any, ...]) -> tuple[Tensor, Tensor | None] | None:
    """Returns (weight, bias) of one linear layer that computes all ``linears`` with the input x at once.

    None if the layers must be called one by one. ``owner``: the module for which ``pack`` has moved the
    weights of ``linears`` side by side in memory.
    """
    found = plain_parameters(linears)
    return joined(owner, found) if found is not None and is_one_product(x, found) else None


def _split(x: Tensor, heads: int) -> Tensor:
    return x.view(x.shape[0], -1, heads, x.shape[-1] // heads).transpose(1, 2)


def _parts(x: Tensor, count: int, heads: int) -> tuple[Tensor, ...]:
    """Splits x (N, tokens, channels) into ``count`` equal parts, and the channels of each part into heads.

    Returns ``count`` tensors (N, heads, tokens, channels of a head). x is the result of one matrix product.
    """
    if not x.is_contiguous():
        return _split(x, count * heads).chunk(count, 1)
    # ``as_strided`` and ``unbind`` take half as much CPU time as ``_split`` and ``chunk``, which return the
    # same.
    N, L, C = x.shape
    width = C // count
    D = width // heads
    return x.as_strided((count, N, heads, L, D), (width, L * C, D, C, 1)).unbind()


def _is_plain_attention(attn: Any) -> bool:
    """True if the results of ``to_q``, ``to_k`` and ``to_v`` are the inputs of scaled_dot_product_attention.

    So there are no norms of queries, keys or the context. A ``group_norm`` of the module's input is allowed.
    """
    return (
        attn.spatial_norm is None
        and not attn.norm_cross
        and attn.norm_q is None
        and attn.norm_k is None
        and attn.inner_dim == attn.inner_kv_dim
    )


class _AttentionFusion(ClassSwap):
    def apply(self, module: nn.Module) -> None:
        super().apply(module)
        module._pack()  # type: ignore[operator]


def _covers(attn: Attention) -> bool:
    # Attention for which ``_covers`` returns False is never fused. The module's processor is not checked here
    # but at each call, because users may change it at any time.
    has_layers = attn.to_k is not None and attn.to_out is not None
    return has_layers and _is_plain_attention(attn) and attn.added_kv_proj_dim is None


FUSION = _AttentionFusion(
    "attention",
    Attention,
    FusedAttention,
    sources=(
        tested(Attention, "__init__", "forward"),
        tested(AttnProcessor2_0, "__call__"),
    ),
    covers=_covers,
)
