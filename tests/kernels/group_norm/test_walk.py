"""The backward of GroupNorm in one program a group, for more data than caches hold."""

import pytest
import torch

from sdfastgn.kernels.common import gpu
from sdfastgn.kernels.common.activations import ACTIVATIONS
from sdfastgn.kernels.common.launch import Launch
from sdfastgn.kernels.common.sizes import next_power_of_2
from sdfastgn.kernels.group_norm import config as group_norm_config
from sdfastgn.kernels.group_norm.config import WalkConfig, walk_config
from sdfastgn.kernels.group_norm.op import GROUP_NORM_BACKWARD
from sdfastgn.kernels.group_norm.walk_kernels import walk_grad_kernel
from tests.kernels.gradients import OPERANDS, check, check_against_eager, check_operands, compare, leaves_of
from tests.kernels.samples import DTYPES, LAYOUTS, interpreted, make, skip_cut_off

H200_L2 = 60 * 2**20
SHAPES = [
    pytest.param((2, 16, 23, 29), 2, id="cg8-odd-hw"),
    pytest.param((1, 30, 20, 30), 2, id="cg15"),
    pytest.param((1, 32, 16, 32), 2, id="cg16-whole-tiles"),
    pytest.param((1, 2, 5000), 2, id="cg1-rank3"),
    pytest.param((1, 16, 7, 10, 13), 2, id="rank5"),
]


@pytest.fixture
def walked(monkeypatch):
    """Sizes that the interpreter can do take this way too; the value: kernels launched."""
    for name in ("_WALK_MIN_CACHES", "_WALK_MIN_RUN", "_WALK_MIN_GROUPS"):
        monkeypatch.setattr(group_norm_config, name, 0)
    monkeypatch.setattr(group_norm_config, "_WALK_OTHER", (2048, 1024, 4))
    launched = []
    plain = Launch.__call__

    def noted(self, *args):
        launched.append(self.kernel)
        plain(self, *args)

    monkeypatch.setattr(Launch, "__call__", noted)
    GROUP_NORM_BACKWARD.plans.made.clear()
    yield launched
    GROUP_NORM_BACKWARD.plans.made.clear()


pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("shape", "groups"), SHAPES)
def test_every_shape_and_layout(shape, groups, layout, device, walked):
    check(shape, groups, torch.float32, device, layout, "silu", layout)
    assert walk_grad_kernel in walked


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation_and_dtype(activation, dtype, device, walked):
    skip_cut_off(dtype, device)
    check((2, 16, 23, 29), 2, dtype, device, "channels_last", activation, "channels_last")
    assert walk_grad_kernel in walked


@pytest.mark.parametrize("wanted", ["all", "x", "x+shift", "x+weight"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_operands(layout, wanted, device, walked):
    chosen = OPERANDS if wanted == "all" else wanted.split("+")
    check_operands((1, 30, 20, 30), 2, chosen, device, layout=layout)
    assert walk_grad_kernel in walked


def test_other_cases_take_three_launches(device, walked):
    """No gradient of x, or one that lies in the other layout."""
    shape, groups = SHAPES[0].values
    x, weight, bias = make(shape, device=device)
    leaves = leaves_of(weight, bias)
    dy = make(shape, device=device, seed=4)[0]
    compare(lambda f, w, b: f(x.to(w.dtype), groups, w, b, 1e-5, "silu"), leaves, dy)
    check(shape, groups, torch.float32, device, "channels_first", "silu", "channels_last")
    assert walk_grad_kernel not in walked


def test_far_from_zero_and_the_same_bits_again(device, walked):
    shape, groups = SHAPES[0].values
    x, weight, bias = make(shape, device=device, mean=1000.0)
    check_against_eager(x, groups, weight, bias, 1e-6)
    assert walk_grad_kernel in walked


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("activation", ["identity", "silu"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_real_shape_on_the_gpu(dtype, activation, layout):
    """The shape of PyTorch's issue #28201, for which this was made."""
    shape = (96, 512, 56, 56)
    config = walk_config(
        *shape[:2], 56 * 56, 32, layout == "channels_last", 132, H200_L2, dtype.itemsize, activation
    )
    assert (config is None) is (layout == "channels_last" and dtype is not torch.float32)
    check(shape, 32, dtype, "cuda", layout, activation, layout, direct=True, dy_mean=0.0)


@pytest.mark.parametrize(
    ("sizes", "layout", "itemsize", "expected"),
    [
        pytest.param((256, 512, 3136, 32), "last", 4, WalkConfig(1024, 1024, 16, 16), id="28201-nhwc"),
        pytest.param((256, 512, 3136, 32), "first", 4, WalkConfig(1024, 1024, 16, 16), id="28201-nchw"),
        pytest.param((128, 256, 784, 32), "first", 4, WalkConfig(512, 512, 8, 8), id="smaller-groups"),
        pytest.param((128, 256, 784, 32), "last", 4, None, id="rows-of-32-bytes"),
        pytest.param((16, 256, 784, 32), "first", 4, None, id="in-cache"),
        pytest.param((256, 512, 12544, 32), "first", 4, None, id="groups-too-large"),
        pytest.param((4, 4096, 3136, 128), "first", 4, None, id="few-groups"),
        pytest.param((256, 640, 1600, 32), "first", 4, None, id="cg20-in-blocks-of-32"),
        pytest.param(
            (256, 448, 1600, 32), "first", 4, WalkConfig(256, 256, 16, 8), id="cg14-in-blocks-of-16"
        ),
        pytest.param((256, 512, 3136, 32), "first", 2, WalkConfig(1024, 1024, 16, 16), id="fp16"),
        pytest.param(
            (65536, 16, 300, 1), "first", 4, WalkConfig(256, 256, 16, 8), id="keeps-no-more-than-there-is"
        ),
    ],
)
def test_config(sizes, layout, itemsize, expected):
    assert walk_config(*sizes, layout == "last", 132, H200_L2, itemsize, "identity") == expected


# (multiprocessors, MiB of L2)
T4, A10, A100, H100, B200 = (40, 4), (72, 6), (108, 40), (132, 50), (148, 126)


@pytest.mark.parametrize(
    ("size", "N", "HW", "walks"),
    [
        pytest.param(H100, 96, 3136, True, id="H100"),
        pytest.param(A100, 96, 3136, True, id="A100"),
        pytest.param(T4, 96, 3136, False, id="T4-holds-no-groups-of-98-KiB"),
        pytest.param(A10, 96, 3136, False, id="A10-holds-no-groups-of-98-KiB"),
        pytest.param(T4, 16, 784, True, id="T4-does-not-hold-12-MiB"),
        pytest.param(H100, 16, 784, False, id="H100-holds-12-MiB"),
        pytest.param(H100, 37, 3136, True, id="H100-does-not-hold-113-MiB"),
        pytest.param(B200, 37, 3136, False, id="B200-holds-113-MiB"),
        pytest.param(B200, 96, 12544, True, id="B200-holds-groups-of-392-KiB"),
        pytest.param(H100, 96, 12544, False, id="H100-holds-no-groups-of-392-KiB"),
        pytest.param((132, 0), 96, 3136, False, id="unknown"),
    ],
)
def test_the_size_of_the_l2_decides(size, N, HW, walks):
    """fp16, channels-first, in groups of 16 channels."""
    num_sms, l2 = size
    config = walk_config(N, 512, HW, 32, False, num_sms, l2 * 2**20, 2, "identity")
    assert (config is not None) is walks


@pytest.mark.parametrize(
    ("activation", "layout", "shift_grad", "expected"),
    [
        pytest.param("relu", "first", False, WalkConfig(1024, 1024, 16, 16), id="relu"),
        pytest.param("silu", "first", False, WalkConfig(512, 1024, 16, 32), id="silu-nchw"),
        pytest.param("silu", "last", False, WalkConfig(512, 512, 16, 32), id="silu-nhwc"),
        pytest.param("gelu", "first", False, WalkConfig(512, 512, 16, 32), id="gelu"),
        pytest.param("identity", "first", True, WalkConfig(512, 512, 16, 32), id="shift"),
    ],
)
def test_registers_decide_how_much_is_kept(activation, layout, shift_grad, expected):
    assert (
        walk_config(256, 512, 3136, 32, layout == "last", 132, H200_L2, 4, activation, shift_grad) == expected
    )


@pytest.mark.parametrize("num_sms", [1, 24, 132, 1000])
@pytest.mark.parametrize("activation", ["identity", "silu", "gelu"])
def test_tiles_are_launchable(activation, num_sms):
    for N, C, HW, groups in (
        (256, 512, 3136, 32),
        (4096, 64, 5000, 64),
        (65536, 8, 300, 8),
        (1, 2**20, 4096, 2**16),
    ):
        for last in (False, True):
            config = walk_config(N, C, HW, groups, last, num_sms, H200_L2, 4, activation)
            if config is not None:
                assert config.block_hw == next_power_of_2(config.block_hw)
                assert config.kept_hw == next_power_of_2(config.kept_hw) <= HW
                assert max(config.block_hw, config.kept_hw) * config.block_c <= 16384
                assert config.num_warps <= 32


@interpreted
def test_the_plan_asks_the_gpu_for_its_l2(walked, monkeypatch):
    """Of which nothing is left for groups as large as these."""
    monkeypatch.setattr(gpu, "l2_bytes", lambda device: 2**10)
    shape, groups = SHAPES[0].values
    check(shape, groups, torch.float32, "cpu", "channels_last", "silu", "channels_last")
    assert walk_grad_kernel not in walked


@pytest.mark.gpu
def test_pytorch_knows_the_size_of_the_l2():
    assert gpu.l2_bytes(torch.device("cuda")) >= 2**20
