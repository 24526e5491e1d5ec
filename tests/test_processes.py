"""Processes that wait for each other: when one fails the others are stopped, and the failure says why."""

import sys
import time

import pytest

from tests.processes import run_together

pytestmark = pytest.mark.slow


def python(code):
    return [sys.executable, "-S", "-c", code]


WAITS = python("import time; open('began', 'w'); time.sleep(60)")
FAILS = python(
    "import os, time\nwhile not os.path.exists('began'): time.sleep(0.01)\nraise SystemExit('no port')"
)


@pytest.mark.parametrize("first", [0, 1])
def test_the_others_do_not_wait_for_one_that_failed(first, tmp_path):
    commands = [WAITS, WAITS]
    commands[first] = FAILS
    began = time.monotonic()
    with pytest.raises(AssertionError, match="no port") as failure:
        run_together(commands, tmp_path, cwd=tmp_path)
    assert time.monotonic() - began < 50
    said = str(failure.value)
    assert f"process {first}: 1" in said
    assert f"process {1 - first}: None" in said
    assert 'File "<string>", line 1 in <module>' in said  # where the other one waited


def test_processes_that_take_too_long_say_where_they_are(tmp_path):
    with pytest.raises(AssertionError, match=r"(?s)process 0: None.*line 1 in <module>.*process 1: 0"):
        run_together([WAITS, python("")], tmp_path, cwd=tmp_path, seconds=3)


def test_all_succeed_whatever_they_write(tmp_path):
    writes = python("import sys; sys.stderr.write('x' * 200_000)")  # more than a pipe holds
    run_together([writes, writes], tmp_path)
