"""The node works in a ComfyUI without diffusers. No checkout of ComfyUI is needed here."""

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
FOLDERS = [ROOT / "sdfastgn" / "patches" / "comfyui", ROOT / "integrations" / "comfyui"]
WITHOUT_DIFFUSERS = """
import sys
sys.modules["diffusers"] = None  # an import of diffusers raises ImportError
"""


def imports():
    """The lines with which the node and the fusions for ComfyUI import other parts of sdfastgn."""
    trees = [ast.parse(path.read_text()) for folder in FOLDERS for path in folder.glob("*.py")]
    nodes = [node for tree in trees for node in tree.body if isinstance(node, ast.ImportFrom)]
    modules = [node for node in nodes if (node.module or "").startswith("sdfastgn.")]
    return sorted({ast.unparse(node) for node in modules if "comfyui" not in node.module})


def test_nothing_needs_diffusers():
    assert any("patches.fusions.tokens" in line for line in imports())
    subprocess.run([sys.executable, "-c", "\n".join([WITHOUT_DIFFUSERS, *imports()])], cwd=ROOT, check=True)
