"""A VAE decodes a large batch in slices, by fused blocks and by plans: the same images, in bounded memory."""

import copy
import warnings
from unittest.mock import MagicMock

import pytest
import torch

import sdfastgn
from sdfastgn.models.architectures import build_vae
from sdfastgn.patches.fusions import conv_norm_out, decoder_slices
from tests.patches import cases
from tests.patches.cases import noise
from tests.plans.engine import forward_of, slices_pay

pytestmark = pytest.mark.fused_on_cpu


@pytest.fixture(scope="module")
def stock():
    return build_vae("tiny", torch.float32, "cpu")


def latents(batch, side=2):
    return torch.randn(batch, 4, side, side, generator=torch.Generator().manual_seed(0))


def slices_of(vae, call):
    """The number of images in each call of the decoder's first convolution."""
    found = []
    hook = vae.decoder.conv_in.register_forward_pre_hook(lambda module, args: found.append(len(args[0])))
    call()
    hook.remove()
    return found


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    ("batch", "pixels", "expected"),
    [
        pytest.param(5, 2 * 16**2, [2, 2, 1], id="two-at-once"),
        pytest.param(4, 4 * 16**2, [4], id="all-fit"),
        pytest.param(3, 16**2 - 1, [1, 1, 1], id="none-fits"),
        pytest.param(1, 1, [1], id="one"),
    ],
)
@pytest.mark.parametrize("plans", [True, False], ids=["plans", "blocks"])
def test_slices_give_the_same_images(stock, monkeypatch, batch, pixels, expected, plans):
    """The hook of ``slices_of`` keeps plans from running."""
    monkeypatch.setattr(decoder_slices, "MOST_PIXELS", pixels)
    last = MagicMock(side_effect=conv_norm_out.group_norm)
    monkeypatch.setattr(conv_norm_out, "group_norm", last)
    vae, z = sdfastgn.optimize(copy.deepcopy(stock), plans=plans), latents(batch)
    with torch.no_grad():
        before = stock.decode(z).sample
        assert slices_of(vae, lambda: cases.agree(vae.decode(z).sample, before, 1e-4)) == expected
        assert last.call_count == len(expected)  # the norm and activation at the end are one in every slice
        assert slices_of(stock, lambda: stock.decode(z)) == [batch]
        assert torch.equal(sdfastgn.restore(vae).decode(z).sample, before)


def test_plans_run_in_slices(stock, monkeypatch):
    slices_pay(monkeypatch)
    vae, z, x = sdfastgn.optimize(copy.deepcopy(stock)), latents(3), noise(3, 3, 16, 16)
    with torch.no_grad():
        cases.agree(vae.decode(z).sample, stock.decode(z).sample, 1e-4)
        cases.agree(vae.encode(x).latent_dist.mean, stock.encode(x).latent_dist.mean, 1e-4)
    found = [forward_of(part).plans for part in (vae.decoder, vae.encoder)]
    assert [plan.slices.number for (plan,) in found] == [3, 3]


@pytest.mark.slow
def test_training_and_tracing_take_the_batch_as_it_is(stock, monkeypatch):
    monkeypatch.setattr(decoder_slices, "MOST_PIXELS", 16**2)
    vae, z = sdfastgn.optimize(copy.deepcopy(stock)), latents(3)
    assert slices_of(vae, lambda: vae.decode(z)) == [3]
    with torch.no_grad():
        assert slices_of(vae, lambda: vae.decode(z)) == [1, 1, 1]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert slices_of(vae, lambda: torch.jit.trace(vae.decoder, z, check_trace=False)) == [3]


@pytest.mark.parametrize("shape", [(2, 4, 0, 2), (2, 4, 2, 0)])
def test_a_latent_without_pixels_is_stocks_error(stock, shape):
    with torch.no_grad():
        with pytest.raises(RuntimeError) as expected:
            stock.decoder(torch.zeros(shape))
        with pytest.raises(RuntimeError) as found:
            sdfastgn.optimize(copy.deepcopy(stock)).decoder(torch.zeros(shape))
    assert str(found.value) == str(expected.value)


@pytest.mark.without_kernels
def test_without_kernels_the_batch_stays_whole(stock, monkeypatch):
    monkeypatch.setattr(decoder_slices, "MOST_PIXELS", 16**2)
    vae = sdfastgn.optimize(copy.deepcopy(stock))
    with torch.no_grad():
        assert slices_of(vae, lambda: vae.decode(latents(3))) == [3]


@pytest.mark.gpu
@pytest.mark.parametrize("plans", [True, False], ids=["plans", "blocks"])
def test_memory_of_a_decoder_does_not_grow_with_the_batch(plans):
    vae = sdfastgn.optimize(build_vae("sd15", torch.float16, "cuda"), plans=plans)
    most = []
    for batch in (4, 16):
        z = torch.randn(batch, 4, 64, 64, device="cuda", dtype=torch.float16)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        with torch.no_grad():
            before = torch.cuda.memory_allocated()
            images = vae.decode(z).sample  # the first call runs eagerly
        most.append(torch.cuda.max_memory_allocated() - before - 2 * images.nbytes)
    assert most[1] < 1.3 * most[0]
