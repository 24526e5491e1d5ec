"""All matrix products of one model that may run in E4M3 (fp8), for the model's calls and CUDA graphs.

In its first calls a product records the magnitude of its inputs, to choose a scale (``product.py``).
Meanwhile the model runs without CUDA graphs. Inputs beyond the range of E4M3 let a scale grow. If it has
grown much, one call also runs without a CUDA graph, and compares the product in E4M3 with fp32. Graphs read
the scales of inputs from memory, so they use a scale that has grown without a new capture.

A weight that was written to or replaced is quantized again by the next call without a CUDA graph, or before
the next replay. PyTorch does not count all writes into tensors. So the contents of all weights are compared
too, when a call without a CUDA graph begins, and while a CUDA graph runs (``lora/contents.py``).

If hooks move the weights in each call, all copies of the weights in E4M3 are freed, and the products run in
the model's dtype.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from sdfastgn.kernels.common import private
from sdfastgn.kernels.common.e4m3 import INVERSE, MOST, NUMBERS, TOTAL
from sdfastgn.patches.fp8 import product as fp8_product
from sdfastgn.patches.fp8.counts import Counts
from sdfastgn.patches.fp8.product import Product
from sdfastgn.patches.lora.contents import Calls, Contents
from sdfastgn.patches.lora.merged_weights import is_merged_weight
from sdfastgn.patches.swap.class_forward import accelerate_hooks

# The reason, for the report, why a model runs without CUDA graphs while its matrix products in E4M3 have not
# chosen the scales of their inputs yet.
REASON = "the scales of its FP8 products are not known yet"
# The reason, for the report, why one call of a model runs without a CUDA graph after a scale has grown.
COMPARE_REASON = "scales of its FP8 products have grown, and are compared with fp32"


class Products:
    """The matrix products of one model that may run in E4M3.

    Attributes:
        calls: number of calls of the model so far that recorded inputs to choose the inputs' scales.
        products: the matrix products.
        quantizers: the scales that CUDA graphs read, and the counters that they write, (products,
            ``NUMBERS``). ``refresh`` writes the scales.
        writes: counts how often weights were found to have changed.
        replaced: counts how often older CUDA graphs became invalid: a product in E4M3 got other weights,
            such as merged ones, freed the copy of its weights, or stopped or resumed running in E4M3.
        counts: counts the values beyond the range of E4M3 in the model's calls.

    Args:
        hooked: the modules to search for hooks that move weights in each call. If the model has such hooks,
            at least one of these modules has one.
    """

    def __init__(self, hooked: Sequence[nn.Module]) -> None:
        self.calls = self.replaced = self.writes = 0
        self.counts = Counts()
        self._hooked = tuple(map(weakref.ref, hooked))
        self._was_offloaded = False
        self.products: list[Product] = []
        self.quantizers = torch.empty(0, NUMBERS)
        self._is_stale = False  # True if a scale has changed, and must be written to ``quantizers``
        self._compares = False  # True if the next call compares products with fp32, without a CUDA graph
        self._began = Calls()
        self._contents: Contents | None = None
        self._weights: list[Tensor] | None = None
        self._compared: list[Tensor] | None = None  # weights that ``_sources()`` found last; None if unknown
        self._versions: list[int] = []

    def begin(self, products: list[Product]) -> None:
        """Set the matrix products of the model. Call this only while the model has no CUDA graphs."""
        self.counts.beyond = self.beyond()
        self.products = products
        with torch.inference_mode(False), torch.no_grad():
            device = products[0].quantizer.device if products else None
            self.quantizers = torch.zeros(len(products), NUMBERS, dtype=torch.float32, device=device)
            for i, product in enumerate(products):
                product.begin(self, self.quantizers[i])
                product.touch()  # the copy of weights may be outdated: make it again before its use

    def offloading(self) -> str:
        """The name of what moves the weights in each call, such as group offloading; empty if nothing does.

        If something does, the copies of the weights in E4M3 are freed.
        """
        found = offloading_of(self._hooked)
        if found and not self._was_offloaded:
            for product in self.products:
                if product.nbytes:
                    product.free()
        self._was_offloaded = bool(found)
        return found

    def reason_now(self) -> str | None:
        """The reason why FP8 prevents a CUDA graph in the present call; None if it does not.

        This method counts calls of the model, so it must run exactly once for each of them.
        """
        # With offloading, no product records inputs. No reason is returned, because the code that looks for
        # hooks rules out CUDA graphs.
        if self.offloading():
            return None
        # The model's first ``CALLS`` calls run without CUDA graphs. A matrix product that did not run in some
        # of them has not recorded enough inputs yet. Then up to ``CALLS`` more calls run without CUDA graphs.
        calls = fp8_product.CALLS
        if calls <= self.calls < 2 * calls and not any(p.is_learning for p in self.products):
            self.calls = 2 * calls
        if self.calls < 2 * calls:
            self.calls += 1
            return REASON
        self.follow_counts()
        if self._compares:
            self._compares = False
            return COMPARE_REASON
        return None

    def changed(self, *, is_replaced: bool) -> None:
        """A matrix product calls this when the copy of its weights in E4M3 is new, outdated or freed.

        It also calls this when it stops or resumes running in E4M3.

        ``is_replaced``: True if CUDA graphs captured before this must not run again.
        """
        self._versions = []
        self._weights = self._compared = None  # both lists may be outdated, and are made again
        if is_replaced:
            self.replaced += 1

    def scales_changed(self) -> None:
        """A matrix product calls this when its scale has changed.

        ``refresh`` then writes the new scale to where CUDA graphs read it.
        """
        self._is_stale = True

    def enter(self, product: Product) -> None:
        """Call this before ``product`` runs. If a call of the model begins here, look for changes.

        Changes of the weights' contents make copies in E4M3 outdated. Counts that have arrived on the CPU let
        scales grow. A copy of newer counts to the CPU is started.
        """
        if self._began.begins(product) and not fp8_product.is_capturing():
            self.compare()
            self.follow_counts()
            self.counts.copy_noted()

    def compare(self) -> None:
        """If other code has written into a weight, mark the copies in E4M3 of all weights as outdated."""
        if self._contents is not None and not self._contents.are_same(self._compared_now()):
            self._touch()

    def note(self, product: Product, weights: Sequence[Tensor]) -> None:
        """Call this before ``product`` makes a copy of ``weights`` in E4M3.

        If the former contents of the model's weights are unknown, record the present contents, and mark the
        copies of all other products as outdated.
        """
        sources = self._sources(product, weights)
        if sources and (self._contents is None or not self._contents.are_of(sources)):
            for other in self.products:
                if other is not product:
                    other.touch()
            self._contents = Contents(sources, [False] * len(sources))

    def note_replay(self) -> None:
        """Begin to check if the weights still have the contents that were copied in E4M3.

        Call this just before a CUDA graph starts in the current stream.

        After the start, ``has_same_contents`` returns the result.
        """
        if self._contents is not None:
            self._contents.begin()

    def has_same_contents(self) -> bool:
        """True if the CUDA graph that was started last reads copies in E4M3 of the weights' present contents.

        This method does not wait for the end of the graph.
        """
        if self._contents is None:
            return True
        sources = self._compared_now()
        if self._contents.are_of(sources):
            self._contents.look(sources)
            if self._contents.looked_same():
                return True
        self._touch()
        return False

    def _touch(self) -> None:
        """Record that other code has written into weights: the copies in E4M3 of all weights are outdated."""
        self._contents = None
        self.writes += 1
        for product in self.products:
            product.touch()

    def _compared_now(self) -> list[Tensor]:
        if self._compared is None:
            self._compared = self._sources()
        return self._compared

    def _sources(self, product: Product | None = None, weights: Sequence[Tensor] = ()) -> list[Tensor]:
        """The model's weights on the GPU whose contents other code may have changed: all but merged weights.

        ``weights``: the weights of ``product``, if it has not stored them yet.
        """
        return [
            weight
            for each in self.products
            for weight in (weights if each is product else each.living())
            if weight.device == each.device and not is_merged_weight(weight)
        ]

    def is_outdated(self) -> bool:
        # This method runs before each replay of a CUDA graph. It need not compare the addresses of weights,
        # because the code that replays graphs notices when weights move.
        return self._is_stale or self._versions_now() != self._versions

    def refresh(self) -> None:
        """Update everything that CUDA graphs read: copies of weights in E4M3, scales and counters.

        The current stream waits for copies that other streams write. No CUDA graph of the model may run
        meanwhile.
        """
        for product in () if self.offloading() else self.products:
            product.refresh()
            product.wait()
        for product in self.products:
            product.follow_weights()
        if self._is_stale:
            # ``_is_stale`` is cleared before the scales are read. If another thread changes a scale
            # meanwhile, it sets ``_is_stale`` again, and the next call reads that scale.
            self._is_stale = False
            found = torch.stack([product.quantizer.to(self.quantizers.device) for product in self.products])
            self.quantizers[:, : INVERSE + 1].copy_(found[:, : INVERSE + 1])
            self.quantizers[:, MOST].zero_()
        self._versions = self._versions_now()

    def compare_scales(self) -> None:
        """A matrix product calls this when its scale has grown much.

        The model's next call runs without a CUDA graph, and compares the product in E4M3 with fp32.
        """
        self._compares = True

    def copy_counts(self) -> None:
        """Start a copy to the CPU of how many values were beyond the range of E4M3 in a CUDA graph.

        Call this after the graph was started.
        """
        self.counts.copy(self.products, self.quantizers)

    def follow_counts(self, *, waits: bool = False) -> None:
        """Let a product's scale grow if former calls had inputs beyond its range.

        Calls whose counts have not arrived on the CPU yet are left for later.

        ``waits``: True to wait until the counts that are being copied to the CPU have arrived.
        """
        if not fp8_product.is_capturing():
            for product, numbers in self.counts.arrived(waits=waits):
                product.follow_count(numbers)

    def beyond(self) -> int:
        """Returns the number of values that were beyond the range of E4M3 in all calls so far.

        This method waits for the GPU, and lets scales grow that did not cover these values.
        """
        self.follow_counts(waits=True)
        for copy in (self.counts.copy_noted, self.copy_counts):
            copy()
            self.follow_counts(waits=True)
        return self.counts.beyond + int(self.quantizers[:, TOTAL].sum().item())

    def _versions_now(self) -> list[int]:
        if self._weights is None:
            self._weights = [weight for product in self.products for weight in product.living()]
        return list(map(private.version_of, self._weights))


def offloading_of(modules: Iterable[weakref.ref[nn.Module]]) -> str:
    """The name of what moves weights in each call by a hook on one of ``modules``; empty if no hook does."""
    return next(filter(None, (_offloading_of(m) for ref in modules if (m := ref()))), "")


def _offloading_of(module: nn.Module) -> str:
    """The name of what moves weights in each call by a hook on ``module``; empty if no hook does.

    The hook of ``enable_model_cpu_offload`` does not count: it moves a model's weights, but not in each call.
    """
    if any(getattr(hook, "offload", None) is True for hook in accelerate_hooks(module)):
        return "accelerate's offloading"
    registry = vars(module).get("_diffusers_hook")
    return "diffusers' group offloading" if "group_offloading" in getattr(registry, "hooks", ()) else ""
