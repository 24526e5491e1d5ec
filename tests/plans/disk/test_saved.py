"""Plans on disk: a later process runs them without a trace, and only where a trace would give the same."""

import copy
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import types
import weakref
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sdfastgn
from sdfastgn.patches.code.states import States
from sdfastgn.patches.layout.channels_last import lay_out_weights
from sdfastgn.plans import making
from sdfastgn.plans.disk import files, key
from sdfastgn.plans.guard import Guard
from sdfastgn.plans.run.bake import Baked
from tests.patches.cases import agree, noise
from tests.patches.samples import randomize
from tests.plans.disk import small
from tests.plans.disk.run_once import imported
from tests.plans.engine import slices_pay
from tests.processes import run_together

pytestmark = [pytest.mark.fused_on_cpu, pytest.mark.usefixtures("without_gradients")]
ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("SDFASTGN_PLAN_CACHE", str(tmp_path / "plans"))
    return tmp_path / "plans"


def net(kind=small.Net):
    return randomize(kind()).eval()


def unchanged(model):
    return model


def run(change=unchanged, *args, kind=small.Net, size=6, dtype=torch.float32, **options):
    """(traces, plans from disk) of the first call of a new model, which must be what stock computes."""
    model = change(net(kind)).to(dtype)
    x = noise(1, 3, size, size, seed=1).to(dtype)
    expected = model(x, *args)
    planned = vars(sdfastgn.optimize(model, **options))["forward"]
    for _ in range(2):
        agree(model(x, *args), expected, 2e-5 if dtype is torch.float32 else 0.1)
    assert (planned.calls, planned.own) == (2, {})
    return planned.traces, planned.loads


TRACED, LOADED = (1, 0), (0, 1)


def test_the_second_model_is_not_traced(monkeypatch):
    assert run() == TRACED
    monkeypatch.setattr(making, "trace", None)
    assert run() == LOADED


def test_results_and_changed_lists(monkeypatch):
    def kept_and_result(model, seed):
        kept = [1]
        return model(noise(1, 3, 6, 6, seed=seed), 2.0, kept), kept

    kept_and_result(sdfastgn.optimize(net()), 0)
    stock = net()
    model = sdfastgn.optimize(copy.deepcopy(stock))
    for seed in range(3):
        (found, kept), (expected, wanted) = kept_and_result(model, seed), kept_and_result(stock, seed)
        assert found.keys() == expected.keys()
        agree((found["sample"], *found["parts"], *kept), (expected["sample"], *expected["parts"], *wanted))
    assert vars(model)["forward"].loads == 1


def test_slices(monkeypatch):
    slices_pay(monkeypatch)
    stock = net()
    for count in (TRACED, LOADED):
        planned = vars(model := sdfastgn.optimize(copy.deepcopy(stock)))["forward"]
        agree(model(noise(3, 3, 6, 6)), stock(noise(3, 3, 6, 6)))
        assert ((planned.traces, planned.loads), planned.plans[0].slices.number) == (count, 3)


# ---- each part of the key


def number(model):
    model.blocks[0].scale = 0.25
    return model


def item_of_a_dict(model):
    model.options["other"] = 1
    return model


def shape(model):
    model.extra = nn.Parameter(torch.zeros(4))
    return model


def strides(model):
    model.conv_in.weight.data = model.conv_in.weight.data.transpose(2, 3).contiguous().transpose(2, 3)
    return model


def tied(model):
    model.blocks[1].conv.weight = model.blocks[0].conv.weight
    return model


def shared_memory(model):
    model.blocks[1].norm.weight.data = model.blocks[0].norm.weight.data
    return model


def shared_module(model):
    model.blocks[1] = model.blocks[0]
    return model


def of_another_class(model):
    model.blocks[0].__class__ = type("Other", (small.Block,), {"__module__": small.__name__})
    return model


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    "change",
    [number, item_of_a_dict, shape, strides, tied, shared_memory, shared_module, of_another_class],
)
def test_another_model_is_traced(change):
    assert (run(), run(change), run(change), run()) == (TRACED, TRACED, LOADED, LOADED)


@pytest.mark.parametrize(
    "call", [{"size": 8}, {"dtype": torch.bfloat16}, {"args": (2.0,)}, {"trust": ("some_package",)}]
)
def test_another_call_is_traced(call):
    args = call.pop("args", ())
    runs = run(), run(unchanged, *args, **call), run(unchanged, *args, **call)
    assert runs == (TRACED, TRACED, LOADED)


def test_weights_may_have_other_values():
    def doubled(model):
        model.conv_in.weight.data *= 2
        return model

    assert (run(), run(doubled)) == (TRACED, LOADED)


def with_default(x, y, by=2.0):
    return x + y * by


def in_closure(by):
    return lambda x, y: x + y * by


def function_with(default):
    code = with_default.__code__
    return types.FunctionType(code, vars(small), "mixed", (default,))


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    ("owner", "name", "one", "other"),
    [
        (small, "mixed", lambda x, y: x - y, lambda x, y: x + y + y),
        (small, "mixed", function_with(2.0), function_with(3.0)),
        (small, "mixed", in_closure(2.0), in_closure(3.0)),
        (small.Block, "forward", lambda self, x: self.norm(x), lambda self, x: self.conv(self.norm(x))),
        (small.Net, "doubled", lambda self, y: y * 3.0, lambda self, y: y * 4.0),
        (F, "silu", lambda x, inplace=False: x, lambda x, inplace=False: x * 0.5),
    ],
)
def test_replaced_code_is_traced(owner, name, one, other, monkeypatch):
    runs = [run()]
    for instead in (one, one, other):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, instead)
            runs.append(run())
    assert (*runs, run()) == (TRACED, TRACED, LOADED, TRACED, LOADED)


@pytest.mark.parametrize(
    ("owner", "name"), [(sys.modules["tests"], "__version__"), (torch, "__version__"), (sys, "version")]
)
def test_another_version_is_traced(owner, name, monkeypatch):
    assert run() == TRACED
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, "another", raising=False)
        key.surroundings.cache_clear()
        assert run() == TRACED
    key.surroundings.cache_clear()
    assert run() == LOADED


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("y * 2.0", "y * 3.0"),  # in a method whose name no code says
        ("self.scale * y", "y * self.scale"),
        ("factor=1.0", "factor=0.5"),
    ],
)
def test_edited_source_is_traced(old, new, tmp_path):
    path = tmp_path / "small_net.py"
    text = Path(small.__file__).read_text()
    path.write_text(text)
    assert run(kind=imported(path).Net) == TRACED
    path.write_text(f"# a comment\n{text}")
    assert run(kind=imported(path).Net) == LOADED
    edited = path.with_name("edited.py")  # a file of another name, or the old bytecode would be imported
    edited.write_text(text.replace(old, new))
    assert text.count(old)
    assert run(kind=imported(edited).Net) == TRACED


# ---- what has no text


def weak(model):
    model.back = weakref.ref(model.conv_in)
    return model


def tensor_from_elsewhere(model):
    model.blocks[0].scale = torch.tensor(0.5)
    return model


@pytest.mark.parametrize("change", [weak, tensor_from_elsewhere])
def test_what_cannot_be_kept_is_traced(change, folder):
    assert (run(change), run(change)) == (TRACED, TRACED)
    assert not folder.exists()


# ---- files


def the_file(folder):
    (path,) = folder.iterdir()
    return path


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:-20],
        lambda data: data.replace(b'"float32"', b'"float64"'),
        lambda data: b"PK" + data,
        lambda data: b"\xff\x00" * 500,
    ],
)
def test_damaged_files_are_written_again(damage, folder):
    assert run() == TRACED
    path = the_file(folder)
    path.write_bytes(damage(path.read_bytes()))
    assert (run(), run()) == (TRACED, LOADED)


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", '{"parameters":[],"constants":{},"meta":[],"nodes":[],"outcome":null}']
)
def test_foreign_content_with_the_right_hash_is_written_again(text, folder):
    assert run() == TRACED
    files.save(the_file(folder).stem, text)
    assert (run(), run()) == (TRACED, LOADED)


@pytest.mark.parametrize("name", ['["step","aten"]', '["step","dispatch"]', '["system","ls"]'])
def test_only_ops_of_aten_and_steps_are_read(name, folder):
    assert run() == TRACED
    path = the_file(folder)
    text = path.read_text().partition("\n")[2].partition("\n")[2]
    assert '["step","group_norm"]' in text
    files.save(path.stem, text.replace('["step","group_norm"]', name))
    assert run() == TRACED


def test_files_of_another_key_are_not_read(folder):
    assert (run(), run(number)) == (TRACED, TRACED)
    one, other = folder.iterdir()
    shutil.copy(one, other)
    assert sorted([run(), run(number)]) == [LOADED, TRACED]


def test_only_the_user_may_read_the_folder(folder):
    run()
    assert folder.stat().st_mode & 0o077 == 0
    assert the_file(folder).stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("is_file", [False, True])
def test_folders_that_cannot_be_written(is_file, folder, monkeypatch):
    if is_file:
        folder.write_text("a file where the folder should be")
    else:
        folder.mkdir()
        monkeypatch.setattr(tempfile, "mkstemp", no_permission)  # root may write everywhere
    assert (run(), run()) == (TRACED, TRACED)
    assert folder.is_file() or not list(folder.iterdir())


def no_permission(*args, **kwargs):
    raise PermissionError("read-only")


def test_a_write_that_fails_leaves_nothing(folder, monkeypatch):
    monkeypatch.setattr(os, "replace", no_permission)
    assert run() == TRACED
    assert not list(folder.iterdir())


@pytest.mark.parametrize("value", [None, ""])
def test_without_a_folder_nothing_is_written(folder, monkeypatch, value):
    monkeypatch.delenv("SDFASTGN_PLAN_CACHE")
    if value is not None:
        monkeypatch.setenv("SDFASTGN_PLAN_CACHE", value)
    assert (run(), run()) == (TRACED, TRACED)
    monkeypatch.setenv("SDFASTGN_PLAN_CACHE", str(folder))
    sdfastgn.optimize(net(), plans=False)(noise(1, 3, 6, 6))
    assert not folder.exists()


class KeepsRows(small.Net):
    """It keeps a tensor between calls."""

    def forward(self, x):
        self.rows = x[:, :, :1].clone()
        return super().forward(x)


def test_state_between_calls_is_not_on_disk(folder):
    assert [run(kind=KeepsRows, trust=("tests",))[1] for _ in range(2)] == [0, 0]
    assert not folder.exists()


def test_strides_of_the_stock_weights_count(folder):
    """A model whose weights are channels-last by itself, and one whose weights an earlier plan made so."""

    def planned_before(model):
        assert lay_out_weights(model)
        return model

    def channels_last(model):
        return model.to(memory_format=torch.channels_last)

    keys = []
    for change in (planned_before, channels_last):
        model = change(net())
        assert not model.conv_in.weight.is_contiguous()
        states = States(model)
        guard = Guard(model, states, states.last(), torch.device("cpu"))
        keys.append(key.key_of(model, "call", torch.device("cpu"), guard))
    assert None not in keys
    assert keys[0] != keys[1]


def test_the_files_used_least_recently_go(folder, monkeypatch):
    for i, name in enumerate("abc"):
        files.save(name, "x" * 1000)
        os.utime(folder / f"{name}.plan", (i, i))
    assert files.load("a") == "x" * 1000  # which is now the latest
    monkeypatch.setattr(files, "MOST", 3000)
    files.save("d", "x" * 1000)
    assert sorted(path.stem for path in folder.iterdir()) == ["a", "d"]


# ---- verify, threads, processes


def test_loaded_plans_are_verified(monkeypatch):
    assert run(verify=True) == TRACED
    with monkeypatch.context() as patch:
        patch.setattr(Baked, "run", lambda self, inputs: [x + 1 for x in right_run(self, inputs)])
        stock = net()
        model = sdfastgn.optimize(copy.deepcopy(stock), verify=True)
        agree(model(noise(1, 3, 6, 6)), stock(noise(1, 3, 6, 6)))
    assert vars(model)["forward"].traces == 0
    assert "differs from its own code" in next(iter(vars(model)["forward"].own))


right_run = Baked.run


def test_threads_load_one_file():
    assert run() == TRACED
    stock = net()
    models = [sdfastgn.optimize(copy.deepcopy(stock)) for _ in range(3)]
    results = []

    def call(model):
        with torch.no_grad():
            results.append(model(noise(1, 3, 6, 6, seed=1)))

    threads = [threading.Thread(target=call, args=(model,)) for model in models * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [vars(m)["forward"].loads for m in models] == [1, 1, 1]
    assert [vars(m)["forward"].traces for m in models] == [0, 0, 0]
    for result in results:
        agree(result, stock(noise(1, 3, 6, 6, seed=1)))


@pytest.mark.slow
def test_processes_at_once_then_one_more(tmp_path, folder):
    command = [sys.executable, "-m", "tests.plans.disk.run_once", str(small.__file__)]
    run_together([command, command], tmp_path, cwd=ROOT)
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["0", "1"]
    assert the_file(folder).suffix == ".plan"
