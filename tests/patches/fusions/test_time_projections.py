"""One kernel for the time embedding's projections of all ResNet blocks of a call: how many launches, and never a stale one."""

from __future__ import annotations

import copy
import functools
import gc
import weakref

import pytest
import torch
from diffusers import ControlNetModel, UNet2DModel
from torch import nn

import sdfastgn
from sdfastgn.kernels.act_linear import config as act_linear_config
from sdfastgn.patches.fusions import time_projections
from sdfastgn.patches.fusions.resnet_block import FusedResnetBlock2D, ResnetBlock2D
from sdfastgn.patches.shared import one_product as shared_product
from sdfastgn.patches.shared import packed_weights as packing
from sdfastgn.patches.shared.time_embedding import EMBEDDING
from tests.patches.fusions import projection_cases as cases

as_on_a_gpu, launches = cases.as_on_a_gpu, cases.launches
WHERE, agree, blocks, call, in_order_of_calls, random, twins, unet, widths = (
    cases.WHERE, cases.agree, cases.blocks, cases.call, cases.in_order_of_calls, cases.random, cases.twins, cases.unet, cases.widths,
)  # fmt: skip


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
    model = ControlNetModel(**cases.SIZES, conditioning_embedding_out_channels=(4, 8)).eval()
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
        sizes = {
            "block_out_channels": (8, 24),
            "norm_num_groups": 4,
            "layers_per_block": 1,
            "add_attention": False,
        }
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
    sdfastgn.optimize(sdfastgn.restore(fused), cuda_graphs=False)
    agree(call(fused), call(stock))
    others = widths(fused)
    alone = others.pop(2)
    assert sorted(launches) == sorted([sum(others), alone])


def test_many_rows_are_matrix_products(launches, monkeypatch):
    monkeypatch.setattr(act_linear_config, "_FEW_ROWS", 1)
    fused, stock = twins()
    agree(call(fused), call(stock))
    assert not launches


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
    assert launches == in_order_of_calls(
        fused
    )  # an embedding that does not count what is written into it is not kept


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
    sdfastgn.restore(fused)
    assert EMBEDDING.groups_of(fused) is None
    assert not fused._forward_pre_hooks
    assert not fused._forward_hooks
    assert all(type(block) is ResnetBlock2D for block in blocks(fused))
    assert not any(packing._allocation(block) for block in blocks(fused))
    assert torch.equal(call(fused), call(stock))
    assert not launches
    sdfastgn.optimize(fused, cuda_graphs=False)
    call(fused)
    assert launches == [sum(widths(fused))]


def test_restoring_a_part_gives_it_memory_of_its_own(launches):
    fused, stock = twins()
    allocation = packing._allocations[blocks(fused)[0]]
    sdfastgn.restore(fused.mid_block)
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
    sdfastgn.optimize(fused, cuda_graphs=False)
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


def test_a_call_that_is_interrupted_keeps_no_weights():
    """Hooks that always run do so after exceptions, not after KeyboardInterrupt."""
    fused, _ = twins()
    reference = packing._allocations[blocks(fused)[0]]

    def stop(*_):
        raise KeyboardInterrupt

    fused.mid_block.register_forward_pre_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        call(fused)
    parts = [weakref.ref(block) for block in blocks(fused)]
    del fused
    gc.collect()
    assert not any(part() for part in parts)
    assert reference.expired()


def test_restore_of_a_model_that_has_lost_its_blocks():
    fused, _ = twins()
    fused.down_blocks, fused.up_blocks = nn.ModuleList(), nn.ModuleList()
    sdfastgn.restore(fused)
    assert not fused._forward_pre_hooks
    assert EMBEDDING.groups_of(fused) is None


@pytest.mark.parametrize("part", ["all", "mid_block"])
def test_a_part_that_is_restored_and_optimised_again(launches, part):
    fused, stock = twins()
    sdfastgn.restore(fused.mid_block)
    sdfastgn.optimize(fused if part == "all" else fused.mid_block, cuda_graphs=False)
    agree(call(fused), call(stock))
    assert launches == [sum(widths(fused))]


def test_a_hook_that_was_there_when_it_was_optimised(launches):
    stock = unet()
    fused = copy.deepcopy(stock)
    handle = blocks(fused)[1].nonlinearity.register_forward_hook(lambda m, i, y: y)
    sdfastgn.optimize(fused, cuda_graphs=False)
    handle.remove()
    fused.half().float()
    agree(call(fused), call(stock.half().float()))
    assert launches == [sum(widths(fused))]


def test_a_forward_that_runs_again_within_a_call(launches):
    """As after a capture that has failed; with a block that takes nothing."""
    fused, stock = twins()
    for model in (fused, stock):
        model.up_blocks[-1].resnets[-1].norm2 = Own(4, 8, eps=1e-5).to(WHERE["device"])
    with torch.no_grad():
        time_projections.begin(fused, ())
        inputs = random(2, 4, 4, 4), 3, random(2, 5, 12, seed=1)
        outputs = [fused.forward(*inputs).sample for _ in range(2)]
        time_projections.end(fused, (), None)
    for y in outputs:
        agree(y, call(stock))
    assert launches == [sum(widths(fused))] * 2


class Own(nn.GroupNorm):
    """A norm that is not known."""


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
    fused = sdfastgn.optimize(copy.deepcopy(stock), cuda_graphs=True)
    for _ in range(3):
        agree(call(fused).float(), call(stock).float(), 3e-2)
        for model in (fused, stock):
            for block in blocks(model):
                block.conv1.bias.data *= 1.5
    assert sum(graphs.replays for graphs in sdfastgn.report(fused).graphs) == 3
