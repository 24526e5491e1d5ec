"""Random programs: what a plan computes is what eager PyTorch computes."""

import pytest
import torch

from sdfastgn.plans.trace.traced import Untraceable
from tests.plans import programs
from tests.plans.engine import everything_pays, planned, planned_in_slices

pytestmark = [pytest.mark.fused_on_cpu, pytest.mark.usefixtures("without_gradients")]

# Number of programs in a quick test, and in a slow one. Workers of pytest-xdist share the tests.
FEW, CHUNK = 40, 100
# Largest share of programs without a plan, because they read values, or because of strides. It is 2.3 % of
# 10,000 programs, and more in some hundred.
MOST_UNTRACEABLE = 0.1
# Any program may write into a tensor of which strides decide whether it is a copy.
BY_STRIDES = "strides decide whether the call writes"


@pytest.fixture(autouse=True)
def rules_apply_everywhere(monkeypatch):
    everything_pays(monkeypatch)


def test_programs():
    check(range(FEW))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 1000, CHUNK))
def test_more_programs(first):
    check(range(first, first + CHUNK))


@pytest.mark.slow
@pytest.mark.many_programs
@pytest.mark.parametrize("first", range(10_000, 20_000, 10 * CHUNK))
def test_many_programs(first):
    check(range(first, first + 10 * CHUNK))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 300, CHUNK))
def test_programs_in_slices(first):
    """One in six has independent samples."""
    check(range(first, first + CHUNK), planned_in_slices)


def check(seeds, plan_of=planned):
    refused = {seed: why for seed in seeds if (why := refusal(seed, plan_of))}
    assert len(refused) <= MOST_UNTRACEABLE * len(seeds), refused


def refusal(seed, plan_of):
    """Why the program of ``seed`` has no plan; empty if it has one. Fails if its plan is wrong."""
    program = programs.Program(seed)
    try:
        found = fault(program, plan_of)
    except Untraceable as why:
        if not program.may_be_refused and not str(why).startswith(BY_STRIDES):
            pytest.fail(f"{why}\n{program.described()}")
        return str(why)
    if found:
        program = programs.reduced(program, lambda program: fault(program, plan_of))
        pytest.fail(f"{found}; reduced: {fault(program, plan_of)}\n{program.described()}")
    return ""


def fault(program, plan_of):
    """What is wrong with the plan of ``program``, or what it raises."""
    try:
        return programs.fault(program, plan_of)
    except Untraceable:
        raise
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def test_the_same_seed_makes_the_same_program():
    assert programs.Program(7).described() == programs.Program(7).described()


def test_a_wrong_result_is_seen():
    """A plan that is wrong in one result, in one argument, or only in its second call."""
    program = next(
        p for p in map(programs.Program, range(100)) if p.dtype == torch.float32 and len(p.outputs) > 1
    )

    def eager(module, function, *inputs):
        return function

    assert programs.fault(program, eager) == ""

    def off(module, function, *inputs):
        def plan(*inputs):
            return [y + 1e-3 * (i == 1) * (1 + y.abs().max()) for i, y in enumerate(function(*inputs))]

        return plan

    assert "is off by" in programs.fault(program, off)

    def writes(module, function, *inputs):
        def plan(*inputs):
            results = [y.clone() for y in function(*inputs)]
            inputs[0].mul_(1.001)
            return results

        return plan

    assert "x" in programs.fault(program, writes)

    def keeps(module, function, *inputs):
        kept = [torch.empty_like(y) for y in function(*[x.clone() for x in inputs])]
        return lambda *inputs: [a.copy_(b) for a, b in zip(kept, function(*inputs), strict=True)]

    assert programs.fault(program, keeps) == "the second call changed a result of the first"
