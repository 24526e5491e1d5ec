"""``StagedCopy``: copies to a GPU and back, of tensors that are smaller and larger than its buffer."""

import pytest
import torch

from sdfastgn.patches.offload import staged_copy
from sdfastgn.patches.offload.staged_copy import StagedCopy

pytestmark = pytest.mark.gpu

PART = staged_copy._SLOT_BYTES
ALL = staged_copy._SLOTS * PART
SIZES = [1, 1000, PART - 2, PART, PART + 2, ALL, ALL + PART + 6, 3 * ALL]


def copies_of(values, where):
    """Copies of ``values``, which are in main memory, on the GPU or back in main memory."""
    stage = StagedCopy(torch.device("cuda"))
    if where == "gpu":
        return [stage.to_gpu(each) for each in values]
    # ``to`` preserves the strides.
    return [stage.to_cpu(each) for each in [each.to("cuda") for each in values]]


both_ways = pytest.mark.parametrize("where", ["gpu", "main memory"])


@both_ways
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.uint8, torch.bool], ids=str)
def test_copies_of_all_sizes(where, dtype):
    values = [(torch.arange(size) % 251).to(dtype) for size in SIZES]
    for value, copy in zip(values, copies_of(values, where), strict=True):
        assert (copy.is_cuda, copy.dtype) == (where == "gpu", dtype)
        assert torch.equal(copy.cpu(), value)


@both_ways
def test_strides_and_offsets(where):
    whole = torch.randn(2**21)
    values = [
        whole[3:-5],
        whole[: 64 * 32 * 9].view(64, 32, 3, 3).to(memory_format=torch.channels_last),
        whole.view(2**10, 2**11).t(),
        torch.nn.Parameter(whole[7 : 7 + 35].view(5, 7).t()),
    ]
    for value, copy in zip(values, copies_of(values, where), strict=True):
        assert copy.stride() == value.stride()
        assert torch.equal(copy.cpu(), value)
        assert not copy.requires_grad


def test_a_part_of_a_tensor_on_the_gpu():
    whole = torch.randn(2**21, device="cuda")
    assert torch.equal(StagedCopy(whole.device).to_cpu(whole[3:-5]), whole[3:-5].cpu())


def test_a_tensor_may_change_after_its_copy():
    stage = StagedCopy(torch.device("cuda"))
    torch.cuda._sleep(10**8)  # the GPU is still busy when ``value`` changes
    value = torch.ones(ALL // 4)
    copy = stage.to_gpu(value)
    value.zero_()
    assert copy.min() == 1


def test_a_copy_in_main_memory_has_what_earlier_work_on_the_stream_writes():
    stage = StagedCopy(torch.device("cuda"))
    value = torch.zeros(ALL, device="cuda")
    torch.cuda._sleep(10**8)
    value.add_(1)
    copy = stage.to_cpu(value)
    value.zero_()
    assert copy.min() == 1


def test_both_ways_in_turn():
    """A slot that the GPU reads is not overwritten by a copy the other way, and the other way round."""
    stage = StagedCopy(torch.device("cuda"))
    values = [torch.full((ALL // 4 + 3,), float(i)) for i in range(6)]
    for value in values:
        assert torch.equal(stage.to_cpu(stage.to_gpu(value)), value)


@pytest.mark.parametrize("is_inference", [False, True])
@both_ways
def test_copies_are_inference_tensors_in_inference_mode(where, is_inference):
    with torch.inference_mode(is_inference):
        (copy,) = copies_of([torch.ones(1000)], where)
    assert copy.is_inference() is is_inference
