"""Keeps the matrix products in E4M3 of all models (``optimize(..., precision="fp8")``).

A *product* is a matrix product that computes a linear layer, or several layers with the same input. It keeps
a copy of its weights in E4M3 (fp8), and chooses the scale of its input in its first calls (``product.py``).
The *owner* of a product is the linear layer, or the module that contains the layers.

This file gives models their products and takes them away, finds the product of a module, and describes
products for the report. It also reacts to changes of a model:

- If ``.to()`` or a similar method moves a weight, the weight's copy in E4M3 is freed (``_Moves``). The copy
  is made again once the weight is on the GPU again.
- ``fuse_lora`` writes through ``.data``, which PyTorch does not count. A later ``unload_lora_weights`` puts
  the layer back into the model. ``_put_into`` notices this, and the weight is quantized again. Other writes
  that PyTorch does not count are found by comparing the weights' contents (``lora/contents.py``).
- If a layer has LoRA adapters that are merged (``lora/merging.py``), it runs in E4M3 with the merged weights.
  If they are not merged, the layer runs in the model's dtype.
- If hooks move the weights in each call (``Products.offloading``), all copies of the model's weights are
  freed, and its products run in the model's dtype.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.utils.hooks import RemovableHandle

from sdfastgn.kernels.common import private
from sdfastgn.patches.fp8.product import Product, ProductCall
from sdfastgn.patches.fp8.products import Products
from sdfastgn.patches.fp8.rows import RowWeights
from sdfastgn.patches.lora.merging import is_merged
from sdfastgn.patches.lora.wrappers import is_wrapper, wrapped_layer
from sdfastgn.patches.offload.moves import follow, follow_moves, stop_following
from sdfastgn.patches.swap.instance_entries import InstanceEntry

# PyTorch's matrix product in fp8 needs weights whose rows and columns are multiples of this number.
_SIZES = 16
_HALVES = (torch.float16, torch.bfloat16)
# A dict from a model to its matrix products in fp8. A model that runs as plans, which are traced lists of
# kernels, has ``RowWeights`` instead: the weights in fp8 that plans read.
_models: weakref.WeakKeyDictionary[nn.Module, Products | RowWeights] = weakref.WeakKeyDictionary()
# A dict from a module to its matrix product in fp8. The module is the linear layer that the product computes.
# If one product computes several layers with the same input, it is the module that contains them.
_products: weakref.WeakKeyDictionary[nn.Module, Product] = weakref.WeakKeyDictionary()
# A dict from a module to all matrix products in fp8 of the model that contains the module.
_model_of: weakref.WeakKeyDictionary[nn.Module, Products] = weakref.WeakKeyDictionary()
# The handle of the global hook ``_put_into``, by which it is removed; None while no model has products.
_hook: RemovableHandle | None = None


@dataclass(frozen=True)
class Fp8:
    """What the report says about the matrix products of one model that may run in E4M3 (fp8).

    In its first calls a product runs in the model's dtype, and records the magnitude of its inputs, to choose
    a scale.

    Attributes:
        path: the model's path in the pipeline; the name of the model's class if it is in no pipeline.
        products: number of products.
        in_e4m3: number of products that run in E4M3.
        learning: number of products that still record their inputs.
        short: number of products that still record their inputs because the last call ran out of memory.
        unused: number of products that were not called while the others chose their scales. They begin to
            record inputs when they are called.
        inexact: names of the products that stay in the model's dtype because of their error in E4M3, or
            because their inputs were all 0 or had an infinity or NaN.
        growing: names of the products that run in the model's dtype because their inputs exceeded the range
            too often.
        again: number of products whose scale has grown, because inputs were beyond the range.
        adapted: number of products that run in the model's dtype because a layer has LoRA adapters that are
            not merged.
        error: the largest relative error, against fp32, of the products that run in E4M3; NaN if there is
            none.
        beyond: number of values so far that were beyond the range of their scales. They were written with
            larger scales.
        bytes: size of the weights in E4M3, in bytes.
        offloading: the name of what moves the weights in each call, such as group offloading. Then no product
            runs in E4M3 or records inputs. Empty if nothing moves them.
        has_row_scales: True if each row has a scale, as in plans (traced lists of kernels that replace a
            model's Python). Then only ``path``, ``products``, ``in_e4m3``, ``bytes`` and ``offloading`` have
            values, and ``products`` counts the weights that were quantized so far.
    """

    path: str
    products: int
    in_e4m3: int
    learning: int
    short: int
    unused: int
    inexact: tuple[str, ...]
    growing: tuple[str, ...]
    again: int
    adapted: int
    error: float
    beyond: int
    bytes: int
    offloading: str = ""
    has_row_scales: bool = False


def device_reason(device: torch.device) -> str | None:
    """Why matrix products in E4M3 (fp8) cannot run on ``device``; None if they can."""
    if private.scaled_mm is None:
        return f"PyTorch {torch.__version__} has no products in E4M3"
    if device.type != "cuda" or torch.version.hip is not None:
        return f"its weights are on {device}, and not on an NVIDIA GPU"
    major, minor = torch.cuda.get_device_capability(device)
    name = torch.cuda.get_device_name(device)
    return None if (major, minor) >= (8, 9) else f"{name} has compute capability {major}.{minor}, below 8.9"


def reason_to_refuse(found: Iterable[Sequence[Tensor]]) -> str | None:
    """Why matrix products with the weights ``found`` cannot run in E4M3 (fp8); None if they can.

    ``found``: for each matrix product a sequence of weights. If there are several reasons, one is returned.
    """
    weights = [weight for group in found for weight in group]
    if not weights:
        return "it has no transformer blocks whose products can run in FP8"
    reasons = filter(None, map(device_reason, dict.fromkeys(weight.device for weight in weights)))
    others = [str(weight.dtype) for weight in weights if weight.dtype not in _HALVES]
    return next(reasons, f"its weights are {others[0]}, and not fp16 or bf16" if others else None)


def reason_to_refuse_rows(weights: Iterable[Tensor]) -> str | None:
    """Why the dtype of ``weights`` prevents that plans multiply by them in E4M3; None if it does not.

    A plan is a traced list of kernels that replaces the Python of a model's forward. Other reasons, such as
    the GPU, are found by ``reason_to_refuse``.
    """
    others = [str(weight.dtype) for weight in weights if weight.dtype is not torch.bfloat16]
    return f"its weights are {others[0]}, and FP8 in plans needs bf16" if others else None


def can_quantize(weights: Sequence[Tensor]) -> bool:
    """True if one matrix product with all ``weights`` can run in E4M3.

    The sizes of the weights must allow it, and PyTorch must count writes into them.
    """
    first = weights[0]
    return (
        all(len(weight) % _SIZES == 0 and weight.shape[1:] == first.shape[1:] for weight in weights)
        and first.shape[1] % _SIZES == 0
        and not any(weight.is_inference() for weight in weights)
    )


def is_allowed(model: nn.Module) -> bool:
    """True if ``optimize`` was told to let matrix products of ``model`` run in E4M3 (fp8)."""
    return model in _models


def allow_rows(model: nn.Module) -> None:
    """Let plans of ``model``, which are traced lists of kernels, compute matrix products in E4M3.

    The caller must first remove the CUDA graphs and plans of ``model``.
    """
    forget_all(model)
    _models[model] = RowWeights(model)
    follow(model)


def row_weights(model: nn.Module) -> RowWeights | None:
    """The weights in E4M3 that plans of ``model`` read; None if its plans may not use E4M3.

    A plan is a traced list of kernels that replaces the Python of the model's forward.
    """
    own = _models.get(model)
    return own if isinstance(own, RowWeights) else None


def has_all(model: nn.Module, found: Iterable[tuple[nn.Module, Sequence[Tensor]]]) -> bool:
    """True if ``model`` already has all matrix products in E4M3 that ``allow(model, found)`` would give it.

    ``found``: for each product its module, and its weights.
    """
    return model in _models and all(_has(owner, weights) for owner, weights in found)


def allow(model: nn.Module, found: Iterable[tuple[nn.Module, Sequence[Tensor]]]) -> None:
    """Let matrix products of ``model`` run in E4M3. A product that exists already is kept with its scale.

    The caller must first remove the CUDA graphs of ``model``.

    ``found``: for each product its module, and its weights. The module is a linear layer, or contains the
    layers with the same input that one product computes.
    """
    found = list(found)
    own = Products([model, *(_layer_of(owner, weights[0]) for owner, weights in found[:1])])
    for owner, weights in found:
        if not _has(owner, weights):
            _products[owner] = Product(weights)
    former = _models.get(model)
    if isinstance(former, Products):
        own.counts.beyond = former.beyond()
    own.begin([_products[m] for m in model.modules() if m in _products])
    _set(model, own, [owner for owner, _ in found])


def _set(model: nn.Module, own: Products, owners: Iterable[nn.Module]) -> None:
    """Let ``own`` be the matrix products in fp8 of ``model``. Watch if parameters of ``owners`` move.

    ``owners``: the linear layers that the products compute, or the modules that contain these layers.
    """
    global _hook
    if _hook is None:
        _hook = register_module_module_registration_hook(_put_into)
    _models[model] = own
    _model_of.update(dict.fromkeys(model.modules(), own))
    for owner in owners:
        if "_apply" not in vars(owner):
            follow_moves(_Moves(owner))


class Kept(NamedTuple):
    """The matrix products in fp8 that a model had at one time: all as one object, and by their modules."""

    own: Products | RowWeights
    by_owner: dict[nn.Module, Product]


def kept_in(modules: Iterable[nn.Module]) -> dict[nn.Module, Kept]:
    """Returns the matrix products in fp8 of each model among ``modules``, so that they can be restored."""
    return {
        model: Kept(_models[model], {m: _products[m] for m in model.modules() if m in _products})
        for model in modules
        if model in _models
    }


def has_kept(model: nn.Module, kept: Kept | None) -> bool:
    """True if ``model`` has the matrix products in fp8 that are in ``kept``, or none if ``kept`` is None."""
    return _models.get(model) is (None if kept is None else kept.own)


def give_back(model: nn.Module, kept: Kept) -> None:
    """Give ``model`` its former matrix products in fp8 again, with the scales that they have chosen.

    The caller must first remove the CUDA graphs of ``model``. Changes of the weights in the meantime were not
    noticed. So the products' copies of weights in E4M3 are freed, and the next call makes them again.
    """
    if isinstance(kept.own, RowWeights):
        _models[model] = kept.own
        follow(model)
        return
    _products.update(kept.by_owner)
    kept.own.begin(kept.own.products)
    _set(model, kept.own, kept.by_owner)
    for product in kept.own.products:
        if product.nbytes:
            product.free()


def _layer_of(owner: nn.Module, weight: Tensor) -> nn.Module:
    """Returns the module in ``owner`` that has ``weight`` as its own parameter."""
    return next(m for m in owner.modules() if any(p is weight for p in m.parameters(recurse=False)))


def _has(owner: nn.Module, weights: Sequence[Tensor]) -> bool:
    product = _products.get(owner)
    return product is not None and product.fits(weights)


def forget(module: nn.Module) -> None:
    """Remove the matrix product in fp8 of ``module``, and no longer watch moves of its parameters."""
    global _hook
    _models.pop(module, None)
    _model_of.pop(module, None)
    _products.pop(module, None)
    stop_following(module, _Moves)
    if _hook is not None and not _products:
        _hook.remove()
        _hook = None


def forget_all(model: nn.Module) -> None:
    """Remove all matrix products in fp8 of ``model`` and of the modules in it."""
    for module in model.modules():
        forget(module)


class _Moves(InstanceEntry):
    """Replaces the method ``_apply`` of a module that has a matrix product in E4M3.

    ``.to()`` and similar methods call ``_apply``. If a parameter moves, its copy in E4M3 is freed.
    """

    __slots__ = ()

    def __call__(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        module = self.module
        product = _products.get(module)  # ``product`` is None if the module is a deepcopy
        with contextlib.nullcontext() if product is None else product.moving(module):
            type(module)._apply(module, fn, recurse)
        return module


def _put_into(parent: nn.Module, name: str, child: nn.Module | None) -> None:
    """PyTorch calls this when a module gets a child. Copies in E4M3 of the child's weight become outdated.

    The reason: the child may be a layer that was inside an adapter's wrapper until now. peft may have written
    the adapter into the layer's weight through ``.data``, and PyTorch does not count such a write.
    """
    parameters = getattr(child, "_parameters", None)
    # In modules of TorchScript ``_parameters`` is no dict. They have no matrix products in fp8.
    weight = parameters.get("weight") if isinstance(parameters, dict) else None
    if weight is None:
        return
    # Other threads may add entries to ``_products`` during the loop. ``keyrefs`` copies the keys at once.
    owners = [owner for ref in _products.keyrefs() if (owner := ref()) is not None]
    for product in filter(None, map(_products.get, owners)):
        if product.is_any_of({id(weight)}):
            product.touch()


def is_used() -> bool:
    """True if any model has matrix products in E4M3."""
    return len(_products) > 0


def may_run_in(block: nn.Module) -> bool:
    """True if the model that contains ``block`` has matrix products in E4M3 that may run now.

    They may not run if hooks move the model's weights in each call. Then this function frees the weights'
    copies in E4M3.
    """
    own = _model_of.get(block)
    return own is not None and not own.offloading()


def product_of(owner: nn.Module, weights: Sequence[Tensor]) -> ProductCall | None:
    """Returns an object for one call of the matrix product in E4M3 that computes ``owner`` with ``weights``.

    Returns None if ``owner`` has no such product, if ``weights`` have other sizes, or if hooks move the
    weights in each call.
    """
    product = _products.get(owner)
    if product is None or not may_run_in(owner):
        return None
    return ProductCall(product, product.quantizer_now()) if product.is_of(weights) else None


def reason_now(model: nn.Module) -> str | None:
    """Why fp8 prevents that ``model`` runs as a CUDA graph now; None if nothing in fp8 does.

    Call this exactly once before each call of ``model``, because it counts the model's calls.
    """
    own = _models.get(model)
    return None if own is None else own.reason_now()


def generation(model: nn.Module) -> int:
    """A number that changes whenever CUDA graphs of ``model`` become invalid because of fp8.

    They become invalid if products get other weights, free their copies of weights in E4M3, or stop or
    resume running in E4M3.
    """
    own = _models.get(model)
    return 0 if own is None else own.replaced


def compare(model: nn.Module) -> None:
    """Check whether other code has changed the weights of ``model`` since they were copied in E4M3.

    The weights' contents are compared. If they differ, ``is_outdated`` returns True from now on.
    """
    own = _models.get(model)
    if own is not None:
        own.compare()


def note_replay(model: nn.Module) -> None:
    """Begin to check if the weights of ``model`` still have the contents that were copied in E4M3.

    Call this just before a CUDA graph starts. After its start, ``has_same_contents`` returns the result.
    """
    own = _models.get(model)
    if own is not None:
        own.note_replay()


def has_same_contents(model: nn.Module) -> bool:
    """True if the CUDA graph that was started last reads copies in E4M3 of the weights' present contents."""
    own = _models.get(model)
    return own is None or own.has_same_contents()


def is_outdated(model: nn.Module) -> bool:
    """True if CUDA graphs of ``model`` would read old weights or scales, so that ``refresh`` must run.

    This is so if a weight was written to or quantized since the last ``refresh``, or if a scale has changed.
    """
    own = _models.get(model)
    return own is not None and own.is_outdated()


def refresh(model: nn.Module) -> None:
    """Update, in the current stream, the scales and weights in E4M3 that CUDA graphs of ``model`` read."""
    _models[model].refresh()


def copy_counts(model: nn.Module) -> None:
    """Start a copy to the CPU of the number of values that were beyond the range of E4M3 in a CUDA graph.

    Call this after a graph of ``model`` was started. It does not wait for the graph. A later call of the
    model reads the copy, and lets the scales of inputs grow.
    """
    own = _models.get(model)
    # With gradients, matrix products run in the model's dtype. Then CUDA graphs count nothing.
    if own is not None and not torch.is_grad_enabled():
        own.copy_counts()


def state_of(root: nn.Module, path: str) -> Iterator[Fp8]:
    """Yields what the report says about each model in ``root`` that has matrix products in fp8.

    ``path``: the path of ``root`` in its pipeline.
    """
    for name, model in root.named_modules(prefix=path):
        rows = row_weights(model)
        if rows is not None:
            yield _described_rows(name or type(model).__name__, rows)
        elif model in _models:
            wrappers = [module for module in model.modules() if is_wrapper(module) and not is_merged(module)]
            adapted = {id(wrapped_layer(module).weight) for module in wrappers}
            found = {n: _products[m] for n, m in model.named_modules() if m in _products}
            own: Any = _models[model]
            beyond = own.beyond()  # ``beyond()`` comes first: it changes what the report says
            described = _described(name or type(model).__name__, found, adapted, beyond)
            offloading = own.offloading()
            if offloading:
                described = replace(
                    described, in_e4m3=0, learning=0, short=0, unused=0, offloading=offloading
                )
            yield described


def _described(path: str, products: dict[str, Product], adapted: set[int], beyond: int) -> Fp8:
    """Returns the report's entry about the matrix products in fp8 of the model at ``path``.

    ``products``: these products by the names of the modules that they compute. ``adapted``: the ids of
    weights whose LoRA adapters are not merged. ``beyond``: the number of values that were beyond the range of
    E4M3.
    """
    plain = {name: product for name, product in products.items() if not product.is_any_of(adapted)}
    on = [product for product in plain.values() if product.is_on]
    unused = [product for product in plain.values() if product.calls == 0]
    has_learned = any(product.has_learned for product in plain.values())
    begun = sum(product.is_learning for product in plain.values())
    return Fp8(
        path=path,
        products=len(products),
        in_e4m3=len(on),
        learning=begun if has_learned else begun + len(unused),
        short=sum(product.is_short for product in plain.values()),
        unused=len(unused) if has_learned else 0,
        inexact=tuple(n for n, p in plain.items() if p.has_learned and not p.is_on and not p.is_growing),
        growing=tuple(name for name, product in plain.items() if product.is_growing),
        again=sum(product.again > 0 for product in products.values()),
        adapted=len(products) - len(plain),
        error=max((product.error for product in on), default=math.nan),
        beyond=beyond,
        bytes=sum(product.nbytes for product in products.values()),
    )


def _described_rows(path: str, rows: RowWeights) -> Fp8:
    offloading = rows.offloading()  # ``offloading()`` comes first: it may free copies that ``count`` counts
    none: dict[str, Any] = dict.fromkeys(("learning", "short", "unused", "again", "adapted", "beyond"), 0)
    none |= {"inexact": (), "growing": (), "error": math.nan}
    count = rows.count
    return Fp8(path, count, count, bytes=rows.nbytes, offloading=offloading, has_row_scales=True, **none)
