"""``sdfastgn generate``: images of a file's lines, in batches, again after a stop, and on two machines."""

from __future__ import annotations

import functools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import psutil
import pytest
import torch
from diffusers import (
    DiffusionPipeline,
    LatentConsistencyModelPipeline,
    LCMScheduler,
    StableDiffusionPipeline,
    UNet2DConditionModel,
)
from PIL import Image

import sdfastgn
from sdfastgn.cli import drawing, loading
from sdfastgn.cli.drawing import METADATA
from sdfastgn.cli.prompts import Settings, batches, read_prompts, shares
from sdfastgn.models.configurations import UNETS
from sdfastgn.models.pipelines import build_pipeline
from tests.command_line import ROOT, exit_code, invoke
from tests.processes import process

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


def same_images(one: Path, two: Path) -> bool:
    assert names(one) == names(two)
    return all(np.abs(pixels(one / name) - pixels(two / name)).max() <= 1 for name in names(one))


@pytest.mark.slow
def test_images_are_those_of_the_pipeline(model: str, tmp_path: Path) -> None:
    own = {"StableDiffusionPipeline": 7.5, "StableDiffusionXLPipeline": 5.0}  # diffusers' guidance
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
            **({"guidance_scale": line["guidance"]} if "guidance" in line else {}),
            generator=torch.Generator().manual_seed(seed),
        ).images[0]
        # In a batch of another size fp32 rounds otherwise: one of 255 levels.
        assert np.abs(pixels(path) - np.asarray(picture, dtype=np.int16)).max() <= 1
        content = json.loads(Image.open(path).info[METADATA])
        assert (content["settings"]["prompt"], content["settings"]["seed"]) == (line["prompt"], seed)
        assert content["settings"]["model"] == model
        assert content["settings"]["guidance"] == line.get("guidance", own[type(pipe).__name__])
        assert content["versions"]["sdfastgn"] == sdfastgn.__version__
        assert content["versions"]["diffusers"]


def test_a_single_prompt_needs_no_file(tiny: str, tmp_path: Path) -> None:
    settings = ("--out", str(tmp_path / "out"), "--steps", "2", "--device", "cpu")
    result = invoke("generate", "--model", tiny, "--prompt", "a cat\non a mat", *settings)
    assert result.exit_code == 0
    assert names(tmp_path / "out") == ["00001.png"]
    found = json.loads(Image.open(tmp_path / "out" / "00001.png").info[METADATA])["settings"]
    assert (found["prompt"], found["seed"]) == ("a cat\non a mat", 1)
    assert "settings that are not given are the pipeline's own: guidance 7.5\n" in result.stderr


def test_the_error_of_a_single_prompt_names_its_option(
    tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drawing, "_pictures", mock.Mock(side_effect=ValueError("too long")))
    options = ("--prompt", "a cat", "--out", str(tmp_path / "out"), "--device", "cpu")
    result = invoke("generate", "--model", tiny, *options)
    assert result.exit_code == 1
    assert "sdfastgn: --prompt: ValueError: too long\n" in result.stderr
    assert not (tmp_path / "out").exists()


# Changes to a saved pipeline -> the steps and the guidance of an image that asks for none.
OWN = {
    "its class": ({}, {}, (50, 7.5)),
    "SDXL": ({"_class_name": "StableDiffusionXLPipeline"}, {}, (50, 5.0)),
    "LCM's class": ({"_class_name": "LatentConsistencyModelPipeline"}, {}, (4, 8.5)),
    "LCM's scheduler": ({"scheduler": ["diffusers", "LCMScheduler"]}, {}, (4, 1.0)),
    "TCD's scheduler": ({"scheduler": ["diffusers", "TCDScheduler"]}, {}, (4, 1.0)),
    "LCM with guidance": (
        {"scheduler": ["diffusers", "LCMScheduler"]},
        {"time_cond_proj_dim": 256},
        (4, 7.5),
    ),
}


@pytest.mark.parametrize(("index", "unet", "expected"), OWN.values(), ids=OWN)
def test_steps_and_guidance_are_the_pipelines_own(
    index: dict[str, Any], unet: dict[str, Any], expected: tuple[int, float], tmp_path: Path
) -> None:
    base = {"_class_name": "StableDiffusionPipeline", "scheduler": ["diffusers", "PNDMScheduler"]}
    (tmp_path / "unet").mkdir()
    (tmp_path / "model_index.json").write_text(json.dumps({**base, **index}))
    (tmp_path / "unet" / "config.json").write_text(json.dumps(unet))
    own = loading.own_settings("--model", str(tmp_path))
    assert own == dict(zip(("steps", "guidance"), expected, strict=True))


@pytest.mark.parametrize("origin", ["stabilityai/sd-turbo", "other/sdxl-lightning"])
def test_a_name_of_few_steps_is_a_warning(origin: str, tmp_path: Path) -> None:
    index = {"_class_name": "StableDiffusionPipeline", "_name_or_path": origin}
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    with pytest.warns(
        UserWarning, match="may be made for few steps, but is drawn with steps 50, guidance 7.5"
    ):
        loading.own_settings("--model", str(tmp_path))
    with pytest.warns(UserWarning, match="but is drawn with steps 50$"):
        assert loading.own_settings("--model", str(tmp_path), ["steps"]) == {"steps": 50}


def test_a_pipeline_of_lcm_draws_with_its_own_settings(tmp_path: Path) -> None:
    """It takes no negative prompt."""
    model = tmp_path / "model"
    parts = build_pipeline("tiny", dtype=torch.float32, device="cpu").components
    parts["unet"] = UNet2DConditionModel(**UNETS["tiny"], time_cond_proj_dim=32)
    parts["scheduler"] = LCMScheduler.from_config(parts["scheduler"].config)
    LatentConsistencyModelPipeline(**parts, requires_safety_checker=False).save_pretrained(model)
    options = ("--prompt", "a cat", "--out", str(tmp_path / "out"), "--device", "cpu")
    result = invoke("generate", "--model", str(model), *options)
    assert result.exit_code == 0, result.output
    assert "settings that are not given are the pipeline's own: steps 4, guidance 8.5\n" in result.stderr
    found = json.loads(Image.open(tmp_path / "out" / "00001.png").info[METADATA])["settings"]
    assert (found["steps"], found["guidance"]) == (4, 8.5)


def test_it_says_how_many_images_are_drawn_and_when_all_will_be(
    tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = iter((100.0, 110.0, 130.0, 140.0))
    monkeypatch.setattr("sdfastgn.cli.terminal.time", mock.Mock(monotonic=lambda: next(seconds)))
    lines = [{"prompt": "a cat"}] * 7
    result = invoke(*command(tiny, lines, tmp_path, "--batch-size", "2", "--stock"))
    told = [line.partition(": wrote ")[0] for line in result.stderr.splitlines() if ": wrote " in line]
    # The first batch says nothing of the others. The second took 10 s for two images: 15 s for three.
    seconds_left = (
        "",
        "",
        ", ETA 0:00:15",
        ", ETA 0:00:15",
        ", ETA 0:00:08",
        ", ETA 0:00:08",
        ", ETA 0:00:00",
    )
    assert told == [f"{number}/7{eta}" for number, eta in enumerate(seconds_left, 1)]


@pytest.mark.slow
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
    "whole": ('{"prompt": "a", "steps": true}', "steps: must be of type int | None, got True"),
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


@pytest.mark.parametrize("name", ["prompts.txt", "prompts.jsonl"])
def test_text_that_is_not_utf_8_is_a_bad_line(name: str, tiny: str, tmp_path: Path) -> None:
    prompts = tmp_path / name
    prompts.write_text('{"prompt": "ein Vögelchen"}\n', encoding="latin-1")
    result = invoke("generate", "--model", tiny, "--prompts", str(prompts), "--out", str(tmp_path / "out"))
    assert result.exit_code == 1
    assert f"{prompts}:1: not UTF-8; save the file as UTF-8\n" in result.stderr


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


def test_two_that_draw_one_image_leave_a_whole_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that was given up may still draw when the command is repeated elsewhere."""
    path, picture = tmp_path / "00001.png", Image.new("RGB", (64, 64), "red")
    whole = Image.Image.save
    whole(picture, tmp_path / "whole.png")
    content = (tmp_path / "whole.png").read_bytes()

    def save(self: Image.Image, part: Path, **options: Any) -> None:
        with part.open("wb") as file:
            file.write(content[:40])
            file.flush()
            with monkeypatch.context() as other:
                other.setattr(Image.Image, "save", whole)
                other.setattr(drawing, "OWN", "other")
                drawing._save(picture, path, "")
            file.write(content[40:])

    monkeypatch.setattr(Image.Image, "save", save)
    drawing._save(picture, path, "")
    monkeypatch.undo()
    assert names(tmp_path) == ["00001.png", "whole.png"]
    assert path.read_bytes() == content


def test_what_another_machine_has_is_not_drawn_again(
    tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its folder may be one of its own, or this machine may not see its last files yet."""
    there = [[2, 3], [0]]  # finished elsewhere; failed elsewhere
    monkeypatch.setattr(drawing, "gather_object", lambda mine: mine + there.pop(0))
    result = invoke(*command(tiny, LINES, tmp_path))
    assert "2 images drawn, 2 there before, 0 lines failed" in result.output
    assert names(tmp_path / "out") == ["00001.png", "00004.png"]


def test_what_a_killed_process_has_left_is_removed(tiny: str, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    for name in ("00001.0a1b2c3d.part", "mine.part"):
        (tmp_path / "out" / name).write_bytes(b"half")
    assert invoke(*command(tiny, LINES[:1], tmp_path)).exit_code == 0
    assert names(tmp_path / "out") == ["00001.png", "mine.part"]


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
    assert same_images(tmp_path / "one" / "out", tmp_path / "two" / "out")


def machines(*command: str) -> Iterator[subprocess.Popen[str]]:
    """The launchers of two machines, each with one process."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    for rank in range(2):
        where = ("--num_machines", "2", "--machine_rank", str(rank), "--main_process_ip", "127.0.0.1")
        processes = ("--multi_gpu", "--num_processes", "2", "--main_process_port", str(port))
        yield subprocess.Popen(
            [
                sys.executable,
                "-m",
                "accelerate.commands.launch",
                *processes,
                *where,
                "-m",
                "sdfastgn",
                *command,
            ],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )


@pytest.mark.slow
def test_two_machines_draw_what_one_process_draws(tiny: str, tmp_path: Path) -> None:
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
    assert invoke(*command(tiny, LINES, tmp_path / "one")).exit_code == 0
    running = list(machines(*command(tiny, LINES, tmp_path / "two")))
    outputs = [each.communicate(timeout=300)[0] for each in running]
    assert [each.returncode for each in running] == [0, 0], outputs
    assert "4 images drawn, 0 there before, 0 lines failed" in outputs[0]
    assert [output.count("wrote") for output in outputs] == [2, 0]  # the main process shows its own
    assert same_images(tmp_path / "one" / "out", tmp_path / "two" / "out")


@pytest.mark.slow
@pytest.mark.parametrize("dies", [0, 1])
def test_what_a_dead_machine_had_left_is_drawn_by_the_next_start(
    tiny: str, dies: int, tmp_path: Path
) -> None:
    """The other machine first draws the rest of its own share."""
    lines = [{"prompt": "a cat", "steps": 10}] * 24
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
    assert invoke(*command(tiny, lines, tmp_path / "one")).exit_code == 0
    two = command(tiny, lines, tmp_path / "two")
    out = tmp_path / "two" / "out"
    running = list(machines(*two))
    mine = {f"{line:05}.png" for line in range(1 + dies, 25, 2)}
    others = {f"{line:05}.png" for line in range(2 - dies, 25, 2)}

    def drawn() -> set[str]:
        return {path.name for path in out.glob("*.png")}

    try:
        while len(drawn() & mine) < 3:
            assert [each.poll() for each in running] == [None, None], running[dies].communicate()
            time.sleep(0.02)
        launcher = psutil.Process(running[dies].pid)
        for each in (*launcher.children(recursive=True), launcher):
            each.kill()
        running[dies].wait(timeout=60)
        output, _ = running[1 - dies].communicate(timeout=300)
    finally:
        for each in running:
            each.kill()
    assert running[1 - dies].returncode == 1, output
    assert others < drawn()
    assert mine - drawn()
    before = {path.name: path.stat().st_mtime_ns for path in out.glob("*.png")}
    result = invoke(*two)
    assert f"{24 - len(before)} images drawn, {len(before)} there before, 0 lines failed" in result.output
    assert {name: (out / name).stat().st_mtime_ns for name in before} == before
    assert same_images(tmp_path / "one" / "out", out)
