"""``StagedCopy``: the copies on the GPU, for tensors that are smaller and larger than its buffer."""

import pytest
import torch

from sdfastgn.patches.core import staged_copy
from sdfastgn.patches.core.staged_copy import StagedCopy

pytestmark = pytest.mark.gpu

PART = staged_copy._SLOT_BYTES
ALL = staged_copy._SLOTS * PART
SIZES = [1, 1000, PART - 2, PART, PART + 2, ALL + PART + 6]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.uint8, torch.bool], ids=str)
def test_copies_of_all_sizes(dtype):
    stage = StagedCopy(torch.device("cuda"))
    values = [(torch.arange(size) % 251).to(dtype) for size in SIZES]
    copies = [stage(each) for each in values]
    for value, copy in zip(values, copies, strict=True):
        assert (copy.device.type, copy.dtype) == ("cuda", dtype)
        assert torch.equal(copy.cpu(), value)


def test_strides_and_offsets():
    stage = StagedCopy(torch.device("cuda"))
    whole = torch.randn(2**21)
    values = [
        whole[3:-5],
        whole[: 64 * 32 * 9].view(64, 32, 3, 3).to(memory_format=torch.channels_last),
        whole.view(2**10, 2**11).t(),
        torch.nn.Parameter(whole[7 : 7 + 35].view(5, 7).t()),
    ]
    copies = [stage(each) for each in values]
    for value, copy in zip(values, copies, strict=True):
        assert copy.stride() == value.stride()
        assert torch.equal(copy.cpu(), value)
        assert not copy.requires_grad


def test_a_tensor_may_change_after_its_copy():
    stage = StagedCopy(torch.device("cuda"))
    torch.cuda._sleep(10**8)  # the GPU is still busy when ``value`` changes
    value = torch.ones(ALL // 4)
    copy = stage(value)
    value.zero_()
    assert copy.min() == 1


@pytest.mark.parametrize("is_inference", [False, True])
def test_copies_are_inference_tensors_in_inference_mode(is_inference):
    with torch.inference_mode(is_inference):
        stage = StagedCopy(torch.device("cuda"))
        copy = stage(torch.ones(1000))
    assert copy.is_inference() is is_inference
