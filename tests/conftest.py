"""Settings for every test: where kernels run, the random seed, and global state that is reset after a test.

Markers and the fixtures that tests ask for by name are in ``tests/plugin.py``.
"""

import atexit
import contextlib
import gc
import importlib.util
import os
import warnings

import pytest
import torch
from filelock import FileLock

pytest_plugins = ["tests.plugin"]

# Off until all tests are collected: hardly anything that is imported until then becomes garbage.
gc.disable()

HAS_GPU = torch.cuda.is_available()
# Tests count traces, so no test finds the plans of another one.
os.environ["SDFASTGN_PLAN_CACHE"] = ""
if not HAS_GPU:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # must be set before triton is imported
    if importlib.util.find_spec("triton") is not None:
        from tests.interpreter import make_quick

        make_quick()

# The tests usually run in as many processes as there are cores, so more threads would only slow each other.
torch.set_num_threads(1)


def pytest_collection_finish():
    """Exempts modules and collected tests from garbage collections, and makes these rarer."""
    gc.freeze()
    atexit.register(gc.unfreeze)  # else extension modules report leaks at the end of the process
    gc.set_threshold(20_000, 20, 20)
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def warned_once():
    """Triggers ``optimize``'s warnings about this machine before the first test.

    They appear only once per process, and would otherwise appear in the first test that calls ``optimize``.
    """
    from sdfastgn import api

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        api.warn_of_machine("optimize")


@pytest.fixture(scope="session", autouse=True)
def spies_of_tests():
    """Lets models run fused while tests note calls with functions that they put into other packages."""
    from sdfastgn.patches.code import replaced

    replaced.OWN |= {"tests"}


def seed():
    """``torch.manual_seed(0)`` in 0.1 ms."""
    (torch if HAS_GPU else torch.default_generator).manual_seed(0)


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef):
    """A fixture that tests share draws the same numbers, whichever of them comes first."""
    if fixturedef.scope != "function":
        seed()


@pytest.fixture(autouse=True)
def surroundings(request, monkeypatch):
    """Sets what every test relies on, and resets global state after the test.

    It is one fixture because each fixture takes pytest 0.1 ms, in each of over 10,000 tests.
    """
    from tests.plugin import apply_markers

    seed()  # a test's random numbers do not depend on the tests before it
    monkeypatch.delenv("COLUMNS", raising=False)  # nor do printed tables depend on the terminal
    apply_markers(request.node, monkeypatch)
    with on_gpu(request) if HAS_GPU else contextlib.nullcontext(), kernels_stay_on(monkeypatch):
        yield


@contextlib.contextmanager
def kernels_stay_on(monkeypatch):
    """Fails a test that turned the kernels off, and turns them on again.

    A kernel that does not compile turns its op off. Later tests would then pass in plain PyTorch.
    """
    from sdfastgn.kernels.common import dispatch

    before = dispatch.why_off
    yield
    monkeypatch.undo()
    after, dispatch.why_off = dispatch.why_off, before
    ops_off = dict(dispatch.ops_off)
    dispatch.ops_off.clear()
    assert (after, ops_off) == (before, {})


@contextlib.contextmanager
def on_gpu(request):
    """Turns TF32 off for tests marked ``gpu``, and leaves GPU memory to the other test processes.

    With TF32, two ways to compute the same fp32 convolution in cuDNN already differ in the third digit.

    The test processes share the GPU. Tests with the marker ``gigabytes`` run one at a time. After each test
    PyTorch's memory cache is emptied if it is above 1 GiB.
    """
    turn = contextlib.nullcontext()
    if request.node.get_closest_marker("gigabytes"):
        # All processes of one pytest-xdist run have this folder in common.
        folder = request.getfixturevalue("tmp_path_factory").getbasetemp().parent
        turn = FileLock(folder / "gigabytes.lock")
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = request.node.get_closest_marker("gpu") is None and before
    try:
        with turn:
            yield
            if torch.cuda.memory_reserved() > 2**30:
                torch.cuda.empty_cache()
    finally:
        torch.backends.cudnn.allow_tf32 = before
