"""``checksums`` against Python's integers: in the interpreter, or on a GPU if there is one."""

import pytest
import torch

from sdfastgn.kernels.checksum.op import BLOCK, Checksums, checksums, reference_checksums
from sdfastgn.kernels.common.compile_ahead import rehearse
from tests.devices import DEVICES

pytestmark = pytest.mark.parametrize("device", DEVICES)

MODULUS = 2**64


def mixed(x):
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % MODULUS
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % MODULUS
    return x ^ (x >> 31)


def expected(words):
    total = sum(mixed((word + mixed(index)) % MODULUS) for index, word in enumerate(words)) % MODULUS
    return total if total < MODULUS // 2 else total - MODULUS


def words_of(tensor):
    """The tensor's memory as a list of unsigned 64-bit numbers."""
    flat = tensor.cpu().as_strided((tensor.numel(),), (1,)).view(torch.int64)
    return [word % MODULUS for word in flat.tolist()]


def random_bits(shape, dtype, device):
    generator = torch.Generator().manual_seed(1)
    size = torch.empty(shape, dtype=dtype).nbytes
    return (
        torch.randint(256, (size,), dtype=torch.uint8, generator=generator).view(dtype).view(shape).to(device)
    )


@pytest.mark.parametrize("shape", [(8,), (4, 3, 16), (4 * BLOCK,), (17, 1024)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.uint8], ids=str)
def test_sums(shape, dtype, device):
    tensor = random_bits(shape, dtype, device)
    zeros = torch.zeros_like(tensor)
    true = [expected(words_of(each)) for each in (tensor, zeros)]
    assert checksums([tensor, zeros]).tolist() == true
    assert reference_checksums([tensor, zeros], [1, 1], range(1)).tolist() == [true]


def test_the_place_of_a_value_matters(device):
    tensor = random_bits((64,), torch.float32, device)
    assert checksums([tensor]).item() != checksums([tensor.flip(0).contiguous()]).item()


def test_each_bit_matters(device):
    tensor = torch.zeros(2, dtype=torch.int64, device=device)
    found = {checksums([tensor]).item()}
    for place in range(2):
        for bit in range(64):
            changed = tensor.clone()
            changed[place] = -(2**63) if bit == 63 else 2**bit
            found.add(checksums([changed]).item())
    assert len(found) == 1 + 2 * 64


def test_channels_last(device):
    tensor = random_bits((2, 8, 4, 4), torch.float16, device).to(memory_format=torch.channels_last)
    assert checksums([tensor]).tolist() == [expected(words_of(tensor))]


def test_a_rehearsal_computes_checksums(device):
    """A rehearsal launches only kernels that are compiled already. No other test has this number of words."""
    x = random_bits((8 * 1237,), torch.uint8, device)
    found = []
    rehearse(lambda: found.append(checksums([x]).tolist()), x.device)
    assert found == [[expected(words_of(x))]]


def tensors_of_any_size(device):
    """Tensors of several blocks, of less than a block, at odd addresses, of odd sizes and with gaps."""
    shapes = [(7 * 4 * BLOCK,), (2, 3 * 4 * BLOCK + 4), (33,), (0,), (5, 16)]
    found = [random_bits(shape, torch.float16, device) for shape in shapes]
    return [*found, found[0][1:], found[0][4 : 3 * BLOCK : 3], found[4].t(), found[0].view(torch.uint8)[3:]]


@pytest.mark.slow
def test_windows(device):
    """Each call reads a part of each tensor, and all windows together read all of it."""
    tensors = tensors_of_any_size(device)
    sums = Checksums(tensors, [4] * len(tensors))
    found = [sums.launch(tensors, window) for window in range(sums.windows)]
    assert all(torch.equal(each, sums.plain(tensors, window)) for window, each in enumerate(found))
    assert torch.equal(sums.of_all_windows(tensors), torch.stack(found))
    for number, tensor in enumerate(tensors):
        flat = tensor.view(-1) if tensor.is_contiguous() else None
        periods = min(4, -(-tensor.nbytes // (8 * BLOCK)))
        for place in () if flat is None or not len(flat) else (0, len(flat) // 2, len(flat) - 1):
            before = flat[place].clone()
            flat.view(torch.uint8)[place * flat.element_size()] ^= 1
            noticed = [bool(sums.launch(tensors, w)[number] != found[w][number]) for w in range(4)]
            assert sum(noticed) in {1: (4,), 2: (2,), 3: (1, 2), 4: (1,)}[periods]
            flat[place] = before
