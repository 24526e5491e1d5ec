"""Gradients of ``sdfastgn.group_norm`` by the Triton kernels, against fp64."""

import pytest
import torch

import sdfastgn
from sdfastgn.kernels.common import gpu
from sdfastgn.kernels.common.activations import ACTIVATIONS
from sdfastgn.kernels.common.launch import Launch
from sdfastgn.kernels.common.plan_cache import PlanCache
from sdfastgn.kernels.group_norm import config as group_norm_config
from sdfastgn.kernels.group_norm.config import SmallConfig, launch_config, merge_config
from sdfastgn.kernels.group_norm.op import GROUP_NORM_BACKWARD
from sdfastgn.kernels.statistics.config import statistics_config
from tests.kernels.gradients import (
    OPERANDS,
    check,
    check_against_eager,
    check_operands,
    compare,
    grads_of,
    leaves_of,
)
from tests.kernels.samples import (
    BOUNDS,
    DTYPES,
    LAYOUTS,
    first_alone,
    interpreted,
    make,
    skip_cut_off,
    to_layout,
)

pytestmark = pytest.mark.usefixtures("poisoned_memory")

# (shape, groups); the name says CG. Small: a group of x and of dy fits into registers.
SMALL = [
    pytest.param((1, 12, 8, 8), 3, id="cg4"),
    pytest.param((2, 30, 7, 9), 3, id="cg10-odd-hw"),
    pytest.param((2, 60, 5, 3), 2, id="cg30"),
    pytest.param((2, 160, 3, 3), 2, id="cg80"),
    pytest.param((1, 37, 4, 4), 37, id="cg1"),
    pytest.param((2, 24, 1, 1), 3, id="one-pixel"),
    pytest.param((1, 12, 33), 4, id="rank3"),
    pytest.param((2, 6, 3, 4, 5), 2, id="rank5"),
    pytest.param((40, 8), 1, id="rank2-many-samples"),
]
SPLIT = [
    pytest.param((1, 40, 9, 11), 1, id="cg40-odd-hw"),
    pytest.param((2, 66, 9, 11), 2, id="c-not-a-multiple-of-the-block"),
    pytest.param((2, 34, 11, 13), 34, id="cg1-odd"),
    pytest.param((1, 64, 90), 1, id="rank3-c64"),
    pytest.param((1, 32, 5, 6, 7), 1, id="rank5"),
]
GPU_SHAPES = [
    pytest.param((2, 1280, 8, 8), 32, id="2x1280x8x8"),
    pytest.param((2, 2560, 16, 16), 32, id="2x2560x16x16"),
    pytest.param((2, 960, 64, 64), 32, id="2x960x64x64"),
    pytest.param((1, 512, 96, 136), 32, id="1x512x96x136"),
    pytest.param((1, 128, 1024, 1024), 32, id="1x128x1024x1024"),
    pytest.param((128, 256, 28, 28), 32, id="128x256x28x28"),
    pytest.param((2, 64, 16, 64, 64), 64, id="instance-norm-3d"),
]


def test_the_shapes_take_both_ways():
    for params, small in ((SMALL, True), (SPLIT, False)):
        for param in params:
            shape, groups = param.values
            config = launch_config(
                *shape[:2], torch.Size(shape[2:]).numel(), groups, True, 132, backward=True
            )
            assert isinstance(config, SmallConfig) is small, param.id


@pytest.mark.drawn(9)
@pytest.mark.parametrize("dy_layout", LAYOUTS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("shape", "groups"), SMALL + SPLIT)
def test_every_shape_and_layout(shape, groups, layout, dy_layout, device):
    if len(shape) == 2 and "channels_last" in (layout, dy_layout):
        pytest.skip("rank 2 has one layout")
    check(shape, groups, torch.float32, device, layout, "silu", dy_layout)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("shape", "groups"), first_alone([SMALL[1], SPLIT[0]]))
def test_every_activation_and_dtype(shape, groups, activation, dtype, device):
    skip_cut_off(dtype, device)
    check(shape, groups, dtype, device, "channels_last", activation, "channels_last")


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "groups"), GPU_SHAPES)
def test_real_shapes_on_the_gpu(shape, groups, dtype, layout):
    # Sums over a million gradients of one sign would not fit into fp16.
    check(shape, groups, dtype, "cuda", layout, "silu", layout, direct=True, dy_mean=0.0)


# --- operands -----------------------------------------------------------------


@pytest.mark.parametrize("layout", first_alone(LAYOUTS))
@pytest.mark.parametrize("rows", [None, "one-row", "flat"], ids=["sample", "one-row", "flat"])
@pytest.mark.parametrize(("shape", "groups"), [SMALL[1], SPLIT[1]])
def test_operands(shape, groups, rows, layout, device):
    size = {"one-row": (1, shape[1]), "flat": shape[1:2]}.get(rows)
    check_operands(shape, groups, OPERANDS, device, layout=layout, rows=size, direct=False)


@pytest.mark.parametrize("wanted", [*OPERANDS, "x+ada_scale", "bias+shift"])
@pytest.mark.parametrize(("shape", "groups"), [SMALL[1], SPLIT[0]])
def test_only_what_is_wanted(shape, groups, wanted, device):
    check_operands(shape, groups, wanted.split("+"), device, activation="gelu")


# --- incoming gradients -------------------------------------------------------

GRADIENTS = {
    "expanded": lambda shape: torch.randn(1).expand(shape),
    "one-row-for-all": lambda shape: torch.randn(shape[1:]).expand(shape),
    "gaps": lambda shape: torch.randn(*shape[:-1], 2 * shape[-1])[..., ::2],
    "gaps-channels-last": lambda shape: torch.randn(shape[0], *shape[2:], shape[1] + 3).movedim(-1, 1)[
        :, : shape[1]
    ],
    "unaligned": lambda shape: torch.randn(torch.Size(shape).numel() + 1)[1:].view(shape),
}


@pytest.mark.parametrize("name", GRADIENTS)
@pytest.mark.parametrize(("shape", "groups"), first_alone([SPLIT[0], SMALL[1]]))
def test_any_incoming_gradient(shape, groups, name, device):
    x, weight, bias = make(shape, device=device)
    dy = GRADIENTS[name](shape).to(device)
    leaves = leaves_of(x, weight, bias)
    compare(lambda f, x, w, b: f(x, groups, w, b, 1e-5, "silu"), leaves, dy, direct=True)


@interpreted
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_in_the_other_layout_are_not_copied(layout, monkeypatch):
    x, weight, bias = make((2, 30, 7, 9), layout=layout)
    other = next(name for name in LAYOUTS if name != layout)
    dy = make((2, 30, 7, 9), layout=other, seed=4)[0]
    seen = []
    plain = Launch.__call__
    monkeypatch.setattr(
        Launch,
        "__call__",
        lambda self, *args: (seen.append(args), plain(self, *args))[1],
    )
    grads_of(lambda x: sdfastgn.group_norm(x, 3, weight, bias), leaves_of(x), dy)
    pointers = {t.data_ptr() for args in seen for t in args if isinstance(t, torch.Tensor)}
    assert dy.data_ptr() in pointers


@pytest.mark.parametrize("contiguous", [True, False], ids=["tokens", "tokens-with-gaps"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("shape", "groups"), [SMALL[1], SPLIT[0]])
def test_tokens(shape, groups, layout, contiguous, device):
    x, weight, bias = make(shape, device=device, layout=layout)
    size = (shape[0], torch.Size(shape[2:]).numel(), shape[1])
    dy = (
        torch.randn(size, device=device)
        if contiguous
        else torch.randn(size[0], size[2], size[1], device=device).mT
    )
    leaves = leaves_of(x, weight, bias)
    got = compare(lambda f, x, w, b: f(x, groups, w, b, 1e-5, "silu", tokens=True), leaves, dy)
    assert got[0].stride() == x.stride()


@pytest.mark.parametrize("shape", [(0, 6, 4, 4), (2, 6, 0, 4)], ids=["no-samples", "no-positions"])
def test_empty(shape):
    x, weight, bias = torch.ones(shape, requires_grad=True), torch.ones(6, requires_grad=True), torch.ones(6)
    y = sdfastgn.group_norm(x, 3, weight, bias)
    dx, dweight = torch.autograd.grad(y.sum(), (x, weight))
    assert dx.shape == x.shape
    assert torch.equal(dweight, torch.zeros(6))


# --- numerics -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "mean"), [(torch.float32, 1000.0), (torch.float16, 30.0)], ids=["fp32-1000", "fp16-30"]
)
@pytest.mark.parametrize(("shape", "groups"), [SMALL[1], SPLIT[0]])
def test_no_less_exact_than_eager_far_from_zero(shape, groups, dtype, mean, device):
    x, weight, bias = make(shape, dtype, device, mean=mean)
    x = to_layout((x - mean) / 1.5 + mean, "channels_last")
    check_against_eager(x, groups, weight, bias, BOUNDS[dtype])


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    ("layout", "shape", "num_sms"),
    [
        pytest.param("channels_last", (33, 5, 5, 103), 1, id="channels_last"),
        pytest.param("channels_first", (33, 5, 15, 137), 8, id="channels_first"),
    ],
)
def test_many_chunks_and_samples(layout, shape, num_sms, device, monkeypatch):
    """Loops over tiles of a chunk, over chunks and over samples, which few sizes take."""
    monkeypatch.setattr(gpu, "num_sms", lambda device: num_sms)
    monkeypatch.setattr(GROUP_NORM_BACKWARD.plans, "made", {})
    monkeypatch.setattr(group_norm_config, "_MERGE_TILE", 8)
    HW = torch.Size(shape[2:]).numel()
    config = statistics_config(*shape[:2], HW, layout == "channels_last", num_sms, kind="backward")
    assert config.rows > config.tile_rows
    assert merge_config(config.chunks, shape[1], 1, backward=True).block_p < config.chunks
    check(shape, 1, torch.float32, device, layout, "silu", layout)


@pytest.fixture
def parts(monkeypatch):
    """Few samples are summed in parts already."""
    monkeypatch.setattr(group_norm_config, "_PARAMETER_TILE", (4, 32))
    for name in ("_PARAMETER_MOST_TILES", "_PARAMETER_MIN_TILES"):
        monkeypatch.setattr(group_norm_config, name, 2)
    monkeypatch.setattr(GROUP_NORM_BACKWARD.plans, "made", PlanCache())


@pytest.mark.drawn(1)
@pytest.mark.usefixtures("parts")
@pytest.mark.parametrize("rows", [None, (5,)], ids=["rows-of-operands", "shared-operands"])
@pytest.mark.parametrize("wanted", ["weight bias", "bias ada_scale", " ".join(OPERANDS)])
def test_many_samples_are_summed_in_parts(wanted, rows, device):
    shape, groups = (37, 5, 3, 3), 1
    check_operands(shape, groups, wanted.split(), device, rows=rows)
    (plan,) = GROUP_NORM_BACKWARD.plans.made.values()
    assert plan.parts_sum.numbers[0] == 5


@pytest.mark.usefixtures("parts")
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_sums_in_parts_are_rounded_once(dtype, device):
    check((37, 5, 3, 3), 5, dtype, device, "channels_last", "identity", "channels_last")


@pytest.mark.gpu
@pytest.mark.parametrize(("shape", "groups"), [((100000, 32), 8), ((4096, 320), 32)], ids=str)
def test_real_numbers_of_samples_on_the_gpu(shape, groups):
    check(shape, groups, torch.float16, "cuda", "channels_first", "silu", "channels_first", dy_mean=0.0)


def test_nan_stays_in_its_sample(device):
    x, weight, bias = make((2, 30, 7, 9), device=device)
    x[0, 0, 0, 0] = float("nan")
    dy = make((2, 30, 7, 9), device=device, seed=4)[0]
    (dx,) = grads_of(lambda x: sdfastgn.group_norm(x, 3, weight, bias, 1e-5, "silu"), leaves_of(x), dy)
    assert dx[0, :10].isnan().all()
    assert dx[0, 10:].isfinite().all()
    assert dx[1].isfinite().all()
