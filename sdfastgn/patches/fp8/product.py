"""One matrix product in E4M3 (fp8): chooses its scale, keeps a copy of its weights, and computes.

A *product* is the matrix product of a linear layer, or of several layers with the same input. It has a
quantizer (``kernels/common/e4m3.py``): a tensor on the GPU with the scale of the product's input. The kernel
before the product reads the quantizer, and writes the product's input in E4M3.

A product begins by *learning*: in its first ``CALLS`` calls it runs in the model's dtype, and the largest
magnitude of its inputs is recorded. The last of these calls sets the scale of the inputs, makes a copy of the
weights in E4M3, and compares the product in E4M3 with the product in fp32. If the error is larger than
``MOST_ERROR``, the product stays in the model's dtype for good. Otherwise the product runs in E4M3 from the
next call on. If memory runs out in the last call, the copy is freed, and the next call that runs without a
CUDA graph tries again.

Later inputs may have values beyond the range of E4M3. The kernel that writes them then uses a larger scale
for this call, with a CUDA graph or without. So each result is right, and the CPU waits for nothing. The
kernel also counts such values. One of the next calls reads the count (``counts.py``), and the product *learns
again*: its scale grows to cover the old and the new values.

A scale grows by powers of two: then all values but the smallest are rounded as before. If the scale has grown
by more than ``MOST_KEPT``, the next call runs without a CUDA graph, and compares the product with fp32 once
more. A product that learns again too often, or whose error is too large in this comparison, is *suspended*:
the product runs in the model's dtype. When weights of the model change, for instance because of other
adapters, inputs may be small again. Then suspended products run in E4M3 again, and a scale that has grown by
more than ``MOST_KEPT`` is set back to the first scale.

The model's parameters are never changed. If a weight is written to or replaced, it is quantized again, into
the same memory. ``products.py`` is about all products of a model: it notices such changes of weights, and
updates the scales and weights that CUDA graphs read.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sdfastgn.kernels.common.compile_ahead import rehearsal
from sdfastgn.kernels.common.e4m3 import (
    E4M3,
    INVERSE,
    LARGEST,
    LEARNED,
    MOST,
    NUMBERS,
    SCALE,
    quantized,
)
from sdfastgn.kernels.product.op import add_linear_e4m3_, linear_e4m3
from sdfastgn.kernels.product.op import linear as in_model_dtype
from sdfastgn.patches.lora.merged_weights import wait_for, written_now

if TYPE_CHECKING:
    from sdfastgn.patches.fp8.products import Products

_Written = TypeVar("_Written")

# Number of calls of a matrix product in the model's dtype, before its first call in E4M3 (fp8). These calls
# record the largest input, from which the scale is computed. Most images take 20 to 50 steps of one call
# each, so these are all or most steps of an image. From one step to the next, the inputs change little.
CALLS = 30
# The scale of a matrix product's input leaves room for inputs that are larger than the largest input so far
# by this factor. The room costs little: E4M3 has the same relative error for all but its smallest values.
HEADROOM = 2.0
# Maximum relative error of a matrix product in E4M3 (fp8) against fp32. A product with a larger error stays
# in the model's dtype. For random numbers the error is 0.037.
MOST_ERROR = 0.06
# If inputs exceed the range, the scale of a matrix product grows. If this happens more often than this number
# while the model's weights stay the same, the product is suspended: it runs in the model's dtype.
MOST_AGAIN = 4
# A matrix product that was suspended this often stays in the model's dtype for good. The reason is that the
# model's CUDA graphs must be captured again after each suspension and after each end of a suspension.
MOST_SUSPENSIONS = 3
# If the scale of a matrix product's inputs has grown by at most this factor since it was first chosen, the
# scale stays when weights change, and the error is not measured again. At a factor of 16 the relative error
# of random numbers with a wide distribution was 0.040 instead of 0.037, at 64 it was 0.056.
MOST_KEPT = 16
# The error of a product in E4M3 is measured with at most this many rows of its input. More rows, as of large
# images, would cost time and memory.
_ROWS = 4096
# The smallest scale of weights in E4M3. Without it the scale of weights that are all 0 would be 0.
_LEAST = 1e-12


class Product:
    """The matrix product of one linear layer, or of several with the same input, which may run in E4M3.

    Call the methods only while autograd records nothing.

    Attributes:
        quantizer: a tensor (``NUMBERS``,) fp32 with the scale of the input. After the first calls, which
            choose the scale, this tensor is never changed: each call has a copy, and a new scale has a new
            tensor.
        is_on: True if the product runs in E4M3.
        is_due: True if the scale has grown much, and the next call without a CUDA graph must therefore
            compare the product in E4M3 with fp32.
        is_growing: True if the product runs in the model's dtype because its scale had to grow too often.
        growth: the present scale divided by the first scale.
        again: how often the scale had to grow.
        is_short: True if memory ran out in the call that chooses the scale. The next call tries again.
        calls: number of calls so far in which inputs were recorded to choose the scale.
        error: the relative error of the product in E4M3 against fp32; NaN before it is known.
        dtype: the dtype of the weights, and of the product's results.
        weights: weak references to the weights. The product must not keep its layers alive.
        device: the device of the weights' copy in E4M3.
        model: weak reference to the ``Products`` object, which holds all products of the model.
    """

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self.is_on, self.is_short, self.calls, self.error = False, False, 0, math.nan
        self.is_due = self.is_growing = self._is_suspended = False
        self.again = self._writes = self._again_now = self._suspensions = 0
        self.model: Callable[[], Products | None] = lambda: None
        self.weights = tuple(map(weakref.ref, weights))
        first = weights[0]
        self._shape = sum(map(len, weights)), first.shape[1]
        self.dtype, self.device = first.dtype, first.device
        with torch.inference_mode(False):
            self.quantizer = torch.zeros(NUMBERS, dtype=torch.float32, device=first.device)
        self._of_graphs = self.quantizer
        self._learned = 0.0  # the scale of the input that was chosen first; 0 before
        self.growth = 1
        # A dict from the growth of the scale since it was first chosen to the tensor with the scale
        # (*quantizer*). All of these tensors are kept, because calls in other threads may still read an older
        # one.
        self._quantizers = {1: self.quantizer}
        self._e4m3 = self._scale = self.quantizer[:0]
        self._state = _state(weights)
        self._is_outdated = False  # True if the copy of the weights in E4M3 must be made again
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

    def begin(self, model: Products, quantizer: Tensor) -> None:
        """Let this product belong to ``model``, whose CUDA graphs read the scale from ``quantizer``."""
        self.model, self._of_graphs = weakref.ref(model), quantizer
        quantizer.copy_(self.quantizer)

    def fits(self, weights: Sequence[Tensor]) -> bool:
        """True if this matrix product can compute with ``weights`` in place of its former weights.

        The dtype, the device, the number of columns and the total number of rows must be as before.
        """
        return sum(map(len, weights)) == self._shape[0] and all(
            (w.dtype, w.device, w.shape[1]) == (self.dtype, self.device, self._shape[1]) for w in weights
        )

    def is_of(self, weights: Sequence[Tensor]) -> bool:
        """True if this product computes with ``weights``, and has no outdated copy of them in E4M3.

        An outdated copy is written again first. False if ``weights`` have another dtype, device or size than
        the product's, or if a CUDA graph is being captured and the copy is outdated.
        """
        known, model = self.weights, self.model()
        if model is not None:
            model.enter(self)
        is_known = len(known) == len(weights) and all(r() is w for r, w in zip(known, weights, strict=True))
        is_same = is_known and self._state == _state(weights)
        if is_same and not self._is_outdated:
            return True
        # During the capture of a CUDA graph no weights are quantized, because each replay would do it again.
        if not self.fits(weights) or is_capturing():
            return False
        # If an error stops ``_quantize``, only a part of the copy may be written. So the copy is marked as
        # outdated until ``_quantize`` returns.
        self.touch()
        if model is not None and not is_same:
            model.writes += 1
        self._quantize(weights)
        self.weights = tuple(map(weakref.ref, weights))
        self._changed(is_replaced=not is_known)
        return True

    def is_any_of(self, ids: set[int]) -> bool:
        """True if the id of one of the product's weights is in ``ids``."""
        return any(id(ref()) in ids for ref in self.weights)

    def touch(self) -> None:
        """Mark the copy of the weights in E4M3 as outdated. It is written again before it is used."""
        self._is_outdated = True
        self._changed(is_replaced=False)

    def _changed(self, *, is_replaced: bool) -> None:
        """Tell the ``Products`` object of the model that the copy of the weights in E4M3 has changed.

        The copy may be new, outdated or freed. ``is_replaced``: True if it was freed or is of other weights.
        If the product runs in E4M3, CUDA graphs that read the copy must then not run again. Otherwise no
        graph reads it.
        """
        model = self.model()
        if model is not None:
            model.changed(is_replaced=is_replaced and self.is_on)

    def refresh(self) -> None:
        """Write the copy of the weights in E4M3 again if the weights were written to since it was made."""
        weights = self.living()
        if len(weights) == len(self.weights):
            self.is_of(weights)

    def living(self) -> list[Tensor]:
        """Returns those weights of the product that still exist. It has only weak references to them."""
        return [weight for ref in self.weights if (weight := ref()) is not None]

    @contextlib.contextmanager
    def moving(self, owner: nn.Module) -> Iterator[None]:
        """A context in which parameters of ``owner`` may move.

        If one moves, the weights' copy in E4M3 is freed. A weight is a parameter of ``owner``, or the merged
        weight of such a parameter and its adapters.
        """
        weights, before = self.living(), _addresses(owner.parameters())
        # The product's weak references to weights are removed meanwhile: with
        # ``torch.__future__.set_swap_module_params_on_conversion``, PyTorch moves no tensor that has one.
        self.weights = ()
        try:
            yield
        finally:
            self.weights = tuple(map(weakref.ref, weights))
            if self.nbytes and _addresses(owner.parameters()) != before:
                self.free()

    def free(self) -> None:
        """Free the weights' copy in E4M3. If the product runs in E4M3, the next call makes the copy again."""
        self._e4m3 = self._scale = self.quantizer[:0]
        self._is_outdated = True
        self._changed(is_replaced=True)

    def _quantize(self, weights: Sequence[Tensor]) -> None:
        """Update the copy of the weights in E4M3 if the product runs in E4M3 or is suspended."""
        state = _state(weights)
        if self.is_on or self._is_suspended:
            self._write(weights)
        self._state, self._is_outdated = state, False

    def _write(self, weights: Sequence[Tensor]) -> None:
        """Write the weights into the copy in E4M3, which is allocated if it does not exist."""
        model = self.model()
        if model is not None:
            model.note(self, weights)
        with torch.inference_mode(False), torch.no_grad():
            if not self.nbytes:
                self._scale = torch.empty(1, dtype=torch.float32, device=self.device)
                self._e4m3 = torch.empty(self._shape, dtype=E4M3, device=self.device)
            largest = torch.stack([_largest(weight) for weight in weights]).amax()
            self._scale.copy_((largest / LARGEST).clamp(min=_LEAST))
            start = 0
            for weight in weights:
                scaled = (weight.float() / self._scale).clamp(-LARGEST, LARGEST)
                self._e4m3[start : start + len(weight)].copy_(scaled.to(E4M3))
                start += len(weight)
        self._written = written_now(self.device)

    def quantizer_now(self) -> Tensor | None:
        """Returns for one call a tensor with the scale of the input and counters for kernels (*quantizer*).

        Returns None if the call must run in the model's dtype. During the capture of a CUDA graph this is the
        tensor that ``Products.refresh`` updates for all graphs of the model. Any other call gets a copy of
        its own.
        """
        in_capture = is_capturing()
        if not in_capture:
            self.follow_weights()
        if not self.is_on or (self.is_due and not in_capture and rehearsal.get() is None):
            return None
        if in_capture:
            return self._of_graphs if self._of_graphs.device == self.device else None
        self.wait()
        return self.quantizer.clone()

    def operands(self) -> tuple[Tensor, Tensor]:
        """Returns the weights in E4M3 and their scale. The current stream waits until both are written."""
        # During a capture nothing waits here. Before a graph runs, ``Products.refresh`` waits.
        if not is_capturing():
            self.wait()
        return self._e4m3, self._scale

    def wait(self) -> None:
        """Make the current stream wait until the weights in E4M3 are written."""
        wait_for(self._written, self.device)

    def note(self, quantizer: Tensor) -> None:
        """Record that a kernel outside of a CUDA graph has written the product's input with ``quantizer``.

        This tensor has the scale, and the kernel's count of values beyond the range of E4M3.
        """
        model = self.model()
        if model is not None:
            model.counts.note(self, quantizer)

    def follow_count(self, numbers: Sequence[float]) -> None:
        """If inputs of a call were beyond the range of E4M3, let the scale grow, so that it covers them.

        ``numbers``: the call's scale and counters (its *quantizer*) after the call. One of them is the
        largest input, which the kernel has stored.
        """
        # ``is_present`` is False if the scale has been changed since the call.
        is_present = numbers[LEARNED] == self._learned * self.growth
        if not (self.is_on and is_present and numbers[MOST] > LARGEST):
            return
        self._grow(self.growth * 2 ** math.ceil(math.log2(HEADROOM * numbers[MOST] / LARGEST)))
        self.again += 1
        self._again_now += 1
        self.is_growing = self._again_now > MOST_AGAIN
        if self.is_growing:
            self._suspend()
        elif self.growth > MOST_KEPT:
            self.is_due = True
            model = self.model()
            if model is not None:
                model.compare_scales()

    def follow_weights(self) -> None:
        """If weights of the model have changed, end a suspension, and undo much growth of the input's scale.

        While a product is suspended, it runs in the model's dtype, because inputs were beyond the range of
        E4M3 too often. Now it runs in E4M3 again. A scale that has grown by more than ``MOST_KEPT`` is set
        back to the first scale: with other weights inputs may be as small as at first, and a large scale
        would be inexact for them.
        """
        model = self.model()
        if model is None or model.writes == self._writes:
            return
        self._writes, self._again_now = model.writes, 0
        if self.growth > MOST_KEPT:
            self._grow(1)
            self.is_due = False
        if self._is_suspended:
            self.is_on, self.is_growing, self._is_suspended = True, False, False
            self._changed(is_replaced=True)

    def _suspend(self) -> None:
        # From now on the product runs in the model's dtype. The copy of the weights in E4M3 is not freed,
        # because a CUDA graph in another thread may be reading it.
        self.is_on = False
        self._suspensions += 1
        self._is_suspended = self._suspensions < MOST_SUSPENSIONS
        model = self.model()
        if model is not None:  # CUDA graphs that compute the product in E4M3 must not run again
            model.changed(is_replaced=True)

    def _grow(self, growth: int) -> None:
        """Set the scale of the inputs to the first scale times ``growth``, a power of two."""
        self.wait()
        if growth not in self._quantizers:
            with torch.inference_mode(False):
                quantizer = self._quantizers[1].clone()
            quantizer[SCALE : LEARNED + 1] *= growth
            quantizer[INVERSE] /= growth
            self._written = written_now(self.device)
            self._quantizers[growth] = quantizer
        self.growth, self.quantizer = growth, self._quantizers[growth]
        model = self.model()
        if model is not None:
            model.scales_changed()

    def learn(self, x: Tensor, weights: Sequence[Tensor]) -> None:
        """Record the largest magnitude in x (..., depth), an input in the model's dtype.

        The last of the first ``CALLS`` calls also chooses the input's scale. Later calls record nothing. But
        if the scale has grown much, the next call compares the product of x in E4M3 with fp32.
        """
        # A rehearsal runs a model only to compile its kernels, and leaves out some kernels. So x may be
        # uninitialized. During the capture of a CUDA graph nothing is recorded, because each replay would
        # record again.
        if rehearsal.get() is not None or is_capturing():
            return
        if self.has_learned:
            if self.is_on and self.is_due:
                self._compare(x, weights)
            return
        model = self.model()
        if self.calls == 0 and model is not None and model.calls >= CALLS:
            # This layer was not called until now, for instance because it had an adapter that was not merged.
            # So the model runs without CUDA graphs again, until the scale of this layer's input is chosen.
            model.calls = 0
        most = self.quantizer[MOST]
        torch.maximum(most, _largest(x), out=most)
        if self.calls + 1 == CALLS:
            try:
                self._finish(x, weights)
            except torch.OutOfMemoryError:
                # Without sdfastgn this call would not run out of memory. So the call goes on in the model's
                # dtype.
                self.is_short = True
                return
            finally:
                if not self.is_on:
                    self.free()
        self.calls += 1
        self.is_short = False

    def _finish(self, x: Tensor, weights: Sequence[Tensor]) -> None:
        """Choose the input's scale, quantize the weights, and decide whether the product runs in E4M3."""
        largest = self.quantizer[MOST].item()
        if not 0 < largest < math.inf:
            return
        scale = HEADROOM * largest / LARGEST
        self.quantizer[SCALE : LEARNED + 1], self.quantizer[INVERSE] = scale, 1 / scale
        self.quantizer[MOST] = 0
        self._learned = self.quantizer[LEARNED].item()
        self._state, self._is_outdated = _state(weights), False
        self._write(weights)
        self.error = self._error(x, weights)
        self._of_graphs.copy_(self.quantizer)
        self.is_on = self.error <= MOST_ERROR

    def _compare(self, x: Tensor, weights: Sequence[Tensor]) -> None:
        """Compare the product in E4M3 with fp32. If the error is large, run in the model's dtype again."""
        self.is_due = False
        # If x is all 0, or has an infinity or NaN, the relative error would be NaN.
        if not 0 < _largest(x).item() < math.inf:
            return
        # If memory runs out, the call goes on without the error, as it would without sdfastgn.
        with contextlib.suppress(torch.OutOfMemoryError):
            self.error = self._error(x, weights)
        if self.error > MOST_ERROR:
            self._suspend()

    def _error(self, x: Tensor, weights: Sequence[Tensor]) -> float:
        """Computes the relative error, against fp32, of the matrix product of x in E4M3."""
        x = x.reshape(-1, x.shape[-1])
        x = x[:: -(-len(x) // _ROWS)]
        expected = torch.cat([F.linear(x.float(), weight.float()) for weight in weights], -1)
        call = ProductCall(self, self.quantizer.clone())
        found = call(quantized(x, call.quantizer)).float()  # type: ignore[arg-type]
        return ((found - expected).norm() / expected.norm()).item()


class ProductCall:
    """One call of a matrix product that may run in E4M3.

    Attributes:
        product: the matrix product.
        quantizer: a tensor with the scale of the input; None if this call runs in the model's dtype. Each
            call has its own copy of this tensor, because another thread may change the product's scale
            meanwhile. Only while a CUDA graph is captured, this is the tensor that all graphs of the model
            share.
    """

    __slots__ = ("product", "quantizer")

    def __init__(self, product: Product, quantizer: Tensor | None) -> None:
        self.product, self.quantizer = product, quantizer

    def written(self, kernel: Callable[..., _Written]) -> _Written:
        """Returns ``kernel(quantizer=...)``: the kernel writes the input of the matrix product.

        The kernel writes E4M3 if it gets a tensor with a scale, and the model's dtype if it gets None.
        """
        found = kernel(quantizer=self.quantizer)
        # The product notes the tensor, because the kernel's count of values beyond the range of E4M3 is read
        # later. A rehearsal, which runs a model only to compile its kernels, does not count: kernels may read
        # uninitialized memory. CUDA graphs count in a tensor that they share.
        if not (self.quantizer is None or rehearsal.get() is not None or is_capturing()):
            self.product.note(self.quantizer)
        return found

    def learn(self, x: Tensor, weights: Sequence[Tensor]) -> None:
        self.product.learn(x, weights)

    def __call__(self, x: Tensor) -> Tensor:
        """Computes the matrix product of x (..., depth), which is in E4M3 with this call's scale.

        Adds no bias.
        """
        e4m3, scale = self.product.operands()
        return linear_e4m3(x, e4m3, (self._scale(), scale), self.product.dtype)

    def add_(self, total: Tensor, x: Tensor) -> None:
        """Adds the matrix product of x, which is in E4M3, to the contiguous ``total`` (..., columns)."""
        e4m3, scale = self.product.operands()
        flat = total.view(-1, total.shape[-1]), x.view(-1, x.shape[-1])
        add_linear_e4m3_(*flat, e4m3, (self._scale(), scale))

    def _scale(self) -> Tensor:
        return self.quantizer[SCALE : SCALE + 1]  # type: ignore[index]


def written(call: ProductCall | None, kernel: Callable[..., _Written]) -> _Written:
    """Returns what ``kernel`` writes: the input of a matrix product, in E4M3 or in the model's dtype.

    It is E4M3 if ``call``, a call of the product, runs in E4M3. It is the model's dtype otherwise, and if
    ``call`` is None.
    """
    return kernel(quantizer=None) if call is None else call.written(kernel)


def linear(call: ProductCall | None, x: Tensor, weight: Tensor) -> Tensor:
    """Computes ``x @ weight.T``, in E4M3 if x is in E4M3. Else the maximum of |x| is recorded.

    ``call``: a call of the matrix product with ``weight``. It is None if this product cannot run in E4M3.
    Then x is in the dtype of ``weight``, and nothing is recorded. The product chooses its scale from the
    recorded maxima.
    """
    if call is not None:
        if x.dtype is E4M3:
            return call(x)
        call.learn(x, [weight])
    return in_model_dtype(x, weight)


def _largest(x: Tensor) -> Tensor:
    """The largest magnitude in x, fp32 without dimensions. NaN if x has a NaN."""
    return torch.linalg.vector_norm(x, math.inf, dtype=torch.float32)


def _addresses(tensors: Iterable[Tensor]) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]


def _state(weights: Iterable[Tensor]) -> list[tuple[int, int]]:
    """Addresses and versions of ``weights``. A change shows that a weight was moved or written to."""
    return [(weight.data_ptr(), weight._version) for weight in weights]


def is_capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
