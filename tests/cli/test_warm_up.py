"""``sdfastgn warm-up``: what it calls, what it says of the cache, and that nothing is left to compile."""

from __future__ import annotations

import contextlib
import errno
import sys
from unittest import mock

import pytest
import torch

import sdfastgn
from sdfastgn.cli import kernel_cache
from sdfastgn.kernels.common import dispatch
from sdfastgn.kernels.common.archive import ArchiveError
from sdfastgn.models.pipelines import build_pipeline, load_pipeline
from tests.command_line import invoke
from tests.processes import process


class Rehearsal:
    """Stands for ``rehearse``: calls, and leaves what Triton would leave of two kernels."""

    def __init__(self, cache):
        self.cache, self.devices = cache, []

    def __call__(self, call, device):
        self.devices.append(device)
        call()
        for name in ("one", "two"):
            (self.cache / name).mkdir(parents=True, exist_ok=True)
            (self.cache / name / "kernel.cubin").write_bytes(bytes(2**20))
            (self.cache / name / "kernel.json").touch()
        return 2


@pytest.fixture
def rehearsal(tmp_path, monkeypatch):
    """The CPU stands for a GPU."""
    rehearsal = Rehearsal(tmp_path / "cache")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(rehearsal.cache))
    monkeypatch.setattr(kernel_cache, "rehearse", rehearsal)
    monkeypatch.setattr(kernel_cache, "_gpu", lambda option, device: "cpu")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    return rehearsal


@pytest.mark.slow
@pytest.mark.parametrize("is_saved", [True, False], ids=["a saved pipeline", "an architecture"])
def test_what_was_compiled_and_where_it_is(is_saved, rehearsal, tmp_path):
    model = "tiny"
    if is_saved:
        model = str(tmp_path / "pipe")
        build_pipeline("tiny", dtype=torch.float32, device="cpu").save_pretrained(model)
    for compiled in (2, 0):  # the second time all of them are there
        result = invoke("warm-up", model, "--size", "64")
        assert result.exit_code == 0, result.output
        first, second = result.stdout.replace("\n", " ").split(" s ", 1)
        assert first.startswith(f"2 kernels, {compiled} of them compiled now, in ")
        assert second.strip() == f"{rehearsal.cache}: 2.0 MiB"


@pytest.mark.slow
def test_each_size_is_called_in_a_rehearsal_and_once_more(rehearsal):
    pipe = build_pipeline("tiny", dtype=torch.float32, device="cpu")
    shapes = []
    pipe.unet.register_forward_pre_hook(lambda module, args: shapes.append(tuple(args[0].shape)))
    with mock.patch.object(kernel_cache.sdfastgn, "optimize", wraps=sdfastgn.optimize) as optimize:
        assert kernel_cache.fill(pipe, [(64, 64), (80, 48)], batch=3) == 2
    optimize.assert_called_once_with(pipe, cuda_graphs=False)
    assert rehearsal.devices == [torch.device("cpu")]
    # Two of each image, for guidance; the scheduler makes a step more than it is asked for.
    assert set(shapes) == {(6, 4, 8, 8), (6, 4, 6, 10)}
    first, second = shapes[: len(shapes) // 2], shapes[len(shapes) // 2 :]
    assert first == second


def test_without_a_size_it_is_the_models_own(rehearsal, monkeypatch):
    fill = mock.Mock(return_value=2)
    monkeypatch.setattr(kernel_cache, "fill", fill)
    for size, expected in (((), (64, 64)), (("--size", "80x48"), (80, 48))):
        assert invoke("warm-up", "tiny", *size, "--batch", "3").exit_code == 0
        assert fill.call_args.args[1:] == ([expected], 3)


def test_a_kernel_that_cannot_be_compiled_is_an_error(rehearsal, monkeypatch, capsys):
    monkeypatch.setattr(dispatch, "why_off", "Triton cannot compile apply_kernel here (no space left)")
    assert kernel_cache.run(model="tiny") == 1
    shown = capsys.readouterr()
    assert shown.err == "sdfastgn: Triton cannot compile apply_kernel here (no space left)\n"
    assert not shown.out


def test_an_op_without_kernels_is_an_error(rehearsal, monkeypatch, capsys):
    monkeypatch.setattr(dispatch, "ops_off", {("geglu", 0): "Triton cannot compile _geglu_kernel here"})
    assert kernel_cache.run(model="tiny") == 1
    assert capsys.readouterr().err == (
        "sdfastgn: geglu on cuda:0: Triton cannot compile _geglu_kernel here\n"
    )


def test_export_and_import(rehearsal, tmp_path, monkeypatch):
    """An import needs no model, and with a model it comes before the first kernel is compiled."""
    calls = []
    recorded = {"a kernel's hash": "its parts"}
    archive = mock.Mock(ArchiveError=ArchiveError, state=lambda device: "compiled kernels from here: 7")
    archive.recording.side_effect = lambda: contextlib.nullcontext(recorded)
    archive.load.side_effect = lambda path, device: calls.append(("import", path.name)) or (3, 1)
    archive.export.side_effect = lambda path, *_: path.write_bytes(bytes(2**20)) and 4
    monkeypatch.setattr(kernel_cache, "kernel_archive", archive)
    monkeypatch.setattr(kernel_cache, "fill", lambda *_: calls.append("fill") or 2)
    path = str(tmp_path / "kernels.zip")
    result = invoke("warm-up", "--import", path)
    assert result.exit_code == 0
    assert result.stdout == f"{rehearsal.cache}: 3 kernels added from {path}, 1 were there\n"
    result = invoke("warm-up", "tiny", "--import", path, "--export", path)
    assert result.exit_code == 0
    assert result.stdout.endswith(f"\ncompiled kernels from here: 7\n{path}: 4 kernels, 1.0 MiB\n")
    assert archive.export.call_args.args[1:] == ((9, 0), recorded)
    assert calls == [("import", "kernels.zip"), ("import", "kernels.zip"), "fill"]


def test_an_archive_that_cannot_be_written_is_an_error(rehearsal, tmp_path, monkeypatch):
    full = mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    monkeypatch.setattr(kernel_cache.kernel_archive, "export", full)
    result = invoke("warm-up", "tiny", "--size", "64", "--export", str(tmp_path / "kernels.zip"))
    assert result.exit_code == 2
    assert result.stderr == f"sdfastgn: cannot write '{tmp_path}/kernels.zip': No space left on device\n"


def test_an_export_needs_a_triton_that_can_record(rehearsal, tmp_path, monkeypatch):
    monkeypatch.setattr(kernel_cache.kernel_archive, "can_record", lambda: False)
    result = invoke("warm-up", "tiny", "--export", str(tmp_path / "kernels.zip"))
    assert result.exit_code == 2
    assert "--export: needs a later Triton than " in result.stderr
    assert not rehearsal.devices


def test_an_archive_that_is_of_no_use_is_an_error(rehearsal, tmp_path):
    result = invoke("warm-up", "tiny", "--import", str(tmp_path / "missing"))
    assert result.exit_code == 2
    assert "--import: " in result.stderr
    assert not rehearsal.devices


@pytest.mark.gpu
def test_nothing_is_left_to_compile(tmp_path, monkeypatch):
    """With a cache of its own, and then for a pipeline that makes its calls as graphs."""
    import triton

    compiled = []
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path / "cache"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    path = str(tmp_path / "pipe")
    build_pipeline("tiny", dtype=torch.float16, device="cuda").save_pretrained(path)
    assert invoke("warm-up", path, "--size", "64", "--size", "80x48").exit_code == 0
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", lambda **_: compiled.append(1))
    pipe = sdfastgn.optimize(load_pipeline("path", path, torch.float16, "cuda"))
    for _ in range(3):
        for width, height in ((64, 64), (80, 48)):
            pipe("a", width=width, height=height, num_inference_steps=2)
    assert not compiled


@pytest.mark.gpu
def test_nothing_is_left_to_compile_after_an_import(tmp_path):
    """In processes of their own, each with an empty cache."""
    path, archive = str(tmp_path / "pipe"), str(tmp_path / "kernels.zip")
    build_pipeline("tiny", dtype=torch.float16, device="cuda").save_pretrained(path)
    program = (sys.executable, "-m", "sdfastgn", "warm-up", path, "--size", "64")
    done = process(*program, "--export", archive, TRITON_CACHE_DIR=str(tmp_path / "one"))
    assert done.returncode == 0, done.stderr
    done = process(*program, "--import", archive, TRITON_CACHE_DIR=str(tmp_path / "two"))
    assert done.returncode == 0, done.stderr
    assert " 0 of them compiled now" in done.stdout
    done = process(*program, TRITON_CACHE_DIR=str(tmp_path / "three"), SDFASTGN_KERNEL_ARCHIVE=archive)
    assert done.returncode == 0, done.stderr
    assert not done.stderr or "SDFASTGN" not in done.stderr
