"""Arguments of every public op, on the CPU's path and on the GPU's: what is taken, what is refused."""

import inspect
import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

import sdfastgn
from tests.kernels.ops import FUNCTIONS
from tests.kernels.samples import each_path, interpreted

pytestmark = interpreted  # tensors lie on the CPU; the GPU's path runs in the interpreter


# Op -> (its tensors, all ones; its other arguments).
CALLS = {
    name: ({label: torch.ones(shape) for label, shape in op.shapes.items()}, op.options)
    for name, op in FUNCTIONS.items()
}
CALLS["group_norm"][0]["statistics"] = torch.ones(2, 2, 1, 6)
OPERANDS = [(op, label) for op, (tensors, _) in CALLS.items() for label in tensors]
REQUIRED = [
    (op, label)
    for op, label in OPERANDS
    if inspect.signature(FUNCTIONS[op].function).parameters[label].default is inspect.Parameter.empty
]


def call(op, **changes):
    tensors, others = CALLS[op]
    return FUNCTIONS[op].function(**{**tensors, **others, **changes})


# --- tensors ------------------------------------------------------------------

# How to make of a good tensor one that no op takes, and what the error ends with.
REFUSED = [
    (lambda t: 1.0, "float"),
    (lambda t: True, "bool"),
    (lambda t: "a", "str"),
    (Tensor.tolist, "list"),
    (Tensor.numpy, "ndarray"),
    (Tensor.long, "torch.int64"),
    (lambda t: t.to(torch.complex64), "torch.complex64"),
    (lambda t: t.to(torch.float8_e4m3fn), "torch.float8_e4m3fn"),
    (Tensor.to_sparse, "layout torch.sparse_coo"),
    (lambda t: t.reshape(-1, 1).to_sparse_csr(), "layout torch.sparse_csr"),
    (Tensor.to_mkldnn, "layout torch._mkldnn"),
    (lambda t: torch.nested.nested_tensor([t, t]), "a nested tensor"),
    (lambda t: torch.nested.nested_tensor([t, t], layout=torch.jagged), "a nested tensor"),
    (lambda t: torch.quantize_per_tensor(t, 0.1, 0, torch.quint8), "torch.quint8"),
]


@pytest.mark.filterwarnings("ignore::UserWarning")  # some of these kinds are deprecated or beta
@each_path
@pytest.mark.parametrize("op", CALLS)
def test_what_is_no_dense_floating_tensor_is_named(op, path):
    with path():
        call(op)  # so that its plan is in the cache, which a wrong argument must not find
        for (label, good), (make, found) in itertools.product(CALLS[op][0].items(), REFUSED):
            with pytest.raises(TypeError) as caught:
                call(op, **{label: make(good)})
            assert str(caught.value).startswith(f"{FUNCTIONS[op].name}: {label} must be ")
            assert str(caught.value).endswith(f", got {found}")


@each_path
@pytest.mark.parametrize(("op", "label"), REQUIRED)
def test_a_missing_tensor_is_named(op, label, path):
    message = rf"^{FUNCTIONS[op].name}: {label} must be a (floating )?torch\.Tensor, got NoneType$"
    with path(), pytest.raises(TypeError, match=message):
        call(op, **{label: None})


@pytest.mark.parametrize("op", CALLS)
def test_meta_tensors_go_through(op):
    found, expected = call(op, **{label: t.to("meta") for label, t in CALLS[op][0].items()}), call(op)
    for y, wanted in zip(*((t if isinstance(t, tuple) else (t,)) for t in (found, expected)), strict=True):
        assert (y.is_meta, y.shape, y.dtype) == (True, wanted.shape, wanted.dtype)


# --- numbers ------------------------------------------------------------------

NUMBERS = [
    *(np.float16(0.25), np.float32(0.25), np.float64(0.25), torch.tensor(0.25)),
    *(1, np.uint8(1), torch.tensor(1)),
]
NO_NUMBERS = [
    *("0.25", b"1", 1j, 10**309, np.ones(2)),
    *(torch.ones(2), torch.tensor(1.0, requires_grad=True), torch.tensor(1j)),
]
NORMS = ["group_norm", "instance_norm", "batch_norm", "layer_norm", "add_layer_norm"]
TAKES = [
    *((op, "eps") for op in NORMS),
    ("batch_norm", "momentum"),
    ("add_with_statistics", "scale"),
    ("wide_attention", "scale"),
]


def same(found, expected):
    pairs = zip(*((t if isinstance(t, tuple) else (t,)) for t in (found, expected)), strict=True)
    return all(torch.equal(y, wanted) for y, wanted in pairs)


@each_path
@pytest.mark.parametrize(("op", "label"), TAKES)
def test_every_kind_of_number_is_taken(op, label, path):
    first, *_ = CALLS[op][0]
    changes = {first: torch.randn_like(CALLS[op][0][first])}
    if op == "group_norm":
        changes["statistics"] = None
    with path():
        expected = {value: call(op, **changes, **{label: value}) for value in (0.25, 1.0)}
        for number in NUMBERS:
            found = call(op, **changes, **{label: number})
            assert same(found, expected[float(number)]), repr(number)


@each_path
@pytest.mark.parametrize(("op", "label"), TAKES)
@pytest.mark.parametrize("number", NO_NUMBERS, ids=lambda number: repr(number)[:20])
def test_what_is_no_number_is_named(op, label, number, path):
    with path(), pytest.raises(TypeError, match=rf"^{FUNCTIONS[op].name}: {label} must be a number, got "):
        call(op, **{label: number})


@each_path
@pytest.mark.parametrize("op", NORMS)
def test_a_bool_is_an_eps_as_in_pytorch(op, path):
    with path():
        assert same(call(op, eps=True), call(op, eps=1.0))


@each_path
@pytest.mark.parametrize("number", [np.int64(4), np.uint8(4), torch.tensor(4), np.array(4)], ids=repr)
def test_every_kind_of_index_is_a_number_of_groups(number, path):
    x = torch.randn(2, 8, 2, 3)
    with path():
        assert same(sdfastgn.group_norm(x, number), sdfastgn.group_norm(x, 4))


old_numpy = pytest.mark.skipif(np.lib.NumpyVersion(np.__version__) < "2.4.0", reason="NumPy takes it for 1")


@each_path
@pytest.mark.parametrize(
    "number",
    [True, pytest.param(np.True_, marks=old_numpy), 4.0, np.float32(4), torch.tensor(4.0), "4"],
    ids=repr,
)
def test_what_is_no_index_is_no_number_of_groups(number, path):
    x = torch.randn(2, 8, 2, 3)
    with path():
        sdfastgn.group_norm(x, 1)  # equals True
        with pytest.raises(TypeError, match=r"^sdfastgn\.group_norm: num_groups must be an int, got "):
            sdfastgn.group_norm(x, number)


# --- what equals a valid argument of another type -----------------------------


@each_path
@pytest.mark.parametrize("tokens", [1, 0, np.True_, 1.0], ids=repr)
def test_tokens_is_a_bool(tokens, path):
    with path():
        for known in (True, False):
            call("group_norm", tokens=known)
        with pytest.raises(TypeError, match=r"^sdfastgn\.group_norm: tokens must be a bool, got "):
            call("group_norm", tokens=tokens)


@each_path
def test_a_kind_of_text_is_an_activation(path):
    class Name(str):
        __slots__ = ()

    with path():
        assert same(call("group_norm", activation=Name("silu")), call("group_norm", activation="silu"))
        with pytest.raises(ValueError, match="unknown activation 'elu'"):
            call("group_norm", activation=Name("elu"))
