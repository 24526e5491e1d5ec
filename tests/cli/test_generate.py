"""``sdfastgn generate``: images of a file's lines, in batches, again after a stop, and on two processes."""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline, StableDiffusionPipeline
from PIL import Image

import sdfastgn
from sdfastgn.cli.drawing import METADATA
from sdfastgn.cli.prompts import Settings, batches, read_prompts, shares
from sdfastgn.models.pipelines import build_pipeline
from tests.command_line import ROOT, exit_code, invoke, process

LINES = [
    {"prompt": "a cat"},
    {"prompt": "two dogs", "seed": 7, "negative_prompt": "rain"},
    {"prompt": "ein Vögelchen", "width": 72, "guidance": 5},
    {"prompt": "a fish", "seed": -1},
]


@pytest.fixture(scope="module", params=["tiny", "tiny_xl"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp(request.param))
    build_pipeline(request.param, dtype=torch.float32, device="cpu").save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("tiny"))
    build_pipeline("tiny", dtype=torch.float32, device="cpu").save_pretrained(path)
    return path


def command(model: str, lines: list[Any], folder: Path, *options: str) -> list[str]:
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(f"{json.dumps(each) if isinstance(each, dict) else each}\n" for each in lines))
    start = ["generate", "--model", model, "--prompts", str(prompts), "--out", str(folder / "out")]
    return [*start, "--steps", "2", "--device", "cpu", *options]


def pixels(path: Path) -> np.ndarray:
    return np.asarray(Image.open(path), dtype=np.int16)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_images_are_those_of_the_pipeline(model: str, tmp_path: Path) -> None:
    result = invoke(*command(model, LINES, tmp_path, "--batch-size", "2", "--seed", "40"))
    assert result.exit_code == 0, result.output
    assert "4 images drawn, 0 there before, 0 lines failed" in result.output
    pipe = DiffusionPipeline.from_pretrained(model)
    pipe.set_progress_bar_config(disable=True)
    for number, line in enumerate(LINES, 1):
        path = tmp_path / "out" / f"{number:05}.png"
        seed = line.get("seed", 40 + number)
        picture = pipe(
            line["prompt"],
            negative_prompt=line.get("negative_prompt"),
            width=line.get("width", 64),
            height=64,
            num_inference_steps=2,
            guidance_scale=line.get("guidance", 7.5),
            generator=torch.Generator().manual_seed(seed),
        ).images[0]
        # In a batch of another size fp32 rounds otherwise: one of 255 levels.
        assert np.abs(pixels(path) - np.asarray(picture, dtype=np.int16)).max() <= 1
        content = json.loads(Image.open(path).info[METADATA])
        assert (content["settings"]["prompt"], content["settings"]["seed"]) == (line["prompt"], seed)
        assert content["settings"]["model"] == model
        assert content["versions"]["sdfastgn"] == sdfastgn.__version__
        assert content["versions"]["diffusers"]


def test_what_is_finished_is_not_drawn_again(tiny: str, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a cat\n\ntwo dogs\na bird\na fish\n")
    out = tmp_path / "out"
    start = ["generate", "--model", tiny, "--prompts", str(prompts), "--out", str(out), "--device", "cpu"]
    assert invoke(*start, "--steps", "1").exit_code == 0
    assert names(out) == [f"{line:05}.png" for line in (1, 3, 4, 5)]  # an empty line is no prompt
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    (out / "00001.png").unlink()
    (out / "00003.png").write_bytes(before["00003.png"][:-40])
    (out / "00005.png").write_bytes(b"")
    untouched = (out / "00004.png").stat().st_mtime_ns
    result = invoke(*start, "--steps", "1")
    assert "3 images drawn, 1 there before" in result.output
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert (out / "00004.png").stat().st_mtime_ns == untouched
    # With other settings it is another image, which stays.
    result = invoke(*start, "--steps", "2")
    assert result.exit_code == 2
    assert "00001.png' is another image: its steps is 1, not 2" in result.output
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        ("TXT", "cannot be read as an image"),
        ("PNG", "is a PNG without sdfastgn's settings"),
        ("JPEG", "is a JPEG without sdfastgn's settings"),
    ],
)
def test_a_file_of_others_stays(kind: str, what: str, tiny: str, tmp_path: Path) -> None:
    path = tmp_path / "out" / "00002.png"
    path.parent.mkdir()
    path.write_text("mine") if kind == "TXT" else Image.new("RGB", (8, 8)).save(path, kind)
    before = path.read_bytes()
    result = invoke(*command(tiny, LINES, tmp_path))
    assert result.exit_code == 2
    says = f"sdfastgn: --out: {str(path)!r} {what}; choose another folder, or move it"
    assert result.output.splitlines()[-1] == says
    assert (names(path.parent), path.read_bytes()) == ([path.name], before)


def test_the_same_model_goes_on_by_any_path(
    tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert invoke(*command(tiny, LINES[:1], tmp_path)).exit_code == 0
    monkeypatch.chdir(tmp_path)
    for spelled in (os.path.relpath(tiny), f"{tiny}/"):
        result = invoke(*command(spelled, LINES[:1], tmp_path))
        assert "0 images drawn, 1 there before, 0 lines failed" in result.output


def test_the_ending_of_objects_may_be_in_capitals(tmp_path: Path) -> None:
    path = tmp_path / "PROMPTS.JSONL"
    path.write_text('{"prompt": "a cat"}')
    defaults = {"negative_prompt": None, "width": 64, "height": 64, "steps": 1, "guidance": 1.0, "seed": 0}
    found, problems = read_prompts(path, defaults, 8)
    assert (found[1].prompt, problems) == ("a cat", {})


BAD_LINES = {
    "no prompt": ('{"width": 64}', "must be an object with a prompt, got {'width': 64}"),
    "json": ("{", "no JSON: Expecting property name"),
    "list": ("[]", "must be an object with a prompt, got []"),
    "unknown": ('{"prompt": "a", "size": 64}', "setting: unknown value 'size'; choose from prompt,"),
    "text": ('{"prompt": 1}', "prompt: must be of type str, got 1"),
    "half a character": (r'{"prompt": "a \ud800"}', r"prompt: must be Unicode text, got 'a \ud800'"),
    "deep": ("[" * 100_000, "maximum recursion depth exceeded"),
    "whole": ('{"prompt": "a", "steps": true}', "steps: must be of type int, got True"),
    "steps": ('{"prompt": "a", "steps": 0}', "steps: must be a positive whole number, got 0"),
    "width": ('{"prompt": "a", "width": 100}', "width: must be a positive multiple of 8"),
    "height": ('{"prompt": "a", "height": 0}', "height: must be a positive multiple of 8"),
    "guidance": ('{"prompt": "a", "guidance": NaN}', "guidance: must be finite, got nan"),
    "huge": ('{"prompt": "a", "guidance": 1' + 400 * "0" + "}", "int too large"),
    "seed": (f'{{"prompt": "a", "seed": {2**63}}}', f"seed: must be a whole number of 64 bits, got {2**63}"),
}


def test_bad_lines_are_named_and_the_others_drawn(tiny: str, tmp_path: Path) -> None:
    lines = [*(text for text, _ in BAD_LINES.values()), {"prompt": "a cat", "steps": 1}]
    result = invoke(*command(tiny, lines, tmp_path))
    assert result.exit_code == 1
    for number, (_, words) in enumerate(BAD_LINES.values(), 1):
        assert f"sdfastgn: {tmp_path / 'prompts.jsonl'}:{number}: {words}" in result.output
    assert f"1 image drawn, 0 there before, {len(BAD_LINES)} lines failed" in result.output
    assert names(tmp_path / "out") == [f"{len(lines):05}.png"]


def test_text_that_is_not_utf_8_is_a_bad_line(tiny: str, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_bytes(b"\xff\n")
    result = invoke("generate", "--model", tiny, "--prompts", str(prompts), "--out", str(tmp_path / "out"))
    assert (result.exit_code, f"{prompts}:1: 'utf-8" in result.output) == (1, True), result.output


def test_a_batch_that_fails_is_told_and_the_others_drawn(
    tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = StableDiffusionPipeline.__call__

    @functools.wraps(call)
    def full(self: Any, *arguments: Any, **options: Any) -> Any:
        if options["width"] > 64:
            raise torch.OutOfMemoryError("out of memory")
        return call(self, *arguments, **options)

    monkeypatch.setattr(StableDiffusionPipeline, "__call__", full)
    result = invoke(*command(tiny, LINES, tmp_path, "--stock"))
    assert result.exit_code == 1
    assert "prompts.jsonl:3: OutOfMemoryError: out of memory" in result.output
    assert names(tmp_path / "out") == ["00001.png", "00002.png", "00004.png"]


def test_an_interrupt_leaves_no_half_image(
    tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def save(self: Image.Image, path: Path, **options: Any) -> None:
        path.write_bytes(b"half")
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Image.Image, "save", save)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's jobs may ignore it
    try:
        assert exit_code(monkeypatch, "sdfastgn", *command(tiny, LINES, tmp_path)) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr().err.endswith("sdfastgn: interrupted\n")
    assert not names(tmp_path / "out")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        pytest.param(("--model", "/no/such"), "--model: no such path '/no/such'; give a path", id="model"),
        pytest.param(("--model", "tests"), "--model: no configuration of a UNet in 'tests'", id="no-unet"),
        pytest.param(("--prompts", "/no/such"), "--prompts: cannot read '/no/such'", id="prompts"),
        pytest.param(("--prompts", os.devnull), "--prompts: no prompt in '/dev/null'", id="empty"),
        pytest.param(("--out", ""), "--out: must be a folder, got ''", id="no-out"),
        pytest.param(("--out", "/proc/x"), "--out: cannot make a folder at '/proc/x'", id="out"),
        pytest.param(("--width", "100"), "--width: must be a positive multiple of 8", id="width"),
        pytest.param(("--steps", "0"), "--steps: must be a positive whole number", id="steps"),
        pytest.param(("--batch-size", "0"), "--batch-size: must be a positive whole number", id="batch"),
        pytest.param(("--dtype", "fp8"), "--dtype: unknown value 'fp8'", id="dtype"),
        pytest.param(("--variant", "fp16"), "--model: cannot load", id="variant"),
    ],
)
def test_bad_options_are_one_line_before_anything_is_drawn(
    tiny: str, options: tuple[str, str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    result = invoke(*command(tiny, LINES, tmp_path, *options))
    assert result.exit_code == 2
    assert result.output.splitlines()[-1].startswith(f"sdfastgn: {words}")


def test_a_batch_has_images_of_equal_calls_and_a_process_its_share_of_them() -> None:
    plain = Settings("", None, 64, 64, 2, 7.5, 0)
    wanted = {1: plain, 2: Settings("", "", 64, 64, 2, 7.5, 0), 3: Settings("", None, 72, 64, 2, 7.5, 0)}
    wanted |= dict.fromkeys((4, 5, 6), plain)
    assert list(batches(wanted, wanted, 3)) == [[1, 4, 5], [6], [2], [3]]
    # Accelerate gives each process the next part of the list.
    wide = dict.fromkeys((7, 8, 9), wanted[3])
    assert shares({**wanted, **wide}, [1, 3, 4, 7, 5, 8, 6, 9], 2) == [1, 5, 3, 8, 4, 6, 7, 9]


@pytest.mark.slow
def test_two_processes_draw_what_one_draws(tiny: str, tmp_path: Path) -> None:
    lines = [*LINES, "not JSON"]
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
    assert invoke(*command(tiny, lines, tmp_path / "one")).exit_code == 1
    # On CPUs too: what accelerate calls several GPUs is a launcher of several processes.
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    second = command(tiny, lines[:4], tmp_path / "two")
    done = process(*launcher, "-m", "sdfastgn", *second, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    assert "4 images drawn, 0 there before" in done.stdout
    assert done.stderr.count("wrote") == 2  # the main process shows its own
    one, two = (tmp_path / folder / "out" for folder in ("one", "two"))
    assert names(one) == names(two)
    for name in names(one):
        assert np.abs(pixels(one / name) - pixels(two / name)).max() <= 1
