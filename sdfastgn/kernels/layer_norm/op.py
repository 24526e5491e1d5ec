"""LayerNorm over the last dimension, alone and after a residual add: the ops ``sdfastgn::layer_norm``
and ``sdfastgn::add_layer_norm``.

Formula, with u of shape (..., D), u = x or u = x + residual + add_bias as rounded to the dtype of x:

    y = (u - mean(u)) / sqrt(var(u) + eps) * weight + bias          (per row of D; var divided by D)

The sum is returned beside y: as it was normalized, or with a bias on top (``total_bias``), of which
the norm knows nothing. Whatever is added to the sum next then needs no pass for its bias. Only the
kernels know of it; the op does not, and where the op is called or a gradient is wanted, plain
PyTorch makes that sum.

On a GPU the kernels of ``layer_norm/kernels.py`` run; everywhere else ``reference_layer_norm``.
Layout and numerics contract: there. Gradients: ``layer_norm/backward.py``.

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
from sdfastgn.kernels.common.op import PlannedOp
from sdfastgn.kernels.layer_norm.backward import LAYER_NORM_BACKWARD, LayerNormGradCall
from sdfastgn.kernels.layer_norm.plain import plain_layer_norm

# --- declarations -----------------------------------------------------------------------------------


_PerColumn = Annotated[Tensor | None, Operand("(D,)")]


class LayerNormCall(NamedTuple):
    """The arguments of the op ``sdfastgn::layer_norm``."""

    x: Annotated[Tensor, Operand("(..., D)", whole=even_rows)]
    weight: _PerColumn
    bias: _PerColumn
    eps: float
    out_dtype: torch.dtype | None
    # What ``AddCall`` has besides.
    residual: None = None
    add_bias: None = None
    total_bias: None = None


class AddCall(NamedTuple):
    """The arguments of the op ``sdfastgn::add_layer_norm``, and ``total_bias``."""

    x: Annotated[Tensor, Operand("(..., D)", whole=even_rows)]
    residual: Annotated[Tensor, Operand("(..., D)", whole=even_rows, same_dtype=True)]
    weight: _PerColumn
    bias: _PerColumn
    add_bias: _PerColumn
    eps: float
    out_dtype: torch.dtype | None
    total_bias: _PerColumn = None


def result_dtype(call: LayerNormCall | AddCall) -> torch.dtype:
    """The dtype of y."""
    return call.out_dtype or call.x.dtype


def _centre_dtype(result: torch.dtype) -> torch.dtype:
    """fp64, of the mean itself, where results are fp32 or fp64; else fp32, less the row's first element."""
    return torch.float32 if result.itemsize == 2 else torch.float64


def empty_saved(x: Tensor, result: torch.dtype) -> tuple[Tensor, Tensor]:
    """Memory for centre and rstd: one value a row each. ``result``: the dtype of y."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return x.new_empty(x.shape[:-1], dtype=_centre_dtype(result)), x.new_empty(x.shape[:-1], dtype=wide)


# --- references -------------------------------------------------------------------------------------


def reference_layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """The same function in plain PyTorch, in fp32 (fp64 for fp64 input): the fallback."""
    return _reference(LayerNormCall(x, weight, bias, eps, out_dtype))[0]


def _reference(call: LayerNormCall) -> tuple[Tensor, Tensor, Tensor]:
    """(y, centre, rstd)"""
    x = call.x
    u = x.to(torch.promote_types(x.dtype, torch.float32))
    mean = u.mean(-1, keepdim=True)
    d = u - mean
    rest = d.mean(-1, keepdim=True)  # what the rounding of the mean left
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
    """x + residual + biases, (D,) or None each, in plain PyTorch: rounded once, to the dtype of x."""
    wide = torch.promote_types(x.dtype, torch.float32)
    total = x.to(wide) + residual.to(wide)
    for bias in biases:
        total = total if bias is None else total + bias.to(wide)
    return total.to(x.dtype).contiguous()


# --- ops --------------------------------------------------------------------------------------------


def _norm_of(total: Tensor, call: AddCall) -> LayerNormCall:
    return LayerNormCall(total, call.weight, call.bias, call.eps, call.out_dtype)


def _reference_of_sum(call: AddCall) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(y, total, centre, rstd)"""
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
    """What the backward needs; of the bias and of what is added, only the dtype."""
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
    """Gradients of x (and of the residual), weight, bias and what was added, each where ``wanted``."""
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
    """``layer_norm`` by PyTorch's own, where that is right."""
    x = call.x
    if x.numel() == 0 or not dispatch.is_untraced(x, (call.weight, call.bias)):
        return _reference(call)[0]
    wide = torch.promote_types(x.dtype, torch.float32)
    weight, bias = (None if t is None else t.to(wide) for t in (call.weight, call.bias))
    return plain_layer_norm(x.to(wide), weight, bias, call.eps).to(result_dtype(call))


def _plain_of_sum(call: AddCall) -> tuple[Tensor, Tensor]:
    total = reference_add(call.x, call.residual, call.add_bias)
    y = _plain(_norm_of(total, call))
    if call.total_bias is None:
        return y, total
    return y, reference_add(call.x, call.residual, call.add_bias, call.total_bias)


def _plan(call: LayerNormCall | AddCall) -> Any:
    from sdfastgn.kernels.layer_norm.plans import LayerNormPlan  # needs Triton

    return LayerNormPlan(call)


# For the backward: each row's mean, as ``centre`` in ``layer_norm/kernels.py``, and 1 / deviation in fp32
# (fp64 for fp64 input).
_SAVED = ("centre", "rstd")
_LAYER_NORM = PlannedOp(
    "layer_norm",
    LayerNormCall,
    ("y",),
    _SAVED,
    plan=_plan,
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
    plan=_plan,
    reference=_reference_of_sum,
    fake=_fake_of_sum,
    save=_save_of_sum,
    backward=_backward_of_sum,
    plain=_plain_of_sum,
)


# --- public functions -----------------------------------------------------------------------------


def layer_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """LayerNorm over the last dimension, in Triton kernels on NVIDIA GPUs.

    Args:
        x: (..., D), at least rank 1.
        weight, bias: (D,) or None, independently of each other.
        eps: added to the variance: a number of Python or NumPy, or a tensor without dimensions.

    Shapes: the output has the shape of x.
    Dtypes: x fp16, bf16 or fp32 (fp64 runs in plain PyTorch); weight and bias any of these. The
        output has the dtype of x, or fp32 under CUDA autocast, as torch.nn.functional.layer_norm
        has.
    Layout: rows are read where they lie if they are without gaps and equally far apart, else from a
    copy. The output is contiguous.
    Grad: with respect to every tensor. Between forward and backward x is kept and 8 bytes a row, or
        12 where the output is fp32. A second derivative, the transforms of torch.func and forward-mode
        AD run in plain PyTorch.
    Raises:
        TypeError: a tensor is not dense, or none of these dtypes, or another argument has the wrong type.
        ValueError: a shape or a device does not fit.

    Source: torch.nn.functional.layer_norm for the interface; Ba, Kiros and Hinton, 2016, for the formula.
    """
    if type(eps) is not float:
        eps = as_eps(_LAYER_NORM.name, eps)
    return _LAYER_NORM(LayerNormCall(x, weight, bias, eps, dispatch.autocast_dtype(x)))


def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    add_bias: Tensor | None = None,
    total_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """x + residual + add_bias and its LayerNorm in one pass over memory: what stands between two parts
    of a transformer block.

    Args:
        x: (..., D), at least rank 1.
        residual: shape, dtype and device of x.
        weight, bias, eps: as in ``layer_norm``.
        add_bias: (D,) or None, a dtype as weight's: a linear layer's bias, left to the next kernel.
        total_bias: (D,) or None, likewise: the bias of what will be added to total next. The norm does
            not see it.

    Returns:
        (y, total): y is the ``layer_norm`` of the sum as rounded to the dtype of x. total is the
        sum and total_bias, rounded once from fp32 to the dtype of x, in memory of its own: without
        gradients it may be written to.

    Shapes: both have the shape of x. Dtypes: total has that of x, y too, or fp32 under CUDA
        autocast. Layout: both are contiguous; x and residual are read as in ``layer_norm``.
    Grad: with respect to every tensor, through both results, as in ``layer_norm``; the sum is kept
        for the backward. A total_bias then costs passes in plain PyTorch, and memory for a second
        sum.
    Raises:
        TypeError: a tensor is not dense, or none of these dtypes, or the dtypes of x and residual differ.
        ValueError: a shape or a device does not fit.

    Source: as ``layer_norm``; the sum goes with the norm since the first pre-norm transformers'
    fused kernels.
    """
    name = _ADD_LAYER_NORM.name
    if type(eps) is not float:
        eps = as_eps(name, eps)
    call = AddCall(x, residual, weight, bias, add_bias, eps, dispatch.autocast_dtype(x), total_bias)
    # Only the kernels know of a total_bias, and only in inference.
    if total_bias is None or (dispatch.is_plain_inference(x, call) and x.numel()):
        return _ADD_LAYER_NORM(call)
    _ADD_LAYER_NORM.check(name, call)
    y, _ = _ADD_LAYER_NORM(AddCall(x, residual, weight, bias, add_bias, eps, call.out_dtype))
    return y, reference_add(x, residual, add_bias, total_bias)
