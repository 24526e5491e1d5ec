"""Several processes that time a pipeline together; the others are simulated by what they answer."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from sdfastgn.bench import run as end_to_end
from sdfastgn.bench.documents import FAILED, OK, UNAVAILABLE, WRONG
from sdfastgn.bench.run import Row
from sdfastgn.bench.tables.end_to_end import end_to_end_table, row_notes
from sdfastgn.bench.variants import VARIANTS
from sdfastgn.bench.workload import BenchConfig, Workload
from sdfastgn.cli import processes
from sdfastgn.program import OptionError
from tests.bench.cases import broken_variant, failing
from tests.command_line import invoke

CONFIG = BenchConfig("tiny", "pipeline", 8, 3, "fp32", "cpu", repeats=2, steps=2)
IMAGES = np.linspace(0, 1, 192).reshape(1, 8, 8, 3)
Answer = Callable[[Any], list[Any]]


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Answer], mock.Mock]]:
    """Starts this process as the first of several, whose answers follow its own."""
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr("accelerate.PartialState", mock.Mock())

    def start(answer: Answer) -> mock.Mock:
        gather = mock.Mock(side_effect=lambda mine: [*mine, *answer(mine[0])])
        monkeypatch.setattr("accelerate.utils.gather_object", gather)
        return gather

    return start


def rows(*names: str, call: Callable[[], Any] = lambda: IMAGES) -> list[Row]:
    variants = [VARIANTS.get(name) or broken_variant(failing) for name in names]
    return end_to_end.run(CONFIG, variants, workload=Workload(torch.nn.Identity(), call, None))


def test_images_a_second_are_those_of_the_slowest(ask):
    ask(lambda mine: [(100.0, ""), (50.0, "")])
    (row,) = rows("eager")
    assert row.status == OK
    assert row.process_images_s is not None
    assert row.process_images_s[1:] == [6 / 100, 6 / 50]
    assert row.images_s == 3 * 6 / 100
    assert "images/s" in end_to_end_table([row], "").header
    assert row_notes([row])[0].startswith("eager: images/s of each process, all at the same time: ")
    assert row_notes([row])[0].endswith(", 0.06, 0.12")


def test_what_another_process_cannot_time_has_no_time(ask):
    ask(lambda mine: [(0.0, "no memory")])
    (row,) = rows("eager")
    assert (row.status, row.reason, row.median_ms) == (FAILED, "RuntimeError: process 1: no memory", None)


def test_the_others_do_not_wait_for_what_this_process_cannot_time(ask):
    gather = ask(lambda mine: [(1.0, "")])
    found = rows("eager", "broken", "stable_fast")
    assert [row.status for row in found] == [OK, FAILED, UNAVAILABLE]
    told = [call.args[0][0][1] for call in gather.call_args_list]
    # Eager: ready, timed; the others: once each, and why.
    assert told == ["", "", found[1].reason, found[2].reason]


def test_a_call_that_fails_while_all_time_it_is_told(ask):
    # The reference, the gate, two warm-ups, two calls of its own, and one of the two with the others.
    outputs = [IMAGES] * 7
    gather = ask(lambda mine: [(1.0, "")])
    (row,) = rows("eager", call=outputs.pop)
    assert (row.status, row.reason) == (FAILED, "RuntimeError: process 0: IndexError: pop from empty list")
    assert gather.call_args.args == ([(0.0, "IndexError: pop from empty list")],)


@pytest.mark.drawn(1)
@pytest.mark.parametrize("main", [True, False])
def test_the_main_process_alone_prints_and_writes(main, ask, tmp_path, monkeypatch):
    ask(lambda mine: [mine])

    @contextlib.contextmanager
    def joined(device: str) -> Iterator[tuple[Any, str]]:
        yield None, device

    monkeypatch.setattr(processes, "joined", joined)
    monkeypatch.setenv("RANK", "0" if main else "1")
    path = tmp_path / "out.json"
    chosen = ("--part", "pipeline", "--steps", "1", "--variants", "eager", "--repeats", "1")
    result = invoke("bench", *chosen, "--device", "cpu", "--json", str(path))
    assert result.exit_code == 0, result.output
    assert ("images/s" in result.output, path.exists()) == (main, main)
    if main:
        content = json.loads(path.read_text())
        assert content["kind"] == "processes"
        assert len(content["rows"][0]["process_images_s"]) == 2
    else:
        assert result.output == ""


@pytest.mark.usefixtures("ask")
def test_several_processes_time_pipelines_on_gpus_of_their_own():
    result = invoke("bench", "--part", "unet", "--device", "cpu")
    assert result.exit_code == 2
    assert "sdfastgn: --part: several processes can only time 'pipeline', got 'unet'" in result.output
    with pytest.raises(OptionError, match=r"^--device: each process has its own GPU, got 'cuda:1'"):
        processes.joined("cuda:1").__enter__()


def test_wrong_is_wrong_in_each_process(ask):
    gather = ask(lambda mine: [mine])
    outputs = [1 - IMAGES, IMAGES]
    (row,) = rows("eager", call=outputs.pop)
    assert (row.status, row.images_s) == (WRONG, None)
    assert gather.call_args.args == ([(0.0, row.reason)],)
