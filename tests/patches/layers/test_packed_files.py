"""Models with packed weights in copies and files: nothing missing, larger or shared."""

import copy
import io
import pickle

import accelerate
import pytest
import safetensors.torch
import torch
from diffusers import AutoencoderKL, UNet2DConditionModel
from diffusers.models.attention_processor import Attention

import sdfastgn
from tests.patches import samples
from tests.patches.layers.packing_cases import attention, call, check, describe, is_packed

pytestmark = pytest.mark.fused_on_cpu


def through_pickle(model):
    return pickle.loads(pickle.dumps(model))


def through_torch_save(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, through_pickle, through_torch_save], ids=lambda f: f.__name__
)
def test_copies_have_memory_of_their_own(duplicate):
    model, stock = attention(), attention()
    twin = duplicate(sdfastgn.optimize(model))
    check(twin, stock)
    # Unpickled weights are packed when they move: until then the unpickler holds their tensors.
    assert is_packed(twin) == (duplicate is copy.deepcopy)
    twin.to(torch.float64).to(torch.float32)
    assert is_packed(twin)
    assert is_packed(model)
    with torch.no_grad():
        twin.to_k.weight.zero_()
    check(model, stock)
    with torch.no_grad():
        stock.to_k.weight.zero_()
    check(twin, stock)
    sdfastgn.restore(twin)
    assert torch.equal(call(twin), call(stock))


@pytest.mark.parametrize("write", [pickle.dumps, "torch.save", "one weight"], ids=str)
def test_files_are_no_larger(write):
    def size(model):
        if callable(write):
            return len(write(model.state_dict()))
        buffer = io.BytesIO()
        torch.save(model.state_dict() if write == "torch.save" else model.to_k.weight, buffer)
        return buffer.tell()

    stock, model = attention(), sdfastgn.optimize(attention())
    assert is_packed(model)
    assert abs(size(model) - size(stock)) <= 0.02 * size(stock)


def unet():
    torch.manual_seed(3)
    return samples.unet(block_out_channels=(32, 32), norm_num_groups=32, cross_attention_dim=16)


@pytest.mark.parametrize(
    ("safe", "shard"),
    [
        pytest.param(True, "5GB", id="safetensors"),
        pytest.param(True, "200KB", id="safetensors-in-parts"),
        pytest.param(False, "5GB", id="pickle"),
    ],
)
def test_save_pretrained_and_back(tmp_path, safe, shard):
    stock, model = unet(), sdfastgn.optimize(unet())
    assert any(is_packed(m) for m in model.modules() if isinstance(m, Attention))
    model.save_pretrained(tmp_path, safe_serialization=safe, max_shard_size=shard)
    again = UNet2DConditionModel.from_pretrained(tmp_path)
    assert list(again.state_dict()) == list(stock.state_dict())
    assert all(map(torch.equal, again.state_dict().values(), stock.state_dict().values()))


def test_accelerates_save_drops_nothing(tmp_path):
    """accelerate takes parameters in one storage for tied weights, and writes only the first."""
    stock, model = attention(), sdfastgn.optimize(attention())
    accelerate.Accelerator(cpu=True).save_model(model, tmp_path)
    written = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert written.keys() == stock.state_dict().keys()
    assert all(torch.equal(written[k], v) for k, v in stock.state_dict().items())


@pytest.mark.parametrize("module", [True, False], ids=["upstreams-fusing", "and-back"])
def test_fuse_qkv_projections(module):
    stock, model = unet().eval(), sdfastgn.optimize(unet().eval())
    x, context = torch.randn(1, 4, 8, 8), torch.randn(1, 3, 16)
    for m in (stock, model):
        m.fuse_qkv_projections()
        if not module:
            m.unfuse_qkv_projections()
    with torch.no_grad():
        found, expected = (m(x, 3, context).sample for m in (model, stock))
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)


def test_vae_restored_bit_for_bit():
    torch.manual_seed(4)
    model = AutoencoderKL(block_out_channels=(32,), norm_num_groups=4).eval()
    x = torch.randn(1, 3, 8, 8)
    with torch.no_grad():
        before, parameters = model(x).sample, describe(model)
        sdfastgn.optimize(model)
        assert is_packed(model.decoder.mid_block.attentions[0])
        torch.testing.assert_close(model(x).sample, before, atol=2e-5, rtol=2e-5)
        sdfastgn.restore(model)
        assert torch.equal(model(x).sample, before)
    assert describe(model) == parameters
