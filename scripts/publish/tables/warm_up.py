"""The Markdown table of the waiting times for a pipeline's first images."""

from __future__ import annotations

from pathlib import Path

from scripts.publish.tables.markdown import NO_RESULTS, documents, markdown
from sdfastgn.bench.tables.cells import source_line
from sdfastgn.bench.tables.profile import MODEL_LABELS
from sdfastgn.bench.tables.warm_up import KIND, result_table
from sdfastgn.program import counted


def warm_up_markdown(results: Path) -> str:
    """Returns a table for each committed result of ``scripts.publish.warm_up``.

    A line below each table names the pipeline and the run.
    """
    blocks = []
    for content in documents(results, KIND):
        shown, config = result_table(content), content["config"]
        (part,) = config["parts"]
        model = MODEL_LABELS.get(part["model"], part["model"])
        what = f"{model} pipeline {part['size']}², {counted(part['steps'], 'step')}, {part['dtype']}"
        what += f"; new size {config['new_size']}²"
        blocks.append(markdown(shown.header, shown.body, [f"{what}. {source_line(content)}"]))
    return "\n\n".join(blocks) or NO_RESULTS
