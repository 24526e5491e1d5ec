"""Memory, copies, undo and threads of CUDA graphs."""

import copy
import gc
import sys
import threading
import weakref

import pytest
import torch
from diffusers import UNet2DConditionModel
from torch import nn

import sdfastgn
from sdfastgn.models.architectures import build_vae
from sdfastgn.models.pipelines import build_pipeline
from sdfastgn.patches.graphs.arguments import Unsupported
from sdfastgn.patches.graphs.capture import CudaBackend, pool_sizes
from sdfastgn.patches.graphs.install import install
from sdfastgn.patches.graphs.policy import NO_MEMORY, Policy
from sdfastgn.patches.graphs.store import MAX_GRAPHS
from tests.patches.graphs.cases import agree, make, optimized, replaced_parameter, run, state
from tests.patches.graphs.tape import TapeBackend
from tests.patches.samples import each_copy, pickled

pytestmark = pytest.mark.fused_on_cpu


def test_the_sizes_of_the_pools_of_graphs(monkeypatch):
    pools = [(0, 0), (0, 3), (0, 3), (0, 4)]
    segments = [{"segment_pool_id": pool, "total_size": 2**place} for place, pool in enumerate(pools)]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    assert pool_sizes() == {(0, 3): 6, (0, 4): 8}
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    assert pool_sizes() == {}


@pytest.mark.slow
def test_the_number_of_graphs_is_bounded():
    unet, _, inputs = make(mode=True)
    text = inputs["encoder_hidden_states"]
    for tokens in range(1, MAX_GRAPHS + 3):
        run(unet, {**inputs, "encoder_hidden_states": text[:, :tokens]})
    assert (state(unet).alive, state(unet).dropped) == (MAX_GRAPHS, 2)
    assert sdfastgn.report(unet).graph_memory_bytes == 1 << 20


@pytest.mark.drawn(1)
@each_copy
def test_a_copy_is_independent(copied):
    unet, stock, inputs = make()
    run(unet, inputs, calls=3)
    twin = copied(unet)
    replaced_parameter(unet)
    for _ in range(3):
        agree(run(twin, inputs), run(stock, inputs))
    assert unet.forward.module is unet
    assert twin.forward.module is twin


def test_a_shallow_copy_runs_itself(monkeypatch):
    unet, stock, inputs = make()
    run(unet, inputs)
    ran, forward = [], UNet2DConditionModel.forward
    twin = copy.copy(unet)
    monkeypatch.setattr(
        UNet2DConditionModel, "forward", lambda self, *a, **k: ran.append(self) or forward(self, *a, **k)
    )
    agree(run(twin, inputs), run(stock, inputs))
    assert ran == [twin, stock]
    ran.clear()
    del unet
    agree(run(copy.deepcopy(twin.to("cpu")), inputs), run(stock, inputs))
    sdfastgn.optimize(twin)
    assert twin.forward.module is twin
    assert set(vars(sdfastgn.restore(twin))) == set(vars(stock))


def test_replicas_of_data_parallel_run_themselves(monkeypatch):
    """DataParallel cannot copy to a CPU, so this test gives each replica other weights."""
    parallel = sys.modules["torch.nn.parallel.replicate"]
    factors = (1.0, 1.3)
    monkeypatch.setattr(parallel, "_get_device_index", lambda device, optional: 0)
    monkeypatch.setattr(
        parallel,
        "_broadcast_coalesced_reshape",
        lambda tensors, devices, detach=False: [[t * factor for t in tensors] for factor in factors],
    )
    unet, stock, inputs = make()
    run(unet, inputs, calls=3)
    for replica, factor in zip(nn.parallel.replicate(unet, ["cpu", "cpu"]), factors, strict=True):
        twin = copy.deepcopy(stock)
        with torch.no_grad():
            [parameter.mul_(factor) for parameter in twin.parameters()]
        agree(run(replica, inputs), run(twin, inputs))
    assert state(unet).replays == 2


class Counted(nn.Sequential):
    copies = 0

    def __getstate__(self):
        self.copies += 1
        return super().__getstate__()


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled, copy.copy])
def test_a_state_of_its_own_is_asked_for(copied):
    model = sdfastgn.optimize(Counted(nn.Conv2d(4, 4, 1), nn.GroupNorm(2, 4)))
    copied(model)
    assert model.copies == 1


def test_restore_is_exact():
    unet, stock, inputs = make()
    run(unet, inputs, calls=3)
    sdfastgn.restore(unet)
    assert set(vars(unet)) == set(vars(stock))
    assert torch.equal(run(unet, inputs), run(stock, inputs))
    assert all(g.mode == "False" for g in sdfastgn.report(unet).graphs)


def test_a_dropped_model_goes_at_once():
    unet, _, inputs = make()
    run(unet, inputs, calls=3)
    weight = weakref.ref(unet.conv_in.weight)
    gc.disable()
    try:
        del unet
        assert weight() is None
    finally:
        gc.enable()


def test_threads_do_not_mix_their_values():
    unet, stock, inputs = make()
    samples = [torch.randn_like(inputs["sample"]) for _ in range(3)]
    wrong = []

    def work(sample):
        values = {**inputs, "sample": sample}
        expected = run(stock, values)
        wrong.extend(i for i in range(4) if not torch.allclose(run(unet, values), expected, atol=1e-3))

    threads = [threading.Thread(target=work, args=(sample,)) for sample in samples]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert not wrong
    assert state(unet).captured == 1


@pytest.mark.drawn(1)
@pytest.mark.parametrize(("same", "forwards"), [(True, 1), (False, 2)], ids=["same-thread", "another-thread"])
def test_a_thread_that_has_not_run_the_call_runs_it_before_the_capture(same, forwards, monkeypatch):
    """cuDNN chooses algorithms in each thread separately."""
    unet, _, inputs = make()
    forward, calls = UNet2DConditionModel.forward, []

    def counted(self, *args, **kwargs):
        calls.append(threading.get_ident())
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(UNet2DConditionModel, "forward", counted)
    run(unet, inputs)
    calls.clear()
    thread = threading.Thread(target=run, args=(unet, inputs))
    if same:
        run(unet, inputs)
    else:
        thread.start(), thread.join()
    assert len(calls) == forwards
    assert state(unet).captured == 1


# ---- little memory


def moved(model):
    """As a model that waits on the CPU between two images: other memory, the same values."""
    model.to(torch.float64).to(torch.float32)


def test_weights_that_are_moved_before_each_call_are_not_captured():
    backend = TapeBackend()
    unet, stock, inputs = make(backend=backend)
    for _ in range(4):
        agree(run(unet, inputs), run(stock, inputs))
        moved(unet)
    assert backend.captures == 0
    run(unet, inputs, calls=2)
    assert backend.captures == 1


def test_weights_that_move_take_their_graphs_with_them():
    """Other models need the memory at once, not only at the next call of this model."""
    unet, stock, inputs = make()
    run(unet, inputs, calls=3)
    unet.to("cpu")
    assert state(unet).alive == 1  # nothing has moved
    moved(unet)
    assert (state(unet).alive, state(unet).dropped) == (0, 1)
    assert "has other memory" in state(unet).last_change
    agree(run(unet, inputs), run(stock, inputs))


def test_a_text_encoder_that_moves_drops_its_graphs():
    """It has no convolutions. All models on a GPU share one pool of memory, so one graph would keep it."""
    encoder = optimized(build_pipeline("tiny", dtype=torch.float32, device="cpu").text_encoder)
    with torch.no_grad():
        for _ in range(3):
            encoder(torch.ones(1, 77, dtype=torch.int64))
    assert state(encoder).alive == 1
    moved(encoder)
    assert state(encoder).alive == 0
    sdfastgn.restore(encoder)
    assert "_apply" not in vars(encoder)


def test_a_model_that_was_optimized_inside_of_another_follows_its_moves():
    unet = make()[0]
    sdfastgn.restore(unet)
    sdfastgn.optimize(nn.Sequential(unet))
    with sdfastgn.optimized(unet):
        pass
    assert "_apply" in vars(unet)
    sdfastgn.optimize(unet)
    alone = sdfastgn.optimize(copy.deepcopy(sdfastgn.restore(make()[0])))
    assert type(vars(unet)["_apply"]) is type(vars(alone)["_apply"])


def test_replaced_weights_are_freed_when_the_model_moves():
    unet, _, inputs = make()
    run(unet, inputs, calls=3)
    old = weakref.ref(unet.conv_in.weight)
    unet.load_state_dict({name: t.clone() for name, t in unet.state_dict().items()}, assign=True)
    moved(unet)
    assert state(unet).alive == 0
    gc.collect()
    assert old() is None


def test_a_part_that_moves_with_its_whole_drops_its_graphs():
    """In an autoencoder, only the decoder has graphs."""
    vae = sdfastgn.optimize(build_vae("tiny", torch.float32, "cpu"))
    install(vae.decoder, "auto", TapeBackend())
    latents = torch.randn(1, 4, 4, 4)
    with torch.no_grad():
        for _ in range(3):
            vae.decode(latents)
    graphs = vae.decoder.forward
    assert graphs.alive == 1
    moved(vae)
    assert graphs.alive == 0


def test_a_capture_that_runs_out_of_memory_is_not_tried_again_and_again(monkeypatch):
    """Not even if there is no graph to drop, and the call before the capture runs out of memory too."""
    unet, stock, inputs = make(backend=(backend := TapeBackend()))
    forward, short = UNet2DConditionModel.forward, []

    def capture(fn, pool=None):
        backend.captures += 1
        short.append(True)
        raise torch.OutOfMemoryError("CUDA out of memory")

    def once_short(self, *args, **kwargs):
        if short:
            short.clear()
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(backend, "capture", capture)
    expected = run(stock, inputs)
    monkeypatch.setattr(UNet2DConditionModel, "forward", once_short)
    for _ in range(4):
        agree(run(unet, inputs), expected)
    assert backend.captures == 1
    assert state(unet).eager[NO_MEMORY] == 3


def test_a_pause_without_memory_is_twice_as_long_each_time():
    policy = Policy()
    for length in (256, 512, 1024):
        policy.pause_without_memory()
        policy.pause_without_memory()  # as for a model whose graph was dropped with those of others
        for _ in range(length):
            with pytest.raises(Unsupported, match=NO_MEMORY):
                policy.check_pause()
        policy.check_pause()


@pytest.mark.parametrize(("fraction", "room"), [(1.0, True), (0.5, False)])
def test_room_for_a_graph_is_what_the_process_may_still_take(fraction, room, monkeypatch):
    backend = object.__new__(CudaBackend)
    backend._device = torch.device("cuda", 0)
    monkeypatch.setattr(backend, "memory", lambda: 10)
    for name, value in (
        ("mem_get_info", (60, 100)),
        ("get_per_process_memory_fraction", fraction),
        ("memory_reserved", 45),
    ):
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    assert backend.has_room() is room
