"""What an observer of launches sees, and what others do meanwhile."""

import threading

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sdfastgn.kernels.common import dispatch, observers
from sdfastgn.kernels.common.launch import Launch

X = torch.zeros(1)


class Kernel:
    """Notes its launches."""

    def __init__(self):
        self.launched = []

    @staticmethod
    def fn(x_ptr, y_ptr): ...

    def __getitem__(self, grid):
        return lambda *args, **options: self.launched.append(args)


@pytest.fixture
def kernel():
    return Kernel()


@pytest.fixture
def launch(kernel):
    return Launch(kernel, 3, 4)


def test_an_observer_runs_the_launches_of_its_thread(kernel, launch):
    seen = []

    def observe(*call):
        seen.append((call, len(kernel.launched)))
        call[0](call[1], *call[2])

    with observers.observed_by(observe):
        launch(5, X, None)
        launch.run(X)
    assert seen == [((launch, 5, (X, None)), 0), ((launch, 0, (X,)), 1)]
    launch(5, X)
    assert (len(seen), len(kernel.launched), observers.observers) == (2, 3, {})


def test_an_observer_stays_after_a_launch_that_fails(launch):
    def observe(*call):
        raise RuntimeError("no launch")

    with observers.observed_by(observe):
        for _ in range(2):
            with pytest.raises(RuntimeError, match="no launch"):
                launch.run(X)
    assert not observers.observers


def test_other_threads_are_not_observed(kernel, launch):
    seen = []
    with observers.observed_by(lambda *call: seen.append(call)):
        thread = threading.Thread(target=launch.run, args=(X,))
        thread.start()
        thread.join()
    assert (seen, len(kernel.launched)) == ([], 1)


def test_calls_skip_the_dispatcher_under_the_mode_of_an_observer_alone():
    plain = {}

    def look(where):
        plain[where] = dispatch.is_untraced(X, ())

    look("outside")
    with TorchDispatchMode():
        look("a mode")
        with observers.observed_by(print):
            look("the mode of an observer")
            thread = threading.Thread(
                target=lambda: (TorchDispatchMode().__enter__(), look("another thread"))
            )
            thread.start()
            thread.join()
            with TorchDispatchMode():
                look("one more")
    assert plain == {
        "outside": True,
        "a mode": False,
        "the mode of an observer": True,
        "another thread": False,
        "one more": False,
    }
