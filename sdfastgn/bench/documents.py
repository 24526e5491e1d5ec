"""Reads and writes the JSON files of benchmark runs. All kinds of runs have the same file format."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sdfastgn.program import OptionError, writing

# Version of the JSON format. A new version only adds fields, so the same code reads all versions.
# Version 2 added the errors of pipelines against fp32, and the scheduler, prompt and guidance of a config.
# Version 3 added the 99th percentile of times, the time of a pipeline's CUDA graphs, and reserved memory. It
# also added the kind "sweep", which is a run over several batch sizes or numbers of steps.
# Version 4 added the number of frames and the width of a video.
# Version 5 added the errors of single positions of an output against fp32.
SCHEMA = 5
# The fields that a run's JSON has in every version of the format: name -> type.
_TYPES = {"kind": str, "environment": dict, "config": dict, "rows": list}
# The values of a row's ``status``, which says how the row's measurement ended.
OK, UNAVAILABLE, FAILED, WRONG = "ok", "unavailable", "failed", "wrong output"


def document(
    kind: str, environment: dict[str, Any], config: dict[str, Any], rows: Iterable[Any]
) -> dict[str, Any]:
    """Return the results of a benchmark run as a dict for JSON.

    Args:
        kind: the kind of the rows, such as ``"end_to_end"``. It decides which tables show the rows.
        environment: what ``environment.environment`` returned for the run.
        config: the settings of the run.
        rows: instances of a dataclass, one for each measurement.
    """
    return {
        "schema": SCHEMA,
        "kind": kind,
        "environment": environment,
        "config": config,
        "rows": [asdict(row) for row in rows],
    }


def images_path(path: Path) -> Path:
    """The path of the file with a run's images, beside its JSON at ``path``. ``report --html`` shows them."""
    return path.parent / f"{path.stem}.images"


def load(path: Path) -> Any:
    """Return the content of a JSON file.

    Raises OptionError, which names the file, if the file cannot be read or is no JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise OptionError(f"cannot read {str(path)!r}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise OptionError(f"{str(path)!r} holds no result of sdfastgn: it is no JSON ({error})") from None


def read_json(path: Path) -> dict[str, Any]:
    """Read a run that :func:`write_json` wrote.

    Raises OptionError, which names the file, if the file holds no run.
    """
    return checked(path, load(path))


def checked(path: Path, content: Any) -> dict[str, Any]:
    """Return ``content``, which was read from ``path``, if it has the fields of a run.

    Raises OptionError, which names ``path``, if a field is missing or has the wrong type, or if a newer
    sdfastgn wrote the file.
    """
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
    """Write ``content`` as JSON to the file ``path``. Each row and each setting has a line of its own.

    Raises ValueError if ``content`` has NaN or infinity, and OptionError if the file cannot be written.
    """
    lines = ",\n".join(f" {json.dumps(key)}: {_block(value)}" for key, value in content.items())
    with writing(path):
        path.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")


def _block(value: Any) -> str:
    """Returns ``value`` as JSON text. In a list or dict each entry has its own line."""
    encode = functools.partial(json.dumps, allow_nan=False)
    if isinstance(value, dict) and value:
        entries = [f"{encode(key)}: {encode(entry)}" for key, entry in value.items()]
        return "{\n  " + ",\n  ".join(entries) + "\n }"
    if isinstance(value, list) and value:
        return "[\n  " + ",\n  ".join(map(encode, value)) + "\n ]"
    return encode(value)
