"""Training with patched models: autocast, checkpointing, function transforms, several processes;
always against stock gradients.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from diffusers.models.resnet import ResnetBlock2D
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import sdfastgn
from sdfastgn.models.architectures import randomize
from tests import ddp_worker as worker
from tests.patches import samples
from tests.processes import run_together

pytestmark = pytest.mark.fused_on_cpu

WORKER = Path(__file__).with_name("ddp_worker.py")

LAYOUTS = [
    pytest.param(torch.channels_last, id="channels-last"),
    pytest.param(torch.contiguous_format, id="channels-first"),
]


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype) * 1.5 + 2


def agree(ours: dict[str, Tensor], stock: dict[str, Tensor], bound: float = 1e-4) -> None:
    """Relative to the largest gradient: one that is zero but for rounding has no digits to compare."""
    assert ours.keys() == stock.keys()
    assert ours
    largest = max(float(gradient.norm()) for gradient in stock.values())
    for key, gradient in stock.items():
        assert (ours[key] - gradient).norm() <= bound * (gradient.norm() + 1e-3 * largest), key


# --- autocast -------------------------------------------------------------------------------------

DTYPES = [
    pytest.param(torch.float32, torch.float32, id="fp32"),
    pytest.param(torch.bfloat16, torch.float32, id="bf16-fp32-weights"),
    pytest.param(torch.bfloat16, torch.bfloat16, id="bf16"),
]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("dtype", "weights"), DTYPES)
def test_autocast_follows_eager(
    device: str, layout: torch.memory_format, dtype: torch.dtype, weights: torch.dtype
) -> None:
    ours = randomize(sdfastgn.GroupNorm(3, 30, activation="silu"), 3).to(device, weights)
    stock = nn.GroupNorm(3, 30).to(device, weights)
    stock.load_state_dict(ours.state_dict())
    x, dy = (noise(2, 30, 9, 7, seed=seed).to(device, dtype) for seed in (0, 1))
    results = []
    for norm, act, form in ((ours, nn.Identity(), layout), (stock, F.silu, torch.contiguous_format)):
        leaf = x.contiguous(memory_format=form).detach().requires_grad_()
        with torch.autocast(device, torch.bfloat16):
            y = act(norm(leaf))
        y.backward(dy.to(y.dtype))
        results.append((y, leaf.grad, norm.weight.grad, norm.bias.grad))
    for got, want in zip(*results, strict=True):
        assert got is not None
        assert want is not None
        assert got.dtype is want.dtype
        eps = torch.finfo(want.dtype if want.dtype == dtype else dtype).eps
        assert (got.double() - want.double()).norm() <= 4 * eps * want.double().norm()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_model_under_autocast_is_no_less_exact_than_stock(device: str) -> None:
    stock = worker.build().to(device)
    ours = sdfastgn.optimize(copy.deepcopy(stock), strict=True)

    def flat(model: nn.Module, autocast: bool) -> Tensor:
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            found = worker.gradients(model, slice(None), device)
        assert {gradient.dtype for gradient in found.values()} == {torch.float32}
        return torch.cat([gradient.double().reshape(-1) for gradient in found.values()])

    exact = flat(stock, False)
    errors = [float((flat(model, True) - exact).norm() / exact.norm()) for model in (ours, stock)]
    assert 1e-4 < errors[0] <= 1.25 * errors[1]


# --- gradient checkpointing -----------------------------------------------------------------------


def reentrant(module: nn.Module, *args: Any) -> Any:
    return checkpoint(module.__call__, *args, use_reentrant=True)


def unet_step() -> tuple[nn.Module, Any]:
    model = samples.unet(block_out_channels=(8, 12), norm_num_groups=4, cross_attention_dim=8)
    # With reentrant checkpoints a gradient reaches a block's weights only if its input wants one.
    return model, lambda m: m(noise(2, 4, 8, 8).requires_grad_(), 10, noise(2, 3, 8, seed=1)).sample


def vae_step() -> tuple[nn.Module, Any]:
    model = samples.vae(block_out_channels=(8, 12), norm_num_groups=4)
    return model, lambda m: m(noise(2, 3, 8, 8).requires_grad_()).sample


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    "function", [pytest.param(None, id="diffusers-own"), pytest.param(reentrant, id="reentrant")]
)
@pytest.mark.parametrize("step", [pytest.param(unet_step, id="unet"), pytest.param(vae_step, id="vae")])
def test_gradient_checkpointing(step: Any, function: Any) -> None:
    stock, call = step()
    randomize(stock, 3).train()
    ours = sdfastgn.optimize(copy.deepcopy(stock), strict=True)
    calls = []

    def gradients(model: nn.Module) -> dict[str, Tensor]:
        model.zero_grad()
        call(model).square().mean().backward()
        return {k: p.grad.clone() for k, p in model.named_parameters() if p.grad is not None}

    expected, plain = gradients(stock), gradients(ours)
    block = next(m for m in ours.modules() if isinstance(m, ResnetBlock2D))
    block.conv1.register_forward_hook(lambda *_: calls.append(1))
    ours.enable_gradient_checkpointing(*([function] if function else []))
    checkpointed = gradients(ours)
    assert len(calls) == 2, "a checkpointed block runs again in the backward"
    agree(checkpointed, plain, 1e-5)
    agree(checkpointed, expected)


# --- function transforms --------------------------------------------------------------------------

# torch.library.register_autograd makes an autograd.Function without setup_context, which torch.func
# refuses, and forward-mode AD passes by in silence: tangents are lost. Plain PyTorch under a
# transform would be right.


def ours(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return sdfastgn.group_norm(x, 3, weight, bias, activation="silu")


def stock(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.silu(F.group_norm(x.contiguous(), 3, weight, bias))


def energy(f: Any, *args: Tensor) -> Tensor:
    return f(*args).square().sum()


def dual(f: Any, *args: Tensor) -> Tensor:
    with torch.autograd.forward_ad.dual_level():
        made = torch.autograd.forward_ad.make_dual(args[0], args[0].square())
        tangent = torch.autograd.forward_ad.unpack_dual(f(made, *args[1:])).tangent
        return torch.zeros_like(args[0]) if tangent is None else tangent


def double_backward(f: Any, *args: Tensor) -> tuple[Tensor, ...]:
    leaves = [t.clone().requires_grad_() for t in args]
    first = torch.autograd.grad(energy(f, *leaves), leaves, create_graph=True)
    return torch.autograd.grad(sum(t.square().sum() for t in first), leaves)


def of_module(f: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    if f is stock:
        return stock(x, weight, bias)
    module = sdfastgn.GroupNorm(3, 6, activation="silu")
    return torch.func.functional_call(module, {"weight": weight, "bias": bias}, (x,))


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "transformed",
    [
        pytest.param(of_module, id="functional-call"),
        pytest.param(double_backward, id="double-backward"),
        pytest.param(lambda f, x, w, b: torch.func.vmap(f, (0, None, None))(x[:, None], w, b), id="vmap-x"),
        pytest.param(
            lambda f, x, w, b: torch.func.vmap(f, (None, 0, 1))(
                x, torch.stack([w, b]), torch.stack([b, w], 1)
            ),
            id="vmap-weights",
        ),
        pytest.param(lambda f, *a: torch.func.grad(functools.partial(energy, f), (0, 1, 2))(*a), id="grad"),
        pytest.param(lambda f, *a: torch.func.jacrev(f)(*a), id="jacrev"),
        pytest.param(lambda f, *a: torch.func.hessian(functools.partial(energy, f))(*a), id="hessian"),
        pytest.param(
            lambda f, x, w, b: torch.func.vmap(
                torch.func.grad(functools.partial(energy, f), 1), (0, None, None)
            )(x[:, None], w, b),
            id="gradients-per-sample",
        ),
        pytest.param(lambda f, *a: torch.func.jacfwd(f)(*a), id="jacfwd"),
        pytest.param(lambda f, *a: torch.func.jvp(functools.partial(energy, f), a, a), id="jvp"),
        pytest.param(dual, id="dual-numbers"),
    ],
)
def test_function_transforms(transformed: Any, layout: torch.memory_format) -> None:
    x = noise(2, 6, 2, 3, dtype=torch.float64).contiguous(memory_format=layout)
    weight, bias = noise(6, seed=1, dtype=torch.float64), noise(6, seed=2, dtype=torch.float64)
    torch.testing.assert_close(transformed(ours, x, weight, bias), transformed(stock, x, weight, bias))


# --- several processes ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "backend",
    [
        pytest.param("gloo", marks=pytest.mark.slow),
        pytest.param(
            "nccl",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
            ],
        ),
    ],
)
def test_gradients_of_two_processes(backend: str, tmp_path: Path) -> None:
    """Each has half of the batch; the averaged gradients are those of one process with all of it."""
    store, result = tmp_path / "store", tmp_path / "result.pt"
    command = [sys.executable, str(WORKER)]
    run_together(
        [[*command, str(rank), "2", backend, str(store), str(result)] for rank in range(2)],
        tmp_path, OMP_NUM_THREADS="1", NCCL_NVLS_ENABLE="0",
    )  # fmt: skip
    device = "cuda" if backend == "nccl" else "cpu"
    whole = worker.gradients(worker.build().to(device), slice(None), device)
    agree(torch.load(result), whole, 1e-4 if backend == "gloo" else 1e-2)


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


def fully_sharded(model: nn.Module) -> nn.Module:
    fully_shard(model.mid_block, mesh=(mesh := init_device_mesh("cpu", (1,))))
    return fully_shard(model, mesh=mesh)


def flat_sharded(model: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))


@pytest.mark.slow
@pytest.mark.usefixtures("process_group")
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("shard", [fully_sharded, flat_sharded])
def test_steps_of_a_model_in_fsdp(shard: Callable[[nn.Module], nn.Module]) -> None:
    """Its weights are in FSDP's memory at each call, and at the end of a call some are there still."""

    def losses(is_optimized: bool) -> list[float]:
        model = shard(worker.build())
        x, found = noise(2, 1, 8, 8), []
        with torch.no_grad():
            model(x, 10)
        if is_optimized:
            assert sdfastgn.report(sdfastgn.optimize(model)).channels_last_weights == 0
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        for _ in range(3):
            loss = model(x, 10).sample.square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    stock = losses(False)
    assert abs(stock[2] - stock[0]) > 0.01 * stock[0]
    assert losses(True) == pytest.approx(stock, rel=1e-4)


@pytest.mark.slow
@pytest.mark.usefixtures("process_group")
def test_the_layout_is_not_changed_under_ddp() -> None:
    """Its buckets have the weights' former strides, and would hand out the gradients' values in
    another order.
    """
    model = worker.build()
    strides = [p.stride() for p in model.parameters()]
    wrapper = DistributedDataParallel(model)
    for target in (wrapper, model):
        with pytest.raises(
            ValueError, match=r"sdfastgn\.optimize: .* is in a DistributedDataParallel.*before it is wrapped"
        ):
            sdfastgn.optimize(target)
    assert not sdfastgn.report(model).fused
    assert [p.stride() for p in model.parameters()] == strides
    sdfastgn.restore(target)  # nothing to do
    del wrapper, target
    sdfastgn.optimize(model)
    wrapper = DistributedDataParallel(model)
    sdfastgn.optimize(wrapper)  # a second call changes nothing
    with pytest.raises(
        ValueError, match=r"sdfastgn\.restore: .* is in a DistributedDataParallel.*wrapper is gone"
    ):
        sdfastgn.restore(model)
    assert sdfastgn.report(model).fused
    sdfastgn.optimize(worker.build())  # another model


@pytest.mark.slow
@pytest.mark.usefixtures("process_group")
def test_a_model_without_convolutions_may_be_in_ddp() -> None:
    """``optimize`` changes no layout in it, so its buckets stay right."""
    net, text_encoder = nn.Sequential(nn.Conv2d(4, 8, 3), nn.GroupNorm(4, 8)), nn.Linear(8, 8)
    pipe = SimpleNamespace(components={"unet": net, "text_encoder": text_encoder})
    wrapper = DistributedDataParallel(text_encoder)
    with sdfastgn.optimized(pipe):
        assert sdfastgn.report(pipe).channels_last_weights == 1
    sdfastgn.restore(sdfastgn.optimize(pipe))
    assert sdfastgn.report(pipe).channels_last_weights == 0
    assert wrapper.module is text_encoder
