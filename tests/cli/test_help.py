"""What ``--help`` prints."""

from __future__ import annotations

import re

import pytest

from sdfastgn.bench.kernels.suites import SUITES
from sdfastgn.bench.variants import PARTS, VARIANTS
from sdfastgn.cli.app import app
from sdfastgn.models import configurations
from tests.command_line import invoke

COMMANDS = [command.name or command.callback.__name__ for command in app.registered_commands]


@pytest.mark.drawn(3)
@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_every_command_has_both_helps(command: str) -> None:
    long, short = (invoke(*command.split(), option) for option in ("--help", "-h"))
    assert long.exit_code == short.exit_code == 0
    assert long.stdout == short.stdout
    assert "Usage" in short.stdout


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_each_option_is_a_sentence_and_has_its_default_once(command: str) -> None:
    shown = invoke(*command.split(), "-h", COLUMNS="900").stdout
    lines = [
        line.strip("│ ") for line in shown.partition("─ Commands")[0].splitlines() if line.startswith("│")
    ]
    assert lines
    for line in lines:
        name, text = re.split(r" {2,}(?=[A-Z])", line, maxsplit=1)
        assert re.fullmatch(r"[^\[]+\.(  ?\[required\])?", text.rstrip()), line
        assert text.count("default") <= 1, line
        assert "<bool>" not in name  # a flag takes no value
    assert "(default: 7.5)" in shown or command != "bench"


@pytest.mark.parametrize(
    ("command", "names"),
    [
        pytest.param("bench", VARIANTS, id="variants"),
        pytest.param("bench", PARTS, id="parts"),
        pytest.param("bench", configurations.MODELS, id="models"),
        pytest.param("bench", configurations.VIDEO_NETWORKS, id="video"),
        pytest.param("plan", configurations.MODELS, id="planned models"),
        pytest.param("plan", configurations.VIDEO_NETWORKS, id="planned video"),
        pytest.param("kernels", SUITES, id="suites"),
        pytest.param("kernels", SUITES["layer_norm"].providers, id="providers"),
    ],
)
def test_the_help_names_all_of(command: str, names: tuple[str, ...]) -> None:
    assert set(names) <= set(re.split(r"[\s,;.]+", invoke(command, "-h").stdout))
