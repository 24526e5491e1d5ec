"""The result of tracing a call, and the exception that says why a call cannot be traced."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor, fx, nn


class Untraceable(Exception):  # noqa: N818  # callers catch it, and run the model's own code
    """Raised if a call cannot be traced. The message says why. Reports print it after "no plan: ".

    Attributes:
        kept: for each module, the names of all attributes that the call changes. Empty if the call keeps no
            tensors in these attributes, or if it also changes other objects than modules.
        sets_attributes: True if the only reason is that the call sets attributes of the model, or of objects
            in it.
    """

    def __init__(
        self, reason: str, kept: Mapping[nn.Module, set[str]] | None = None, sets_attributes: bool = False
    ) -> None:
        super().__init__(reason)
        self.kept, self.sets_attributes = kept or {}, sets_attributes


class Traced(NamedTuple):
    """The traced graph of one call.

    Attributes:
        graph: its placeholders are ``parameters``, then ``others``, then the tensors among the arguments of
            the call. Its other nodes are ``get_attr``, for small tensors that the model's code makes from
            numbers, and ``call_function``. Functions are ops of aten or of other packages that write nothing,
            and ``operator.getitem``. A node stands for a value, wherever it lies in memory. So an op that
            makes a view may have to copy when it runs. The only op that writes is ``aten.copy_.default``. It
            stands at the end, and writes into placeholders into which the call writes. ``linear``,
            ``layer_norm``, ``group_norm``, ``rms_norm`` and ``scaled_dot_product_attention`` of aten are
            single nodes, and not split into simpler ops. ``node.meta`` has "shape" (a tuple), "dtype" and
            "device" of each node whose value is a tensor. The output is a flat list.
        parameters: (module, "_parameters" or "_buffers", name) of each parameter or buffer that is read.
        others: all other tensors that are read, for example in closures and plain attributes.
        spec: the ``TreeSpec`` of (args, kwargs).
        out_spec: the ``TreeSpec`` of the result.
        slices: how the samples of a large batch are divided, if ``graph`` computes only one slice of them
            (``rewrite/slices.py``). Otherwise None.
    """

    graph: fx.GraphModule
    parameters: list[tuple[nn.Module, str, str]]
    others: list[Tensor]
    spec: Any
    out_spec: Any
    slices: Any = None
