"""Images become bytes on the GPU, and the bytes are the same. Elsewhere upstream's code runs."""

import functools
import warnings
import weakref

import numpy as np
import pytest
import torch
from diffusers.image_processor import VaeImageProcessor

from sdfastgn.patches.pipeline import image_processor as image_bytes
from tests.patches.pipeline import cases
from tests.patches.pipeline.cases import CUDA

pytestmark = [pytest.mark.fused_on_cpu, pytest.mark.usefixtures("pipeline_fused_on_cpu")]
applied = functools.partial(cases.applied, image_bytes.FUSION)


def images(kind, dtype, device):
    if kind == "edges":  # every value at which rounding decides, and its neighbors
        middle = (torch.arange(-3, 514) / 255 - 1).double()
        around = torch.stack([middle + d for d in (-1e-3, -1e-6, 0, 1e-6, 1e-3)]).flatten()
        values = around[: len(around) // 12 * 12].reshape(2, 3, -1, 2)
    else:
        values = torch.randn(2, 3, 17, 23, dtype=torch.float64)
    image = values.to(device, dtype)
    return image.contiguous(memory_format=torch.channels_last) if kind == "channels-last" else image


def same(a, b):
    return np.array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32], ids=["fp16", "bf16", "fp32"]
)
@pytest.mark.parametrize("kind", ["contiguous", "channels-last", "edges"])
def test_pictures_are_the_same_bytes(monkeypatch, kind, dtype, device):
    image = images(kind, dtype, device)
    before = VaeImageProcessor().postprocess(image)
    processor = applied(VaeImageProcessor())
    monkeypatch.setattr(VaeImageProcessor, "numpy_to_pil", None)  # not by way of upstream's
    after = processor.postprocess(image)
    assert [(p.mode, p.size) for p in after] == [(p.mode, p.size) for p in before]
    assert all(map(same, after, before))
    after[0].putpixel((0, 0), (1, 2, 3))  # not a view of memory that something else owns


@pytest.mark.parametrize(
    ("image", "options"),
    [
        pytest.param(torch.rand(2, 3, 4, 4), {"output_type": "np"}, id="np"),
        pytest.param(torch.rand(2, 3, 4, 4), {"output_type": "pt"}, id="pt"),
        pytest.param(torch.rand(2, 3, 4, 4), {"do_denormalize": [True, False]}, id="not-all-denormalized"),
        pytest.param(torch.rand(2, 1, 4, 4), {}, id="grey"),
        pytest.param(torch.rand(2, 3, 4, 4).double(), {}, id="fp64"),
    ],
)
def test_everything_else_is_upstreams(monkeypatch, image, options):
    processor = applied(VaeImageProcessor())
    monkeypatch.setattr(VaeImageProcessor, "postprocess", lambda *a: ("upstream's", *a[1:]))
    assert image_bytes._is_ours(processor, torch.rand(1, 3, 4, 4), "pil", None)
    given = (options.get("output_type", "pil"), options.get("do_denormalize"))
    assert processor.postprocess(image, *given) == ("upstream's", image, *given)
    assert not image_bytes._is_ours(processor, torch.rand(1, 3, 4, 4).requires_grad_(), "pil", None)


def test_a_processor_that_does_not_normalize():
    image = torch.rand(1, 3, 4, 4)
    before = VaeImageProcessor(do_normalize=False).postprocess(image)[0]
    after = applied(VaeImageProcessor(do_normalize=False)).postprocess(image)[0]
    assert same(before, after)


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_nan_still_warns():
    """numpy's warning is how users recognize the black image of a VAE that has overflown."""
    image = torch.rand(1, 3, 4, 4)
    image[0, 1, 2, 3] = float("nan")
    processor = applied(VaeImageProcessor())
    with pytest.raises(RuntimeWarning, match="invalid value"):
        processor.postprocess(image)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert same(processor.postprocess(image)[0], VaeImageProcessor().postprocess(image)[0])


def test_an_image_that_is_too_large_for_the_gpu(monkeypatch):
    image = torch.rand(1, 3, 4, 4)
    before = VaeImageProcessor().postprocess(image)[0]
    processor = applied(VaeImageProcessor())

    def no_memory(x):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(torch.Tensor, "isnan", no_memory)
    assert same(processor.postprocess(image)[0], before)


def test_nothing_is_held_while_upstream_makes_the_image(monkeypatch):
    held = []

    def no_memory(x):
        held.append(weakref.ref(x))
        raise torch.OutOfMemoryError

    processor = applied(VaeImageProcessor())
    monkeypatch.setattr(torch.Tensor, "isnan", no_memory)
    monkeypatch.setattr(VaeImageProcessor, "postprocess", lambda *_: [reference() for reference in held])
    assert processor.postprocess(torch.rand(1, 3, 4, 4)) == [None]


@pytest.mark.parametrize("name", ["numpy_to_pil", "pt_to_numpy", "denormalize"])
def test_a_method_that_is_replaced_later_is_called(name):
    processor, calls = applied(VaeImageProcessor()), []
    stock = getattr(processor, name)
    setattr(processor, name, lambda x: calls.append(name) or stock(x))
    processor.postprocess(torch.rand(1, 3, 4, 4))
    assert calls == [name]


def test_the_image_is_not_written_to():
    image = torch.rand(1, 3, 4, 4)
    kept = image.clone()
    applied(VaeImageProcessor()).postprocess(image, do_denormalize=[True])
    assert torch.equal(image, kept)
