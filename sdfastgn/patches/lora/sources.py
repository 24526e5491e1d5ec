"""Finds the *source* of a merged weight: the tensors and scales from which it is computed.

A *wrapper* is peft's LoRA layer around a linear layer or 2-D convolution of the model. Its *merged weight* is
the layer's weight plus the sum of scale * B @ A over the active adapters.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn

from sdfastgn.kernels.common import dispatch
from sdfastgn.kernels.common.private import version_of
from sdfastgn.patches.swap.fusion import is_unhooked
from sdfastgn.patches.swap.hooks import LAYOUT_HOOKS
from sdfastgn.patches.swap.numpy_numbers import is_numpy_real

# The settings that must be equal in three convolutions: the model's own, the first one of a LoRA adapter (A),
# and the plain convolution that runs with the merged weights.
OF_CONV = ("stride", "padding", "dilation", "groups", "padding_mode")


def is_class_of_scales(kind: type) -> bool:
    """True if LoRA scales of class ``kind`` can be merged: int, float, or one of NumPy's real numbers."""
    return issubclass(kind, (int, float)) or is_numpy_real(kind)


class Source(NamedTuple):
    """The tensors and scales from which the merged weight and bias of one LoRA layer are computed.

    Attributes:
        base: the model's own layer, which is inside peft's LoRA layer.
        weight, bias: the parameters of ``base``.
        pairs: (A, B, bias of B or None, scale) for each active adapter.
    """

    base: Any
    weight: Tensor
    bias: Tensor | None
    pairs: tuple[tuple[Tensor, Tensor, Tensor | None, float], ...]

    @property
    def tensors(self) -> list[Tensor]:
        found = [self.weight, self.bias]
        for pair in self.pairs:
            found += pair[:3]
        return [tensor for tensor in found if tensor is not None]

    @property
    def has_bias(self) -> bool:
        return self.bias is not None or any(pair[2] is not None for pair in self.pairs)

    def scaled(self, factor: float) -> Source:
        """Returns this source with the scales of all adapters multiplied by ``factor``.

        peft's ``scale_layer`` does the same to the scales of a layer.
        """
        if factor == 1.0:
            return self
        return self._replace(pairs=tuple((a, b, bias, s * factor) for a, b, bias, s in self.pairs))

    def key(self, tensors: list[Tensor]) -> tuple[Any, ...]:
        """A value that changes if a tensor or scale behind the merged weight changes.

        Writes that PyTorch does not count in a tensor's version do not change it. ``tensors``: the result of
        ``self.tensors``.
        """
        return *state_of(tensors), tuple([pair[3] for pair in self.pairs])


def state_of(tensors: list[Tensor]) -> tuple[tuple[int, ...], ...]:
    """Returns three tuples: the ids, the addresses and the version counters of ``tensors``."""
    return tuple(map(id, tensors)), tuple(map(Tensor.data_ptr, tensors)), tuple(map(version_of, tensors))


def active_adapters(own: dict[str, Any]) -> list[str]:
    """Names of the adapters that peft's LoRA layer applies in a call.

    Empty if the adapters are turned off or fused into the layer's weight. ``own``: the ``__dict__`` of the
    LoRA layer.
    """
    if own["_disable_adapters"] or own["merged_adapters"]:
        return []
    names = own["_active_adapter"]
    present = own["_modules"]["lora_A"]._modules
    return [name for name in ([names] if isinstance(names, str) else names) if name in present]


def source_of(layer: nn.Module) -> Source | str:
    """Returns the tensors and scales for the merged weight of peft's LoRA layer ``layer``.

    If the layer cannot be merged, returns the reason instead, as a string.
    """
    own = vars(layer)
    if type(own["scaling"]) is not dict:
        return "its scales are in a dict of another class"
    modules = own["_modules"]
    base: Any = modules.get("base_layer")
    kind = type(base)
    if kind not in (nn.Linear, nn.Conv2d) or own.get("fan_in_fan_out"):
        return "the layer in it is not plain"
    if kind is nn.Conv2d and (base.groups != 1 or "_conv_forward" in vars(base)):
        return "its convolution has groups, or was changed"
    # sdfastgn's hooks that change memory layouts are allowed on ``base``. The plain layer with the merged
    # weights runs these hooks too, because it shares the dicts of hooks (``_stand_in`` in
    # ``merged_weights.py``).
    if not (is_unhooked(layer) and is_unhooked(base, except_for=LAYOUT_HOOKS)):
        return "it has hooks"
    parameters = base._parameters
    weight, bias = parameters.get("weight"), parameters.get("bias")
    pairs = []
    for name in active_adapters(own):
        pair = _pair(layer, kind, name)
        if isinstance(pair, str):
            return pair
        pairs.append(pair)
    source = Source(base, weight, bias, tuple(pairs))
    return _refusal_of(source.tensors, weight.device) or source


def _refusal_of(tensors: list[Tensor], device: Any) -> str | None:
    """Why the tensors of a layer and its adapters cannot be merged on ``device``; None if they can."""
    for tensor in tensors:
        if type(tensor) not in (Tensor, nn.Parameter) or tensor.dtype not in dispatch.KERNEL_DTYPES:
            return "a weight is not a plain tensor of fp16, bf16 or fp32"
        if tensor.is_inference():
            return "a weight was made in inference mode, so that writes into it are not counted"
        if tensor.device != device or tensor.is_meta:
            return "its weights are on several devices"
    return None


def adapter_of(layer: nn.Module, source: Source, name: str) -> tuple[Tensor, Tensor, Tensor | None] | None:
    """Returns (A, B, bias of B or None) of the adapter ``name``. None if the adapter cannot be merged.

    ``layer``: peft's LoRA layer. ``source``: a ``Source`` of ``layer`` for any adapters. Only the model's own
    layer and its weight are read from it.
    """
    pair = _pair(layer, type(source.base), name)
    if isinstance(pair, str) or _refusal_of([t for t in pair[:3] if t is not None], source.weight.device):
        return None
    return pair[:3]


def is_plain_adapter(own: dict[str, Any], name: str) -> bool:
    """True if the adapter ``name`` has no dropout and is no variant of LoRA, such as DoRA.

    ``own``: the ``__dict__`` of peft's LoRA layer.
    """
    is_variant = name in own.get("lora_variant", ()) or own.get("use_dora", {}).get(name)
    return not is_variant and type(own["_modules"]["lora_dropout"]._modules.get(name)) is nn.Identity


def _pair(layer: nn.Module, kind: Any, name: str) -> Any:
    """Returns (A, B, bias of B or None, scale) of the adapter ``name``, or why it cannot be merged.

    ``layer``: peft's LoRA layer. ``kind``: the class of the model's own layer inside it.
    """
    own: Any = vars(layer)
    modules = own["_modules"]
    if name in own.get("lora_variant", ()) or own.get("use_dora", {}).get(name):
        return "its adapter is a variant of LoRA, such as DoRA"
    first: Any = modules["lora_A"]._modules[name]
    second: Any = modules["lora_B"]._modules[name]
    if not (type(first) is type(second) is kind and is_unhooked(first, second)):
        return "the adapter's layers are not plain, or have hooks"
    if kind is nn.Conv2d and not _is_convolution_of(modules["base_layer"], first, second):
        return "the adapter's convolution has other settings than its layer"
    if type(modules["lora_dropout"]._modules.get(name)) is not nn.Identity:
        return "its adapter has a dropout"
    scale = own["scaling"][name]
    if not is_class_of_scales(type(scale)):
        return f"the adapter's scale is a {type(scale).__name__}"
    a, b = first._parameters["weight"], second._parameters["weight"]
    return a, b, second._parameters.get("bias"), float(scale)


def _is_convolution_of(base: Any, first: Any, second: Any) -> bool:
    """True if ``first`` (A) reads the pixels that the model's ``base`` reads, and ``second`` (B) is 1x1.

    ``first`` does not always read the same pixels: peft gives ``first`` neither the dilation nor the padding
    mode of ``base``.
    """
    return (
        all(getattr(first, name) == getattr(base, name) for name in ("kernel_size", *OF_CONV))
        and second.kernel_size == second.stride == (1, 1)
        and second.padding == (0, 0)
    )
