"""Ways to make a provider of a callable: as it is, on both layouts, compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from sdfastgn.bench.kernels.suite import Call, Provider
from sdfastgn.bench.models.variants import compile_reason


def fixed(call: Call) -> Callable[..., Call]:
    """A ``build`` of what needs no preparation."""
    return lambda *operands: call


def compiled(call: Call) -> Call:
    """``call`` under torch.compile, for one shape."""
    import torch._dynamo

    # Every shape is a compilation of its own; without a reset the tenth would fall back to eager.
    torch._dynamo.reset()
    return torch.compile(call, dynamic=False)


def inductor(call: Call, name: str = "inductor", *, channels_last: bool = True) -> Provider:
    """``call`` under torch.compile. It runs only where it is named: compiling takes seconds."""

    def build(*operands: Tensor) -> Call:
        import torch._functorch.config as config

        ready = compiled(call)

        def run(*tensors: Tensor) -> Any:
            # A backward that is timed alone needs its forward's saved tensors many times.
            with config.patch(donated_buffer=False):
                return ready(*tensors)

        return run

    return Provider(name, build, compile_reason, channels_last, by_default=False)


def both_layouts(name: str, call: Call, *suffixes: str) -> tuple[Provider, Provider]:
    """``call`` on the standard layout and channels-last, named by the two suffixes."""
    standard, channels_last = (f"{name}_{suffix}" for suffix in suffixes or ("nchw", "nhwc"))
    return Provider(standard, fixed(call), channels_last=False), Provider(channels_last, fixed(call))
