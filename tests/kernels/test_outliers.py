"""One value of a group far above the others: its place must not matter, where results are fp32.

Sums are of differences from a pivot, the first element as a rule. If that is an outlier, every
difference is rounded at its size.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F

import sdfastgn
from sdfastgn.kernels.batch_norm import config as batch_norm_config
from sdfastgn.kernels.batch_norm.backward import BATCH_NORM_BACKWARD
from sdfastgn.kernels.batch_norm.op import BATCH_NORM
from sdfastgn.kernels.common import dispatch
from sdfastgn.kernels.common.launch import Launch
from sdfastgn.kernels.common.plan_cache import PlanCache
from sdfastgn.kernels.group_norm import config as group_norm_config
from sdfastgn.kernels.group_norm.op import GROUP_NORM, GROUP_NORM_BACKWARD
from tests.kernels.samples import LAYOUTS, error, kernels, to_layout

pytestmark = pytest.mark.usefixtures("poisoned_memory", "small_sizes")
OUTLIER = 1e4
# By how much sums in another order than eager's may differ, in units in the last place of fp32: sums over
# a group, and over all samples and positions, the outliers among them.
SLACK = 4 * torch.finfo(torch.float32).eps
PARAMETER_SLACK = 4 * SLACK


@dataclass(frozen=True)
class Norm:
    """One way through the kernels: ``kernels`` are launched for ``shape``.

    ``grouped``: x as (groups, values). ``call``: of ``sdfastgn`` or of PyTorch.
    """

    shape: tuple[int, ...]
    grouped: Callable
    call: Callable
    kernels: set[str]
    groups: int = 0


def layer_norm(norm, module, x, weight, bias):
    size = (x.shape[-1:],) if module is F else ()
    return module.layer_norm(x, *size, weight, bias)


def add_layer_norm(norm, module, x, weight, bias):
    """Of two halves, whose sum is exactly x."""
    if module is F:
        return F.layer_norm(x / 2 + x / 2, x.shape[-1:], weight, bias)
    return sdfastgn.add_layer_norm(x / 2, x / 2, weight, bias)[0]


def group_norm(norm, module, x, weight, bias):
    return module.group_norm(x, norm.groups, weight, bias)


def instance_norm(norm, module, x, weight, bias):
    if module is F:
        return F.instance_norm(x, None, None, weight, bias)
    return sdfastgn.instance_norm(x, weight, bias)


def batch_norm(norm, module, x, weight, bias):
    return module.batch_norm(x, None, None, weight, bias, True)


def by_row(norm, x):
    return x.view(-1, x.shape[-1])


def by_group(norm, x):
    return x.view(x.shape[0] * (norm.groups or x.shape[1]), -1)


def by_channel(norm, x):
    return x.transpose(0, 1).reshape(x.shape[1], -1)


ROWS, CHUNKS = (
    {"_rows_kernel", "_rows_grad_kernel"},
    {"_chunk_kernel", "_normalise_kernel", "_chunk_grad_kernel"},
)
SPLIT = {"merge_kernel", "apply_kernel", "sums_kernel", "apply_grad_kernel"}
BATCH_SPLIT = {"merge_kernel", "batch_apply_kernel", "batch_apply_grad_kernel"}
NORMS = {
    "layer_norm-a-row-a-warp": Norm((66, 320), by_row, layer_norm, ROWS),
    "layer_norm-warps-share-a-row": Norm((3, 8192), by_row, layer_norm, ROWS),
    "layer_norm-chunks": Norm((2, 40000), by_row, layer_norm, CHUNKS),
    "layer_norm-of-a-sum": Norm((66, 320), by_row, add_layer_norm, ROWS),
    "layer_norm-of-a-sum-in-chunks": Norm((2, 40000), by_row, add_layer_norm, CHUNKS),
    "group_norm-small": Norm((2, 20, 7, 9), by_group, group_norm, {"small_kernel", "small_grad_kernel"}, 2),
    "group_norm-split": Norm((1, 40, 40, 41), by_group, group_norm, SPLIT, 1),
    "group_norm-walk": Norm((2, 16, 43, 49), by_group, group_norm, {"merge_kernel", "walk_grad_kernel"}, 2),
    "instance_norm-small": Norm((2, 6, 17, 19), by_group, instance_norm, {"small_grad_kernel"}),
    "instance_norm-split": Norm((1, 6, 150, 150), by_group, instance_norm, SPLIT),
    "batch_norm-small": Norm(
        (2, 7, 11, 13), by_channel, batch_norm, {"channels_kernel", "small_grad_kernel"}
    ),
    "batch_norm-split": Norm((3, 18, 39, 43), by_channel, batch_norm, BATCH_SPLIT),
}
IMAGES = [(norm, layout) for norm in NORMS if not norm.startswith("layer") for layout in LAYOUTS]
CASES = [(norm, "contiguous") for norm in NORMS if norm.startswith("layer")] + IMAGES


@pytest.fixture
def small_sizes(request, monkeypatch):
    """The interpreter's shapes take the ways of large ones; no plan is kept that was made so."""
    name = request.node.callspec.params["norm"]
    if name == "group_norm-walk":
        for constant in ("_WALK_MIN_CACHES", "_WALK_MIN_RUN", "_WALK_MIN_GROUPS"):
            monkeypatch.setattr(group_norm_config, constant, 0)
        monkeypatch.setattr(group_norm_config, "_WALK_OTHER", (2048, 1024, 4))
    if name == "batch_norm-split":
        for constant in ("_SMALL_MAX_ELEMENTS", "_SMALL_MAX_ALONE", "_SMALL_BACKWARD_MAX_ELEMENTS"):
            monkeypatch.setattr(batch_norm_config, constant, 1024)
        monkeypatch.setattr(batch_norm_config, "_MERGE_TILE", 64)  # merges of several tiles
    for op in (GROUP_NORM, GROUP_NORM_BACKWARD, BATCH_NORM, BATCH_NORM_BACKWARD):
        monkeypatch.setattr(op.plans, "made", PlanCache())


@pytest.fixture
def launched(monkeypatch):
    """Names of the kernels that were launched."""
    names, plain = set(), Launch.__call__

    def noted(self, *args):
        names.add(self.kernel.__name__)
        plain(self, *args)

    monkeypatch.setattr(Launch, "__call__", noted)
    return names


def with_outliers(norm, place, dtype):
    """(x, where the outliers are): one in each group."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(norm.shape, generator=g)
    at = torch.arange(x.numel()).view(norm.shape)
    places = norm.grouped(norm, at)
    count, size = places.shape
    column = {"first": 0, "last": size - 1}.get(place)
    columns = (
        torch.randint(1, size - 1, (count,), generator=g)
        if column is None
        else torch.tensor([column] * count)
    )
    is_outlier = torch.zeros(x.numel(), dtype=torch.bool)
    is_outlier[places[torch.arange(count), columns]] = True
    is_outlier = is_outlier.view(norm.shape)
    return torch.where(is_outlier, OUTLIER, x).to(dtype), is_outlier


def results(norm, module, operands, dy):
    """y and the gradients."""
    leaves = [t.detach().requires_grad_() for t in operands]
    y = norm.call(norm, module, *leaves)
    return y.detach(), *torch.autograd.grad(y, leaves, dy.to(y.dtype))


def check(norm, place, layout, device, dtype=torch.float32):
    x, is_outlier = with_outliers(norm, place, dtype)
    C = norm.shape[-1] if layout == "contiguous" else norm.shape[1]
    g = torch.Generator().manual_seed(1)
    weight, bias = torch.randn(C, generator=g) + 1, torch.zeros(C)
    dy = torch.randn(norm.shape, generator=g)
    operands = [t.to(device) for t in (x, weight, bias)]
    is_outlier, dy = is_outlier.to(device), dy.to(device)
    exact = results(norm, F, [t.double() for t in operands], dy.double())
    eager = results(norm, F, [t.float() for t in operands], dy)
    if layout != "contiguous":
        operands[0], dy = to_layout(operands[0], layout), to_layout(dy, layout)
    with kernels(direct=True):
        mine = results(norm, sdfastgn, operands, dy)
    assert mine[0].dtype is torch.float32
    for name, a, b, right in zip(("y", "dx", "dweight", "dbias"), mine, eager, exact, strict=True):
        if a.dtype is not torch.float32:  # rounded to the dtype of x
            continue
        slack = PARAMETER_SLACK
        if a.shape == is_outlier.shape:
            a, b, right = (t[~is_outlier] for t in (a, b, right))
            slack = SLACK
        assert error(a, right) <= error(b, right) + slack, name


@pytest.mark.drawn(3)
@pytest.mark.parametrize("place", ["first", "last", "random"])
@pytest.mark.parametrize(("norm", "layout"), CASES)
def test_other_values_are_no_less_exact_than_eagers(norm, place, layout, device, launched):
    check(NORMS[norm], place, layout, device)
    assert launched >= NORMS[norm].kernels


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    ("norm", "layout"), [case for case in CASES if case[0].startswith(("group_norm", "layer_norm"))]
)
def test_results_in_fp32_of_16_bit_values(norm, layout, device, monkeypatch):
    """As under autocast. The kernels differ from those above by the dtype that they read."""
    monkeypatch.setattr(dispatch, "autocast_dtype", lambda x: torch.float32)
    check(NORMS[norm], "first", layout, device, torch.float16)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", [OUTLIER, -OUTLIER], ids=["in-the-shift", "of-opposite-signs"])
@pytest.mark.parametrize("norm", ["group_norm-small", "instance_norm-small"])
def test_a_large_shift(norm, size, layout, device):
    """Of all channels but the first. With opposite signs, x is as large, and the sum is not."""
    norm = NORMS[norm]
    N, C = norm.shape[:2]
    g = torch.Generator().manual_seed(0)
    large = torch.full((N, C), OUTLIER).index_fill_(1, torch.tensor([0]), 0.0)
    # Multiples of 1/8, so that fp32 holds x and the sum.
    x = (torch.randn(norm.shape, generator=g) * 8).round() / 8
    x = x - large.view(N, C, 1, 1) if size < 0 else x
    x, shift = to_layout(x.to(device), layout), large.to(device)
    groups = norm.groups or C
    exact = F.group_norm(x.double().contiguous() + shift.double().view(N, C, 1, 1), groups)
    eager = F.group_norm(x.contiguous() + shift.view(N, C, 1, 1), groups)
    with kernels(direct=True), torch.no_grad():
        y = sdfastgn.group_norm(x, groups, shift=shift)
    assert error(y, exact) <= error(eager, exact) + SLACK
    assert math.isfinite(error(y, exact))
