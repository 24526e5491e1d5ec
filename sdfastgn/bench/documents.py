"""What all results share: how a row ended, and the JSON that rows are written as."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sdfastgn.program import OptionError

# 2: pipelines are compared with fp32 too, and a config has a scheduler, a prompt and guidance.
# 3: the 99th percentile, the time of a pipeline's graphs, reserved memory, and the kind "sweep".
# Versions so far only add fields, so that one reader reads them all.
SCHEMA = 3
# What a run's JSON has in any schema.
_TYPES = {"kind": str, "environment": dict, "config": dict, "rows": list}
OK, UNAVAILABLE, FAILED, WRONG = "ok", "unavailable", "failed", "wrong output"


def document(
    kind: str, environment: dict[str, Any], config: dict[str, Any], rows: Iterable[Any]
) -> dict[str, Any]:
    """A run as the JSON that ``--json`` writes and :mod:`scripts.publish.pages` reads."""
    return {
        "schema": SCHEMA,
        "kind": kind,
        "environment": environment,
        "config": config,
        "rows": [asdict(row) for row in rows],
    }


def images_path(path: Path) -> Path:
    """The file beside a run's JSON that has its images, for pages of ``report``."""
    return path.parent / f"{path.stem}.images"


def load(path: Path) -> Any:
    """What a JSON file holds. Raises OptionError, which names it."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise OptionError(f"cannot read {str(path)!r}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise OptionError(f"{str(path)!r} holds no result of sdfastgn: it is no JSON ({error})") from None


def read_json(path: Path) -> dict[str, Any]:
    """A run that :func:`write_json` wrote. Raises OptionError, which names the file."""
    return checked(path, load(path))


def checked(path: Path, content: Any) -> dict[str, Any]:
    """``content`` of the file at ``path``, if it is a run. Raises OptionError, which names the file."""
    if not isinstance(content, dict):
        raise OptionError(f"{str(path)!r} holds no result of sdfastgn: it is no JSON object")
    for name, kind in _TYPES.items():
        if not isinstance(content.get(name), kind):
            lacks = f"it has no {name!r} of type {kind.__name__}"
            raise OptionError(f"{str(path)!r} holds no result of sdfastgn: {lacks}")
    version = content.get("schema", 1)
    if version not in range(1, SCHEMA + 1):
        known = f"this sdfastgn reads 1 to {SCHEMA}"
        raise OptionError(f"{str(path)!r} has results in schema {version!r}; {known}")
    return content


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Writes ``content`` as strict JSON, one row or fact a line."""
    lines = ",\n".join(f" {json.dumps(key)}: {_block(value)}" for key, value in content.items())
    path.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")


def _block(value: Any) -> str:
    """A list with one entry a line, a dict likewise, anything else in one line."""
    encode = functools.partial(json.dumps, allow_nan=False)
    if isinstance(value, dict) and value:
        entries = [f"{encode(key)}: {encode(entry)}" for key, entry in value.items()]
        return "{\n  " + ",\n  ".join(entries) + "\n }"
    if isinstance(value, list) and value:
        return "[\n  " + ",\n  ".join(map(encode, value)) + "\n ]"
    return encode(value)
