"""Long runs: a model that is changed at any moment, and a model that is called at many sizes."""

import gc
import itertools
import random
import threading
from collections import Counter

import pytest
import torch
from peft import LoraConfig
from torch import nn

from sdfastgn.patches.graphs.store import MAX_GRAPHS
from tests.patches.graphs.cases import MIB, make, run, settled, state
from tests.patches.graphs.tape import TapeBackend

pytestmark = pytest.mark.fused_on_cpu

# Calls, and the most of them between two changes of the thread.
SIZES = [
    pytest.param("cpu", 50, 24, id="tape"),
    pytest.param("cpu", 150, 24, id="tape-long", marks=pytest.mark.slow),
    pytest.param("cuda", 10_000, 120, id="graph", marks=pytest.mark.gpu),
]
VALUES = (0, 1)


def prepared(unet):
    """Add a LoRA to ``unet``, and return a function for each of three settings that are set in one step."""
    torch.manual_seed(5)
    unet.add_adapter(
        LoraConfig(r=2, target_modules=["mid_block.resnets.0.conv1"], init_lora_weights=False),
        adapter_name="a",
    )
    block = unet.mid_block.resnets[0]
    weights = [unet.conv_in.weight.data.clone() * factor for factor in (1.0, 1.3)]

    def set_weight(value, *, between_calls=True):
        if between_calls:
            unet.conv_in.weight.data = weights[value].clone()  # the old memory is given back
        else:  # a convolution that is under way goes on with the old one
            unet.conv_in.weight = nn.Parameter(weights[value].clone(), requires_grad=False)

    def set_scale(value, **_):
        block.conv1.scaling["a"] = (1.0, 9.0)[value]

    def set_factor(value, **_):
        block.output_scale_factor = (1.0, 1.5)[value]

    setters = [set_weight, set_scale, set_factor]
    for setter in setters:
        setter(0)
    return setters


class Changes:
    """The values that each setting has had, in order. The first ``done`` of them are set for certain."""

    def __init__(self, setters):
        self.setters = setters
        self.history = [[0] for _ in setters]
        self.done = [1 for _ in setters]
        self.lock = threading.Lock()

    def one(self, chance, **moment):
        with self.lock:
            i = chance.randrange(len(self.setters))
            value = 1 - self.history[i][-1]
            self.history[i].append(value)
            self.setters[i](value, **moment)
            self.done[i] += 1

    def since(self, done):
        """Each combination of values that was possible since ``done`` of each setting were set."""
        return itertools.product(
            *(set(values[n - 1 :]) for values, n in zip(self.history, done, strict=True))
        )


@pytest.mark.parametrize(("device", "calls", "between"), SIZES)
def test_no_result_is_stale_or_mixed(device, calls, between):
    unet, stock, inputs = make(device)
    changes, of_stock = Changes(prepared(unet)), prepared(stock)
    expected = {}
    for values in itertools.product(VALUES, repeat=len(of_stock)):
        for setter, value in zip(of_stock, values, strict=True):
            setter(value)
        expected[values] = run(stock, inputs)
    outputs = torch.stack(list(expected.values()))
    apart = (outputs[:, None] - outputs[None]).flatten(2).abs().amax(2) + torch.eye(8, device=device)
    assert apart.min() > 0.02  # a wrong one is seen

    chance, begun, made, ended = random.Random(1), [], [0], threading.Event()
    hook = random.Random(2)
    unet.register_forward_pre_hook(lambda *_: changes.one(hook) if hook.random() < 2 / calls else None)
    unet.register_forward_pre_hook(lambda *_: begun.__setitem__(slice(None), changes.done))

    def keep_changing():
        while not ended.is_set():
            until = made[0] + chance.randint(1, between)
            while made[0] < until and not ended.wait(chance.random() * 0.01):
                pass  # so that it happens at any moment of a call
            changes.one(chance, between_calls=False)

    thread = threading.Thread(target=keep_changing)
    thread.start()
    try:
        for _ in range(calls):
            output = run(unet, inputs)
            possible = set(changes.since(begun))
            distances = (outputs - output).flatten(1).abs().amax(1)
            nearest = list(expected)[int(distances.argmin())]
            assert distances.min() < 5e-3  # not mixed
            assert nearest in possible  # not stale
            made[0] += 1
    finally:
        ended.set()
        thread.join()
    assert state(unet).captured > 2
    assert state(unet).replays > calls / 2


def alive(backend):
    """Counts of living objects of sdfastgn and PyTorch by class, without those of tapes, and GPU bytes."""
    settled()
    classes = (type(each) for each in gc.get_objects())
    found = Counter(cls for cls in classes if str(cls.__module__).split(".")[0] in ("sdfastgn", "torch"))
    found[torch.UntypedStorage] -= len(backend.kept)
    return found, torch.cuda.memory_allocated(), torch.cuda.memory_reserved()


@pytest.mark.parametrize(
    ("device", "sizes", "calls", "rounds"),
    [
        pytest.param("cpu", MAX_GRAPHS + 2, 2, 3, id="tape", marks=pytest.mark.slow),
        pytest.param("cuda", 24, 25, 5, id="graph", marks=pytest.mark.gpu),
    ],
)
def test_nothing_grows_with_calls_and_sizes(device, sizes, calls, rounds):
    backend = TapeBackend()
    unet, _, inputs = make(device, backend=backend)
    seen = []
    for _ in range(rounds):
        for i in range(sizes):
            sample = torch.randn(1, 4, 4 * (1 + i % 6), 4 * (1 + i // 6), device=device)
            run(unet, {**inputs, "sample": sample}, calls)
        seen.append(alive(backend))
    assert state(unet).captured == rounds * sizes  # none was among the graphs that are kept
    assert state(unet).alive == MAX_GRAPHS
    (_, second, *_), last = seen, seen[-1]
    assert last[0] <= second[0]
    assert last[1] <= second[1] + 2 * MIB
    assert last[2] <= second[2] + 8 * MIB
