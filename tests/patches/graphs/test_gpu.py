"""CUDA graphs on a GPU: memory, streams, failed captures, random numbers, Triton."""

import copy
import threading

import pytest
import torch
from torch import nn

import sdfastgn
from sdfastgn.kernels.act_linear import shared
from sdfastgn.models.architectures import build_unet, build_vae, unet_inputs
from tests.patches.graphs.cases import MIB, agree, make, reasons_of, replaced_parameter, run, settled, state

pytestmark = pytest.mark.gpu


def test_a_denoising_loop():
    """Of 30 calls of one kind one runs eagerly and 29 are replayed. Each has its own inputs and result."""
    unet, stock, inputs = make("cuda")
    outputs, expected = [], []
    for t in range(999, 0, -34):
        values = {
            **inputs,
            "timestep": torch.tensor(t, device="cuda"),
            "sample": torch.randn_like(inputs["sample"]),
        }
        outputs.append(run(unet, values))
        expected.append(run(stock, values))
    assert len(outputs) == 30
    for ours, theirs in zip(outputs, expected, strict=True):
        agree(ours, theirs)
    assert (state(unet).captured, state(unet).replays) == (1, 29)
    assert sdfastgn.report(unet).graph_memory_bytes > 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_with_cudnn_choosing(dtype, monkeypatch):
    """cuDNN searches for algorithms in the eager call, and not in the capture."""
    unet = build_unet("tiny_xl", dtype, "cuda")
    plain = sdfastgn.optimize(copy.deepcopy(unet), cuda_graphs=False)
    sdfastgn.optimize(unet)
    inputs = unet_inputs("tiny_xl", size=64, batch=2, dtype=dtype, device="cuda", seed=0)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    for _ in range(3):
        ours, expected = run(unet, inputs).float(), run(plain, inputs).float()
        assert (ours - expected).norm() < (5e-3 if dtype is torch.float16 else 4e-2) * expected.norm()
    assert (state(unet).captured, state(unet).replays) == (1, 2)


def test_autocast():
    unet, stock, inputs = make("cuda")
    with torch.autocast("cuda", torch.float16):
        for _ in range(3):
            ours, theirs = run(unet, inputs), run(stock, inputs)
            assert (ours - theirs).float().norm() < 5e-3 * theirs.float().norm()
    agree(run(unet, inputs), run(stock, inputs))
    assert (state(unet).captured, state(unet).replays) == (1, 2)


@pytest.mark.parametrize(
    "timestep", [7, torch.tensor(7), torch.tensor([7])], ids=["number", "cpu-tensor", "gpu-tensor"]
)
def test_a_replay_waits_for_nothing(timestep):
    unet, _, inputs = make("cuda")
    if isinstance(timestep, torch.Tensor) and timestep.dim():
        timestep = timestep.cuda()
    values = {**inputs, "timestep": timestep}
    for _ in range(2):
        run(unet, values)
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(unet, values)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert state(unet).replays == 2


def test_time_embeddings_share_a_launch(monkeypatch):
    """In a graph one kernel projects a step's time embedding for all blocks, and the bits stay the same."""
    add, projected = shared._Group.add, []
    monkeypatch.setattr(shared._Group, "add", lambda *given: projected.append(given[0]) or add(*given))
    inputs = unet_inputs("tiny_xl", size=64, batch=2, dtype=torch.float16, device="cuda", seed=0)
    pairs = []
    for seed in range(2):
        unet = build_unet("tiny_xl", torch.float16, "cuda", seed=seed)
        alone = sdfastgn.optimize(copy.deepcopy(unet))
        with monkeypatch.context() as patches:
            patches.setattr(shared.Capture, "result", lambda *given: None)
            run(alone, inputs), run(alone, inputs)
        pairs.append((sdfastgn.optimize(unet), alone))
    assert not projected
    run(pairs[0][0], inputs), run(pairs[1][0], inputs)  # eager calls
    for count in range(3):
        for unet, alone in pairs:
            assert torch.equal(run(unet, inputs), run(alone, inputs))
            with torch.no_grad():  # a replay reads the new values
                for each in (unet, alone):
                    each.mid_block.resnets[0].time_emb_proj.weight.mul_(1.1 + count)
    blocks = sum(type(module).__name__ == "FusedResnetBlock2D" for module in pairs[0][0].modules())
    assert blocks > 4
    assert len(projected) == 2 * blocks
    assert len(set(map(id, projected))) == 2
    assert [state(each).captured for pair in pairs for each in pair] == [1, 1, 1, 1]


class Waiting(nn.Identity):
    """Waits for the GPU, which is an error in a capture."""

    def forward(self, x):
        return x if float(x.sum()) < 1e30 else x * 0


def test_after_a_failed_capture_everything_goes_on():
    other, other_stock, inputs = make("cuda")
    unet, stock, _ = make("cuda")
    for _ in range(3):
        agree(
            run(other, inputs), run(other_stock, inputs)
        )  # its graph shares the pool in which the capture fails
    Waiting.__module__ = "torch.waiting"
    for model in (unet, stock):
        model.mid_block.resnets[0].dropout = Waiting()
    for _ in range(4):
        agree(run(unet, inputs), run(stock, inputs))
    assert state(unet).captured == 0
    assert "capture failed" in reasons_of(unet)
    assert torch.randn(8, device="cuda").isfinite().all()  # the generator no longer believes in a capture
    settled()  # nor does the allocator
    agree(run(other, inputs), run(other_stock, inputs))
    assert state(other).replays == 3
    for model in (unet, stock):
        model.mid_block.resnets[0].dropout = nn.Dropout(0.0).eval()
    for _ in range(3):
        agree(run(unet, inputs), run(stock, inputs))
    assert state(unet).captured == 1
    assert torch.randn(8, device="cuda").isfinite().all()


def reserved_over_changes(count):
    unet, _, inputs = make("cuda")
    used = []
    for _ in range(count):
        for _ in range(5):
            run(unet, inputs)
        replaced_parameter(unet)
        used.append(torch.cuda.memory_reserved())
    assert state(unet).captured == count
    sdfastgn.restore(unet)
    assert sdfastgn.report(unet).graph_memory_bytes == 0
    return used


def test_memory_is_reused_and_given_back():
    reserved_over_changes(1)  # cuBLAS keeps a workspace for the stream of captures
    settled()
    before = (torch.cuda.memory_allocated(), torch.cuda.memory_reserved())
    used = reserved_over_changes(6)
    assert used[-1] <= used[1] + 8 * MIB
    settled()
    assert torch.cuda.memory_allocated() <= before[0] + 2 * MIB
    assert torch.cuda.memory_reserved() <= before[1] + 8 * MIB


def test_peak_memory_of_a_decoder():
    """It is at most 1.15 times stock's, also during the capture."""
    vae = build_vae("tiny", torch.float16, "cuda")
    latents = torch.randn(8, 4, 128, 128, device="cuda", dtype=torch.float16)
    peaks = []
    for optimize in (False, True):
        if optimize:
            sdfastgn.optimize(vae)
        settled()
        torch.cuda.reset_peak_memory_stats()
        with torch.no_grad():
            for _ in range(3):
                vae.decode(latents)
        torch.cuda.synchronize()
        peaks.append((torch.cuda.max_memory_reserved(), torch.cuda.max_memory_allocated()))
    for stock, ours in zip(*peaks, strict=True):
        assert ours <= 1.15 * stock + 72 * MIB


def test_streams_and_threads():
    unet, stock, inputs = make("cuda")
    for _ in range(2):
        run(unet, inputs)
    wrong = []

    def work(seed):
        generator = torch.Generator("cuda").manual_seed(seed)
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(10):
                values = {
                    **inputs,
                    "sample": torch.randn(inputs["sample"].shape, generator=generator, device="cuda"),
                }
                ours, theirs = run(unet, values), run(stock, values)
                torch.cuda.current_stream().synchronize()
                if not torch.allclose(ours, theirs, atol=2e-4, rtol=2e-3):
                    wrong.append(seed)

    torch.cuda.synchronize()
    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert not wrong
    assert state(unet).replays == 31


def test_a_capture_beside_another_thread_at_work():
    unet, stock, inputs = make("cuda")
    stop, wrong = threading.Event(), []

    def work():
        with torch.cuda.stream(torch.cuda.Stream()):
            while not stop.is_set():
                x = torch.ones(1024, 1024, device="cuda") @ torch.ones(1024, 1024, device="cuda")
                if float(x[0, 0]) != 1024:
                    wrong.append(float(x[0, 0]))

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for _ in range(3):
            for _ in range(4):
                agree(run(unet, inputs), run(stock, inputs))
            for model in (unet, stock):
                replaced_parameter(model)
    finally:
        stop.set()
        thread.join()
    assert not wrong
    assert state(unet).captured == 3


def test_in_a_capture_of_ones_own():
    unet, _, inputs = make("cuda", mode=True)
    expected = run(unet, inputs)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        run(sdfastgn.optimize(unet, cuda_graphs=False), inputs)
    torch.cuda.synchronize()
    sdfastgn.optimize(unet, cuda_graphs=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        output = run(unet, inputs)
    graph.replay()
    agree(output, expected)
    assert state(unet).eager == {"the call is being captured by other code": 1}


def test_a_model_that_moves_away_and_back():
    """The weights may get their old addresses again, but in another layout."""
    unet, stock, inputs = make("cuda")
    for _ in range(3):
        run(unet, inputs)
    for model in (unet, stock):
        model.to("cpu")
        model.to(memory_format=torch.contiguous_format)
        torch.cuda.empty_cache()
        model.to("cuda")
    for _ in range(3):
        agree(run(unet, inputs), run(stock, inputs))
