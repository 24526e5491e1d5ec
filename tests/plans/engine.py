"""How tests of whole calls make a plan, and how they make every rule apply."""

import math
import sys

import pytest
import torch

from sdfastgn.plans import forward as plan_forward
from sdfastgn.plans.forward import PlannedForward
from sdfastgn.plans.rewrite import slices
from sdfastgn.plans.rewrite.passes import rewrite
from sdfastgn.plans.rewrite.slices import sliced
from sdfastgn.plans.run.plan import Plan
from sdfastgn.plans.trace import tracer
from sdfastgn.plans.trace.tracer import trace


def windows_are_right(device, dtype, weight, stride, dilation, groups):
    """True if frames side by side give the right result, whether or not this saves time."""
    return weight[2] > 1 and (stride, dilation, groups) == (1, 1, 1)


def always(*args):
    return True


# Functions of the rules that say whether a kernel saves time -> what they say instead.
PAYS = {"phases_pay": always, "statistics_pay": always, "windows_pay": windows_are_right}


def plan_of(model, call, *args, **kwargs):
    """The plan of ``call``. Raises Untraceable."""
    traced = trace(model, call, *args, **kwargs)
    return Plan(traced, rewrite(traced.graph.graph))


def plan_in_slices(model, call, *args, **kwargs):
    """The plan of ``call``, which computes one sample after another if they are independent."""
    with pytest.MonkeyPatch.context() as patch:
        slices_pay(patch)
        traced = sliced(trace(model, call, *args, **kwargs))
    return Plan(traced, rewrite(traced.graph.graph))


def planned_in_slices(model, call, *args, **kwargs):
    """A function that computes ``call`` by such a plan."""
    plan = plan_in_slices(model, call, *args, **kwargs)
    return lambda *args, **kwargs: plan(args, kwargs)


def slices_pay(monkeypatch):
    """Every call with independent samples is divided into slices of one sample."""
    monkeypatch.setattr(slices, "MOST_BYTES", 0)
    monkeypatch.setattr(slices, "_MOST_RESULTS", math.inf)
    monkeypatch.setattr(slices, "_MOST_PARAMETERS", math.inf)


def planned(model, call, *args, **kwargs):
    """A function that computes ``call`` for other tensors, by its plan. Raises Untraceable."""
    plan = plan_of(model, call, *args, **kwargs)
    return lambda *args, **kwargs: plan(args, kwargs)


def forward_of(model):
    """What runs the calls of the whole ``model`` by plans, with CUDA graphs or without."""
    forward = vars(model)["forward"]
    if isinstance(forward, PlannedForward):
        return forward
    (found,) = forward.planned
    return found


def everything_pays(monkeypatch):
    """Lets rules for 16-bit floats apply to fp32, and rules for large tensors to small ones.

    Two numbers that a call writes into parts of a new tensor become a constant, as hundreds of them would.
    """
    monkeypatch.setattr(tracer, "MOST_NODES", 1)
    for name, module in list(sys.modules.items()):
        if not name.startswith("sdfastgn.plans.rewrite"):
            continue
        if hasattr(module, "HALVES"):
            monkeypatch.setattr(module, "HALVES", (torch.float16, torch.bfloat16, torch.float32))
        for function, instead in PAYS.items():
            if hasattr(module, function):
                monkeypatch.setattr(module, function, instead)


def in_channels_last(model):
    """Lays the weights of convolutions out channels-last, as ``optimize`` does."""
    for module in model.modules():
        for p in module.parameters(recurse=False):
            if p.dim() in (4, 5):
                last = torch.channels_last if p.dim() == 4 else torch.channels_last_3d
                p.data = p.data.contiguous(memory_format=last)
    return model


def often_captured(monkeypatch):
    """Python counts as slower than any GPU. Plans run on tapes, although a tape is a dispatch mode."""
    monkeypatch.setattr(plan_forward, "is_idle", lambda device: True)
    reason_of = plan_forward.reason_without_graphs

    def reason_without_graphs(module):
        reason = reason_of(module)
        return None if reason == "a dispatch or function mode is active" else reason

    monkeypatch.setattr(plan_forward, "reason_without_graphs", reason_without_graphs)
