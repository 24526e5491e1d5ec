"""What both example servers answer. Clients need not know which of them they ask."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

__all__ = ["BUSY", "CASES", "SEVEN", "WRONG_PROMPT", "Case", "check_answer", "check_seeds"]

SEVEN = {"prompt": "a red handwritten seven", "steps": 2, "guidance": 3, "width": 64, "height": 64, "seed": 3}
# The tests' pipelines raise an error for this prompt.
WRONG_PROMPT = "wrong"
BUSY = (503, {"detail": "too many requests are waiting"}, {"retry-after": "1"})


class Case(NamedTuple):
    """A request, and its answer. ``fields``: the fields that the answer names; None: ``detail`` is a text."""

    name: str
    status: int
    content: bytes = json.dumps(SEVEN).encode()
    fields: list[list[str | int]] | None = None
    detail: str | None = None
    headers: tuple[tuple[str, str], ...] = ()
    method: str = "POST"
    path: str = "/images"
    content_type: str = "application/json"


def _with(name: str, value: Any) -> bytes:
    return json.dumps({**SEVEN, name: value}).encode()


CASES = (
    Case("an image", 200, headers=(("content-type", "image/png"), ("seed", "3"))),
    Case("a wrong width", 422, _with("width", 100), [["body", "width"]]),
    Case("a wrong type", 422, _with("prompt", 7), [["body", "prompt"]]),
    Case("an unknown field", 422, _with("cfg", 1), [["body", "cfg"]]),
    Case("two wrong fields", 422, b'{"prompt": 7, "steps": 101}', [["body", "prompt"], ["body", "steps"]]),
    Case("NaN", 422, _with("guidance", float("nan")), [["body", "guidance"]]),
    Case("a seed below 0", 422, _with("seed", -1), [["body", "seed"]]),
    Case("a long prompt", 422, _with("prompt", "a cat " * 200_000), [["body", "prompt"]]),
    Case("no prompt", 422, b"{}", [["body", "prompt"]]),
    Case("no body", 422, b"", [["body"]]),
    Case("no JSON", 422, b'{"prompt"', [["body", 9]]),
    Case("no UTF-8", 400, b'{"prompt": "\xff"}', detail="There was an error parsing the body"),
    Case("another type of content", 422, content_type="text/plain", fields=[["body"]]),
    Case("a prompt that fails", 500, _with("prompt", WRONG_PROMPT), detail="the image could not be drawn"),
    Case("another path", 404, path="/pictures", detail="Not Found"),
    Case("another method", 405, method="GET", detail="Method Not Allowed", headers=(("allow", "POST"),)),
)  # fmt: skip


def check_answer(client: Any, case: Case) -> None:
    """Ask as ``case`` says, and compare the answer. ``client``: of httpx."""
    content = {"content": case.content, "headers": {"content-type": case.content_type}}
    answer = client.request(case.method, case.path, **content)
    assert answer.status_code == case.status, answer.text
    assert dict(case.headers).items() <= dict(answer.headers).items()
    if case.status == 200:
        return
    assert answer.headers["content-type"] == "application/json"
    detail = answer.json().pop("detail")
    if case.fields is None:
        assert answer.json() == {"detail": case.detail}
    else:
        assert [each["loc"] for each in detail] == case.fields
        assert all(each.keys() == {"loc", "msg"} for each in detail)


def check_seeds(post: Callable[[dict[str, Any]], Any]) -> None:
    """Without a seed images differ, and the seed that an answer names draws the same image again."""
    body = {name: value for name, value in SEVEN.items() if name != "seed"}
    first, second = post(body), post(body)
    assert first.headers["seed"] != second.headers["seed"]
    assert first.content != second.content
    assert post({**body, "seed": int(first.headers["seed"])}).content == first.content
