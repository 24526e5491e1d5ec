"""Whether sdfastgn's kernels can run on a machine, and why not."""

from __future__ import annotations

import pytest
import torch

import sdfastgn
from sdfastgn.bench import environment
from sdfastgn.kernels.common import dispatch, gpu

CUDA = torch.device("cuda")


def compile_nothing(*arguments):
    dispatch.turn_off("no C compiler")


def compile_all_but_one(x, groups):
    dispatch.turn_op_off("group_norm", x, dispatch.KernelError("too much shared memory"))


def fail(*arguments):
    raise torch.OutOfMemoryError("the GPU is full")


# Name -> what a launch does, why the GPU is too old, and the reason that is told.
MACHINES = {
    "it works": (lambda x, groups: x, None, None),
    "no compiler": (compile_nothing, None, "no C compiler"),
    "one kernel fails": (compile_all_but_one, None, "too much shared memory"),
    "an old GPU": (fail, "a V100 is sm_70", "a V100 is sm_70"),
    "no memory": (fail, None, "OutOfMemoryError: the GPU is full"),
}


@pytest.mark.parametrize(("launch", "too_old", "reason"), MACHINES.values(), ids=MACHINES)
def test_why_kernels_cannot_run_on_a_gpu(launch, too_old, reason, monkeypatch, recwarn):
    ones = torch.ones
    monkeypatch.setattr(dispatch, "why_off", None)
    monkeypatch.setattr(dispatch, "ops_off", {})
    monkeypatch.setattr(torch, "ones", lambda *shape, device: ones(shape))
    monkeypatch.setattr(gpu, "unsupported", lambda device: too_old)
    monkeypatch.setattr(sdfastgn, "group_norm", launch)
    assert environment.kernels_reason(CUDA) == reason
    assert not recwarn.list


def test_plain_pytorch_is_not_timed(monkeypatch):
    environment.check_kernels_ran(CUDA)
    monkeypatch.setattr(dispatch, "ops_off", {("geglu", 0): "too much shared memory"})
    with pytest.raises(RuntimeError, match="plain PyTorch ran for geglu on cuda:0: too much shared memory"):
        environment.check_kernels_ran(CUDA)
    environment.check_kernels_ran(torch.device("cpu"))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_kernels_that_are_off_run_nowhere(device, monkeypatch):
    monkeypatch.setattr(dispatch, "why_off", "triton is not installed")
    assert environment.kernels_reason(torch.device(device)) == "triton is not installed"


def test_kernels_do_not_run_on_a_cpu(monkeypatch):
    monkeypatch.setattr(dispatch, "why_off", None)
    reason = environment.kernels_reason(torch.device("cpu"))
    assert reason == "the kernels need an NVIDIA GPU; the device is cpu"


@pytest.mark.gpu
def test_kernels_run_on_this_gpu():
    assert environment.kernels_reason(CUDA) is None
