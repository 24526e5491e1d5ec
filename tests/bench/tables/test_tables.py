"""Tables of end-to-end times, and widths of all tables."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from sdfastgn.bench.documents import OK, WRONG
from sdfastgn.bench.kernels.suite import COPY, FORWARD, KernelRow
from sdfastgn.bench.kernels.suites import SUITES
from sdfastgn.bench.tables import end_to_end, kernels
from sdfastgn.bench.variants import VARIANTS
from tests.bench.tables.cases import UNET, row, text_of

# ---- numbers


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        pytest.param(None, "-", id="none"),
        pytest.param(0.0, "0", id="zero"),
        pytest.param(0.012345, "0.0123", id="small"),
        pytest.param(22.767, "22.8", id="tens"),
        pytest.param(1569.2, "1569", id="thousands"),
        pytest.param(20.0, "20", id="no-trailing-zeros"),
    ],
)
def test_numbers_have_three_digits_and_empty_columns_are_left_out(value, expected):
    cells = text_of(
        end_to_end.end_to_end_table(
            [row("eager", 1.0, peak_mib=1.0, ready_s=value), row("sdfastgn", 2.0)], "t"
        )
    )
    if value is None:
        assert "ready s" not in cells  # a column that nothing has a value for
    else:
        assert expected in cells.replace("│", " ").split()


def test_rows_that_are_not_ok_give_their_reason_and_no_speed_up():
    wrong = row("channels_last", None, status=WRONG, reason="relative error 0.5 is above 0.02")
    rows = [UNET[0], wrong, UNET[1]]
    shown = text_of(end_to_end.end_to_end_table(rows, "t"))
    line = next(line for line in shown.splitlines() if "channels_last" in line)
    assert "x" not in line
    assert "1.25x" in shown
    assert end_to_end.row_notes(rows) == ["channels_last: wrong output: relative error 0.5 is above 0.02"]


@pytest.mark.parametrize(
    ("eager", "ours", "marked"),
    [
        pytest.param((424.0, 1426.0, 2428.0), (67.0, 68.0, 69.0), "20.97x?", id="eager's times differ"),
        pytest.param((1400.0, 1426.0, 1500.0), (30.0, 68.0, 90.0), "20.97x?", id="ours differ"),
        pytest.param((1400.0, 1426.0, 1500.0), (60.0, 68.0, 75.0), "20.97x", id="they agree"),
        pytest.param((9.0, 10.0, 11.0), (9.0, 10.0, 11.0), "1.00x", id="no speed-up, and that is certain"),
    ],
)
def test_a_speed_up_whose_range_is_wider_than_itself_is_marked(eager, ours, marked):
    names = ("p10_ms", "median_ms", "p90_ms")
    times = {"eager": eager, "sdfastgn": ours}
    rows = [replace(row(name, 1.0), **dict(zip(names, found, strict=True))) for name, found in times.items()]
    table = end_to_end.end_to_end_table(rows, "t")
    assert [line[table.header.index("speed-up")] for line in table.body] == ["1.00x", marked]
    expected = marked.endswith("?")
    assert [note.partition(" is uncertain: ")[0] for note in table.notes] == ["sdfastgn: 20.97x?"] * expected
    if eager[0] == 424.0:
        assert "6.14x to 36.24x" in text_of(table)  # 424 / 69, 2428 / 67


@pytest.mark.parametrize(
    ("around", "shown"), [([86.0, 90.0], "0.80x"), ([86.0, 140.0], "1.03x?"), ([140.0, 140.0], "1.27x")]
)
def test_a_speed_up_is_over_eagers_times_around_the_variant(around, shown):
    """Eager's own row may have been measured minutes earlier, when the CPU was faster."""
    table = end_to_end.end_to_end_table([row("eager", 86.0), row("sdfastgn", 110.0, eager_ms=around)], "t")
    assert table.body[1][table.header.index("speed-up")] == shown
    assert ("before and after this variant differ by a factor of 1.63" in text_of(table)) == ("?" in shown)


# What a GPU's run has: every column, and long labels.
WIDE = [
    row(
        name, 1234.5 + i, ready_s=123.4, graph_ms=1234.5, its=0.123, peak_mib=12345.0, error_eager=1e-3,
        error_fp32=1e-3, psnr_db=45.67, step_mib=12345.0, saved_mib=12345.0,
    )
    for i, name in enumerate(VARIANTS)
]  # fmt: skip
LONG_CELLS = [
    KernelRow((16, 1280, 128, 128), name, OK, "", 123.4, 124.5, task=COPY if name == COPY else FORWARD)
    for name in SUITES["inference"].providers
]
NARROW_TABLES = {
    "bench": end_to_end.end_to_end_table(WIDE, "t"),
    "kernels": kernels.suite_tables(SUITES["inference"], LONG_CELLS, "t", "fp16")[0],
}


@pytest.mark.parametrize("width", [60, 80, 120, 400])
@pytest.mark.parametrize("table", NARROW_TABLES.values(), ids=NARROW_TABLES)
def test_no_word_is_cut_at_any_width(table, width):
    shown = text_of(table, width)
    assert max(map(len, shown.splitlines())) <= width
    assert "\N{HORIZONTAL ELLIPSIS}" not in shown
    words = set(re.split(r"[\s┃│]+", shown))
    for text in (*table.header, *(cell for line in table.body for cell in line)):
        assert set(text.split()) <= words
    # Each row is in each block, under the columns that name it.
    blocks = shown.count("┏")
    assert (blocks == 1) == (width == 400)
    assert len(re.findall(r"^│ (?=\S)", shown, re.MULTILINE)) >= blocks * len(table.body)


def test_graph_notes_join_the_variants_of_one_reason():
    rows = [
        row("eager", 1.0, graph_reason="no"),
        row("compile", 1.0, graph_reason="no"),
        row("sdfastgn", 1.0),
    ]
    assert end_to_end.graph_notes(rows) == ["no graph time for eager, compile: no"]
