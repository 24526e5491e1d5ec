"""Which way a step takes: kernels, layouts, statistics, memory that it writes over."""

import types

import pytest
import torch
import torch.nn.functional as F

from sdfastgn.kernels.attention import wide_heads, wide_heads_kernels
from sdfastgn.kernels.common.layout import is_channels_last
from sdfastgn.kernels.product import packed
from sdfastgn.kernels.statistics import op as statistics_op
from sdfastgn.kernels.upsample import conv as upsample_conv
from sdfastgn.plans.run import steps
from tests.kernels import samples
from tests.plans.run import step_cases

IMAGE = (2, 6, 5, 7)
# Name of a case -> the kernels that it launches.
KERNELS = {
    "upsample-2x": ["upsample"],
    "pad-copies-of-frames": ["frames"],
    "pad-mirrored-frames": ["frames"],
    "pad-mirrored-video": [],
    "upsample-first-once": ["frames"],
    "upsample-rows-of-frames": ["frames"],
    "act-linear": ["act_linear"],
    "group-norm": ["small"],
    "group-norm-framewise": ["small"],
    "modulated-norm": ["statistics", "merge", "frames"],
    "channel-norm": ["channel_norm"],
    "channel-norm-rms-4": ["frames"],
    "frames-zeros": ["frames"],
    "add": ["statistics"],
    "add-activated": ["statistics"],
    "add-bias": ["statistics"],
    "blend": ["statistics"],
    "add-bias-activated": ["statistics"],
    "cat-two": ["statistics"],
    "layer-norm": ["rows"],
    "add-layer-norm": ["rows"],
    "ada-norm": ["ada_norm"],
    "rotate": ["rotate"],
    "gated-rows": ["gated"],
    "gated-images": ["gated"],
    "rotate-norm": ["rotate"],
    "rotate-halves": ["rotate"],
    "rotate-layer-norm": ["rotate"],
    "join-heads": ["rotate"] * 3,
}


@pytest.fixture
def on_kernels():
    with torch.no_grad(), samples.kernels(direct=True):
        yield


def last(*shape, dtype=torch.float32):
    return samples.channels_last(torch.randn(shape, dtype=dtype))


# ---- kernels


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_runs(name, launches, on_kernels):
    shapes, step, _ = step_cases.CASES[name]
    step(*(last(*shape) for shape in shapes))
    assert [kernel for kernel, *_ in launches] == KERNELS[name]


@pytest.mark.parametrize("name", ["add-nothing", "add-bias-nothing", "blend-nothing", "cat-two-nothing"])
def test_no_kernel_runs_for_empty_tensors(name, launches, on_kernels):
    shapes, step, _ = step_cases.CASES[name]
    step(*(last(*shape) for shape in shapes))
    assert launches == []


@pytest.mark.parametrize("bias", [torch.randn(4), None], ids=["bias", "no-bias"])
@pytest.mark.parametrize("emits", [False, True])
def test_an_upsampling_convolution_in_phases(bias, emits, monkeypatch, on_kernels):
    monkeypatch.setattr(upsample_conv, "phases_pay", lambda *sizes: True)
    x, weight = last(*IMAGE), last(4, 6, 3, 3)
    y, statistics = steps.upsample_conv(x, weight, bias, emits)
    torch.testing.assert_close(
        y, F.conv2d(step_cases.larger(x, (2, 2)), weight, bias, padding=1), atol=1e-4, rtol=1e-4
    )
    assert (statistics is not None) is emits
    check_statistics(y, statistics)


def check_statistics(y, statistics):
    """A norm with the statistics of ``y`` is its norm."""
    if statistics is not None:
        found = steps.group_norm(y, 2, None, None, 1e-5, "silu", None, statistics, False)
        torch.testing.assert_close(found, F.silu(F.group_norm(y, 2)), atol=1e-4, rtol=1e-4)


SUMS = {
    "add": lambda x, emits: steps.add(x, last(*IMAGE), torch.randn(6), 1.5, emits),
    "add-channels-first": lambda x, emits: steps.add(x, torch.randn(IMAGE), None, 1.0, emits),
    "add-bias": lambda x, emits: steps.add_bias_(x, torch.randn(6), emits),
    "add-activated": lambda x, emits: steps.add(x, last(*IMAGE), torch.randn(6), 1.5, emits, "silu"),
    "add-bias-activated": lambda x, emits: steps.add_bias_(x, torch.randn(6), emits, "gelu"),
    "blend": lambda x, emits: steps.blend(x, last(*IMAGE), torch.randn(6), *torch.randn(2, 2), emits),
    "cat-two": lambda x, emits: steps.cat_two(x, last(2, 4, 5, 7), emits),
}


@pytest.mark.parametrize("emits", [False, True])
@pytest.mark.parametrize("name", SUMS)
def test_statistics_are_those_of_the_result(name, emits, on_kernels):
    y, statistics = SUMS[name](last(*IMAGE), emits)
    assert is_channels_last(y)
    assert (statistics is not None) is emits
    check_statistics(y, statistics)


@pytest.mark.parametrize(("size", "are_used"), [((6, 4, 5, 8), True), ((6, 4, 5, 7), False)])
def test_statistics_of_images_serve_the_video_of_them(size, are_used, on_kernels, monkeypatch):
    """If the chunks of an image have the same size. Else the norm computes its own."""
    y = last(*size)
    chunks = 4
    statistics = statistics_op.reference_channel_statistics(y, chunks)
    given = []
    norm = steps.group_norm_op.group_norm

    def noted(*args, **options):
        given.append(options["statistics"])
        return norm(*args, **options)

    monkeypatch.setattr(steps.group_norm_op, "group_norm", noted)
    video = y.unflatten(0, (2, 3)).transpose(1, 2)
    found = steps.group_norm(video, 2, None, None, 1e-5, "silu", None, statistics, False)
    torch.testing.assert_close(found, F.silu(F.group_norm(video, 2)), atol=1e-4, rtol=1e-4)
    of_frames = steps.group_norm(video, 2, None, None, 1e-5, "silu", None, statistics, True)
    expected = F.silu(F.group_norm(y, 2)).unflatten(0, (2, 3)).transpose(1, 2)
    torch.testing.assert_close(of_frames, expected, atol=1e-4, rtol=1e-4)
    assert [None if s is None else s.shape[:3] for s in given] == [
        (2, 2, 12) if are_used else None,
        (2, 6, 4),
    ]


@pytest.mark.parametrize("name", SUMS)
def test_no_statistics_without_kernels(name):
    y, statistics = SUMS[name](last(*IMAGE), True)
    assert statistics is None
    assert is_channels_last(y)


@pytest.mark.parametrize("scale", [None, 0.3, -0.3])
def test_attention_to_few_keys(scale, launches, on_kernels):
    q, k, v = torch.randn(2, 2, 9, 32).half(), *torch.randn(2, 2, 2, 7, 32).half()
    y = steps.attention(q, k, v, None, False, scale, False)
    truth = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), scale=scale)
    torch.testing.assert_close(y.double(), truth, atol=4e-3, rtol=4e-3)
    assert len(launches) == (scale is None or scale > 0)


@pytest.mark.parametrize("shape", [(2, 9, 2, 32), (2, 9, 2, 12), (1, 9, 1, 32)])
@pytest.mark.parametrize("keys", [1, 7, 200])
def test_attention_to_first_keys_has_one_layout(shape, keys, on_kernels):
    """Baked plans count on it. Few keys run another kernel."""
    B, S, H, D = shape
    q, k = torch.randn(B, H, S, D).half(), torch.randn(B, H, 200, D).half()
    y = steps.attention_to_first(q, k, k, torch.tensor([keys]), None, False)
    assert y.transpose(1, 2).is_contiguous()
    truth = F.scaled_dot_product_attention(q.double(), *[k[:, :, :keys].double()] * 2)
    torch.testing.assert_close(y.double(), truth, atol=4e-3, rtol=4e-3)
    each = steps.attention_to_first(q, k, k, torch.tensor([keys, 150][:B]), None, False)
    assert each.transpose(1, 2).is_contiguous()
    assert torch.equal(
        each[0], steps.attention_to_first(q[:1], k[:1], k[:1], torch.tensor([keys]), None, False)[0]
    )


@pytest.mark.parametrize("scale", [None, 0.3])
def test_attention_with_wide_heads(scale, monkeypatch, launches, on_kernels):
    monkeypatch.setattr(wide_heads, "pays", lambda *sizes: True)
    monkeypatch.setattr(wide_heads_kernels, "_plans", {})
    q, k, v = torch.randn(3, 1, 2, 9, 264).half()
    y = steps.attention(q, k, v, None, False, scale, False)
    truth = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), scale=scale)
    torch.testing.assert_close(y.double(), truth, atol=4e-3, rtol=4e-3)
    assert len(launches) > 0


def test_attention_of_one_query_for_all_samples_stays_pytorchs(on_kernels, launches):
    q, (k, v) = torch.randn(1, 2, 9, 32).half(), torch.randn(2, 3, 2, 7, 32).half()
    y = steps.attention(q, k, v, None, False, None, False)
    torch.testing.assert_close(y, F.scaled_dot_product_attention(q, k, v))
    assert launches == []


# ---- layouts


@pytest.mark.parametrize(
    "name",
    [
        *("conv", "conv-3d-groups", "conv-transposed", "conv-windows", "conv-last-slice", "pointwise-conv"),
        *("pointwise-conv-3d", "upsample-conv", "upsample-2x", "upsample-image", "upsample-video"),
        *("group-norm", "group-norm-framewise", "channel-norm", "frames-zeros", "add", "add-bias", "cat-two"),
        *("cat-channels", "cat-width", "reshape-joins-channels"),
    ],
)
def test_channels_last_stays(name):
    shapes, step, _ = step_cases.CASES[name]
    with torch.no_grad():
        found = step(*(last(*shape) for shape in shapes))
    assert is_channels_last(found[0] if isinstance(found, tuple) else found)


def test_a_reshape_without_a_copy():
    x = torch.randn(2, 12, 6)
    assert steps.reshape(x, (2, 3, 4, 6)).data_ptr() == x.data_ptr()
    assert steps.reshape(x.transpose(1, 2), (2, 6, 3, 4)).data_ptr() == x.data_ptr()


# ---- products


@pytest.mark.parametrize("has_biases", [False, True])
def test_packed_parameters_are_one_product(has_biases, products, monkeypatch):
    monkeypatch.setattr(packed, "PACKED_DEVICES", ("cpu",))
    x, biases = torch.randn(3, 4), [torch.randn(n) for n in (8, 4, 8)] if has_biases else []
    weights = [torch.randn(n, 4) for n in (8, 4, 8)]
    apart = steps.linears(x, weights, biases)
    assert len(products) == 3
    packed.pack(weights, biases)
    joined = steps.linears(x, weights, biases)
    assert len(products) == 4
    for a, b in zip(joined, apart, strict=True):
        torch.testing.assert_close(a, b)
    weights[1] = torch.zeros(4, 4)
    apart = steps.linears(x, weights, biases)
    assert len(products) == 7
    assert torch.equal(apart[1], biases[1].expand(3, 4) if has_biases else torch.zeros(3, 4))


# ---- memory


@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.parametrize("place", ["channels-first", "channels-last"])
@pytest.mark.parametrize("name", step_cases.WRITERS)
def test_writers_write_over_their_first_argument(name, place, kernels):
    shapes, step, _ = step_cases.CASES[name]
    first, *others = (step_cases.PLACES[place](torch.randn(shape)) for shape in shapes)
    first = first if name != "add-linear" else first.contiguous()
    with torch.no_grad(), step_cases.PATHS["kernels" if kernels else "fp32"][1]():
        found = step(first, *others)
    assert found.data_ptr() == first.data_ptr()
    assert torch.equal(found, first)


# Names of cases whose steps may give their argument, or a view of it.
VIEWS = ("reshape", "permute", "expand", "cut", "add-no-bias")


@pytest.mark.parametrize(
    "name", [n for n in step_cases.CASES if not n.startswith((*step_cases.WRITERS, *VIEWS))]
)
def test_results_have_memory_of_their_own(name):
    shapes, step, _ = step_cases.CASES[name]
    operands = [torch.randn(shape) for shape in shapes]
    before = [t.clone() for t in operands]
    with torch.no_grad():
        found = step(*operands)
    for t in found if isinstance(found, tuple) else (found,):
        t.zero_()
    assert all(map(torch.equal, operands, before))


# ---- no step calls torch.nn.functional


@pytest.fixture
def forbidden(monkeypatch):
    """Every function of ``torch.nn.functional`` raises."""

    def refuse(*args, **kwargs):
        raise AssertionError("a function of torch.nn.functional ran")

    kinds = types.FunctionType, types.BuiltinFunctionType
    names = [name for name, value in vars(F).items() if isinstance(value, kinds) and not name.startswith("_")]
    assert {"linear", "pad", "gelu", "interpolate", "conv2d", "scaled_dot_product_attention"} <= {*names}
    for name in names:
        monkeypatch.setattr(F, name, refuse)


@pytest.mark.parametrize("kernels", [False, True])
def test_no_step_calls_nn_functional(kernels, forbidden):
    for name, (shapes, step, _) in step_cases.CASES.items():
        operands = [last(*shape) for shape in shapes]
        with torch.no_grad(), step_cases.PATHS["kernels" if kernels else "fp32"][1]():
            assert step(*operands) is not None, name


@pytest.mark.parametrize("activation", ["identity", "relu", "silu", "gelu", "gelu_tanh", "mish"])
def test_no_activation_calls_nn_functional(activation, forbidden):
    x = last(*IMAGE)
    with torch.no_grad():
        steps.group_norm(x, 2, None, None, 1e-5, activation, None, None, False)
        steps.channel_norm(x, None, None, 1.0, 1e-6, activation, 0.0)
        steps.act_linear(torch.randn(2, 3), torch.randn(4, 3), None, activation, None)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_matrix_product_computes_gelu(dtype):
    shapes = (2, 333, 256), (512, 256), (512,)
    x, weight, bias = (torch.randn(*shape, device="cuda", dtype=dtype) for shape in shapes)
    weight /= 16
    with torch.no_grad():
        y = steps.linear_gelu(x, weight, bias)
    exact = F.gelu(F.linear(x.double(), weight.double(), bias.double()), approximate="tanh")
    assert (y.shape, y.dtype) == (exact.shape, dtype)
    assert samples.error(y, exact) < samples.BOUNDS[dtype]
