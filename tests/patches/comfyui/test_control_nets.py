"""ControlNets in a run of the sampler with an optimized UNet: they are fused and become CUDA graphs."""

import copy
import gc
import types
import weakref

import pytest
import torch

from tests.patches.comfyui import comfy_checkout

comfy_checkout.import_for_cpu()

from comfy import controlnet, model_management  # noqa: E402
from comfy.cldm.cldm import ControlNet as Network  # noqa: E402
from comfy.controlnet import ControlBase  # noqa: E402
from comfy.ldm.modules.diffusionmodules.openaimodel import ResBlock  # noqa: E402
from comfy.model_patcher import ModelPatcher  # noqa: E402
from comfy.patcher_extension import WrappersMP  # noqa: E402

from scripts.publish import comfyui_models  # noqa: E402
from sdfastgn.patches.comfyui.control_nets import of_last_run  # noqa: E402
from sdfastgn.patches.comfyui.graphs import CONTROL_NET, calls_of_run, graphs_of  # noqa: E402
from sdfastgn.patches.graphs import forward  # noqa: E402
from sdfastgn.patches.layout import channels_last  # noqa: E402
from sdfastgn.patches.swap import fusion  # noqa: E402
from sdfastgn.plans.comfyui import optimize_model, text_of  # noqa: E402
from tests.patches.comfyui import comfy_models  # noqa: E402
from tests.patches.comfyui.comfy_models import close, latent_of, snapshot, unet_of  # noqa: E402
from tests.patches.graphs.tape import TapeBackend  # noqa: E402
from tests.plans.engine import often_captured  # noqa: E402

KIND = "sd15"
pytestmark = [
    pytest.mark.fused_on_cpu,
    pytest.mark.skipif(
        not hasattr(WrappersMP, "PREPARE_SAMPLING"), reason="in this ComfyUI ControlNets stay stock"
    ),
]


@pytest.fixture(scope="module")
def model():
    return comfy_models.load_model(KIND)


@pytest.fixture(autouse=True)
def nothing_loaded():
    yield
    model_management.unload_all_models()


@pytest.fixture
def tape(monkeypatch):
    """CUDA graphs are tapes on the CPU."""
    backend = TapeBackend()
    monkeypatch.setattr(forward, "backend_of", lambda device: backend)
    monkeypatch.setattr(channels_last, "is_alone", lambda weight: True)  # a tape keeps its weights alive
    return backend


def load_net(kind=KIND, control_types=None):
    """A ControlNet with random weights. control_types: their number if it is a union ControlNet."""
    options = {} if control_types is None else {"union_controlnet_num_control_type": control_types}
    config = comfy_models.KINDS[kind]
    weights = comfyui_models.random_weights(
        comfyui_models.control_net(config, **options), torch.float32, "cpu"
    )
    if control_types is None:
        return controlnet.load_controlnet_state_dict(weights)
    # ComfyUI knows a union ControlNet only from a file in diffusers' format.
    network = comfyui_models.control_net(config, **options).to_empty(device="cpu")
    network.load_state_dict(weights)
    return controlnet.ControlNet(network, load_device=model_management.get_torch_device())


def applied(net, strength=0.5, previous=None, until=1.0, seed=3):
    """The ControlNet as ComfyUI's node Apply ControlNet puts it into the conditioning."""
    hint = torch.rand(1, 3, 128, 128, generator=torch.Generator().manual_seed(seed))
    found = net.copy().set_cond_hint(hint, strength, (0.0, until))
    return found.set_previous_controlnet(previous)


def run(patcher, control, kind=KIND, steps=4):
    return latent_of(patcher, kind, steps=steps, control=control, control_apply_to_uncond=True)


def network_of(model):
    (patcher,), reasons = of_last_run(unet_of(model))
    assert not reasons
    assert CONTROL_NET.is_applied(patcher.model)
    return patcher.model


@pytest.mark.parametrize("kind", comfy_models.KINDS)
def test_a_run(tape, gpu_at_hand, kind):
    model, net = comfy_models.load_model(kind), load_net(kind)
    stock = run(model, applied(net), kind)
    assert (stock - latent_of(model, kind, steps=4)).abs().max() > 1e-2 * stock.abs().max()
    optimized = optimize_model(model)
    for _ in range(2):
        close(run(optimized, applied(net), kind), stock)
    assert network_of(model) is net.control_model
    assert calls_of_run(net.control_model) == (4, {})
    assert tape.captures == 2  # the UNet's and the ControlNet's
    report = text_of(optimized)
    assert "\nControlNet: faster\nFused: 1 ControlNet, " in report
    assert report.count("\nLast run: 4 of 4 calls as CUDA graphs") == 2
    # A run without a ControlNet ends what the text says about it.
    latent_of(optimized, kind, steps=1)
    assert "ControlNet" not in text_of(optimized)


def test_untested_code_runs_as_a_plan(model, tape, monkeypatch):
    """A release with another ``forward`` of ResNet blocks: fused blocks cannot replace it."""
    net = load_net()
    own = ResBlock._forward

    def _forward(self, x, emb):
        return own(self, x, emb) * 0.9

    monkeypatch.setattr(ResBlock, "_forward", _forward)
    often_captured(monkeypatch)
    optimized = optimize_model(model)
    for strength in (0.5, 1.5):
        stock = run(model, applied(net, strength))
        close(run(optimized, applied(net, strength)), stock)
    (planned,) = graphs_of(net.control_model).planned
    assert len(planned.plans) == 1
    assert not planned.own


@pytest.mark.parametrize("types", [[0], [2], []], ids=str)
def test_a_union(model, tape, gpu_at_hand, monkeypatch, types):
    often_captured(monkeypatch)
    net = load_net(control_types=3)
    net.set_extra_arg("control_type", types)
    optimized = optimize_model(model)
    for strength in (0.5, 1.5):
        stock = run(model, applied(net, strength))
        close(run(optimized, applied(net, strength)), stock)
    assert network_of(model) is net.control_model
    (planned,) = graphs_of(net.control_model).planned
    assert len(planned.plans) == 1
    assert not planned.own
    assert "ControlNet: faster, once its calls repeat. They run as plans" in text_of(optimized)
    assert "Reason for plans: it is a union ControlNet" in text_of(optimized)


class Other(ControlBase):
    """Another node's ControlNet, without a model."""

    def get_control(self, x_noisy, *_):
        parts = {"output": [None, torch.full_like(x_noisy[:, :1], 0.1).expand(-1, 320, -1, -1).clone()]}
        return self.control_merge(parts, None, x_noisy.dtype)


def test_a_chain(model, tape):
    """The same ControlNet twice, with other images, strengths and steps, and another node's before it."""
    net = load_net()

    def chain():
        first = Other().set_cond_hint(None)
        return applied(net, 0.3, applied(net, 0.7, first, until=0.5, seed=8))

    stock = run(model, chain())
    optimized = optimize_model(model)
    for _ in range(2):
        close(run(optimized, chain()), stock)
    assert tape.captures == 2
    replayed, eager = calls_of_run(net.control_model)
    assert (replayed, eager) == (6, {})
    assert (stock - run(model, applied(net, 0.3))).abs().max() > 1e-3 * stock.abs().max()


def test_stock_stays_stock(model, tape):
    net = load_net()
    control = applied(net)
    stock = run(model, control)
    model_management.unload_all_models()
    before, own = snapshot(net.control_model), dict(vars(control))
    optimized = optimize_model(model)
    close(run(optimized, control), stock)
    assert {**vars(control), "cond_hint": None} == {**own, "cond_hint": None}
    assert torch.equal(run(model, control), stock)
    # The graphs are still valid, because no weight has moved.
    close(run(optimized, control), stock)
    assert calls_of_run(net.control_model) == (4, {})
    model_management.unload_all_models()
    assert snapshot(net.control_model) == before


def test_it_stays_fused_between_runs(model, tape, monkeypatch):
    net = load_net()
    optimized = optimize_model(model)
    run(optimized, applied(net))
    fused = []
    change = fusion.change_class
    monkeypatch.setattr(fusion, "change_class", lambda *args: (fused.append(args), change(*args)))
    run(optimized, applied(net))
    assert not fused


def test_unloaded_and_loaded_again(model, tape):
    net = load_net()
    stock = run(model, applied(net))
    optimized = optimize_model(model, True)
    for _ in range(2):
        close(run(optimized, applied(net)), stock)
        model_management.unload_all_models()
        assert type(net.control_model) is Network


def test_clones_end_with_their_net(model):
    net = load_net()
    optimized = optimize_model(model)
    run(optimized, applied(net))
    network = weakref.ref(network_of(model))
    model_management.unload_all_models()
    del net
    gc.collect()
    assert network() is None


def test_a_subclass_runs_as_stock(model):
    class Foreign(controlnet.ControlNet):
        pass

    net = load_net()
    foreign = Foreign(net.control_model, load_device=net.load_device)
    control = copy.copy(foreign).set_cond_hint(torch.rand(1, 3, 128, 128), 0.5)
    stock = run(model, control)
    close(run(optimize_model(model), control), stock)
    assert of_last_run(unet_of(model)) == ([], [])
    assert type(net.control_model) is Network


def test_methods_that_other_nodes_replace_run(model):
    """Such a method may be bound to the workflow's own object, so this object is used."""
    net = load_net()
    control = applied(net)
    own, calls = control.get_control, []

    def get_control(*args):
        calls.append(control.timestep_range)
        return {key: [x * 2 for x in found] for key, found in own(*args).items()}

    control.get_control = get_control
    stock = run(model, control)
    close(run(optimize_model(model), control), stock)
    assert len(calls) == 8
    assert all(calls)
    assert type(net.control_model) is Network


class Bound(controlnet.ControlNet):
    """Another node's class that keeps its own bound methods, as those of Advanced-ControlNet do."""

    def __init__(self, net):
        super().__init__(None, load_device=net.load_device)
        self.control_model, self.control_model_wrapped = net.control_model, net.control_model_wrapped
        net.copy_to(self)
        for name in ("get_control", "pre_run", "cleanup"):
            setattr(self, name, types.MethodType(getattr(controlnet.ControlNet, name), self))


@pytest.mark.skipif(not hasattr(ModelPatcher, "is_dynamic"), reason="this ComfyUI has no DynamicVRAM")
def test_before_a_foreign_class_with_bound_methods(model, monkeypatch):
    net = dynamic_net()
    last = Bound(applied(load_net(), 0.5)).set_previous_controlnet(applied(net, 0.7))
    own, is_loaded = controlnet.ControlNet.get_control, []

    def get_control(self, *args):
        loaded = [each.model.model for each in model_management.current_loaded_models]
        is_loaded.append(any(self.control_model is each for each in loaded))
        return own(self, *args)

    monkeypatch.setattr(controlnet.ControlNet, "get_control", get_control)
    run(optimize_model(model), last, steps=1)
    assert is_loaded == [True]


def test_patched_after_the_first_run(model):
    net = load_net()
    optimized = optimize_model(model)
    close(run(optimized, applied(net)), run(model, applied(net)))
    name, weight = next(x for x in net.control_model.named_parameters() if x[0].endswith("to_q.weight"))
    net.control_model_wrapped.add_patches({name: (torch.randn(weight.shape) * 0.3,)})
    stock = run(model, applied(net))
    close(run(optimized, applied(net)), stock)


def test_another_model_than_the_one_that_is_loaded(model):
    """Another node has replaced the ControlNet's model."""
    control = applied(load_net())
    control.control_model = load_net().control_model
    with torch.no_grad():
        for weight in control.control_model.parameters():
            weight.mul_(0.9)
    stock = run(model, control)
    close(run(optimize_model(model), control), stock)
    assert of_last_run(unet_of(model)) == ([], [])


def test_a_deep_copy_of_conditioning_is_stock(model):
    control = applied(load_net())
    stock = run(model, control)
    optimized = optimize_model(model)
    run(optimized, control)
    second = copy.deepcopy(control)
    assert {type(m).__module__.partition(".")[0] for m in second.control_model.modules()} <= {
        "comfy",
        "torch",
    }
    assert torch.equal(run(model, second), stock)
    close(run(optimized, second), stock)
    assert of_last_run(unet_of(model))[0][0].model is second.control_model


def test_plans_inside_end_when_it_is_unloaded(model):
    """Calls that cannot be traced: a union ControlNet raises its own error, for a type that it lacks."""
    net = load_net(control_types=3)
    net.set_extra_arg("control_type", [1])
    good = applied(net)
    stock = run(model, good)
    net.set_extra_arg("control_type", [5])
    optimized = optimize_model(model)
    for _ in range(2):
        with pytest.raises(ValueError, match="out of range"):
            run(optimized, applied(net))
    close(run(optimized, good), stock)
    model_management.unload_all_models()
    assert not [path for path, module in net.control_model.named_modules() if "forward" in vars(module)]
    assert torch.equal(run(model, good), stock)
    close(run(optimized, good), stock)


class Dynamic(ModelPatcher):
    """A patcher that says that its model is under DynamicVRAM, without a loader that can load it again."""

    cached_patcher_init = None

    def is_dynamic(self):
        return True


class Handle:
    """What DynamicVRAM attaches to a model: it cannot be copied."""

    def __deepcopy__(self, memo):
        raise TypeError("cannot be copied")


def dynamic_net(dtype=torch.float32):
    """A ControlNet under DynamicVRAM. dtype: of the file, to which the linear layers' weights stay."""
    net = load_net()
    found = net.control_model
    with torch.inference_mode():
        for module in found.modules():
            if isinstance(module, torch.nn.Linear):
                module.to(dtype)
                module.weight_comfy_model_dtype = module.bias_comfy_model_dtype = torch.float32
            module._v, module.weight_function = (Handle(), 0, 16), []
            if hasattr(module, "comfy_cast_weights"):
                module.comfy_cast_weights = True
    found.dynamic_vbars, found.dynamic_pins = {"cuda": Handle()}, {"cuda": {"weights": (Handle(), [])}}
    found.dynamic_patchers = {1}
    net.control_model_wrapped = Dynamic(found, net.load_device, model_management.unet_offload_device())
    return net


@pytest.mark.skipif(not hasattr(ModelPatcher, "is_dynamic"), reason="this ComfyUI has no DynamicVRAM")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_dynamic_net_is_copied(model, tape, gpu_at_hand, dtype):
    net = dynamic_net(dtype)
    stock = run(model, applied(net))
    optimized = optimize_model(model)
    for _ in range(2):
        close(run(optimized, applied(net)), stock)
    second = network_of(model)
    assert second is not net.control_model
    assert type(net.control_model) is Network
    assert calls_of_run(second) == (4, {})
    assert not {"_v", "dynamic_vbars", "dynamic_pins"} & set().union(*map(vars, second.modules()))
    assert {weight.dtype for weight in second.parameters()} == {torch.float32}
    # A weight that is not converted is shared until the copy is loaded elsewhere.
    weights = zip(second.parameters(), net.control_model.parameters(), strict=True)
    assert all((a.data_ptr() == b.data_ptr()) or b.dtype != a.dtype or a.dim() == 4 for a, b in weights)
    assert "ControlNet: faster" in text_of(optimized)


@pytest.mark.skipif(not hasattr(ModelPatcher, "is_dynamic"), reason="this ComfyUI has no DynamicVRAM")
def test_a_dynamic_net_without_room(model, tape, gpu_at_hand, monkeypatch):
    net = dynamic_net()
    stock = run(model, applied(net))
    optimized = optimize_model(model)
    # One of the two models would fit, but not both.
    larger = max(model.model_size(), net.control_model_wrapped.model_size())
    room = larger + model_management.minimum_inference_memory()
    monkeypatch.setattr(model_management, "get_total_memory", lambda *_: room)
    close(run(optimized, applied(net)), stock)
    assert type(net.control_model) is Network
    assert "\nControlNet: not faster. DynamicVRAM moves its weights, and it does not fit" in text_of(
        optimized
    )


@pytest.mark.skipif(not hasattr(ModelPatcher, "is_dynamic"), reason="this ComfyUI has no DynamicVRAM")
def test_a_dynamic_net_that_cannot_be_copied(model, tape, gpu_at_hand):
    net = dynamic_net()
    stock = run(model, applied(net))
    net.control_model.of_another_node = Handle()
    optimized = optimize_model(model)
    close(run(optimized, applied(net)), stock)
    assert type(net.control_model) is Network
    reason = "Its model cannot be copied: TypeError: cannot be copied"
    assert f"\nControlNet: not faster. {reason}" in text_of(optimized)
