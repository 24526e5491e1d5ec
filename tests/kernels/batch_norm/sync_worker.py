"""One process of two that normalize one batch together: ``python -m tests.kernels.batch_norm.sync_worker
RANK STORE RESULT WAY...``; test_sync.py starts it. Writes what it computed of its own samples.

``WAY``: a key of ``WAYS``.
"""

import contextlib
import itertools
import sys

import torch
import torch.distributed as dist
from torch import nn

import sdfastgn
from tests.kernels.samples import kernels

C = 6
# Samples of each process: as many as there are shapes.
SPLITS = {(5, C, 4, 7): (3, 2), (2, C, 1, 1): (1, 1), (2, C, 40, 41): (2, 0)}
ACTIVATIONS = ("silu", "identity")
# Plain PyTorch, or the kernels in Triton's interpreter.
WAYS = {"plain": contextlib.nullcontext, "kernels": lambda: kernels(direct=True)}


def batch(shape):
    """(x, residual, gradient) of both processes."""
    g = torch.Generator().manual_seed(3)
    x, residual, dy = (torch.randn(shape, generator=g) + mean for mean in (20.0, 0.0, 0.5))
    return x.to(memory_format=torch.channels_last), residual, dy


def stock():
    norm = nn.SyncBatchNorm(C, momentum=None)
    with torch.no_grad():
        norm.weight.copy_(torch.linspace(0.5, 2, C))
        norm.bias.copy_(torch.linspace(-1, 1, C))
    return norm


def main(rank, store, result, *ways):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    found = {}
    for way, shape, activation in itertools.product(ways, SPLITS, ACTIVATIONS):
        norm = sdfastgn.BatchNorm.from_module(stock(), activation)
        x, residual, dy = (t.split(SPLITS[shape])[rank] for t in batch(shape))
        leaves = x.requires_grad_(), residual.requires_grad_(), *norm.parameters()
        with WAYS[way]():
            y = norm(*leaves[:2])
            grads = torch.autograd.grad(y, leaves, dy)
        found[way, shape, activation] = [y.detach(), *grads, norm.running_mean, norm.running_var]
    torch.save(found, result)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
