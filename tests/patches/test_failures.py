"""If a kernel cannot be compiled, a fused module goes on in plain PyTorch, also in the middle of a call."""

import warnings

import pytest
from triton.runtime import interpreter
from triton.runtime.errors import OutOfResources

import sdfastgn
from sdfastgn.kernels.common import dispatch
from tests.kernels.samples import interpreted, kernels
from tests.patches.cases import agree
from tests.patches.samples import each_part, output, sample, stock_and_output

pytestmark = [pytest.mark.fused_on_cpu, pytest.mark.usefixtures("statistics_always_pay")]


NO_COMPILER = RuntimeError("Failed to find C compiler.")
TOO_LARGE = OutOfResources(300_000, 232_448, "shared memory")


class NoKernels:
    """Replaces Triton's launches: the first ``works`` of them work, all later ones raise ``error``."""

    def __init__(self, monkeypatch):
        self.launch, self.works, self.count = interpreter.GridExecutor.__call__, 10**6, 0
        self.error = NO_COMPILER
        monkeypatch.setattr(
            interpreter.GridExecutor, "__call__", lambda *args, **kwargs: self(*args, **kwargs)
        )

    def __call__(self, *args, **kwargs):
        self.count += 1
        if self.count > self.works:
            raise self.error
        return self.launch(*args, **kwargs)


@pytest.mark.drawn(1)
@each_part
@interpreted
def test_a_part_is_right(build, call, monkeypatch):
    go_on(build, call, monkeypatch)


@pytest.mark.slow
@interpreted
def test_a_unet_is_right(monkeypatch):
    go_on(*sample("conv_norm_out"), monkeypatch)


def go_on(build, call, monkeypatch):
    monkeypatch.setattr(dispatch, "why_off", None)
    module, expected = stock_and_output(build, call)
    sdfastgn.optimize(module, cuda_graphs=False)
    launches = NoKernels(monkeypatch)
    with kernels(direct=True):
        agree(output(module, call), expected)
        middle, last = launches.count // 2, launches.count - 1
        for works in {middle} if last > 20 else {0, 1, middle, last} & set(range(last + 1)):
            dispatch.why_off, launches.works, launches.count = None, works, 0
            with pytest.warns(UserWarning, match="C compiler"):
                agree(output(module, call), expected)
            with warnings.catch_warnings():
                warnings.simplefilter("error", UserWarning)
                agree(output(module, call), expected)
            dispatch.why_off, launches.count, launches.error = None, 0, TOO_LARGE
            with pytest.warns(UserWarning, match="shared memory"):
                agree(output(module, call), expected)
            assert dispatch.why_off is None
            dispatch.ops_off.clear()
            launches.error = NO_COMPILER
