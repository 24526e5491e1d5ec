"""A kernel on the CPU that takes addresses, as a compiled kernel does."""

import ctypes
import types

import torch
import triton.language as tl

from sdfastgn.kernels.common.launch import Launch


def _scaled_kernel(x_ptr, weight_ptr, y_ptr, count, TIMES: tl.constexpr):
    """The parameters of the kernel."""


def _scaled(x, weight, y, count, times):
    """``y = times * weight * x`` for ``count`` fp32 elements at these addresses."""
    x, weight, y = (None if p is None else (ctypes.c_float * count).from_address(p) for p in (x, weight, y))
    for i in range(count):
        y[i] = times * x[i] * (1.0 if weight is None else weight[i])


class _Launcher:
    """The launcher of a compiled kernel, of Triton 3.7 and later."""

    def __init__(self):
        self.calls = []

    def __call__(
        self, gridX, gridY, gridZ, stream, function,
        kernel_metadata, launch_metadata, launch_enter_hook, launch_exit_hook, *args,
    ):  # fmt: skip
        assert (gridX, gridY, gridZ, stream, function, kernel_metadata) == (1, 1, 1, 0, "f", "m")
        self.calls.append(args)
        _scaled(*args)


class Compiled:
    """A kernel as ``Launch`` takes it. ``through_triton``: its launches by ``kernel[grid]``."""

    fn = staticmethod(_scaled_kernel)

    def __init__(self):
        self.launcher, self.through_triton = _Launcher(), []

    def __getitem__(self, grid):
        def call(*args, TIMES, **options):
            self.through_triton.append(args)
            _scaled(*[t.data_ptr() if isinstance(t, torch.Tensor) else t for t in args], TIMES)
            return types.SimpleNamespace(
                run=self.launcher, function="f", packed_metadata="m", hash="0f" * 32, metadata_group={}
            )

        return call


def scaled(kernel, count, times=2.0):
    """A launch of ``kernel`` for ``count`` elements: ``y = times * weight * x``."""
    return Launch(kernel, 1, 1, count=count, TIMES=times)
