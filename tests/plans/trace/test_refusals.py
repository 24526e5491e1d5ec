"""What cannot be traced has a reason, and leaves everything as it was."""

import functools
import gc
import random
import threading

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import flex_attention

from sdfastgn.plans.trace.refusals import is_tracing
from sdfastgn.plans.trace.traced import Untraceable
from sdfastgn.plans.trace.tracer import trace
from tests.plans.trace.runs import Net, check, run

KEPT = []


def caught(net, x):
    try:
        return x * x.sum().item()
    except Exception:
        return x


def branch(net, x):
    return x if net.table.sum() > 0 else -x


READING = {
    "item": lambda net, x: x * net.weight.sum().item(),
    "item of an argument": lambda net, x: x * int(x.sum()),
    "branch": branch,
    "caught": caught,
    "nonzero": lambda net, x: x[x > 0].sum(),
    "unique": lambda net, x: torch.unique(x),
    "repeats": lambda net, x: x.repeat_interleave(net.table.abs().long(), 0),
    "equal": lambda net, x: x * torch.equal(x, net.weight),
}
METHODS = {
    "tolist": lambda net, x: x + torch.tensor(net.weight.tolist()),
    "numpy": lambda net, x: x + torch.from_numpy(net.table.numpy()),
    "__array__": lambda net, x: x * float(__import__("numpy").asarray(net.table)[0]),
    "data_ptr": lambda net, x: x * (x.data_ptr() != 0),
    "storage_offset": lambda net, x: x * x[1:].storage_offset(),
    "untyped_storage": lambda net, x: x * len(x.untyped_storage()),
}
RANDOM = {
    "a number": lambda net, x: x * torch.rand(()).item(),
    "a comparison": lambda net, x: x * 2 if torch.rand(()) > 0.5 else x,
    "randn_like": lambda net, x: x + torch.randn_like(x),
    "normal_": lambda net, x: torch.empty(4).normal_() + x,
    "generator": lambda net, x: x + torch.randn(4, generator=torch.Generator().manual_seed(0)),
    "dropout": lambda net, x: F.dropout(x, 0.5, training=True),
    "python": lambda net, x: x * random.random(),
    "numpy": lambda net, x: x * np.random.rand(),
    "attention": lambda net, x: F.scaled_dot_product_attention(*[x[None]] * 3, dropout_p=0.1),
}


def refused(call):
    """The reason why the call is refused. Checks that the module is as before."""
    net = Net(call)
    before = dict(vars(net)), dict(net._buffers), list(net.items)
    states = random.getstate(), torch.get_rng_state()
    with pytest.raises(Untraceable) as error:
        trace(net, net, torch.ones(4, 4))
    assert (vars(net), net._buffers, net.items) == before
    assert random.getstate() == states[0]
    assert torch.equal(torch.get_rng_state(), states[1])
    assert gc.isenabled()
    assert not is_tracing()
    return str(error.value)


@pytest.mark.parametrize("name", READING)
def test_values_that_python_reads(name):
    reason = refused(READING[name])
    assert "reads the value of a tensor" in reason
    assert "test_refusals, line" in reason


@pytest.mark.parametrize("name", METHODS)
def test_methods_that_read_memory(name):
    assert f"uses Tensor.{name}" in refused(METHODS[name])
    assert torch.ones(2).tolist() == [1, 1]  # as before, once the trace has ended
    assert "numpy" not in vars(torch.Tensor)


@pytest.mark.parametrize("name", RANDOM)
def test_random_numbers(name):
    reason = refused(RANDOM[name])
    assert "random" in reason or "dropout" in reason


def test_an_error_of_the_call_is_the_reason():
    def call(net, x):
        raise ValueError("no such\nsize")

    reason = refused(call)
    assert reason.startswith("the call raises ValueError: no such (")
    assert reason.endswith(f"test_refusals, line {call.__code__.co_firstlineno + 1})")


def test_a_trace_inside_of_a_trace():
    inner = nn.Identity()
    assert "inside of a trace" in refused(lambda net, x: trace(inner, inner, x))


# ---- state between calls


def set_count(net, x):
    net.count += 1
    return x


def set_buffer(net, x):
    net.table = net.table + 1
    return x + net.table


def append(net, x):
    net.items.append(2)
    return x


def append_tensor(net, x):
    net.items[0] = [x * 2]
    return x


def new_attribute(net, x):
    net.cache = x * 2
    return x


STATE = {
    "the call changes Net.count": set_count,
    "the call keeps a tensor in Net._buffers": set_buffer,
    "the call changes Net.items": append,
    "the call keeps a tensor in Net.items": append_tensor,
    "the call keeps a tensor in Net.cache": new_attribute,
    "the call deletes Net.items": lambda net, x: delattr(net, "items"),
}


@pytest.mark.parametrize("reason", STATE)
def test_state_that_a_call_leaves_in_modules(reason):
    assert refused(STATE[reason]) == reason


def test_state_in_an_object_that_a_module_has():
    class Processor:
        step = 0

    def call(net, x):
        net.processor.step += 1
        return x

    net = Net(call)
    net.processor = Processor()
    with pytest.raises(Untraceable, match=r"changes Processor\.step"):
        trace(net, net, torch.randn(4, 4))
    assert net.processor.step == 0


def test_an_attribute_set_to_an_equal_value_is_no_state():
    def call(net, x):
        net.items.append(x)
        y = net.items[1] * 2
        net.items = [1]
        net.count = 0
        return y

    check(call)


def keep_in_class(net, x):
    Keeper.kept = x * 2
    return x


class Keeper:
    kept = None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "keeper"),
    [
        (lambda net, x: KEPT.append(x * 2) or x, r"a global variable of .*test_refusals"),
        (keep_in_class, "the class Keeper"),
    ],
)
def test_a_tensor_that_python_keeps_elsewhere(call, keeper):
    net = Net(call)
    with pytest.raises(Untraceable, match=f"keeps a tensor in {keeper}"):
        trace(net, net, torch.randn(4, 4))
    with pytest.raises(Untraceable, match="of an earlier trace"):
        trace(net, lambda x: x + (KEPT or [Keeper.kept])[0], torch.randn(4, 4))
    KEPT.clear()
    Keeper.kept = None


@pytest.mark.slow
def test_a_tensor_that_a_closure_keeps():
    kept = []
    hook = lambda module, args, out: kept.append(out)  # noqa: E731
    net = nn.Linear(4, 4)
    net.register_forward_hook(hook)
    with pytest.raises(Untraceable, match="keeps a tensor in"):
        trace(net, net, torch.randn(4, 4))


def test_tensors_in_a_cycle_are_not_kept():
    def call(net, x):
        cycle = [x * 2]
        cycle.append(cycle)
        return cycle[0]

    check(call)


@pytest.mark.slow
@pytest.mark.parametrize("maxsize", [None, 4])
def test_a_cache_that_the_trace_filled_is_emptied(maxsize):
    @functools.lru_cache(maxsize)
    def frequencies(n):
        return torch.arange(n).float(), [torch.ones(n)]

    def call(net, x):
        return x * frequencies(4)[0] + frequencies(4)[1][0]

    check(call)
    torch.testing.assert_close(Net(call)(torch.ones(4)), torch.arange(4.0) + 1)


@pytest.mark.slow
def test_a_cache_is_emptied_after_a_refused_trace_too():
    @functools.cache
    def ones(n):
        return torch.ones(n)

    refused(lambda net, x: x * ones(4) * x.sum().item())
    assert torch.equal(ones(4), torch.ones(4))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_an_interrupted_trace_leaves_nothing(kind):
    @functools.cache
    def ones(n):
        return torch.ones(n)

    def call(net, x):
        net.cache = x * ones(4)
        net.items.append(net.cache)
        raise kind

    net = Net(call)
    before = list(net.items)
    with pytest.raises(kind):
        trace(net, net, torch.randn(4, 4))
    assert not hasattr(net, "cache")
    assert net.items == before
    assert torch.equal(ones(4), torch.ones(4))


def test_a_cache_that_an_earlier_call_filled_is_read():
    @functools.cache
    def frequencies(n):
        return torch.arange(n).float()

    before = frequencies(4)
    traced = check(lambda net, x: x * frequencies(4))
    assert [t is before for t in traced.others] == [True]
    assert frequencies.cache_info().currsize == 1


# ---- threads


def test_threads_trace_at_once_while_others_run_the_model():
    def call(net, x):
        y = F.linear(x, net.weight, net.table)
        return y[1:].add_(1).relu(), net.table.detach() * 2

    net, x = Net(call), torch.randn(4, 4)
    with torch.no_grad():
        expected = net(x)
    errors, stop = [], threading.Event()

    def tracing():
        try:
            with torch.no_grad():
                for _ in range(4):
                    torch.testing.assert_close(run(trace(net, net, torch.randn(4, 4)), x), expected)
        except Exception as error:
            errors.append(error)

    def running():
        try:
            with torch.no_grad():
                while not stop.is_set():
                    torch.testing.assert_close(net(x), expected)
                    assert x.numpy().shape == (4, 4)
                    assert len(x.tolist()) == 4
        except Exception as error:
            errors.append(error)

    tracers = [threading.Thread(target=tracing) for _ in range(3)]
    runner = threading.Thread(target=running)
    for thread in (runner, *tracers):
        thread.start()
    for thread in tracers:
        thread.join()
    stop.set()
    runner.join()
    assert not errors
    assert "numpy" not in vars(torch.Tensor)


@pytest.mark.parametrize("name", ["data", "to"])
def test_parameters_take_no_memory_from_a_trace(name):
    """A parameter with the memory of a traced tensor would end the process."""

    def call(net, x):
        if name == "to":
            net.to(torch.float64)
        else:
            net.weight.data = net.weight.data * 2
        return x @ net.weight

    net = Net(call)
    before = net.weight.detach().clone()
    with pytest.raises(Untraceable, match=r"assigns to Tensor\.data"):
        trace(net, net, torch.randn(4, 4))
    assert torch.equal(net.weight, before)
    net.weight.data = before * 2
    assert torch.equal(net.weight, before * 2)
    assert "data" not in vars(torch.Tensor)


# ---- torch.compile


def compiled():
    """A compiled function, and the number of times that it was compiled."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    return torch.compile(lambda x: torch.sin(x) * 2, backend=backend), lambda: len(graphs)


def test_a_function_is_compiled_after_a_trace_that_met_it_first():
    function, times = compiled()
    x = torch.randn(3, 4)
    traced = trace(nn.Identity(), function, x)
    assert times() == 0
    torch.testing.assert_close(run(traced, x), function(x))
    assert times() == 1


def test_attention_that_compiles_itself_runs_after_a_refused_trace():
    x = torch.randn(1, 2, 16, 16)
    with pytest.raises(Untraceable):
        trace(nn.Identity(), flex_attention, x, x, x)
    with torch.no_grad():
        torch.testing.assert_close(flex_attention(x, x, x), F.scaled_dot_product_attention(x, x, x))


@pytest.mark.slow
def test_no_trace_in_a_compiled_function():
    reasons = []

    @torch.compiler.disable(recursive=False)
    def traced(x):
        with pytest.raises(Untraceable) as error:
            trace(nn.Identity(), torch.sin, x)
        reasons.append(str(error.value))
        return x

    def call(x):
        torch._dynamo.graph_break()
        return traced(x + 1) * 2

    torch.compile(call, backend="eager")(torch.randn(3))
    assert reasons
    function, times = compiled()
    function(torch.randn(3))
    assert times() == 1
