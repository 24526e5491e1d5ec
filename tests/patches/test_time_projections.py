"""One kernel for the time embedding's projections of all ResNet blocks of a call: how many launches, and never a stale one."""

from __future__ import annotations

import copy
import functools
import gc
import weakref

import pytest
import torch
from diffusers import ControlNetModel, UNet2DConditionModel, UNet2DModel
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn

import sfastgn
from sfastgn.kernels import act_linear_config
from sfastgn.kernels.launch import Launch
from sfastgn.patches import packing, shared_product, time_projections
from sfastgn.patches.resnet_block import FusedResnetBlock2D, ResnetBlock2D
from sfastgn.patches.shared_embedding import EMBEDDING
from tests.kernels import samples

WHERE = {"device": "cpu"}
# Without attention: Triton's interpreter is slow.
SIZES = {
    "block_out_channels": (8, 24), "norm_num_groups": 4, "layers_per_block": 1, "cross_attention_dim": 12,
    "down_block_types": ("DownBlock2D",) * 2, "mid_block_type": "UNetMidBlock2D",
}  # fmt: skip


@pytest.fixture(autouse=True, params=samples.DEVICES)
def as_on_a_gpu(request, monkeypatch):
    """Kernels without the dispatcher, on a CPU too."""
    monkeypatch.setitem(WHERE, "device", request.param)
    with samples.kernels(direct=True):
        yield


@pytest.fixture
def launches(monkeypatch):
    """Rows of the weight of each projection with two biases, the embedding's and conv1's, that was launched."""
    found: list[int] = []
    launch = Launch.__call__

    def note(self: Launch, stream: int, *tensors: Tensor | None) -> None:
        if self.kernel.__name__ == "_act_linear_kernel" and all(bias is not None for bias in tensors[2:4]):
            found.append(tensors[1].shape[0])
        launch(self, stream, *tensors)

    monkeypatch.setattr(Launch, "__call__", note)
    return found


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(WHERE["device"])


def unet(**options) -> UNet2DConditionModel:
    torch.manual_seed(2)
    model = UNet2DConditionModel(sample_size=4, up_block_types=("UpBlock2D",) * 2, **SIZES, **options).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter)
    return model.to(WHERE["device"])


def twins(build=unet):
    """(optimised, stock) with the same weights."""
    stock = build()
    return sfastgn.optimize(copy.deepcopy(stock), cuda_graphs=False), stock


def call(model, seed: int = 0):
    dtype = next(model.parameters()).dtype
    with torch.no_grad():
        return model(random(2, 4, 4, 4, seed=seed).to(dtype), 3, random(2, 5, 12, seed=1).to(dtype)).sample


def blocks(model) -> list:
    return [m for m in model.modules() if isinstance(m, ResnetBlock2D)]


def widths(model) -> list[int]:
    return [m.time_emb_proj.out_features for m in blocks(model)]


def in_order_of_calls(model) -> list[int]:
    parts = (*model.down_blocks, model.mid_block, *model.up_blocks)
    return [resnet.time_emb_proj.out_features for part in parts for resnet in part.resnets]


def agree(a: Tensor, b: Tensor, tolerance: float = 5e-5) -> None:
    torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance)


def test_one_launch_for_all(launches):
    fused, stock = twins()
    assert len(blocks(stock)) == 7
    agree(call(fused), call(stock))
    assert launches == [sum(widths(fused))]
    launches.clear()
    agree(call(fused, seed=4), call(stock, seed=4))
    assert launches == [sum(widths(fused))]


def control() -> ControlNetModel:
    torch.manual_seed(3)
    model = ControlNetModel(**SIZES, conditioning_embedding_out_channels=(4, 8)).eval()
    for layer in (*model.controlnet_down_blocks, model.controlnet_mid_block):
        nn.init.normal_(layer.weight)
    return model.to(WHERE["device"])


def test_a_controlnet(launches):
    fused, stock = twins(control)
    inputs = random(2, 4, 4, 4), 3, random(2, 5, 12, seed=1), random(2, 3, 8, 8, seed=2)
    with torch.no_grad():
        ours, theirs = (model(*inputs, return_dict=False) for model in (fused, stock))
    agree(ours[1], theirs[1], 2e-4)
    assert launches == [sum(widths(fused))]


def test_an_unconditional_unet(launches):
    def build():
        torch.manual_seed(3)
        kinds = {"down_block_types": ("DownBlock2D",) * 2, "up_block_types": ("UpBlock2D",) * 2}
        sizes = {"block_out_channels": (8, 24), "norm_num_groups": 4, "layers_per_block": 1, "add_attention": False}
        model = UNet2DModel(sample_size=4, **sizes, **kinds)
        return model.eval().to(WHERE["device"])

    fused, stock = twins(build)
    with torch.no_grad():
        agree(*(model(random(2, 3, 4, 4), 3).sample for model in (fused, stock)))
    assert launches == [sum(widths(fused))]


def test_blocks_that_are_scaled_by_their_embedding_share_nothing(launches):
    fused, stock = twins(functools.partial(unet, resnet_time_scale_shift="scale_shift"))
    agree(call(fused), call(stock))
    assert EMBEDDING.groups_of(fused) == ()
    assert not launches  # none with conv1's bias


def test_other_activations_are_groups_of_their_own(launches):
    fused, stock = twins()
    for model in (fused, stock):
        blocks(model)[2].nonlinearity = nn.GELU()
    agree(call(fused), call(stock))
    assert launches == in_order_of_calls(fused)  # the group is not what it was
    launches.clear()
    sfastgn.optimize(sfastgn.restore(fused), cuda_graphs=False)
    agree(call(fused), call(stock))
    others = widths(fused)
    alone = others.pop(2)
    assert sorted(launches) == sorted([sum(others), alone])


def test_many_rows_are_matrix_products(launches, monkeypatch):
    monkeypatch.setattr(act_linear_config, "_FEW_ROWS", 1)
    fused, stock = twins()
    agree(call(fused), call(stock))
    assert not launches


# --- never stale ----------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def in_place(model):
    for i, block in enumerate(blocks(model)):
        block.time_emb_proj.weight.mul_(i - 1.5)
        block.time_emb_proj.bias.add_(0.1)
        block.conv1.bias.mul_(2)


def through_data(model):
    for block in blocks(model):
        block.conv1.bias.data += 0.3 * random(len(block.conv1.bias), seed=8).to(block.conv1.bias)


def loaded(model):
    model.load_state_dict({k: v * 0.9 for k, v in model.state_dict().items()})


def lora(model, target="time_emb_proj"):
    torch.manual_seed(5)
    inject_adapter_in_model(LoraConfig(r=2, target_modules=[target], init_lora_weights=False), model.mid_block)
    model.to(WHERE["device"])


def lora_of_a_convolution(model):
    lora(model, "conv1")


def hook(model):
    blocks(model)[1].time_emb_proj.register_forward_hook(lambda m, i, y: y * 2)


def hook_on_a_convolution(model):
    blocks(model)[1].conv1.register_forward_hook(lambda m, i, y: y * 2)


def hook_on_the_activation(model):
    blocks(model)[1].nonlinearity.register_forward_hook(lambda m, i, y: y * 2)


def replaced_parameter(model):
    layer = blocks(model)[3].time_emb_proj
    layer.weight = nn.Parameter(layer.weight.detach() * 2)


def replaced_bias(model):
    conv = blocks(model)[0].conv1
    conv.bias.data = conv.bias.data * 2


def no_bias(model):
    blocks(model)[0].conv1.bias = None


def replaced_block(model):
    block = copy.deepcopy(model.mid_block.resnets[0])
    with torch.no_grad():
        block.conv1.bias.mul_(3)
    model.mid_block.resnets[0] = block


def restored_part(model):
    sfastgn.restore(model.mid_block)
    with torch.no_grad():
        model.mid_block.resnets[0].conv1.bias.mul_(3)


def swapped(model):
    a, b = (block.time_emb_proj.weight for block in model.up_blocks[0].resnets)
    a.data, b.data = b.data, a.data


STILL_ONE = [in_place, through_data, loaded]
APART = [
    lora, lora_of_a_convolution, hook, hook_on_a_convolution, hook_on_the_activation, replaced_parameter, replaced_bias, no_bias,
    replaced_block, restored_part, swapped,
]  # fmt: skip


@pytest.mark.parametrize("change", [*STILL_ONE, *APART], ids=lambda f: f.__name__)
def test_changes_between_two_calls(launches, change):
    fused, stock = twins()
    before = call(fused)
    for model in (fused, stock):
        change(model)
    launches.clear()
    agree(call(fused), call(stock), 2e-4)
    assert not torch.allclose(call(stock), before, atol=1e-4)
    assert (sum(widths(fused)) in launches) == (change in STILL_ONE)


def written_weights(model):
    with torch.no_grad():
        model.up_blocks[-1].resnets[-1].time_emb_proj.weight.mul_(2)


def written_bias(model):
    with torch.no_grad():
        model.up_blocks[-1].resnets[-1].conv1.bias.mul_(2)


def moved_bias(model):
    conv = model.up_blocks[-1].resnets[-1].conv1
    conv.bias.data = conv.bias.data * 2


def other_activation(model):
    model.up_blocks[-1].resnets[-1].nonlinearity = nn.ReLU()


def late_hook(model):
    model.up_blocks[-1].resnets[-1].time_emb_proj.register_forward_hook(lambda m, i, y: y * 2)


WITHIN = [written_weights, written_bias, moved_bias, other_activation, late_hook]


@pytest.mark.parametrize("change", WITHIN, ids=lambda f: f.__name__)
def test_changes_in_the_middle_of_a_call(change):
    """After the first blocks have taken theirs, before the last one does."""
    fused, stock = twins()
    outputs, before = [], call(stock)
    for model in (fused, stock):
        model.mid_block.register_forward_hook(lambda m, i, y, model=model: change(model))
        outputs.append(call(model))
    agree(*outputs, tolerance=2e-4)
    assert not torch.allclose(outputs[1], before, atol=1e-5)


@pytest.mark.parametrize("how", ["other", "written"])
def test_an_embedding_that_changes_on_the_way(launches, how):
    fused, stock = twins()
    other = random(2, 32, seed=9)

    def change(module, args, kwargs):
        if how == "written":
            args[1].mul_(2)
            return None
        return (args[0], other, *args[2:]), kwargs

    outputs = []
    for model in (fused, stock):
        model.mid_block.resnets[0].register_forward_pre_hook(change, with_kwargs=True)
        outputs.append(call(model))
    agree(*outputs, tolerance=2e-4)
    middle = fused.mid_block.resnets[0].time_emb_proj.out_features
    assert launches == [sum(widths(fused)), *([middle] if how == "other" else [sum(widths(fused))])]


# --- modes, copies, memory -------------------------------------------------------------------------------------------------------


def test_with_gradients_each_runs_alone(launches):
    fused, stock = twins()
    grads = []
    for model in (fused, stock):
        model(random(2, 4, 4, 4), 3, random(2, 5, 12, seed=1)).sample.square().mean().backward()
        grads.append([p.grad for p in model.parameters()])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=5e-3)
    assert sum(widths(fused)) not in launches


def test_autocast_and_inference_mode(launches):
    fused, stock = twins()
    with torch.autocast(WHERE["device"], torch.bfloat16):
        agree(call(fused), call(stock), 8e-2)
    assert not launches
    with torch.inference_mode():
        agree(call(fused), call(stock))
    assert launches == in_order_of_calls(fused)  # an embedding that does not count what is written into it is not kept


def test_another_dtype_and_back(launches):
    fused, stock = twins()
    for model in (fused, stock):
        model.half()
    agree(call(fused).float(), call(stock).float(), 2e-2)
    assert launches == [sum(widths(fused))]
    launches.clear()
    for model in (fused, stock):
        model.float()
    agree(call(fused), call(stock))
    assert launches == [sum(widths(fused))]


def test_a_copy_shares_after_its_next_move(launches):
    fused, stock = twins()
    other = copy.deepcopy(fused)
    agree(call(other), call(stock))
    assert launches == in_order_of_calls(other)
    launches.clear()
    other.half().float()
    agree(call(other), call(stock.half().float()))
    agree(call(fused), call(stock), 1e-2)
    assert launches == [sum(widths(other)), sum(widths(fused))]


def test_restore_leaves_nothing(launches):
    fused, stock = twins()
    assert EMBEDDING.groups_of(fused)
    sfastgn.restore(fused)
    assert EMBEDDING.groups_of(fused) is None
    assert not fused._forward_pre_hooks
    assert not fused._forward_hooks
    assert all(type(block) is ResnetBlock2D for block in blocks(fused))
    assert not any(packing._allocation(block) for block in blocks(fused))
    assert torch.equal(call(fused), call(stock))
    assert not launches
    sfastgn.optimize(fused, cuda_graphs=False)
    call(fused)
    assert launches == [sum(widths(fused))]


def test_restoring_a_part_gives_it_memory_of_its_own(launches):
    fused, stock = twins()
    allocation = packing._allocations[blocks(fused)[0]]
    sfastgn.restore(fused.mid_block)
    [block] = fused.mid_block.resnets
    storage = torch.UntypedStorage._new_with_weak_ptr(allocation.cdata)
    start, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
    inside = {id(b): start <= b.conv1.bias.data_ptr() < end for b in blocks(fused)}
    assert [not inside[id(b)] for b in blocks(fused)] == [b is block for b in blocks(fused)]
    agree(call(fused), call(stock))
    assert launches == [w for w, b in zip(widths(fused), blocks(fused), strict=True) if b is not block]


def test_parameters_are_what_they_were_but_for_their_addresses():
    stock = unet()
    fused = copy.deepcopy(stock)

    def described():
        return [(n, id(p), p.stride(), p.storage_offset(), p.untyped_storage().nbytes(), p.is_leaf)
                for n, p in fused.named_parameters() if p.dim() < 4]  # fmt: skip

    before = described()
    sfastgn.optimize(fused, cuda_graphs=False)
    assert described() == before
    assert all(map(torch.equal, fused.state_dict().values(), stock.state_dict().values()))


def test_nothing_keeps_a_model_or_its_weights():
    fused, _ = twins()
    reference = packing._allocations[blocks(fused)[0]]
    call(fused)
    assert shared_product._running.call is None
    model = weakref.ref(fused)
    del fused
    gc.collect()
    assert model() is None
    assert reference.expired()


def test_who_is_claimed_and_why_not():
    model = unet()
    assert time_projections.FUSION.claims(model)
    assert time_projections.FUSION.reason_to_skip(model) is None
    for block in blocks(model):
        block.forward = functools.partial(block.forward)
    assert time_projections.FUSION.reason_to_skip(model) == "fewer than two of its ResNet blocks can be fused"
    assert not time_projections.FUSION.claims(FusedResnetBlock2D(in_channels=10, groups=5))


def test_parts_called_by_themselves_share_nothing(launches):
    fused, stock = twins()
    x, temb = random(2, 8, 4, 4), random(2, 32)
    with torch.no_grad():
        agree(*(model.down_blocks[0].resnets[0](x, temb) for model in (fused, stock)))
    assert launches == [8]


@pytest.mark.gpu
def test_in_a_graph():
    stock = unet().to("cuda", torch.float16)
    fused = sfastgn.optimize(copy.deepcopy(stock), cuda_graphs=True)
    for _ in range(3):
        agree(call(fused).float(), call(stock).float(), 3e-2)
        for model in (fused, stock):
            through_data(model)
    assert sum(graphs.replays for graphs in sfastgn.report(fused).graphs) == 3
