"""Two processes that normalize a batch together compute what one process does with all of it."""

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import sdfastgn
from sdfastgn.kernels.batch_norm.sync import group_of
from sdfastgn.kernels.common.activations import ACTIVATIONS
from tests.kernels.batch_norm import sync_worker as worker
from tests.kernels.samples import interpreted
from tests.processes import run_together

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What each of the two processes found."""
    folder = tmp_path_factory.mktemp("sync")
    command = [sys.executable, "-m", "tests.kernels.batch_norm.sync_worker"]
    ways = ["plain"] if torch.cuda.is_available() else worker.WAYS
    files = [folder / f"{rank}.pt" for rank in range(2)]
    run_together(
        [[*command, str(rank), str(folder / "store"), str(file), *ways] for rank, file in enumerate(files)],
        folder, cwd=ROOT, seconds=300,
    )  # fmt: skip
    return [torch.load(file) for file in files]


@pytest.mark.slow
@pytest.mark.parametrize("way", ["plain", pytest.param("kernels", marks=interpreted)])
@pytest.mark.parametrize("activation", worker.ACTIVATIONS)
@pytest.mark.parametrize("shape", worker.SPLITS, ids=str)
def test_two_processes_are_as_one(results, shape, activation, way):
    x, residual, dy = (t.double() for t in worker.batch(shape))
    norm = worker.stock().double()
    leaves = [x.requires_grad_(), residual.requires_grad_(), *norm.parameters()]
    running = norm.running_mean, norm.running_var
    z = F.batch_norm(x.contiguous(), *running, norm.weight, norm.bias, True, 1.0)
    y = ACTIVATIONS[activation](z + residual)
    expected = [y.detach(), *torch.autograd.grad(y, leaves, dy), *running]
    first, second = (found[way, shape, activation] for found in results)
    ours = [torch.cat(pair) for pair in zip(first[:3], second[:3], strict=True)]
    # Each has the gradients of its own samples, and the running averages of all.
    ours += [a + b for a, b in zip(first[3:5], second[3:5], strict=True)]
    assert all(map(torch.equal, first[5:], second[5:]))
    for mine, right in zip([*ours, *first[5:]], expected, strict=True):
        torch.testing.assert_close(mine.double(), right, atol=3e-5, rtol=1e-4)


def test_without_other_processes_it_is_plain_batch_norm():
    x = torch.randn(4, 6, 5)
    assert group_of("world") is None
    norms = [sdfastgn.BatchNorm(6, process_group=group) for group in (None, "world")]
    assert torch.equal(*(norm(x) for norm in norms))


def test_a_group_is_what_torch_distributed_gives(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        x = torch.randn(4, 6, 5)
        for group in (dist.group.WORLD, dist.GroupMember.NON_GROUP_MEMBER):
            norm = sdfastgn.BatchNorm(6, process_group=group)
            assert torch.equal(norm(x), sdfastgn.BatchNorm(6)(x))
    finally:
        dist.destroy_process_group()
