"""LayerNorm over the last dimension, of one tensor or of a sum of tensors (residual add + LayerNorm).

The ops are ``sdfastgn::layer_norm`` and ``sdfastgn::add_layer_norm``. Formula:

    u = x, or u = x + residual + add_bias, rounded to the dtype of x
    y = (u - mean(u)) / sqrt(var(u) + eps) * weight + bias

Mean and var (the biased variance) are taken over each row of D elements.

``add_layer_norm`` also returns the sum x + residual + add_bias + total_bias, rounded once. total_bias is part
only of this returned sum, not of the sum that is normalized. For example, if a caller will add the output of
a later layer to the returned sum, it can pass the bias of the later layer as total_bias. Then no separate
pass adds that bias.

The op that is registered with PyTorch has no argument total_bias; only the kernels take it. If a call goes to
the registered op, or a gradient is wanted, plain PyTorch computes the sum with total_bias.

On a GPU the kernels of ``layer_norm/kernels.py`` run; that file explains layouts and numerics. Everywhere
else plain PyTorch runs. Gradients are in ``layer_norm/backward.py``.

Source: Ba, Kiros and Hinton, "Layer Normalization", 2016. The interface follows
torch.nn.functional.layer_norm.
"""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

from sdfastgn.kernels.common import dispatch
from sdfastgn.kernels.common.checks import as_eps
from sdfastgn.kernels.common.declaration import Gradients, Operand, even_rows
from sdfastgn.kernels.common.e4m3 import quantized
from sdfastgn.kernels.common.op import PlannedOp
from sdfastgn.kernels.common.plan_cache import named
from sdfastgn.kernels.layer_norm.backward import LAYER_NORM_BACKWARD, LayerNormGradCall
from sdfastgn.kernels.layer_norm.plain import plain_layer_norm

# --- declarations -----------------------------------------------------------------------------------


# Type of the arguments weight, bias, add_bias and total_bias: a tensor with one value for each column, or
# None.
_PerColumn = Annotated[Tensor | None, Operand("(D,)")]
_Quantizer = Annotated[Tensor | None, Operand("(8,)")]


class LayerNormCall(NamedTuple):
    """The arguments of the op ``sdfastgn::layer_norm``, and ``quantizer``.

    ``quantizer``, which has the scale for an output in E4M3, is not an argument of the op. Calls with a
    quantizer run without the op.
    """

    x: Annotated[Tensor, Operand("(..., D)", whole=even_rows)]
    weight: _PerColumn
    bias: _PerColumn
    eps: float
    out_dtype: torch.dtype | None
    # Arguments of ``add_layer_norm`` that ``layer_norm`` does not have. They are None here, so that
    # ``LayerNormPlan`` can read them from the calls of both functions.
    residual: None = None
    add_bias: None = None
    total_bias: None = None
    quantizer: _Quantizer = None


class AddCall(NamedTuple):
    """The arguments of the op ``sdfastgn::add_layer_norm``, and ``total_bias`` and ``quantizer``.

    These two are not arguments of the op. Only the kernels take them, in calls that run without the op.
    ``total_bias`` is added only to the returned sum. ``quantizer`` has the scale for an output in E4M3.
    """

    x: Annotated[Tensor, Operand("(..., D)", whole=even_rows)]
    residual: Annotated[Tensor, Operand("(..., D)", whole=even_rows, same_dtype=True)]
    weight: _PerColumn
    bias: _PerColumn
    add_bias: _PerColumn
    eps: float
    out_dtype: torch.dtype | None
    total_bias: _PerColumn = None
    quantizer: _Quantizer = None


def result_dtype(call: LayerNormCall | AddCall) -> torch.dtype:
    """The dtype of y, the result of ``call``."""
    return call.out_dtype or call.x.dtype


def _centre_dtype(result: torch.dtype) -> torch.dtype:
    """The dtype of ``centre``, the tensor in which the forward saves means: fp32 if y has 16 bits, else fp64.

    ``result``: the dtype of y. An fp32 centre is the mean minus the row's first element. An fp64 centre is
    the mean.
    """
    return torch.float32 if result.itemsize == 2 else torch.float64


def empty_saved(x: Tensor, result: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns uninitialized memory for centre and rstd, which the forward saves for the backward.

    centre gets the mean of each row, or the mean minus the row's first element. rstd gets 1 / deviation of
    each row. Both are (...) for x (..., D). ``result``: the dtype of y, on which the dtype of centre depends.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    return x.new_empty(x.shape[:-1], dtype=_centre_dtype(result)), x.new_empty(x.shape[:-1], dtype=wide)


# --- references -------------------------------------------------------------------------------------


def _reference(call: LayerNormCall) -> tuple[Tensor, Tensor, Tensor]:
    """Computes ``layer_norm`` in plain PyTorch.

    Returns y and, for the backward, ``centre`` (the mean of each row, as ``empty_saved`` explains) and
    ``rstd`` (1 / deviation).
    """
    x = call.x
    u = x.to(torch.promote_types(x.dtype, torch.float32))
    mean = u.mean(-1, keepdim=True)
    d = u - mean
    rest = d.mean(-1, keepdim=True)  # the mean of d is the rounding error of ``mean``
    d = d - rest
    rstd = torch.rsqrt(d.square().mean(-1, keepdim=True) + call.eps)
    y = d * rstd
    y = y if call.weight is None else y * call.weight.to(u.dtype)
    y = y if call.bias is None else y + call.bias.to(u.dtype)
    saved = _centre_dtype(result_dtype(call))
    centre = mean.to(saved) + rest if saved is torch.float64 else mean - u[..., :1]
    return (
        y.to(result_dtype(call)).contiguous(),
        centre.squeeze(-1).contiguous(),
        rstd.squeeze(-1).contiguous(),
    )


def reference_add(x: Tensor, residual: Tensor, *biases: Tensor | None) -> Tensor:
    """Computes x + residual + biases in plain PyTorch: contiguous, rounded once to the dtype of x.

    Shapes: x and residual (..., D), each bias (D,) or None.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    total = x.to(wide) + residual.to(wide)
    for bias in biases:
        total = total if bias is None else total + bias.to(wide)
    return total.to(x.dtype).contiguous()


# --- ops --------------------------------------------------------------------------------------------


def _norm_of(total: Tensor, call: AddCall) -> LayerNormCall:
    """Makes the ``LayerNormCall`` that normalizes ``total``, the sum of x and residual of ``call``."""
    return LayerNormCall(total, call.weight, call.bias, call.eps, call.out_dtype, quantizer=call.quantizer)


def _reference_of_sum(call: AddCall) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Computes ``add_layer_norm`` without total_bias in plain PyTorch.

    Returns y, the sum and, for the backward, ``centre`` (the mean of each row, as ``empty_saved`` explains)
    and ``rstd`` (1 / deviation).
    """
    total = reference_add(call.x, call.residual, call.add_bias)
    y, centre, rstd = _reference(_norm_of(total, call))
    return y, total, centre, rstd


def _fake(call: LayerNormCall) -> tuple[Tensor, Tensor, Tensor]:
    x = call.x
    return x.new_empty(x.shape, dtype=result_dtype(call)), *empty_saved(x, result_dtype(call))


def _fake_of_sum(call: AddCall) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    total = call.x.new_empty(call.x.shape)
    y, centre, rstd = _fake(_norm_of(total, call))
    return y, total, centre, rstd


def _keep(ctx: Any, call: LayerNormCall | AddCall, normalized: Tensor, centre: Tensor, rstd: Tensor) -> None:
    """Saves in ``ctx`` what the backward needs: the normalized tensor, centre (means), rstd and weight.

    The normalized tensor is x, or the sum with the residual. Of bias and add_bias only the dtypes are saved,
    because their gradients get these dtypes.
    """
    ctx.eps = call.eps
    ctx.dtypes = tuple(
        None if t is None else t.dtype for t in (call.x, call.weight, call.bias, call.add_bias)
    )
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(normalized, centre, rstd, call.weight)


def _save(ctx: Any, call: LayerNormCall, results: tuple[Tensor, ...]) -> None:
    _, centre, rstd = results
    _keep(ctx, call, call.x, centre, rstd)


def _save_of_sum(ctx: Any, call: AddCall, results: tuple[Tensor, ...]) -> None:
    _, total, centre, rstd = results
    _keep(ctx, call, total, centre, rstd)


def _grads(ctx: Any, dy: Tensor | None, dtotal: Tensor | None, wanted: tuple[bool, ...]) -> Gradients:
    """Computes the wanted gradients of x, weight, bias and add_bias.

    In the result, the gradient of add_bias has the key "added". The gradient of x is the gradient of the
    residual too. ``dy``, ``dtotal``: the gradients of the results y and total, or None. ``wanted``: four
    values, True for each gradient that is wanted.
    """
    x, centre, rstd, weight = ctx.saved_tensors
    dtypes = tuple(dtype if want else None for dtype, want in zip(ctx.dtypes, wanted, strict=True))
    if dy is not None:
        call = LayerNormGradCall(dy, dtotal, x, centre, rstd, weight, ctx.eps, *dtypes)
        return LAYER_NORM_BACKWARD(call)
    if dtotal is None:
        return {}
    added = dtypes[-1]
    if added is None:
        return {"x": dtotal}
    return {"x": dtotal, "added": dtotal[None].flatten(0, -2).sum(0, dtype=rstd.dtype).to(added)}


def _backward(ctx: Any, needs: Any, dy: Tensor | None, *_: None) -> Gradients:
    return _grads(ctx, dy, None, (needs.x, needs.weight, needs.bias, False))


def _backward_of_sum(ctx: Any, needs: Any, dy: Tensor | None, dtotal: Tensor | None, *_: None) -> Gradients:
    wanted = (needs.x or needs.residual, needs.weight, needs.bias, needs.add_bias)
    grads = _grads(ctx, dy, dtotal, wanted)
    return {
        "x": grads.get("x") if needs.x else None,
        "residual": grads.get("x") if needs.residual else None,
        "weight": grads.get("weight"),
        "bias": grads.get("bias"),
        "add_bias": grads.get("added"),
    }


def _plain(call: LayerNormCall) -> Tensor:
    """Computes ``layer_norm`` without kernels, by PyTorch's LayerNorm.

    ``_reference``, which consists of elementary PyTorch ops, runs instead if x is empty, or if the call is
    traced or transformed (``is_untraced``). There is one exception. If sdfastgn traces the unmodified code of
    diffusers without gradients, the trace gets PyTorch's LayerNorm as a single op. A rewrite of the traced
    graph can then replace this op by a kernel.
    """
    x = call.x
    if call.quantizer is not None:
        exact = LayerNormCall(x, call.weight, call.bias, call.eps, torch.float32)
        return quantized(_plain(exact), call.quantizer)
    is_untraced = dispatch.is_untraced(x, (call.weight, call.bias))
    is_one_op = dispatch.is_stock_code() and not torch.is_grad_enabled() and not dispatch.is_transformed()
    if x.numel() == 0 or not (is_untraced or is_one_op):
        return _reference(call)[0]
    wide = torch.promote_types(x.dtype, torch.float32)
    weight, bias = (None if t is None else t.to(wide) for t in (call.weight, call.bias))
    if not is_untraced:
        y = torch.ops.aten.layer_norm.default(x.to(wide), x.shape[-1:], weight, bias, call.eps)
        return y.to(result_dtype(call))
    return plain_layer_norm(x.to(wide), weight, bias, call.eps).to(result_dtype(call))


def _plain_of_sum(call: AddCall) -> tuple[Tensor, Tensor]:
    """Computes ``add_layer_norm``, including total_bias, in plain PyTorch."""
    total = reference_add(call.x, call.residual, call.add_bias)
    y = _plain(_norm_of(total, call))
    if call.total_bias is None:
        return y, total
    return y, reference_add(call.x, call.residual, call.add_bias, call.total_bias)


# Names of the tensors that the forward saves for the backward. ``empty_saved`` says what is in them.
_SAVED = ("centre", "rstd")
_PLAN = named(f"{__package__}.plans:LayerNormPlan")
_LAYER_NORM = PlannedOp(
    "layer_norm",
    LayerNormCall,
    ("y",),
    _SAVED,
    plan=_PLAN,
    reference=_reference,
    fake=_fake,
    save=_save,
    backward=_backward,
    plain=_plain,
)
_ADD_LAYER_NORM = PlannedOp(
    "add_layer_norm",
    AddCall,
    ("y", "total"),
    _SAVED,
    plan=_PLAN,
    reference=_reference_of_sum,
    fake=_fake_of_sum,
    save=_save_of_sum,
    backward=_backward_of_sum,
    plain=_plain_of_sum,
)


# --- public functions -----------------------------------------------------------------------------


def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    quantizer: Tensor | None = None,
) -> Tensor:
    """LayerNorm over the last dimension. On a GPU Triton kernels run.

    Args:
        x: (..., D), at least rank 1.
        weight, bias: (D,) or None, independently of each other.
        eps: added to the variance. A number of Python or NumPy, or a tensor without dimensions.
        quantizer: None, or an fp32 tensor (8,) with the scale by which the output is divided before it is
            rounded to E4M3, a float dtype of 8 bits (``common/e4m3.py``). The output then has no gradients.

    Shapes: the output has the shape of x.
    Dtypes: x is fp16, bf16, fp32 or fp64. fp64 runs in plain PyTorch. weight and bias may have any of the
        four dtypes. The output has the dtype of x, but fp32 under CUDA autocast, as with
        torch.nn.functional.layer_norm.
    Layout: any. x is copied first if its rows have gaps, overlap or are far apart, or if distances between
        rows differ. The output is contiguous.
    Grad: every tensor has gradients. x and 8 bytes for each row (12 bytes if the output is fp32) are kept for
        the backward. Second derivatives, the transforms of torch.func and forward-mode AD run in plain
        PyTorch.
    Raises:
        TypeError: a tensor is not strided or has another dtype, or another argument has the wrong type.
        ValueError: a shape or a device does not fit.

    Source: torch.nn.functional.layer_norm for the interface; Ba, Kiros and Hinton, 2016, for the formula.
    """
    if type(eps) is not float:
        eps = as_eps(_LAYER_NORM.name, eps)
    if quantizer is None:
        return _LAYER_NORM(LayerNormCall(x, weight, bias, eps, dispatch.autocast_dtype(x)))
    call = LayerNormCall(x, weight, bias, eps, None, quantizer=quantizer)
    if dispatch.is_plain_inference(x, call) and x.numel():
        return _LAYER_NORM(call, is_plain=True)
    _LAYER_NORM.check(_LAYER_NORM.name, call)
    return _plain(call)


def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    add_bias: Tensor | None = None,
    total_bias: Tensor | None = None,
    quantizer: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Computes the sum x + residual + add_bias and its LayerNorm in one pass.

    Transformer blocks do this between attention and the next layer.

    Args:
        x: (..., D), at least rank 1.
        residual: a tensor with the shape, dtype and device of x.
        weight, bias: (D,) or None, independently of each other: the parameters of the LayerNorm.
        eps: added to the variance. A number of Python or NumPy, or a tensor without dimensions.
        add_bias: (D,) or None. For example, the bias of the linear layer that computed x.
        total_bias: (D,) or None. It is added to the returned sum, but not to the sum that is normalized. For
            example, the bias of a later layer whose output will be added to the returned sum.
        quantizer: None, or an fp32 tensor (8,) with the scale by which y is divided before it is rounded to
            E4M3, a float dtype of 8 bits (``common/e4m3.py``). y then has no gradients.

    Returns:
        (y, total). y is the LayerNorm of the sum, which is first rounded to the dtype of x. total is the
        sum plus total_bias, rounded once from fp32. Both are new tensors. The caller may write to total if
        no gradients are wanted.

    Shapes: y and total have the shape of x.
    Dtypes: x is fp16, bf16, fp32 or fp64. fp64 runs in plain PyTorch. weight and all biases may have any of
        the four dtypes. total has the dtype of x. y has the dtype of x, but is fp32 under CUDA autocast.
    Layout: any. x and residual are copied first if their rows have gaps, overlap or are far apart, or if
        distances between rows differ. y and total are contiguous.
    Grad: every tensor has gradients, from both results. The sum is kept for the backward. If gradients are
        wanted, total_bias takes further passes in plain PyTorch, and memory for a second sum. Second
        derivatives, the transforms of torch.func and forward-mode AD run in plain PyTorch.
    Raises:
        TypeError: a tensor is not strided or has another dtype, x and residual have different dtypes, or
            another argument has the wrong type.
        ValueError: a shape or a device does not fit.

    Source: torch.nn.functional.layer_norm; Ba, Kiros and Hinton, 2016.
    """
    name = _ADD_LAYER_NORM.name
    if type(eps) is not float:
        eps = as_eps(name, eps)
    out_dtype = dispatch.autocast_dtype(x) if quantizer is None else None
    call = AddCall(x, residual, weight, bias, add_bias, eps, out_dtype, total_bias, quantizer)
    # The op that is registered with PyTorch has no argument total_bias. The kernels have this argument, but
    # run without the op only if no gradient is wanted. Otherwise the op computes y, and a separate pass
    # computes the sum with total_bias.
    if total_bias is quantizer is None:
        return _ADD_LAYER_NORM(call)
    if dispatch.is_plain_inference(x, call) and x.numel():
        return _ADD_LAYER_NORM(call, is_plain=True)
    _ADD_LAYER_NORM.check(name, call)
    if quantizer is not None:
        return _plain_of_sum(call)
    y, _ = _ADD_LAYER_NORM(AddCall(x, residual, weight, bias, add_bias, eps, call.out_dtype))
    return y, reference_add(x, residual, add_bias, total_bias)
