"""What a user waits for: rows of three processes, the gate, tables."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from sdfastgn import cli
from sdfastgn.bench import documents
from sdfastgn.bench.models import architectures, warm_up
from sdfastgn.bench.models import run as end_to_end
from sdfastgn.bench.models.warm_up import WaitRow
from sdfastgn.bench.models.workload import BenchConfig
from sdfastgn.bench.tables import pages as tables

CONFIG = BenchConfig("tiny", "pipeline", 64, 1, "fp32", "cpu", repeats=1, steps=1)
ROW = WaitRow("", [3.0, 2.0, 1.0], [0.9, 0.5, 0.1, 0.1], 10.0, 12.0)


def test_figures_of_a_row():
    assert ROW.second_image_s == 5.0
    assert ROW.new_size_over_s == pytest.approx(1.2)


def test_measured_in_this_process():
    row, image = warm_up.measure(CONFIG, 48, optimise=True)
    assert len(row.image_s) == warm_up.IMAGES
    assert len(row.new_size_s) == warm_up.STEPS_AT_NEW_SIZE
    assert min(*row.image_s, *row.new_size_s) > 0
    assert image.shape == (1, 64, 64, 3)
    assert np.isfinite(image).all()


def script(monkeypatch, *arguments):
    """How ``scripts/time_warm_up.py`` ends."""
    monkeypatch.setattr("sys.argv", ["time_warm_up.py", "--model", "tiny", "--device", "cpu", *arguments])
    with pytest.raises(SystemExit) as caught:
        cli.main("doc", "warm-up")
    return caught.value


def _images(*images):
    """Stands for the processes, which return these."""
    return mock.patch.object(warm_up, "_worker", side_effect=[(ROW, image) for image in images])


def test_ways_share_one_cache_that_is_empty_at_first():
    image = np.linspace(0, 1, 192).reshape(1, 8, 8, 3)
    with _images(image, image, image) as worker:
        rows = warm_up.run(CONFIG, 48)
    assert [row.variant for row in rows] == ["eager", "sdfastgn, cold cache", "sdfastgn, warm cache"]
    assert [call.args[2] for call in worker.call_args_list] == [False, True, True]
    assert len({call.args[3] for call in worker.call_args_list}) == 1
    assert all(row.status == documents.OK for row in rows)


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
    assert warm_up.cells(row, ROW) == [row.variant, f"wrong output: {row.reason}"]


def test_a_process_that_fails_says_why(tmp_path):
    with pytest.raises(RuntimeError, match="no-such-device"):
        warm_up._worker(dataclasses.replace(CONFIG, device="no-such-device"), 48, False, tmp_path, tmp_path)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        pytest.param(("--new-size", "0"), "--new-size: must be a positive multiple of 8", id="new-size"),
        pytest.param(
            ("--weights", "no/such"), "--weights: no configuration of a UNet in 'no/such'", id="weights"
        ),
        pytest.param(("--json", "/proc/x.json"), "--json: cannot write a file at '/proc/x.json'", id="json"),
    ],
)
def test_bad_input_is_one_line(arguments, words, monkeypatch, capsys):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # no test may need the network
    caught = script(monkeypatch, *arguments)
    assert caught.code == 2
    error = capsys.readouterr().err
    assert error.startswith(f"time_warm_up.py: {words}")
    assert error.count("\n") == 1


def test_weights_that_cannot_be_loaded_are_one_line(tmp_path, monkeypatch, capsys):
    (tmp_path / "unet").mkdir()
    (tmp_path / "unet" / "config.json").write_text(
        json.dumps(architectures.UNETS["tiny"])
    )  # and nothing else
    caught = script(monkeypatch, "--weights", str(tmp_path))
    assert caught.code == 2
    error = capsys.readouterr().err
    assert error.startswith(f"time_warm_up.py: --weights: cannot load '{tmp_path}'")
    assert error.count("\n") == 1


def test_the_json_says_that_cudnn_tries_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(warm_up, "run", lambda config, new_size: [dataclasses.replace(ROW, variant="eager")])
    path = tmp_path / "out.json"
    caught = script(monkeypatch, "--json", str(path))
    assert caught.code == 0
    content = json.loads(path.read_text())
    (part,) = content["config"]["parts"]
    assert part["cudnn_benchmark"] is content["environment"]["switches"]["cudnn.benchmark"] is False
    assert content["config"]["new_size"] == 48


def test_markdown(tmp_path: Path):
    rows = [
        dataclasses.replace(ROW, variant="eager"),
        dataclasses.replace(ROW, variant="sdfastgn", image_s=[2.0, 1.0, 0.5]),
    ]
    where = {
        "gpu": "G",
        "packages": {},
        "git": {"commit": "c", "dirty": None},
        "date": "2026-11-21T00:00:00",
        "driver": "1",
    }
    content = documents.document("warm_up", where, {**end_to_end.describe([CONFIG]), "new_size": 48}, rows)
    (tmp_path / "warm_up.json").write_text(json.dumps(content))
    text = tables.filled("<!-- table:warm_up --><!-- /table:warm_up -->", tmp_path)
    assert "| sdfastgn | 3.00 | -2.00 | 0.500 | 1.200 | 10 | 12 | - |" in text
    assert "new size 48²" in text
