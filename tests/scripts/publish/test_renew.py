"""The list of measurements and the command that runs it: budgets, resuming, failures, the archive."""

from __future__ import annotations

import dataclasses
import json
import os
import runpy
import shlex
import sys
import tarfile
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import pytest
import torch

from scripts.publish import pages, plots, real_sizes, renew, runs
from scripts.publish.steps import MOST_SECONDS, RESULTS, ROOT, STEPS, SUMMARY, Step
from scripts.publish.tables.markdown import NO_RESULTS
from sdfastgn.bench.documents import FAILED, OK, write_json
from sdfastgn.bench.variants import VARIANTS
from sdfastgn.cli import digits, session

GPU = "NVIDIA H200"
# Results that no step makes: what they need is built by hand, or the steps' 25 minutes are used up.
BY_HAND = {
    *("stable_fast", "comfyui", "comfyui_weights", "comfyui_vaes", "memory", "offloading", "serving_load"),
    "several_gpus",
    "serving_replicas",
    *("fp8_times", "fp8_mlperf", "fp8_quality", "compiled_videos", "plans"),
    "fusions",  # of docstrings
    *("transformer_claims", "transformers", "transformers_compared", "times_transformers.png"),
}
NAMES = [step.writes for step in STEPS]
COMMIT = "0123456789abcdef"


@pytest.fixture(autouse=True)
def one_commit(monkeypatch):
    monkeypatch.setenv("SDFASTGN_COMMIT", COMMIT)


# ---- the list


def test_all_steps_fit_into_their_time_and_each_into_one_call_on_a_lent_machine():
    assert sum(step.budget for step in STEPS) <= MOST_SECONDS
    assert max(step.budget for step in STEPS) < 600
    assert len(set(NAMES)) == len(NAMES)


def test_every_committed_result_is_made_by_a_step():
    committed = {path.relative_to(RESULTS).as_posix() for path in RESULTS.rglob("*.json")}
    assert committed <= {SUMMARY, *NAMES}


def test_every_table_and_picture_is_fed_and_every_step_feeds_one():
    texts = {page: (ROOT / page).read_text(encoding="utf-8") for page in pages.PAGES}
    tables = {name for text in texts.values() for name in pages.slots(text)}
    pictures = {
        name
        for name in (*plots.PICTURES, "demo.png")
        if any(f"images/{name}" in path.read_text(encoding="utf-8") for path in ROOT.glob("docs/*.md"))
    }
    assert set(plots.PICTURES) <= pictures
    assert {name for step in STEPS for name in step.feeds} == (tables | pictures) - BY_HAND
    assert all(step.feeds for step in STEPS)


def without_running(monkeypatch: pytest.MonkeyPatch) -> dict[str, mock.Mock]:
    """What measures returns at once, after all options have been checked."""
    ran = {name: mock.Mock(return_value=0) for name in ("run_bench", "run_kernels")}
    for name, function in ran.items():
        monkeypatch.setattr(session, name, function)
    monkeypatch.setattr(digits, "run_demo", mock.Mock(return_value=0))
    monkeypatch.setattr(runs, "in_a_process", mock.Mock(side_effect=ZeroDivisionError("measures")))
    return ran


def run_here(arguments: list[str]) -> int:
    """The exit code of a step's command, in this process."""
    _, _, module, *options = arguments
    with mock.patch.object(sys, "argv", [module, *options]), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # another test may have imported the module
        try:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        except SystemExit as end:
            return int(end.code or 0)
    return 0


@pytest.mark.parametrize(
    "step", [s for s in STEPS if s.command.startswith("sdfastgn")], ids=lambda step: step.name
)
def test_the_command_line_takes_the_options_of_a_step(step, tmp_path, monkeypatch):
    ran = without_running(monkeypatch)
    assert run_here(step.arguments(tmp_path / "out.json", tiny=False)) == 0
    for call in ran["run_bench"].call_args_list:
        _, variants = call.args
        assert [v.name for v in variants if v.name not in VARIANTS] == []
        assert call.kwargs["json"] == tmp_path / "out.json"
    assert sum(function.call_count for function in ran.values()) == ("demo" not in step.command)


# ---- a run of made-up steps


def steps(*budgets: int) -> list[Step]:
    return [
        Step(f"{name}.json", name, "", (), budget) for name, budget in zip("abcdef", budgets, strict=False)
    ]


def git_of() -> dict[str, str]:
    return {"commit": os.environ["SDFASTGN_COMMIT"]}


class Machine:
    """A substitute for the processes. Each step takes 10 seconds and writes its file."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, failing: str = "") -> None:
        self.ran: list[str] = []
        self.timeouts: list[float] = []
        self.failing = failing
        self._now = 0.0
        self.gpu = GPU
        where = renew.environment(torch.device("cpu"))
        monkeypatch.setattr(renew, "environment", lambda _: {**where, "gpu": self.gpu, "git": git_of()})
        monkeypatch.setattr(renew, "execute", self.execute)
        monkeypatch.setattr(renew.time, "monotonic", lambda: self._now)

    def execute(self, arguments: list[str], log: Path, timeout: float) -> int | None:
        _, _, name, _, path = arguments
        self.ran.append(name)
        self.timeouts.append(timeout)
        log.write_text("first\nlast line\n")
        self._now += 10
        if name == self.failing:
            return 1
        write_json(Path(path), {"name": name})
        return 0


def states(rows: list[renew.StepRow]) -> list[str]:
    return [row.status for row in rows]


def test_each_step_writes_its_file_and_the_summary_has_its_seconds(tmp_path, monkeypatch):
    machine = Machine(monkeypatch)
    rows = renew.renew(steps(20, 20), tmp_path)
    assert machine.ran == ["a", "b"]
    assert [(row.status, row.seconds, row.budget) for row in rows] == [(OK, 10, 20)] * 2
    content = json.loads((tmp_path / SUMMARY).read_text())
    assert content["kind"] == "renewal"
    assert content["environment"]["git"]["commit"] == COMMIT
    assert [row["writes"] for row in content["rows"]] == ["a.json", "b.json"]
    assert json.loads((tmp_path / "b.json").read_text()) == {"name": "b"}


def test_a_step_that_fails_is_told_and_the_others_run(tmp_path, monkeypatch):
    machine = Machine(monkeypatch, failing="a")
    rows = renew.renew(steps(20, 20), tmp_path)
    assert machine.ran == ["a", "b"]
    assert states(rows) == [FAILED, OK]
    assert rows[0].reason == "exit code 1: last line"
    assert not (tmp_path / "a.json").exists()


def test_an_old_file_does_not_stand_for_a_step_that_fails(tmp_path, monkeypatch):
    Machine(monkeypatch)
    renew.renew(steps(20), tmp_path)
    Machine(monkeypatch, failing="a")
    renew.renew(steps(20), tmp_path)
    assert not (tmp_path / "a.json").exists()


def test_no_step_starts_that_would_not_end_in_time(tmp_path, monkeypatch):
    machine = Machine(monkeypatch)
    rows = renew.renew(steps(20, 50, 30), tmp_path, budget=45)  # each takes 10
    assert machine.ran == ["a", "c"]
    assert states(rows) == [OK, renew.NOT_STARTED, OK]
    assert rows[1].reason == "35 s are left"
    assert machine.timeouts == [45, 35]  # what hangs ends with the call


def test_a_second_call_does_the_rest(tmp_path, monkeypatch):
    machine = Machine(monkeypatch, failing="b")
    renew.renew(steps(20, 20, 90), tmp_path, budget=45)
    machine.failing = ""
    rows = renew.renew(steps(20, 20, 90), tmp_path, resume=True)
    assert machine.ran == ["a", "b", "b", "c"]
    assert states(rows) == [OK] * 3
    assert sum(row.seconds for row in rows) == 30
    assert machine.timeouts[-1] == 90 * renew.PATIENCE


@pytest.mark.parametrize("change", ["commit", "GPU", "tiny", "file", "not asked"])
def test_what_is_of_another_run_is_done_again(change, tmp_path, monkeypatch):
    machine = Machine(monkeypatch)
    renew.renew(steps(20), tmp_path)
    if change == "commit":
        monkeypatch.setenv("SDFASTGN_COMMIT", "another")
    if change == "GPU":
        machine.gpu = "NVIDIA H100"
    if change == "file":
        (tmp_path / "a.json").unlink()
    renew.renew(steps(20), tmp_path, resume=change != "not asked", tiny=change == "tiny")
    assert machine.ran == ["a", "a"]


@pytest.mark.slow
def test_a_program_and_what_it_started_end_with_their_time(tmp_path):
    marker = tmp_path / "alive"
    child = f"import time, pathlib; time.sleep(1.5); pathlib.Path({str(marker)!r}).touch()"
    program = (
        f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {child!r}]); time.sleep(9)"
    )
    begun = time.monotonic()
    assert renew.execute([sys.executable, "-c", program], tmp_path / "log", 0.7) is None
    assert time.monotonic() - begun < 5
    time.sleep(1.5)
    assert not marker.exists()


def test_the_exit_code_and_the_log_of_a_program(tmp_path):
    program = "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)"
    assert renew.execute([sys.executable, "-c", program], tmp_path / "log", 60) == 3
    assert sorted((tmp_path / "log").read_text().split()) == ["err", "out"]


# ---- the archive


def result(commit: str = COMMIT, gpu: str = GPU, **more: object) -> str:
    where = {"git": {"commit": commit}, "gpu": gpu}
    return json.dumps({"kind": "a", "environment": where, "config": {}, "rows": [], **more})


def whole(folder: Path, *, gpu: str = GPU, tiny: bool = False, failed: str = "") -> Path:
    """The archive of a renewal whose files hold their own names."""
    out = folder / "out"
    rows = [renew.StepRow(step.writes, FAILED if step.writes == failed else OK, 1.0, 2) for step in STEPS]
    for name in NAMES:
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text(result(gpu=gpu))
    (out / "unfinished").mkdir()
    (out / "unfinished" / "half.json").write_text("half")
    summary = result(gpu=gpu, kind="renewal", config={"tiny": tiny}, rows=[*map(dataclasses.asdict, rows)])
    (out / SUMMARY).write_text(summary)
    renew.pack(out, folder / "sent" / "renewal.tar.gz")
    return folder / "sent" / "renewal.tar.gz"


def test_an_archive_has_what_is_whole(tmp_path):
    with tarfile.open(whole(tmp_path)) as packed:
        assert set(packed.getnames()) == {SUMMARY, *NAMES}


def test_an_archive_is_put_where_the_pages_look(tmp_path):
    renew.unpack(whole(tmp_path), tmp_path / "results", tmp_path / "images")
    made = {
        path.relative_to(tmp_path / "results").as_posix() for path in (tmp_path / "results").rglob("*.json")
    }
    assert made == {SUMMARY, *(name for name in NAMES if name.endswith(".json"))}
    assert [path.name for path in (tmp_path / "images").iterdir()] == ["demo.png"]
    pages.check_one_commit(tmp_path / "results")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        pytest.param({"tiny": True}, "is a dry run", id="dry run"),
        pytest.param({"failed": "kernels.json"}, "lacks kernels.json; go on with --resume", id="not whole"),
    ],
)
def test_an_archive_that_is_refused_changes_nothing(options, words, tmp_path):
    with pytest.raises(ValueError, match=words):
        renew.unpack(whole(tmp_path, **options), tmp_path / "results", tmp_path / "images")
    assert not (tmp_path / "results").exists()


def test_a_file_that_is_no_archive_is_one_line(tmp_path, capsys):
    (tmp_path / "a.tar.gz").write_text("no")
    assert renew.main(["--unpack", str(tmp_path / "a.tar.gz")]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


# ---- one commit on all pages


def test_results_of_another_commit_or_gpu_are_refused_by_name(tmp_path):
    results = tmp_path / "benchmarks" / "renewal"
    renew.unpack(whole(tmp_path), results, tmp_path)
    (results / "sdxl.json").write_text(result(commit="fedcba9876"))
    (results / "old.json").write_text(result(gpu="NVIDIA H100"))
    words = (
        r"of commit 0123456 on NVIDIA H200, .*old\.json \(0123456, NVIDIA H100\); .*sdxl\.json \(fedcba9, "
    )
    with pytest.raises(ValueError, match=words):
        pages.filled("no table", tmp_path / "benchmarks")


def test_a_missing_result_is_refused_by_name(tmp_path):
    results = tmp_path / "benchmarks" / "renewal"
    renew.unpack(whole(tmp_path), results, tmp_path)
    (results / "kernels.json").unlink()
    with pytest.raises(ValueError, match=r"not there: .*kernels\.json$"):
        pages.filled("no table", tmp_path / "benchmarks")


# ---- the command line


@pytest.mark.parametrize(
    ("git", "gpu", "words"),
    [
        pytest.param({"commit": None, "dirty": None}, True, "set SDFASTGN_COMMIT", id="no commit"),
        pytest.param({"commit": "a", "dirty": True}, True, "changes that are not committed", id="changes"),
        pytest.param({"commit": "a", "dirty": False}, False, "no CUDA GPU", id="no GPU"),
    ],
)
def test_a_run_that_would_be_worth_nothing_is_refused(git, gpu, words, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(renew, "environment", lambda device: {"git": git})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    assert renew.main(["--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("failing", "code"), [("", 0), ("scripts.publish.warm_up", 1)], ids=["all", "one fails"]
)
def test_the_exit_code_says_whether_a_step_failed(failing, code, tmp_path, monkeypatch, capsys):
    def execute(arguments, log, timeout):
        log.write_text("why")
        path = Path(arguments[-1])
        (path / "demo.png" if arguments[-2] == "--output" else path).write_text("{}")
        return int(arguments[2] == failing)

    monkeypatch.setattr(renew, "execute", execute)
    archive = tmp_path / "renewal.tar.gz"
    options = ["--tiny", "--out", str(tmp_path / "out"), "--archive", str(archive)]
    assert renew.main(options) == code
    assert ("failed" in capsys.readouterr().out) == bool(code)
    assert archive.exists()


# ---- real sizes, in several runs


def test_the_runs_have_each_network_once():
    every = [case.name for part in range(1, real_sizes.RUNS + 1) for case in real_sizes.chosen("", part)]
    assert sorted(every) == sorted(case.name for case in real_sizes.CASES)
    assert len(every) == len(set(every))
    assert [case.name for case in real_sizes.chosen("ControlNet", None)] == [
        case.name for case in real_sizes.CASES if "ControlNet" in case.name
    ]


# ---- all of it, tiny


@pytest.mark.slow
def test_a_dry_run_makes_every_result_and_the_pages_take_them(tmp_path, monkeypatch):
    pool = mock.Mock(side_effect=lambda workers, mp_context: ThreadPoolExecutor(workers))
    monkeypatch.setattr(runs, "ProcessPoolExecutor", pool)  # three processes take as long as all the rest

    def execute(arguments, log, timeout):
        log.write_text(shlex.join(arguments))
        return run_here(arguments)

    monkeypatch.setattr(renew, "execute", execute)
    out = tmp_path / "renewal"
    assert renew.main(["--tiny", "--out", str(out)]) == 0
    assert {path.relative_to(out).as_posix() for path in out.rglob("*.json")} == {SUMMARY, *NAMES} - {
        "demo.png"
    }
    pages.check_one_commit(tmp_path)
    # They need fp16, torch.compile or a GPU.
    empty = {"claims", "headline", "compared", "video"}
    shown = {
        name: pages.TABLES[name](tmp_path) for step in STEPS for name in step.feeds if name in pages.TABLES
    }
    assert {name for name, text in shown.items() if NO_RESULTS in text} == empty
