"""Results read again: their versions, beside one another, and beside published numbers."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from scripts.publish.steps import RESULTS, SUMMARY
from scripts.publish.tables import adapters, tiled_decode
from sdfastgn.bench import documents
from sdfastgn.bench.presets import PRESETS
from sdfastgn.bench.run import describe
from sdfastgn.bench.tables.results import Result, cases_of, comparison, preset_tables, tables_of
from sdfastgn.cli import bench_options
from tests.bench.tables.cases import ENVIRONMENT, row, save, text_of
from tests.command_line import invoke


def pipeline_result(name: str, steps: int, gpu: str = "NVIDIA H200", **times: float) -> Result:
    part = {"model": "sd15", "part": "pipeline", "size": 512, "batch": 2, "dtype": "fp16", "steps": steps}
    rows = [vars(row(variant, ms, part="pipeline")) for variant, ms in times.items()]
    content = {"kind": "end_to_end", "environment": {**ENVIRONMENT, "gpu": gpu}, "config": {"parts": [part]}}
    return Result(name, {**content, "rows": rows})


# ---- versions


def test_a_result_without_a_version_is_of_the_first(tmp_path):
    path = save(tmp_path, "old.json", "end_to_end", [row("eager", 25.0)])
    content = json.loads(path.read_text())
    del content["schema"]
    path.write_text(json.dumps(content))
    assert documents.read_json(path) == content


# Results that the command line does not show, because no command makes them.
ONLY_ON_PAGES = {RESULTS / f"{kind}.json" for kind in (adapters.KIND, tiled_decode.KIND)} | {
    RESULTS / SUMMARY
}


@pytest.mark.parametrize(
    "path", sorted(set(RESULTS.glob("*.json")) - ONLY_ON_PAGES), ids=lambda path: path.stem
)
def test_committed_results_are_read(path):
    assert all(table.body for table in tables_of(Result(path.name, documents.read_json(path))))


def test_times_that_a_profiler_may_have_changed_are_left_out():
    recorded = {"part": "unet", "profile": {"source": "call"}}
    rows = [row("compile", 290.0, part="pipeline"), row("eager", 25.0, **recorded), row("compile", 12.0)]
    rows = [dataclasses.replace(each, p99_ms=each.median_ms) for each in rows]
    content = {"kind": "profile", "environment": ENVIRONMENT, "config": {}, "rows": [*map(vars, rows)]}
    shown = [row for each in cases_of(Result("", content)).values() for row in each]
    expected = {("pipeline", "compile"): 290.0, ("unet", "eager"): 25.0, ("unet", "compile"): None}
    for time in ("median_ms", "p99_ms"):
        assert {(row.part, row.variant): getattr(row, time) for row in shown} == expected


@pytest.mark.parametrize(
    ("parts", "profiled"), [(["pipeline"], [True]), (["pipeline", "vae"], [False, True])]
)
def test_a_pipeline_is_profiled_alone(parts, profiled):
    configs = bench_options.bench_configs(model="tiny", parts=parts, device="cpu", profile=True)
    assert [config.profile for config in configs] == profiled


def test_several_processes_have_a_report_and_are_compared_with_as_many():
    one, two = (pipeline_result(name, 30, eager=800.0) for name in "ab")
    two.content["kind"] = "processes"
    two.content["rows"][0] |= {"images_s": 4.0, "process_images_s": [2.0, 2.0]}
    (table,) = tables_of(two)
    assert table.title == "SD1.5 pipeline 512², batch 2, fp16, 30 steps, 2 processes"
    assert "images/s" in table.header
    assert comparison([one, two]).body == []


# ---- compared


def test_two_results_side_by_side():
    here = pipeline_result("a.json", 30, eager=800.0, sdfastgn=200.0, stable_fast=300.0)
    times = {"eager": 1200.0, "sdfastgn": 150.0, "stable_fast": 301.0, "compile": 900.0}
    table = comparison([here, pipeline_result("b.json", 30, gpu="NVIDIA L4", **times)])
    assert table.header == ["what", "variant", "a.json", "b.json, other machine", "b.json / a.json"]
    what = "SD1.5 pipeline 512², batch 2, fp16, 30 steps"
    assert table.body == [
        [what, "eager", "800", "1200", "1.50, slower"],
        [what, "sdfastgn", "200", "150", "0.75, faster"],
        [what, "stable-fast", "300", "301", "1.00, equal"],
        [what, "torch.compile", "-", "900", "-"],
    ]
    assert "slower or faster than a.json" in table.caption
    assert comparison([here, pipeline_result("b.json", 50, eager=1300.0)]).body == []


@pytest.mark.parametrize(("count", "words"), [(1, "1 step, 1 process"), (2, "2 steps, 2 processes")])
def test_one_is_no_plural(count, words):
    result = pipeline_result("a", count, eager=800.0)
    result.content["kind"] = "processes"
    result.content["rows"][0] |= {"process_images_s": [2.0] * count}
    assert next(iter(cases_of(result))).endswith(words)


def test_what_one_result_alone_has_is_shown_too(tmp_path):
    unet, vae = row("eager", 25.0), row("eager", 17.0, part="vae")
    first, second = save(tmp_path, "a.json", "end_to_end", [unet]), tmp_path / "b.json"
    save(tmp_path, second.name, "end_to_end", [unet, vae])
    files = [str(path) for path in (first, second, RESULTS / "warm_up_sdxl.json")]
    result = invoke("report", *files)
    assert result.exit_code == 0, result.output
    assert "first images, sdxl 1024²" in result.stdout
    for order in (files[:2], files[1::-1]):
        lines = invoke("report", *order, COLUMNS="200").stdout.splitlines()
        (line,) = (line for line in lines if "VAE decode" in line)
        assert sorted(cell.strip() for cell in line.split("│")[3:-1]) == ["-", "-", "17"]


# ---- presets


def preset_result(name: str, ms: float, **given: Any) -> Result:
    configs = bench_options.preset_configs(name, device="cpu", **given)
    rows = [
        vars(row("sdfastgn", ms, part=each.part)) | {key: getattr(each, key) for key in ("model", "size")}
        | {"batch": each.batch, "dtype": each.dtype}
        for each in configs
    ]  # fmt: skip
    content = {"kind": "preset", "environment": ENVIRONMENT, "config": describe(configs)}
    return Result("here", {**content, "rows": rows})


LEFT_OUT = ["published numbers are left out"]
# Preset, options, milliseconds -> what they are in the preset's unit, and published numbers beside them.
IN_UNITS = {
    "fal": ("fal", {}, 1000.0, "50", ["31.19", "8.43"]),
    "stable-fast": ("stable-fast", {}, 1000.0, "30", ["104.6", "21.6"]),
    "diffusion-fast": ("diffusion-fast", {}, 1500.0, "1.5", ["2.54"]),
    "mlperf": ("mlperf", {}, 16000.0, "2", ["2.177", "2.044", "2.3"]),
    "diffusers": ("diffusers", {}, 12.3, "12.3", ["not published"]),
    "a part alone": ("fal", {"parts": ["unet"]}, 250.0, "4", []),
    "a part without the unit": ("mlperf", {"parts": ["unet"]}, 250.0, "-", []),
    "a part of many images": ("mlperf", {"parts": ["vae"]}, 250.0, "128", []),
    "other settings": ("mlperf", {"batch": 4}, 1000.0, "4", LEFT_OUT),
    "another guidance": ("fal", {"guidance": 0.0}, 1000.0, "50", LEFT_OUT),
    "another prompt": ("stable-fast", {"prompt": "A dog"}, 1000.0, "30", LEFT_OUT),
    "another seed": ("fal", {"seed": 1}, 1000.0, "50", LEFT_OUT),
    "another scheduler": ("fal", {"scheduler": "DDIMScheduler"}, 1000.0, "50", LEFT_OUT),
    "other repeats": ("fal", {"repeats": 3}, 1000.0, "50", ["31.19"]),
}


@pytest.mark.parametrize(("name", "given", "ms", "ours", "theirs"), IN_UNITS.values(), ids=IN_UNITS)
def test_a_preset_in_its_unit_beside_published_numbers(name, given, ms, ours, theirs):
    tables = preset_tables(preset_result(name, ms, **given))
    assert len(tables) == len(PRESETS[name].cases)
    for table in tables:
        assert table.header[-1] == PRESETS[name].unit
        assert table.body[0] == ["sdfastgn", "NVIDIA H200", ours]
        assert all(line[1] == "other machine" for line in table.body[1:])
        assert not (given.keys() - {"repeats"} and table.body[1:])
    shown = " ".join(text_of(table) for table in tables)
    assert [number for number in theirs if number not in shown] == []


def test_options_replace_a_presets_settings():
    first, second = bench_options.preset_configs("fal", device="cpu", steps=2)
    assert (first.model, first.size, first.steps, first.prompt) == ("sd15", 512, 2, "A photo of a cat")
    assert (second.model, second.guidance, second.dtype) == ("sdxl", 5.0, "fp16")
    (one,) = bench_options.preset_configs("fal", device="cpu", model="sdxl")
    assert (one.model, one.preset) == ("sdxl", "fal")
    (tiny,) = bench_options.preset_configs("stable-fast", device="cpu", model="tiny", size=64)
    assert (tiny.model, tiny.size, tiny.scheduler) == ("tiny", 64, "EulerAncestralDiscreteScheduler")


@pytest.mark.slow
def test_a_preset_runs_with_its_scheduler_and_a_page(tmp_path):
    files = {name: tmp_path / f"out.{name}" for name in ("json", "html")}
    small = ("--model", "tiny", "--size", "64", "--steps", "2", "--dtype", "fp32")
    command = ("bench", "--preset", "stable-fast", *small, "--device", "cpu", "--repeats", "1")
    places = [word for name, path in files.items() for word in (f"--{name}", str(path))]
    result = invoke(*command, "--variants", "eager,sdfastgn", "--fp32-reference", *places)
    assert result.exit_code == 0, result.output
    content = documents.read_json(files["json"])
    assert (content["schema"], content["kind"]) == (documents.SCHEMA, "preset")
    (part,) = content["config"]["parts"]
    assert (part["preset"], part["scheduler"]) == ("stable-fast", "EulerAncestralDiscreteScheduler")
    assert all(each["ssim_fp32"] > 0.999 for each in content["rows"])
    assert "preset stable-fast: tiny pipeline" in result.stdout
    text = files["html"].read_text(encoding="utf-8")
    assert text.count("data:image/png") == 5
    assert "EulerAncestralDiscreteScheduler" in text
    # The images lie beside the JSON, so that a later page has them too.
    assert invoke("report", str(files["json"]), "--html", str(tmp_path / "later.html")).exit_code == 0
    assert (tmp_path / "later.html").read_text(encoding="utf-8").count("data:image/png") == 5
    # Another run's JSON takes them away.
    command = ("bench", "--model", "tiny", "--device", "cpu", "--repeats", "1", "--variants", "eager")
    assert invoke(*command, "--json", str(files["json"])).exit_code == 0
    assert not (tmp_path / "out.images").exists()
