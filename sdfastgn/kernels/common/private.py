"""Private names of PyTorch that a version of PyTorch may lack, each with a replacement for that case.

A private name is used if PyTorch has no public function for the same purpose, or if the public function takes
microseconds and the private one nanoseconds. If a version of PyTorch lacks the private name, most
replacements give the same results, but less speed. For example, calls then go through PyTorch's dispatcher.
Some replacements do less. Without ``_scaled_mm`` there is no FP8. Without some functions that read switches
of PyTorch, such as whether flash attention is on, a change of the switch is not noticed (``_SWITCHES``). Then
a CUDA graph that was captured before the change is still replayed.

Private names of Triton are in ``launch.py``, ``compile_ahead.py``, ``failures.py`` and ``archive.py``.
Private attributes that every ``nn.Module`` has, such as ``_parameters``, are used where they are needed.
"""

from __future__ import annotations

import contextlib
import operator
import types
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.utils._device as _device_modes
from torch import Tensor, nn
from torch.autograd import forward_ad as _autograd_forward_ad
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import attention
from torch.nn.modules import module as nn_module
from torch.nn.utils import parametrize

_C: Any = torch._C

# ---- whether a call needs the dispatcher: modes, tracing, transforms, hooks


class _OldStyle(torch.autograd.Function):
    """An ``autograd.Function`` whose ``apply`` raises RuntimeError inside torch.func transforms.

    Transforms refuse this class because it has no ``setup_context``. ``_is_refused`` uses the class to find
    out whether a transform is active.
    """

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
    """Replaces the module ``torch.autograd.forward_ad`` if the module has no ``_current_level``.

    The property ``_current_level`` tries to make a dual tensor, which succeeds only inside forward-mode AD.
    The property is 0 if this succeeds, else -1.
    """

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


# Returns the number of active ``TorchDispatchMode``s. If PyTorch lacks the private function, the result is
# always 1, because a mode may be active.
dispatch_modes: Callable[[], int] = getattr(_C, "_len_torch_dispatch_stack", lambda: 1)
# Returns True inside a ``TorchFunctionMode``.
_in_any_function_mode: Callable[[], bool] = getattr(
    _C, "_is_torch_function_mode_enabled", lambda: torch.overrides.has_torch_function((None,))
)
# Returns all active ``TorchFunctionMode``s. If PyTorch lacks the private function, the result is [None]. None
# stands for one unknown mode.
_function_modes: Callable[[], list[Any]] = getattr(
    torch.overrides, "_get_current_function_mode_stack", lambda: [None]
)
# Class of the ``TorchFunctionMode`` of ``torch.set_default_device`` and ``with torch.device(...)``.
_DefaultDevice: Any = getattr(_device_modes, "DeviceContext", None)
# Returns True inside ``torch.jit.trace``.
is_tracing: Callable[[], bool] = getattr(_C, "_is_tracing", torch.jit.is_tracing)
# Returns something other than None inside a torch.func transform.
in_transform: Callable[[], Any] = getattr(
    getattr(_C, "_functorch", None), "peek_interpreter_stack", lambda: _is_refused() or None
)
# Returns True for a gradient that ``torch.autograd.grad(..., is_grads_batched=True)`` passes to a backward.
is_batched: Callable[[Tensor], bool] = getattr(
    getattr(_C, "_functorch", None), "is_legacy_batchedtensor", _has_no_memory
)
# The module ``torch.autograd.forward_ad``, of which only the attribute ``_current_level`` is used. This
# attribute is negative outside of forward-mode AD.
forward_ad: Any = _autograd_forward_ad if hasattr(_autograd_forward_ad, "_current_level") else _ForwardAD()
# Returns True if autocast is on for any device. If PyTorch lacks the private function, the result is always
# True, because autocast may be on.
any_autocast: Callable[[], bool] = getattr(_C, "_is_any_autocast_enabled", lambda: True)

# Returns the active hooks of ``torch.autograd.graph.saved_tensors_hooks``, or None. If PyTorch lacks the
# private function, the result is always True, because there may be hooks.
_saved_tensors_hooks: Callable[[bool], Any] = getattr(
    getattr(_C, "_autograd", None), "_top_saved_tensors_default_hooks", lambda ignores_tracing: True
)


def in_function_mode() -> bool:
    """True inside a ``TorchFunctionMode``, except modes that only choose a default device."""
    return _in_any_function_mode() and not all(type(mode) is _DefaultDevice for mode in _function_modes())


def default_device() -> torch.device | None:
    """Returns PyTorch's default device if a ``TorchFunctionMode`` is active, else None.

    ``torch.set_default_device`` activates such a mode.
    """
    return torch.get_default_device() if _in_any_function_mode() else None


def has_saved_tensors_hooks() -> bool:
    """True inside ``torch.autograd.graph.saved_tensors_hooks``.

    Also True if this version of PyTorch cannot tell.
    """
    return bool(_saved_tensors_hooks(True))


def is_compiled(module: nn.Module) -> bool:
    """True if ``module.compile()`` was called."""
    return getattr(module, "_compiled_call_impl", None) is not None


def _has_a_global_hook() -> bool:
    """True if any of the dictionaries of global hooks in ``torch.nn.modules.module`` has an entry."""
    found = (value for name, value in vars(nn_module).items() if name.startswith("_global_"))
    return any(value for value in found if isinstance(value, dict))


# Returns True if there is a global hook, which runs in every module (``register_module_forward_hook``).
has_any_global_hook: Callable[[], bool] = getattr(nn_module, "_has_any_global_hook", _has_a_global_hook)


class _Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


def _gives_one_twice() -> bool:
    """True if ``parametrize.cached()`` is active: two reads of a parametrized weight give the same tensor."""
    probe = nn.LayerNorm(1)  # creating a LayerNorm draws no numbers from the user's random generator
    parametrize.register_parametrization(probe, "weight", _Doubled())
    return probe.weight is probe.weight


# Returns True inside ``torch.nn.utils.parametrize.cached()``.
caches_parametrizations: Callable[[], bool] = (
    (lambda: bool(parametrize._cache_enabled))  # read anew at each call: ``cached()`` changes it
    if hasattr(parametrize, "_cache_enabled")
    else _gives_one_twice
)

# ---- functions of ``torch.nn.functional``, which stay the same if a user replaces them in that module

_nn: Any = getattr(_C, "_nn", None)
# PyTorch's own ``linear`` and ``scaled_dot_product_attention``, which ``torch.nn.functional`` has until a
# user replaces them. If PyTorch lacks the private name, the op in ``torch.ops.aten`` is called, which takes a
# microsecond longer.
linear: Callable[..., Tensor] = getattr(_nn, "linear", torch.ops.aten.linear.default)
scaled_dot_product_attention: Callable[..., Tensor] = getattr(
    _nn, "scaled_dot_product_attention", torch.ops.aten.scaled_dot_product_attention.default
)

# ---- the GPU

# Maps a GPU's index to the raw handle of the GPU's current stream. A CPU build of PyTorch lacks the private
# function.
current_raw_stream: Callable[[int], int] = getattr(
    _C, "_cuda_getCurrentRawStream", lambda index: torch.cuda.current_stream(index).cuda_stream
)
# Returns the index of the current GPU. A CPU build of PyTorch lacks the private function.
current_device: Callable[[], int] = getattr(_C, "_cuda_getDevice", torch.cuda.current_device)
# Occupies the GPU's current stream for a number of clock cycles. Does nothing if PyTorch lacks ``_sleep``.
sleep: Callable[[int], object] = getattr(torch.cuda, "_sleep", lambda cycles: None)


def end_pool(device: int, pool: Any) -> bool:
    """Stop ``device`` from allocating in the memory pool ``pool`` after the capture of a CUDA graph failed.

    Returns False if ``device`` had already stopped, or if this version of PyTorch cannot stop it.
    """
    try:
        _C._cuda_endAllocateToPool(device, pool)
    except (AttributeError, RuntimeError):
        return False
    _C._cuda_releasePool(device, pool)
    return True


# ---- tensors and their memory

# Reference count of a storage that only one tensor uses. The tensor holds one reference. The object from
# ``untyped_storage()``, which is needed to read the count, holds the other one.
_UNSHARED = 2

_use_count: Callable[[Any], int] | None = getattr(_C, "_storage_Use_Count", None)
_new_with_weak_ptr: Callable[[int], Any] | None = getattr(torch.UntypedStorage, "_new_with_weak_ptr", None)
# ``is_expired(expiring(reference))`` is True once the memory that a StorageWeakRef refers to is freed. There
# are two functions, because ``is_expired`` is called often and must be fast. ``expiring`` is called only once
# for each reference.
is_expired: Callable[[Any], bool]
expiring: Callable[[StorageWeakRef], Any]
if hasattr(torch.UntypedStorage, "_expired"):
    is_expired, expiring = torch.UntypedStorage._expired, operator.attrgetter("cdata")  # type: ignore[assignment]
else:
    is_expired, expiring = StorageWeakRef.expired, lambda reference: reference


# Returns a tensor's version: the number of writes into it that PyTorch has counted.
version_of: Callable[[Tensor], int] = operator.attrgetter("_version")


def is_alone(tensor: Tensor) -> bool:
    """True if no other tensor shares the memory of ``tensor``.

    Then code may rearrange or exchange the memory without changing the values of another tensor. False if
    this version of PyTorch cannot tell.
    """
    if _use_count is None or _new_with_weak_ptr is None:
        return False
    storage = tensor.untyped_storage()
    return _use_count(storage._cdata) == _UNSHARED


def refers_to(reference: StorageWeakRef, tensor: Tensor) -> bool:
    """True if the StorageWeakRef ``reference`` refers to the storage that ``tensor`` has now."""
    return reference.cdata == tensor.untyped_storage()._cdata


def revived(reference: StorageWeakRef) -> torch.UntypedStorage | None:
    """Returns the storage that the StorageWeakRef ``reference`` refers to.

    Returns None if the storage is freed, or if this version of PyTorch cannot find it.
    """
    return None if _new_with_weak_ptr is None else _new_with_weak_ptr(reference.cdata)


def _copy_one_by_one(targets: list[Tensor], sources: list[Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


# ``copy_each(targets, sources)`` copies each source into the target with the same index.
copy_each: Callable[[list[Tensor], list[Tensor]], object] = getattr(torch, "_foreach_copy_", _copy_one_by_one)


def _dense_memory_format(u: Tensor) -> torch.memory_format:
    last = torch.channels_last if u.dim() == 4 else torch.channels_last_3d
    return last if u.is_contiguous(memory_format=last) else torch.contiguous_format


# Returns the memory format that the strides of a 4-d or 5-d tensor have. If PyTorch lacks the private
# function, the replacement finds channels-last only in tensors without gaps in memory.
suggest_memory_format: Callable[[Tensor], torch.memory_format] = getattr(
    getattr(torch, "_prims_common", None), "suggest_memory_format", _dense_memory_format
)


def _empty_on(device: str) -> Callable[..., Tensor]:
    return lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype, device=device)


def _moved_view(t: Tensor, size: Any, stride: Any, more: int) -> Tensor:
    return t.as_strided(size, stride, t.storage_offset() + more)


_guards: Any = getattr(getattr(_C, "_dynamo", None), "guards", None)
# For each type of device, a function ``f(size, stride, dtype)`` that allocates a tensor on the current device
# of this type. The private functions take 1 us less, because they go through neither an argument parser nor
# the dispatcher.
allocators: dict[str, Callable[..., Tensor]] = {
    kind: getattr(_guards, f"_empty_strided_{kind}", _empty_on(kind)) for kind in ("cpu", "cuda")
}
# ``view_at(t, size, stride, more)`` returns a view of the memory of t that begins ``more`` elements after the
# start of t. The private function takes 0.6 us less than ``as_strided``, and does not check whether the view
# stays inside of the memory.
view_at: Callable[..., Tensor] = getattr(_guards, "_reinterpret_tensor", _moved_view)

# ---- ops of PyTorch

# Objects whose attributes are PyTorch's functions and methods. ``torch`` and ``Tensor`` wrap some functions
# in Python code, and users replace functions there. The private objects have the functions without such code,
# and nobody replaces functions there.
_namespaces: tuple[Any, ...] = (
    getattr(_C, "_VariableFunctions", torch),
    getattr(_C, "_nn", nn.functional),
    getattr(_C, "TensorBase", Tensor),
)
# Types of functions that are not written in Python.
_BUILT_IN = (types.BuiltinFunctionType, types.MethodDescriptorType)


def binding_of(op: Any) -> Callable[..., Any] | None:
    """Returns the function or method of PyTorch that has the name of ``op``, or None if there is none.

    ``op``: an ``OpOverload``, such as ``torch.ops.aten.add.Tensor``.

    A call of the function takes 0.3 to 4 us less than a call of ``op``. If the function does not accept the
    arguments of ``op``, it raises TypeError before it computes anything.
    """
    space, name = op.name().split("::")
    if space != "aten" or name.endswith("out"):
        return None
    name = name.split(".")[0]
    found = (getattr(place, name, None) for place in _namespaces)
    return next((function for function in found if isinstance(function, _BUILT_IN)), None)


# ---- switches that decide which kernels PyTorch runs

_cuda: Any = torch.backends.cuda
_cudnn: Any = torch.backends.cudnn
# (backend, operation) of each of PyTorch's switches for the precision of fp32 arithmetic, such as TF32.
_PRECISIONS = (("generic", "all"), ("cuda", "all"), ("cuda", "matmul"), ("cuda", "conv"))
# Maps the name of a switch to a public function that reads the switch. This function is called if PyTorch
# lacks the private ``torch._C._get_<name>``. If no public function reads the switch, ``tuple`` stands here,
# which always returns (). Then changes of the switch are not noticed.
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
    """Values of PyTorch's public switches for the precision of fp32 arithmetic.

    Returns the values of ``allow_tf32`` for matrix products and for cuDNN. PyTorch after 2.8 also has
    ``fp32_precision``. Once a program has set ``fp32_precision``, reading ``allow_tf32`` may raise an error.
    Then the values of ``fp32_precision`` are returned instead.
    """
    try:
        return _cuda.matmul.allow_tf32, _cudnn.allow_tf32
    except RuntimeError:
        return tuple(place.fp32_precision for place in _precision_places())


def _precision_places() -> tuple[Any, ...]:
    """PyTorch's objects with an attribute ``fp32_precision``, the most general one first.

    Empty in PyTorch 2.8, which has no such attribute. If the value of an object is "none", the value
    of a more general object applies.
    """
    if not hasattr(torch.backends, "fp32_precision"):
        return ()
    return torch.backends, _cudnn, _cudnn.conv, _cudnn.rnn, _cuda.matmul


@contextlib.contextmanager
def tf32(*, convolutions: bool, products: bool) -> Iterator[None]:
    """A context that allows or forbids TF32 on the GPU, in all threads. Its end restores every switch.

    Args:
        convolutions: True to let cuDNN's convolutions use TF32.
        products: True to let matrix products use TF32.

    If PyTorch has the newer switches (``fp32_precision``), only these are set, because setting the older ones
    (``allow_tf32``) would overwrite them. Inside the context, reading an older switch may then raise an
    error.
    """
    places = _precision_places()
    if not places:
        older = _cudnn.allow_tf32, torch.get_float32_matmul_precision()
        _cudnn.allow_tf32, _cuda.matmul.allow_tf32 = convolutions, products
        try:
            yield
        finally:
            _cudnn.allow_tf32 = older[0]
            # ``set_float32_matmul_precision`` also restores ``matmul.allow_tf32``.
            torch.set_float32_matmul_precision(older[1])
        return
    before = []
    for place in places:
        before.append(place.fp32_precision)
        # If ``fp32_precision`` of an object is "none", reading it returns the value of a more general object.
        # The loop has already set the more general objects to "none", so it reads and saves "none" here.
        place.fp32_precision = "none"
    try:
        # ``rnn`` gets the value of ``conv`` too, because reading ``_cudnn.allow_tf32`` raises an error if the
        # two differ.
        _cudnn.conv.fp32_precision = _cudnn.rnn.fp32_precision = "tf32" if convolutions else "ieee"
        _cuda.matmul.fp32_precision = "tf32" if products else "ieee"
        yield
    finally:
        for place, value in zip(places, before, strict=True):
            place.fp32_precision = value


_precision = getattr(_C, "_get_fp32_precision_getter", None)
# Functions without arguments. Each returns one setting on which PyTorch's choice of kernels depends.
switches: tuple[Callable[[], Any], ...] = (
    *((partial(_precision, *names) for names in _PRECISIONS) if _precision else (_precisions,)),
    *(getattr(_C, f"_get_{name}", public) for name, public in _SWITCHES.items()),
    # This function returns the active version of flash attention, such as FA3. PyTorch 2.8 lacks it.
    getattr(attention, "current_flash_attention_impl", tuple),
)
# Returns the order in which PyTorch tries the backends of scaled_dot_product_attention.
sdp_priority_order: Callable[[], Any] = getattr(_C, "_get_sdp_priority_order", tuple)

# ---- matrix products in 8 bits

# Multiplies two matrices in E4M3, each with a scale. None if this version of PyTorch lacks the function.
scaled_mm: Callable[..., Tensor] | None = getattr(torch, "_scaled_mm", None)

# ---- tracing and recording calls of models

# A context in which ops arrive at a ``TorchDispatchMode`` before autograd splits them into other ops. For
# example, ``linear`` arrives as one op. The replacement ``inference_mode`` does the same. But the code of a
# model can notice inference mode, and so can its callers, because the results are inference tensors.
below_autograd: Callable[[], Any] = getattr(_C, "_AutoDispatchBelowAutograd", torch.inference_mode)
# Makes a tensor of a subclass of Tensor with a shape, strides, dtype and device, but without memory. The
# guide to subclasses in PyTorch's documentation uses this function. No public function does the same.
make_wrapper: Callable[..., Tensor] = Tensor._make_wrapper_subclass
# If this function is the ``__torch_function__`` of a subclass of Tensor, PyTorch's functions treat tensors of
# the subclass like ordinary tensors.
disabled_torch_function: Any = _C._disabled_torch_function_impl
# Returns the signature of an op: names and types of its arguments, and which arguments the op writes.
schema_of: Callable[[Any], Any] = operator.attrgetter("_schema")


def is_composite(op: Any) -> bool:
    """True if PyTorch has one kernel of ``op`` for all devices, which only calls other ops."""
    return _C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd")


def run_composite(op: Any, args: Any, kwargs: Any) -> Any:
    """Runs PyTorch's own kernel of a composite op, which calls other ops.

    The public ``decompose`` prefers a decomposition in Python, which splits more ops into others, for example
    upsampling.
    """
    return op._op_dk(_C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)


def fake_tensor_mode() -> Any:
    """Returns a mode in which ops compute shapes, strides, dtypes and devices, but no values."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode()


def is_of_fake_tensors(error: Exception) -> bool:
    """True if ``error`` is one of the errors of PyTorch's fake tensors.

    Such errors are raised if an op's result depends on the values of tensors, or if PyTorch does not know how
    to compute the result's shape.
    """
    return type(error).__module__ == "torch._subclasses.fake_tensor"


def storage_of(t: Tensor) -> int:
    """Returns a number that is equal for tensors with the same storage, also for those on the meta device."""
    return t.untyped_storage()._cdata
