"""CUDA graphs are never stale. On the CPU a tape of operations replaces a graph."""

import contextlib
import copy
import functools
import re
import types

import pytest
import torch
from torch import nn

import sdfastgn
from sdfastgn.models.architectures import build_vae
from sdfastgn.patches.graphs import forward
from sdfastgn.patches.graphs import watch as graph_state
from sdfastgn.patches.graphs.factors import Factors
from sdfastgn.plans import install as planning
from tests.patches.graphs.cases import (
    CHANGES,
    DEVICES,
    HARMLESS,
    VALUES,
    activation,
    agree,
    in_place,
    inputs_after,
    lora,
    make,
    nothing,
    optimized,
    reasons_of,
    replaced_parameter,
    run,
    same_results,
    scaled_weights,
    state,
    weights_elsewhere,
)

pytestmark = pytest.mark.fused_on_cpu

CASES = [
    *(pytest.param(*case, id=name) for name, case in CHANGES.items()),
    *(pytest.param(nothing, change, None, id=name) for name, change in HARMLESS.items()),
]


@pytest.mark.drawn(1)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("before", "change", "words"), CASES)
def test_never_stale(before, change, words, device, monkeypatch):
    """``words``: what the report says of the change; None if a replay without the watch is right, too."""
    unet, stock, inputs = make(device, merge_adapters=False)
    before(unet), before(stock)
    inputs = inputs_after(before, inputs)
    expected = run(stock, inputs)
    for _ in range(3):
        agree(run(unet, inputs), expected)
    assert (state(unet).replays, state(unet).last_change) == (2, "")
    change(unet), change(stock)
    expected = run(stock, inputs)
    if words and device == "cpu":  # a graph would read memory that is gone
        with monkeypatch.context() as unwatched:
            unwatched.setattr(graph_state.Watch, "unchanged", lambda self, root: True)
            unwatched.setattr(Factors, "refresh", lambda self: True)
            assert (run(unet, inputs) - expected).abs().max() > 5e-3  # so that this test can fail
    for _ in range(3):
        agree(run(unet, inputs), expected)
    if words:
        assert re.fullmatch(words, state(unet).last_change)


@pytest.mark.drawn(1)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("before", "change"), [pytest.param(*case, id=name) for name, case in VALUES.items()]
)
def test_new_values_need_no_capture(before, change, device):
    unet, stock, inputs = make(device)
    before(unet), before(stock)
    inputs = inputs_after(before, inputs)
    same_results(unet, stock, inputs, calls=3)
    old = run(stock, inputs)
    change(unet), change(stock)
    expected = run(stock, inputs)
    assert (old - expected).abs().max() > 5e-3
    agree(run(unet, inputs), expected)
    assert (state(unet).captured, state(unet).replays, state(unet).last_change) == (1, 3, "")
    with torch.enable_grad():  # runs eagerly, with the attributes of the modules
        agree(unet(**inputs).sample, expected)
    assert {type(value) for block in unet.up_blocks for value in freeu_of(block)} <= {float, int}


def freeu_of(block):
    return [vars(block)[name] for name in ("s1", "s2", "b1", "b2") if name in vars(block)]


def tiled(make_wrapper):
    """A change as code for seamless tiling makes it: wraps ``_conv_forward`` of an instance."""

    def change(unet, scales):
        conv = unet.conv_in
        conv._conv_forward = make_wrapper(conv._conv_forward, scales)

    return change


def wrapped(stock, scales):
    @functools.wraps(stock)
    def forward(x, *args):
        return stock(x * scales["factor"], *args)

    return forward


def wrapped_default(stock, scales):
    @functools.wraps(stock)
    def forward(x, *args, scales=scales):
        return stock(x * scales["factor"], *args)

    return forward


def wrapped_method(stock, scales):
    @functools.wraps(stock)
    def forward(conv, x, *args):
        return stock(x * scales["factor"], *args)

    return types.MethodType(forward, stock.__self__)


class Wrapper:
    def __init__(self, stock, scales):
        functools.update_wrapper(self, stock)
        self.stock, self.scales = stock, scales

    def __call__(self, x, *args):
        return self.stock(x * self.scales["factor"], *args)


class Slots:
    """An object with state outside of ``__dict__``, which the watch does not look at."""

    __slots__ = ("scales", "stock")
    __call__ = Wrapper.__call__

    def __init__(self, stock, scales):
        self.stock, self.scales = stock, scales


class SlotsAndMore(Slots):
    __module__ = "torch.for_tests"


def activation_class(unet, scales):
    class Activation:
        def __new__(cls, x):
            return x * scales["factor"]

    activation(unet, Activation)


def lora_scales(unet, scales):
    class Scales(dict):
        def __getitem__(self, key):
            return super().__getitem__(key) * scales["factor"]

    lora(unet)
    for module in unet.modules():
        if hasattr(module, "scaling"):
            module.scaling = Scales(module.scaling)


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(tiled(wrapped), id="wraps"),
        pytest.param(tiled(wrapped_default), id="default"),
        pytest.param(tiled(lambda stock, scales: torch.no_grad()(wrapped(stock, scales))), id="decorated"),
        pytest.param(
            tiled(lambda stock, scales: functools.partial(wrapped(stock, scales))), id="partial-of-wraps"
        ),
        pytest.param(tiled(wrapped_method), id="method"),
        pytest.param(
            tiled(lambda stock, scales: functools.lru_cache(maxsize=0)(wrapped(stock, scales))), id="cache"
        ),
        pytest.param(tiled(Wrapper), id="callable"),
        pytest.param(tiled(SlotsAndMore), id="slots"),
        pytest.param(lambda u, scales: activation(u, lambda x: x * scales["factor"]), id="lambda"),
        pytest.param(activation_class, id="class"),
        pytest.param(lora_scales, id="dict"),
    ],
)
def test_code_that_keeps_its_state_anywhere_is_not_captured(spoil):
    """The name of its module makes no difference."""
    unet, stock, inputs = make(mode=True)
    scales, found = {"factor": 1.0}, []
    spoil(unet, scales), spoil(stock, scales)
    for factor in (1.0, 3.0):
        scales["factor"] = factor
        same_results(unet, stock, inputs, calls=2)
        found.append(run(stock, inputs))
    assert (found[0] - found[1]).abs().max() > 5e-3
    assert state(unet).captured == 0
    assert "whose state cannot be watched" in reasons_of(unet)


def test_what_a_parametrization_made_before_is_not_read_by_a_replay():
    """PyTorch keeps the computed weight in a global cache for a while."""
    unet, stock, inputs = make(mode=True)
    for model in (unet, stock):
        torch.nn.utils.parametrizations.weight_norm(model.conv_out)
    same_results(unet, stock, inputs, calls=2)
    assert state(unet).replays == 2
    for factor in (1.0, 2.0):
        for model in (unet, stock):
            with torch.no_grad():
                model.conv_out.parametrizations.weight.original0.mul_(factor)
        with torch.nn.utils.parametrize.cached():
            same_results(unet, stock, inputs, calls=2)
    assert "parametrizations are cached" in reasons_of(unet)
    same_results(unet, stock, inputs, calls=2)
    assert (state(unet).captured, state(unet).replays) == (1, 4)


def test_weights_changed_in_place_are_read_by_the_replay():
    unet, stock, inputs = make()
    run(unet, inputs, calls=2)
    in_place(unet), in_place(stock)
    agree(run(unet, inputs), run(stock, inputs))
    assert (state(unet).captured, state(unet).replays) == (1, 2)
    for _ in range(2):  # another kind of call is captured with the same watch
        run(unet, {**inputs, "sample": inputs["sample"].repeat(1, 1, 2, 1)})
    assert (state(unet).captured, state(unet).replays) == (2, 3)


def test_a_change_of_the_model_is_captured_anew():
    unet, _, inputs = make()
    for _ in range(3):
        for _ in range(4):
            run(unet, inputs)
        replaced_parameter(unet)
    assert (state(unet).captured, state(unet).replays, state(unet).alive) == (3, 9, 1)


def test_a_change_before_the_capture_costs_nothing():
    """Such a change is a module that packs its weights in its first call, or a LoRA after the first step."""
    unet, _, inputs = make()
    run(unet, inputs)
    replaced_parameter(unet)
    run(unet, inputs)
    assert state(unet).captured == 1


@pytest.mark.slow
def test_a_model_that_changes_at_each_call_is_left_alone():
    unet, _, inputs = make(mode=True)
    for _ in range(24):
        replaced_parameter(unet)
        run(unet, inputs)
    assert state(unet).captured < 8
    assert "the model changes too often" in reasons_of(unet)
    run(unet, inputs, calls=64)
    assert state(unet).alive == 1


def test_a_call_in_a_pause_looks_at_nothing(monkeypatch):
    """It must cost no more than a call of a model without graphs. An ``AdapterSurvey`` takes milliseconds."""
    unet, stock, inputs = make(mode=True)
    for _ in range(4):
        replaced_parameter(unet), replaced_parameter(stock)
        run(unet, inputs)
    looks = []
    monkeypatch.setattr(forward, "AdapterSurvey", looks.append)
    agree(run(unet, inputs), run(stock, inputs))
    assert "the model changes too often" in reasons_of(unet)
    assert looks == []


def test_memory_of_replaced_weights_is_given_back():
    """The watch must not keep weights alive that the model no longer has."""
    unet, _, inputs = make()
    run(unet, inputs, calls=2)
    weight = unet.conv_in.weight
    storage = torch.multiprocessing.reductions.StorageWeakRef(weight.data.untyped_storage())
    (graph,) = unet.forward._store._graphs.values()
    graph.handle.entries.clear()  # the tape holds it, a graph does not
    weight.data = weight.data.clone()
    assert storage.expired()


def test_a_weight_at_the_address_of_the_old_one_is_seen():
    norm = nn.GroupNorm(2, 4)
    watch = graph_state.Watch(norm)
    assert watch.unchanged(norm)
    pointer = norm.weight.data_ptr()
    for _ in range(100):  # the allocator gives the same block again, sooner or later
        norm.weight.data = torch.empty(0)
        norm.weight.data = torch.ones(4)
        if norm.weight.data_ptr() == pointer:
            break
    assert not watch.unchanged(norm)


@pytest.mark.parametrize("elements", [1, 16, 17, 1000])
@pytest.mark.parametrize("inference", [False, True], ids=["counts", "inference"])
def test_what_is_written_into_a_tensor_that_stays_on_the_cpu(elements, inference):
    """A forward may read its values in Python, for instance with ``tolist``."""
    norm = nn.GroupNorm(2, 4)
    with torch.inference_mode(inference):
        norm.sizes = torch.zeros(elements)
    here, there = graph_state.Watch(norm), graph_state.Watch(norm, device=torch.device("cuda"))
    if inference and elements > 16:
        assert "sizes is on the CPU" in there.reason
    assert here.unchanged(norm)
    assert there.unchanged(norm)
    with torch.inference_mode(inference):
        norm.sizes[-1] = 1
    assert here.unchanged(norm)
    assert there.reason or not there.unchanged(norm)


@pytest.mark.parametrize(
    ("spoil", "mend", "reason"),
    [
        pytest.param(
            lambda block: setattr(block, "forward", lambda h, *a, **k: h),
            lambda block: delattr(block, "forward"),
            "replaced the forward of mid_block",
            id="forward",
        ),
        pytest.param(
            lambda block: block.register_forward_hook(lambda m, i, o: None),
            lambda block: block._forward_hooks.clear(),
            "a forward hook on mid_block",
            id="hook",
        ),
        pytest.param(
            lambda block: setattr(block, "_hf_hook", object()),
            lambda block: delattr(block, "_hf_hook"),
            "accelerate's hooks are on mid_block",
            id="offload",
        ),
    ],
)
def test_the_end_of_a_reason_is_seen(spoil, mend, reason):
    unet, stock, inputs = make(mode=True)
    spoil(unet.mid_block)
    run(unet, inputs, calls=2)
    assert reason in reasons_of(unet)
    mend(unet.mid_block)
    same_results(unet, stock, inputs, calls=2)
    assert (state(unet).captured, state(unet).replays) == (1, 2)


@pytest.mark.slow
@pytest.mark.parametrize("plans", [True, False], ids=["plans", "blocks"])
def test_an_autoencoder_cast_up_and_down_leaves_the_unet_alone(plans):
    """SDXL's autoencoder is cast so in each image: its weights are new tensors at each call."""
    unet, _, inputs = make()
    vae = build_vae("tiny", torch.float32, "cpu")
    stock = copy.deepcopy(vae)
    optimized(vae)
    planning.install(vae, plans)
    latents = torch.randn(1, 4, 4, 4)
    for _ in range(12):
        for model in (vae, stock):
            model.to(torch.float64).to(torch.float32)
        with torch.no_grad():
            agree(vae.decode(latents).sample, stock.decode(latents).sample)
        run(unet, inputs)
    decoder = next(g for g in sdfastgn.report(vae).graphs if g.kind == "Decoder")
    assert decoder.captured == 0
    assert decoder.eager == {"first call of its kind": 12}
    found = [(p.path, p.traces, p.calls) for p in sdfastgn.report(vae).plans if p.is_on]
    assert found == [("decoder", 1, 12)] * plans
    assert (state(unet).captured, state(unet).replays) == (1, 11)


def replays_of(unet, monkeypatch):
    """A list to which each later replay adds "replay" and each comparison by the watch "watch"."""
    (graph,) = unet.forward._store._graphs.values()
    events, replay, unchanged = [], graph.handle.replay, graph_state.Watch.unchanged
    monkeypatch.setattr(graph.handle, "replay", lambda: (events.append("replay"), replay()))
    monkeypatch.setattr(
        graph_state.Watch, "unchanged", lambda *args: (events.append("watch"), unchanged(*args))[1]
    )
    return events


def test_the_model_is_looked_at_while_the_gpu_runs(monkeypatch):
    unet, _, inputs = make()
    run(unet, inputs, calls=2)
    events = replays_of(unet, monkeypatch)
    run(unet, inputs)
    assert events == ["replay", "watch"]


def test_the_result_of_a_replay_that_was_wrong_is_dropped(monkeypatch):
    unet, stock, inputs = make()
    run(unet, inputs, calls=2)
    events = replays_of(unet, monkeypatch)
    for model in (unet, stock):
        model.mid_block.resnets[0].output_scale_factor = 3.0
    agree(run(unet, inputs), run(stock, inputs))
    assert events[:2] == ["replay", "watch"]
    assert (state(unet).replays, state(unet).dropped) == (1, 1)


def emptied_storage(unet):
    unet.conv_in.weight.untyped_storage().resize_(0)


@pytest.mark.parametrize("change", [weights_elsewhere, scaled_weights, emptied_storage])
def test_nothing_is_replayed_whose_memory_is_gone(change, monkeypatch):
    unet, _, inputs = make()
    run(unet, inputs, calls=2)
    events = replays_of(unet, monkeypatch)
    change(unet)
    with contextlib.suppress(RuntimeError):  # stock's, of a weight without memory
        run(unet, inputs)
    assert "replay" not in events


class Counting(nn.Identity):
    """Counts its calls in a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(17))

    def forward(self, x):
        self.calls.add_(1)
        return x


@pytest.mark.parametrize("device", DEVICES)
def test_a_model_that_writes_into_itself_is_left_alone(device, monkeypatch):
    """A replay whose result is discarded would already have written into the model."""
    unet, _, inputs = make(device)
    monkeypatch.setattr(Counting, "__module__", "torch.counting")
    unet.mid_block.resnets[0].dropout = Counting().to(device)
    run(unet, inputs, calls=3)
    assert state(unet).replays == 0
    assert "writes into its own tensors" in reasons_of(unet)
