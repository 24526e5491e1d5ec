"""Ways to make a provider of a callable, for the suites."""

from __future__ import annotations

import torch
from torch import Tensor

from sdfastgn.bench.kernels.suite import Call, Provider, Shape
from sdfastgn.bench.models.variants import compile_reason

__all__ = ["both_layouts", "fixed", "inductor", "per_channel", "rivals"]


def inductor(call: Call, name: str = "inductor", *, channels_last: bool = True) -> Provider:
    """``call`` under torch.compile. It runs only where it is named: compiling takes seconds."""

    def build(*operands: Tensor) -> Call:
        import torch._functorch.config as config

        # Every shape is a compilation of its own; without a reset the tenth would fall back to eager.
        torch.compiler.reset()
        # A backward that is timed alone needs its forward's saved tensors many times.
        return config.patch(donated_buffer=False)(torch.compile(call, dynamic=False))

    return Provider(name, build, compile_reason, channels_last, by_default=False)


def fixed(name: str, call: Call, *, channels_last: bool = True) -> Provider:
    """A call that needs no preparation."""
    return Provider(name, lambda *operands: call, channels_last=channels_last)


def both_layouts(name: str, call: Call, *suffixes: str) -> tuple[Provider, Provider]:
    """``call`` on the standard layout and channels-last, named by the two suffixes."""
    standard, channels_last = suffixes or ("nchw", "nhwc")
    return fixed(f"{name}_{standard}", call, channels_last=False), fixed(f"{name}_{channels_last}", call)


def rivals(reference: Call, ours: Call, *, layouts: bool = True) -> tuple[Provider, ...]:
    """Eager PyTorch, on both layouts where there are some, ours, and torch.compile."""
    eager = both_layouts("eager", reference) if layouts else (fixed("eager", reference),)
    return (*eager, fixed("sdfastgn", ours), inductor(reference))


def per_channel(shape: Shape, channels: int, *more: str) -> dict[str, Shape]:
    """Sizes of x, and of what has one value a channel."""
    return {"x": shape, **dict.fromkeys(("weight", "bias", *more), (channels,))}
