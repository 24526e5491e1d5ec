"""What a user waits for: rows of three processes, the gate, tables."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import numpy as np
import pytest

from scripts.publish import runs, warm_up
from sdfastgn.bench import documents
from sdfastgn.bench.tables.warm_up import WaitRow, warm_up_table
from sdfastgn.bench.workload import BenchConfig
from sdfastgn.kernels.common import archive as archives
from sdfastgn.program import OptionError
from tests.command_line import exit_code_of

CONFIG = BenchConfig("tiny", "pipeline", 64, 1, "fp32", "cpu", repeats=1, steps=1)
ROW = WaitRow("", [3.0, 2.0, 1.0], [0.9, 0.5, 0.1, 0.1], 10.0, 12.0)


def test_figures_of_a_row():
    assert ROW.second_image_s == 5.0
    assert ROW.new_size_over_s == pytest.approx(1.2)


def _images(*images):
    """Stands for the processes, which return these, and for the one that only reads files from disk."""
    results = [(None, np.zeros(())), *((ROW, image) for image in images)]
    return mock.patch.object(warm_up, "in_a_process", side_effect=results)


def test_ways_share_one_cache_that_is_empty_at_first():
    image = np.linspace(0, 1, 192).reshape(1, 8, 8, 3)
    with _images(image, image, image) as worker:
        rows = warm_up.run(CONFIG, 48)
    assert [row.variant for row in rows] == ["eager", "sdfastgn, cold cache", "sdfastgn, warm cache"]
    assert [call.kwargs["optimize"] for call in worker.call_args_list] == [False, False, True, True]
    assert len({call.kwargs["triton_cache"] for call in worker.call_args_list}) == 1
    assert all(row.status == documents.OK for row in rows)


def test_an_archive_has_an_empty_cache_of_its_own(tmp_path):
    image = np.linspace(0, 1, 192).reshape(1, 8, 8, 3)
    with _images(*[image] * 4) as worker:
        rows = warm_up.run(CONFIG, 48, tmp_path)
    *_, shared, last = (call.kwargs for call in worker.call_args_list)
    assert rows[-1].variant == warm_up.WITH_ARCHIVE
    assert last == {"optimize": True, "triton_cache": last["triton_cache"], "archive": tmp_path}
    assert last["triton_cache"] != shared["triton_cache"]


def test_an_archive_that_was_not_used_gets_no_time(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", "another")
    monkeypatch.setenv(archives.VARIABLE, "another")
    path = tmp_path / "kernels.zip"
    with pytest.raises(OptionError, match=f"^--archive: '{path}' was not used: no kernel ran on a GPU"):
        warm_up.measure(CONFIG, 48, optimize=True, triton_cache=str(tmp_path), archive=path)
    assert os.environ[archives.VARIABLE] == str(path)


@pytest.mark.parametrize("which", [1, 2], ids=["cold", "warm"])
def test_a_wrong_image_gets_no_time(which):
    good = np.linspace(0, 1, 192).reshape(1, 8, 8, 3)
    images = [good, good, good]
    images[which] = 1 - good
    with _images(*images):
        row = warm_up.run(CONFIG, 48)[which]
    assert row.status == documents.WRONG
    assert "below 40 dB" in row.reason
    assert row.image_s == row.new_size_s == []
    assert warm_up_table([ROW, row]).body[1] == [row.variant, "wrong output"]


def test_a_process_hands_back_its_row_and_image(tmp_path, monkeypatch):
    """What runs in a process of its own runs in this one."""
    monkeypatch.setenv("TRITON_CACHE_DIR", "another")
    row, image = warm_up.measure(CONFIG, 48, optimize=True, triton_cache=str(tmp_path))
    assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path)
    assert (len(row.image_s), len(row.new_size_s)) == (warm_up.IMAGES, warm_up.STEPS_AT_NEW_SIZE)
    assert min(*row.image_s, *row.new_size_s) > 0
    assert image.shape == (1, 64, 64, 3)
    assert 0 < image.std() < 1


def test_weights_that_cannot_be_loaded_are_told_by_the_process(tmp_path, monkeypatch):
    pool = mock.Mock(side_effect=lambda workers, mp_context: ThreadPoolExecutor(workers))
    monkeypatch.setattr(runs, "ProcessPoolExecutor", pool)
    config = dataclasses.replace(CONFIG, weights=str(tmp_path))
    with pytest.raises(OptionError, match=f"^--weights: cannot load '{tmp_path}'"):
        runs.in_a_process(warm_up.measure, config, 48, optimize=False, triton_cache=str(tmp_path))
    assert pool.call_args.kwargs["mp_context"].get_start_method() == "spawn"  # with nothing imported


def test_packages_get_bytecode_where_python_writes_none(tmp_path, monkeypatch):
    (tmp_path / "a_package").mkdir()
    (tmp_path / "a_package" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(warm_up, "PACKAGES", ("a_package", "no_package"))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    warm_up.write_bytecode()
    assert [*tmp_path.glob("a_package/__pycache__/__init__.*.pyc")]


def test_the_script_prints_and_writes(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(warm_up, "PACKAGES", ())
    monkeypatch.setattr(warm_up, "run", lambda *options: [dataclasses.replace(ROW, variant="eager")])
    path = tmp_path / "out.json"
    arguments = ("--model", "tiny", "--device", "cpu", "--json", str(path))
    assert exit_code_of(monkeypatch, warm_up.first_images, *arguments) == 0
    assert "second image" in capsys.readouterr().out
    content = json.loads(path.read_text())
    (part,) = content["config"]["parts"]
    # These processes leave cuDNN as a user has it: it tries no algorithms.
    assert part["cudnn_benchmark"] is content["environment"]["switches"]["cudnn.benchmark"] is False
    assert content["config"]["new_size"] == 48
