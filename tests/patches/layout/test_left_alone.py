"""Models that would be slower are left as they are, and the report says why."""

import pytest
import torch

import sdfastgn
from tests.coverage import networks
from tests.patches.samples import snapshot

pytestmark = pytest.mark.fused_on_cpu


def row(name):
    (found,) = (row for row in networks.autoencoders if row.name == name)
    return found.build()


BORDERS = "its model is faster as it is: PyTorch repeats the border of a video slowly in channels-last"


def test_a_video_autoencoder_that_repeats_borders():
    """Only plans repeat them in a kernel."""
    model, call = row("Mochi")
    before = snapshot(model)
    with torch.no_grad():
        expected = call()
        sdfastgn.optimize(model, plans=False)
        assert torch.equal(call(), expected)
    assert snapshot(model) == before
    report = sdfastgn.report(model)
    assert not report.fused
    assert report.channels_last_weights == 0
    assert {entry.reason for entry in report.skipped} >= {BORDERS}
    with pytest.raises(ValueError, match="faster as it is"):
        sdfastgn.optimize(model, strict=True, plans=False)


@pytest.mark.drawn(1)
@pytest.mark.parametrize("name", ["Mochi", "HunyuanVideo 1.5"])
def test_a_plan_repeats_borders_in_a_kernel(name):
    """So its report and ``strict`` have nothing against the model. Only the plan lays its weights out."""
    model, call = row(name)
    with torch.no_grad():
        expected = call()
        sdfastgn.optimize(model, strict=True)
        assert sdfastgn.report(model).channels_last_weights == 0
        torch.testing.assert_close(call(), expected, atol=1e-4, rtol=1e-4)
    report = sdfastgn.report(model)
    assert any(plans.calls for plans in report.plans)
    assert report.channels_last_weights > 0
    assert not report.skipped
    with torch.no_grad():
        sdfastgn.restore(model)
        assert torch.equal(call(), expected)


def test_others_are_fused():
    model, _ = row("EasyAnimate")
    assert sdfastgn.report(sdfastgn.optimize(model)).fused


@pytest.mark.parametrize(
    ("version", "dtype", "is_left"),
    [(91002, torch.bfloat16, True), (91500, torch.bfloat16, False), (None, torch.bfloat16, False),
     (91002, torch.float16, False)],
)  # fmt: skip
def test_a_cudnn_with_wrong_convolutions_of_videos(version, dtype, is_left, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: version)
    model, _ = row("EasyAnimate")
    before = snapshot(model.to(dtype))
    report = sdfastgn.report(sdfastgn.optimize(model, missing_ok=True))
    assert bool(report.fused) is not is_left
    if is_left:
        assert snapshot(model) == before
        (reason,) = {entry.reason for entry in report.skipped}
        assert reason.endswith("this is cuDNN 9.10.2; install cuDNN 9.15 or later")
