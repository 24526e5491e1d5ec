"""Several ``act_linear`` of one x by one launch: against fp64, and which calls launch their own kernels."""

from contextlib import nullcontext

import pytest
import torch

from sdfastgn.kernels.act_linear import shared
from sdfastgn.kernels.act_linear.op import act_linear
from sdfastgn.kernels.common.observers import observed_by
from tests.kernels.ops import true_act_linear
from tests.kernels.samples import BOUNDS, DTYPES, error, in_fp64, kernels, skip_cut_off

pytestmark = [pytest.mark.usefixtures("poisoned_memory"), pytest.mark.multiprocessors(2)]
COLUMNS = (16, 40, 8)
truth = in_fp64(true_act_linear)


class Tape:
    """Stands for a CUDA graph, also on the CPU: launches of ``_shared_kernel`` are recorded, and run later.

    All other launches of a capture run at once.
    """

    def __init__(self, monkeypatch):
        self.launches = []
        monkeypatch.setattr(shared, "_ready", shared.PlanCache())
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        self._run = shared.Launch.run
        monkeypatch.setattr(shared.Launch, "run", lambda launch, *tensors: self.record(launch, tensors))

    def record(self, launch, tensors):
        is_shared = launch.kernel.fn.__name__ == "_shared_kernel"
        if is_shared and isinstance(shared.current.get(), shared.Capture):
            self.launches.append((launch, tensors))
        else:
            self._run(launch, *tensors)

    def rehearse(self, call):
        with kernels(direct=True), torch.no_grad(), shared.rehearsed():
            call()

    def capture(self, call, x, constants):
        """Captures and replays ``call``. Returns its results."""
        capture = shared.Capture(x.device, {t.data_ptr() for t in constants})
        with kernels(direct=True), torch.no_grad():
            with capture.running():
                found = call()
            for launch, tensors in self.launches:
                self._run(launch, *tensors)
        return found


@pytest.fixture
def tape(monkeypatch):
    return Tape(monkeypatch)


def layers(N, K, device, dtype=torch.float32, columns=COLUMNS):
    """x (N, K), and (weight, bias, extra bias) of a layer for each item of ``columns``."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(shape, generator=generator)

    x = 3 + 1.5 * draw(N, K)
    parts = [(draw(C, K) / K**0.5, draw(C), draw(C)) for C in columns]
    return x.to(device, dtype), [tuple(t.to(device, dtype) for t in part) for part in parts]


def tensors_of(parts):
    return [t for part in parts for t in part]


def project(x, parts, activation="silu"):
    return [act_linear(x, w, b, activation, extra_bias=extra) for w, b, extra in parts]


def assert_right(found, x, parts, activation="silu"):
    for y, (weight, bias, extra) in zip(found, parts, strict=True):
        assert error(y, truth(x, weight, bias, activation, extra)) < BOUNDS[x.dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("N", "K"), [(1, 64), (2, 1280), (3, 40), (16, 40)])
def test_one_launch_computes_all(tape, N, K, dtype, device):
    skip_cut_off(dtype, device)
    x, parts = layers(N, K, device, dtype)
    tape.rehearse(lambda: project(x, parts))
    found = tape.capture(lambda: project(x, parts), x, tensors_of(parts))
    assert len(tape.launches) == 1
    with kernels(direct=True), torch.no_grad():
        alone = project(x, parts)
    assert_right(found, x, parts)
    for y, own in zip(found, alone, strict=True):
        assert y.is_contiguous()
        assert torch.equal(y, own)


def test_each_x_has_a_launch(tape, device):
    x, parts = layers(2, 64, device)
    xs = x, x + 1, x + 2
    tape.rehearse(lambda: project(x, parts))
    found = tape.capture(lambda: [project(each, parts) for each in xs], x, tensors_of(parts))
    assert len(tape.launches) == shared._MOST_TABLES == 2  # the third x has launches of its own
    # An unaligned pointer would make Triton compile the kernel again, in the capture.
    assert not any(t.data_ptr() % 16 for _, tensors in tape.launches for t in tensors)
    for each, results in zip(xs, found, strict=True):
        assert_right(results, each, parts)


def test_a_full_table(tape, monkeypatch, device):
    monkeypatch.setattr(shared, "_MOST_ENTRIES", 5)
    x, parts = layers(2, 64, device)  # 2, 5 and 1 entries
    tape.rehearse(lambda: project(x, parts))
    found = tape.capture(lambda: project(x, parts), x, tensors_of(parts))
    (_, (_, table, _)) = tape.launches[0]
    assert table[0] == 3
    assert_right(found, x, parts)


def written(x, weight, bias, extra):
    return x.add_(1), weight, bias, extra


def with_other_memory(x, weight, bias, extra):
    x.data = x + 1
    return x, weight, bias, extra


def with_another_shape(x, weight, bias, extra):
    """The same object, memory and count of writes."""
    x.data = x.view(1, 128)
    return x, weight.view(8, 128), bias[:8], extra[:8]


def another_weight(x, weight, bias, extra):
    """A weight that the captured code computes."""
    return x, weight * 2, bias, extra


def another_bias(x, weight, bias, extra):
    return x, weight, bias, extra * 2


def unaligned(x, weight, bias, extra):
    memory = extra.new_empty(len(extra) + 1)
    memory[1:] = extra
    return x, weight, bias, memory[1:]


def odd(x, weight, bias, extra):
    return x, weight[:12], bias[:12], extra[:12]


def of_another_dtype(x, weight, bias, extra):
    return x, weight, bias.half(), extra


def without_bias(x, weight, bias, extra):
    return x, weight, None, extra


def strided(x, weight, bias, extra):
    return x, weight, bias, extra[:1].expand(len(extra))


def in_inference_mode(x, weight, bias, extra):
    """A bias of which PyTorch counts no writes."""
    with torch.inference_mode():
        return x, weight, bias.clone(), extra


# These changes give the operands another layout or dtype. Their new tensors count as constants.
_OF_OTHER_KINDS = (unaligned, odd, of_another_dtype, strided, in_inference_mode)
_OF_X = (written, with_other_memory, with_another_shape)
_CHANGES = (*_OF_X, another_weight, another_bias, without_bias, *_OF_OTHER_KINDS)


@pytest.mark.parametrize("change", _CHANGES)
def test_what_may_change_is_not_shared(tape, change, device):
    """The second call launches its own kernel, with the values that its operands have at that time."""
    x, parts = layers(2, 64, device, columns=(16, 16))
    tape.rehearse(lambda: project(x, parts))
    tape.rehearse(lambda: project(x.view(1, 128), [with_another_shape(x.clone(), *parts[1])[1:]]))
    x0, constants, changed = x.clone(), tensors_of(parts), []

    def call():
        first = project(x, parts[:1])
        changed.extend(change(x, *parts[1]))
        if change in _OF_OTHER_KINDS:
            shared.current.get()._constants |= {t.data_ptr() for t in changed[1:]}
        return [*first, *project(changed[0], [tuple(changed[1:])])]

    first, second = tape.capture(call, x, constants)
    launches = [tensors[1][0] for _, tensors in tape.launches]
    # Another x has a launch of its own, which further calls could share.
    others = {written: [2], with_other_memory: [2], with_another_shape: [1]}
    assert launches == [2, *others.get(change, [])]
    if change not in _OF_X:
        assert_right([first], x0, parts[:1])
    assert_right([second], changed[0], [changed[1:]])


def test_other_activations_are_apart(tape, device):
    x, parts = layers(2, 64, device)

    def call():
        return [*project(x, parts), *project(x, parts, "gelu")]

    tape.rehearse(call)
    found = tape.capture(call, x, tensors_of(parts))
    assert len(tape.launches) == 2
    assert_right(found[:3], x, parts)
    assert_right(found[3:], x, parts, "gelu")


def test_odd_rows_are_not_shared(tape, device):
    x, parts = layers(2, 60, device)
    tape.rehearse(lambda: project(x, parts))
    tape.capture(lambda: project(x, parts), x, tensors_of(parts))
    assert not tape.launches


def test_a_part_of_x_has_a_launch_of_its_own(tape, device):
    x, parts = layers(2, 64, device)
    xs = x, x[:1]
    call = lambda: [project(each, parts) for each in xs]  # noqa: E731
    tape.rehearse(call)
    found = tape.capture(call, x, tensors_of(parts))
    assert len(tape.launches) == 2
    for each, results in zip(xs, found, strict=True):
        assert_right(results, each, parts)


@pytest.mark.parametrize("is_rehearsed", [True, False])
def test_an_unaligned_x_is_not_shared(tape, device, is_rehearsed):
    """Nor does its rehearsal compile the kernel for others."""
    x, parts = layers(2, 64, device)
    odd = torch.cat([x.new_zeros(1), x.flatten()])[1:].view(2, 64)
    assert odd.data_ptr() % 16
    first, second = (odd, x) if is_rehearsed else (x, odd)
    tape.rehearse(lambda: project(first, parts))
    found = tape.capture(lambda: project(second, parts), x, tensors_of(parts))
    assert not tape.launches
    assert_right(found, x, parts)


def test_a_capture_that_fails_keeps_nothing(tape, device):
    x, parts = layers(2, 64, device)
    tape.rehearse(lambda: project(x, parts))
    capture = shared.Capture(x.device, {t.data_ptr() for t in tensors_of(parts)})
    call = lambda: project(x, [*parts, (None, None, None)])  # noqa: E731
    with kernels(direct=True), torch.no_grad(), pytest.raises(TypeError), capture.running():
        call()
    assert not capture._groups
    assert not capture._constants


def test_an_x_on_another_device_is_not_shared(tape, device):
    """The table would be on the device of the graph."""
    x, parts = layers(2, 64, device)
    tape.rehearse(lambda: project(x, parts))
    capture = shared.Capture(torch.device("meta"), {t.data_ptr() for t in tensors_of(parts)})
    capture._tables = [torch.zeros(1)]
    with kernels(direct=True), torch.no_grad(), capture.running():
        project(x, parts)
    assert not tape.launches


def test_tables_that_no_launch_reads_are_freed(tape, device):
    x, parts = layers(2, 64, device)
    tape.rehearse(lambda: project(x, parts))
    captures = [shared.Capture(x.device, {t.data_ptr() for t in tensors_of(parts)}) for _ in range(2)]
    with kernels(direct=True), torch.no_grad():
        with captures[0].running():
            pass
        with captures[1].running():
            project(x, parts)
    assert [len(capture._tables) for capture in captures] == [0, 1]


def test_another_stream_has_a_launch_of_its_own(tape, device, monkeypatch):
    """Calls on another stream would not wait for the launch."""
    x, parts = layers(2, 64, device)
    tape.rehearse(lambda: project(x, parts))
    streams = iter((0, 0, 1))
    monkeypatch.setattr(shared.gpu, "current_stream", lambda x: next(streams))
    tape.capture(lambda: project(x, parts), x, tensors_of(parts))
    assert [tensors[1][0] for _, tensors in tape.launches] == [2 + 5, 1]


def test_inference_tensors_are_not_shared(tape, device):
    x, parts = layers(2, 64, device)
    tape.rehearse(lambda: project(x, parts))

    def call():
        with torch.inference_mode():
            return project(x.clone(), parts)

    found = tape.capture(call, x, tensors_of(parts))
    assert not tape.launches
    assert_right(found, x, parts)


@pytest.mark.parametrize("case", ["not capturing", "recorded"])
def test_launches_that_must_be_their_own(tape, device, monkeypatch, case):
    """A recorder of launches must see those of each call, and outside of a capture nothing comes later."""
    x, parts = layers(2, 64, device)
    tape.rehearse(lambda: project(x, parts))
    if case == "not capturing":
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    run = lambda launch, stream, tensors: launch(stream, *tensors)  # noqa: E731
    with observed_by(run) if case == "recorded" else nullcontext():
        found = tape.capture(lambda: project(x, parts), x, tensors_of(parts))
    assert not tape.launches
    assert_right(found, x, parts)


def test_only_what_was_rehearsed(tape, device):
    x, parts = layers(2, 64, device)
    more = torch.cat([x, x])
    tape.rehearse(lambda: project(x, parts))
    tape.capture(lambda: project(more, parts), x, tensors_of(parts))
    assert not tape.launches


def test_with_gradients_nothing_is_shared(tape, device):
    """A call in a capture that needs gradients computes its own result, and the gradients are right."""
    x, parts = layers(2, 64, device)
    tape.rehearse(lambda: project(x, parts))
    for t in tensors_of(parts):
        t.requires_grad_()

    def call():
        shared_ones = project(x, parts)
        with torch.enable_grad():
            return shared_ones, project(x, parts)

    without, found = tape.capture(call, x, tensors_of(parts))
    assert len(tape.launches) == 1
    assert not any(y.requires_grad for y in without)
    sum(y.sum() for y in found).backward()
    for weight, bias, _ in parts:
        assert torch.equal(bias.grad, torch.full_like(bias, 2.0))
        expected = torch.nn.functional.silu(x.double()).sum(0).expand(weight.shape)
        assert error(weight.grad, expected) < BOUNDS[torch.float32]


def test_a_kernel_that_fails_is_not_used(tape, monkeypatch, device):
    def fail(launch, x):
        raise shared.dispatch.KernelError("it fails")

    monkeypatch.setattr(shared, "_launch_idly", fail)
    x, parts = layers(2, 64, device)
    tape.rehearse(lambda: project(x, parts))
    found = tape.capture(lambda: project(x, parts), x, tensors_of(parts))
    assert not tape.launches
    assert_right(found, x, parts)
