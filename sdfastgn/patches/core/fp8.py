"""Matrix products of transformer blocks in E4M3 (``optimize(..., precision="fp8")``).

A *product* is the matrix product of a linear layer, or of several layers with the same input. It has a copy
of the weights in E4M3, and a quantizer (``kernels/common/e4m3.py``). The kernel before the product writes the
product's input in E4M3 with this quantizer.

A product begins by *learning*: in its first ``CALLS`` calls it runs in the model's dtype, and the largest
magnitude of its inputs is recorded. The last of these calls sets the scale, and compares the product in E4M3
with the product in the model's dtype. If the error is larger than ``MOST_ERROR``, the product stays in the
model's dtype for good. Otherwise it runs in E4M3 from the next call on.

While products learn, the model runs without CUDA graphs. Afterwards the scales never change. They are in the
memory of the GPU, where graphs read them.

The model's parameters are never changed. If a parameter is written to, the next call quantizes it again, into
the same memory. A write through ``.data`` is not noticed. If a parameter is replaced, or its layer gets an
adapter, the product runs in the model's dtype.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sdfastgn.kernels.common import private
from sdfastgn.kernels.common.compile_ahead import rehearsal
from sdfastgn.kernels.common.e4m3 import AMAX, BEYOND, E4M3, INVERSE, LARGEST, SCALE, quantized
from sdfastgn.kernels.product.op import add_linear_e4m3_, linear_e4m3
from sdfastgn.kernels.product.op import linear as in_model_dtype
from sdfastgn.patches.core.merged_adapters import is_wrapper, wrapped_layer

__all__ = [
    "Fp8",
    "Product",
    "allow",
    "device_reason",
    "forget",
    "is_allowed",
    "product_of",
    "reason_now",
    "state_of",
]

# Number of calls in which a product learns. Most images take 20 to 50 steps, and the magnitudes of a step are
# close to those of the steps beside it.
CALLS = 30
# The scale leaves room for values that are larger than the largest value so far by this factor. The room
# costs little: E4M3 has the same relative error for all but its smallest values.
HEADROOM = 2.0
# Maximum relative error of a product in E4M3. For random numbers it is 0.037.
MOST_ERROR = 0.06
# The error is measured with about this many rows of the input, because large images have many.
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
        inexact: number of products that stay in the model's dtype because of their error in E4M3.
        adapted: number of products that run in the model's dtype because a layer has a LoRA adapter.
        error: the largest error of the products that run in E4M3; NaN if there is none.
        beyond: number of values so far that were beyond the range of E4M3.
        bytes: size of the weights in E4M3.
    """

    path: str
    products: int
    in_e4m3: int
    learning: int
    inexact: int
    adapted: int
    error: float
    beyond: int
    bytes: int


class _Model:
    """The products of one model. ``calls``: number of calls of the model so far in which products learned."""

    def __init__(self) -> None:
        self.calls = 0
        self.products: list[Product] = []
        self._versions: list[int | None] = []

    def reason_now(self) -> str | None:
        # A product that was left out of some calls learns in further calls, but at most in as many again.
        if CALLS <= self.calls < 2 * CALLS and not any(0 < p.calls < CALLS for p in self.products):
            self.calls = 2 * CALLS
        if self.calls < 2 * CALLS:
            self.calls += 1
            return REASON
        # This takes 0.1 ms of CPU time for SDXL. Graphs notice by themselves when weights move.
        weights = [ref() for product in self.products for ref in product.weights]
        versions = [None if weight is None else weight._version for weight in weights]
        if versions != self._versions and not _is_capturing():
            for product in self.products:
                product.refresh()
            self._versions = versions
        return None


class Product:
    """The product of one or several layers with the same input. Its methods need inference without autograd.

    Attributes:
        quantizer: the quantizer for the input, (4,) fp32.
        is_on: True if the product runs in E4M3.
        calls: number of calls in which the product learned.
        error: the relative error in E4M3 against the model's dtype; NaN before it is known.
        weights: weak references to the weights. The product must not keep its layers alive.
        model: weak reference to the ``_Model`` of the product.
    """

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self.is_on, self.calls, self.error = False, 0, math.nan
        self.model: Callable[[], _Model | None] = lambda: None
        self.weights = tuple(map(weakref.ref, weights))
        first = weights[0]
        with torch.inference_mode(False):
            self.quantizer = torch.zeros(4, dtype=torch.float32, device=first.device)
            shape = (sum(map(len, weights)), first.shape[1])
            self._e4m3 = torch.empty(shape, dtype=E4M3, device=first.device)
            self._scale = torch.empty(1, dtype=torch.float32, device=first.device)
        self._dtype = first.dtype
        self._quantize(weights)

    @property
    def nbytes(self) -> int:
        return self._e4m3.nbytes

    def is_of(self, weights: Sequence[Tensor]) -> bool:
        """True if this is the product of ``weights``. It is brought up to date first."""
        known = self.weights
        if len(known) != len(weights) or any(r() is not w for r, w in zip(known, weights, strict=True)):
            return False
        return self._state == _state(weights) or self._renew(weights)

    def is_any_of(self, ids: set[int]) -> bool:
        """True if the id of one of the weights is in ``ids``."""
        return any(id(ref()) in ids for ref in self.weights)

    def refresh(self) -> None:
        """Quantize the weights again if they were written to."""
        weights = [weight for ref in self.weights if (weight := ref()) is not None]
        if len(weights) == len(self.weights) and self._state != _state(weights):
            self._renew(weights)

    def _renew(self, weights: Sequence[Tensor]) -> bool:
        """Quantize ``weights`` again. False if they do not fit, or in a capture, which would repeat it."""
        like = self._e4m3
        fits = sum(map(len, weights)) == len(like) and all(
            (w.dtype, w.device, w.shape[1:]) == (self._dtype, like.device, like.shape[1:]) for w in weights
        )
        if not fits or _is_capturing():
            return False
        self._quantize(weights)
        return True

    def _quantize(self, weights: Sequence[Tensor]) -> None:
        with torch.inference_mode(False), torch.no_grad():
            largest = torch.stack([_largest(weight) for weight in weights]).amax()
            self._scale.copy_((largest / LARGEST).clamp(min=_LEAST))
            start = 0
            for weight in weights:
                scaled = (weight.float() / self._scale).clamp(-LARGEST, LARGEST)
                self._e4m3[start : start + len(weight)].copy_(scaled.to(E4M3))
                start += len(weight)
        self._state = _state(weights)

    @property
    def quantizer_now(self) -> Tensor | None:
        """The quantizer to write the input with; None if the product needs the model's dtype."""
        if not self.is_on:
            return None
        # A rehearsal runs kernels on uninitialized memory. Its values must not be counted.
        return self.quantizer if rehearsal.get() is None else self.quantizer.clone()

    def __call__(self, x: Tensor) -> Tensor:
        """Computes the product of x (..., depth), which was written with ``quantizer``. There is no bias."""
        return linear_e4m3(x, self._e4m3, self._scales, self._dtype)

    def add_(self, total: Tensor, x: Tensor) -> None:
        """Adds the product of x to ``total`` (..., columns), which is contiguous, in place."""
        flat = total.view(-1, total.shape[-1]), x.view(-1, x.shape[-1])
        add_linear_e4m3_(*flat, self._e4m3, self._scales)

    @property
    def _scales(self) -> tuple[Tensor, Tensor]:
        return self.quantizer[SCALE : SCALE + 1], self._scale

    def learn(self, x: Tensor, weights: Sequence[Tensor]) -> None:
        """Learn from an input x (..., depth) in the model's dtype, unless learning is over."""
        # Kernels do not run in rehearsals. A capture would learn again at each replay.
        if self.calls >= CALLS or rehearsal.get() is not None or _is_capturing():
            return
        model = self.model()
        if self.calls == 0 and model is not None and model.calls >= CALLS:
            model.calls = 0  # this layer had an adapter until now: the model runs without graphs once more
        self.calls += 1
        amax = self.quantizer[AMAX]
        torch.maximum(amax, _largest(x), out=amax)
        if self.calls == CALLS:
            self._finish(x, weights)

    def _finish(self, x: Tensor, weights: Sequence[Tensor]) -> None:
        """Choose the scale, and decide whether the product runs in E4M3."""
        largest = self.quantizer[AMAX].item()
        if 0 < largest < math.inf:
            scale = HEADROOM * largest / LARGEST
            self.quantizer[SCALE], self.quantizer[INVERSE] = scale, 1 / scale
            x = x.reshape(-1, x.shape[-1])
            x = x[:: -(-len(x) // _ROWS)]
            expected = torch.cat([F.linear(x, weight) for weight in weights], -1).float()
            found = self(quantized(x, self.quantizer)).float()
            self.error = ((found - expected).norm() / expected.norm()).item()
            self.quantizer[BEYOND] = 0
        self.is_on = self.error <= MOST_ERROR
        if not self.is_on:
            self._e4m3 = self._e4m3[:0].clone()  # frees the memory


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


def _state(weights: Iterable[Tensor]) -> list[tuple[int, int]]:
    """Addresses and versions of ``weights``. They show whether a weight was written to or moved."""
    return [(weight.data_ptr(), weight._version) for weight in weights]


def _is_capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


# ---- products of models

# Model -> its products.
_models: weakref.WeakKeyDictionary[nn.Module, _Model] = weakref.WeakKeyDictionary()
# Module -> its product. It is the linear layer, or the module that owns the layers with the same input.
_products: weakref.WeakKeyDictionary[nn.Module, Product] = weakref.WeakKeyDictionary()


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
    return model in _models and all(product_of(owner, weights) is not None for owner, weights in found)


def allow(model: nn.Module, found: Iterable[tuple[nn.Module, Sequence[Tensor]]]) -> None:
    """Give ``model`` products in E4M3. A product that exists for the same weights stays.

    ``found``: the owner of each product, and its weights. Drop the graphs of the model first.
    """
    own = _models[model] = _Model()
    for owner, weights in found:
        product = _products.get(owner)
        if product is None or not product.is_of(weights):
            product = _products[owner] = Product(weights)
        product.model = weakref.ref(own)
    own.products = [_products[m] for m in model.modules() if m in _products]


def forget(module: nn.Module) -> None:
    """Drop all that this file keeps for ``module``."""
    _models.pop(module, None)
    _products.pop(module, None)


def is_used() -> bool:
    """True if any model has products in E4M3."""
    return len(_products) > 0


def product_of(owner: nn.Module, weights: Sequence[Tensor]) -> Product | None:
    """The product of ``owner`` in E4M3. None if there is none, or if it has other weights."""
    product = _products.get(owner)
    return product if product is not None and product.is_of(weights) else None


def reason_now(model: nn.Module) -> str | None:
    """Why ``model`` cannot run as a graph now; None if it can. Call it once before each call of ``model``."""
    own = _models.get(model)
    return None if own is None else own.reason_now()


def state_of(root: nn.Module, path: str) -> Iterator[Fp8]:
    """Yields what the report says about each model in ``root`` that has products. ``path``: of ``root``."""
    for name, model in root.named_modules(prefix=path):
        own = _models.get(model)
        if own is not None:
            layers = [wrapped_layer(module) for module in model.modules() if is_wrapper(module)]
            adapted = {id(layer.weight) for layer in layers}
            yield _described(name or type(model).__name__, own.products, adapted)


def _described(path: str, products: list[Product], adapted: set[int]) -> Fp8:
    """``adapted``: ids of the weights whose layers have adapters."""
    without = [product for product in products if not product.is_any_of(adapted)]
    count, products = len(products), without
    on = [product for product in products if product.is_on]
    learning = sum(product.calls < CALLS for product in products)
    beyond = sum(product.quantizer[BEYOND].item() for product in on)
    return Fp8(
        path=path,
        products=count,
        in_e4m3=len(on),
        learning=learning,
        inexact=len(products) - len(on) - learning,
        adapted=count - len(products),
        error=max((product.error for product in on), default=math.nan),
        beyond=int(beyond),
        bytes=sum(product.nbytes for product in products),
    )
