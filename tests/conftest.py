"""What holds for every test: where kernels run, random numbers, and switches that are put back.

Markers and the fixtures that tests ask for by name are in ``tests/plugin.py``.
"""

import importlib.util
import os
import warnings

import pytest
import torch

pytest_plugins = ["tests.plugin"]

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports triton
    if importlib.util.find_spec("triton") is not None:
        from tests.interpreter import make_quick

        make_quick()

# Two workers on two cores: more threads only wait for each other.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seeded():
    """The same random numbers in every test, whatever ran before it."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def no_terminal(monkeypatch):
    """Tables are as wide as in a pipe, however wide the terminal of whoever runs the tests."""
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture(scope="session", autouse=True)
def warned_once():
    """``optimize`` says once a process what a machine lacks: not in whichever test comes first."""
    from sdfastgn import api

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        api.warn_of_machine("optimize")


@pytest.fixture(autouse=True)
def no_tf32(request):
    """fp32 as it is on the CPU: with TF32 two ways to one convolution differ in the third digit."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = request.node.get_closest_marker("gpu") is None and before
    yield
    torch.backends.cudnn.allow_tf32 = before


@pytest.fixture(autouse=True)
def kernels_stay_on(monkeypatch):
    """A kernel that does not compile turns all off, and plain PyTorch would pass whatever comes next."""
    from sdfastgn.kernels.common import dispatch

    before = dispatch.why_off
    yield
    monkeypatch.undo()
    after, dispatch.why_off = dispatch.why_off, before
    assert after == before


@pytest.fixture(autouse=True)
def memory_given_back():
    """Test processes share one GPU, and PyTorch keeps what a test has freed for its own process."""
    yield
    if torch.cuda.is_available() and torch.cuda.memory_reserved() > 2**30:
        torch.cuda.empty_cache()
