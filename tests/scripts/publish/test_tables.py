"""Committed results in Markdown: end-to-end times, sweeps, and files whose tables are stale."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scripts.publish import pages, plots
from scripts.publish.tables import end_to_end
from scripts.publish.tables.markdown import NO_RESULTS
from sdfastgn.bench.documents import FAILED, WRONG
from sdfastgn.bench.run import Row
from sdfastgn.bench.tables.cells import LOSS
from tests.bench.tables.cases import SOURCE, UNET, cells_of, is_png, row, save

SLOT = "before\n<!-- table:results -->\nold\n<!-- /table:results -->\nafter\n"


def of_batch(batch: int, *rows: Row) -> list[Row]:
    return [replace(each, batch=batch) for each in rows]


BATCHES = [
    *of_batch(
        8, row("eager", 30.0, graph_ms=16.0, reserved_mib=4000.0), row("sdfastgn", 8.0, reserved_mib=3000.0)
    ),
    *of_batch(
        1, row("eager", 25.0, graph_ms=5.0, reserved_mib=2500.0), row("sdfastgn", 2.0, reserved_mib=2400.0)
    ),
    *of_batch(64, row("eager", status=FAILED, reason="OutOfMemoryError: no"), row("sdfastgn", status=FAILED)),
]

STEPS = [
    replace(row("eager", 500.0, part="pipeline", steps=4), p90_ms=520.0),
    replace(row("sdfastgn", 12.0, part="pipeline", steps=1, graphs_ms=10.0), p90_ms=13.0),
    replace(row("sdfastgn", 24.0, part="pipeline", steps=4, graphs_ms=20.0), p90_ms=30.0),
]


def test_results_hold_times_ratios_reasons_and_sources(tmp_path):
    save(tmp_path / "h200", "unet_sd15.json", "end_to_end", UNET)
    vae = [row("eager", 22.0, part="vae"), row("sdfastgn", 8.8, part="vae")]
    save(tmp_path / "h200", "vae_512.json", "end_to_end", vae)
    text = end_to_end.results_markdown(tmp_path)
    columns = ("eager", "sdfastgn", "torch.compile", "stable-fast")
    graphs = ("eager + graph", "torch.compile + graph")
    assert cells_of(text, "| milliseconds") == [[*columns, *graphs]]
    times = ["20 (1.00x)", "16 (1.25x)", "15 (1.33x)", "-", "10 (2.00x)", "6 (3.33x)"]
    assert cells_of(text, "| SD1.5") == [times]
    assert cells_of(text, "| VAE")[0][:2] == ["22 (1.00x)", "8.8 (2.50x)"]
    assert "stable-fast unavailable: package sfast is not installed." in text
    assert text.endswith(SOURCE)


def test_one_size_in_two_dtypes_is_two_lines(tmp_path):
    rows = [row("eager", 20.0), row("sdfastgn", 5.0)]
    save(tmp_path, "fp16.json", "end_to_end", rows)
    save(tmp_path, "fp32.json", "end_to_end", [replace(one, dtype="fp32", median_ms=90.0) for one in rows])
    lines = cells_of(end_to_end.results_markdown(tmp_path), "| SD1.5")
    assert [line[0] for line in lines] == ["20 (1.00x)", "90 (1.00x)"]


def test_stable_fast_is_compared_in_the_run_that_had_it(tmp_path):
    unet = [
        row("eager", 20.0, ready_s=1.0, error_fp32=2e-3, peak_mib=900.0),
        row("stable_fast", 12.0, ready_s=15.0, error_fp32=1.1e-2, peak_mib=800.0, note="traced"),
        row("sdfastgn", 5.0, ready_s=3.0, error_fp32=1.7e-3, peak_mib=700.0),
    ]
    wrong = row("stable_fast", part="vae", status=WRONG, reason="off by 3")
    vae = [row("eager", 9.0, part="vae"), wrong, row("sdfastgn", 4.0, part="vae")]
    pipeline = [row("eager", 9.0, part="pipeline"), row("sdfastgn", 4.0, part="pipeline")]  # not tried
    save(tmp_path, "a.json", "stable_fast", [*unet, *vae, *pipeline])
    text = end_to_end.stable_fast_markdown(tmp_path)
    assert "| eager / stable-fast / sdfastgn | milliseconds | seconds until ready |" in text
    assert cells_of(text, "| SD1.5") == [
        ["20 / 12 / 5", "1 / 15 / 3", "2.0e-03 / 1.1e-02 / 1.7e-03", "-", "900 / 800 / 700"]
    ]
    assert cells_of(text, "| VAE")[0][:2] == ["9 / - / 4", "-"]
    assert "fp16: stable-fast: traced." in text
    assert "fp16: stable-fast: wrong output: off by 3." in text
    assert end_to_end.results_markdown(tmp_path) == NO_RESULTS  # it is a run of its own
    assert end_to_end.compared_markdown(tmp_path) == NO_RESULTS


def test_torch_compile_is_compared_in_the_mode_that_was_tried(tmp_path):
    unet = [
        row("eager", 20.0, ready_s=1.0),
        row("compile", 15.0, ready_s=50.0),
        row("sdfastgn", 5.0, ready_s=3.0),
    ]
    images = [row(name, 9.0, part="pipeline", psnr_db=60.0) for name in ("compile_graphs", "sdfastgn")]
    save(tmp_path, "a.json", "end_to_end", [*unet, row("eager", 9.0, part="pipeline"), *images])
    text = end_to_end.compared_markdown(tmp_path)
    assert "| eager / torch.compile / sdfastgn | seconds until ready | error against fp32 | PSNR dB |" in text
    assert [cells[0] for cells in cells_of(text, "| SD1.5")] == ["1 / 50 / 3", "-"]
    assert cells_of(text, "| SD1.5 pipeline")[0][2] == "- / 60 / 60"


@pytest.mark.slow
def test_the_headline_has_the_peers_at_their_best(tmp_path):
    save(tmp_path, "a.json", "end_to_end", UNET)
    save(tmp_path, "b.json", "end_to_end", [row("eager", 60.0, part="vae"), row("compile", 50.0, part="vae")])
    times = {"eager": 600.0, "compile_graphs": 206.0, "sdfastgn": 150.0}
    pipeline = [row(name, time, part="pipeline") for name, time in times.items()]
    save(tmp_path, "c.json", "end_to_end", pipeline)
    others = [row("sdfastgn", 7.0, part="train"), replace(row("sdfastgn", 9.0), dtype="fp32")]
    save(tmp_path, "d.json", "end_to_end", others, environment={"gpu": "another GPU"})
    apart = [replace(each, median_ms=2 * each.median_ms) for each in pipeline if each.variant == "eager"]
    save(tmp_path, "e.json", "stable_fast", [*apart, row("stable_fast", 300.0, part="pipeline")])
    text = end_to_end.headline_markdown(tmp_path)
    assert "training" not in text
    assert "fp32" not in text
    assert "another GPU" not in text  # the lines below are those of the runs above
    assert cells_of(text, "| SD1.5") == [
        ["20", "10", "-", "15 (0.67x, 1.33x)", "6 (1.67x, 3.33x)", "16 (0.62x, 1.25x)"],
        ["600", "-", "300", "-", "206 (-, 2.91x)", "150 (-, 4.00x)"],
    ]
    assert "| milliseconds (speed-up over eager + graph, over eager) | eager | eager + graph |" in text
    # What was measured apart says so, and names no commit of this project.
    assert "stable-fast: built by hand and measured in another run, NVIDIA H200, 2026-11-21." in text
    assert text.count("commit") == 1
    assert "VAE" not in text  # sdfastgn did not run
    found = end_to_end.headline_times(tmp_path)
    assert found.sources[-1].startswith("stable-fast: built by hand and measured in another run")
    unet, whole = found.panels.items()
    ours = ("sdfastgn", 16.0)
    assert unet[1] == [
        ("eager", 20.0),
        ("eager + graph", 10.0),
        ("torch.compile", 15.0),
        ("torch.compile + graph", 6.0),
        ours,
    ]
    assert whole[1][1] == ("stable-fast, another run", 300.0)
    assert whole[1][2:] == [("torch.compile + graph", 206.0), ("sdfastgn", 150.0)]
    plots.PICTURES["times.png"](tmp_path, tmp_path / "times.png")
    assert is_png(tmp_path / "times.png")


def test_transformers_have_tables_and_a_picture_of_their_own(tmp_path):
    step = {"part": "transformer", "ready_s": 2.0, "error_fp32": 1e-3, "peak_mib": 100.0}
    rows = [
        row("eager", 180.0, graph_ms=170.0, **step),
        row("compile_blocks", 136.0, graph_ms=125.0, **step),
        row("sdfastgn", 120.0, **step),
        row("sdfastgn_fp8", 200.0, **step | {"peak_mib": 150.0}),
    ]
    save(tmp_path, "a.json", "end_to_end", rows)
    text = end_to_end.transformers_markdown(tmp_path)
    assert cells_of(text, "| SD1.5") == [
        ["180", "170", "136 (1.25x)", "125 (1.36x)", "120 (1.42x)", f"200 (0.85x{LOSS})"]
    ]
    assert text.endswith(SOURCE)
    text = end_to_end.transformers_compared_markdown(tmp_path)
    assert "| eager / torch.compile, repeated blocks / sdfastgn / sdfastgn, FP8 | seconds until" in text
    assert cells_of(text, "| SD1.5")[0][4] == "100 / 100 / 100 / 150"
    assert end_to_end.results_markdown(tmp_path) == end_to_end.headline_markdown(tmp_path) == NO_RESULTS
    text = end_to_end.transformer_claims_markdown(tmp_path)
    assert cells_of(text, "| SD1.5") == [["1.42x", "1.04x", f"0.85x{LOSS}"]]
    assert text.endswith(SOURCE)
    found = end_to_end.transformer_times(tmp_path)
    assert [time for _, time in next(iter(found.panels.values()))] == [
        180.0,
        170.0,
        136.0,
        125.0,
        120.0,
        200.0,
    ]
    assert found.sources == [SOURCE.rstrip(".")]
    plots.PICTURES["times_transformers.png"](tmp_path, tmp_path / "times.png")
    assert is_png(tmp_path / "times.png")


def test_a_transformer_without_a_time_has_its_reason_below_the_table(tmp_path):
    rows = [
        row("eager", 180.0, part="transformer"),
        row("sdfastgn", part="transformer", status=WRONG, reason="off"),
    ]
    save(tmp_path, "a.json", "end_to_end", rows)
    text = end_to_end.transformers_markdown(tmp_path)
    assert cells_of(text, "| SD1.5") == [["180", "-", "-", "-", "-", "-"]]
    assert "batch 2, fp16: sdfastgn: wrong output: off." in text
    assert end_to_end.transformers_compared_markdown(tmp_path) == NO_RESULTS


def test_the_claims_are_the_ends_of_the_headlines_speed_ups(tmp_path):
    """They are over eager's CUDA graph. A whole image has none, and stable-fast is compared with nothing."""
    small, large = (
        row("eager", 22.0, part="vae", graph_ms=20.0),
        row("eager", 90.0, part="vae", graph_ms=81.0),
    )
    vae = [small, row("sdfastgn", 10.0, part="vae")]
    vae += [replace(each, size=1024) for each in (large, row("sdfastgn", 20.0, part="vae"))]
    save(tmp_path, "a.json", "end_to_end", [*UNET, *vae])
    images = [row("eager", 600.0, part="pipeline"), row("sdfastgn", 150.0, part="pipeline")]
    save(tmp_path, "b.json", "end_to_end", images)
    save(tmp_path, "c.json", "stable_fast", [replace(images[0], median_ms=6000.0), *images[1:]])
    step = [
        row("eager", 180.0, part="transformer", graph_ms=170.0),
        row("sdfastgn", 100.0, part="transformer"),
    ]
    save(tmp_path, "d.json", "end_to_end", step, environment={"gpu": "another GPU"})
    assert end_to_end.claims_markdown(tmp_path).splitlines() == [
        "Measured on NVIDIA H200:",
        "",
        "- VAE decodes: 2.0x to 4.0x as fast as diffusers' own code in a CUDA graph",
        "- UNet steps: 0.6x as fast as diffusers' own code in a CUDA graph",
        "",
        "Measured on another GPU:",
        "",
        "- transformer steps: 1.7x as fast as diffusers' own code in a CUDA graph",
    ]


def test_images_a_second_on_several_gpus(tmp_path):
    def on(*rates: float, variant: str = "sdfastgn") -> Row:
        image = row(variant, 500.0, part="pipeline")
        return replace(image, images_s=sum(rates), process_images_s=[*rates])

    save(tmp_path, "two.json", "processes", [on(1.0, 1.0, variant="eager"), on(2.0, 1.9)])
    save(tmp_path, "one.json", "processes", [on(2.0), row("eager", status=WRONG, reason="off")])
    text = end_to_end.several_gpus_markdown(tmp_path)
    assert "| images per second | variant | 1 GPU | 2 GPUs | over one GPU |" in text
    cells = sorted(cells_of(text, "| SD1.5 pipeline"))
    assert cells == [["eager", "-", "2", "-"], ["sdfastgn", "2", "3.9", "1.95x"]]
    assert "eager wrong output: off." in text
    assert text.endswith(SOURCE)
    assert end_to_end.several_gpus_markdown(tmp_path / "empty") == NO_RESULTS


def test_samples_a_second_by_batch(tmp_path):
    save(tmp_path, "batches.json", "sweep", BATCHES)
    save(tmp_path, "steps.json", "sweep", STEPS)
    text = end_to_end.batches_markdown(tmp_path)
    (header,) = cells_of(text, "|  |")
    assert header == [
        "eager ms a sample (samples/s)",
        "eager + graph ms a sample (samples/s)",
        "**sdfastgn** ms a sample (samples/s)",
        "eager MiB",
        "sdfastgn MiB",
    ]
    assert cells_of(text, "| SD1.5 UNet step 512², batch 1,") == [
        ["25 (40)", "5 (200)", "2 (500)", "2500", "2400"]
    ]
    assert cells_of(text, "| SD1.5 UNet step 512², batch 8,") == [
        ["3.75 (267)", "2 (500)", "1 (1000)", "4000", "3000"]
    ]
    assert cells_of(text, "| SD1.5 UNet step 512², batch 64,") == [["-"] * 5]
    assert "SD1.5 UNet step 512², batch 64, fp16, eager failed: OutOfMemoryError: no." in text
    assert text.endswith(SOURCE)
    assert "pipeline" not in text


def test_a_sweep_is_in_no_other_table(tmp_path):
    save(tmp_path, "batches.json", "sweep", BATCHES)
    assert end_to_end.results_markdown(tmp_path) == NO_RESULTS
    assert end_to_end.headline_markdown(tmp_path) == NO_RESULTS


@pytest.mark.parametrize("name", sorted({*pages.TABLES} - {"fusions"}))
def test_without_results_a_table_says_so(name, tmp_path):
    assert pages.TABLES[name](tmp_path) == "No results are committed yet."


def test_the_tables_of_a_file_are_renewed(tmp_path):
    save(tmp_path / "benchmarks", "a.json", "end_to_end", UNET)
    readme = tmp_path / "README.md"
    readme.write_text(SLOT)
    assert pages.main(["--write", str(readme), "--results", str(tmp_path / "benchmarks")]) == 0
    written = readme.read_text()
    assert written.startswith("before\n")
    assert written.endswith("\nafter\n")
    assert "1.25x" in written
    assert "old" not in written


@pytest.mark.parametrize("name", pages.PAGES)
def test_the_tables_of_this_repository_are_fresh(name):
    text = (pages.ROOT / name).read_text(encoding="utf-8")
    assert pages.slots(text)
    assert pages.filled(text, pages.ROOT / "benchmarks") == text


def test_every_page_with_a_table_is_renewed():
    """Others make the table of the compatible versions, and the card of the Kernel Hub."""
    found = [
        path for path in pages.ROOT.glob("docs/**/*.md") if pages.slots(path.read_text(encoding="utf-8"))
    ]
    names = {path.relative_to(pages.ROOT).as_posix() for path in found} | {"README.md"}
    assert names - {"docs/compatibility.md"} == set(pages.PAGES)


def test_one_command_renews_tables_and_pictures(tmp_path, monkeypatch):
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    monkeypatch.setattr(pages, "PAGES", ("README.md", "docs/a.md"))
    drawn = []
    monkeypatch.setattr(pages.plots, "PICTURES", {"a.png": lambda *given: drawn.append(given)})
    (tmp_path / "docs").mkdir()
    for name in pages.PAGES:
        (tmp_path / name).write_text(SLOT)
    save(tmp_path / "benchmarks", "a.json", "end_to_end", UNET)
    assert pages.main(["--results", str(tmp_path / "benchmarks")]) == 0
    assert all("1.25x" in (tmp_path / name).read_text() for name in pages.PAGES)
    assert drawn == [(tmp_path / "benchmarks", tmp_path / "docs" / "images" / "a.png")]
