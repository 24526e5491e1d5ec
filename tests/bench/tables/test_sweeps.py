"""Tables of several batches and of a pipeline's latency."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from sdfastgn.bench.documents import FAILED
from sdfastgn.bench.models.run import Row
from sdfastgn.bench.tables import end_to_end
from sdfastgn.bench.tables.markdown import NO_RESULTS
from tests.bench.tables.cases import SOURCE, cells_of, row, save


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
    row("eager", 500.0, part="pipeline", steps=4, p99_ms=520.0),
    row("sdfastgn", 12.0, part="pipeline", steps=1, p99_ms=13.0, graphs_ms=10.0),
    row("sdfastgn", 24.0, part="pipeline", steps=4, p99_ms=30.0, graphs_ms=20.0),
]


def test_samples_a_second_by_batch(tmp_path: Path) -> None:
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


def test_latency_beside_the_time_of_the_graphs(tmp_path: Path) -> None:
    save(tmp_path, "batches.json", "sweep", BATCHES)
    save(tmp_path, "steps.json", "sweep", STEPS)
    text = end_to_end.latency_markdown(tmp_path)
    assert cells_of(text, "| SD1.5 pipeline 512², batch 2, fp16, 1 steps") == [
        ["sdfastgn", "12", "13", "10", "1.2"]
    ]
    assert cells_of(text, "| SD1.5 pipeline 512², batch 2, fp16, 4 steps") == [
        ["eager", "500", "520", "-", "-"],
        ["sdfastgn", "24", "30", "20", "1.2"],
    ]


def test_a_sweep_is_in_no_other_table(tmp_path: Path) -> None:
    save(tmp_path, "batches.json", "sweep", BATCHES)
    assert end_to_end.results_markdown(tmp_path) == NO_RESULTS
    assert end_to_end.headline_markdown(tmp_path) == NO_RESULTS
    (tmp_path / "batches.json").unlink()
    assert end_to_end.batches_markdown(tmp_path) == end_to_end.latency_markdown(tmp_path) == NO_RESULTS
