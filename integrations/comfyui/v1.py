"""The nodes of ``nodes.py`` as classes for releases of ComfyUI without the V3 schema."""

from __future__ import annotations

from typing import Any

from .nodes import NODES, Input, Node


def _input(each: Input) -> tuple[Any, ...]:
    if each.choices:
        return list(each.choices), {"default": each.choices[0], "tooltip": each.tooltip}
    return each.type, {"tooltip": each.tooltip}


def _class_of(node: Node) -> type:
    class Declared:
        CATEGORY = "sdfastgn"
        DESCRIPTION = node.description
        FUNCTION = "run"
        OUTPUT_NODE = node.always_runs
        OUTPUT_TOOLTIPS = tuple(each.tooltip for each in node.outputs)
        RETURN_NAMES = tuple(each.id for each in node.outputs)
        RETURN_TYPES = tuple(each.type for each in node.outputs)

        @classmethod
        def INPUT_TYPES(cls) -> dict[str, Any]:
            return {
                "required": {each.id: _input(each) for each in node.inputs if not each.is_optional},
                "optional": {each.id: _input(each) for each in node.inputs if each.is_optional},
                "hidden": {"node_id": "UNIQUE_ID"},
            }

        def run(self, **inputs: Any) -> dict[str, Any]:
            outputs = node.run(**inputs)
            return {"ui": {"text": [outputs[-1]]}, "result": outputs}

        if node.always_runs:

            @classmethod
            def IS_CHANGED(cls, **_: Any) -> float:
                return float("nan")  # NaN differs from itself, so the node always counts as changed

    Declared.__name__ = Declared.__qualname__ = node.id
    return Declared


NODE_CLASS_MAPPINGS = {node.id: _class_of(node) for node in NODES}
NODE_DISPLAY_NAME_MAPPINGS = {node.id: node.name for node in NODES}
