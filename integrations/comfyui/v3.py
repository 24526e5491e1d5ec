"""The nodes of ``nodes.py`` as classes in ComfyUI's V3 schema."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import ComfyExtension, io, ui

from .nodes import NODES, Input, Node, Output

_TYPES = {"MODEL": io.Model, "VAE": io.Vae, "LATENT": io.Latent, "STRING": io.String}


def _input(each: Input) -> Any:
    if each.choices:
        options = {"options": list(each.choices), "default": each.choices[0]}
        return io.Combo.Input(each.id, **options, tooltip=each.tooltip, optional=each.is_optional)
    return _TYPES[each.type].Input(each.id, tooltip=each.tooltip, optional=each.is_optional)


def _output(each: Output) -> Any:
    # Some releases, such as 0.3.64, refuse an output with the id of an input.
    return _TYPES[each.type].Output(display_name=each.id, tooltip=each.tooltip)


def _class_of(node: Node) -> type[io.ComfyNode]:
    schema = io.Schema(
        node_id=node.id,
        display_name=node.name,
        category="sdfastgn",
        description=node.description,
        inputs=[_input(each) for each in node.inputs],
        outputs=[_output(each) for each in node.outputs],
        hidden=[io.Hidden.unique_id],
        is_output_node=node.always_runs,
    )

    class Declared(io.ComfyNode):
        @classmethod
        def define_schema(cls) -> io.Schema:
            return schema

        @classmethod
        def execute(cls, **inputs: Any) -> io.NodeOutput:
            outputs = node.run(cls.hidden.unique_id, **inputs)
            return io.NodeOutput(*outputs, ui=ui.PreviewText(outputs[-1]))

        if node.always_runs:

            @classmethod
            def fingerprint_inputs(cls, **_: Any) -> float:
                return float("nan")  # NaN differs from itself, so the node always counts as changed

    Declared.__name__ = Declared.__qualname__ = node.id
    return Declared


class Extension(ComfyExtension):
    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return [_class_of(node) for node in NODES]


async def comfy_entrypoint() -> Extension:
    return Extension()
