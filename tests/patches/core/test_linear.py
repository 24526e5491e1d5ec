"""Linear layers of a time embedding: when they run in one kernel with what stands around them, and when as they are."""

from __future__ import annotations

import copy

import pytest
import torch
from diffusers import UNet2DConditionModel
from diffusers.models.embeddings import TimestepEmbedding
from diffusers.models.resnet import ResnetBlock2D
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn

import sdfastgn
from sdfastgn.kernels.common.launch import Launch
from sdfastgn.patches.core.linear import fused_linear, linear_of
from sdfastgn.patches.fusions.timestep_embedding import FusedTimestepEmbedding
from tests.kernels import samples
from tests.patches.samples import twins_of

WHERE = {"device": "cpu"}


@pytest.fixture(autouse=True, params=samples.DEVICES)
def plain_inference(request, monkeypatch):
    """Kernels without the dispatcher, on a CPU too."""
    monkeypatch.setitem(WHERE, "device", request.param)
    with samples.kernels(direct=True), torch.no_grad():
        yield


@pytest.fixture
def ran(monkeypatch):
    """(rows of x, of the weight, activation, number of biases) of each product that was launched."""
    found = []
    launch = Launch.__call__

    def note(self: Launch, stream: int, *tensors: Tensor | None) -> None:
        if self.kernel.__name__ == "_act_linear_kernel":
            x, weight, *biases, _ = tensors
            found.append(
                (
                    x.shape[0],
                    weight.shape[0],
                    self.constants["ACTIVATION"],
                    sum(b is not None for b in biases),
                )
            )
        launch(self, stream, *tensors)

    monkeypatch.setattr(Launch, "__call__", note)
    return found


@pytest.fixture
def linear_calls(monkeypatch):
    """The linear layers that are called as modules."""
    calls = []
    stock = nn.Linear.forward
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: calls.append(self) or stock(self, x))
    return calls


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) + 1
    return x.to(WHERE["device"], dtype)


def twins(module: nn.Module, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, nn.Module]:
    return twins_of(module, WHERE["device"], dtype)


def agree(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, atol=5e-5, rtol=5e-5)


def resnet(**options) -> nn.Module:
    return ResnetBlock2D(
        **{"in_channels": 10, "out_channels": 15, "groups": 5, "temb_channels": 16, "eps": 1e-5, **options}
    )


def image(N: int = 2, dtype: torch.dtype = torch.float32) -> Tensor:
    return samples.make((N, 10, 3, 4), dtype, WHERE["device"])[0]


# --- ResNet blocks --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "product"),
    [
        pytest.param({}, (2, 15, "silu", 2), id="shift"),
        pytest.param({"time_embedding_norm": "scale_shift"}, (2, 30, "silu", 1), id="scale-shift"),
        pytest.param({"skip_time_act": True}, (2, 15, "identity", 2), id="skip-time-act"),
        pytest.param({"non_linearity": "gelu"}, (2, 15, "gelu", 2), id="gelu"),
        pytest.param({"up": True}, (2, 15, "silu", 2), id="up"),
    ],
)
def test_a_resnet_projects_in_one_kernel(options, product, ran, linear_calls):
    fused, stock = twins(resnet(**options))
    y = fused(image(), random(2, 16))
    assert not linear_calls
    assert ran == [product]
    agree(y, stock(image(), random(2, 16)))


def test_a_resnet_is_no_less_exact_than_stock(ran):
    """Not in bfloat16, to which the interpreter does not round but cuts."""
    dtype = torch.float16
    fused, stock = twins(resnet(), dtype)
    x, temb = image(dtype=dtype), random(2, 16, dtype=dtype)
    expected = copy.deepcopy(stock).double()(x.double(), temb.double())
    assert samples.error(fused(x, temb), expected) <= 1.05 * samples.error(stock(x, temb), expected)
    assert len(ran) == 1


def hook(module):
    module.register_forward_hook(lambda m, i, y: y + 1)


def pre_hook(module):
    module.register_forward_pre_hook(lambda m, i: (i[0] * 3,))


def override(module):
    forward = module.forward
    module.forward = lambda x: forward(x).neg()


@pytest.mark.parametrize("change", [hook, pre_hook, override], ids=lambda f: f.__name__)
@pytest.mark.parametrize(
    ("name", "biases"),
    [
        pytest.param("time_emb_proj", None, id="projection"),
        pytest.param("nonlinearity", None, id="activation"),
        pytest.param("conv1", 1, id="convolution"),
        pytest.param("norm2", 1, id="norm"),
    ],
)
def test_what_is_watched_is_called(name, biases, change, ran):
    """``biases``: of the product that still runs in one kernel."""
    fused, stock = twins(resnet())
    for module in (fused, stock):
        change(module.get_submodule(name))
    agree(fused(image(), random(2, 16)), stock(image(), random(2, 16)))
    assert [product[-1] for product in ran] == ([] if biases is None else [biases])


@pytest.mark.parametrize(
    ("target", "products"),
    [pytest.param("time_emb_proj", 0, id="projection"), pytest.param("conv1", 1, id="conv")],
)
def test_lora(target, products, ran):
    config = LoraConfig(r=2, lora_alpha=4, target_modules=[target], init_lora_weights=False)
    fused, stock = twins(resnet())
    before = fused(image(), random(2, 16))
    ran.clear()
    for module in (fused, stock):
        torch.manual_seed(3)
        inject_adapter_in_model(config, module)
        module.to(WHERE["device"])
    y = fused(image(), random(2, 16))
    agree(y, stock(image(), random(2, 16)))
    assert not torch.allclose(y, before, atol=1e-3)
    assert [p[-1] for p in ran] == [1] * products


def test_biases_are_those_of_the_call(ran):
    fused, stock = twins(resnet())
    fused(image(), random(2, 16))
    for module in (fused, stock):
        module.conv1.bias.add_(1)
        module.time_emb_proj.bias = nn.Parameter(module.time_emb_proj.bias * 2)
        module.time_emb_proj.weight.data = module.time_emb_proj.weight.data.neg()
    agree(fused(image(), random(2, 16)), stock(image(), random(2, 16)))
    assert len(ran) == 2


@pytest.mark.parametrize(("N", "products"), [(1, 1), (3, 1), (16, 1), (17, 0)])
def test_many_rows_are_a_matrix_product(N, products, ran):
    fused, stock = twins(resnet())
    agree(fused(image(N), random(N, 16)), stock(image(N), random(N, 16)))
    assert len(ran) == products


def test_one_embedding_for_all_images(ran):
    """Upstream broadcasts it, so that nothing is fused behind it but the product itself."""
    fused, stock = twins(resnet())
    agree(fused(image(3), random(1, 16)), stock(image(3), random(1, 16)))
    assert ran == [(1, 15, "silu", 1)]


def test_another_dtype_of_the_embedding_is_stocks_error(ran):
    fused, stock = twins(resnet())
    for module in (fused, stock):
        with pytest.raises(RuntimeError, match="dtype"):
            module(image(), random(2, 16, dtype=torch.float16))
    assert not ran


@pytest.mark.parametrize("build", [resnet, lambda: TimestepEmbedding(16, 20)], ids=["resnet", "embedding"])
def test_autocast_and_gradients_run_the_modules(build, ran, linear_calls):
    fused, stock = twins(build())
    args = (image(), random(2, 16)) if isinstance(fused, ResnetBlock2D) else (random(2, 16),)
    with torch.autocast(WHERE["device"], torch.bfloat16):
        torch.testing.assert_close(fused(*args).float(), stock(*args).float(), atol=0.06, rtol=0.02)
    args[0].requires_grad_()  # stock PyTorch crashes without
    with torch.enable_grad():
        grads = [
            torch.autograd.grad(m(*args).square().mean(), [args[0], *m.parameters()]) for m in (fused, stock)
        ]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-3)
    assert not ran
    assert sum(a is b for a in linear_calls for b in fused.modules()) == (2 if len(args) == 2 else 4)


# --- embeddings -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "products"),
    [
        pytest.param({}, [(2, 20, "identity", 1), (2, 20, "silu", 1)], id="plain"),
        pytest.param({"out_dim": 9}, [(2, 20, "identity", 1), (2, 9, "silu", 1)], id="out-dim"),
        pytest.param({"sample_proj_bias": False}, [(2, 20, "identity", 0), (2, 20, "silu", 0)], id="no-bias"),
        pytest.param({"post_act_fn": "silu"}, [(2, 20, "identity", 1), (2, 20, "silu", 1)], id="post-act"),
        pytest.param({"act_fn": "mish"}, [(2, 20, "identity", 1)], id="mish"),
    ],
)
def test_an_embedding_is_two_kernels(options, products, ran, linear_calls):
    fused, stock = twins(TimestepEmbedding(16, 20, **options))
    y = fused(random(2, 16))
    assert len(linear_calls) == 2 - len(products)
    assert ran == products
    agree(y, stock(random(2, 16)))


def test_an_embedding_with_a_condition(ran, linear_calls):
    fused, stock = twins(TimestepEmbedding(16, 20, cond_proj_dim=6))
    y = fused(random(2, 16), random(2, 6, seed=2))
    assert linear_calls == [fused.cond_proj]
    assert len(ran) == 2
    agree(y, stock(random(2, 16), random(2, 6, seed=2)))


@pytest.mark.parametrize("name", ["linear_1", "act", "linear_2"])
def test_a_watched_part_of_an_embedding_is_called(name, ran):
    fused, stock = twins(TimestepEmbedding(16, 20))
    for module in (fused, stock):
        hook(module.get_submodule(name))
    agree(fused(random(2, 16)), stock(random(2, 16)))
    assert len(ran) == 1


def test_an_embedding_of_tokens_runs_the_modules(ran):
    """Rank 3, as of embeddings that differ from token to token."""
    fused, stock = twins(TimestepEmbedding(16, 20))
    assert torch.equal(fused(random(2, 3, 16)), stock(random(2, 3, 16)))
    assert not ran


def test_a_wrong_size_is_stocks_error(ran):
    fused, _ = twins(TimestepEmbedding(16, 20))
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        fused(random(2, 15))
    assert not ran


def test_under_a_compiler_the_graph_is_diffusers_own():
    torch._dynamo.reset()
    fused, stock = twins(TimestepEmbedding(16, 20))
    targets = []

    def backend(graph, _):
        targets.append([str(n.target) for n in graph.graph.nodes])
        return graph

    x = random(2, 16)
    for module in (fused, stock):
        assert torch.equal(torch.compile(module, backend=backend, fullgraph=True)(x), stock(x))
    assert targets[0] == targets[1]


def test_both_embeddings_of_sdxl():
    unet = UNet2DConditionModel(
        sample_size=8, block_out_channels=(20, 40), norm_num_groups=5, layers_per_block=1, cross_attention_dim=12,
        down_block_types=("DownBlock2D",) * 2, up_block_types=("UpBlock2D",) * 2, attention_head_dim=2,
        mid_block_type=None, addition_embed_type="text_time", addition_time_embed_dim=4, projection_class_embeddings_input_dim=40,
    )  # fmt: skip
    sdfastgn.optimize(unet)
    assert {type(m) for m in (unet.time_embedding, unet.add_embedding)} == {FusedTimestepEmbedding}
    sdfastgn.restore(unet)
    assert {type(m) for m in (unet.time_embedding, unet.add_embedding)} == {TimestepEmbedding}


# --- what is fused --------------------------------------------------------------------------------------------------------------


def test_a_bias_of_another_size_or_dtype_is_not_added():
    linear, x = nn.Linear(16, 5).to(WHERE["device"]), random(2, 16)
    assert fused_linear(linear, None, x, random(5)) is not None
    for extra in (random(4), random(1), random(5, dtype=torch.float16)):
        assert fused_linear(linear, None, x, extra) is None


def test_a_weight_that_is_not_contiguous_is_not_copied_at_each_call():
    linear, x = nn.Linear(16, 16).to(WHERE["device"]), random(2, 16)
    linear.weight.data = linear.weight.data.T
    assert fused_linear(linear, None, x) is None
    assert torch.equal(linear_of(linear, None, x), linear(x))


@pytest.mark.gpu
def test_a_resnet_is_captured():
    fused, _ = twins(resnet(), torch.float16)
    x, temb = image(dtype=torch.float16), random(2, 16, dtype=torch.float16)
    fused(x, temb)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = fused(x, temb)
    temb.mul_(-2)
    graph.replay()
    assert torch.equal(y, fused(x, temb))
