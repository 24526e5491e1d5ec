"""Records on which machine and with which versions a measurement was made."""

from __future__ import annotations

import datetime
import hashlib
import importlib.util
import os
import platform
import subprocess
import warnings
from pathlib import Path
from typing import Any

import torch

import sdfastgn
from sdfastgn.backend import triton_cache, why_no_kernel
from sdfastgn.kernels.common import dispatch
from sdfastgn.kernels.common.failures import one_line
from sdfastgn.versions import installed_versions

PACKAGE_ROOT = Path(__file__).resolve().parents[1]


def cuda_package_reason(package: str, device: torch.device, title: str = "") -> str | None:
    """Why a competitor's package of CUDA kernels cannot run on ``device``; None if it can.

    ``title``: the name of the project, if it differs from the name of the package.
    """
    if importlib.util.find_spec(package) is None:
        return f"package {package}{title and f' ({title})'} is not installed"
    return None if device.type == "cuda" else f"{title or package} needs CUDA; the device is {device}"


def _output_of(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, cwd=PACKAGE_ROOT)
    except (OSError, subprocess.SubprocessError):  # the command failed: perhaps its program is missing
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _git() -> dict[str, Any]:
    # If newer code was copied over an older checkout, git names the wrong commit. Then the user sets the
    # environment variable SDFASTGN_COMMIT to the right commit.
    if os.environ.get("SDFASTGN_COMMIT"):
        return {"commit": os.environ["SDFASTGN_COMMIT"], "dirty": None}
    # git refuses a checkout that belongs to another user, as in a container, unless safe.directory names it.
    git = ("git", "-c", f"safe.directory={PACKAGE_ROOT.parent}")
    commit = _output_of(*git, "rev-parse", "HEAD")
    # A result is marked as dirty only if the package or the scripts have uncommitted changes, because only
    # their code makes measurements.
    code = (str(PACKAGE_ROOT), str(PACKAGE_ROOT.parent / "scripts"))
    changes = _output_of(*git, "status", "--porcelain", "--", *code)
    return {"commit": commit, "dirty": None if commit is None else bool(changes)}


def source_hash() -> str:
    """SHA-256 over the package's Python files. It identifies the source code if git is not available."""
    digest = hashlib.sha256()
    for path in sorted(PACKAGE_ROOT.rglob("*.py")):
        digest.update(path.relative_to(PACKAGE_ROOT).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _gpu(device: torch.device) -> dict[str, Any]:
    if device.type != "cuda":
        return {"gpu": None, "driver": None, "cuda": torch.version.cuda}
    properties = torch.cuda.get_device_properties(device)
    driver = _output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return {
        "gpu": properties.name,
        "gpu_memory_mib": properties.total_memory // 2**20,
        "multiprocessors": properties.multi_processor_count,
        "driver": driver.splitlines()[0] if driver else None,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
    }


def check_kernels_ran(device: torch.device) -> None:
    """Raise RuntimeError if kernels of sdfastgn are off on a GPU, so that plain PyTorch was timed."""
    if device.type == "cuda" and dispatch.why_off is not None:
        raise RuntimeError(f"plain PyTorch ran and no kernel: {dispatch.why_off}")
    for op, reason in dispatch.ops_without_kernels().items() if device.type == "cuda" else ():
        raise RuntimeError(f"plain PyTorch ran for {op}: {reason}")


def kernels_reason(device: torch.device) -> str | None:
    """Why sdfastgn's kernels cannot run on ``device``; None if they can. On a GPU, launches a small kernel.

    The launch also finds out whether Triton can compile kernels here.
    """
    if (reason := why_no_kernel({device})) is not None:
        return reason
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a warning is not shown: its text is returned instead
            sdfastgn.group_norm(torch.ones(1, 32, 4, 4, device=device), 32)
    except Exception as error:  # the kernel's call failed: perhaps too little memory is free
        return one_line(error)
    return dispatch.why_off or next(iter(dispatch.ops_off.values()), None)


def environment(device: torch.device, switches: dict[str, bool] | None = None) -> dict[str, Any]:
    """Returns a dict for JSON: GPU, driver, versions, source code, date and ``switches``.

    ``switches``: name of a global switch of PyTorch, such as ``cudnn.benchmark`` -> its value.

    The dict also has the number of entries in Triton's cache before the measurement: kernels in the cache
    need no compilation, which makes a first call faster. So call this function before you measure.
    """
    cache = triton_cache()
    entries = sum(1 for _ in cache.iterdir()) if cache.is_dir() else 0
    return {
        **_gpu(device),
        "device": str(device),
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs",
        "packages": installed_versions(),
        "git": _git(),
        "source_sha256": source_hash(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "triton_cache": {"folder": str(cache), "entries_at_start": entries},
        "switches": switches or {},
    }
