"""``nn.Module`` classes for ``sdfastgn.group_norm``, ``instance_norm``, ``batch_norm`` and ``layer_norm``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm

from sdfastgn.kernels.batch_norm.op import batch_norm_call, normalize
from sdfastgn.kernels.batch_norm.sync import WORLD, check_group, group_of, normalize_in_group
from sdfastgn.kernels.common.checks import (
    as_eps,
    as_float,
    as_index,
    as_size,
    check_activation,
    check_input,
)
from sdfastgn.kernels.group_norm.instance_norm import instance_norm
from sdfastgn.kernels.group_norm.op import group_norm
from sdfastgn.kernels.layer_norm.op import add_layer_norm, layer_norm


class GroupNorm(nn.GroupNorm):
    """``torch.nn.GroupNorm`` with a fused activation: the same constructor, attributes and state_dict.

    Args:
        num_groups, num_channels, eps, affine, device, dtype, bias: the arguments of ``torch.nn.GroupNorm``.
        activation: any of ``sdfastgn.kernels.common.activations.ACTIVATIONS``.

    Shapes: input and result are (N, C, *spatial).
    Dtypes, layout, gradients and errors of a call are those of ``sdfastgn.group_norm``.
    Raises: ValueError if num_groups does not divide num_channels, one of them is negative or the
        activation is unknown; TypeError if an argument that must be a number is not;
        ZeroDivisionError, as in PyTorch, if num_groups is 0.
    """

    def __init__(
        self,
        num_groups: int,
        num_channels: int,
        eps: float = 1e-5,
        affine: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        bias: bool = True,
        activation: str = "identity",
    ) -> None:
        name = "sdfastgn.GroupNorm"
        check_activation(name, activation)
        num_groups = as_index(name, "num_groups", num_groups)
        num_channels = as_size(name, "num_channels", num_channels)
        if num_groups == 0:
            raise ZeroDivisionError(f"{name}: num_groups must be positive, got 0")
        if num_groups < 0 or num_channels % num_groups:
            raise ValueError(
                f"{name}: num_groups={num_groups} must be a positive divisor of num_channels={num_channels}"
            )
        super().__init__(num_groups, num_channels, as_eps(name, eps), affine, device, dtype)
        if not bias:  # torch 2.11's ``nn.GroupNorm`` takes no argument ``bias``
            self.register_parameter("bias", None)
        self.activation = activation

    def forward(self, input: Tensor) -> Tensor:
        return group_norm(input, self.num_groups, self.weight, self.bias, self.eps, self.activation)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, activation={self.activation!r}"


class InstanceNorm(_InstanceNorm):
    """``torch.nn.InstanceNorm1d``, ``2d`` and ``3d`` with a fused activation.

    The constructor, the attributes and the state_dict are PyTorch's.

    Args:
        num_features, eps, momentum, affine, device, dtype: the arguments of ``torch.nn.InstanceNorm2d``.
        track_running_stats: must be False: each sample is normalized with its own statistics.
        activation: any of ``sdfastgn.kernels.common.activations.ACTIVATIONS``.

    Shapes: input and result are (N, C, *spatial).
    Dtypes, layout, gradients and errors of a call are those of ``sdfastgn.instance_norm``.
    Raises: ValueError if track_running_stats is True, num_features is negative or the activation is
        unknown; TypeError if an argument that must be a number is not.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float = 0.1,
        affine: bool = False,
        track_running_stats: bool = False,
        device: Any = None,
        dtype: Any = None,
        *,
        activation: str = "identity",
    ) -> None:
        name = "sdfastgn.InstanceNorm"
        check_activation(name, activation)
        if track_running_stats:
            raise ValueError(f"{name}: track_running_stats=True is not supported")
        num_features = as_size(name, "num_features", num_features)
        super().__init__(num_features, as_eps(name, eps), momentum, affine, False, device, dtype)
        self.activation = activation

    def forward(self, input: Tensor) -> Tensor:
        try:
            fits = input.dim() >= 3 and input.shape[1] == self.num_features
        except (AttributeError, RuntimeError):  # ``input`` is not a tensor, or is a nested tensor
            fits = False
        if not fits:
            _refuse("sdfastgn.InstanceNorm", input, f"(N, {self.num_features}, *spatial)")
        return instance_norm(input, self.weight, self.bias, self.eps, self.activation)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, activation={self.activation!r}"


class BatchNorm(_NormBase):
    """``torch.nn.BatchNorm1d``, ``2d`` and ``3d`` with a fused residual add and activation.

    The constructor, the attributes and the state_dict are PyTorch's. Training, eval, momentum and running
    averages work as in PyTorch.

    Args:
        num_features, eps, momentum, affine, track_running_stats, device, dtype, bias: the arguments of
            ``torch.nn.BatchNorm2d``.
        activation: any of ``sdfastgn.kernels.common.activations.ACTIVATIONS``.
        process_group: the processes over whose batches mean and variance are computed in training, as in
            ``torch.nn.SyncBatchNorm``: a group of torch.distributed, or "world" for all processes. With None,
            each process uses the statistics of its own batch.

    With y for the normalized input, ``norm(input)`` is ``activation(y)`` and ``norm(input, residual)`` is
    ``activation(y + residual)``.

    This class is not derived from ``nn.BatchNorm2d``, because
    ``nn.SyncBatchNorm.convert_sync_batchnorm`` would replace it by a module without the activation.

    Shapes: input and result are (N, C, *spatial).
    Dtypes, layout, gradients and errors of a call are those of ``sdfastgn.batch_norm``. With a process group,
        second derivatives are not supported.
    Raises: ValueError if num_features is negative, the activation is unknown or process_group is neither
        a group nor "world"; TypeError if an argument that must be a number is not.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        bias: bool = True,
        activation: str = "identity",
        process_group: Any = None,
    ) -> None:
        name = "sdfastgn.BatchNorm"
        check_activation(name, activation)
        check_group(name, process_group)
        num_features = as_size(name, "num_features", num_features)
        momentum = None if momentum is None else as_float(name, "momentum", momentum)
        super().__init__(
            num_features, as_eps(name, eps), momentum, affine, track_running_stats, device, dtype
        )
        if not bias:  # torch 2.8's batch norms take no argument ``bias``
            self.register_parameter("bias", None)
        self.activation = activation
        self.process_group = process_group

    @classmethod
    def from_module(cls, module: nn.Module, activation: str = "identity") -> BatchNorm:
        """Makes a norm with the settings of ``module``. Both modules share their parameters and buffers.

        Args:
            module: an ``nn.BatchNorm1d``, ``2d`` or ``3d``, or an ``nn.SyncBatchNorm``, whose process
                group the new norm gets.
            activation: the activation that the norm applies: any of
                ``sdfastgn.kernels.common.activations.ACTIVATIONS``.
        Raises: TypeError if ``module`` is of another class, has hooks or additional parameters, or has a
            ``forward`` that replaces the method of its class. Such a module may compute something else than a
            batch norm.
        """
        kinds = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
        if type(module) not in kinds:
            known = ", ".join(kind.__name__ for kind in kinds)
            raise TypeError(f"sdfastgn.BatchNorm: module must be one of {known}, got {type(module).__name__}")
        stock: Any = module
        hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
        own = [each for each in hooks if getattr(stock, each)]
        own += {"forward"} & vars(stock).keys()
        own += sorted({*stock._parameters, *stock._modules} - {"weight", "bias"})
        if own:
            raise TypeError(
                "sdfastgn.BatchNorm: module must have no hooks, and no forward, parameter or module of its "
                f"own, got {type(module).__name__} with {', '.join(own)}"
            )
        group = (stock.process_group or WORLD) if type(module) is nn.SyncBatchNorm else None
        sizes = stock.num_features, stock.eps, stock.momentum, stock.affine, stock.track_running_stats
        made = cls(*sizes, "meta", activation=activation, process_group=group)
        made._parameters.update(stock._parameters)
        made._buffers.update(stock._buffers)
        return made.train(stock.training)

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Tensor:
        name = "sdfastgn.BatchNorm"
        try:
            fits = input.dim() >= 2 and input.shape[1] == self.num_features
        except (AttributeError, RuntimeError):  # ``input`` is not a tensor, or is a nested tensor
            fits = False
        if not fits:
            _refuse(name, input, f"(N, {self.num_features}, *spatial)")
        counts = self.num_batches_tracked if self.training and self.track_running_stats else None
        running = (self.running_mean, self.running_var)
        if self.training and not self.track_running_stats:
            running = (None, None)
        momentum = self.momentum
        if momentum is None:  # without momentum, running averages weigh all batches equally, as in PyTorch
            momentum = 0.0 if counts is None else 1 / (float(counts) + 1)
        trains = self.training or (self.running_mean is None and self.running_var is None)
        call = batch_norm_call(
            name, input, *running, self.weight, self.bias, trains, momentum, self.eps, self.activation,
            residual,
        )  # fmt: skip
        group = group_of(self.process_group) if self.training else None
        if group is not None:
            y = normalize_in_group(name, call, group)
        else:
            y = normalize(name, call, fused=self.momentum is not None)
        if counts is not None:
            counts.add_(1)
        return y

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, activation={self.activation!r}"


class LayerNorm(nn.LayerNorm):
    """``torch.nn.LayerNorm`` over the last dimension, with an optional residual add in the same pass.

    The constructor and the state_dict are PyTorch's.

    Args:
        normalized_shape: the size D of the last dimension, or a sequence of this one number.
        eps, elementwise_affine, bias, device, dtype: the arguments of ``torch.nn.LayerNorm``.

    ``norm(input)`` returns the normalized tensor. ``norm(input, residual, add_bias)`` returns two tensors:
    the normalized total, and the total itself, which is input + residual + add_bias.

    Shapes: input, residual and results are (..., D). Dtypes, layout, gradients and errors of a call are those
        of ``sdfastgn.layer_norm`` and ``sdfastgn.add_layer_norm``.
    Raises: ValueError if normalized_shape is negative or more than one dimension, or if a call has
        add_bias without a residual; TypeError if an argument that must be a number is not.
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        name = "sdfastgn.LayerNorm"
        sizes = tuple(normalized_shape) if isinstance(normalized_shape, Iterable) else (normalized_shape,)
        if len(sizes) != 1:
            raise ValueError(f"{name}: normalized_shape must be one dimension, got {normalized_shape!r}")
        size = as_size(name, "normalized_shape", sizes[0])
        super().__init__([size], as_eps(name, eps), elementwise_affine, bias, device, dtype)

    def forward(self, input: Tensor, residual: Tensor | None = None, add_bias: Tensor | None = None) -> Any:
        try:
            fits = input.shape[-1:] == self.normalized_shape
        except (AttributeError, RuntimeError):
            fits = False
        if not fits:
            _refuse("sdfastgn.LayerNorm", input, f"(..., {self.normalized_shape[0]})")
        if residual is not None:
            return add_layer_norm(input, residual, self.weight, self.bias, self.eps, add_bias=add_bias)
        if add_bias is not None:
            check_input("sdfastgn.LayerNorm", "add_bias", add_bias)
            raise ValueError(
                "sdfastgn.LayerNorm: add_bias needs a residual, "
                f"got add_bias of shape {tuple(add_bias.shape)}"
            )
        return layer_norm(input, self.weight, self.bias, self.eps)


def _refuse(name: str, input: Any, expected: str) -> NoReturn:
    """Raise a TypeError if ``input`` is no tensor, else a ValueError with its shape and ``expected``."""
    check_input(name, "input", input)
    raise ValueError(f"{name}: input must be {expected}, got shape {tuple(input.shape)}")
