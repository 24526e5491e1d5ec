"""sdfastgn's nodes for ComfyUI. ComfyUI imports this folder when it is in ``custom_nodes``."""

import importlib.util
import sys
from pathlib import Path

# The folder that contains the Python package sdfastgn in the copy of these nodes that `make comfyui-node`
# builds. Users of such a copy need not install sdfastgn. Other copies do not have this folder.
_SHIPPED = Path(__file__).parent / "package"

if importlib.util.find_spec("sdfastgn") is None:
    if not (_SHIPPED / "sdfastgn").is_dir():
        raise ImportError(
            "sdfastgn is not installed. With the Python that runs ComfyUI, run `pip install .` in a checkout "
            "of sdfastgn, or copy the folder that `make comfyui-node` builds into custom_nodes."
        )
    sys.path.append(str(_SHIPPED))
if importlib.util.find_spec("triton") is None:
    raise ImportError(
        "sdfastgn needs Triton. On Linux it comes with PyTorch's CUDA builds. On Windows install "
        "triton-windows with the Python that runs ComfyUI."
    )

WEB_DIRECTORY = "./web"

try:
    from comfy_api.latest import ComfyExtension  # noqa: F401  # not in ComfyUI before 0.3.48
except ImportError:
    from .v1 import NODE_CLASS_MAPPINGS, NODE_DISPLAY_NAME_MAPPINGS  # noqa: F401
else:
    from .v3 import comfy_entrypoint  # noqa: F401
