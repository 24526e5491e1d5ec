"""GroupNorm+SiLU on the shapes of Stable Diffusion: shapes x providers, checked against fp64, timed hot and cold,
beside a copy; and the ops that produce its input with its statistics, beside the plain ones.

The least traffic is one read of x and one write of y, so GB/s count ``2 * N*C*H*W * itemsize`` bytes, and a plain copy
of x, which moves just that, is the yardstick. A sum reads a second tensor: three times ``N*C*H*W * itemsize``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from sdfastgn.bench import timing
from sdfastgn.bench.documents import OK
from sdfastgn.bench.kernels import cells, providers
from sdfastgn.bench.kernels.cells import KernelConfig, KernelRow, Shape, Work, geometric_mean, shape_text
from sdfastgn.bench.kernels.providers import (
    ADD,
    BASELINES,
    CAT,
    COPY,
    NORM_GIVEN,
    NORMS,
    OURS,
    YARDSTICK,
    Provider,
)
from sdfastgn.bench.models.workload import DTYPES

GROUPS = 32
EPS = 1e-5

# Inputs of GroupNorms in the UNets of SD1.5 at 512^2 and SDXL at 1024^2 with guidance, and in the VAE's deeper blocks.
UNET_SHAPES: tuple[Shape, ...] = (
    (2, 1280, 8, 8),
    (2, 2560, 8, 8),
    (2, 1280, 16, 16),
    (2, 1920, 16, 16),
    (2, 2560, 16, 16),
    (2, 640, 32, 32),
    (2, 1280, 32, 32),
    (2, 1920, 32, 32),
    (2, 2560, 32, 32),
    (2, 320, 64, 64),
    (2, 640, 64, 64),
    (2, 960, 64, 64),
    (2, 1280, 64, 64),
    (2, 320, 128, 128),
    (2, 640, 128, 128),
    (2, 960, 128, 128),
    (1, 512, 64, 64),
    (1, 512, 128, 128),
    (1, 512, 256, 256),
)
# The VAE's large images, and a large batch.
LARGE_SHAPES: tuple[Shape, ...] = (
    (1, 256, 512, 512),
    (1, 512, 512, 512),
    (1, 128, 1024, 1024),
    (16, 320, 64, 64),
)
SHAPE_SETS: dict[str, tuple[Shape, ...]] = {
    "unet": UNET_SHAPES,
    "large": LARGE_SHAPES,
    "all": UNET_SHAPES + LARGE_SHAPES,
}

# Relative error against fp64. One rounding costs 3e-4 in fp16 and 2e-3 in bf16; fp16 statistics, as stable-fast's, the
# same again.
ERROR_BOUNDS = {"fp16": 5e-3, "bf16": 4e-2, "fp32": 1e-4}

Inputs = tuple[torch.Tensor, ...]


@dataclass
class _Case:
    """One shape's data: inputs, affine parameters, and the fp64 truth of GroupNorm+SiLU."""

    shape: Shape
    x: torch.Tensor
    residual: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor
    norm: torch.Tensor

    @classmethod
    def of(cls, shape: Shape, config: KernelConfig) -> _Case:
        device, dtype = config.torch_device, DTYPES[config.dtype]
        generator = torch.Generator(device).manual_seed(config.seed)
        x = (
            torch.randn(shape, generator=generator, device=device, dtype=torch.float32)
            .mul_(1.5)
            .add_(0.5)
            .to(dtype)
        )
        residual = torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(dtype)
        weight = torch.randn(shape[1], generator=generator, device=device).to(dtype)
        bias = torch.randn(shape[1], generator=generator, device=device).to(dtype)
        norm = F.silu(F.group_norm(x.double(), GROUPS, weight.double(), bias.double(), EPS))
        return cls(shape, x, residual, weight, bias, norm)

    def bytes_a_call(self, provider: Provider) -> int:
        return (3 if provider.task == ADD else 2) * self.x.numel() * self.x.element_size()

    def truth(self, provider: Provider) -> torch.Tensor:
        if provider.task in (COPY, CAT):
            return self.x
        return self.x.double() + self.residual.double() if provider.task == ADD else self.norm

    def inputs(self, provider: Provider) -> list[Inputs]:
        """As many sets of the task's inputs as make each call find L2 cold."""
        layout = torch.channels_last if provider.channels_last else torch.contiguous_format
        x = self.x.contiguous(memory_format=layout)
        first: Inputs = (x,)
        if provider.task == ADD:
            first = (x, self.residual.contiguous(memory_format=layout))
        elif provider.task == CAT:
            half = self.shape[1] // 2
            first = tuple(part.contiguous(memory_format=layout) for part in (x[:, :half], x[:, half:]))
        elif provider.task == NORM_GIVEN:
            import sdfastgn

            first = (x, sdfastgn.channel_statistics(x))
        count = timing.cold_sets(self.bytes_a_call(provider)) if x.is_cuda else 2
        clones = [
            tuple(t.clone(memory_format=torch.preserve_format) for t in first) for _ in range(count - 1)
        ]
        return [first, *clones]

    def work(self, provider: Provider, dtype: str) -> Work:
        call = provider.build(GROUPS, self.weight, self.bias, EPS)
        inputs = self.inputs(provider)
        return Work(
            outputs=lambda: {"": call(*inputs[0])},
            truth={"": self.truth(provider)},
            bounds={"": ERROR_BOUNDS[dtype]},
            call=lambda tensors: call(*tensors),
            inputs=inputs,
            moved=self.bytes_a_call(provider),
            host_call=lambda: call(*inputs[0]),
        )


def _work(case: Callable[[], _Case], provider: Provider, dtype: str) -> Work:
    return case().work(provider, dtype)


def run(
    config: KernelConfig,
    *,
    on_cell: Callable[[Shape, str], object] = lambda shape, name: None,
    on_row: Callable[[KernelRow], object] = lambda row: None,
) -> list[KernelRow]:
    """Times every provider of the config on every shape, under the switches of :func:`timing.global_switches`.

    ``on_cell`` is called before each cell is measured, ``on_row`` with what came of it, the ratios not yet among it.
    The copy is measured first, also where the config does not name it: ratios need it.
    """
    names = dict.fromkeys((YARDSTICK, *config.providers))
    chosen = [provider for provider in providers.PROVIDERS if provider.name in names]
    rows: list[KernelRow] = []
    with cells.measuring(config.torch_device):
        for shape in config.shapes:
            # Built for the first provider that can run: the largest shapes do not fit on every machine.
            case = functools.cache(functools.partial(_Case.of, shape, config))
            for provider in chosen:
                on_cell(shape, provider.name)
                row = KernelRow(shape, provider.name, OK)
                reason = cells.unavailable(provider, shape, config)
                rows.append(cells.attempt(row, reason, config, _work, case, provider, config.dtype))
                on_row(row)
            del case
            cells.free(config.torch_device)
    cells.add_ratios(rows)
    return rows


def best_peer(rows: Iterable[KernelRow], shape: Shape, *, cold: bool = False) -> KernelRow | None:
    """The fastest correct provider of GroupNorm+SiLU on ``shape`` that is not sdfastgn; None where there is none."""
    peers = [name for name in NORMS if name != OURS]
    return cells.fastest([row for row in rows if row.shape == shape], peers, cold=cold)


def losses(rows: Sequence[KernelRow], *, cold: bool = False) -> list[Shape]:
    """Shapes on which some peer is faster than sdfastgn, or sdfastgn has no time while a peer has one."""
    found = []
    for shape in dict.fromkeys(row.shape for row in rows):
        ours = [row for row in rows if row.shape == shape and row.provider == OURS]
        peer = best_peer(rows, shape, cold=cold)
        if not ours or peer is None:
            continue
        our_us, peer_us = (row.microseconds(cold) for row in (ours[0], peer))
        if our_us is None or (peer_us is not None and peer_us < our_us):
            found.append(shape)
    return found


def ratio_to_best_peer(rows: Sequence[KernelRow], shape: Shape, *, cold: bool = False) -> float | None:
    """Our time over the best peer's; None where one of the two is missing."""
    peer = best_peer(rows, shape, cold=cold)
    ours = next(
        (row for row in rows if row.shape == shape and row.provider == OURS and row.status == OK), None
    )
    times = [row.microseconds(cold) if row else None for row in (ours, peer)]
    return times[0] / times[1] if times[0] and times[1] else None


def baseline_ratios(rows: Sequence[KernelRow]) -> dict[str, dict[Shape, tuple[float, float]]]:
    """Time over that of the plain op, hot and cold, of each op that takes or gives statistics, by shape."""
    cells = {(row.provider, row.shape): row for row in rows if row.status == OK}
    found: dict[str, dict[Shape, tuple[float, float]]] = {}
    for (name, shape), row in cells.items():
        plain = cells.get((BASELINES.get(name, ""), shape))
        if plain is not None and row.hot_us and row.cold_us and plain.hot_us and plain.cold_us:
            found.setdefault(name, {})[shape] = (row.hot_us / plain.hot_us, row.cold_us / plain.cold_us)
    return found


def summary(rows: Sequence[KernelRow]) -> dict[str, Any]:
    """Geometric means of the ratios to copy by set of shapes and provider, each with its number of shapes."""
    means: dict[str, Any] = {}
    for set_name, shapes in SHAPE_SETS.items():
        for name in dict.fromkeys(row.provider for row in rows):
            if name not in (YARDSTICK, *NORMS):
                continue
            timed = [row for row in rows if row.provider == name and row.shape in shapes and row.status == OK]
            hot = [row.hot_ratio for row in timed if row.hot_ratio]
            cold = [row.cold_ratio for row in timed if row.cold_ratio]
            if hot and cold:
                entry = {"hot": geometric_mean(hot), "cold": geometric_mean(cold), "shapes": len(hot)}
                means.setdefault(set_name, {})[name] = entry
    return {
        "geometric_mean_of_ratio_to_copy": means,
        "slower_than_best_peer": {
            "hot": [list(shape) for shape in losses(rows)],
            "cold": [list(shape) for shape in losses(rows, cold=True)],
        },
        "ratio_to_best_peer": {
            shape_text(shape): [ratio_to_best_peer(rows, shape), ratio_to_best_peer(rows, shape, cold=True)]
            for shape in dict.fromkeys(row.shape for row in rows)
        },
        "ratio_to_plain_op": {
            name: {shape_text(shape): list(ratios) for shape, ratios in by_shape.items()}
            for name, by_shape in baseline_ratios(rows).items()
        },
    }
