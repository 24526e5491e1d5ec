"""The matrix products of one model in E4M3: they learn, keep a copy of their weights, and compute.

A *product* is the matrix product of a linear layer, or of several layers with the same input. It has a
quantizer (``kernels/common/e4m3.py``), with which the kernel before the product writes the product's input in
E4M3.

A product begins by *learning*: in its first ``CALLS`` calls it runs in the model's dtype, and the largest
magnitude of its inputs is recorded. The last of these calls sets the scale of the inputs, makes a copy of the
weights in E4M3, and compares the product in E4M3 with the product in fp32. If the error is larger than
``MOST_ERROR``, the product stays in the model's dtype for good. Otherwise it runs in E4M3 from the next call
on. If memory runs out in the last call, the copy is freed, and the next call without a graph tries again.

While products learn, the model runs without CUDA graphs. Afterwards the scales of inputs never change. They
are in the memory of the GPU, where graphs read them.

The model's parameters are never changed. If a weight is written to or replaced, it is quantized again, into
the same memory: by the next call without a graph, or before the next graph. A write through ``.data`` is not
noticed.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sdfastgn.kernels.common import private
from sdfastgn.kernels.common.compile_ahead import rehearsal
from sdfastgn.kernels.common.e4m3 import AMAX, BEYOND, E4M3, INVERSE, LARGEST, SCALE, quantized
from sdfastgn.kernels.product.op import add_linear_e4m3_, linear_e4m3
from sdfastgn.kernels.product.op import linear as in_model_dtype
from sdfastgn.patches.core.class_forward import accelerate_hooks
from sdfastgn.patches.core.merged_weights import wait_for, written_now

__all__ = ["Product", "Products", "linear"]

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
# The smallest scale of a weight, for weights that are all 0.
_LEAST = 1e-12
# Why a model runs without CUDA graphs while its products learn.
REASON = "the scales of its FP8 products are not known yet"


class Products:
    """The products of one model.

    Attributes:
        calls: number of calls of the model so far in which products learned.
        products: the products.
        replaced: counts how often a product that is on got other weights, such as merged ones, or freed its
            copy.

    Args:
        hooked: the modules to search for hooks that move weights in each call. If any module of the model has
            such a hook, one of these has one.
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
        """Why the model cannot run as a graph now; None if it can. Counts the call: call it once for each."""
        if self.offloading():
            return None  # products do not learn; hooks are a reason of their own
        # A product that was left out of some calls learns in further calls, but at most in as many again.
        if CALLS <= self.calls < 2 * CALLS and not any(p.is_learning for p in self.products):
            self.calls = 2 * CALLS
        if self.calls < 2 * CALLS:
            self.calls += 1
            return REASON
        return None

    def changed(self, *, is_replaced: bool) -> None:
        """Products call this when a copy in E4M3 is new, outdated or freed.

        ``is_replaced``: True if older graphs must not run again.
        """
        self._versions = []
        self._weights = None  # a product may have other weights now
        if is_replaced:
            self.replaced += 1

    def is_outdated(self) -> bool:
        # This runs before each replay. Graphs notice by themselves when weights move.
        return self._versions_now() != self._versions

    def refresh(self) -> None:
        """Quantize the weights that were written to, and let the current stream wait for all copies."""
        for product in () if self.offloading() else self.products:
            product.refresh()
            product.wait()
        self._versions = self._versions_now()

    def _versions_now(self) -> list[int]:
        if self._weights is None:
            self._weights = [weight for product in self.products for weight in product.living()]
        return list(map(private.version_of, self._weights))


class Product:
    """The product of one or several layers with the same input. Call its methods only while autograd records
    nothing.

    Attributes:
        quantizer: the quantizer for the input, (4,) fp32.
        is_on: True if the product runs in E4M3.
        is_short: True if memory ran out in the call that ends learning. The next call tries again.
        calls: number of calls in which the product learned.
        error: the relative error in E4M3 against fp32; NaN before it is known.
        weights: weak references to the weights. The product must not keep its layers alive.
        model: weak reference to the ``Products`` of the product.
    """

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self.is_on, self.is_short, self.calls, self.error = False, False, 0, math.nan
        self.model: Callable[[], Products | None] = lambda: None
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
    def is_learning(self) -> bool:
        return 0 < self.calls < CALLS

    @property
    def has_learned(self) -> bool:
        return self.calls >= CALLS

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
        """Tell the model that the copy in E4M3 is new, outdated or freed.

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
        if self.has_learned or rehearsal.get() is not None or _is_capturing():
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


def _offloading_of(module: nn.Module) -> str:
    """What moves the weights of ``module`` in each call, by a hook on it. Empty if no hook does.

    The hook of ``enable_model_cpu_offload`` moves weights too, but not in each call.
    """
    if any(getattr(hook, "offload", None) is True for hook in accelerate_hooks(module)):
        return "accelerate's offloading"
    registry = vars(module).get("_diffusers_hook")
    return "diffusers' group offloading" if "group_offloading" in getattr(registry, "hooks", ()) else ""
