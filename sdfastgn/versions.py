"""Lists the versions of packages with which the tests ran, and finds the installed versions."""

from __future__ import annotations

import contextlib
import importlib.metadata

# For each package, the versions with which the tests ran. With torch 2.11 and Triton 3.6 the kernels ran on
# an H100 and an H200. With all other versions the kernels ran in Triton's interpreter
# (docs/compatibility.md).
RUN = {
    "torch": ("2.8", "2.9", "2.10", "2.11", "2.12", "2.13", "2.14", "2.15"),
    "triton": ("3.4", "3.5", "3.6", "3.7", "3.8", "3.9"),
}
# Packages whose versions may change measured times or outputs.
_PACKAGES = ("torch", "triton", "diffusers", "transformers", "accelerate", "peft", "stable-fast")


def never_run(package: str, version: str) -> str | None:
    """Returns a note for the user if sdfastgn's tests never ran with this version of ``package``; else None.

    Also returns None for a package that is not in ``RUN``. Only the first two numbers of ``version`` are
    compared.
    """
    run = RUN.get(package)
    if run is None or ".".join(version.split(".")[:2]) in run:
        return None
    return f"{package} {version} was never run with this sdfastgn ({', '.join(run)} were)"


def installed_versions() -> dict[str, str | None]:
    """Returns the installed versions of the packages that may change measured times or outputs.

    The version is None if a package is not installed.
    """
    found: dict[str, str | None] = dict.fromkeys(_PACKAGES)
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found
