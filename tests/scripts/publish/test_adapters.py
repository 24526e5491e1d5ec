"""What a change of adapters costs: every change has an effect, and a wrong output has no time."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections import Counter

import diffusers
import pytest
import torch

import sdfastgn
from scripts.publish import adapters
from scripts.publish.pages import TABLES
from scripts.publish.tables.adapters import ChangeRow
from sdfastgn.bench.documents import OK, WRONG
from sdfastgn.model_inputs import unet_inputs
from sdfastgn.models.configurations import UNETS
from sdfastgn.patches.graphs import forward
from tests import small_video
from tests.bench.tables.cases import SOURCE, save
from tests.patches.graphs.tape import TapeBackend

CPU = torch.device("cpu")
NAMES = [name for name, _ in adapters.CHANGES]
# Changes after which the output is the same: weights in another place, and new objects that compute the same.
SAME_OUTPUT = {"`fuse_lora`", "new attention processors before each call"}
# The fixture ``few_calls`` replaces these by smaller numbers.
REAL = {name: getattr(adapters, name) for name in ("LATER", "STOCK_LATER", "CALLS_UNTIL_PAUSE")}
ROW = ChangeRow("sdxl", "one LoRA", [80.0, 70.0, 60.0], [90.0, 40.0, 30.0], 5000.0, 5100.0, 1e-3)


@pytest.fixture(scope="module", autouse=True)
def few_calls():
    with pytest.MonkeyPatch.context() as patch:
        for name in REAL:
            patch.setattr(adapters, name, 2)
        yield


@pytest.fixture(scope="module")
def calls() -> dict[str, tuple[torch.Tensor, list[float], float | None]]:
    return dict(zip(NAMES, adapters.measured_calls("tiny", torch.float32, CPU, optimize=False), strict=True))


@pytest.mark.slow
def test_every_change_has_an_effect(calls):
    outputs = [output for output, _, _ in calls.values()]
    same = [name for name, a, b in zip(NAMES[1:], outputs, outputs[1:], strict=False) if torch.equal(a, b)]
    assert set(same) <= SAME_OUTPUT
    assert not torch.equal(calls["no LoRA"][0], calls["another prompt"][0])


@pytest.mark.slow
def test_what_was_removed_is_gone(calls):
    expected = calls["another prompt"][0]
    for name in ("no residuals", "no FreeU", "no T2I-Adapter", "no IP-Adapter", "no LoRA again"):
        torch.testing.assert_close(calls[name][0], expected)


@pytest.mark.slow
def test_a_shorter_list_of_changes(monkeypatch):
    monkeypatch.setitem(adapters.FEWER, "tiny", adapters.FEWER["sdxl"])
    names = [name for name, _ in adapters.changes_of("tiny")]
    assert set(names) == set(adapters.FEWER["sdxl"])
    shorter = dict(
        zip(names, adapters.measured_calls("tiny", torch.float32, CPU, optimize=False), strict=True)
    )
    outputs = [shorter[name][0] for name in names if name not in SAME_OUTPUT]
    assert not any(torch.equal(a, b) for a, b in itertools.pairwise(outputs))
    for name in ("no FreeU", "no LoRA again"):
        torch.testing.assert_close(shorter[name][0], shorter["no LoRA"][0])


@pytest.mark.slow
def test_a_transformer_gets_the_changes_of_loras(monkeypatch, tmp_path):
    small_video.shrink(monkeypatch)
    path = tmp_path / "adapters.json"
    assert adapters.main(["--model", "flux", "--device", "cpu", "--json", str(path)]) == 0
    rows = [ChangeRow(**values) for values in json.loads(path.read_text())["rows"]]
    assert [row.change for row in rows] == [name for name in NAMES if name in adapters.FEWER["flux"]]
    assert {row.status for row in rows} == {OK}


def test_a_loras_scale_is_an_argument_of_unets_and_transformers():
    for cls, name in (("UNet2DConditionModel", "cross"), ("FluxTransformer2DModel", "joint")):
        step = adapters.Step(object.__new__(getattr(diffusers, cls)), {})
        assert adapters.scale_argument(step) == f"{name}_attention_kwargs"


@pytest.mark.drawn(1)
@pytest.mark.parametrize(("optimize", "expected"), [(False, [0, 1, 5, 6]), (True, [0, 1, 2, 3, 4, 5, 6])])
def test_stock_makes_fewer_calls_and_ends_with_the_same(monkeypatch, optimize, expected):
    numbers = []

    def note(step):
        step.before_call = numbers.append

    monkeypatch.setattr(adapters, "CHANGES", (("numbers", note),))
    monkeypatch.setattr(adapters, "LATER", 5)
    adapters.measured_calls("tiny", torch.float32, CPU, optimize=optimize)
    assert numbers == expected


@pytest.mark.slow
def test_calls_after_changes_before_each_call_are_timed_in_a_pause(monkeypatch):
    backend = TapeBackend()
    monkeypatch.setattr(forward, "backend_of", lambda device: backend)
    for name, value in REAL.items():
        monkeypatch.setattr(adapters, name, value)
    config = UNETS["tiny"]
    unet = diffusers.UNet2DConditionModel(**config).eval()
    inputs = unet_inputs(
        unet.config, size=8 * config["sample_size"], batch=1, dtype=torch.float32, device=CPU, seed=0
    )
    step = adapters.Step(unet, inputs)
    sdfastgn.optimize(unet)
    adapters.processors_each_call(step)
    before = Counter(unet.forward.eager)
    step.calls(range(2 + adapters.LATER))
    assert unet.forward.eager - before == {"the model changes too often": 2 + adapters.LATER}


@pytest.mark.slow
def test_a_run_has_a_row_for_each_change(tmp_path):
    path = tmp_path / "adapters.json"
    assert adapters.main(["--model", "tiny", "--device", "cpu", "--json", str(path)]) == 0
    rows = [ChangeRow(**values) for values in json.loads(path.read_text())["rows"]]
    assert [row.change for row in rows] == NAMES
    assert {row.status for row in rows} == {OK}
    assert all(len(row.stock_ms) == len(row.ours_ms) == 3 for row in rows)


def test_a_wrong_output_has_no_time_of_ours(tmp_path):
    rows = [ROW, dataclasses.replace(ROW, change="two LoRAs", error=0.3, status=WRONG)]
    save(tmp_path, "adapters.json", "adapters", rows)
    text = TABLES["adapters"](tmp_path)
    assert "| SDXL, one LoRA | 80 | 70 | 60 | 90 | 40 | 30 | 2.00x | 1.0e-03 | 5000 | 5100 |" in text
    assert f"| SDXL, two LoRAs | 80 | 70 | 60 | {WRONG} | - | - | - | 3.0e-01 | 5000 | 5100 |" in text
    assert text.endswith(SOURCE)
