"""Without a private name of PyTorch its stand-in says the same, or what costs speed alone."""

import contextlib
import functools
import importlib.util
import operator

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules import module as nn_module
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from sdfastgn.kernels.common import private


@pytest.fixture(params=["private", "public"])
def names(request):
    """The module as it is, and as it is where PyTorch has none of the names."""
    if request.param == "private":
        return private
    spec = importlib.util.spec_from_file_location("private_without_names", private.__file__)
    module = importlib.util.module_from_spec(spec)
    module.getattr, module.hasattr = lambda owner, name, otherwise: otherwise, lambda owner, name: False
    spec.loader.exec_module(module)
    del module.getattr, module.hasattr
    return module


def test_modes(names):
    assert not names.in_function_mode()
    with TorchFunctionMode():
        assert names.in_function_mode()
    with torch.device("meta"):
        assert names.in_function_mode() is (names is not private)
        assert names.default_device() == torch.device("meta")
        with TorchFunctionMode():
            assert names.in_function_mode()
    assert names.default_device() is None
    with TorchDispatchMode():
        assert names.dispatch_modes() > 0
    assert names is not private or names.dispatch_modes() == 0


def test_functions_that_no_change_of_nn_functional_reaches(names, monkeypatch):
    x, weight, bias = torch.randn(3, 4), torch.randn(5, 4), torch.randn(5)
    q, k, v = torch.randn(3, 2, 2, 7, 8)
    product = nn.functional.linear(x, weight, bias)
    found = nn.functional.scaled_dot_product_attention(q, k, v, None, 0.0, True, scale=0.5)
    for name in ("linear", "scaled_dot_product_attention"):
        monkeypatch.setattr(nn.functional, name, None)
    assert torch.equal(names.linear(x, weight, bias), product)
    assert torch.equal(names.scaled_dot_product_attention(q, k, v, None, 0.0, True, scale=0.5), found)


def test_transforms_and_tracing(names):
    seen = []

    def look(x):
        seen.append((names.in_transform() is not None, bool(names.is_tracing())))
        return x * 2

    look(torch.ones(2))
    for transform in (torch.func.vmap, torch.func.grad):
        transform(lambda x: look(x).sum())(torch.ones(2))
    torch.jit.trace(look, torch.ones(2), check_trace=False)
    assert seen == [(False, False), (True, False), (True, False), (False, True)]


def test_forward_mode_ad(names):
    assert names.forward_ad._current_level < 0
    with forward_ad.dual_level():
        assert names.forward_ad._current_level >= 0
    assert names.forward_ad._current_level < 0


def test_gradients_of_many_at_once(names):
    seen = []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, dy):
            seen.append(names.is_batched(dy))
            return dy * 2

    x = torch.ones(2, requires_grad=True)
    y = Look.apply(x)
    torch.autograd.grad(y, x, torch.ones(3, 2), is_grads_batched=True, retain_graph=True)
    torch.autograd.grad(y, x, torch.ones(2))
    assert seen == [True, False]


def test_global_hooks_and_compiled_modules(names):
    assert not names.has_any_global_hook()
    handle = nn_module.register_module_forward_hook(lambda *_: None)
    assert names.has_any_global_hook()
    handle.remove()
    assert not names.has_any_global_hook()
    module = nn.Linear(2, 2)
    assert not names.is_compiled(module)
    module.compile(backend="eager")
    assert names.is_compiled(module)


def test_memory(names):
    tensor = torch.empty(4)
    assert names.is_alone(tensor) == (names is private)  # what nobody knows stays where it is
    view = tensor[:2]
    assert not names.is_alone(tensor)
    reference = StorageWeakRef(tensor.untyped_storage())
    found = names.revived(reference)
    assert found is None if names is not private else found.data_ptr() == tensor.data_ptr()
    assert names.refers_to(reference, view)
    assert not names.refers_to(reference, view.clone())
    held = names.expiring(reference)
    assert not names.is_expired(held)
    del tensor, view, found
    assert names.is_expired(held)


def test_a_pool_that_cannot_be_ended(monkeypatch):
    monkeypatch.delattr(torch._C, "_cuda_endAllocateToPool", raising=False)
    assert private.end_pool(0, (0, 0)) is False


def test_copies(names):
    targets, sources = [torch.zeros(2), torch.zeros(3)], [torch.ones(2), torch.arange(3.0)]
    names.copy_each(targets, sources)
    assert all(map(torch.equal, targets, sources))


def test_memory_formats(names):
    x = torch.empty(2, 8, 4, 4)
    assert names.suggest_memory_format(x) is torch.contiguous_format
    assert names.suggest_memory_format(x.to(memory_format=torch.channels_last)) is torch.channels_last
    video = torch.empty(2, 8, 2, 4, 4, memory_format=torch.channels_last_3d)
    assert names.suggest_memory_format(video) is torch.channels_last_3d


def test_a_cache_of_parametrizations(names):
    found = [names.caches_parametrizations()]
    with parametrize.cached():
        found.append(names.caches_parametrizations())
    assert [*found, names.caches_parametrizations()] == [False, True, False]


def state(names):
    return [switch() for switch in names.switches]


@contextlib.contextmanager
def changed(owner, name, value):
    before = getattr(owner, name)
    setattr(owner, name, value)
    yield
    setattr(owner, name, before)


@pytest.mark.parametrize(
    "switch",
    [
        pytest.param(lambda: changed(torch.backends.cudnn, "enabled", False), id="cudnn"),
        pytest.param(lambda: changed(torch.backends.cuda.matmul, "allow_tf32", True), id="tf32"),
        pytest.param(
            lambda: changed(torch.backends.cuda.matmul, "allow_fp16_reduced_precision_reduction", False),
            id="fp16-sums",
        ),
        pytest.param(lambda: sdpa_kernel(SDPBackend.MATH), id="sdpa"),
    ],
)
def test_switches(names, switch):
    before = state(names)
    with switch():
        assert state(names) != before


@pytest.mark.skipif(
    not hasattr(torch.backends, "fp32_precision"), reason="PyTorch has the older switch alone"
)
def test_the_newer_switch_of_tf32(names):
    before = state(names)
    with changed(torch.backends.cuda.matmul, "fp32_precision", "tf32"):
        assert state(names) != before
        hash(tuple(state(names)))


# PyTorch 2.8 has the older switches of TF32 alone. Outermost first: one that is "none" has the value
# of those before it.
NEWER = ["fp32_precision", "cudnn.fp32_precision", "cudnn.conv.fp32_precision", "cudnn.rnn.fp32_precision",
         "cuda.matmul.fp32_precision"] if hasattr(torch.backends, "fp32_precision") else []  # fmt: skip
OLDER = ["cudnn.allow_tf32", "cuda.matmul.allow_tf32"]


def get(name):
    return operator.attrgetter(name)(torch.backends)


def put(name, value):
    owner, _, last = name.rpartition(".")
    setattr(get(owner) if owner else torch.backends, last, value)


def older_tf32():
    """What the older switches say, or that they raise: a newer one contradicts them."""
    for ask in (*(functools.partial(get, name) for name in OLDER), torch.get_float32_matmul_precision):
        try:
            yield ask()
        except RuntimeError:
            yield "raises"


def newer_tf32():
    """What each of the newer switches says by itself; all are "none" afterwards."""
    for name in NEWER:
        yield get(name)
        put(name, "none")


@pytest.fixture
def initial_tf32():
    """Puts all switches back to what they were, and does so at the end."""
    convolutions = next(older_tf32())
    newer = list(newer_tf32())

    def reset():
        torch.set_float32_matmul_precision("highest")
        torch.backends.cudnn.allow_tf32 = convolutions
        for name, value in zip(NEWER, newer, strict=True):
            put(name, value)

    reset()
    yield reset
    reset()


@pytest.mark.parametrize("allowed", [False, True])
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="initial"),
        pytest.param({"cudnn.allow_tf32": False, "cuda.matmul.allow_tf32": True}, id="older"),
        pytest.param({"cudnn.conv.fp32_precision": "ieee"}, id="conv"),
        pytest.param({"cuda.matmul.fp32_precision": "tf32"}, id="matmul"),
        pytest.param({"cuda.matmul.allow_tf32": True, "cuda.matmul.fp32_precision": "ieee"}, id="mixed"),
        pytest.param({"cudnn.conv.fp32_precision": "none", "cudnn.fp32_precision": "ieee"}, id="inherited"),
        pytest.param({"cudnn.conv.fp32_precision": "tf32", "fp32_precision": "tf32"}, id="all"),
        pytest.param({"fp32_precision": "bf16"}, id="all-bf16"),
    ],
)
def test_tf32_for_a_while(settings, allowed, initial_tf32):
    if not settings.keys() <= {*OLDER, *NEWER}:
        pytest.skip("PyTorch 2.8 has the older switches alone")

    def settle():
        initial_tf32()
        torch.set_float32_matmul_precision("medium")
        for name, value in settings.items():
            put(name, value)

    def everything():
        return [*older_tf32(), *newer_tf32()]

    settle()
    expected = everything()
    settle()
    with contextlib.suppress(LookupError), private.tf32(convolutions=allowed, products=allowed):
        inside = [get(name) for name in ((NEWER[2], NEWER[4]) if NEWER else OLDER)]
        raise LookupError
    assert inside == [("tf32" if allowed else "ieee") if NEWER else allowed] * 2
    assert everything() == expected


def test_tf32_for_a_while_by_the_older_switches(initial_tf32, monkeypatch):
    """All that PyTorch 2.8 has."""
    monkeypatch.setattr(private, "_precision_places", tuple)
    torch.set_float32_matmul_precision("medium")
    before = list(older_tf32())
    with private.tf32(convolutions=False, products=True):
        assert list(older_tf32())[:2] == [False, True]
    assert list(older_tf32()) == before
