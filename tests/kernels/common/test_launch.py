"""Compiling ahead of the first launch: what is compiled, what is not run, and what is left behind."""

import contextlib
import threading
import time
import types
from collections import defaultdict

import pytest
import torch
import triton
import triton.language as tl

from sdfastgn.kernels.common import compile_ahead
from sdfastgn.kernels.common.compile_ahead import rehearse
from sdfastgn.kernels.common.launch import Launch

CPU = torch.device("cpu", 0)


@pytest.fixture
def without_gpu(monkeypatch):
    monkeypatch.setattr(compile_ahead.torch.cuda, "device", lambda device: contextlib.nullcontext())


def copy_kernel(x_ptr, y_ptr, number, BLOCK: tl.constexpr):
    """The parameters of ``Kernel``."""


class Kernel:
    """Notes how it is called. ``gate``: compilations wait for each other there."""

    fn = staticmethod(copy_kernel)

    def __init__(self, gate=None, fails=False, made=None):
        self.launched, self.compiled, self.loaded = [], [], []
        self.made = made  # what a launch returns
        self.device_caches = defaultdict(dict)
        self.gate, self.fails = gate, fails

    def __getitem__(self, grid):
        return lambda *args, **options: self.launched.append((args, options)) or self.made

    def warmup(self, *args, grid, **options):
        if self.gate is not None:
            self.gate.wait()
        if self.fails:
            raise RuntimeError("ptxas said no")
        self.compiled.append((args, options))
        return Compiled(self)


class Compiled:
    def __init__(self, kernel):
        self.kernel = kernel

    @property
    def run(self):
        self.kernel.loaded.append(self)


def made(number=7, block=16, kernel=None):
    kernel = kernel or Kernel()
    return kernel, Launch(kernel, 3, 4, number=number, BLOCK=block)


X = torch.zeros(1)


def test_numbers_and_constants_are_bound_by_name():
    _, launch = made(number=7, block=16)
    assert launch.numbers == (7,)
    assert launch.constants == {"BLOCK": 16}
    with pytest.raises(TypeError, match=r"^copy_kernel: missing \['number'\], unknown \['HW', 'x_ptr'\]"):
        Launch(Kernel(), 3, 4, HW=7, x_ptr=X, BLOCK=16)


def test_a_kernel_is_told_whether_it_may_start_early():
    kernel = Kernel()
    kernel.fn = lambda x_ptr, PDL: None
    kernel.fn.__annotations__["PDL"] = tl.constexpr
    for pdl in (False, True):
        assert Launch(kernel, 3, 4, pdl=pdl).constants == {"PDL": pdl}


def test_parameters_in_another_order_are_refused():
    kernel = Kernel()
    kernel.fn = lambda number, x_ptr: None
    with pytest.raises(TypeError, match="must be pointers, then numbers, then constants"):
        Launch(kernel, 3, 4, number=7)


def test_a_rehearsal_compiles_and_does_not_run(without_gpu):
    kernel, launch = made()
    rehearse(lambda: launch.run(X, None), CPU)
    options = {"BLOCK": 16, "num_warps": 4}
    assert kernel.compiled == [((torch.float32, None, 7), options)]
    assert len(kernel.loaded) == 1
    assert kernel.launched == []
    launch.run(X, None)
    assert kernel.launched == [((X, None, 7), options)]
    assert len(kernel.compiled) == 1


def test_what_shares_a_kernel_is_compiled_once(without_gpu):
    kernel, one = made()
    others = [made(8, kernel=kernel)[1], made(block=32, kernel=kernel)[1]]

    def call():
        for launch in (one, *others):
            launch.run(X)
        one.run(X.half())

    rehearse(call, CPU)
    compiled = sorted((str(args[0]), options["BLOCK"]) for args, options in kernel.compiled)
    assert compiled == [("torch.float16", 16), ("torch.float32", 16), ("torch.float32", 32)]


def test_compilations_run_beside_each_other(without_gpu, monkeypatch):
    monkeypatch.setattr(compile_ahead.os, "cpu_count", lambda: 3)
    kernel = Kernel(threading.Barrier(3, timeout=60))
    launches = [made(block=block, kernel=kernel)[1] for block in (16, 32, 64)]
    rehearse(lambda: [launch.run(X) for launch in launches], CPU)
    assert len(kernel.compiled) == 3


def test_a_launcher_is_built_by_one_thread_at_a_time(without_gpu, monkeypatch):
    monkeypatch.setattr(compile_ahead.os, "cpu_count", lambda: 3)
    building, most = [], []

    def run(compiled):
        building.append(compiled)
        time.sleep(0.02)
        most.append(len(building))
        building.remove(compiled)

    monkeypatch.setattr(Compiled, "run", property(run))
    kernel = Kernel(threading.Barrier(3, timeout=60))
    launches = [made(block=block, kernel=kernel)[1] for block in (16, 32, 64)]
    rehearse(lambda: [launch.run(X) for launch in launches], CPU)
    assert most == [1, 1, 1]


def test_no_kernel_is_compiled_before_triton_is_prepared(without_gpu, monkeypatch):
    kernel, launch = made()
    seen = []
    monkeypatch.setattr(compile_ahead, "_prepare", lambda device: time.sleep(0.1) or seen.append(device))
    monkeypatch.setattr(kernel, "warmup", lambda *a, **k: seen.append("compiled") or Compiled(kernel))
    compile_ahead.prepare.cache_clear()
    for _ in range(2):
        rehearse(lambda: launch.run(X), CPU)
    assert seen == [CPU, "compiled", "compiled"]


def test_the_call_goes_on_while_triton_is_prepared(without_gpu, monkeypatch):
    _, launch = made()
    launched, seen = threading.Event(), []
    monkeypatch.setattr(compile_ahead, "_prepare", lambda device: seen.append(launched.wait(timeout=10)))
    compile_ahead.prepare.cache_clear()
    rehearse(lambda: (launch.run(X), launched.set()), CPU)
    assert seen == [True]


def test_compilations_run_beside_the_call(without_gpu):
    kernel = Kernel(threading.Barrier(2, timeout=60))
    _, launch = made(kernel=kernel)
    rehearse(lambda: (launch.run(X), kernel.gate.wait()), CPU)
    assert len(kernel.compiled) == 1


def test_a_kernel_that_cannot_be_compiled_fails_when_it_is_launched(without_gpu):
    kernel, launch = made(kernel=Kernel(fails=True))
    rehearse(lambda: launch.run(X), CPU)
    launch.run(X)
    assert len(kernel.launched) == 1


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt], ids=["error", "interrupt"])
def test_what_is_raised_inside_ends_the_rehearsal(error, without_gpu):
    kernel, launch = made()

    def broken():
        launch.run(X)
        raise error("in the middle")

    with pytest.raises(error, match="in the middle"):
        rehearse(broken, CPU)
    launch.run(X)
    assert len(kernel.launched) == 1


def test_other_threads_launch(without_gpu):
    kernel, launch = made()

    def meanwhile():
        thread = threading.Thread(target=launch.run, args=(X,))
        thread.start()
        thread.join()

    rehearse(meanwhile, CPU)
    assert (len(kernel.compiled), len(kernel.launched)) == (0, 1)


class LauncherOfAMD:
    """``calls`` notes what reaches the GPU's."""

    profile_scratch_size = 0

    def __init__(self):
        self.calls = []

    def launch(self, *args):
        self.calls.append(args)

    def __call__(self, gridX, gridY, gridZ, stream, function, *args):
        self.launch(gridX, gridY, gridZ, stream, function, "checked", *args)


class Launcher36(LauncherOfAMD):
    launch_cooperative_grid, launch_pdl = False, True
    global_scratch_size = 0


class Launcher34(Launcher36):
    profile_scratch_size = None


class Launcher37(Launcher36):
    def __call__(
        self, gridX, gridY, gridZ, stream, function,
        kernel_metadata, launch_metadata, launch_enter_hook, launch_exit_hook, *args,
    ):  # fmt: skip
        metadata = (kernel_metadata, launch_metadata, launch_enter_hook, launch_exit_hook)
        self.launch(gridX, gridY, gridZ, stream, function, *metadata, *args)


class UnknownLauncher(Launcher36):
    def __call__(self, grid, stream, function, args): ...


@pytest.mark.parametrize(
    ("launcher", "between"),
    [
        (Launcher34(), (False, True, None)),
        (Launcher36(), (False, True, None, None)),
        (Launcher37(), ()),
        (LauncherOfAMD(), ("checked",)),
        (UnknownLauncher(), None),
        (object(), None),
    ],
    ids=lambda value: type(value).__name__,
)
def test_launchers_of_each_triton(launcher, between):
    """The second call goes to the compiled kernel's own launcher if that is known."""
    compiled = types.SimpleNamespace(run=launcher, function="f", packed_metadata="m")
    kernel, launch = made(kernel=Kernel(made=compiled))
    for _ in range(2):
        launch.run(X, None)
    if between is None:
        assert len(kernel.launched) == 2
        assert launch.direct() is None
    else:
        assert len(kernel.launched) == 1
        assert launcher.calls == [
            (3, 1, 1, 0, "f", *between, "m", None, None, None, X.data_ptr(), None, 7, 16)
        ]
        function, before, after = launch.direct()
        function(*before[:3], 0, *before[3:], X.data_ptr(), None, *after)
        assert launcher.calls[0] == launcher.calls[1]


def test_another_thread_may_launch_whatever_has_been_stored_so_far():
    """The first launch of a kernel stores its launcher; here another launch follows each store at once."""
    launcher = Launcher36()
    kernel = Kernel(made=types.SimpleNamespace(run=launcher, function="f", packed_metadata="m"))

    class Interrupted(Launch):
        is_made = False

        def __setattr__(self, name, value):
            super().__setattr__(name, value)
            if self.is_made:
                self.run(X)

    launch = Interrupted(kernel, 3, 4, number=7, BLOCK=16)
    Interrupted.is_made = True
    launch.run(X)
    assert len(kernel.launched) + len(launcher.calls) == 2


@triton.jit
def _scaled_copy_kernel(x_ptr, y_ptr, TIMES: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(y_ptr + i, tl.load(x_ptr + i) * TIMES)


@pytest.mark.gpu
def test_kernels_are_compiled_when_the_rehearsal_ends(monkeypatch, tmp_path):
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    compiled = []

    def compiles(fn, **_):
        if fn.name.endswith("_scaled_copy_kernel"):
            compiled.append(fn)

    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", compiles)
    x, y = torch.arange(64.0, device="cuda"), torch.full((64,), torch.nan, device="cuda")
    launches = [Launch(_scaled_copy_kernel, 1, 1, TIMES=times, BLOCK=64) for times in range(2, 6)]

    def all_of_them():
        for launch in launches:
            launch.run(x, y)

    rehearse(all_of_them, x.device)
    assert y.isnan().all()
    assert len(compiled) == len(launches)
    for times, launch in zip(range(2, 6), launches, strict=True):
        launch.run(x, y)
        assert torch.equal(y, x * times)
    assert len(compiled) == len(launches)
