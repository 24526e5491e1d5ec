"""sdfastgn's nodes for ComfyUI. ComfyUI imports this folder when it is in ``custom_nodes``."""

import importlib.util
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

# The folder that contains the Python package sdfastgn in the copy of these nodes that `make comfyui-node`
# builds. Users of such a copy need not install sdfastgn. Other copies do not have this folder.
_SHIPPED = Path(__file__).parent / "package"


def _found() -> Iterator[ModuleSpec | None]:
    """What has the name sdfastgn: for ``import``, then on ``sys.path``, at last the shipped package."""
    yield importlib.util.find_spec("sdfastgn")
    for folder in (*sys.path, str(_SHIPPED)):
        yield PathFinder.find_spec("sdfastgn", [folder])


def _is_package(spec: ModuleSpec | None) -> bool:
    """True for the package sdfastgn. False for a folder of this name: that of these nodes, a checkout."""
    has_file = spec is not None and spec.origin is not None
    return has_file and (Path(spec.origin).parent / "patches" / "comfyui").is_dir()


def _import_package() -> None:
    """Import sdfastgn now. Later, other nodes may have put ``custom_nodes`` before it on ``sys.path``."""
    spec = next(filter(_is_package, _found()), None)
    if spec is None:
        raise ImportError(
            "sdfastgn is not installed. With the Python that runs ComfyUI, run `pip install .` in a checkout "
            "of sdfastgn, or copy the folder that `make comfyui-node` builds into custom_nodes."
        )
    if getattr(sys.modules.get("sdfastgn"), "__spec__", None) is spec:
        return
    sys.modules["sdfastgn"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


_import_package()
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
