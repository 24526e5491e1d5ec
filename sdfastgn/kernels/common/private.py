"""The private names of PyTorch that this package uses, and what stands for one that a version lacks.

They cost nanoseconds where the public way costs microseconds, or there is no public way. Without
one a call is slower, or goes through PyTorch's dispatcher, is not captured or not packed; it is
never wrong. Triton's are in ``launch.py`` and ``compile_ahead.py``. What every ``nn.Module`` has in
its ``__dict__`` (``_parameters``, ``_forward_hooks``) is not here.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad as _autograd_forward_ad
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import attention
from torch.nn.modules import module as nn_module
from torch.nn.utils import parametrize

_C: Any = torch._C

# ---- what a call goes through the dispatcher for


class _OldStyle(torch.autograd.Function):
    """What torch.func's transforms refuse: a Function without ``setup_context``."""

    @staticmethod
    def forward(ctx: Any) -> None:
        return None


def _is_refused() -> bool:
    try:
        _OldStyle.apply()
    except RuntimeError:
        return True
    return False


class _ForwardAD:
    """Stands for ``torch.autograd.forward_ad``: a level is open if a dual tensor can be made."""

    @property
    def _current_level(self) -> int:
        try:
            _autograd_forward_ad.make_dual(torch.zeros(()), torch.zeros(()))
        except RuntimeError:
            return -1
        return 0


def _has_no_memory(t: Tensor) -> bool:
    try:
        t.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return True
    return False


# How many modes of ``__torch_dispatch__`` are active; without the name there may always be one.
dispatch_modes: Callable[[], int] = getattr(_C, "_len_torch_dispatch_stack", lambda: 1)
in_function_mode: Callable[[], bool] = getattr(
    _C, "_is_torch_function_mode_enabled", lambda: torch.overrides.has_torch_function((None,))
)
is_tracing: Callable[[], bool] = getattr(_C, "_is_tracing", torch.jit.is_tracing)
# The innermost transform of torch.func, or None.
in_transform: Callable[[], Any] = getattr(
    getattr(_C, "_functorch", None), "peek_interpreter_stack", lambda: _is_refused() or None
)
# True of the gradients that ``torch.autograd.grad(is_grads_batched=True)`` hands to a backward.
is_batched: Callable[[Tensor], bool] = getattr(
    getattr(_C, "_functorch", None), "is_legacy_batchedtensor", _has_no_memory
)
# ``forward_ad._current_level`` is negative outside of forward-mode AD.
forward_ad: Any = _autograd_forward_ad if hasattr(_autograd_forward_ad, "_current_level") else _ForwardAD()


def is_compiled(module: nn.Module) -> bool:
    """True if ``module.compile()`` was called."""
    return getattr(module, "_compiled_call_impl", None) is not None


def _has_a_global_hook() -> bool:
    found = (value for name, value in vars(nn_module).items() if name.startswith("_global_"))
    return any(value for value in found if isinstance(value, dict))


has_any_global_hook: Callable[[], bool] = getattr(nn_module, "_has_any_global_hook", _has_a_global_hook)


class _Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


def _gives_one_twice() -> bool:
    probe = nn.LayerNorm(1)  # begins without random numbers
    parametrize.register_parametrization(probe, "weight", _Doubled())
    return probe.weight is probe.weight


# True inside of ``torch.nn.utils.parametrize.cached()``.
caches_parametrizations: Callable[[], bool] = (
    (lambda: bool(parametrize._cache_enabled))  # a global variable, new at each change
    if hasattr(parametrize, "_cache_enabled")
    else _gives_one_twice
)

# ---- the GPU

# Of the device of an index. A CPU build of PyTorch has neither.
current_raw_stream: Callable[[int], int] = getattr(
    _C, "_cuda_getCurrentRawStream", lambda index: torch.cuda.current_stream(index).cuda_stream
)
current_device: Callable[[], int] = getattr(_C, "_cuda_getDevice", torch.cuda.current_device)
# Lets the GPU wait for a number of cycles.
sleep: Callable[[int], object] = getattr(torch.cuda, "_sleep", lambda cycles: None)


def end_pool(device: int, pool: Any) -> bool:
    """End what a broken capture allocates from ``pool``; False if that has ended, or cannot be."""
    try:
        _C._cuda_endAllocateToPool(device, pool)
    except (AttributeError, RuntimeError):
        return False
    _C._cuda_releasePool(device, pool)
    return True


# ---- tensors and their memory

# A storage that belongs to one tensor alone: that one, and the Python object through which the
# count is asked.
_UNSHARED = 2

_use_count: Callable[[Any], int] | None = getattr(_C, "_storage_Use_Count", None)
_new_with_weak_ptr: Callable[[int], Any] | None = getattr(torch.UntypedStorage, "_new_with_weak_ptr", None)
# ``is_expired(expiring(reference))``: true once the memory of a StorageWeakRef is gone.
is_expired: Callable[[Any], bool]
expiring: Callable[[StorageWeakRef], Any]
if hasattr(torch.UntypedStorage, "_expired"):
    is_expired, expiring = torch.UntypedStorage._expired, operator.attrgetter("cdata")  # type: ignore[assignment]
else:
    is_expired, expiring = StorageWeakRef.expired, lambda reference: reference


def is_alone(tensor: Tensor) -> bool:
    """True if nothing else has the memory of ``tensor``, which then may be moved. False if unknown."""
    if _use_count is None or _new_with_weak_ptr is None:
        return False
    storage = tensor.untyped_storage()
    return _use_count(storage._cdata) == _UNSHARED


def revived(reference: StorageWeakRef) -> torch.UntypedStorage | None:
    """The storage that is referred to, or None if it is gone."""
    return None if _new_with_weak_ptr is None else _new_with_weak_ptr(reference.cdata)


def _copy_one_by_one(targets: list[Tensor], sources: list[Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


copy_each: Callable[[list[Tensor], list[Tensor]], object] = getattr(torch, "_foreach_copy_", _copy_one_by_one)


def _dense_memory_format(u: Tensor) -> torch.memory_format:
    last = torch.channels_last if u.dim() == 4 else torch.channels_last_3d
    return last if u.is_contiguous(memory_format=last) else torch.contiguous_format


# Of a 4-d or 5-d tensor, by its strides; the public way knows those of dense memory alone.
suggest_memory_format: Callable[[Tensor], torch.memory_format] = getattr(
    getattr(torch, "_prims_common", None), "suggest_memory_format", _dense_memory_format
)


# ---- switches that decide which kernels PyTorch runs

_cuda: Any = torch.backends.cuda
_cudnn: Any = torch.backends.cudnn
# (backend, operation) of each switch for fp32 arithmetic, TF32 among them.
_PRECISIONS = (("generic", "all"), ("cuda", "all"), ("cuda", "matmul"), ("cuda", "conv"))
# By the private name, the public way to ask. ``tuple`` where there is none: such a switch goes unseen.
_SWITCHES: dict[str, Callable[[], Any]] = {
    "cudnn_enabled": lambda: _cudnn.enabled,
    "cudnn_benchmark": lambda: _cudnn.benchmark,
    "cudnn_deterministic": lambda: _cudnn.deterministic,
    "cublas_allow_fp16_reduced_precision_reduction": (
        lambda: _cuda.matmul.allow_fp16_reduced_precision_reduction
    ),
    "cublas_allow_bf16_reduced_precision_reduction": (
        lambda: _cuda.matmul.allow_bf16_reduced_precision_reduction
    ),
    "cublas_allow_fp16_accumulation": lambda: _cuda.matmul.allow_fp16_accumulation,
    "blas_preferred_backend": _cuda.preferred_blas_library,
    "flash_sdp_enabled": _cuda.flash_sdp_enabled,
    "mem_efficient_sdp_enabled": _cuda.mem_efficient_sdp_enabled,
    "math_sdp_enabled": _cuda.math_sdp_enabled,
    "cudnn_sdp_enabled": _cuda.cudnn_sdp_enabled,
    "math_sdp_allow_fp16_bf16_reduction": _cuda.fp16_bf16_reduction_math_sdp_allowed,
    "overrideable_sdp_enabled": tuple,
    "fa3_sdp_enabled": tuple,
}


def _precisions() -> tuple[Any, ...]:
    """The switches for fp32 arithmetic by their public names: allow_tf32 (PyTorch 2.8), or the newer ones.

    The older name raises once someone has set a newer one.
    """
    try:
        return _cuda.matmul.allow_tf32, _cudnn.allow_tf32
    except RuntimeError:
        return tuple(place.fp32_precision for place in _precision_places())


def _precision_places() -> tuple[Any, ...]:
    """What has the newer switches, outermost first: one that is "none" has the value of those before it.

    Nothing in PyTorch 2.8.
    """
    if not hasattr(torch.backends, "fp32_precision"):
        return ()
    return torch.backends, _cudnn, _cudnn.conv, _cudnn.rnn, _cuda.matmul


@contextlib.contextmanager
def tf32(*, convolutions: bool, products: bool) -> Iterator[None]:
    """Allows or forbids TF32 on the GPU, in all threads. Afterwards every switch is as it was.

    Args:
        convolutions: whether cuDNN's may use it.
        products: whether matrix products may.

    The older switches are left alone where there are newer ones: to read one of the older may raise
    after a newer was set, and to set one loses what a newer was. So they may raise inside as well.
    """
    places = _precision_places()
    if not places:
        older = _cudnn.allow_tf32, torch.get_float32_matmul_precision()
        _cudnn.allow_tf32, _cuda.matmul.allow_tf32 = convolutions, products
        try:
            yield
        finally:
            _cudnn.allow_tf32 = older[0]
            torch.set_float32_matmul_precision(older[1])  # matmul.allow_tf32 is a part of it
        return
    before = []
    for place in places:
        before.append(place.fp32_precision)
        place.fp32_precision = "none"  # so that the next one's value is its own
    try:
        # The older switch of cuDNN can only be read where both of these agree.
        _cudnn.conv.fp32_precision = _cudnn.rnn.fp32_precision = "tf32" if convolutions else "ieee"
        _cuda.matmul.fp32_precision = "tf32" if products else "ieee"
        yield
    finally:
        for place, value in zip(places, before, strict=True):
            place.fp32_precision = value


_precision = getattr(_C, "_get_fp32_precision_getter", None)
switches: tuple[Callable[[], Any], ...] = (
    *((partial(_precision, *names) for names in _PRECISIONS) if _precision else (_precisions,)),
    *(getattr(_C, f"_get_{name}", public) for name, public in _SWITCHES.items()),
    # Which flash attention was activated: FA3, FA4 or one that was registered. Public, but new.
    getattr(attention, "current_flash_attention_impl", tuple),
)
sdp_priority_order: Callable[[], Any] = getattr(_C, "_get_sdp_priority_order", tuple)
