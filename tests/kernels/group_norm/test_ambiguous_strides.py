"""One channel or one position, in strides that mean channels-first and channels-last alike, on a CPU.

PyTorch's channels-last GroupNorm crashes the process there (2.13), so all calls run in one process of their
own.
"""

import itertools
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import sdfastgn

ROOT = Path(__file__).parents[3]
# (shape, number of groups); a group of one channel each is InstanceNorm, too.
SHAPES = [
    ((2, 1, 4, 4), 1),
    ((1, 1, 3, 5), 1),
    ((2, 1, 2, 3, 4), 1),
    ((2, 4, 1, 1), 2),
    ((3, 8, 1, 1), 4),
    ((2, 6, 1, 1, 1), 3),
    ((2, 1, 1, 1), 1),
]
OPERANDS = ("x", "weight", "bias")


def calls():
    """(function, its arguments, the operands that want gradients)"""
    for (shape, groups), wanted in itertools.product(SHAPES, _subsets(OPERANDS)):
        C = shape[1]
        parameters = {"weight": torch.linspace(1, 2, C), "bias": torch.linspace(-1, 1, C)}
        x = torch.arange(math.prod(shape)).sin().view(shape)
        yield (lambda x, groups=groups, **p: sdfastgn.group_norm(x, groups, **p)), x, parameters, wanted
        if len(x[0, 0].flatten()) > 1:
            yield sdfastgn.instance_norm, x, parameters, wanted


def _subsets(names):
    return itertools.chain.from_iterable(itertools.combinations(names, k) for k in (1, 2, 3))


def ambiguous(x):
    """``x`` with the strides of a channels-last tensor."""
    last = torch.channels_last if x.dim() == 4 else torch.channels_last_3d
    return torch.empty(x.shape, memory_format=last).copy_(x)


def gradients(function, x, parameters, wanted):
    given = {"x": x, **parameters}
    operands = {name: t.requires_grad_(name in wanted) for name, t in given.items()}
    y = function(**operands)
    return torch.autograd.grad(y.double().sin().sum(), [operands[name] for name in wanted])


def main():
    count = 0
    for function, x, parameters, wanted in calls():
        true = gradients(function, x.double(), {k: t.double() for k, t in parameters.items()}, wanted)
        found = gradients(function, ambiguous(x), parameters, wanted)
        for a, b in zip(found, true, strict=True):
            torch.testing.assert_close(a.double(), b, atol=1e-5, rtol=1e-5)
        count += 1
    print(count)


@pytest.mark.slow
def test_every_call_is_right():
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.group_norm.test_ambiguous_strides"],
        cwd=ROOT, env=os.environ, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout) == sum(1 for _ in calls())


if __name__ == "__main__":
    main()
