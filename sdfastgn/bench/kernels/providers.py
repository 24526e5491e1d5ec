"""Implementations to time against each other: of GroupNorm+SiLU, and of what produces its input. One is one entry of ``PROVIDERS``.

What a call computes is its *task*; the tasks and their inputs are in ``kernels/run.py``.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from sdfastgn.bench import stable_fast

Call = Callable[..., Any]

COPY, NORM, NORM_GIVEN, ADD, CAT = "copy", "norm", "norm, statistics given", "add", "cat"


@dataclass(frozen=True)
class Provider:
    """One implementation.

    Attributes:
        name: what the command line, the JSON and the tables call it.
        reason: None where it can run on the device, else why not, in one line.
        build: (num_groups, weight (C,), bias (C,), eps) -> a call from the task's inputs to y (N, C, H, W). In the suites of
            ``kernels/norm_suites.py``: the operation's operands -> a call from such operands to its output or outputs.
        channels_last: the layout of the inputs that it is given.
        by_default: run where the user names no providers.
        task: what it computes.
    """

    name: str
    reason: Callable[[torch.device], str | None]
    build: Callable[..., Call]
    channels_last: bool = True
    by_default: bool = True
    task: str = NORM


def always(device: torch.device) -> None:
    """The reason of what runs everywhere: there is none."""


def _copy(num_groups: int, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> Call:
    return lambda x: torch.empty_like(x).copy_(x)


def _eager(num_groups: int, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> Call:
    return lambda x: F.silu(F.group_norm(x, num_groups, weight, bias, eps))


def inductor_reason(device: torch.device) -> str | None:
    """Why torch.compile cannot run on the device."""
    if device.type == "cuda" and importlib.util.find_spec("triton") is None:
        return "torch.compile needs triton on CUDA; it is not installed"
    return None


def compiled(function: Call) -> Call:
    """``function`` under torch.compile, for one shape."""
    import torch._dynamo

    # Every shape is a compilation of its own; without a reset the tenth would fall back to eager.
    torch._dynamo.reset()
    return torch.compile(function, dynamic=False)


def _inductor(num_groups: int, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> Call:
    return compiled(_eager(num_groups, weight, bias, eps))


def _stable_fast(num_groups: int, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> Call:
    forward = stable_fast.group_norm_silu()

    def call(x: torch.Tensor) -> torch.Tensor:
        return forward(x, num_groups, weight, bias, eps)

    return call


def _needs(package: str, device: torch.device) -> str | None:
    """Why ``package``, which runs on CUDA only, cannot be used; None where it can."""
    try:
        found = importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        found = False
    if not found:
        return f"package {package} is not installed"
    return None if device.type == "cuda" else f"{package} needs CUDA; the device is {device}"


def gnnhwc_reason(device: torch.device) -> str | None:
    return _needs("gnNHWC", device)


def apex_reason(device: torch.device) -> str | None:
    return _needs("apex.contrib.group_norm", device)


def _with_affine(module: torch.nn.Module, weight: torch.Tensor, bias: torch.Tensor) -> torch.nn.Module:
    module = module.to(device=weight.device, dtype=weight.dtype)
    module.load_state_dict({"weight": weight, "bias": bias})
    return module


def gnnhwc(num_groups: int, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.nn.Module:
    """gnNHWC's GroupNorm+SiLU as a module with these parameters."""
    from gnNHWC.custom_gn import GN_NHWC

    return _with_affine(GN_NHWC(num_groups, weight.numel(), eps=eps, activation="silu"), weight, bias)


def apex(num_groups: int, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.nn.Module:
    """apex's GroupNorm+SiLU as a module with these parameters. Raises ValueError where it has no kernel for so many channels."""
    from apex.contrib.group_norm import GroupNorm

    module = GroupNorm(
        num_groups, weight.numel(), eps=eps, device=weight.device, dtype=weight.dtype, act="silu"
    )
    supported: Any = getattr(module, "SUPPORTED_CHANNELS", None)
    if supported is not None and weight.numel() not in supported:
        raise ValueError(f"apex has no kernel for {weight.numel()} channels and would run PyTorch's")
    return _with_affine(module, weight, bias)


def _sdfastgn(num_groups: int, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> Call:
    import sdfastgn

    return lambda x: sdfastgn.group_norm(x, num_groups, weight, bias, eps, activation="silu")


def _sdfastgn_given(num_groups: int, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> Call:
    import sdfastgn

    return lambda x, statistics: sdfastgn.group_norm(
        x, num_groups, weight, bias, eps, activation="silu", statistics=statistics
    )


def _add(num_groups: int, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> Call:
    return torch.add


def _add_with_statistics(num_groups: int, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> Call:
    import sdfastgn

    return lambda x, residual: sdfastgn.add_with_statistics(x, residual)[0]


def _cat(num_groups: int, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> Call:
    return lambda a, b: torch.cat((a, b), dim=1)


def _cat_with_statistics(num_groups: int, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> Call:
    import sdfastgn

    return lambda a, b: sdfastgn.cat_with_statistics(a, b)[0]


def _native_reason(device: torch.device) -> str | None:
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    return (
        None if version >= (2, 14) else f"torch {torch.__version__} has no channels-last GroupNorm; 2.14 does"
    )


# stable_fast comes after all that launch Triton kernels: its import touches Triton.
PROVIDERS: tuple[Provider, ...] = (
    Provider("copy", always, _copy, task=COPY),
    Provider("eager_nchw", always, _eager, channels_last=False),
    Provider("eager_nhwc", always, _eager),
    Provider("native_nhwc", _native_reason, _eager),
    Provider("sdfastgn", always, _sdfastgn),
    Provider("sdfastgn_given", always, _sdfastgn_given, task=NORM_GIVEN),
    Provider("add", always, _add, task=ADD),
    Provider("add_with_statistics", always, _add_with_statistics, task=ADD),
    Provider("cat", always, _cat, task=CAT),
    Provider("cat_with_statistics", always, _cat_with_statistics, task=CAT),
    Provider("inductor", inductor_reason, _inductor, by_default=False),
    Provider("gnnhwc", gnnhwc_reason, gnnhwc),
    Provider("apex", apex_reason, apex),
    Provider("stable_fast", stable_fast.kernel_reason, _stable_fast),
)

NAMES: tuple[str, ...] = tuple(provider.name for provider in PROVIDERS)
OURS, YARDSTICK = "sdfastgn", "copy"
# Names of the providers of GroupNorm+SiLU alone, which compete.
NORMS: tuple[str, ...] = tuple(provider.name for provider in PROVIDERS if provider.task == NORM)
# What each of the other ops of this package is measured by.
BASELINES = {"sdfastgn_given": YARDSTICK, "add_with_statistics": "add", "cat_with_statistics": "cat"}


def by_name(name: str) -> Provider:
    """The registry's entry. Raises ValueError that lists the names."""
    for provider in PROVIDERS:
        if provider.name == name:
            return provider
    raise ValueError(f"providers.by_name: unknown provider {name!r}; there are {', '.join(NAMES)}")
