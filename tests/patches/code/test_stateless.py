"""Code of a package that sdfastgn does not know: which of it may keep something between calls."""

import itertools
import sys
import textwrap
import types

import packaging.version
import pytest
from torch import nn

from sdfastgn.patches.code import stateless
from sdfastgn.patches.code.stateless import CodeState, packages_of
from sdfastgn.patches.code.states import States
from sdfastgn.patches.graphs.watch import TRUSTED
from sdfastgn.plans.guard import Guard

pytestmark = pytest.mark.fused_on_cpu

_HEAD = """
import collections, dataclasses, enum, functools, itertools, logging, math, os, random, time, typing
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from numpy.random import rand
from os import getenv
from time import perf_counter
"""
_MODEL = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = 1
        {made}

    def forward(self, x):
        {run}
"""
_numbers = itertools.count()


def model(monkeypatch, run, top="", made="pass", below=""):
    """A module of a package of its own, whose forward runs the statements ``run``."""
    package = types.ModuleType(f"unknown{next(_numbers)}")
    monkeypatch.setitem(sys.modules, package.__name__, package)
    run, made = (textwrap.indent(text, " " * 8).strip() for text in (run, made))
    exec(f"{_HEAD}\n{top}\n{_MODEL.format(run=run, made=made)}\n{below}", vars(package))
    return vars(package)["Model"]()


COUNTER = "def mk():\n    s = [0]\n    def f(x):\n        s[0] += 1\n        return x * s[0]\n    return f\n"
NONLOCAL = """
def mk():
    s = 0
    def f(x):
        nonlocal s
        s += 1
        return x * s
    return f
act = mk()
"""
STATELESS = {
    "logger": ("logger.debug('x'); return x", "logger = logging.getLogger(__name__)"),
    "list": ("return x * SCALES[0]", "SCALES = [0.5, 2.0]"),
    "table": ("return ACT['relu'](x)", "ACT = {'relu': F.relu, 'silu': [F.silu]}"),
    "flag": ("return -x if DEBUG else x", "DEBUG = False"),
    "types": ("y: T = typing.cast(T, x); return y", "T = typing.Optional[torch.Tensor]"),
    "cached": ("return x * scale(3)", "@functools.lru_cache\ndef scale(n): return n * 2.0"),
    "member": ("return x if MODE is Mode.A else -x", "class Mode(enum.Enum):\n    A = 1\nMODE = Mode.A"),
    "dtype": ("return x.to(D).contiguous(memory_format=L)", "D, L = torch.float32, torch.channels_last"),
    "variable": ("k = 0\ndef f(x):\n    nonlocal k\n    k += 1\n    return x * k\nreturn f(x)",),
    "math": ("return x * math.sqrt(2) * float(np.sqrt(4.0)) * S", "S = np.float32(2)"),
    "partial": ("return act(x)", "act = functools.partial(F.leaky_relu, negative_slope=0.1)"),
    "path": ("return x * len(os.path.join('a', 'b'))",),
    "default": ("return f(x)", "def f(x, ks=[1, 2]): return x * ks[0]"),
    "class": ("return Out(x).sample", "@dataclasses.dataclass\nclass Out:\n    sample: torch.Tensor"),
    "namedtuple": ("return x * self.c.b", "C = collections.namedtuple('C', 'a b')", "self.c = C(1, 2)"),
    "attribute": ("return x * self.SCALES[0]", "", "pass", "Model.SCALES = [2.0]"),
}
MAY_CHANGE = {
    "attribute": ("self.a += 1; return x", "sets the attribute a"),
    "setattr": ("setattr(self, 'a', 2); return x", "calls setattr"),
    "globals": ("globals()['A'] = 1; return x", "calls globals"),
    "global": ("global A; A = 2; return x", "sets the global A"),
    "clock": ("return x * perf_counter()", "calls time.perf_counter"),
    "module": ("return x * time.time()", "calls time.time"),
    "import": ("import time as t; return x * t.time()", "imports time"),
    "environment": ("return x * int(getenv('A'))", "calls os.getenv"),
    "drawn": ("return x * rand()", "calls numpy.random.rand"),
    "random": ("return x * np.random.rand()", "calls numpy.random"),
    "generator": ("return x * R.random()", "reads the global R of", "R = np.random.default_rng(0)"),
    "object": ("return x * C.scale", "reads the global C of", "class K: scale = 1\nC = K()"),
    "method": ("return x * f()", "reads the global f of", "f = [1.0, 2.0].pop"),
    "iterator": ("return x * next(I)", "reads the global I of", "I = itertools.count()"),
    "in_list": ("return x * next(I[0])", "reads the global I of", "I = [itertools.count()]"),
    "in_partial": ("return x * f()", "reads the global f of", "f = functools.partial(next, iter([1]))"),
    "in_cached": ("return x * f()", "calls time.time", "@functools.cache\ndef f(): return time.time()"),
    "of_class": ("return x * next(self.it)", "Model.it, which may", "", "Model.it = itertools.count()"),
    "nonlocal": ("return act(x)", "sets the variable s of its closure", NONLOCAL),
}  # fmt: skip
# A statement that changes a container, and one that reads it.
CONTAINERS = {
    "global": ("Q.append(1); return x * len(Q)", "Q = []", "the global Q of"),
    "set": ("Q.add(len(Q)); return x * len(Q)", "Q = {0}", "the global Q of"),
    "deque": ("return x * Q.pop()", "Q = collections.deque([1, 2])", "the global Q of"),
    "nested": ("Q['a'].append(1); return x", "Q = {'a': [1], 'b': 2}", "the global Q of"),
    "of_class": ("self.q[0] = 1; return x", "", "Model.q", "Model.q = {}"),
    "default": ("return f(x)", "def f(x, m={}): m[len(m)] = 1; return x", "a default of an argument of"),
    "keyword": ("return f(x)", "def f(x, *, m=[]): m += [1]; return x", "a default of an argument of"),
    "closure": ("return act(x)", f"{COUNTER}act = mk()", "the variable s in the closure of"),
    "partial": ("return f(x)", "def g(s, x): s += [1]\nf = functools.partial(g, [])", "the global f of"),
}  # fmt: skip


@pytest.mark.parametrize("name", STATELESS)
def test_stateless(name, monkeypatch):
    run, *more = STATELESS[name]
    state = CodeState(model(monkeypatch, run, *more), TRUSTED)
    assert state.reason is None
    assert state.same()


@pytest.mark.parametrize("name", MAY_CHANGE)
def test_code_that_may_change(name, monkeypatch):
    run, words, top, below = (*MAY_CHANGE[name], "", "")[:4]
    module = model(monkeypatch, run, f"A = 1\n{top}", below=below)
    assert words in CodeState(module, TRUSTED).reason
    assert CodeState(module, TRUSTED | {type(module).__module__}).reason is None


def test_code_of_other_packages_is_read_as_deep_as_it_goes(monkeypatch):
    other = types.ModuleType("unknown_helpers")
    monkeypatch.setitem(sys.modules, other.__name__, other)
    exec("def f(x): return g(x)\ndef g(x): return h(x)\ndef h(x): h.n = 1; return x", vars(other))
    for import_it, run in {
        "import unknown_helpers as u": "u.f(x)",
        "from unknown_helpers import f": "f(x)",
    }.items():
        state = CodeState(model(monkeypatch, f"return {run}", import_it), TRUSTED)
        assert state.reason == "unknown_helpers.h sets the attribute n"
        assert (
            CodeState(model(monkeypatch, f"return {run}", import_it), TRUSTED | {other.__name__}).reason
            is None
        )


def test_globals_of_other_packages_are_compared(monkeypatch):
    other = types.ModuleType("unknown_helpers")
    monkeypatch.setitem(sys.modules, other.__name__, other)
    exec("K = 2\ndef f(x): return g(x)\ndef g(x): return h(x)\ndef h(x): return x * K", vars(other))
    state = CodeState(model(monkeypatch, "return f(x)", "from unknown_helpers import f"), TRUSTED)
    assert (state.reason, state.same()) == (None, True)
    for name in ("K", "h", "g"):
        with monkeypatch.context() as patch:
            patch.setattr(other, name, lambda x: x)
            assert not state.same()
            assert state.change() == f"unknown_helpers.{name}"
        assert state.same()


def test_objects_in_attributes(monkeypatch):
    top = "class Scale:\n    n = 0\n    def get(self):\n        type(self).n += 1\n        return self.n"
    for made in ("self.s = Scale()", "self.s = Scale(); self.s.s = self.s"):
        state = CodeState(model(monkeypatch, "return x * self.s.get()", top, made), TRUSTED)
        assert "Scale.get sets the attribute n" in state.reason


@pytest.mark.parametrize("name", CONTAINERS)
def test_containers_are_compared_and_put_back(name, monkeypatch):
    run, top, words, below = (*CONTAINERS[name], "")[:4]
    module = model(monkeypatch, run, top, below=below)
    state = CodeState(module, TRUSTED)
    assert state.reason is None
    with state.undoing() as changed:
        module(2)
        assert not state.same()
        assert words in state.change()
    assert state.same()
    assert words in changed[0]
    module(2)
    assert not state.same()
    with state.undoing():
        pass  # what the call itself has changed stays
    assert not state.same()


def test_packages_are_looked_for_once(monkeypatch):
    """A look at all attributes of SDXL's UNet takes longer than the comparison of many calls."""
    root, looks = nn.Sequential(nn.Conv2d(1, 1, 1)), []
    root.act = packaging.version.parse
    monkeypatch.setattr(
        stateless, "packages_of", lambda module: looks.append(packages_of(module)) or looks[-1]
    )
    assert Guard(root, States(root), 0, None).reason is None
    assert looks == [{"torch", "packaging"}]


def test_a_layer_of_a_known_package():
    assert CodeState(nn.Conv2d(1, 1, 1), TRUSTED).reason is None
