"""What holds for each autoencoder with fused blocks, and for its own residual blocks."""

import pytest
import torch

from tests.patches import cases
from tests.patches.fusions.autoencoders import FAMILIES
from tests.patches.video_cases import (
    hooks_see_the_same,
    is_no_less_exact,
    is_restored_bit_by_bit,
    recorded,
    video,
)

pytestmark = [pytest.mark.fused_on_cpu, pytest.mark.usefixtures("on_each_device", "without_gradients")]

BLOCKS = {name: family.block for name, family in FAMILIES.items() if family.block is not None}
each_family = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
each_block = pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS)


@pytest.fixture
def fused(block, monkeypatch):
    """A list of the layers that run fused."""
    found = []
    for module, name in block.fused:
        recorded(monkeypatch, module, name, found)
    return found


@pytest.mark.drawn(2)
@each_family
def test_restored_bit_by_bit(family):
    is_restored_bit_by_bit(family.make(), *(of(x) for of, x in family.calls()))


@pytest.mark.gpu
@each_family
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_no_less_exact_than_stock(family, dtype):
    models = [model.to(dtype) for model in cases.twins(family.make(), cuda_graphs=False)]
    is_no_less_exact(models, *family.larger())


@each_block
def test_a_block_runs_fused(block, fused):
    block.same(cases.twins(block.make()), video(*block.shape))
    assert fused


@pytest.mark.parametrize(
    ("block", "layer"),
    [pytest.param(b, layer, id=f"{name}-{layer}") for name, b in BLOCKS.items() for layer in b.layers],
)
def test_a_hook_on_a_layer_sees_what_it_saw(block, layer):
    models = cases.twins(block.make())
    x = video(*block.shape)
    hooks_see_the_same(models, layer, lambda: block.same(models, x))


@pytest.mark.parametrize(
    ("block", "change"),
    [
        pytest.param(block, change, id=f"{name}-{what}")
        for name, block in BLOCKS.items()
        for what, change in block.changes.items()
    ],
)
def test_changed_layers_run_stocks_code(block, change):
    models = cases.twins(block.make())
    for model in models:
        change(model)
        model.to(cases.WHERE["device"])
    block.same(models, video(*block.shape))


@each_block
def test_autocast_runs_stocks_code(block, fused):
    models = cases.twins(block.make())
    with torch.autocast(cases.WHERE["device"], torch.bfloat16):
        found = [model(video(*block.shape)) for model in models]
    cases.agree(*found, bound=3e-2)
    assert not fused


@pytest.mark.parametrize("name", [name for name in BLOCKS if "hunyuan" in name])
def test_under_a_compiler_the_graph_is_diffusers_own(name):
    block = BLOCKS[name]
    cases.compiles_to_stocks_graph(cases.twins(block.make()), lambda model: model(video(*block.shape)))


@each_block
def test_with_gradients_stocks_code_runs(block, fused):
    models = cases.twins(block.make())
    cases.same_gradients(models, video(*block.shape).requires_grad_())
    assert not fused
