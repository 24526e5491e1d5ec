"""The result of a trace, and the reasons why there is none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor, fx, nn


class Untraceable(Exception):  # noqa: N818  # no error for callers: they run upstream's code
    """The call cannot be traced. The message says why, in words that follow "no plan: ".

    Attributes:
        kept: module -> names of its attributes that the call changes, if it keeps tensors in some of them,
            and changes no other objects.
        sets_attributes: True if this is the only kind of reason: the call sets attributes of the model, or of
            objects in it.
    """

    def __init__(
        self, reason: str, kept: Mapping[nn.Module, set[str]] | None = None, sets_attributes: bool = False
    ) -> None:
        super().__init__(reason)
        self.kept, self.sets_attributes = kept or {}, sets_attributes


class Traced(NamedTuple):
    """The graph of one call.

    Attributes:
        graph: its placeholders are the parameters, then the others, then the tensors among the arguments of
            the call. Other nodes are ``get_attr`` (small tensors that the call's code makes from numbers) and
            ``call_function``, whose targets are ops that write nothing, of aten or of other packages, and
            ``operator.getitem``. A view stands for a value, so as an op it may need a copy. The only op that
            writes is ``aten.copy_.default``, at the end, into placeholders that the call writes.
            ``linear``, ``layer_norm``, ``group_norm``, ``rms_norm`` and ``scaled_dot_product_attention`` of
            aten stay whole. ``node.meta`` of each node whose value is a tensor has "shape" (a tuple), "dtype"
            and "device". The output is a flat list.
        parameters: (module, "_parameters" or "_buffers", name) of each parameter or buffer that is read.
        others: other tensors that are read, for example in closures and plain attributes.
        spec: the ``TreeSpec`` of (args, kwargs).
        out_spec: the ``TreeSpec`` of the result.
        slices: the ``Slices`` of the call, if ``graph`` computes one of them (``rewrite/slices.py``).
    """

    graph: fx.GraphModule
    parameters: list[tuple[nn.Module, str, str]]
    others: list[Tensor]
    spec: Any
    out_spec: Any
    slices: Any = None
