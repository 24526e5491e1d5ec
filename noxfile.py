"""``make matrix``: runs the tests that depend on releases, in an environment for each row of ROWS.

uv makes the environments. Each session ``matrix`` writes ``build/matrix/<row>.json``. The session
``page`` writes the table in ``docs/compatibility.md`` from these files. So the table has only rows
that ran.
"""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import NamedTuple

import nox

nox.options.default_venv_backend = "uv"
nox.options.sessions = ["matrix", "page"]

RESULTS = Path("build/matrix")
PAGE = Path("docs/compatibility.md")
# Tests of code that relies on other packages: on diffusers' methods and pipelines, on PyTorch's
# compiler and private names, and on Python's frames.
TESTS = (
    "tests/patches/test_releases.py",
    "tests/patches/fusions/test_fusions.py",
    "tests/patches/pipeline",
    "tests/plans",
    "--ignore=tests/plans/test_real_sizes.py",  # its numbers are those of the newest diffusers
    "tests/patches/test_threads.py",
    "tests/test_pipelines.py",
    "tests/test_compile.py",
    "tests/test_batch_norm_module.py",
    "tests/kernels/common/test_private.py",
    "tests/kernels/common/test_launch.py",
    "tests/kernels/test_autograd.py",
)


class Row(NamedTuple):
    """One environment: Python, and releases of packages that were current together.

    numpy: the interpreters of Triton 3.4 to 3.6 fail with NumPy 2.4.
    """

    python: str
    torch: str
    numpy: str
    diffusers: str
    transformers: str
    accelerate: str
    peft: str

    @property
    def name(self) -> str:
        return f"py{self.python}-torch{self.torch}-diffusers{self.diffusers}"


# The packages around diffusers 0.37 to 0.42.
_NEW = ("5.17.0", "1.15.0", "0.21.2")
ROWS = (
    Row("3.10", "2.8.0", "2.2.6", "0.34.0", "4.53.0", "1.8.1", "0.16.0"),
    Row("3.10", "2.9.1", "2.2.6", "0.35.2", "4.57.6", "1.10.1", "0.17.1"),
    Row("3.11", "2.10.0", "2.3.5", "0.36.0", "4.57.6", "1.12.0", "0.18.0"),
    Row("3.12", "2.11.0", "2.3.5", "0.37.1", *_NEW),
    Row("3.12", "2.12.1", "2.3.5", "0.38.0", *_NEW),
    Row("3.11", "2.13.0", "2.4.6", "0.39.0", *_NEW),
    Row("3.11", "2.13.0", "2.4.6", "0.40.0", *_NEW),
    Row("3.13", "2.14.1", "2.4.6", "0.41.0", *_NEW),
    Row("3.11", "2.13.0", "2.4.6", "0.42.1", *_NEW),
    Row("3.13", "2.15.0", "2.4.6", "0.42.1", *_NEW),
)

# A program that counts the fused parts of two small models and prints JSON. The models are the same
# in each row, so the counts can be compared.
PROBE = """
import json, warnings
from importlib.metadata import version
warnings.simplefilter("ignore")
import torch, sdfastgn
from sdfastgn.models.architectures import build_unet, build_vae
reports = [sdfastgn.report(build("tiny", torch.float16, "meta")) for build in (build_unet, build_vae)]
print(json.dumps({
    "fused": sum(len(r.fusable) for r in reports),
    "skipped_parts": sum(len(r.skipped) for r in reports),
    "triton": version("triton"),
    "torch": torch.__version__,
}))
"""


@nox.session
@nox.parametrize("python,row", [(row.python, row) for row in ROWS], ids=[row.name for row in ROWS])
def matrix(session: nox.Session, row: Row) -> None:
    """Install as a user does, test, and write down what came out."""
    releases = (f"{name}=={release}" for name, release in row._asdict().items() if name != "python")
    session.install(*releases, "-e", ".[bench,test]")
    RESULTS.mkdir(parents=True, exist_ok=True)
    junit = RESULTS / f"{row.name}.xml"
    environment = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    # A failure is a result too: the page shows it, and the session fails after it is written down.
    session.run(
        *("python", "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={junit}"),
        *("-m", "not gpu and not many_programs"),
        *TESTS,
        env=environment,
        success_codes=[0, 1],
    )
    found = json.loads(session.run("python", "-c", PROBE, env=environment, silent=True) or "{}")
    (suite,) = ET.parse(junit).getroot().iter("testsuite")
    counts = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
    result = {**row._asdict(), **found, **counts}
    (RESULTS / f"{row.name}.json").write_text(json.dumps(result))
    if counts["failures"] or counts["errors"]:
        session.error(f"{counts['failures'] + counts['errors']} tests failed")


@nox.session(python=False)
def page(session: nox.Session) -> None:
    """Writes the table in docs/compatibility.md, with a line for each row that ran."""
    results = [json.loads((RESULTS / f"{row.name}.json").read_text()) for row in ROWS if _ran(row)]
    head = ("Python", "torch", "Triton", "diffusers", "transformers", "parts fused", "tests passed")
    lines = [f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}"]
    for r in results:
        passed = r["tests"] - r["failures"] - r["errors"] - r["skipped"]
        ran = r["tests"] - r["skipped"]
        cells = (r["python"], r["torch"], r["triton"], r["diffusers"], r["transformers"])
        fused = f"{r['fused']} of {r['fused'] + r['skipped_parts']}"
        lines.append(f"| {' | '.join(cells)} | {fused} | {passed} of {ran} |")
    text = PAGE.read_text()
    start, end = "<!-- table:matrix -->", "<!-- /table:matrix -->"
    before, _, rest = text.partition(start)
    PAGE.write_text(f"{before}{start}\n" + "\n".join(lines) + f"\n{end}{rest.partition(end)[2]}")
    session.log(f"{PAGE}: {len(results)} of {len(ROWS)} rows")


def _ran(row: Row) -> bool:
    return (RESULTS / f"{row.name}.json").exists()
