"""Threads that optimize, restore and verify models while others draw with them."""

import copy
import gc
import sys
import threading
import time
import weakref
from contextlib import contextmanager

import pytest
import torch
from torch import nn

import sdfastgn
from sdfastgn import api
from sdfastgn.kernels.common import dispatch
from sdfastgn.patches import patcher
from sdfastgn.patches.graphs.forward import GraphedForward
from sdfastgn.patches.layout import channels_last
from sdfastgn.patches.swap import exclusive
from tests.patches import samples
from tests.patches.graphs.cases import make, run
from tests.patches.graphs.tape import TapeBackend
from tests.patches.samples import randomize

pytestmark = pytest.mark.fused_on_cpu

LONG = 60.0  # seconds after which a thread that does not end counts as stuck


def unet():
    return randomize(samples.unet()).eval()


def draw(model):
    x = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(1))
    tokens = torch.randn(1, 3, 12, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        return model(x, 3, tokens).sample


class Thread(threading.Thread):
    """Runs ``work`` in a thread. ``join`` returns its result or raises its exception."""

    def __init__(self, work):
        super().__init__(daemon=True)
        self.work, self.result, self.error = work, None, None
        self.start()

    def run(self):
        try:
            self.result = self.work()
        except BaseException as error:  # for the thread that joins
            self.error = error

    def join(self, timeout=LONG):
        super().join(timeout)
        assert not self.is_alive(), "the thread is stuck"
        if self.error is not None:
            raise self.error
        return self.result


@contextmanager
def at_work(work):
    """Inside, another thread calls ``work`` over and over.

    Yields the list of its results, and a function that returns once there is one more than it was called.
    """
    ended, results, made = threading.Event(), [], threading.Semaphore(0)

    def loop():
        while not ended.is_set():
            results.append(work())
            made.release()

    def one_more():
        assert made.acquire(timeout=LONG), "the thread is stuck"

    thread = Thread(loop)
    try:
        one_more()
        yield results, one_more
    finally:
        ended.set()
        thread.join()


@pytest.fixture
def often_switching():
    """The interpreter switches threads as often as it can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_stock_code_is_for_its_own_thread():
    model = sdfastgn.optimize(unet())
    expected, count = draw(model), channels_last.converted_weights(model)
    assert count > 0
    with dispatch.stock_code():
        assert not dispatch.is_on()
        assert Thread(dispatch.is_on).join()
        assert torch.equal(Thread(lambda: draw(model)).join(), expected)
        assert channels_last.converted_weights(model) == count
    assert dispatch.is_on()


def test_stock_code_in_two_threads_at_once():
    inside, leave = threading.Event(), threading.Event()

    def other():
        with dispatch.stock_code():
            inside.set()
            assert leave.wait(LONG)
        return dispatch.is_on()

    with dispatch.stock_code():
        thread = Thread(other)
        assert inside.wait(LONG)
    assert dispatch.is_on()
    leave.set()
    assert thread.join()
    assert dispatch.is_on()


@pytest.mark.slow
def test_one_thread_verifies_while_another_draws():
    model, other = sdfastgn.optimize(unet()), sdfastgn.optimize(unet(), cuda_graphs=False)
    expected, count = draw(model), channels_last.converted_weights(model)
    with at_work(lambda: draw(model)) as (results, _):
        found = [verdict for _ in range(3) for verdict in api.verdicts(other)]
    assert {verdict.status for verdict in found} == {"right"}
    assert channels_last.converted_weights(model) == count
    assert all(torch.equal(result, expected) for result in results)


@pytest.mark.slow
def test_a_compiled_part_is_not_verified():
    """In stock's code it would still run the code that was compiled from the fused forward."""
    model = sdfastgn.optimize(unet(), cuda_graphs=False)
    norm = model.get_submodule("mid_block.attentions.0.norm")
    norm.compile(backend="eager")
    (verdict,) = [v for v in api.verdicts(model) if v.path == "mid_block.attentions.0.norm"]
    assert (verdict.status, verdict.reason) == ("not verified", "it is compiled by torch.compile")


@pytest.mark.slow
@pytest.mark.parametrize("changes", [8, pytest.param(60, marks=pytest.mark.slow)])
def test_a_model_changes_between_the_calls_of_other_threads(changes, often_switching):
    model = unet()
    stock = copy.deepcopy(model)
    expected = draw(stock)
    with at_work(lambda: draw(model)) as (results, one_more):
        for _ in range(changes):
            sdfastgn.optimize(model, cuda_graphs=False)
            sdfastgn.restore(model)
            one_more()  # however slow the machine, there are as many calls as changes
    for result in results:
        torch.testing.assert_close(result, expected, atol=2e-5, rtol=2e-5)
    assert torch.equal(draw(model), expected)
    assert [vars(module).keys() for module in model.modules()] == [
        vars(module).keys() for module in stock.modules()
    ]


@contextmanager
def stopped_inside(model):
    """Inside, another thread is in the middle of a call of ``model``, which goes on afterwards."""
    inside, leave = threading.Event(), threading.Event()

    def stop(*_):
        inside.set()
        assert leave.wait(LONG)

    hook = model.mid_block.register_forward_hook(stop)
    thread = Thread(lambda: draw(model))
    assert inside.wait(LONG)
    try:
        yield
    finally:
        leave.set()
        thread.join()
        hook.remove()


@pytest.mark.drawn(1)
@pytest.mark.parametrize("change", [sdfastgn.optimize, sdfastgn.restore, api.verdicts])
def test_a_call_that_does_not_end(change, monkeypatch):
    model = unet()
    if change is not sdfastgn.optimize:
        sdfastgn.optimize(model)
    before = [type(module) for module in model.modules()], [p.stride() for p in model.parameters()]
    monkeypatch.setattr(exclusive, "_MAX_WAIT", 0.05)
    with stopped_inside(model):
        with pytest.raises(
            RuntimeError, match=r"^sdfastgn\.\w+: thread 'Thread-\d+' has been running UNet2D"
        ):
            change(model)
        assert ([type(m) for m in model.modules()], [p.stride() for p in model.parameters()]) == before
    change(model)


def test_a_generator_that_is_suspended_while_the_stack_is_read(monkeypatch):
    """A suspended generator's frame has no caller, so the call that it was made in is not found there."""
    model = unet()
    inside, leave, suspended, end = (threading.Event() for _ in range(4))

    def steps():
        inside.set()
        yield leave.wait(LONG)

    def stop(*_):
        generator = steps()
        assert next(generator)
        suspended.set()
        assert end.wait(LONG)

    def frames_before_it_is_suspended(frames=sys._current_frames):
        found = frames()
        if exclusive._change is not None and not suspended.is_set():
            leave.set()
            assert suspended.wait(LONG)
        return found

    hook = model.mid_block.register_forward_hook(stop)
    thread = Thread(lambda: draw(model))
    assert inside.wait(LONG)
    monkeypatch.setattr(exclusive, "_MAX_WAIT", 0.05)
    monkeypatch.setattr(sys, "_current_frames", frames_before_it_is_suspended)
    try:
        with pytest.raises(RuntimeError, match="has been running UNet2D"):
            sdfastgn.optimize(model)
    finally:
        end.set()
        thread.join()
        hook.remove()


def test_a_second_optimize_waits_for_nobody(monkeypatch):
    """It has nothing to change. Two pipelines may share a UNet, and one may be drawing with it."""
    model = sdfastgn.optimize(unet())
    monkeypatch.setattr(exclusive, "_MAX_WAIT", 0.05)
    with stopped_inside(model):
        sdfastgn.optimize(model)


def test_a_model_that_was_optimized_beside_a_thread_goes_at_once():
    model = nn.Sequential(nn.GroupNorm(2, 8))
    weight = weakref.ref(model[0].weight)
    gc.disable()
    try:
        with stopped_thread():
            sdfastgn.optimize(model)
        del model
        assert weight() is None
    finally:
        gc.enable()


def test_a_new_call_waits_for_the_change(monkeypatch):
    model, seen = unet(), []
    expected = draw(model)

    def apply_while_a_thread_calls(root, *rest, apply=patcher.apply, **options):
        thread = Thread(lambda: (draw(model), seen.append("drawn"))[0])
        while thread.ident not in exclusive._change.waiting:
            assert thread.is_alive()
        apply(root, *rest, **options)
        seen.append("changed")
        seen.append(thread)

    monkeypatch.setattr(patcher, "apply", apply_while_a_thread_calls)
    with stopped_thread():
        sdfastgn.optimize(model, cuda_graphs=False)
    thread = next(each for each in seen if isinstance(each, Thread))
    torch.testing.assert_close(thread.join(), expected, atol=2e-5, rtol=2e-5)
    assert [each for each in seen if each is not thread] == ["changed", "drawn"]


@contextmanager
def stopped_thread():
    """A second thread that does nothing. Gates are set only if there is more than one thread."""
    leave = threading.Event()
    thread = Thread(lambda: leave.wait(LONG))
    try:
        yield
    finally:
        leave.set()
        thread.join()


def test_forwards_are_found_while_others_are_made(often_switching):
    module = nn.Linear(1, 1)
    own = GraphedForward(module)

    def make():  # None outlives its round, or every search would take longer than the one before.
        return len([GraphedForward(each) for _ in range(10) for each in (module, nn.Linear(1, 1))])

    with at_work(make) as (_, one_more):
        for _ in range(1000):
            assert own in GraphedForward.all_of(module)
            assert module in GraphedForward.owners()
        one_more()


@pytest.mark.drawn(1)
@pytest.mark.parametrize("change", [sdfastgn.restore, api.verdicts])
def test_a_change_beside_a_graphed_model_that_shares_a_part(change):
    """The call holds its device's lock when it comes to the shared part, and the change needs that lock."""
    backend = TapeBackend()
    (calls, stock, inputs), (changes, _, _) = make(backend=backend), make(backend=backend)
    changes.mid_block = shared = calls.mid_block
    for model in (changes, calls):
        run(model, inputs)  # the second call of a kind is captured
    run(changes, inputs)
    inside = threading.Event()

    def capture_when_the_change_has_begun(fn, capture=backend.capture):
        inside.set()
        while not isinstance(vars(shared).get("_call_impl"), exclusive._Gate):
            time.sleep(0.001)
        return capture(fn)

    backend.capture = capture_when_the_change_has_begun
    call = Thread(lambda: run(calls, inputs))
    assert inside.wait(LONG)
    Thread(lambda: change(changes)).join(20)
    torch.testing.assert_close(call.join(20), run(stock, inputs), atol=2e-4, rtol=2e-3)


def test_models_that_change_places(monkeypatch):
    """A model moves from the first GPU to the second, while another moves from the second to the first."""
    backends = TapeBackend(), TapeBackend()
    met = threading.Barrier(2)

    class Lock:
        """A thread that has this lock waits until the other thread has one too, or waits for this one."""

        def __init__(self):
            self.lock = threading.RLock()

        def __enter__(self):
            self.lock.acquire()
            try:
                met.wait(0.3)
            except threading.BrokenBarrierError:
                met.reset()

        def __exit__(self, *_):
            self.lock.release()

    unets = []
    for backend in backends:
        model, stock, inputs = make(backend=backend)
        run(model, inputs, 2)
        unets.append((model, run(stock, inputs), inputs))
    for backend in backends:
        backend.lock = Lock()
    for (model, *_), backend in zip(unets, reversed(backends), strict=True):
        monkeypatch.setattr(model.forward, "_backend", backend)
    threads = [Thread(lambda model=model, inputs=inputs: run(model, inputs)) for model, _, inputs in unets]
    for thread, (_, expected, _) in zip(threads, unets, strict=True):
        torch.testing.assert_close(thread.join(20), expected, atol=2e-4, rtol=2e-3)
