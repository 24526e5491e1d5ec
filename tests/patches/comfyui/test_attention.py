"""The attention that fused transformer blocks hand to ComfyUI as an override."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention import SDPBackend

from tests.patches.comfyui import comfy_checkout

comfy_checkout.import_for_cpu()

from comfy.ldm.modules import attention  # noqa: E402
from comfy.ldm.modules.attention import BasicTransformerBlock  # noqa: E402
from comfy.ops import disable_weight_init  # noqa: E402

from sdfastgn.patches.comfyui import unet  # noqa: E402
from sdfastgn.patches.comfyui.inject import inject  # noqa: E402
from tests.patches import cases  # noqa: E402
from tests.patches.comfyui.comfy_models import with_random_parameters  # noqa: E402

pytestmark = [pytest.mark.fused_on_cpu, pytest.mark.usefixtures("on_each_device", "without_gradients")]
HEADS = 4


def operands(keys, dtype=torch.float16, channels=64):
    q, k, v = (
        cases.noise(2, tokens, channels, seed=seed).to(dtype) for seed, tokens in enumerate((40, keys, keys))
    )
    return q, k, v


def exact(q, k, v):
    q, k, v = (x.double().unflatten(-1, (HEADS, -1)).transpose(1, 2) for x in (q, k, v))
    weights = torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, -1)
    return (weights @ v).transpose(1, 2).flatten(2)


def near(found, expected, tolerance=2e-3):
    assert found.shape == expected.shape
    assert (found.double() - expected).norm() < tolerance * expected.norm()


@pytest.fixture
def by_pytorch(monkeypatch):
    """ComfyUI's attention by PyTorch counts its calls. Returns the list of them."""
    calls = []
    stock = unet._BY_PYTORCH

    def counted(*args, **kwargs):
        calls.append(args)
        return stock(*args, **kwargs)

    monkeypatch.setattr(unet, "_BY_PYTORCH", counted)
    return calls


@pytest.fixture
def orders(monkeypatch):
    """The GPU is one on which cuDNN is faster. Returns the orders of backends that are set."""
    found = []
    stock = unet.sdpa_kernel
    monkeypatch.setattr(
        unet, "sdpa_kernel", lambda order, **o: (found.append((order, o)), stock(order, **o))[1]
    )
    monkeypatch.setattr(unet, "gpu", SimpleNamespace(compute_capability=lambda device: (9, 0)))
    return found


@pytest.mark.parametrize("keys", [1, 77, 128])
def test_few_keys_of_a_prompt(by_pytorch, keys):
    q, k, v = operands(keys)
    found = unet._attention(unet._BY_PYTORCH, q, k, v, HEADS, is_prompt=True, transformer_options={})
    near(found, exact(q, k, v))
    assert not by_pytorch


def test_an_image_of_few_tokens_has_no_kernel_of_its_own(by_pytorch):
    q, k, v = operands(40)
    near(unet._attention(unet._BY_PYTORCH, q, k, v, HEADS), exact(q, k, v))
    assert len(by_pytorch) == 1


@pytest.mark.parametrize("keys", [40, 154])
def test_cudnn_comes_first_where_it_is_faster(by_pytorch, orders, keys):
    q, k, v = operands(keys, torch.float32)
    near(unet._attention(unet._BY_PYTORCH, q, k, v, HEADS, attn_precision=None), exact(q, k, v), 1e-5)
    assert not by_pytorch
    ((order, options),) = orders
    assert order[0] is SDPBackend.CUDNN_ATTENTION
    assert set(order) == set(unet._CUDNN_FIRST)
    assert options == {"set_priority": True}


@pytest.mark.parametrize("differs", ["function", "mask", "option", "replaced", "gradient"])
def test_else_the_chosen_attention_runs(monkeypatch, orders, differs):
    q, k, v = operands(40, torch.float32)
    given = []

    def chosen(*args, **kwargs):
        given.append((args, kwargs))
        return q

    mask, options = None, {"transformer_options": {}}
    if differs != "function":
        monkeypatch.setattr(unet, "_BY_PYTORCH", chosen)
    if differs == "mask":
        mask = torch.ones(2, 40, 40, dtype=torch.bool)
    elif differs == "option":
        options["scale"] = 2.0
    elif differs == "replaced":
        stock = torch.nn.functional.scaled_dot_product_attention
        monkeypatch.setattr(
            torch.nn.functional, "scaled_dot_product_attention", partial(stock, is_causal=True)
        )
    elif differs == "gradient":
        q.requires_grad_()
    with torch.set_grad_enabled(differs == "gradient"):
        assert unet._attention(chosen, q, k, v, HEADS, mask, is_prompt=True, **options) is q
    assert given == [((q, k, v, HEADS, mask), options)]
    assert not orders


@pytest.mark.parametrize("name", ["attention_pytorch", "attention_sub_quad"])
def test_a_block(monkeypatch, orders, name):
    """The block hands the override to ComfyUI's attention, whichever the user has chosen."""
    monkeypatch.setattr(attention, "optimized_attention", getattr(attention, name))
    block = with_random_parameters(
        BasicTransformerBlock(32, 2, 16, context_dim=12, operations=disable_weight_init)
    )
    x, context = cases.noise(2, 24, 32, seed=1), cases.noise(2, 5, 12, seed=2)
    expected = block(x, context)
    inject(block)
    near(block(x, context), expected.double(), 1e-5)
    # Self-attention and attention to the prompt, which in fp32 has no kernel of its own.
    assert len(orders) == (2 if name == "attention_pytorch" else 0)


def test_another_nodes_override_runs_instead(monkeypatch, orders):
    monkeypatch.setattr(attention, "optimized_attention", attention.attention_pytorch)
    block = with_random_parameters(
        BasicTransformerBlock(32, 2, 16, context_dim=12, operations=disable_weight_init)
    )
    x, context = cases.noise(2, 24, 32, seed=1), cases.noise(2, 5, 12, seed=2)
    calls = []

    def override(stock, *args, **kwargs):
        calls.append(stock)
        return stock(*args, **kwargs) * 0.5

    options = {"optimized_attention_override": override}
    expected = block(x, context, transformer_options=options)
    inject(block)
    near(block(x, context, transformer_options=options), expected.double(), 1e-5)
    assert len(calls) == 4
    assert not orders
