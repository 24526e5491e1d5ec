"""Layout of convolutions' weights: what adapters have added and what was replaced stays as it is."""

import copy
import sys
from contextlib import contextmanager

import pytest
import torch
from diffusers import StableDiffusionPipeline
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

import sdfastgn
from sdfastgn.kernels.common.private import is_alone
from sdfastgn.patches.layout import channels_last
from tests.patches import samples
from tests.patches.changes import Half
from tests.patches.graphs.cases import agree

pytestmark = pytest.mark.fused_on_cpu

_, CALL = samples.sample("conv_norm_out-unet")


def adapted():
    """A UNet with LoRAs on 3x3 convolutions, and with a convolution that peft trains and saves as a whole."""
    unet = samples.unet().eval()
    config = {
        "target_modules": ["to_q", "conv1"],
        "modules_to_save": ["conv_out"],
        "init_lora_weights": False,
    }
    unet.add_adapter(LoraConfig(r=2, **config), adapter_name="a")
    unet.add_adapter(LoraConfig(r=3, **config), adapter_name="b")  # a second one beneath the same modules
    return unet


def save_weights(unet, folder):
    StableDiffusionPipeline.save_lora_weights(
        folder, unet_lora_layers=get_peft_model_state_dict(unet, adapter_name="b")
    )


def save_adapter(unet, folder):
    unet.save_lora_adapter(folder, adapter_name="b")


@pytest.mark.parametrize("save", [save_weights, save_adapter], ids=["pipeline", "model"])
def test_adapters_of_convolutions_can_be_saved(save, tmp_path):
    unet = adapted()
    save(unet, tmp_path / "stock")
    save(sdfastgn.optimize(unet), tmp_path / "ours")
    stock, ours = (load_file(next((tmp_path / name).glob("*.safetensors"))) for name in ("stock", "ours"))
    assert any(weight.shape[2:] == (3, 3) for weight in stock.values())
    assert ours.keys() == stock.keys()
    assert all(torch.equal(ours[key], stock[key]) for key in stock)


def test_only_what_is_below_an_adapter_is_channels_last():
    unet = adapted()
    stock = copy.deepcopy(unet)
    count = channels_last.unconverted_weights(unet)
    sdfastgn.optimize(unet)
    assert channels_last.unconverted_weights(unet) == 0
    assert sdfastgn.report(unet).channels_last_weights == count
    weight = unet.get_submodule("mid_block.resnets.0.conv1.base_layer").weight
    assert weight.is_contiguous(memory_format=torch.channels_last)
    assert unet.conv_out.original_module.weight.is_contiguous(memory_format=torch.channels_last)
    added = [p for name, p in unet.named_parameters() if "lora_" in name or "modules_to_save" in name]
    assert sum(p.dim() == 4 for p in added) > 4
    assert all(p.is_contiguous() for p in added)
    with torch.no_grad():
        agree(CALL(unet), CALL(stock))
        sdfastgn.restore(unet)
        assert torch.equal(CALL(unet), CALL(stock))
    assert [p.stride() for p in unet.parameters()] == [p.stride() for p in stock.parameters()]


def test_images_go_in_and_out_as_ever_where_adapters_were_first():
    unet = samples.unet().eval()
    unet.add_adapter(LoraConfig(r=2, target_modules=["conv_in", "conv_out"]), adapter_name="a")
    sdfastgn.optimize(unet)
    assert channels_last.enter in unet.conv_in.base_layer._forward_pre_hooks.values()
    with torch.no_grad():
        assert CALL(unet).is_contiguous()


def test_a_model_under_vmap():
    stock = samples.randomize(samples.unet())
    unet = sdfastgn.optimize(copy.deepcopy(stock))
    images, texts = torch.randn(2, 1, 4, 8, 8), torch.randn(2, 1, 3, 12)
    with torch.no_grad():
        ours, theirs = (
            torch.vmap(lambda x, text, model=model: model(x, 10, text).sample)(images, texts)
            for model in (unet, stock)
        )
    torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=2e-5)


def test_exchanged_weights_are_laid_out_by_the_next_optimize():
    stock = samples.unet()
    unet = sdfastgn.optimize(copy.deepcopy(stock))
    weights = {name: value.contiguous() * 2 for name, value in unet.state_dict().items()}
    unet.load_state_dict(weights, assign=True)
    assert channels_last.unconverted_weights(unet) > 0
    sdfastgn.optimize(unet)
    assert channels_last.unconverted_weights(unet) == 0
    sdfastgn.restore(unet)
    assert [p.stride() for p in unet.parameters()] == [p.stride() for p in stock.parameters()]
    assert all(torch.equal(value, weights[name]) for name, value in unet.state_dict().items())


def test_another_layout_stays_until_the_next_optimize():
    """A user may ask for contiguous weights, for instance to save them."""
    unet = sdfastgn.optimize(samples.unet())
    unet.to(memory_format=torch.contiguous_format)
    assert all(p.is_contiguous() for p in unet.parameters())
    sdfastgn.optimize(unet)
    assert unet.conv_in.weight.is_contiguous(memory_format=torch.channels_last)


def test_the_modules_are_walked_once(monkeypatch):
    walks, walk, model = [], torch.nn.Module.named_modules, samples.unet()

    def counted(module, *args, **options):
        walks.extend([model] if module is model else [])
        return walk(module, *args, **options)

    monkeypatch.setattr(torch.nn.Module, "named_modules", counted)
    channels_last.apply(model)
    assert walks == [model]
    assert channels_last.is_complete(model)
    assert walks == [model, model]


class Sharded(torch.Tensor):
    """A subclass of Tensor, such as DTensor and quantized weights."""


def test_weights_that_are_more_than_memory_stay_as_they_are():
    lazy, conv = torch.nn.LazyConv2d(8, 3), torch.nn.Conv2d(8, 8, 3)
    conv.weight = torch.nn.Parameter(conv.weight.detach().as_subclass(Sharded))
    model = torch.nn.Sequential(lazy, conv, torch.nn.GroupNorm(2, 8))
    assert sdfastgn.report(sdfastgn.optimize(model)).channels_last_weights == 0
    assert conv.weight.is_contiguous()
    assert model(torch.randn(2, 4, 6, 6)).shape == (2, 8, 2, 2)
    sdfastgn.restore(model)


def test_an_expanded_weight_stays_as_it_is():
    conv = torch.nn.Conv2d(3, 8, 3)
    conv.weight = torch.nn.Parameter(torch.randn(8, 1, 3, 3).expand(8, 3, 3, 3))
    model = torch.nn.Sequential(conv, torch.nn.GroupNorm(2, 8))
    strides = conv.weight.stride()
    sdfastgn.optimize(model)
    assert conv.weight.stride() == strides
    assert sdfastgn.restore(model)[0].weight.stride() == strides


@pytest.mark.parametrize(
    ("shape", "layout"),
    [
        pytest.param((20, 9, 3, 3), torch.contiguous_format, id="more-inputs"),
        pytest.param((20, 9, 3, 3), torch.channels_last, id="more-inputs-channels-last"),
        pytest.param((20, 2, 3, 3), torch.contiguous_format, id="fewer-inputs"),
        pytest.param((24, 4, 3, 3), torch.channels_last, id="more-outputs-channels-last"),
        pytest.param((20, 4, 5, 5), torch.contiguous_format, id="larger-kernel"),
        pytest.param((20, 36), torch.contiguous_format, id="matrix"),
    ],
)
def test_a_weight_of_another_shape_survives_restore(shape, layout):
    """For instance ``conv_in``, which is widened for inpainting."""
    unet = sdfastgn.optimize(samples.unet())
    value = torch.randn(shape).contiguous(memory_format=layout)
    unet.conv_in.weight = torch.nn.Parameter(value.clone())
    sdfastgn.restore(unet)
    assert torch.equal(unet.conv_in.weight, value)
    assert unet.conv_in.weight.stride() == value.stride()
    assert not [name for name in vars(unet.conv_in) if "sdfastgn" in name]


def frozen(conv):
    weight = conv.weight.detach()
    del conv.weight
    conv.register_buffer("weight", weight)


@pytest.mark.parametrize(
    "rename",
    [
        lambda conv: parametrize.register_parametrization(conv, "weight", Half()),
        lambda conv: prune.random_structured(conv, "weight", 0.5, dim=0),
        parametrizations.weight_norm,
        frozen,
    ],
    ids=["parametrized", "pruned", "weight-norm", "frozen"],
)
def test_a_weight_by_another_name_is_laid_out_as_before(rename):
    stock = samples.unet()
    unet = sdfastgn.optimize(copy.deepcopy(stock))
    for model in (unet, stock):
        rename(model.conv_in)
    sdfastgn.restore(unet)
    tensors = [{**dict(m.named_parameters()), **dict(m.named_buffers())} for m in (unet, stock)]
    strides, expected = ({name: t.stride() for name, t in found.items()} for found in tensors)
    assert strides == expected


@pytest.mark.parametrize("mode", [False, True], ids=["normal", "inference_mode"])
@pytest.mark.parametrize("shared", [False, True], ids=["alone", "shared"])
def test_a_weight_stays_in_its_memory_unless_that_is_shared(shared, mode):
    with torch.inference_mode(mode):
        conv = torch.nn.Conv2d(4, 6, 3)
    alias = conv.weight.detach() if shared else None
    value, address, strides = conv.weight.detach().clone(), conv.weight.data_ptr(), conv.weight.stride()
    with torch.inference_mode(not mode):  # the caller may be in the other mode
        channels_last.apply(conv)
        assert conv.weight.is_contiguous(memory_format=torch.channels_last)
        assert torch.equal(conv.weight, value)
        assert (conv.weight.data_ptr() == address) is not shared
        channels_last.restore(conv)
    assert (torch.equal(conv.weight, value), conv.weight.stride()) == (True, strides)
    assert (conv.weight.data_ptr() == address) is not shared
    assert conv.weight.is_inference() is mode
    assert alias is None or torch.equal(alias, value)


def channels_last_unet():
    """A UNet with the layout that ``optimize`` gives it on a GPU."""
    unet = sdfastgn.optimize(samples.unet())
    for conv in (m for m in unet.modules() if isinstance(m, torch.nn.Conv2d)):
        if channels_last._STOCK_LAYOUT not in vars(conv):
            vars(conv)[channels_last._STOCK_LAYOUT] = (conv.weight.shape, conv.weight.stride())
            conv.weight.data = conv.weight.data.contiguous(memory_format=torch.channels_last)
    return unet


def test_saving_a_state_dict_in_safetensors(tmp_path):
    unet, path = channels_last_unet(), tmp_path / "unet.safetensors"
    values = {name: value.clone() for name, value in unet.state_dict().items()}

    def agrees(path):
        saved = load_file(path)
        return saved.keys() == values.keys() and all(torch.equal(saved[k], values[k]) for k in values)

    unet.save_pretrained(tmp_path)
    assert agrees(tmp_path / "diffusion_pytorch_model.safetensors")
    save_file({name: value.contiguous() for name, value in unet.state_dict().items()}, path)
    assert agrees(path)
    with pytest.raises(ValueError, match="non contiguous"):
        save_file(unet.state_dict(), path)
    save_file(sdfastgn.restore(unet).state_dict(), path)
    assert agrees(path)


@contextmanager
def interrupted_at(count):
    """Ctrl-C before the ``count``-th instruction of the code that lays weights out."""
    left = count

    def trace(frame, event, _):
        nonlocal left
        if frame.f_code.co_filename != channels_last.__file__:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            left -= 1
            if left == 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


@pytest.mark.slow
def test_an_interrupt_at_any_moment_spoils_no_weight():
    """The interrupt is in ``optimize`` or ``restore``. ``restore`` then undoes everything."""
    stock = nn.Sequential(nn.Conv2d(3, 5, 3), nn.GroupNorm(1, 5))
    stock[0].weight.data = stock[0].weight.data.clone()  # alone in its memory, so it is laid out there
    assert is_alone(stock[0].weight)
    count, interrupts = 1, 0
    while interrupts == count - 1:
        net = copy.deepcopy(stock)
        try:
            with interrupted_at(count):
                sdfastgn.optimize(net)
                sdfastgn.restore(net)
        except KeyboardInterrupt:
            interrupts += 1
        assert torch.equal(net[0].weight, stock[0].weight)
        sdfastgn.restore(net)
        assert torch.equal(net[0].weight, stock[0].weight)
        assert net[0].weight.stride() == stock[0].weight.stride()
        assert [vars(m).keys() for m in net.modules()] == [vars(m).keys() for m in stock.modules()]
        count += 1
    assert interrupts > 200
