"""1x1 convolutions as matrix products: which ones are, which are not, and their error."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from sdfastgn.patches.layers.convolution import pointwise
from tests.kernels import samples
from tests.patches.cases import WHERE, image

pytestmark = [pytest.mark.fused_on_cpu, pytest.mark.usefixtures("on_each_device", "without_gradients")]

PRODUCTS = [
    pytest.param({}, True, id="plain"),
    pytest.param({"bias": False}, True, id="no-bias"),
    pytest.param({"padding": "same"}, True, id="padding-same"),
    pytest.param({"kernel_size": 3, "padding": 1}, False, id="3x3"),
    pytest.param({"kernel_size": (1, 3)}, False, id="1x3"),
    pytest.param({"stride": 2}, False, id="stride"),
    pytest.param({"padding": 1}, False, id="padding"),
    pytest.param({"groups": 2}, False, id="groups"),
]


@pytest.mark.parametrize(("options", "is_product"), PRODUCTS)
@pytest.mark.parametrize("dtype", samples.DTYPES[:2])
def test_pointwise(dtype, options, is_product, products):
    conv = nn.Conv2d(**{"in_channels": 20, "out_channels": 12, "kernel_size": 1, **options}).to(
        WHERE["device"], dtype
    )
    x = image(2, 20, 5, 7, dtype=dtype)
    y = pointwise(conv, x)
    expected = copy.deepcopy(conv).double()(x.double())
    assert samples.error(y, expected) < samples.BOUNDS[dtype]
    assert y.is_contiguous(memory_format=torch.channels_last)
    assert len(products) == is_product


class Doubled(nn.Conv2d):
    def forward(self, x):
        return 2 * super().forward(x)


def hooked(conv):
    conv.register_forward_hook(lambda m, i, y: y + 1)
    return conv


def tiled(conv):
    conv._conv_forward = lambda x, weight, bias: 2 * F.conv2d(x, weight, bias)
    return conv


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda conv, x: (conv.float(), x.float()), id="float32"),
        pytest.param(lambda conv, x: (conv, x.contiguous()), id="channels-first"),
        pytest.param(lambda conv, x: (conv, x[0]), id="no-batch"),
        pytest.param(lambda conv, x: (Doubled(20, 12, 1).to(x), x), id="subclass"),
        pytest.param(lambda conv, x: (conv, nn.Parameter(x)), id="parameter"),
        pytest.param(lambda conv, x: (hooked(conv), x), id="hook"),
        pytest.param(lambda conv, x: (tiled(conv), x), id="conv-forward"),
    ],
)
def test_what_is_no_product(change, products):
    conv, x = change(
        nn.Conv2d(20, 12, 1).to(WHERE["device"], torch.float16), image(2, 20, 5, 7, dtype=torch.float16)
    )
    assert torch.equal(pointwise(conv, x), conv(x))
    assert not products


def test_a_convolution_with_wrong_channels_says_so():
    with pytest.raises(RuntimeError, match="channels"):
        pointwise(
            nn.Conv2d(20, 12, 1).to(WHERE["device"], torch.float16), image(2, 10, 4, 7, dtype=torch.float16)
        )
