"""Weights of offloaded models: kept in main memory while they do not change on the GPU, else copied.

There is no GPU in these tests. A set of ids says which parameters are "on the GPU".
"""

import copy

import pytest
import torch
from accelerate import cpu_offload_with_hook
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from sdfastgn.kernels.common import dispatch
from sdfastgn.patches.offload import offloaded
from sdfastgn.patches.offload.moves import follow, unfollow

pytestmark = pytest.mark.fused_on_cpu

LAST = torch.channels_last


@pytest.fixture(autouse=True)
def small_weights_too(monkeypatch):
    monkeypatch.setattr(offloaded, "_MIN_BYTES", 64)


class Machine:
    """Moves ``root`` as ``root.to`` would: each parameter gets what the function of ``moving`` returns."""

    def __init__(self, root, away):
        self.root, self.away = root, away

    def arrive(self, after=None, fn=torch.clone):
        with offloaded.moving(self.root, fn) as move:
            for weight in self.root.parameters():
                weight.data = move(weight).detach()
                self.away.add(id(weight))
            if after is not None:
                after()

    def leave(self, fn=torch.clone):
        """Returns the names of the parameters that were not copied."""
        copied = set()

        def copy_of(tensor):
            copied.add(id(tensor))
            return fn(tensor)

        with offloaded.moving(self.root, copy_of) as move:
            for weight in self.root.parameters():
                weight.data = move(weight).detach()
                self.away.discard(id(weight))
        return {name for name, weight in self.root.named_parameters() if id(weight) not in copied}

    def image(self, on_gpu=None, fn=torch.clone):
        """Returns the names of the parameters that were not copied back to main memory."""
        self.arrive()
        if on_gpu is not None:
            with torch.no_grad():
                on_gpu()
        return self.leave(fn)


NAMES = {"0.weight", "0.bias", "1.weight", "1.bias"}


@pytest.fixture
def machine(monkeypatch):
    """A ``Machine`` with a model after its first image. Kernels run in Triton's interpreter."""
    if torch.cuda.is_available():
        pytest.skip("test_offloaded_on_gpu.py tests with the real GPU")
    away = set()
    monkeypatch.setattr(offloaded, "_is_on_gpu", lambda weight: id(weight) in away)
    monkeypatch.setattr(dispatch, "is_on", lambda: True)
    root = nn.Sequential(nn.Conv2d(8, 16, 3), nn.Conv2d(16, 32, 1))
    cpu_offload_with_hook(root, torch.device("cpu"))
    machine = Machine(root, away)
    assert machine.image() == set()  # the first return is as in stock
    return machine


def test_unchanged_weights_get_their_memory_back(machine):
    before = copy.deepcopy(machine.root.state_dict())
    for _ in range(2):
        assert machine.image() == NAMES
    assert all(torch.equal(value, before[name]) for name, value in machine.root.state_dict().items())


def write(weight):
    weight.data.view(-1)[3] += 1  # PyTorch does not count this write


def replace(weight):
    weight.data = weight.data * 2


def swap(weight):
    weight.data.view(-1)[:8].copy_(weight.data.view(-1)[:8].flip(0))


def shift(weight):
    memory = torch.empty(weight.numel() + 1)
    weight.data = memory[1:].view(weight.shape).copy_(weight.data)


@pytest.mark.parametrize("change", [write, replace, swap, shift])
def test_a_changed_weight_is_copied(machine, change):
    conv = machine.root[0]
    expected = conv.weight.detach().clone()
    change(expected)
    assert machine.image(on_gpu=lambda: change(conv.weight)) == NAMES - {"0.weight"}
    assert torch.equal(conv.weight, expected)
    assert machine.image() == NAMES


def test_memory_that_others_share_is_not_kept(machine):
    values = machine.root.state_dict()
    assert machine.image() == set()
    for value in values.values():
        value.zero_()
    assert all(weight.any() for weight in machine.root.parameters())


@pytest.mark.parametrize("when", ["at home", "at the return"])
def test_memory_that_another_process_shares_is_not_kept(machine, when):
    weight = machine.root[0].weight
    if when == "at home":
        machine.root.share_memory()
    else:
        machine.image(fn=lambda t: t.clone().share_memory_())
    assert weight.is_shared()
    assert machine.image() == set()
    assert not weight.is_shared()


def test_other_memory_is_not_kept(machine):
    weight = machine.root[0].weight
    weight.data = torch.ones(weight.shape)
    assert machine.image() == NAMES - {"0.weight"}


def known_tensors_only():
    known = set()

    def fn(tensor):
        if not isinstance(tensor, nn.Parameter):
            raise KeyError(tensor)
        known.add(tensor)
        return tensor.clone()

    return fn


MORE_THAN_COPIES = {
    "half": lambda t: t.half(),
    "rounded": lambda t: t.bfloat16().to(t.dtype),
    "abs": torch.abs,
    "finite": torch.nan_to_num,
    "clamped": lambda t: t.clamp(-65504, 65504),
    "channels-last": lambda t: t.to(memory_format=LAST) if t.dim() == 4 else t.clone(),
    "other values": lambda t: 2 * t,
    "shared memory": lambda t: t.clone().share_memory_(),
    "known tensors": known_tensors_only(),
}


@pytest.mark.parametrize("fn", MORE_THAN_COPIES.values(), ids=MORE_THAN_COPIES)
def test_only_plain_copies_are_replaced(machine, fn):
    expected = [fn(weight) for weight in machine.root.parameters()]
    assert machine.image(fn=fn) == set()
    for weight, value in zip(machine.root.parameters(), expected, strict=True):
        assert (weight.dtype, weight.stride()) == (value.dtype, value.stride())
        assert (torch.equal(weight, value), weight.is_shared()) == (True, value.is_shared())


def test_channels_last_weights_may_return_channels_first(machine):
    conv = machine.root[0]
    conv.weight.data = conv.weight.data.to(memory_format=LAST)
    machine.image()
    assert machine.image() == NAMES
    machine.image(fn=lambda t: t.clone(memory_format=torch.contiguous_format))
    assert conv.weight.is_contiguous()


def test_values_that_change_on_the_way_to_the_gpu(machine):
    before = copy.deepcopy(machine.root.state_dict())
    machine.arrive(fn=lambda t: 2 * t)
    machine.leave()
    assert all(torch.equal(value, 2 * before[name]) for name, value in machine.root.state_dict().items())


def test_a_cast_on_the_gpu_and_back(machine):
    """As SDXL's pipeline casts its autoencoder. Casts to fp64 and back change no value."""
    machine.arrive()
    for dtype in (torch.float64, torch.float32):
        with offloaded.moving(machine.root, lambda t: t.to(dtype)) as move:  # noqa: B023
            for weight in machine.root.parameters():
                weight.data = move(weight).detach()
    assert machine.leave() == NAMES


def test_inference_mode_for_one_image(machine):
    """Weights that were allocated in inference mode would fail in training."""
    with torch.inference_mode():
        for weight in machine.root.parameters():
            weight.data = weight.data.clone()
        machine.image()
        assert machine.image() == NAMES
    assert machine.image() == set()
    assert not any(weight.is_inference() for weight in machine.root.parameters())


def test_a_layout_that_changes_on_the_gpu(machine):
    def last():
        machine.root[0].weight.data = machine.root[0].weight.data.to(memory_format=LAST)

    machine.arrive(after=last)
    machine.leave()
    assert machine.root[0].weight.is_contiguous(memory_format=LAST)
    assert machine.image() == NAMES


def test_nothing_is_kept_without_offloading(machine):
    del machine.root._hf_hook
    assert machine.image() == set()


def test_nothing_is_kept_without_kernels(machine, monkeypatch):
    monkeypatch.setattr(dispatch, "is_on", lambda: False)
    assert machine.image() == set()


def test_checksums_that_find_no_memory(machine, monkeypatch):
    def fail(tensors):
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patch:
        patch.setattr(offloaded, "checksums", fail)
        assert machine.image() == set()
    machine.arrive()
    with monkeypatch.context() as patch:
        patch.setattr(offloaded, "checksums", fail)
        assert machine.leave() == set()
    assert machine.image() == NAMES


class Stage:
    """Replaces ``StagedCopy``. It lists the tensors that it gets, and clones them."""

    def __init__(self, device):
        self.device, self.copied, self.returned = device, [], []

    def to_gpu(self, tensor):
        self.copied.append(tensor)
        return tensor.clone()

    def to_cpu(self, tensor):
        self.returned.append(tensor)
        return tensor.clone()


@pytest.fixture
def waited(monkeypatch):
    """The devices that ``moving`` has waited for, in their order."""
    devices = []
    monkeypatch.setattr(offloaded, "_wait_for", devices.append)
    return devices


@pytest.fixture
def stages(machine, waited, monkeypatch):
    """A list of the ``Stage`` of each move. ``moving`` believes that each ``fn`` copies to the second GPU."""
    made = []
    monkeypatch.setattr(offloaded, "_destination", lambda fn, weights: torch.device("cuda", 1))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(offloaded, "StagedCopy", lambda device: made.append(Stage(device)) or made[-1])
    return made


def refuse(tensor):
    raise AssertionError("copied by PyTorch")


def test_weights_are_staged_to_the_gpu(machine, stages, waited):
    expected = list(machine.root.parameters())
    machine.arrive(fn=refuse)
    assert [stage.device for stage in stages] == [torch.device("cuda", 1)]
    assert list(map(id, stages[0].copied)) == list(map(id, expected))
    assert waited == [torch.device("cuda", 1)]


def test_an_error_does_not_leave_copies_unfinished(machine, stages, waited):
    def fail():
        raise KeyError

    with pytest.raises(KeyError):
        machine.arrive(after=fail)
    assert waited == [torch.device("cuda", 1)]


def test_small_weights_are_not_staged(machine, stages, monkeypatch):
    monkeypatch.setattr(offloaded, "_MIN_BYTES", 1000)
    machine.arrive()
    assert list(map(id, stages[0].copied)) == [id(layer.weight) for layer in machine.root]


def test_weights_with_gaps_or_shared_elements_are_not_staged(machine, stages):
    first, second = machine.root
    first.weight.data = torch.randn(16, 8, 3, 6)[..., ::2]
    second.weight.data = torch.randn(32, 1, 1, 1).expand(32, 16, 1, 1)
    machine.arrive()
    assert list(map(id, stages[0].copied)) == [id(first.bias), id(second.bias)]


def test_a_weight_in_two_modules_is_staged_once(machine, stages):
    first, second = machine.root
    second.bias = first.weight
    with offloaded.moving(machine.root, torch.clone) as move:
        for weight in (first.weight, second.bias):
            weight.data = move(weight).detach()
            machine.away.add(id(weight))
    assert [id(first.weight)] == list(map(id, stages[0].copied))


def test_pinned_weights_are_not_staged(machine, stages, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: True)
    machine.arrive()
    assert stages == []


def test_nothing_is_staged_without_offloading(machine, stages, monkeypatch):
    """``is_pinned`` is not called either: it would fail in a process that was forked after CUDA was used."""
    del machine.root._hf_hook
    monkeypatch.setattr(torch.Tensor, "is_pinned", refuse)
    machine.arrive()
    assert stages == []


@pytest.mark.parametrize("destination", [None, torch.device("cpu"), torch.device("meta")], ids=str)
def test_nothing_is_staged_elsewhere(machine, stages, monkeypatch, destination):
    monkeypatch.setattr(offloaded, "_destination", lambda fn, weights: destination)
    machine.arrive()
    assert stages == []


@pytest.fixture
def stage(machine, monkeypatch):
    """The ``Stage`` of all moves."""
    stage = Stage("any")
    monkeypatch.setattr(offloaded, "_stage_on", lambda *args: stage)
    return stage


def test_weights_that_are_copied_to_main_memory_are_staged(machine, stage):
    first, second = machine.root
    for change in (lambda: write(first.weight), lambda: replace(second.bias)):
        stage.returned.clear()
        machine.image(on_gpu=change)
        assert len(stage.returned) == 1
    assert stage.returned[0] is second.bias


def test_the_first_return_is_staged(machine, stage):
    offloaded.forget(machine.root)
    assert machine.image() == NAMES  # PyTorch copies none
    assert list(map(id, stage.returned)) == list(map(id, machine.root.parameters()))


def test_a_return_is_staged_once_for_a_weight_in_two_modules(machine, stage):
    first, second = machine.root
    second.bias = first.weight
    offloaded.forget(machine.root)
    machine.arrive()
    with offloaded.moving(machine.root, torch.clone) as move:
        for weight in (first.weight, second.bias):
            weight.data = move(weight).detach()
            machine.away.discard(id(weight))
    assert list(map(id, stage.returned)) == [id(first.weight)]


def to_double(tensor):
    return tensor.double() if tensor.is_floating_point() else tensor.clone()


def test_moves_that_do_more_than_copy_are_not_staged(machine, stage):
    machine.image(fn=to_double)
    assert stage.returned == []


def test_weights_with_gaps_are_not_staged_home(machine, stage):
    machine.arrive()
    machine.root[0].weight.data = torch.randn(16, 8, 3, 6)[..., ::2]
    machine.leave()
    assert stage.returned == []


def test_without_offloading_no_return_is_staged(machine, stage):
    offloaded.forget(machine.root)
    machine.arrive()
    del machine.root._hf_hook
    machine.leave()
    assert stage.returned == []


def test_one_cpu_thread_stages_nothing(machine, stages, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    machine.arrive()
    assert stages == []


@pytest.mark.parametrize("view", [torch.conj, torch._neg_view], ids=["conjugate", "negative"])
def test_views_with_other_values_are_not_staged(machine, stages, view):
    kind = torch.complex64 if view is torch.conj else torch.float32
    machine.root[0].weight = nn.Parameter(view(torch.randn(16, 8, 3, 3, dtype=kind)))
    machine.arrive()
    assert id(machine.root[0].weight) not in map(id, stages[0].copied)


def test_without_pinned_memory_pytorch_copies(machine, stages, monkeypatch):
    def refuse_memory(device):
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(offloaded, "StagedCopy", refuse_memory)
    copied = []
    machine.arrive(fn=lambda tensor: copied.append(tensor) or tensor.clone())
    assert len(copied) == 4


def cast(weight):
    weight.data = weight.data.double()


@pytest.mark.parametrize("change", [write, cast])
@pytest.mark.parametrize("is_on", [True, False], ids=["kernels", "no kernels"])
def test_old_memory_of_changed_weights_is_freed_first(machine, monkeypatch, change, is_on):
    """Otherwise main memory would have the old and the new values at the same time."""
    weights = list(machine.root.parameters())
    old = [StorageWeakRef(weight.data.untyped_storage()) for weight in weights]

    def copy_of(tensor):
        if isinstance(tensor, nn.Parameter):
            assert all(each.expired() for each in old)
        return tensor.clone()

    machine.arrive()
    for weight in weights:
        change(weight)
    monkeypatch.setattr(dispatch, "is_on", lambda: is_on)
    assert not any(each.expired() for each in old)
    machine.leave(fn=copy_of)


def test_parameters_that_are_replaced_on_the_gpu_free_their_memory(machine):
    machine.arrive()
    with offloaded.moving(machine.root, lambda t: t.to("meta")) as move:
        for layer in machine.root:
            layer.weight, layer.bias = nn.Parameter(move(layer.weight)), nn.Parameter(move(layer.bias))
    assert machine.root not in offloaded._kept


def test_weights_on_another_gpu_are_not_kept(machine, stages):
    machine.arrive()
    assert machine.root not in offloaded._kept


def test_forget(machine):
    machine.arrive()
    offloaded.forget(machine.root)
    assert machine.leave() == set()
    assert machine.image() == NAMES  # the return above has allocated memory that may be kept


def test_without_the_hook_the_next_move_frees_what_is_kept(machine):
    machine.arrive()
    del machine.root._hf_hook
    with offloaded.moving(machine.root, lambda t: t):
        pass
    assert machine.root not in offloaded._kept


def test_another_thread_forgets_during_a_move(machine, monkeypatch):
    """As ``optimize(pipe, cuda_graphs=False)`` may do while an image runs."""

    def forget_now(root):
        offloaded.forget(root)
        return False

    machine.arrive()
    with offloaded.moving(machine.root, to_double):
        monkeypatch.setattr(offloaded, "is_offloaded_whole", forget_now)
    assert machine.root not in offloaded._kept


def test_memory_that_is_short_for_the_small_tensor(machine, monkeypatch):
    def fail(*args, **kwargs):
        raise torch.OutOfMemoryError

    machine.arrive()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "arange", fail)
        assert machine.leave() == set()


def test_a_module_whose_moves_are_not_followed_keeps_nothing(machine):
    follow(machine.root)
    machine.arrive()
    unfollow(machine.root)
    assert machine.root not in offloaded._kept


def test_a_weight_that_does_not_move(machine):
    """It stays on the GPU, for instance because only a part of the model is moved."""
    conv = machine.root[1]
    machine.arrive()
    with offloaded.moving(machine.root, torch.clone) as move:
        machine.root[0].weight.data = move(machine.root[0].weight)
        machine.away.discard(id(machine.root[0].weight))
    write(conv.weight)
    expected = conv.weight.detach().clone()
    machine.leave()
    assert torch.equal(conv.weight, expected)
