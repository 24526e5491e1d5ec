"""Matrix products of transformer blocks in E4M3 (``optimize(..., precision="fp8")``).

A *product* is the matrix product of a linear layer, or of several layers with the same input. It has a
quantizer (``kernels/common/e4m3.py``), with which the kernel before the product writes the product's input in
E4M3.

A product begins by *learning*: in its first ``CALLS`` calls it runs in the model's dtype, and the largest
magnitude of its inputs is recorded. The last of these calls sets the scale of the inputs, copies the weights
in E4M3, and compares the product in E4M3 with the product in fp32. If the error is larger than
``MOST_ERROR``, the product stays in the model's dtype for good. Otherwise it runs in E4M3 from the next call
on. If memory runs out in the last call, the copy is freed, and the next call without a graph tries again.

While products learn, the model runs without CUDA graphs. Afterwards the scales of inputs never change. They
are in the memory of the GPU, where graphs read them.

The model's parameters are never changed. If a weight is written to or replaced, it is quantized again, into
the same memory: by the next call without a graph (``product_of``), or before the next graph (``refresh``). A
write through ``.data`` is not noticed, with one exception: ``fuse_lora`` writes in this way, and then
``unload_lora_weights`` puts the layer back into the model (``_put_into``). A layer with LoRA adapters runs in
E4M3 if the adapters are merged (``merged_adapters.py``), with the merged weights; else in the model's dtype.

If ``.to()`` or a similar method of the model moves a weight, the weight's copy in E4M3 is freed (``_Moves``).
The copy is made again in the same way, once the weight is on the GPU again. If hooks move the weights in each
call (``_offloading_of``), all copies of the model are freed, and its products run in the model's dtype.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.utils.hooks import RemovableHandle

from sdfastgn.kernels.common import private
from sdfastgn.kernels.common.compile_ahead import rehearsal
from sdfastgn.kernels.common.e4m3 import AMAX, BEYOND, E4M3, INVERSE, LARGEST, SCALE, quantized
from sdfastgn.kernels.product.op import add_linear_e4m3_, linear_e4m3
from sdfastgn.kernels.product.op import linear as in_model_dtype
from sdfastgn.patches.core.instance_entries import InstanceEntry, follow_moves, stop_following
from sdfastgn.patches.core.merged_adapters import is_merged, is_wrapper, wrapped_layer
from sdfastgn.patches.core.merged_weights import wait_for, written_now

__all__ = [
    "Fp8",
    "Product",
    "allow",
    "device_reason",
    "forget",
    "generation",
    "is_allowed",
    "is_outdated",
    "may_run_in",
    "product_of",
    "reason_now",
    "refresh",
    "state_of",
]

# Number of calls in which a product learns. Most images take 20 to 50 steps of one call each, so these are
# all or most steps of an image. From one step to the next, the magnitudes of the inputs change little.
CALLS = 30
# The scale leaves room for values that are larger than the largest value so far by this factor. The room
# costs little: E4M3 has the same relative error for all but its smallest values.
HEADROOM = 2.0
# Maximum relative error of a product in E4M3. For random numbers the error is 0.037.
MOST_ERROR = 0.06
# The error is measured with at most this many rows of the input, because large images have more.
_ROWS = 4096
# The sizes of weights must be multiples of this number.
_SIZES = 16
# The smallest scale of a weight, for weights that are all 0.
_LEAST = 1e-12
# Why a model runs without CUDA graphs while its products learn.
REASON = "the scales of its FP8 products are not known yet"
_HALVES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Fp8:
    """What the report says about the products of one model.

    Attributes:
        path: the model's path in the pipeline; the name of its class if it is on its own.
        products: number of products.
        in_e4m3: number of products that run in E4M3.
        learning: number of products that still learn.
        short: number of products that still learn because their last call ran out of memory.
        unused: number of products that were not called while the others learned. They stay in the model's
            dtype until they are called.
        inexact: names of the products that stay in the model's dtype because of their error in E4M3, or
            because their inputs were all 0 or had an infinity or NaN.
        adapted: number of products that run in the model's dtype because a layer has LoRA adapters that are
            not merged.
        error: the largest error of the products that run in E4M3; NaN if there is none.
        beyond: number of values so far that were beyond the range of E4M3.
        bytes: size of the weights in E4M3.
        offloading: what moves the weights in each call, so that no product runs in E4M3 or learns; empty if
            nothing does.
    """

    path: str
    products: int
    in_e4m3: int
    learning: int
    short: int
    unused: int
    inexact: tuple[str, ...]
    adapted: int
    error: float
    beyond: int
    bytes: int
    offloading: str = ""


class _Model:
    """The products of one model.

    Attributes:
        calls: number of calls of the model so far in which products learned.
        products: the products.
        replaced: counts how often a product got other weights, such as merged ones, or freed its copy.

    Args:
        hooked: modules that have a hook if hooks move the weights of the model in each call.
    """

    def __init__(self, hooked: Sequence[nn.Module]) -> None:
        self.calls = self.replaced = 0
        self._hooked = tuple(map(weakref.ref, hooked))
        self._was_offloaded = False
        self.products: list[Product] = []
        self._weights: list[Tensor] | None = None
        self._versions: list[int] = []

    def offloading(self) -> str:
        """What moves the weights in each call. Empty if nothing does. Otherwise the copies are freed now."""
        found = next(filter(None, (_offloading_of(m) for ref in self._hooked if (m := ref()))), "")
        if found and not self._was_offloaded:
            for product in self.products:
                if product.nbytes:
                    product.free()
        self._was_offloaded = bool(found)
        return found

    def reason_now(self) -> str | None:
        if self.offloading():
            return None  # products do not learn; hooks are a reason of their own
        # A product that was left out of some calls learns in further calls, but at most in as many again.
        if CALLS <= self.calls < 2 * CALLS and not any(0 < p.calls < CALLS for p in self.products):
            self.calls = 2 * CALLS
        if self.calls < 2 * CALLS:
            self.calls += 1
            return REASON
        return None

    def changed(self, *, is_replaced: bool) -> None:
        """A copy in E4M3 is new, outdated or freed. ``is_replaced``: older graphs must not run again."""
        self._versions = []
        self._weights = None  # a product may have other weights now
        if is_replaced:
            self.replaced += 1

    def is_outdated(self) -> bool:
        # This runs before each replay. Graphs notice by themselves when weights move.
        return self._versions_now() != self._versions

    def refresh(self) -> None:
        for product in () if self.offloading() else self.products:
            product.refresh()
            product.wait()
        self._versions = self._versions_now()

    def _versions_now(self) -> list[int]:
        if self._weights is None:
            self._weights = [weight for product in self.products for weight in product.living()]
        return list(map(private.version_of, self._weights))


class Product:
    """The product of one or several layers with the same input. Its methods need inference without autograd.

    Attributes:
        quantizer: the quantizer for the input, (4,) fp32.
        is_on: True if the product runs in E4M3.
        is_short: True if the last call in which the product learns ran out of memory. It is repeated then.
        calls: number of calls in which the product learned.
        error: the relative error in E4M3 against fp32; NaN before it is known.
        weights: weak references to the weights. The product must not keep its layers alive.
        model: weak reference to the ``_Model`` of the product.
    """

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self.is_on, self.is_short, self.calls, self.error = False, False, 0, math.nan
        self.model: Callable[[], _Model | None] = lambda: None
        self.weights = tuple(map(weakref.ref, weights))
        first = weights[0]
        self._shape = sum(map(len, weights)), first.shape[1]
        self._dtype, self._device = first.dtype, first.device
        with torch.inference_mode(False):
            self.quantizer = torch.zeros(4, dtype=torch.float32, device=first.device)
        self._e4m3 = self._scale = self.quantizer[:0]
        self._state = _state(weights)
        self._written: tuple[int, torch.cuda.Event | None] = (0, None)

    @property
    def nbytes(self) -> int:
        return self._e4m3.nbytes

    def fits(self, weights: Sequence[Tensor]) -> bool:
        """True if this can be the product of ``weights``.

        Their dtype, device and number of columns must be as before, and so must the sum of their rows.
        """
        return sum(map(len, weights)) == self._shape[0] and all(
            (w.dtype, w.device, w.shape[1]) == (self._dtype, self._device, self._shape[1]) for w in weights
        )

    def is_of(self, weights: Sequence[Tensor]) -> bool:
        """True if this is the product of ``weights``. It is brought up to date first."""
        known = self.weights
        is_known = len(known) == len(weights) and all(r() is w for r, w in zip(known, weights, strict=True))
        if is_known and self._state == _state(weights):
            return True
        # A capture would repeat the quantization at each replay.
        if not self.fits(weights) or _is_capturing():
            return False
        self.touch()  # if an error stops the next line, the copy may be written in part
        self._quantize(weights)
        self.weights = tuple(map(weakref.ref, weights))
        self._changed(is_replaced=not is_known)
        return True

    def is_any_of(self, ids: set[int]) -> bool:
        """True if the id of one of the weights is in ``ids``."""
        return any(id(ref()) in ids for ref in self.weights)

    def touch(self) -> None:
        """Mark the weights in E4M3 as outdated: the next call or graph quantizes the weights again."""
        self._state = []
        self._changed(is_replaced=False)

    def _changed(self, *, is_replaced: bool) -> None:
        """The copy in E4M3 is new, outdated or freed.

        ``is_replaced``: it was freed, or is of other weights. Graphs that read it must not run again. While
        the product is off, no graph reads it.
        """
        model = self.model()
        if model is not None:
            model.changed(is_replaced=is_replaced and self.is_on)

    def refresh(self) -> None:
        """Quantize the weights again if they were written to."""
        weights = self.living()
        if len(weights) == len(self.weights):
            self.is_of(weights)

    def living(self) -> list[Tensor]:
        """The weights that still exist."""
        return [weight for ref in self.weights if (weight := ref()) is not None]

    @contextlib.contextmanager
    def moving(self, owner: nn.Module) -> Iterator[None]:
        """A context in which parameters of ``owner`` may move. If one moves, the copy in E4M3 is freed.

        A weight is a parameter of ``owner``, or the merged weight of such a parameter and its adapters.
        """
        weights, before = self.living(), _addresses(owner.parameters())
        # With ``torch.__future__.set_swap_module_params_on_conversion``, PyTorch moves no tensor that has a
        # weak reference.
        self.weights = ()
        try:
            yield
        finally:
            self.weights = tuple(map(weakref.ref, weights))
            if self.is_on and _addresses(owner.parameters()) != before:
                self.free()

    def free(self) -> None:
        """Free the copy in E4M3. If the product is on, the next call or graph makes it again."""
        self._e4m3 = self._scale = self.quantizer[:0]
        self._state = []
        self._changed(is_replaced=True)

    def _quantize(self, weights: Sequence[Tensor]) -> None:
        """Bring the copy of the weights in E4M3 up to date, if the product is on."""
        state = _state(weights)
        if self.is_on:
            self._write(weights)
        self._state = state

    def _write(self, weights: Sequence[Tensor]) -> None:
        """Write the weights into the copy in E4M3, which is allocated if it does not exist."""
        with torch.inference_mode(False), torch.no_grad():
            if not self.nbytes:
                self._scale = torch.empty(1, dtype=torch.float32, device=self._device)
                self._e4m3 = torch.empty(self._shape, dtype=E4M3, device=self._device)
            largest = torch.stack([_largest(weight) for weight in weights]).amax()
            self._scale.copy_((largest / LARGEST).clamp(min=_LEAST))
            start = 0
            for weight in weights:
                scaled = (weight.float() / self._scale).clamp(-LARGEST, LARGEST)
                self._e4m3[start : start + len(weight)].copy_(scaled.to(E4M3))
                start += len(weight)
        self._written = written_now(self._device)

    @property
    def quantizer_now(self) -> Tensor | None:
        """The quantizer to write the input with; None if the product needs the model's dtype."""
        if not self.is_on:
            return None
        # In a rehearsal kernels may run on uninitialized memory. Its values must not be counted.
        return self.quantizer if rehearsal.get() is None else self.quantizer.clone()

    def __call__(self, x: Tensor) -> Tensor:
        """Computes the product of x (..., depth), which was written with ``quantizer``. There is no bias."""
        return linear_e4m3(x, self._e4m3, self._scales(), self._dtype)

    def add_(self, total: Tensor, x: Tensor) -> None:
        """Adds the product of x to ``total`` (..., columns), which is contiguous, in place."""
        flat = total.view(-1, total.shape[-1]), x.view(-1, x.shape[-1])
        add_linear_e4m3_(*flat, self._e4m3, self._scales())

    def _scales(self) -> tuple[Tensor, Tensor]:
        """The scales of the input and of the weights. The current stream waits until both are written."""
        if not _is_capturing():  # before a graph, ``refresh`` waits
            self.wait()
        return self.quantizer[SCALE : SCALE + 1], self._scale

    def wait(self) -> None:
        """Make the current stream wait until the weights in E4M3 are written."""
        wait_for(self._written, self._device)

    def learn(self, x: Tensor, weights: Sequence[Tensor]) -> None:
        """Learn from an input x (..., depth) in the model's dtype, unless learning is over."""
        # In a rehearsal some kernels do not run, so x may be uninitialized. A capture would learn again at
        # each replay.
        if self.calls >= CALLS or rehearsal.get() is not None or _is_capturing():
            return
        model = self.model()
        if self.calls == 0 and model is not None and model.calls >= CALLS:
            # This layer was not called until now, for instance because of an adapter that is not merged.
            # The model runs without graphs once more.
            model.calls = 0
        amax = self.quantizer[AMAX]
        torch.maximum(amax, _largest(x), out=amax)
        if self.calls + 1 == CALLS:
            try:
                self._finish(x, weights)
            except torch.OutOfMemoryError:
                # The stock model would not fail here. So this call goes on in the model's dtype.
                self.is_short = True
                return
            finally:
                if not self.is_on:
                    self.free()
        self.calls += 1
        self.is_short = False

    def _finish(self, x: Tensor, weights: Sequence[Tensor]) -> None:
        """Choose the scale, quantize the weights, and decide whether the product runs in E4M3."""
        largest = self.quantizer[AMAX].item()
        if not 0 < largest < math.inf:
            return
        scale = HEADROOM * largest / LARGEST
        self.quantizer[SCALE], self.quantizer[INVERSE] = scale, 1 / scale
        self._state = _state(weights)
        self._write(weights)
        x = x.reshape(-1, x.shape[-1])
        x = x[:: -(-len(x) // _ROWS)]
        expected = torch.cat([F.linear(x.float(), weight.float()) for weight in weights], -1)
        found = self(quantized(x, self.quantizer)).float()
        self.error = ((found - expected).norm() / expected.norm()).item()
        self.quantizer[BEYOND] = 0
        self.is_on = self.error <= MOST_ERROR


def linear(product: Product | None, x: Tensor, weight: Tensor) -> Tensor:
    """Computes ``x @ weight.T``, in E4M3 if x is in E4M3. Otherwise ``product`` learns from x.

    ``product``: the product of ``weight``; None if it has none. Then x is in the dtype of ``weight``.
    """
    if product is not None:
        if x.dtype is E4M3:
            return product(x)
        product.learn(x, [weight])
    return in_model_dtype(x, weight)


def _largest(x: Tensor) -> Tensor:
    """The largest magnitude in x, fp32 without dimensions. NaN if x has a NaN."""
    return torch.linalg.vector_norm(x, math.inf, dtype=torch.float32)


def _addresses(tensors: Iterable[Tensor]) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]


def _state(weights: Iterable[Tensor]) -> list[tuple[int, int]]:
    """Addresses and versions of ``weights``. They show whether a weight was written to or moved."""
    return [(weight.data_ptr(), weight._version) for weight in weights]


def _is_capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


# ---- products of models

# Model -> its products.
_models: weakref.WeakKeyDictionary[nn.Module, _Model] = weakref.WeakKeyDictionary()
# Module -> its product. The module is the linear layer, or the owner of the layers with the same input.
_products: weakref.WeakKeyDictionary[nn.Module, Product] = weakref.WeakKeyDictionary()
# Module -> the products of the model that contains it.
_model_of: weakref.WeakKeyDictionary[nn.Module, _Model] = weakref.WeakKeyDictionary()
# The registration of ``_put_into``; None while no model has products.
_hook: RemovableHandle | None = None


def _offloading_of(module: nn.Module) -> str:
    """What moves the weights of ``module`` in each call, by a hook on it. Empty if no hook does.

    The hook of ``enable_model_cpu_offload`` moves weights too, but not in each call.
    """
    own = vars(module)
    hook = own.get("_hf_hook")
    if any(getattr(part, "offload", None) is True for part in getattr(hook, "hooks", (hook,))):
        return "accelerate's offloading"
    registry = own.get("_diffusers_hook")
    return "diffusers' group offloading" if "group_offloading" in getattr(registry, "hooks", ()) else ""


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


def has_all(model: nn.Module, found: Iterable[tuple[nn.Module, Sequence[Tensor]]]) -> bool:
    """True if ``allow(model, found)`` would change nothing."""
    return model in _models and all(_has(owner, weights) for owner, weights in found)


def allow(model: nn.Module, found: Iterable[tuple[nn.Module, Sequence[Tensor]]]) -> None:
    """Give ``model`` products in E4M3. A product that exists and that fits stays.

    ``found``: the owner of each product, and its weights. Drop the graphs of the model first.
    """
    global _hook
    if _hook is None:
        _hook = register_module_module_registration_hook(_put_into)
    found = list(found)
    own = _models[model] = _Model([model, *(_layer_of(owner, weights[0]) for owner, weights in found[:1])])
    _model_of.update(dict.fromkeys(model.modules(), own))
    for owner, weights in found:
        if not _has(owner, weights):
            _products[owner] = Product(weights)
        _products[owner].model = weakref.ref(own)
        if "_apply" not in vars(owner):
            follow_moves(_Moves(owner))
    own.products = [_products[m] for m in model.modules() if m in _products]


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


def product_of(owner: nn.Module, weights: Sequence[Tensor]) -> Product | None:
    """The product of ``owner`` in E4M3, with ``weights``.

    None if there is none, if ``weights`` do not fit, or if hooks move them in each call.
    """
    product = _products.get(owner)
    if product is None or not may_run_in(owner):
        return None
    return product if product.is_of(weights) else None


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


def is_outdated(model: nn.Module) -> bool:
    """True if weights of ``model`` were written to, or quantized, since the last ``refresh``."""
    own = _models.get(model)
    return own is not None and own.is_outdated()


def refresh(model: nn.Module) -> None:
    """Quantize the weights of ``model`` again that were written to, in the current stream.

    This stream also waits for weights that another stream quantizes.
    """
    _models[model].refresh()


def state_of(root: nn.Module, path: str) -> Iterator[Fp8]:
    """Yields what the report says about each model in ``root`` that has products.

    ``path``: the path of ``root`` in its pipeline.
    """
    for name, model in root.named_modules(prefix=path):
        if model in _models:
            wrappers = [module for module in model.modules() if is_wrapper(module) and not is_merged(module)]
            adapted = {id(wrapped_layer(module).weight) for module in wrappers}
            found = {n: _products[m] for n, m in model.named_modules() if m in _products}
            described = _described(name or type(model).__name__, found, adapted)
            offloading = _models[model].offloading()
            if offloading:
                described = replace(
                    described, in_e4m3=0, learning=0, short=0, unused=0, offloading=offloading
                )
            yield described


def _described(path: str, products: dict[str, Product], adapted: set[int]) -> Fp8:
    """``products``: by the names of their owners. ``adapted``: ids of weights with unmerged adapters."""
    plain = {name: product for name, product in products.items() if not product.is_any_of(adapted)}
    on = [product for product in plain.values() if product.is_on]
    unused = [product for product in plain.values() if product.calls == 0]
    has_learned = any(product.calls >= CALLS for product in plain.values())
    begun = sum(0 < product.calls < CALLS for product in plain.values())
    return Fp8(
        path=path,
        products=len(products),
        in_e4m3=len(on),
        learning=begun if has_learned else begun + len(unused),
        short=sum(product.is_short for product in plain.values()),
        unused=len(unused) if has_learned else 0,
        inexact=tuple(name for name, p in plain.items() if p.calls >= CALLS and not p.is_on),
        adapted=len(products) - len(plain),
        error=max((product.error for product in on), default=math.nan),
        beyond=int(sum(product.quantizer[BEYOND].item() for product in on)),
        bytes=sum(product.nbytes for product in products.values()),
    )
