"""Schedulers that read timesteps from the CPU give the same samples, also if the timesteps change."""

import copy
import functools
import inspect
import pickle
import warnings

import pytest
import torch
from diffusers import (
    DDIMScheduler,
    DPMSolverMultistepScheduler,
    EulerAncestralDiscreteScheduler,
    EulerDiscreteScheduler,
    HeunDiscreteScheduler,
    LCMScheduler,
    PNDMScheduler,
    TCDScheduler,
    UniPCMultistepScheduler,
)
from torch.overrides import TorchFunctionMode

from sdfastgn.patches.pipeline import pinned_copies
from sdfastgn.patches.pipeline import scheduler as scheduler_fusion
from tests.patches.pipeline import cases
from tests.patches.pipeline.cases import CUDA

pytestmark = [pytest.mark.fused_on_cpu, pytest.mark.usefixtures("pipeline_fused_on_cpu")]
applied = functools.partial(cases.applied, scheduler_fusion.FUSION)
SD15 = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "steps_offset": 1}


def steps_of(scheduler, sample, timesteps, generator=None, **options):
    """Yields the sample of each step. The model is a made-up function of sample and timestep."""
    if "generator" in inspect.signature(scheduler.step).parameters:
        options["generator"] = generator
    for t in timesteps:
        scaled = scheduler.scale_model_input(sample, t)
        output = scaled * 0.9 + torch.sin(t.float()).to(sample.dtype)
        sample = scheduler.step(output, t, sample, return_dict=False, **options)[0]
        yield sample


def sampled(scheduler, device, steps=7, begin=0, noise="cpu", **options):
    """All samples from step ``begin`` on, stacked. ``noise``: the generator's device."""
    scheduler.set_timesteps(steps, device=device)
    if begin:
        scheduler.set_begin_index(begin)
    generator = torch.Generator("cpu").manual_seed(0)
    sample = torch.randn(2, 4, 5, 3, generator=generator).to(
        device, torch.float16 if device == "cuda" else torch.float32
    )
    drawn = torch.Generator(noise if device == "cuda" else "cpu").manual_seed(1)
    return torch.stack(
        list(steps_of(scheduler, sample, scheduler.timesteps[begin:], generator=drawn, **options))
    )


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
    pytest.param(LCMScheduler, {**SD15}, {"steps": 4}, id="lcm"),
    pytest.param(LCMScheduler, {**SD15, "prediction_type": "v_prediction"}, {"begin": 3}, id="lcm-v-img2img"),
    pytest.param(EulerDiscreteScheduler, {**SD15}, {}, id="euler"),
    pytest.param(EulerDiscreteScheduler, {**SD15, "use_karras_sigmas": True}, {"s_churn": 1.0}, id="churn"),
    pytest.param(EulerAncestralDiscreteScheduler, {"timestep_spacing": "trailing"}, {"steps": 1}, id="turbo"),
    pytest.param(EulerAncestralDiscreteScheduler, {**SD15}, {"noise": "cuda"}, id="euler-a"),
    pytest.param(DPMSolverMultistepScheduler, {**SD15}, {}, id="dpm"),
    pytest.param(DPMSolverMultistepScheduler, {**SD15, "use_karras_sigmas": True}, {}, id="dpm-karras"),
    pytest.param(
        DPMSolverMultistepScheduler, {**SD15, "algorithm_type": "sde-dpmsolver++"}, {"begin": 2}, id="dpm-sde"
    ),
    pytest.param(UniPCMultistepScheduler, {**SD15}, {}, id="unipc"),
    pytest.param(UniPCMultistepScheduler, {**SD15, "solver_order": 3}, {"steps": 12}, id="unipc-3"),
    pytest.param(
        UniPCMultistepScheduler, {**SD15, "prediction_type": "v_prediction"}, {"begin": 2}, id="unipc-img2img"
    ),
]
# The quantile of thresholding waits, in stock as in ours.
WITHOUT_WAITING = [case for case in SCHEDULERS if not case.values[1].get("thresholding")]


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize(("cls", "config", "options"), SCHEDULERS)
def test_the_samples_are_the_same_bits(cls, config, options, device):
    stock = sampled(cls(**config), device, **options)
    scheduler = applied(cls(**config))
    for _ in range(2):  # a second image has other tensors
        assert torch.equal(sampled(scheduler, device, **options), stock)
    assert stock.isfinite().all()


class Waits(TorchFunctionMode):
    """Notes calls that wait for a GPU: copies to it from unpinned memory, and checked solutions."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        moved = func is torch.Tensor.to and args[0].device.type == "cpu" and result.device.type != "cpu"
        made = func is torch.tensor and result.device.type != "cpu"
        if (moved and not kwargs.get("non_blocking")) or made or func is torch.linalg.solve:
            self.found.append(func)
        return result


def waits_on_meta(scheduler, steps=7, begin=0, noise="cpu", **options):
    """Calls that wait in the steps. On the device "meta" a tensor has no values: reading one is an error."""
    scheduler.set_timesteps(steps, device="cpu")
    values = vars(scheduler).copy()
    scheduler.timesteps = scheduler.timesteps.to("meta")
    if scheduler_fusion.FUSION.is_applied(scheduler):
        scheduler.set_timesteps(steps, device="meta")
        assert all(
            torch.equal(value, values[name])
            for name, value in vars(scheduler).items()
            if isinstance(value, torch.Tensor) and name != "timesteps"
        )
    if begin:
        scheduler.set_begin_index(begin)
    sample = torch.empty(2, 4, 5, 3, device="meta")
    with Waits() as waits:
        try:
            steps = scheduler.timesteps[begin:]
            list(steps_of(scheduler, sample, steps, generator=torch.Generator("cpu"), **options))
        except (RuntimeError, NotImplementedError) as error:
            waits.found.append(error)
    return waits.found


@pytest.mark.drawn(1)
@pytest.mark.parametrize(("cls", "config", "options"), WITHOUT_WAITING)
def test_no_step_reads_from_the_gpu_or_copies_from_pageable_memory(cls, config, options):
    assert waits_on_meta(cls(**config), **options)
    assert not waits_on_meta(applied(cls(**config)), **options)


def test_noise_of_a_generator_for_each_image_waits_for_nothing():
    def found(scheduler):
        scheduler.set_timesteps(4, device="cpu")
        timesteps = scheduler.timesteps
        generators = [torch.Generator("cpu").manual_seed(seed) for seed in (1, 2)]
        with Waits() as waits:
            list(steps_of(scheduler, torch.empty(2, 4, 5, 3, device="meta"), timesteps, generator=generators))
        return waits.found

    assert found(EulerAncestralDiscreteScheduler())
    assert not found(applied(EulerAncestralDiscreteScheduler()))


@pytest.mark.gpu
@pytest.mark.parametrize(("cls", "config", "options"), WITHOUT_WAITING)
def test_steps_do_not_wait_for_the_gpu(cls, config, options):
    def fails_to_run_ahead(scheduler, steps=7, begin=0, noise="cpu", **extra):
        scheduler.set_timesteps(steps, device="cuda")
        if begin:
            scheduler.set_begin_index(begin)
        sample = torch.randn(1, 4, 8, 8, device="cuda")
        generator = torch.Generator("cpu").manual_seed(0)
        torch.cuda.set_sync_debug_mode("error")
        try:
            list(steps_of(scheduler, sample, scheduler.timesteps[begin:], generator=generator, **extra))
        except RuntimeError as error:
            return str(error)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return ""

    assert "synchroniz" in fails_to_run_ahead(cls(**config), **options)
    assert not fails_to_run_ahead(applied(cls(**config)), **options)


X = torch.randn(1, 4, 2, 2)


def is_copy(t, timesteps):
    return t.untyped_storage().data_ptr() != timesteps.untyped_storage().data_ptr()


@pytest.fixture
def ddim():
    """A fused DDIMScheduler with five timesteps."""
    scheduler = applied(DDIMScheduler())
    scheduler.set_timesteps(5)
    return scheduler


@pytest.fixture
def seen(ddim, monkeypatch):
    """A list of the timesteps that the stock step of ``ddim`` gets."""
    seen = []
    step = DDIMScheduler.step

    def noting(self, model_output, timestep, sample):
        seen.append(timestep)
        return step(self, model_output, timestep, sample)

    monkeypatch.setattr(DDIMScheduler, "step", noting)
    return seen


@pytest.mark.parametrize("by_name", [False, True], ids=["positional", "by-name"])
def test_elements_come_from_the_copy(ddim, seen, by_name):
    for t in ddim.timesteps[2:]:  # as image-to-image does
        if by_name:
            ddim.step(model_output=X, timestep=t, sample=X)
        else:
            ddim.step(X, t, X)
    assert [int(t) for t in seen] == ddim.timesteps[2:].tolist()
    assert all(is_copy(t, ddim.timesteps) for t in seen)


@pytest.mark.parametrize("inference", [False, True], ids=["no-grad", "inference-mode"])
@pytest.mark.parametrize("change", ["in-place", "replaced", "set-again"])
def test_changed_timesteps_are_seen(ddim, seen, change, inference):
    with torch.inference_mode(inference), torch.no_grad():
        ddim.set_timesteps(5)
        ddim.step(X, ddim.timesteps[0], X)
        if change == "in-place":
            ddim.timesteps[1] = 333
        elif change == "replaced":
            ddim.timesteps = torch.tensor([900, 333, 1])
        else:
            ddim.set_timesteps(3)
        ddim.step(X, ddim.timesteps[1], X)
    assert int(seen[-1]) == 333
    # An inference tensor does not count what is written into it.
    assert is_copy(seen[-1], ddim.timesteps) != (inference and change == "replaced")


@pytest.mark.parametrize(
    "duplicate",
    [
        pytest.param(copy.deepcopy, id="deepcopy"),
        pytest.param(lambda s: pickle.loads(pickle.dumps(s)), id="pickle"),
        pytest.param(lambda s: vars(s).update(copy.deepcopy(vars(s))) or s, id="its-own-state"),
    ],
)
def test_copies_of_changed_timesteps(ddim, seen, duplicate):
    """A copied tensor counts its writes from zero, and may reach the number that was noted before."""
    for value in (998, 997):
        ddim.timesteps[0] = value
        ddim.step(X, ddim.timesteps[0], X)
        ddim.timesteps[1] = 333
        ddim = duplicate(ddim)
        ddim.step(X, ddim.timesteps[1], X)
        assert [int(t) for t in seen[-2:]] == [value, 333]


@pytest.mark.parametrize("length", [3, 5])
def test_other_memory_below_the_same_tensor(ddim, seen, length):
    ddim.timesteps.data = torch.tensor([900, 333, 1, 0, 0][:length])
    ddim.step(X, ddim.timesteps[1], X)
    assert int(seen[-1]) == 333


def test_a_trace_keeps_its_timestep_an_argument(ddim):
    stock = DDIMScheduler()
    stock.set_timesteps(5)
    traced = []
    for each in (stock, ddim):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            traced.append(torch.jit.trace(lambda t, each=each: each.step(X, t, X)[0], each.timesteps[0]))
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
def test_other_timesteps_are_handed_on(ddim, seen, timestep):
    given = timestep(ddim)
    ddim.step(X, given, X)
    assert int(seen[0]) == int(given)
    if not isinstance(given, torch.Tensor) or is_copy(given, ddim.timesteps):
        assert seen[0] is given


def test_a_pipeline_that_shares_the_memory_of_its_timesteps(ddim, seen):
    """Timesteps may be a slice. Numbers before and after it in the same memory are not its elements."""
    whole = torch.tensor([999, 801, 601, 401, 201, 1])
    ddim.timesteps = whole[2:4]
    for index in (1, 2, 3, 4):
        ddim.step(X, whole[index], X)
    assert [is_copy(t, whole) for t in seen] == [False, True, True, False]
    assert [int(t) for t in seen] == [801, 601, 401, 201]


def test_lcm_calculates_with_the_timestep_on_the_gpu(monkeypatch):
    """A number on the CPU would be rounded in another way in half precision."""
    scheduler = applied(LCMScheduler())
    stock, seen = LCMScheduler.get_scalings_for_boundary_condition_discrete, []

    def noting(self, timestep):
        seen.append(timestep)
        return stock(self, timestep)

    monkeypatch.setattr(LCMScheduler, "get_scalings_for_boundary_condition_discrete", noting)
    scheduler.__class__ = scheduler_fusion.FUSION._make_class(LCMScheduler)
    scheduler.set_timesteps(4)
    for t in scheduler.timesteps:
        table = scheduler.timesteps
        scheduler.step(X, t, X)
        assert scheduler.timesteps is table
        assert seen[-1].data_ptr() == t.data_ptr()


def test_timesteps_are_put_back_when_a_step_fails():
    scheduler = applied(LCMScheduler())
    scheduler.set_timesteps(4)
    table = scheduler.timesteps
    with pytest.raises(RuntimeError):
        scheduler.step(X, table[0], torch.randn(1, 4, 3, 3))
    assert scheduler.timesteps is table


@pytest.mark.parametrize("cls", [TCDScheduler, HeunDiscreteScheduler])
def test_other_schedulers_are_left_alone(cls):
    assert not scheduler_fusion.FUSION.claims(cls())


def test_timesteps_are_set_without_gradients_where_stock_has_none():
    scheduler = EulerDiscreteScheduler(**SD15)
    scheduler.alphas_cumprod.requires_grad_()
    applied(scheduler)
    with torch.no_grad():
        scheduler.set_timesteps(5)


def test_on_the_cpu_equations_without_a_solution_are_stocks_error(monkeypatch):
    monkeypatch.setattr(pinned_copies, "WAITED_FOR", ("cuda",))
    scheduler = UniPCMultistepScheduler(solver_order=3, lower_order_final=False)
    applied(scheduler)
    scheduler.set_timesteps(8)
    sample = torch.ones(1, 4, 8, 8)
    for t in scheduler.timesteps[:-1]:
        sample = scheduler.step(sample, t, sample).prev_sample
    with pytest.raises(torch.linalg.LinAlgError, match="singular"):
        scheduler.step(sample, scheduler.timesteps[-1], sample)
