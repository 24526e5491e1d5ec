"""Arguments and results of calls that are replayed by CUDA graphs."""

import contextlib
import copy
import inspect

import pytest
import torch
from diffusers import StableDiffusionImg2ImgPipeline, UNet2DConditionModel, UNet2DModel
from torch.nn import attention
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import CLIPTextModel

import sdfastgn
from sdfastgn.models.architectures import build_vae, unet_inputs
from sdfastgn.models.pipelines import build_pipeline
from sdfastgn.patches.graphs import arguments as graph_call
from sdfastgn.patches.graphs import install as cuda_graphs
from sdfastgn.patches.graphs.arguments import global_state
from tests.controlnet import build_controlnet
from tests.patches.graphs.cases import DEVICES, agree, lora, make, optimized, run, same_results, state
from tests.patches.graphs.tape import TapeBackend

pytestmark = pytest.mark.fused_on_cpu


@pytest.mark.drawn(1)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "make_timestep",
    [int, float, torch.tensor, lambda t: torch.tensor([t])],
    ids=["int", "float", "0-d", "1-d"],
)
def test_new_values_in_the_same_graph(make_timestep, device):
    unet, stock, inputs = make(device)
    for t in (900, 500, 100):
        timestep = make_timestep(t)
        values = {**inputs, "sample": torch.randn_like(inputs["sample"])}
        values["timestep"] = (
            timestep.to(device) if isinstance(timestep, torch.Tensor) and timestep.dim() else timestep
        )
        agree(run(unet, values), run(stock, values))
    assert (state(unet).captured, state(unet).replays) == (1, 2)


def test_a_fractional_timestep_where_the_model_cuts_it():
    """``UNet2DModel`` casts every timestep to an integer, ``UNet2DConditionModel`` none."""
    torch.manual_seed(0)
    unet = UNet2DModel(
        sample_size=8,
        in_channels=4,
        out_channels=4,
        block_out_channels=(8,),
        norm_num_groups=4,
        layers_per_block=1,
        down_block_types=("DownBlock2D",),
        up_block_types=("UpBlock2D",),
    ).eval()
    stock = copy.deepcopy(unet)
    optimized(unet)
    x = torch.randn(1, 4, 8, 8)
    for t in (0.9, 3.7, 900.5):
        with torch.no_grad():
            agree(unet(x, t).sample, stock(x, t).sample)
    assert state(unet).replays == 2


def variants(inputs):
    x, text = inputs["sample"], inputs["encoder_hidden_states"]
    yield {**inputs, "sample": torch.cat([x, x])[:, :, :8], "encoder_hidden_states": torch.cat([text, text])}
    yield {**inputs, "encoder_hidden_states": text[:, :5]}
    yield {**inputs, "encoder_hidden_states": text[:, :1].expand(-1, 4, -1)}
    yield {**inputs, "sample": x.contiguous(memory_format=torch.channels_last)}
    yield {**inputs, "encoder_attention_mask": torch.ones(1, text.shape[1], device=x.device)}
    yield {**inputs, "cross_attention_kwargs": {"scale": 0.5}}


@pytest.mark.slow
def test_each_kind_of_call_has_a_graph_of_its_own():
    unet, stock, inputs = make()
    lora(unet), lora(stock)
    for _ in range(3):
        for values in (inputs, *variants(inputs)):
            agree(run(unet, values), run(stock, values))
    # A scale of LoRAs is part of the merged weights, so it makes no kind of its own.
    assert (state(unet).captured, state(unet).replays) == (6, 15)


def test_nested_arguments_of_a_controlnet_and_sdxl():
    unet, stock, inputs = make(model="tiny_xl")
    controlnet = build_controlnet("tiny_xl", torch.float32, "cpu")
    for i in range(3):
        with torch.no_grad():
            image = torch.randn(1, 3, 64, 64, generator=torch.Generator().manual_seed(i))
            down, mid = controlnet(**inputs, controlnet_cond=image, return_dict=False)
        values = {
            **inputs,
            "down_block_additional_residuals": tuple(down),
            "mid_block_additional_residual": mid,
        }
        agree(run(unet, values), run(stock, values))
    assert state(unet).replays == 2


@pytest.mark.parametrize("device", DEVICES)
def test_results_stay_what_they_were(device):
    unet, _, inputs = make(device)
    run(unet, inputs)
    first = run(unet, inputs)
    kept = first.clone()
    second = run(unet, {**inputs, "sample": inputs["sample"] * 2})
    assert state(unet).replays == 2
    assert torch.equal(first, kept)
    assert not torch.equal(second, first)


@pytest.mark.slow
def test_one_tensor_twice_in_a_result(monkeypatch):
    forward = UNet2DConditionModel.forward

    def twice(self, *args, **kwargs):
        sample = forward(self, *args, **kwargs).sample
        return sample, [sample, sample * 2], {"again": sample}

    monkeypatch.setattr(UNet2DConditionModel, "forward", twice)
    unet, _, inputs = make()
    with torch.no_grad():
        for _ in range(3):
            sample, (first, double), others = unet(**inputs)
            assert sample is first is others["again"]
            assert double is not sample
    assert state(unet).replays == 2


def test_both_kinds_of_output():
    unet, stock, inputs = make()
    for _ in range(3):
        with torch.no_grad():
            output, (sample,) = unet(**inputs), unet(**inputs, return_dict=False)
            assert type(output) is type(stock(**inputs))
            assert torch.equal(output.sample, output[0])
            agree(output.sample, sample)
    assert state(unet).replays == 4


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_vae_and_controlnet(device):
    vae, controlnet = (
        build_vae("tiny", torch.float32, device),
        build_controlnet("tiny", torch.float32, device),
    )
    inputs = unet_inputs("tiny", size=64, batch=1, dtype=torch.float32, device=device, seed=0)
    calls = {
        vae: lambda m: m(torch.ones(1, 3, 32, 32, device=device)).sample,
        controlnet: lambda m: m(**inputs, controlnet_cond=torch.ones(1, 3, 64, 64, device=device))[1],
    }
    for model, call in calls.items():
        stock = copy.deepcopy(model)
        optimized(model)
        with torch.no_grad():
            for _ in range(3):
                agree(call(model), call(stock))
        assert {g.replays for g in sdfastgn.report(model).graphs} == {2}


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_a_default_device(device):
    unet, stock, inputs = make(device)
    for model in (unet, stock):
        lora(model)
    with torch.device(device):
        same_results(unet, stock, inputs, calls=3)
        for model in (unet, stock):
            model.enable_freeu(s1=0.9, s2=0.2, b1=1.2, b2=1.4)
        same_results(unet, stock, inputs, calls=2)
    for b1 in (1.3, 1.5):
        with torch.device("meta"):  # new values are written from the CPU
            unet.enable_freeu(s1=0.9, s2=0.2, b1=b1, b2=1.4)
            unet.set_adapters(["a"], weights=[b1])
            found = run(unet, inputs)
        stock.enable_freeu(s1=0.9, s2=0.2, b1=b1, b2=1.4)
        stock.set_adapters(["a"], weights=[b1])
        agree(found, run(stock, inputs))
    same_results(unet, stock, inputs, calls=2)  # a call without a default device is of another kind
    assert (state(unet).captured, state(unet).eager) == (4, {"first call of its kind": 4})


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["text_encoder", "text_encoder_2"])
def test_text_encoders(name, device):
    """Hooks collect hidden states. The first call that asks for hidden states adds these hooks."""
    encoder = getattr(build_pipeline("tiny_xl", dtype=torch.float32, device=device), name)
    stock = copy.deepcopy(encoder)
    optimized(encoder)
    (graphs,) = sdfastgn.report(
        encoder
    ).graphs  # one, although an encoder with a projection is made of another one
    assert graphs.kind == type(stock).__name__
    g = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for _ in range(4):
            tokens = torch.randint(0, 512, (1, 77), generator=g).to(device)
            ours, theirs = (m(tokens, output_hidden_states=True) for m in (encoder, stock))
            assert type(ours) is type(theirs)
            agree(ours[0], theirs[0])
            for a, b in zip(ours.hidden_states, theirs.hidden_states, strict=True):
                agree(a, b)
    assert state(encoder).replays == 3
    sdfastgn.restore(encoder)
    assert "forward" not in vars(encoder)


def test_a_model_that_was_optimized_before_the_one_around_it():
    encoder = build_pipeline("tiny_xl", dtype=torch.float32, device="cpu").text_encoder_2
    if not isinstance(encoder.text_model, CLIPTextModel):
        pytest.skip("this transformers has no model of its own inside of that one")
    optimized(encoder.text_model)
    optimized(encoder)
    assert "forward" not in vars(encoder.text_model)
    with torch.no_grad():
        for _ in range(2):
            encoder(torch.ones(1, 77, dtype=torch.int64))
    assert state(encoder).replays == 1


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_an_autoencoder_in_slices_and_tiles(device):
    vae = build_vae("tiny", torch.float32, device)
    stock = copy.deepcopy(vae)
    optimized(vae, exact_tiling=False)
    for model in (vae, stock):
        model.enable_slicing()
        model.enable_tiling()
        model.tile_latent_min_size, model.tile_sample_min_size = 4, 32
    latents = torch.randn(2, 4, 7, 6, generator=torch.Generator().manual_seed(0)).to(device)
    with torch.no_grad():
        for _ in range(2):
            agree(vae.decode(latents).sample, stock.decode(latents).sample)
    decoder = next(g for g in sdfastgn.report(vae).graphs if g.kind == "Decoder")
    assert decoder.captured == decoder.alive > 1  # one for each size of a tile
    assert decoder.replays > decoder.captured


@pytest.mark.drawn(1)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"])
def test_modes_of_pytorch_do_not_share_graphs(mode):
    unet, stock, inputs = make()
    for context in (torch.no_grad, torch.inference_mode, mode, mode, torch.inference_mode, torch.no_grad):
        with context():
            output = unet(**inputs).sample
            assert output.is_inference() == (context is torch.inference_mode)
            agree(output, stock(**inputs).sample)


@contextlib.contextmanager
def fp16_accumulation():
    matmul = torch.backends.cuda.matmul
    matmul.allow_fp16_accumulation = True
    try:
        yield
    finally:
        matmul.allow_fp16_accumulation = False


@contextlib.contextmanager
def reduced_math():
    before = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(not before)
    try:
        yield
    finally:
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(before)


@contextlib.contextmanager
def another_flash_attention():
    """Activate another flash attention as FA3 and FA4 are activated: they replace PyTorch's operator."""
    if not hasattr(attention, "restore_flash_attention_impl"):
        pytest.skip("this PyTorch cannot change its flash attention back")

    class Handle:
        def remove(self):
            pass

    attention.register_flash_attention_impl("for-a-test", register_fn=lambda *_: Handle())
    attention.activate_flash_attention_impl("for-a-test")
    try:
        yield
    finally:
        attention.restore_flash_attention_impl()
        attention._registry._FLASH_ATTENTION_IMPLS.pop("for-a-test")


EVERY_BACKEND = [
    SDPBackend.MATH,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
]


@pytest.mark.parametrize(
    "switch",
    [
        pytest.param(fp16_accumulation, id="fp16-accumulation"),
        pytest.param(reduced_math, id="sdpa-math-reduction"),
        pytest.param(lambda: sdpa_kernel(EVERY_BACKEND, set_priority=True), id="sdpa-priority"),
        pytest.param(lambda: sdpa_kernel(SDPBackend.MATH), id="sdpa-backend"),
        pytest.param(another_flash_attention, id="flash-attention"),
        pytest.param(torch.inference_mode, id="inference-mode"),
    ],
)
def test_calls_under_other_switches_are_of_another_kind(switch):
    before = global_state(torch.device("cuda"))
    with switch():
        other = global_state(torch.device("cuda"))
        assert other != before
        hash(other)
    assert global_state(torch.device("cuda")) == before


def test_cudnn_first_by_pytorch_itself_is_no_change(monkeypatch):
    """PyTorch reorders its backends at a process's first attention, which may be in the first call."""
    unet, stock, inputs = make()
    initial = graph_call._INITIAL_ORDER
    orders = iter([initial, *[(3, *(b for b in initial if b != 3))] * 5])
    monkeypatch.setattr(graph_call, "sdp_priority_order", lambda: next(orders))
    same_results(unet, stock, inputs, calls=3)
    assert (state(unet).captured, state(unet).replays) == (1, 2)


@pytest.mark.skipif(not hasattr(torch.backends, "fp32_precision"), reason="PyTorch 2.8 has the older alone")
def test_the_newer_switch_of_tf32():
    """After it was set, PyTorch raises if the older switch is read."""
    unet, stock, inputs = make()
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    try:
        for precision in ("ieee", "tf32", "ieee"):
            matmul.fp32_precision = precision
            same_results(unet, stock, inputs, calls=2)
    finally:
        matmul.fp32_precision = before
    assert (state(unet).captured, state(unet).replays) == (2, 4)


def test_the_signature_is_the_stock_one():
    unet, stock, _ = make()
    assert inspect.signature(unet.forward) == inspect.signature(stock.forward)


@pytest.mark.slow
def test_pipelines_that_share_their_models():
    pipe = build_pipeline("tiny", dtype=torch.float32, device="cpu")
    stock = copy.deepcopy({k: v for k, v in pipe.components.items() if k in ("unet", "vae")})
    image = torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(3))

    def both(unet, vae):
        parts = {**pipe.components, "unet": unet, "vae": vae}
        texts = type(pipe)(**parts, requires_safety_checker=False)
        images = StableDiffusionImg2ImgPipeline(**parts, requires_safety_checker=False)
        for one in (texts, images):
            one.set_progress_bar_config(disable=True)
        options = {"num_inference_steps": 4, "output_type": "pt"}
        for _ in range(2):
            generator = torch.Generator().manual_seed(0)
            yield texts("a cat", height=64, width=64, generator=generator, **options).images
            yield images("a dog", image=image, strength=1.0, generator=generator, **options).images

    backend = TapeBackend()
    for model in (pipe.unet, pipe.vae):
        sdfastgn.optimize(model)
        cuda_graphs.install(model, "auto", backend)
    for ours, theirs in zip(both(pipe.unet, pipe.vae), both(**stock), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-2)
    graphs = {g.kind: g for g in sdfastgn.report(pipe).graphs}
    assert (
        graphs["UNet2DConditionModel"].captured
        == graphs["Decoder"].captured
        == graphs["Encoder"].captured
        == 1
    )
    assert graphs["UNet2DConditionModel"].eager == {"first call of its kind": 1}
    assert graphs["Decoder"].replays == 3
    assert backend.captures == 3
