"""Which models have matrix products in E4M3 (``optimize(..., precision="fp8")``), and what changes them.

``product.py`` explains products. This file gives models their products and takes them away, finds the
product of a module, and describes products for the report. It also reacts to changes of a model:

- If ``.to()`` or a similar method moves a weight, the weight's copy in E4M3 is freed (``_Moves``). The copy
  is made again once the weight is on the GPU again.
- ``fuse_lora`` writes through ``.data``. A later ``unload_lora_weights`` puts the layer back into the model.
  This is noticed, and the weight is quantized again (``_put_into``). Other writes that PyTorch does not count
  are noticed by the weights' contents (``lora/contents.py``).
- A layer with LoRA adapters runs in E4M3 if the adapters are merged (``lora/merging.py``), with the merged
  weights; else in the model's dtype.
- If hooks move the weights in each call (``Products.offloading``), all copies of the model are freed, and its
  products run in the model's dtype.
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

# The sizes of weights must be multiples of this number.
_SIZES = 16
_HALVES = (torch.float16, torch.bfloat16)
# Model -> its products, or the weights that its plans read.
_models: weakref.WeakKeyDictionary[nn.Module, Products | RowWeights] = weakref.WeakKeyDictionary()
# Module -> its product. The module is the linear layer, or the owner of the layers with the same input.
_products: weakref.WeakKeyDictionary[nn.Module, Product] = weakref.WeakKeyDictionary()
# Module -> the products of the model that contains it.
_model_of: weakref.WeakKeyDictionary[nn.Module, Products] = weakref.WeakKeyDictionary()
# The registration of ``_put_into``; None while no model has products.
_hook: RemovableHandle | None = None


@dataclass(frozen=True)
class Fp8:
    """What the report says about the products of one model.

    Attributes:
        path: the model's path in the pipeline; the name of its class if it is on its own.
        products: number of products.
        in_e4m3: number of products that run in E4M3.
        learning: number of products that still learn.
        short: number of products that still learn because their last call ran out of memory.
        unused: number of products that were not called while the others learned. They begin to learn in their
            first call.
        inexact: names of the products that stay in the model's dtype because of their error in E4M3, or
            because their inputs were all 0 or had an infinity or NaN.
        growing: names of the products that stay in the model's dtype because they learned again too often.
        again: number of products that learned again, because values were beyond the range.
        adapted: number of products that run in the model's dtype because a layer has LoRA adapters that are
            not merged.
        error: the largest error of the products that run in E4M3; NaN if there is none.
        beyond: number of values so far that were beyond the range of their scales. They were written with
            larger scales.
        bytes: size of the weights in E4M3.
        offloading: what moves the weights in each call, so that no product runs in E4M3 or learns; empty if
            nothing does.
        has_row_scales: True if each row has a scale, as in plans. Then there are only ``path``, ``products``,
            ``in_e4m3``, ``bytes`` and ``offloading``, and a product is a weight that was quantized so far.
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
    """Why products in E4M3 cannot run on ``device``; None if they can."""
    if private.scaled_mm is None:
        return f"PyTorch {torch.__version__} has no products in E4M3"
    if device.type != "cuda" or torch.version.hip is not None:
        return f"its weights are on {device}, and not on an NVIDIA GPU"
    major, minor = torch.cuda.get_device_capability(device)
    name = torch.cuda.get_device_name(device)
    return None if (major, minor) >= (8, 9) else f"{name} has compute capability {major}.{minor}, below 8.9"


def reason_to_refuse(found: Iterable[Sequence[Tensor]]) -> str | None:
    """Why products of the weights ``found`` cannot run in E4M3; None if they can. One reason for all."""
    weights = [weight for group in found for weight in group]
    if not weights:
        return "it has no transformer blocks whose products can run in FP8"
    reasons = filter(None, map(device_reason, dict.fromkeys(weight.device for weight in weights)))
    others = [str(weight.dtype) for weight in weights if weight.dtype not in _HALVES]
    return next(reasons, f"its weights are {others[0]}, and not fp16 or bf16" if others else None)


def reason_to_refuse_rows(weights: Iterable[Tensor]) -> str | None:
    """Why plans cannot compute products of ``weights`` in E4M3, beside ``reason_to_refuse``."""
    others = [str(weight.dtype) for weight in weights if weight.dtype is not torch.bfloat16]
    return f"its weights are {others[0]}, and FP8 in plans needs bf16" if others else None


def can_quantize(weights: Sequence[Tensor]) -> bool:
    """True if the sizes of ``weights`` allow a product in E4M3, and PyTorch counts writes into them."""
    first = weights[0]
    return (
        all(len(weight) % _SIZES == 0 and weight.shape[1:] == first.shape[1:] for weight in weights)
        and first.shape[1] % _SIZES == 0
        and not any(weight.is_inference() for weight in weights)
    )


def is_allowed(model: nn.Module) -> bool:
    """True if ``allow`` has given ``model`` products."""
    return model in _models


def allow_rows(model: nn.Module) -> None:
    """Let plans of ``model`` compute products in E4M3. Drop its graphs and plans first."""
    forget_all(model)
    _models[model] = RowWeights(model)
    follow(model)


def row_weights(model: nn.Module) -> RowWeights | None:
    """The weights in E4M3 of the plans of ``model``; None if its plans have none."""
    own = _models.get(model)
    return own if isinstance(own, RowWeights) else None


def has_all(model: nn.Module, found: Iterable[tuple[nn.Module, Sequence[Tensor]]]) -> bool:
    """True if ``allow(model, found)`` would change nothing."""
    return model in _models and all(_has(owner, weights) for owner, weights in found)


def allow(model: nn.Module, found: Iterable[tuple[nn.Module, Sequence[Tensor]]]) -> None:
    """Give ``model`` products in E4M3. A product that exists and that fits stays.

    ``found``: the owner of each product, and its weights. Drop the graphs of the model first.
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
    """Enter ``own`` as the products of ``model``, and begin to notice moves of ``owners``, their owners."""
    global _hook
    if _hook is None:
        _hook = register_module_module_registration_hook(_put_into)
    _models[model] = own
    _model_of.update(dict.fromkeys(model.modules(), own))
    for owner in owners:
        if "_apply" not in vars(owner):
            follow_moves(_Moves(owner))


class Kept(NamedTuple):
    """The products of a model at one time, and the owner of each."""

    own: Products | RowWeights
    by_owner: dict[nn.Module, Product]


def kept_in(modules: Iterable[nn.Module]) -> dict[nn.Module, Kept]:
    """The products of each model among ``modules`` that has some, for ``give_back``."""
    return {
        model: Kept(_models[model], {m: _products[m] for m in model.modules() if m in _products})
        for model in modules
        if model in _models
    }


def has_kept(model: nn.Module, kept: Kept | None) -> bool:
    """True if ``model`` has the products in ``kept``. If ``kept`` is None: True if ``model`` has none."""
    return _models.get(model) is (None if kept is None else kept.own)


def give_back(model: nn.Module, kept: Kept) -> None:
    """Give ``model`` its former products, with the scales that they have learned. Drop its graphs first.

    Their copies in E4M3 are freed, because nothing has noticed changes of the weights meanwhile. The next
    call or graph makes them again.
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
    """The module in ``owner`` whose parameter ``weight`` is."""
    return next(m for m in owner.modules() if any(p is weight for p in m.parameters(recurse=False)))


def _has(owner: nn.Module, weights: Sequence[Tensor]) -> bool:
    product = _products.get(owner)
    return product is not None and product.fits(weights)


def forget(module: nn.Module) -> None:
    """Drop all that this file keeps for ``module``."""
    global _hook
    _models.pop(module, None)
    _model_of.pop(module, None)
    _products.pop(module, None)
    stop_following(module, _Moves)
    if _hook is not None and not _products:
        _hook.remove()
        _hook = None


def forget_all(model: nn.Module) -> None:
    """Drop all that this file keeps for the modules of ``model``."""
    for module in model.modules():
        forget(module)


class _Moves(InstanceEntry):
    """Replaces the method ``_apply`` of a product's owner, which ``.to()`` and similar methods call."""

    __slots__ = ()

    def __call__(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        module = self.module
        product = _products.get(module)  # a deepcopy of the owner has none
        with contextlib.nullcontext() if product is None else product.moving(module):
            type(module)._apply(module, fn, recurse)
        return module


def _put_into(parent: nn.Module, name: str, child: nn.Module | None) -> None:
    """PyTorch calls this when a module gets a child. Products of the child's weight are outdated from now on.

    The child may be a layer from which an adapter was taken off. peft writes adapters into the layer's weight
    through ``.data``, and PyTorch does not count such a write.
    """
    parameters = getattr(child, "_parameters", None)
    # In modules of TorchScript ``_parameters`` is no dict. They have no products.
    weight = parameters.get("weight") if isinstance(parameters, dict) else None
    if weight is None:
        return
    # Other threads may add keys meanwhile. ``keyrefs`` copies the keys in one step.
    owners = [owner for ref in _products.keyrefs() if (owner := ref()) is not None]
    for product in filter(None, map(_products.get, owners)):
        if product.is_any_of({id(weight)}):
            product.touch()


def is_used() -> bool:
    """True if any model has products in E4M3."""
    return len(_products) > 0


def may_run_in(block: nn.Module) -> bool:
    """True if the model that contains ``block`` has products, and no hooks move its weights in each call.

    If hooks do, the copies in E4M3 are freed.
    """
    own = _model_of.get(block)
    return own is not None and not own.offloading()


def product_of(owner: nn.Module, weights: Sequence[Tensor]) -> ProductCall | None:
    """A call of the product of ``owner`` in E4M3, with ``weights``.

    None if there is none, if ``weights`` do not fit, or if hooks move them in each call.
    """
    product = _products.get(owner)
    if product is None or not may_run_in(owner):
        return None
    return ProductCall(product, product.quantizer_now()) if product.is_of(weights) else None


def reason_now(model: nn.Module) -> str | None:
    """Why ``model`` cannot run as a graph now; None if it can. Call it once before each call of ``model``."""
    own = _models.get(model)
    return None if own is None else own.reason_now()


def generation(model: nn.Module) -> int:
    """A number that changes whenever products of ``model`` get other weights or free their copies in E4M3.

    Graphs from before the change are invalid.
    """
    own = _models.get(model)
    return 0 if own is None else own.replaced


def compare(model: nn.Module) -> None:
    """Compare the contents of the weights of ``model``. After a change ``is_outdated`` is True."""
    own = _models.get(model)
    if own is not None:
        own.compare()


def note_replay(model: nn.Module) -> None:
    """Call this before a graph of ``model`` starts, and ``has_same_contents`` after that."""
    own = _models.get(model)
    if own is not None:
        own.note_replay()


def has_same_contents(model: nn.Module) -> bool:
    """True if the graph has read copies in E4M3 of the weights' present contents."""
    own = _models.get(model)
    return own is None or own.has_same_contents()


def is_outdated(model: nn.Module) -> bool:
    """True if graphs of ``model`` would read old weights or scales, so that ``refresh`` must run.

    Weights are old if they were written to, or quantized, since the last ``refresh``.
    """
    own = _models.get(model)
    return own is not None and own.is_outdated()


def refresh(model: nn.Module) -> None:
    """Update everything that graphs of ``model`` read, in the current stream (``Products.refresh``)."""
    _models[model].refresh()


def copy_counts(model: nn.Module) -> None:
    """Call this after a graph of ``model`` was started. Later calls learn from what the graph has counted.

    Nothing waits for the graph.
    """
    own = _models.get(model)
    # With gradients products run in the model's dtype.
    if own is not None and not torch.is_grad_enabled():
        own.copy_counts()


def state_of(root: nn.Module, path: str) -> Iterator[Fp8]:
    """Yields what the report says about each model in ``root`` that has products.

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
            beyond = own.beyond()  # first, because scales may grow
            described = _described(name or type(model).__name__, found, adapted, beyond)
            offloading = own.offloading()
            if offloading:
                described = replace(
                    described, in_e4m3=0, learning=0, short=0, unused=0, offloading=offloading
                )
            yield described


def _described(path: str, products: dict[str, Product], adapted: set[int], beyond: int) -> Fp8:
    """``products``: by the names of their owners. ``adapted``: ids of weights with unmerged adapters."""
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
    offloading = rows.offloading()  # first, because copies may be freed
    none: dict[str, Any] = dict.fromkeys(("learning", "short", "unused", "again", "adapted", "beyond"), 0)
    none |= {"inexact": (), "growing": (), "error": math.nan}
    count = rows.count
    return Fp8(path, count, count, bytes=rows.nbytes, offloading=offloading, has_row_scales=True, **none)
