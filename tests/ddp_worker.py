"""One process of a distributed training step: ``python ddp_worker.py RANK WORLD BACKEND STORE
RESULT``; test_training.py starts it.

Rank 0 writes the averaged gradients of an optimized model.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from diffusers import UNet2DModel
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import sdfastgn
from sdfastgn.models.architectures import randomize

N = 4


def build() -> nn.Module:
    model = UNet2DModel(
        in_channels=1,
        out_channels=1,
        block_out_channels=(8, 12),
        norm_num_groups=4,
        layers_per_block=1,
        attention_head_dim=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )
    return randomize(model, 3).train()


def gradients(model: nn.Module, rows: slice, device: str) -> dict[str, Tensor]:
    """Of the mean over ``rows`` of the whole batch of N images."""
    generator = torch.Generator().manual_seed(0)
    x, noise = torch.randn(2, N, 1, 8, 8, generator=generator)[:, rows].to(device)
    model.zero_grad()
    (model(x, torch.tensor(10, device=device)).sample - noise).square().mean().backward()
    return {
        k.removeprefix("module."): p.grad.cpu() for k, p in model.named_parameters() if p.grad is not None
    }


def main(rank: int, world: int, backend: str, store: str, result: str) -> None:
    torch.set_num_threads(1)
    device = f"cuda:{rank}" if backend == "nccl" else "cpu"
    if backend == "nccl":
        torch.cuda.set_device(rank)
        torch.backends.cudnn.allow_tf32 = False
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=world)
    rows = slice(rank * N // world, (rank + 1) * N // world)
    ids = [rank] if backend == "nccl" else None
    model = DistributedDataParallel(sdfastgn.optimize(build().to(device), strict=True), device_ids=ids)
    gradients(model, rows, device)  # after its first step DDP makes its buckets anew
    found = gradients(model, rows, device)
    if rank == 0:
        torch.save(found, Path(result))
    dist.barrier()
    del model  # it has a reference to the process group, whose threads should end here
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
