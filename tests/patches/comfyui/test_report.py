"""What the text on a node says of the last run."""

import pytest
import torch

from tests.patches.comfyui import comfy_checkout

comfy_checkout.import_for_cpu()

from comfy import model_management  # noqa: E402
from comfy_extras import nodes_freelunch, nodes_hypertile  # noqa: E402
from torch import nn  # noqa: E402

from sdfastgn.kernels.common import dispatch  # noqa: E402
from sdfastgn.patches.comfyui import inject  # noqa: E402
from sdfastgn.patches.comfyui.model_patcher import optimize_model, optimize_vae  # noqa: E402
from sdfastgn.patches.comfyui.report import text_of  # noqa: E402
from sdfastgn.patches.graphs import capture, forward  # noqa: E402
from sdfastgn.patches.layout import channels_last  # noqa: E402
from tests.patches.comfyui import comfy_models  # noqa: E402
from tests.patches.comfyui.comfy_models import latent_of  # noqa: E402
from tests.patches.graphs.tape import TapeBackend  # noqa: E402

pytestmark = pytest.mark.fused_on_cpu

KIND = "sd15"
FUSED = "Fused: 1 UNet, 8 ResNet blocks, 7 transformers, 7 transformer blocks, 7 GEGLU, 1 upsampling"


@pytest.fixture
def model():
    found = comfy_models.load_model(KIND)
    yield found
    model_management.unload_all_models()


@pytest.fixture
def tape(monkeypatch):
    """CUDA graphs are tapes on the CPU, and hold 3 MiB."""
    backend = TapeBackend()
    monkeypatch.setattr(backend, "memory", lambda: 3 * 2**20, raising=False)
    monkeypatch.setattr(forward, "backend_of", lambda device: backend)
    monkeypatch.setattr(channels_last, "is_alone", lambda weight: True)  # a tape keeps its weights alive
    return backend


def lines_of(patcher):
    return text_of(patcher).splitlines()


def words(line):
    """The parts that a line lists, in any order."""
    title, _, parts = line.partition(": ")
    return title, set(parts.split(", "))


def test_without_a_gpu(model):
    assert text_of(optimize_model(model)) == "UNetModel: not faster. There is no CUDA GPU"


def test_when_no_kernel_compiles(model, gpu_at_hand, monkeypatch):
    monkeypatch.setattr(dispatch, "why_off", "no compiler")
    assert text_of(optimize_model(model)) == "UNetModel: not faster. No kernel runs: no compiler"


def test_when_one_kernel_does_not_compile(model, gpu_at_hand, monkeypatch):
    monkeypatch.setattr(dispatch, "ops_off", {("geglu", 0): "too large"})
    assert "In plain PyTorch: geglu on cuda:0. Reason: too large" in text_of(optimize_model(model))


def test_a_model_without_known_blocks(model, gpu_at_hand, monkeypatch):
    monkeypatch.setattr(model.model, "diffusion_model", nn.Sequential())
    assert text_of(model) == "Sequential: not faster. sdfastgn knows none of its blocks"


def test_a_stock_model(model, gpu_at_hand):
    expected = "UNetModel: not faster. It does not come from a node of sdfastgn that optimizes"
    optimized = optimize_model(model)
    latent_of(optimized, KIND)
    assert text_of(optimized).startswith("UNetModel: faster")  # both share the model, which is fused now
    assert text_of(model) == expected


def test_before_and_after_a_run(model, gpu_at_hand, tape):
    optimized = optimize_model(model)
    verdict, fused = lines_of(optimized)
    assert verdict == "UNetModel: faster whenever all of it is loaded"
    assert words(fused) == words(FUSED)
    latent_of(optimized, KIND, steps=4)
    verdict, fused, *calls = lines_of(optimized)
    assert verdict == "UNetModel: faster"
    assert words(fused) == words(FUSED)
    assert calls == [
        "Last run: 3 of 4 calls as CUDA graphs, which hold 3 MiB",
        "Without a graph: 1 (first call of its kind)",
    ]
    latent_of(optimized, KIND, steps=5)  # the counts are of this run alone
    assert lines_of(optimized)[2:] == ["Last run: 5 of 5 calls as CUDA graphs, which hold 3 MiB"]


def test_memory_under_the_allocator_that_comfyui_chooses(monkeypatch):
    def memory_snapshot():
        raise RuntimeError("Calling snapshot with backend:cudaMallocAsync is not meaningful")

    monkeypatch.setattr(torch.cuda, "memory_snapshot", memory_snapshot)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    assert capture.CudaBackend.memory(object()) == 0


def test_an_allocator_that_does_not_tell_its_memory(model, gpu_at_hand, tape, monkeypatch):
    monkeypatch.setattr(tape, "memory", lambda: 0)
    optimized = optimize_model(model)
    latent_of(optimized, KIND, steps=4)
    assert lines_of(optimized)[2] == "Last run: 3 of 4 calls as CUDA graphs"


def test_the_text_after_a_run_is_handed_on(model, gpu_at_hand, tape):
    found = []
    latent_of(optimize_model(model, after_run=found.append), KIND, steps=2)
    assert len(found) == 1
    assert found[0].startswith("UNetModel: faster\n")
    assert "Last run: 1 of 2 calls" in found[0]


def test_patches_of_other_nodes(model, gpu_at_hand, tape):
    optimized = optimize_model(model)
    patched = optimized.clone()
    patched.set_model_attn1_output_patch(lambda h, options: h)
    latent_of(patched, KIND, steps=2)
    assert lines_of(patched)[0] == "UNetModel: partly faster"
    assert "transformer blocks" not in lines_of(patched)[1]
    assert lines_of(patched)[2:] == [
        "As stock: 7 transformer blocks. Reason: other nodes' patches run inside of them",
        "Last run: 0 of 2 calls as CUDA graphs, which hold 0 MiB",
        "Without a graph: 2 (other nodes take part: attn1_output_patch)",
    ]


def with_hypertile(model):
    return nodes_hypertile.HyperTile.execute(model, 32, 1, 1, False)[0]


def with_freeu(model):
    return nodes_freelunch.FreeU.execute(model, 1.3, 1.4, 0.9, 0.2)[0]


def with_freeu_v2(model):
    return nodes_freelunch.FreeU_V2.execute(model, 1.3, 1.4, 0.9, 0.2)[0]


IN_BLOCKS = ["As stock: 7 transformer blocks. Reason: other nodes' patches run inside of them"]


@pytest.mark.parametrize(
    ("add", "verdict", "stock_parts", "names"),
    [
        (with_hypertile, "partly faster", IN_BLOCKS, "attn1_output_patch, attn1_patch"),
        (with_freeu, "faster", [], "output_block_patch"),
        (with_freeu_v2, "faster", [], "output_block_patch"),
    ],
)
def test_hypertile_and_freeu(model, gpu_at_hand, tape, monkeypatch, add, verdict, stock_parts, names):
    # FreeU changes blocks with two and four times as many channels. The tiny model has only one width.
    monkeypatch.setitem(model.model.model_config.unet_config, "model_channels", 160)
    expected = latent_of(add(model), KIND)
    assert not torch.allclose(expected, latent_of(model, KIND))
    optimized = add(optimize_model(model))
    comfy_models.close(latent_of(optimized, KIND), expected)
    first, _, *others = lines_of(optimized)
    assert first == f"UNetModel: {verdict}"
    assert others == [
        *stock_parts,
        "Last run: 0 of 2 calls as CUDA graphs, which hold 0 MiB",
        f"Without a graph: 2 (other nodes take part: {names})",
    ]
    assert torch.equal(latent_of(add(model), KIND), expected)


def test_graphs_that_the_user_has_turned_off(model, gpu_at_hand, tape):
    optimized = optimize_model(model, False)
    latent_of(optimized, KIND, steps=2)
    assert lines_of(optimized)[-1] == "Without a graph: 2 (they are turned off)"


def test_a_vae(gpu_at_hand):
    vae = comfy_models.load_vae()
    optimized = optimize_vae(vae)
    assert lines_of(optimized.patcher)[0] == "AutoencoderKL: faster whenever all of it is loaded"
    inject.inject(optimized.first_stage_model)
    verdict, fused = lines_of(optimized.patcher)
    assert verdict == "AutoencoderKL: faster"
    assert {"1 encoder", "1 decoder"} <= words(fused)[1]
    inject.eject(optimized.first_stage_model)
    assert torch.is_tensor(comfy_models.image_of(vae, torch.zeros(1, 4, 4, 4)))
