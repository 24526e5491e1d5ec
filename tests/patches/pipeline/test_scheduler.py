"""Schedulers that get their timesteps from the CPU: the same samples, and the right timestep
whatever happens to the list of them.
"""

from __future__ import annotations

import copy
import functools
import pickle
import warnings

import pytest
import torch
from diffusers import DDIMScheduler, EulerDiscreteScheduler, LCMScheduler, PNDMScheduler

from sdfastgn.patches.pipeline import scheduler as scheduler_fusion
from tests.patches.pipeline import cases as cases

CUDA, on_the_cpu_too = cases.CUDA, cases.on_the_cpu_too
applied = functools.partial(cases.applied, scheduler_fusion.FUSION)
SD15 = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "steps_offset": 1}


def sampled(scheduler, device, steps=7, **options):
    """The samples of each step with a made-up model, which depends on the timestep."""
    scheduler.set_timesteps(steps, device=device)
    generator = torch.Generator("cpu").manual_seed(0)
    sample = torch.randn(2, 4, 5, 3, generator=generator).to(
        device, torch.float16 if device == "cuda" else torch.float32
    )
    noise = torch.Generator(device).manual_seed(1) if "eta" in options else None
    samples = []
    for t in scheduler.timesteps:
        output = sample * 0.9 + torch.sin(t.float()).to(sample.dtype)
        extra = {**options, "generator": noise} if noise is not None else options
        sample = scheduler.step(output, t, sample, return_dict=False, **extra)[0]
        samples.append(sample)
    return torch.stack(samples)


SCHEDULERS = [
    pytest.param(
        PNDMScheduler, {**SD15, "skip_prk_steps": True, "set_alpha_to_one": False}, {}, id="pndm-sd15"
    ),
    pytest.param(PNDMScheduler, {"prediction_type": "v_prediction"}, {"steps": 15}, id="pndm-prk-v"),
    pytest.param(DDIMScheduler, {**SD15, "clip_sample": False}, {}, id="ddim"),
    pytest.param(
        DDIMScheduler, {"timestep_spacing": "trailing", "thresholding": True}, {"eta": 0.7}, id="ddim-eta"
    ),
    pytest.param(
        DDIMScheduler,
        {"rescale_betas_zero_snr": True, "prediction_type": "v_prediction"},
        {},
        id="ddim-zero-snr",
    ),
]


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize(("cls", "config", "options"), SCHEDULERS)
def test_the_samples_are_the_same_bits(cls, config, options, device):
    stock = sampled(cls(**config), device, **options)
    scheduler = applied(cls(**config))
    for _ in range(2):  # a second image has other tensors
        assert torch.equal(sampled(scheduler, device, **options), stock)
    assert stock.isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize(("cls", "config", "options"), SCHEDULERS)
def test_steps_do_not_wait_for_the_gpu(cls, config, options):
    def fails_to_run_ahead(scheduler):
        scheduler.set_timesteps(options.get("steps", 7), device="cuda")
        extra = {name: value for name, value in options.items() if name != "steps"}
        sample = torch.randn(1, 4, 8, 8, device="cuda")
        steps = list(scheduler.timesteps)
        torch.cuda.set_sync_debug_mode("error")
        try:
            for t in steps:
                sample = scheduler.step(sample, t, sample, **extra)[0]
        except RuntimeError as error:
            return str(error)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return ""

    if config.get("thresholding"):
        pytest.skip("its quantile waits")
    assert "synchroniz" in fails_to_run_ahead(cls(**config))
    assert not fails_to_run_ahead(applied(cls(**config)))


def received(scheduler, monkeypatch):
    """What the stock step is given as its timestep."""
    seen = []
    stock = type(scheduler).__base__
    step = stock.step

    def noting(self, model_output, timestep, sample):
        seen.append(timestep)
        return step(self, model_output, timestep, sample)

    monkeypatch.setattr(stock, "step", noting)
    return seen


@pytest.mark.parametrize("by_name", [False, True], ids=["positional", "by-name"])
def test_elements_come_from_the_copy(monkeypatch, by_name):
    scheduler = applied(DDIMScheduler())
    seen = received(scheduler, monkeypatch)
    scheduler.set_timesteps(5)
    x = torch.randn(1, 4, 2, 2)
    for t in scheduler.timesteps[2:]:  # as image-to-image does
        if by_name:
            scheduler.step(model_output=x, timestep=t, sample=x)
        else:
            scheduler.step(x, t, x)
    assert [int(t) for t in seen] == scheduler.timesteps[2:].tolist()
    assert not {t.untyped_storage().data_ptr() for t in seen} & {
        scheduler.timesteps.untyped_storage().data_ptr()
    }


@pytest.mark.parametrize("inference", [False, True], ids=["no-grad", "inference-mode"])
@pytest.mark.parametrize("change", ["in-place", "replaced", "set-again"])
def test_changed_timesteps_are_seen(monkeypatch, change, inference):
    scheduler = applied(DDIMScheduler())
    seen = received(scheduler, monkeypatch)
    x = torch.randn(1, 4, 2, 2)
    with torch.inference_mode(inference), torch.no_grad():
        scheduler.set_timesteps(5)
        scheduler.step(x, scheduler.timesteps[0], x)
        if change == "in-place":
            scheduler.timesteps[1] = 333
        elif change == "replaced":
            scheduler.timesteps = torch.tensor([900, 333, 1])
        else:
            scheduler.set_timesteps(3)
        scheduler.step(x, scheduler.timesteps[1], x)
    assert int(seen[-1]) == 333
    is_copy = seen[-1].untyped_storage().data_ptr() != scheduler.timesteps.untyped_storage().data_ptr()
    assert is_copy != (
        inference and change == "replaced"
    )  # an inference tensor does not count what is written into it


@pytest.mark.parametrize(
    "duplicate",
    [
        pytest.param(copy.deepcopy, id="deepcopy"),
        pytest.param(lambda s: pickle.loads(pickle.dumps(s)), id="pickle"),
        pytest.param(lambda s: vars(s).update(copy.deepcopy(vars(s))) or s, id="its-own-state"),
    ],
)
def test_copies_of_changed_timesteps(monkeypatch, duplicate):
    """A copied tensor counts its writes from the beginning, perhaps to the number that was noted of
    the original.
    """
    scheduler = applied(DDIMScheduler())
    seen = received(scheduler, monkeypatch)
    x = torch.randn(1, 4, 2, 2)
    scheduler.set_timesteps(5)
    for value in (998, 997):
        scheduler.timesteps[0] = value
        scheduler.step(x, scheduler.timesteps[0], x)
        scheduler.timesteps[1] = 333
        scheduler = duplicate(scheduler)
        scheduler.step(x, scheduler.timesteps[1], x)
        assert [int(t) for t in seen[-2:]] == [value, 333]


@pytest.mark.parametrize("length", [3, 5])
def test_other_memory_below_the_same_tensor(monkeypatch, length):
    scheduler = applied(DDIMScheduler())
    seen = received(scheduler, monkeypatch)
    x = torch.randn(1, 4, 2, 2)
    scheduler.set_timesteps(5)
    scheduler.timesteps.data = torch.tensor([900, 333, 1, 0, 0][:length])
    scheduler.step(x, scheduler.timesteps[1], x)
    assert int(seen[-1]) == 333


def test_a_trace_keeps_its_timestep_an_argument():
    stock, scheduler = DDIMScheduler(), applied(DDIMScheduler())
    x = torch.randn(1, 4, 2, 2)
    traced = []
    for each in (stock, scheduler):
        each.set_timesteps(5)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            traced.append(torch.jit.trace(lambda t, each=each: each.step(x, t, x)[0], each.timesteps[0]))
    for t in stock.timesteps[:3]:
        assert torch.equal(traced[1](t), traced[0](t))


@pytest.mark.parametrize(
    "timestep",
    [
        pytest.param(lambda s: 401, id="int"),
        pytest.param(lambda s: s.timesteps[1].clone(), id="clone"),
        pytest.param(lambda s: s.timesteps[1].int(), id="dtype"),
        pytest.param(lambda s: torch.tensor(401), id="foreign"),
        pytest.param(lambda s: s.timesteps.as_strided((), (), 1), id="strided"),
    ],
)
def test_other_timesteps_are_handed_on(monkeypatch, timestep):
    scheduler = applied(DDIMScheduler())
    seen = received(scheduler, monkeypatch)
    scheduler.set_timesteps(5)
    x = torch.randn(1, 4, 2, 2)
    given = timestep(scheduler)
    scheduler.step(x, given, x)
    assert int(seen[0]) == int(given)
    if (
        not isinstance(given, torch.Tensor)
        or given.untyped_storage().data_ptr() != scheduler.timesteps.untyped_storage().data_ptr()
    ):
        assert seen[0] is given


def test_a_pipeline_that_shares_the_memory_of_its_timesteps(monkeypatch):
    """Timesteps may be a slice: what lies before and behind it in the same memory is no element."""
    scheduler = applied(DDIMScheduler())
    seen = received(scheduler, monkeypatch)
    scheduler.set_timesteps(5)
    whole = torch.tensor([999, 801, 601, 401, 201, 1])
    scheduler.timesteps = whole[2:4]
    x = torch.randn(1, 4, 2, 2)
    for index in (1, 2, 3, 4):
        scheduler.step(x, whole[index], x)
    is_copy = [t.untyped_storage().data_ptr() != whole.untyped_storage().data_ptr() for t in seen]
    assert is_copy == [False, True, True, False]
    assert [int(t) for t in seen] == [801, 601, 401, 201]


def test_schedulers_that_calculate_with_the_timestep_are_left_alone():
    for scheduler in (LCMScheduler(), EulerDiscreteScheduler()):
        assert not scheduler_fusion.FUSION.claims(scheduler)
