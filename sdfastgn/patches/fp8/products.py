"""The products of one model in E4M3: what its calls and CUDA graphs ask of all of them.

While products learn (``product.py``), the model runs without CUDA graphs. So does the next call after a scale
has grown much, which compares the product with fp32. Graphs read the scales of inputs from memory, so they
get a scale that has grown without a new capture.

A weight that was written to or replaced is quantized again by the next call without a graph, or before the
next graph. PyTorch does not count all writes. So the contents of all weights are compared too, when a call
without a graph begins, and while a graph runs (``lora/contents.py``).

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

# Why a model runs without CUDA graphs while its products learn.
REASON = "the scales of its FP8 products are not known yet"
# Why a call runs without a graph after a scale has grown much.
COMPARE_REASON = "scales of its FP8 products have grown, and are compared with fp32"


class Products:
    """The products of one model.

    Attributes:
        calls: number of calls of the model so far in which products learned.
        products: the products.
        quantizers: the quantizers that graphs use, (products, ``NUMBERS``). ``refresh`` writes the scales.
        writes: counts how often weights were found to have changed.
        replaced: counts how often a product that is on got other weights, such as merged ones, or freed its
            copy.
        counts: what calls have counted beyond the range.

    Args:
        hooked: the modules to search for hooks that move weights in each call. They include at least one
            such module if the model has any.
    """

    def __init__(self, hooked: Sequence[nn.Module]) -> None:
        self.calls = self.replaced = self.writes = 0
        self.counts = Counts()
        self._hooked = tuple(map(weakref.ref, hooked))
        self._was_offloaded = False
        self.products: list[Product] = []
        self.quantizers = torch.empty(0, NUMBERS)
        self._is_stale = False  # True if ``quantizers`` must be written
        self._compares = False  # True if the next call must run without a graph
        self._began = Calls()
        self._contents: Contents | None = None
        self._weights: list[Tensor] | None = None
        self._compared: list[Tensor] | None = None  # ``_sources``, once they are known
        self._versions: list[int] = []

    def begin(self, products: list[Product]) -> None:
        """Set the products. No graph reads their quantizers yet."""
        self.counts.beyond = self.beyond()
        self.products = products
        with torch.inference_mode(False), torch.no_grad():
            device = products[0].quantizer.device if products else None
            self.quantizers = torch.zeros(len(products), NUMBERS, dtype=torch.float32, device=device)
            for i, product in enumerate(products):
                product.begin(self, self.quantizers[i])
                product.touch()  # a former copy may have been made of other contents

    def offloading(self) -> str:
        """What moves the weights in each call. Empty if nothing does. Otherwise the copies are freed now."""
        found = offloading_of(self._hooked)
        if found and not self._was_offloaded:
            for product in self.products:
                if product.nbytes:
                    product.free()
        self._was_offloaded = bool(found)
        return found

    def reason_now(self) -> str | None:
        """Why the model cannot run as a graph now; None if it can. Counts the call: call it once for each."""
        if self.offloading():
            return None  # products do not learn; the hooks are a separate reason
        # A product that was left out of some calls learns in further calls, but at most in as many again.
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
        """Products call this when a copy in E4M3 is new, outdated or freed.

        ``is_replaced``: True if older graphs must not run again.
        """
        self._versions = []
        self._weights = self._compared = None  # a product may have other weights now
        if is_replaced:
            self.replaced += 1

    def scales_changed(self) -> None:
        """Products call this when their scale has changed. The next graph must read it."""
        self._is_stale = True

    def enter(self, product: Product) -> None:
        """Call this before ``product`` runs. Compares contents if a call of the model begins with it."""
        if self._began.begins(product) and not fp8_product.is_capturing():
            self.compare()
            self.follow_counts()
            self.counts.copy_noted()

    def compare(self) -> None:
        """Mark the copies of all weights as outdated if other code has written into a weight."""
        if self._contents is not None and not self._contents.are_same(self._compared_now()):
            self._touch()

    def note(self, product: Product, weights: Sequence[Tensor]) -> None:
        """Call this before a copy of ``weights`` is made for ``product``.

        If the former contents of the weights are unknown, record the present contents, and mark the copies of
        all other products as outdated.
        """
        sources = self._sources(product, weights)
        if sources and (self._contents is None or not self._contents.are_of(sources)):
            for other in self.products:
                if other is not product:
                    other.touch()
            self._contents = Contents(sources, [False] * len(sources))

    def note_replay(self) -> None:
        """Begin to compare the contents of weights. Call it before a CUDA graph starts in the current stream.

        ``has_same_contents`` has the result, after the start.
        """
        if self._contents is not None:
            self._contents.begin()

    def has_same_contents(self) -> bool:
        """True if the graph has read copies of the weights' present contents. Does not wait for its end."""
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
        """Record that other code has written into weights."""
        self._contents = None
        self.writes += 1
        for product in self.products:
            product.touch()

    def _compared_now(self) -> list[Tensor]:
        if self._compared is None:
            self._compared = self._sources()
        return self._compared

    def _sources(self, product: Product | None = None, weights: Sequence[Tensor] = ()) -> list[Tensor]:
        """The weights on the GPU whose contents other code may have changed.

        ``weights``: the weights of ``product``, if it has not stored them yet.
        """
        return [
            weight
            for each in self.products
            for weight in (weights if each is product else each.living())
            if weight.device == each.device and not is_merged_weight(weight)
        ]

    def is_outdated(self) -> bool:
        # This runs before each replay. Graphs notice by themselves when weights move.
        return self._is_stale or self._versions_now() != self._versions

    def refresh(self) -> None:
        """Update everything that graphs read: weights that were written to, scales and counters.

        The current stream waits for copies that others write. No graph of the model may run meanwhile.
        """
        for product in () if self.offloading() else self.products:
            product.refresh()
            product.wait()
        for product in self.products:
            product.follow_weights()
        if self._is_stale:
            self._is_stale = False  # first, because another thread may change a scale now
            found = torch.stack([product.quantizer.to(self.quantizers.device) for product in self.products])
            self.quantizers[:, : INVERSE + 1].copy_(found[:, : INVERSE + 1])
            self.quantizers[:, MOST].zero_()
        self._versions = self._versions_now()

    def compare_scales(self) -> None:
        """Products call this when their scale has grown much. The next call runs without a graph."""
        self._compares = True

    def copy_counts(self) -> None:
        """Call this after a graph was started. It starts a copy of the graph's counts to the CPU."""
        self.counts.copy(self.products, self.quantizers)

    def follow_counts(self, *, waits: bool = False) -> None:
        """Let scales grow that did not cover the values of former calls, as far as the CPU knows them.

        ``waits``: True to wait for what is being copied.
        """
        if not fp8_product.is_capturing():
            for product, numbers in self.counts.arrived(waits=waits):
                product.follow_count(numbers)

    def beyond(self) -> int:
        """Number of values beyond the range in all calls. Waits for the GPU. Scales may grow."""
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
    """What moves the weights of one of ``modules`` in each call, by a hook on it. Empty if no hook does."""
    return next(filter(None, (_offloading_of(m) for ref in modules if (m := ref()))), "")


def _offloading_of(module: nn.Module) -> str:
    """What moves the weights of ``module`` in each call, by a hook on it. Empty if no hook does.

    The hook of ``enable_model_cpu_offload`` moves weights too, but not in each call.
    """
    if any(getattr(hook, "offload", None) is True for hook in accelerate_hooks(module)):
        return "accelerate's offloading"
    registry = vars(module).get("_diffusers_hook")
    return "diffusers' group offloading" if "group_offloading" in getattr(registry, "hooks", ()) else ""
