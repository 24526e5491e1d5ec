"""A fused forward calls its children as upstream does: as often, and with the same names of arguments.

Other code puts its own modules in their place, and may rely on how they are called. diffusers'
``SplitInferenceModule``, for example, splits the tensors that are passed by keyword.
"""

import functools

import pytest

import sdfastgn
from tests.kernels.samples import kernels
from tests.patches.children import are_called_as_in_stock, each_place
from tests.patches.samples import each_sample, output, randomize

pytestmark = pytest.mark.fused_on_cpu


@pytest.mark.drawn(4)
@each_sample
@each_place
def test_children_are_called_as_in_stock(build, call, place, launches, statistics_always_pay):
    launches.runs = False  # only the calls are compared
    with kernels(direct=True):
        optimize = functools.partial(sdfastgn.optimize, plans=False)  # a trace calls children too
        are_called_as_in_stock(randomize(build()), optimize, lambda m: output(m, call), place)
