"""Where Triton cannot compile: one warning with the cause, and every call right in plain PyTorch.

If no kernel can run, all kernels are turned off. If one kernel cannot be compiled, its op is.
"""

import ast
import json
import os
import subprocess
import sys
import warnings
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from triton.compiler.errors import CompilationError
from triton.runtime import interpreter, jit
from triton.runtime.errors import InterpreterError, OutOfResources, PTXASError

import sdfastgn
from sdfastgn.kernels.attention import wide_heads
from sdfastgn.kernels.attention.few_keys import attend_to_few
from sdfastgn.kernels.attention.over_frames import attend_over_frames
from sdfastgn.kernels.attention.wide_heads import wide_attention
from sdfastgn.kernels.checksum.op import checksums
from sdfastgn.kernels.common import compile_ahead, dispatch, failures, gpu
from sdfastgn.kernels.common.launch import Launch
from sdfastgn.kernels.layer_norm.grouped import Groups, grouped_layer_norm
from sdfastgn.kernels.low_rank.op import Factors, Sum, add_low_rank
from sdfastgn.kernels.pad_frames.op import Norm, pad_frames
from sdfastgn.kernels.upsample import conv
from sdfastgn.patches.layers import statistics
from tests.kernels.ops import as_tuple, each_derivative, each_op
from tests.kernels.samples import channels_last, interpreted, kernels

ROOT = Path(__file__).parents[3]
NO_COMPILER = RuntimeError("Failed to find C compiler. Please specify via CC environment variable")
TOO_LARGE = OutOfResources(300_000, 232_448, "shared memory")


@pytest.fixture(autouse=True)
def kernels_on_again(monkeypatch):
    monkeypatch.setattr(dispatch, "why_off", None)
    yield
    dispatch.ops_off.clear()


@pytest.fixture
def broken(monkeypatch):
    """``broken(error, after)``: so many launches work, and then all raise."""
    launch = interpreter.GridExecutor.__call__

    def break_it(error, after=0):
        count = iter(range(10**6))

        def call(self, *args, **kwargs):
            if next(count) >= after:
                raise error
            return launch(self, *args, **kwargs)

        monkeypatch.setattr(interpreter.GridExecutor, "__call__", call)

    return break_it


def norm(size=4, **operands):
    x = torch.randn(2, 6, size, size)
    with kernels(direct=True):
        y = sdfastgn.group_norm(x, 3, **operands)
    torch.testing.assert_close(y, torch.nn.functional.group_norm(x, 3))


def norm_twice():
    for _ in range(2):
        norm()


# --- what is a failure, and what is not -----------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (NO_COMPILER, "C compiler"),
        (subprocess.CalledProcessError(1, ["gcc", "launcher.c"]), "gcc"),
        (NotADirectoryError(20, "Not a directory", "/dev/null/cache"), "/dev/null/cache"),
        (ImportError("launcher.so: failed to map segment"), "failed to map"),
        (RuntimeError("Triton Error [CUDA]: device kernel image is invalid"), "kernel image"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
@interpreted
def test_no_kernel_can_run(error, says, broken):
    broken(error)
    with pytest.warns(UserWarning, match=r"Triton cannot compile \w+_kernel here .*" + says) as seen:
        norm_twice()
    assert len(seen) == 1
    assert says in dispatch.why_off
    assert not dispatch.ops_off


OF_A_KERNEL = [
    (CompilationError("x = 1", ast.parse("x = 1"), "no such shape"), "no such shape"),
    (TOO_LARGE, "shared memory"),
    (PTXASError("Internal Triton PTX codegen error"), "PTX codegen"),
    (RuntimeError("PassManager::run failed"), "PassManager"),
]


@pytest.mark.parametrize(
    ("error", "says"),
    OF_A_KERNEL,
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
@interpreted
def test_a_kernel_that_cannot_be_compiled(error, says, broken):
    broken(error)
    warned = r"Triton cannot compile \w+_kernel here .*" + says + ".* group_norm runs in plain PyTorch on cpu"
    with pytest.warns(UserWarning, match=warned) as seen:
        [norm(size) for size in (4, 4, 8)]
    assert len(seen) == 1
    assert dispatch.why_off is None
    ((key, reason),) = dispatch.ops_off.items()
    assert key == ("group_norm", -1)
    assert says in reason


@pytest.mark.parametrize(
    "error",
    [
        TypeError("a bug"),
        RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
        RuntimeError("Global variable X has changed since we compiled this kernel"),
        InterpreterError("a bug"),
        torch.OutOfMemoryError("CUDA out of memory"),
    ],
    ids=repr,
)
@interpreted
def test_any_other_error_comes_through(error, broken, recwarn):
    broken(error)
    with pytest.raises(type(error)) as seen:
        norm()
    assert seen.value is error
    assert (dispatch.why_off, dispatch.ops_off, recwarn.list) == (None, {}, [])


@interpreted
def test_a_gpu_that_is_too_old(monkeypatch):
    monkeypatch.setattr(gpu, "unsupported", lambda device: "GTX 1080 is sm_61, and the kernels need sm_75")
    with pytest.warns(UserWarning, match="GTX 1080 is sm_61") as seen:
        norm_twice()
    assert len(seen) == 1


@pytest.mark.parametrize(("capability", "supported"), [((6, 1), False), ((7, 0), False), ((7, 5), True)])
def test_the_oldest_gpu(capability, supported, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    reason = gpu.unsupported(torch.device("cuda", 0))
    assert (reason is None) is supported
    assert supported or f"sm_{capability[0]}{capability[1]}" in reason


# --- every op, whichever of its kernels it is -----------------------------------------------------


@pytest.fixture
def however_small(monkeypatch):
    """Kernels that pay for large images alone run here too."""
    monkeypatch.setattr(wide_heads, "pays", lambda *sizes: True)
    monkeypatch.setattr(conv, "phases_pay", lambda *sizes: True)


each_error = pytest.mark.parametrize("error", [NO_COMPILER, TOO_LARGE], ids=["machine", "kernel"])


def turn_on():
    dispatch.why_off = None
    dispatch.ops_off.clear()


@pytest.mark.drawn(13)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@each_error
@each_op
@interpreted
def test_every_op_is_right(op, error, dtype, broken, however_small):
    operands = {name: channels_last(t) for name, t in op.operands(dtype).items()}
    with kernels(direct=True):
        expected = op.call(**operands)
        for after in range(3):
            turn_on()
            broken(error, after)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                for _ in range(2):
                    torch.testing.assert_close(op.call(**operands), expected, atol=5e-3, rtol=5e-3)
            # fp32 attention has no kernel.
            is_off = dispatch.why_off if error is NO_COMPILER else dispatch.ops_off
            assert after or is_off or (dtype, op.function) == (torch.float32, wide_attention)
            assert error is NO_COMPILER or dispatch.why_off is None


@pytest.mark.drawn(7)
@pytest.mark.parametrize("direct", [True, False], ids=["direct", "dispatcher"])
@each_error
@each_derivative
@interpreted
def test_every_gradient_is_right(op, error, direct, broken):
    def gradients():
        operands = {name: t.requires_grad_() for name, t in op.operands(torch.float32).items()}
        outputs = [y for y in as_tuple(op.call(**operands)) if y.requires_grad]
        dy = [torch.linspace(-1, 1, y.numel()).view(y.shape) for y in outputs]
        return torch.autograd.grad(outputs, operands.values(), dy)

    expected = gradients()
    with kernels(direct=direct):
        for after in range(4):  # in the forward, and in the backward
            turn_on()
            broken(error, after)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                for _ in range(2):
                    torch.testing.assert_close(gradients(), expected, atol=1e-4, rtol=1e-4)


@each_op
@interpreted
def test_other_ops_keep_their_kernels(op, broken, monkeypatch, however_small):
    """The op that fails is named, it tries no second time, and the launches of all others go on."""
    x = torch.randn(2, 6, 4, 4)
    operands = {name: channels_last(t) for name, t in op.operands(torch.float16).items()}
    with kernels(direct=True):
        broken(TOO_LARGE)
        with pytest.warns(UserWarning, match="keep their kernels"):
            op.call(**operands)
        assert sdfastgn.report(torch.nn.Linear(1, 1)).without_kernels.keys() == {
            f"{name} on cpu" for name, _ in dispatch.ops_off
        }
        off = {name for name, _ in dispatch.ops_off}
        assert off
        broken(pytest.fail.Exception("a launch"))
        op.call(**operands)
        others = {
            "group_norm": lambda: sdfastgn.group_norm(x, 3),
            "layer_norm": lambda: sdfastgn.layer_norm(x),
        }
        for other in others.keys() - off:
            with pytest.raises(pytest.fail.Exception):
                others[other]()


OTHERS = {
    "attend_to_few": lambda: attend_to_few(*qkv()) is None,
    "attend_over_frames": lambda: attend_over_frames(*qkv(), 4),
    "grouped_layer_norm": lambda: grouped_layer_norm(
        torch.linspace(-1, 1, 32).view(4, 8), None, None, 1e-5, Groups(2, torch.ones(2, 8))
    ),
    "pad_frames": lambda: pad_frames(torch.linspace(-1, 1, 48).view(1, 2, 2, 3, 4), front=1, norm=Norm()),
    "add_low_rank": lambda: merged(),
    "checksums": lambda: checksums([torch.arange(5000), torch.arange(-7, 0)]),
    "add_with_statistics": lambda: [
        statistics.add(*images()),
        statistics.add_bias(images()[0], torch.ones(6)),
        statistics.blend(*images(), None, torch.ones(2, 2)),
    ],
    "cat_with_statistics": lambda: statistics.cat(*images()),
}


def images():
    return [channels_last(t) for t in torch.linspace(-1, 1, 96).view(2, 2, 6, 2, 2)]


def qkv():
    return torch.linspace(-3, 3, 3 * 2 * 64 * 40).sin().view(3, 1, 2, 64, 40).half()


def merged():
    weight, a, b = torch.ones(4, 8), torch.linspace(-1, 1, 16).view(2, 8), torch.linspace(0, 1, 8).view(4, 2)
    total = Sum(torch.empty(4, 8), weight, (Factors(a, b, 2.0),))
    add_low_rank([total, total._replace(weight=2 * weight)])
    return total.out


@pytest.mark.parametrize(
    "error", [error for error, _ in OF_A_KERNEL] + [NO_COMPILER], ids=lambda error: type(error).__name__
)
@pytest.mark.parametrize("name", OTHERS)
@interpreted
def test_launches_without_an_op_of_their_own(name, error, broken):
    with kernels(direct=True):
        expected = OTHERS[name]()
        broken(error)
        with pytest.warns(UserWarning, match="Triton cannot compile") as seen:
            found = [OTHERS[name]() for _ in range(2)]
    if name != "attend_to_few":  # which leaves the call to its caller
        torch.testing.assert_close(found, [expected] * 2, atol=2e-3, rtol=2e-3)
    assert len(seen) == max(1, len(dispatch.ops_off))
    assert ((name, -1) in dispatch.ops_off) is (error is not NO_COMPILER)
    # In PyTorch, a grouped LayerNorm is sums and a LayerNorm.
    assert {name for name, _ in dispatch.ops_off} <= {name, "layer_norm"}


@interpreted
def test_attention_to_few_keys_is_left_to_pytorch(broken):
    q, k = torch.randn(1, 2, 64, 40).half(), torch.randn(1, 2, 77, 40).half()
    broken(NO_COMPILER)
    with kernels(direct=True), pytest.warns(UserWarning, match="C compiler"):
        assert attend_to_few(q, k, k) is None


@pytest.mark.gpu
def test_a_failure_on_a_gpu(monkeypatch):
    x = torch.randn(3, 24, 7, 5, device="cuda")
    launch = jit.JITFunction.run

    def run(kernel, *args, **kwargs):
        if "layer_norm" not in kernel.fn.__module__:
            raise TOO_LARGE
        return launch(kernel, *args, **kwargs)

    monkeypatch.setattr(jit.JITFunction, "run", run)
    with pytest.warns(UserWarning, match="group_norm runs in plain PyTorch on cuda:0") as seen:
        found = [sdfastgn.group_norm(x, 3) for _ in range(2)]
    torch.testing.assert_close(found, [torch.nn.functional.group_norm(x, 3)] * 2)
    rows = torch.randn(5, 24, device="cuda")
    torch.testing.assert_close(sdfastgn.layer_norm(rows), torch.nn.functional.layer_norm(rows, (24,)))
    assert len(seen) == 1
    assert list(dispatch.ops_off) == [("group_norm", 0)]
    assert dispatch.why_off is None


# --- memory ---------------------------------------------------------------------------------------


@interpreted
def test_memory_that_is_short_is_the_callers_error(broken, monkeypatch):
    with monkeypatch.context() as short:
        short.setattr(
            torch, "empty_like", lambda *_, **__: (_ for _ in ()).throw(torch.OutOfMemoryError("x"))
        )
        with pytest.raises(torch.OutOfMemoryError, match="x"):
            norm(64)
    norm(64)
    norm(4)


class Kernel:
    """Compiled once for each device, and its code finds no memory while ``is_short``."""

    __name__ = "a_kernel"
    fn = staticmethod(lambda x_ptr: None)

    def __init__(self):
        self.device_caches, self.is_short, self.launched = {None: "compiled"}, True, 0

    def __getitem__(self, grid):
        return self.warmup

    def warmup(self, *_, **__):
        self.device_caches[None] = "compiled"
        return self

    @property
    def run(self):
        if self.is_short:
            raise RuntimeError("Triton Error [CUDA]: out of memory")
        return None


def test_a_kernel_whose_code_finds_no_memory_is_loaded_again(monkeypatch):
    """Triton takes what it failed to load for loaded, and would launch nothing."""
    kernel = Kernel()
    with pytest.raises(torch.OutOfMemoryError, match="code of a kernel") as seen:
        failures.check_error(RuntimeError("Triton Error [CUDA]: out of memory"), kernel, torch.device("cpu"))
    assert isinstance(seen.value.__cause__ or seen.value.__context__, RuntimeError)
    assert (kernel.device_caches, dispatch.why_off) == ({}, None)


def test_a_rehearsal_forgets_a_kernel_that_was_not_loaded(monkeypatch):
    monkeypatch.setattr(compile_ahead.torch.cuda, "device", lambda device: nullcontext())
    kernel, device = Kernel(), torch.device("cpu", 0)
    kernel.device_caches = {0: "compiled"}
    launch = Launch(kernel, 1, 1)
    compile_ahead.rehearse(lambda: launch.run(torch.zeros(1)), device)
    assert 0 not in kernel.device_caches


# --- the machine ----------------------------------------------------------------------------------


def start(what, **environment):
    command = [sys.executable, "-m", "tests.kernels.one_call", what]
    return subprocess.Popen(
        command, cwd=ROOT, env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True
    )


def finish(process):
    output, _ = process.communicate(timeout=300)
    return json.loads(output)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "environment", "says"),
    [
        ("launcher", {"PATH": "", "TRITON_CACHE_DIR": "{folder}/cache"}, "Failed to find C compiler"),
        ("kernel", {"TRITON_CACHE_DIR": "{folder}/file/cache"}, "Not a directory"),
        pytest.param(
            "gpu", {"TRITON_CACHE_DIR": "{folder}/file/cache"}, "Not a directory", marks=pytest.mark.gpu
        ),
    ],
    ids=["no C compiler", "no folder for the cache", "no folder for the cache of a GPU"],
)
def test_a_machine_without_what_triton_needs(what, environment, says, tmp_path):
    (tmp_path / "file").touch()
    environment = {name: value.format(folder=tmp_path) for name, value in environment.items()}
    found = finish(start(what, **environment))
    assert found["right"]
    assert len(found["warnings"]) == 1
    assert says in found["warnings"][0]


@pytest.mark.slow
def test_two_processes_compile_at_once(tmp_path):
    processes = [start("kernel", TRITON_CACHE_DIR=str(tmp_path)) for _ in range(2)]
    first, second = map(finish, processes)
    assert first["warnings"] == second["warnings"] == []
    assert first["hashes"] == second["hashes"] != []
