"""``Counts``: what calls have counted beyond the range of E4M3 arrives on the CPU, which does not wait."""

import threading

import pytest
import torch

from sdfastgn.kernels.common.e4m3 import MOST, NUMBERS, TOTAL
from sdfastgn.patches.fp8.counts import Counts
from tests.devices import DEVICES

pytestmark = pytest.mark.fused_on_cpu

# About 0.1 s on a GPU.
CYCLES = 200_000_000


def quantizers(device, *totals):
    found = torch.zeros(len(totals), NUMBERS, device=device)
    found[:, TOTAL] = torch.tensor(totals, dtype=torch.float32)
    found[:, MOST] = 2 * found[:, TOTAL]
    return found


def numbers(total):
    return [2 * total if i == MOST else total if i == TOTAL else 0 for i in range(NUMBERS)]


@pytest.mark.parametrize("device", DEVICES)
def test_a_copy_arrives_once_and_without_what_comes_later(device):
    counts, found = Counts(), quantizers(device, 0, 3, 0, 5)
    counts.copy("abcd", found)
    found.fill_(7)
    assert counts.arrived(waits=True) == [("b", numbers(3)), ("d", numbers(5))]
    assert counts.arrived(waits=True) == []
    counts.copy("abcd", found)
    assert len(counts.arrived(waits=True)) == 4
    assert counts.beyond == 0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("is_inside", [False, True], ids=["outside", "inside"])
def test_calls_without_graphs(is_inside, device):
    counts = Counts()
    with torch.inference_mode(is_inside):
        for product, quantizer in zip("aba", quantizers(device, 2, 0, 4), strict=True):
            counts.note(product, quantizer)
        counts.copy_noted()
        assert counts.arrived(waits=True) == [("a", numbers(2)), ("a", numbers(4))]
        assert counts.beyond == 6
        counts.copy_noted()
        assert counts.arrived(waits=True) == []


@pytest.mark.parametrize("device", DEVICES)
def test_one_copy_at_a_time(device):
    """The second begins after the first has been read."""
    counts = Counts()
    counts.copy("a", quantizers(device, 1))
    counts.copy("b", quantizers(device, 2))
    assert counts.arrived(waits=True) == [("a", numbers(1))]
    assert counts.arrived(waits=True) == []


@pytest.mark.gpu
def test_the_cpu_does_not_wait():
    counts, found = Counts(), quantizers("cuda", 3)
    end = torch.cuda.Event()
    torch.cuda.synchronize()
    torch.cuda._sleep(CYCLES)
    counts.copy("a", found)
    end.record()
    assert counts.arrived() == []
    assert not end.query()
    end.synchronize()
    assert counts.arrived() == [("a", numbers(3))]


@pytest.mark.gpu
def test_what_another_stream_may_still_compute_is_not_read():
    counts = Counts()
    counts.note("a", quantizers("cuda", 1)[0])
    with torch.cuda.stream(torch.cuda.Stream()):
        counts.note("b", quantizers("cuda", 2)[0])
        counts.copy_noted()
        assert counts.arrived(waits=True) == [("b", numbers(2))]


def test_threads():
    counts = Counts()

    def work():
        for _ in range(200):
            counts.note("a", quantizers("cpu", 1)[0])
            counts.copy_noted()
            counts.arrived(waits=True)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 0 < counts.beyond <= 600
