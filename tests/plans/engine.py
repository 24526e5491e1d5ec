"""How tests of whole calls make a plan, and how they make every rule apply."""

import sys

import torch
from sdfastgn.plans.rewrite.passes import rewrite
from sdfastgn.plans.run.plan import Plan
from sdfastgn.plans.trace.tracer import trace

# Functions of the rules that say whether a kernel saves time for tensors of some size.
PAYS = ("phases_pay", "statistics_pay", "windows_pay")


def plan_of(model, call, *args, **kwargs):
    """A function that computes ``call`` for other tensors, by a plan. Raises Untraceable."""
    traced = trace(model, call, *args, **kwargs)
    plan = Plan(traced, rewrite(traced.graph.graph))
    return lambda *args, **kwargs: plan(args, kwargs)


def everything_pays(monkeypatch):
    """Lets rules for 16-bit floats apply to fp32, and rules for large tensors to small ones."""
    for name, module in list(sys.modules.items()):
        if not name.startswith("sdfastgn.plans.rewrite"):
            continue
        if hasattr(module, "HALVES"):
            monkeypatch.setattr(module, "HALVES", (torch.float16, torch.bfloat16, torch.float32))
        for function in PAYS:
            if hasattr(module, function):
                monkeypatch.setattr(module, function, lambda *args: True)
