"""``Counts``: the values beyond the range of E4M3 in a replay, which are read before the graph ends."""

from functools import partial

import pytest
import torch

from sdfastgn.kernels.common.e4m3 import BEYOND, LARGEST
from sdfastgn.patches.core import fp8_counts
from sdfastgn.patches.core.fp8_counts import Counts, note_written
from sdfastgn.patches.graphs.capture import backend_of
from tests.devices import DEVICES
from tests.patches.graphs.tape import TapeBackend

pytestmark = pytest.mark.fused_on_cpu

PRODUCTS, SIZE = 3, 8
# About 0.1 s on a GPU.
CYCLES = 200_000_000


class Replays:
    """A graph that counts in each row of ``x``, and does ``work`` after each row and once more at its end.

    ``is_inside``: True if the graph is captured in inference mode.
    """

    def __init__(self, device, work=lambda: None, *, is_inside=False):
        self.x = torch.zeros(PRODUCTS, SIZE, device=device)
        self.quantizers = torch.zeros(PRODUCTS, 4, device=device)
        self._work, self.waits = work, 0
        self.backend = TapeBackend() if device == "cpu" else backend_of(torch.device(device, 0))
        self._forward()  # loads the kernels
        with torch.inference_mode(is_inside):
            self.counts = Counts(self.quantizers, lambda: None)
            with self.backend.ordered():
                self.handle = self.backend.capture(partial(self.counts.captured, self._forward))

    def _forward(self):
        with torch.inference_mode(False):
            for row, quantizer in zip(self.x, self.quantizers, strict=True):
                quantizer[BEYOND] += (row.abs() > LARGEST).sum()
                note_written()
                self._work()
            self._work()

    def wait(self):
        self.waits += 1
        self.backend.wait()

    def start(self, *values):
        """Start a replay. ``values``: one for each product."""
        with self.backend.ordered():
            self.x.copy_(torch.tensor(values)[:, None])
            self.counts.begin(self.wait)
            self.handle.replay()


@pytest.mark.parametrize("is_inside", [False, True], ids=["outside", "inside"])
@pytest.mark.parametrize("product", range(PRODUCTS))
@pytest.mark.parametrize("device", DEVICES)
def test_no_product_is_missed(device, product, is_inside):
    """The first and the last product count, and so do those after a long kernel."""
    work = (lambda: None) if device == "cpu" else partial(torch.cuda._sleep, CYCLES // 20)
    graph = Replays(device, work, is_inside=is_inside)
    values, expected = [LARGEST] * PRODUCTS, [0.0] * PRODUCTS
    graph.start(*values)
    assert graph.counts.read() == expected
    values[product] *= 2
    # The graph sets no counter to 0. So each replay has a count that no other has.
    for replays in range(1, 4):
        expected[product] = SIZE * replays
        graph.start(*values)
        assert graph.counts.read() == expected
    assert graph.waits == 0


@pytest.mark.parametrize("device", DEVICES)
def test_what_comes_after_the_replay_is_not_read(device):
    graph = Replays(device)
    graph.start(2 * LARGEST, 0, 0)
    graph.quantizers.zero_()
    graph.backend.wait()
    assert graph.counts.read() == [SIZE, 0, 0]


@pytest.mark.gpu
def test_the_counts_are_read_before_the_graph_ends():
    graph = Replays("cuda", partial(torch.cuda._sleep, CYCLES))
    end = torch.cuda.Event()
    for replays in (1, 2):
        graph.start(0, 0, 2 * LARGEST)
        end.record()
        assert graph.counts.read() == [0, 0, SIZE * replays]
        assert not end.query()
        end.synchronize()


@pytest.mark.parametrize("device", DEVICES)
def test_a_replay_whose_counts_were_not_read(device):
    """Its copy must not be taken for the copy of the next replay."""
    graph = Replays(device)
    graph.start(2 * LARGEST, 0, 0)
    assert graph.waits == 0
    graph.start(0, 0, 0)
    assert graph.waits == 1
    assert graph.counts.read() == [SIZE, 0, 0]
    graph.start(0, 0, 0)
    assert graph.waits == 1


@pytest.mark.parametrize("device", DEVICES)
def test_without_a_copy_the_counters_are_read(device):
    graph = Replays(device)
    graph.quantizers[1, BEYOND] = 5
    graph.counts.begin(graph.wait)  # nothing is replayed
    assert graph.counts.read() == [0, 5, 0]


@pytest.mark.parametrize("device", DEVICES)
def test_memory_into_which_a_replay_may_write_is_kept(device, monkeypatch):
    monkeypatch.setattr(fp8_counts, "_abandoned", [])
    read, unread = Replays(device), Replays(device)
    for graph in (read, unread):
        graph.start(0, 0, 0)
    read.counts.read()
    kept = unread.counts._copy
    del read.counts, unread.counts, graph
    unread.handle = read.handle = None
    assert [copy.data_ptr() for copy, _ in fp8_counts._abandoned] == [kept.data_ptr()]


@pytest.mark.parametrize("device", DEVICES)
def test_a_graph_without_products_waits_for_nothing(device):
    counts = Counts(torch.ones(PRODUCTS, 4, device=device), lambda: None)
    assert counts.captured(lambda: 3) == 3
    for _ in range(2):
        counts.begin(lambda: pytest.fail("it waited"))
    assert counts.read() == []
    note_written()  # a capture of other code
    assert counts.read() == []
