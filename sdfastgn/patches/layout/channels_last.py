"""Makes a model channels-last: its weights once, and in each call the input of its first convolution.

The weights of 2-D and 3-D convolutions become channels-last in place: the Parameter objects and their values
stay the same. Each convolution remembers the former shape and strides of its weight. If a model begins with a
2-D convolution, a hook on this convolution makes the input channels-last. A hook on the model's last 2-D
convolution makes the output channels-first again, because callers of the original model get that layout.

Channels-last is faster only where this project's kernels run. So a weight is converted if it is on a GPU and
the kernels support its dtype. A weight that is not on a GPU yet is converted when the model is moved there.
``.to()`` and similar methods call the method ``_apply``, which the function ``apply`` of this file replaces
in the ``__dict__`` of the model's root. A weight that leaves the GPU stays channels-last, because it usually
comes back. If the model then runs on a device without kernels, the hook on its first 2-D convolution gives
the weights their former layout.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from sdfastgn.kernels.common import dispatch
from sdfastgn.kernels.common.private import is_alone
from sdfastgn.patches.layout.fsdp import modules_in_fsdp
from sdfastgn.patches.layout.left_alone import reason_of_cudnn, reason_to_leave
from sdfastgn.patches.lora.adapters import WRAPPED, adapted_layers
from sdfastgn.patches.offload.moves import Moves, follow_moves, stop_following
from sdfastgn.patches.swap.class_forward import accelerate_hooks
from sdfastgn.patches.swap.hooks import layout_hook, remove_hooks
from sdfastgn.patches.swap.instance_entries import unguard

# Key in the ``__dict__`` of a converted convolution. Its value is (shape, strides) of the weight before the
# conversion. Deep copies and pickles of the convolution have this entry too.
_STOCK_LAYOUT = "_sdfastgn_stock_layout"

_FORMATS: dict[type[nn.Module], torch.memory_format] = {
    nn.Conv2d: torch.channels_last,
    nn.ConvTranspose2d: torch.channels_last,
    nn.Conv3d: torch.channels_last_3d,
    nn.ConvTranspose3d: torch.channels_last_3d,
}
# Ends of the paths of a model's first convolutions (_ENTRIES) and last convolutions (_EXITS).
# An autoencoder's ``quant_conv`` is in both lists: pipelines call it separately, after the encoder.
# ".input_blocks.0.0" and ".out.2" are names in ComfyUI, all others are names in diffusers.
_ENTRIES = (".conv_in", ".quant_conv", ".post_quant_conv", ".input_blocks.0.0")
_EXITS = (".conv_out", ".quant_conv", ".out.2")


@layout_hook
def enter(conv: Any, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Forward pre-hook of a model's first convolution: makes its input channels-last.

    If no kernels run for the input, the hook instead gives the model's weights their former
    layout. In the transforms of torch.func it does nothing, because torch.vmap does not support
    ``contiguous`` with a memory format.
    """
    if not args or not isinstance(args[0], Tensor) or args[0].dim() != 4:
        return None
    if not torch.compiler.is_compiling() and dispatch.is_transformed():
        return None
    if dispatch.has_kernels(args[0]):
        return (args[0].contiguous(memory_format=torch.channels_last), *args[1:])
    # In the context ``stock_code`` kernels are off for a while. There the weights keep their layout, because
    # CUDA graphs of the optimized model read them.
    if _STOCK_LAYOUT in conv.__dict__ and not (torch.compiler.is_compiling() or dispatch.is_stock_code()):
        _lay_out_as_stock(conv)
    return None


@layout_hook
def leave(conv: Any, args: Any, output: Any) -> Any:
    """Forward hook of a model's last convolution: makes its output channels-first.

    On a device without kernels it does nothing.
    """
    return output.contiguous() if isinstance(output, Tensor) and dispatch.has_kernels(output) else output


def is_entry(path: str, module: nn.Module) -> bool:
    """True if ``module``, at the dotted ``path``, is the first 2-D convolution of a model."""
    return isinstance(module, nn.Conv2d) and _path_in_model(path).endswith(_ENTRIES)


def is_exit(path: str, module: nn.Module) -> bool:
    """True if ``module``, at the dotted ``path``, is the last 2-D convolution of a model."""
    return isinstance(module, nn.Conv2d) and _path_in_model(path).endswith(_EXITS)


def _path_in_model(path: str) -> str:
    """Returns ``path`` with a leading dot, and without the trailing names that an adapter's wrapper adds."""
    names = path.split(".")
    while names and names[-1] in WRAPPED:
        names.pop()
    return "." + ".".join(names)


def convertible_modules(
    root: nn.Module, reason: Callable[[Collection[nn.Module]], str | None] = reason_to_leave
) -> Iterator[tuple[str, nn.Module]]:
    """Returns ``root.named_modules()`` without the modules whose weights must keep their layout.

    Two kinds of modules are left out: modules that an adapter added, because adapters are saved contiguous,
    and modules that FSDP shards, because FSDP manages their memory. The result is empty if ``reason`` says
    why the whole model must stay as it is. ``reason`` is a function of ``left_alone.py``.
    """
    named = list(root.named_modules())
    modules = [module for _, module in named]
    if reason(modules) is not None:
        return iter(())
    left = modules_in_fsdp(modules)
    for layer in adapted_layers(modules):
        added = (child for name, child in layer.named_children() if name not in WRAPPED)
        left.update(module for child in added for module in child.modules())
    return ((path, module) for path, module in named if module not in left)


class _Apply(Moves):
    """Replaces the method ``_apply`` of a model's root, which ``.to()`` and similar methods call.

    A call runs the original method, for instance to move the model. Then it makes convolutions channels-last
    that are on a GPU now and were not converted before.
    """

    __slots__ = ()

    def __init__(self, root: nn.Module) -> None:
        super().__init__(root)
        self.register()

    def arrange(self, root: nn.Module) -> None:
        lay_out_weights(root)


def apply(root: nn.Module) -> None:
    """Make the convolutions in ``root`` channels-last. A second call changes nothing.

    A convolution on a GPU is changed at once. Any other one is changed when the model is moved to a GPU.
    """
    for step in _steps(root):
        step()


def lay_out_weights(root: nn.Module) -> bool:
    """Make the weights of convolutions in ``root`` channels-last, if they are on a GPU.

    Returns True if a weight was converted.

    A convolution that was converted before stays as it is, because the user may have chosen another layout
    since, with ``.to(memory_format=...)``.
    """
    before = converted_weights(root)
    for _, module in convertible_modules(root, reason_of_cudnn):
        if _STOCK_LAYOUT not in vars(module):
            _convert(module)
    return converted_weights(root) > before


def is_complete(root: nn.Module) -> bool:
    """True if ``apply(root)`` would change nothing."""
    return next(_steps(root), None) is None


def _steps(root: nn.Module) -> Iterator[Callable[[], Any]]:
    """Yields a function without arguments for each change that ``apply(root)`` has to make."""
    has_convolution = False
    for path, module in convertible_modules(root):
        if is_entry(path, module) and enter not in module._forward_pre_hooks.values():
            yield functools.partial(module.register_forward_pre_hook, enter)
        if is_exit(path, module) and leave not in module._forward_hooks.values():
            yield functools.partial(module.register_forward_hook, leave)
        if _format_now(module) is not None:
            yield functools.partial(_convert, module)
        has_convolution = has_convolution or isinstance(module, tuple(_FORMATS))
    if has_convolution and type(vars(root).get("_apply")) in (type(None), Moves):
        yield lambda: follow_moves(_Apply(root))


def laid_out(modules: Iterable[nn.Module]) -> set[nn.Module]:
    """The modules among ``modules`` that ``apply`` has changed or given a hook."""
    return {
        module
        for module in modules
        if _STOCK_LAYOUT in vars(module)
        or isinstance(vars(module).get("_apply"), _Apply)
        or enter in module._forward_pre_hooks.values()
        or leave in module._forward_hooks.values()
    }


def _convert(module: nn.Module) -> None:
    """Give the weight of ``module`` the memory format ``_format_now(module)``; do nothing if that is None."""
    memory_format = _format_now(module)
    if memory_format is None:
        return
    weight: Any = module._parameters["weight"]
    vars(module)[_STOCK_LAYOUT] = (weight.shape, weight.stride())
    _lay_out(weight, torch.empty_like(weight, device="meta", memory_format=memory_format).stride())


def _format_now(module: nn.Module) -> torch.memory_format | None:
    """The memory format that the weight of ``module`` should get on its present device; None: no change."""
    memory_format = _new_format(module)
    weight: Any = None if memory_format is None else module._parameters["weight"]
    return memory_format if weight is not None and dispatch.has_kernels(weight) else None


def _new_format(module: nn.Module) -> torch.memory_format | None:
    """The memory format that the weight of ``module`` should get once it is on a GPU; None: no change."""
    memory_format = next((f for kind, f in _FORMATS.items() if isinstance(module, kind)), None)
    if memory_format is None:
        return None
    weight: Any = module._parameters.get("weight")
    # A subclass of Tensor keeps its layout: it may be quantized, be one of several shards, or have no shape
    # yet.
    if type(weight) not in (Tensor, nn.Parameter):
        return None
    if (
        weight.dim() != (5 if memory_format is torch.channels_last_3d else 4)
        or not weight.is_floating_point()
        or 0 in weight.stride()
    ):
        # A convolution's weight with an unusual number of axes or an integer dtype is quantized. A weight
        # with a stride of 0 is expanded.
        return None
    return None if weight.is_contiguous(memory_format=memory_format) else memory_format


def unconverted_weights(module: nn.Module) -> int:
    """Number of convolutions in ``module`` whose weights ``apply`` would convert, now or once on a GPU."""
    return sum(_new_format(m) is not None for _, m in convertible_modules(module))


def converted_weights(module: nn.Module) -> int:
    """Number of convolutions in ``module`` whose weights ``apply`` has made channels-last."""
    return sum(_STOCK_LAYOUT in vars(m) for m in module.modules())


def stock_strides(module: nn.Module, weight: Tensor) -> tuple[int, ...]:
    """The strides that ``weight`` of ``module`` had before ``apply`` converted it."""
    shape, strides = vars(module).get(_STOCK_LAYOUT, (None, None))
    return strides if weight.shape == shape else weight.stride()


def restore(module: nn.Module) -> None:
    """Undo ``apply`` on ``module`` only: remove its hooks, and give its weight the former strides again.

    A weight that was replaced by one of another shape stays as it is.
    """
    remove_hooks(module, enter, leave)
    stop_following(module, _Apply)
    # ``apply`` has also replaced the methods that copy ``module``. They are put back even if nothing else is
    # left to undo, because Ctrl-C may have stopped an earlier ``restore`` before it put them back.
    unguard(module)
    _unconvert(module)


def _lay_out_as_stock(conv: nn.Module) -> None:
    """Give all weights of the model that contains ``conv`` their former layout.

    The weights become channels-last again when the model is moved to a GPU.
    """
    models = [set(root.modules()) for root in _Apply.owners()]
    for module in {conv}.union(*(modules for modules in models if conv in modules)):
        _unconvert(module)


def _unconvert(module: nn.Module) -> None:
    layout = vars(module).get(_STOCK_LAYOUT)
    if layout is None:
        return
    # The weight is searched among all parameters and buffers: parametrizations, pruning and weight_norm
    # rename it, and other code may make it a buffer. Pruning also adds a mask with the strides of the weight.
    for weight in (*module.parameters(), *module.buffers(), _offloaded(module)):
        # If the shape differs, the converted weight was replaced by another one, for instance by one with
        # more input channels for inpainting. The old strides do not fit the shape of the new weight.
        if weight is not None and weight.shape == layout[0] and weight.stride() != layout[1]:
            _lay_out(weight, layout[1])
    # The record of the former layout is deleted last, so that ``restore`` can be repeated after Ctrl-C.
    del vars(module)[_STOCK_LAYOUT]


def _lay_out(weight: Tensor, stride: tuple[int, ...]) -> None:
    """Give a dense ``weight`` the strides ``stride``.

    The weight stays at its address unless it shares its memory with another tensor. So CUDA graphs, which
    read this address, stay usable in ComfyUI. There the weights get their former strides after each run, and
    are converted again before the next run. At every moment the weight has the right values, so Ctrl-C cannot
    spoil it.
    """
    in_place = is_alone(weight)
    # PyTorch allows writes into an inference tensor only in inference mode. Inference mode must be off for
    # all other weights, because each tensor that is made in it becomes an inference tensor.
    with torch.inference_mode(weight.is_inference()), torch.no_grad():
        own = weight.data
        weight.data = torch.empty_strided(own.shape, stride, dtype=own.dtype, device=own.device).copy_(own)
        if in_place:
            weight.data = own.as_strided(own.shape, stride).copy_(weight.data)


def _offloaded(module: nn.Module) -> Tensor | None:
    """The weight that accelerate's offloading keeps for ``module`` between calls; None without offloading."""
    for hook in accelerate_hooks(module):
        weights = getattr(hook, "weights_map", None)
        if weights is not None and "weight" in weights:
            return weights["weight"]
    return None
