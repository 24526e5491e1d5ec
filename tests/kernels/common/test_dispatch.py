"""How a call runs: what each circumstance decides, and what the question costs."""

from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from torch.autograd import forward_ad
from torch.overrides import BaseTorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from sdfastgn.kernels.common import dispatch


class Subclass(torch.Tensor):
    """As quantized or sharded weights."""


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch):
    monkeypatch.setattr(dispatch, "is_supported", lambda x: x.dtype in dispatch.KERNEL_DTYPES)


def answers(x=None, weight=None):
    """(has_kernels, is_plain, is_plain_inference) of a call with these tensors."""
    x = torch.ones(2) if x is None else x
    others = torch.ones(2) if weight is None else weight, None, 1e-5, "silu", torch.float32
    return dispatch.has_kernels(x), dispatch.is_plain(x, others), dispatch.is_plain_inference(x, others)


def under_vmap():
    found = []
    torch.func.vmap(lambda x: (found.append(answers(torch.ones(2))), x)[1])(torch.ones(1))
    return found[0]


def under_a_trace():
    found = []
    torch.jit.trace(
        lambda x: (found.append(answers(torch.ones(2))), x + 1)[1], torch.ones(1), check_trace=False
    )
    return found[0]


def under_torch_compile():
    return torch.compile(lambda x: answers(x, x), backend="eager", fullgraph=True)(torch.ones(2))


def inside(context, **tensors):
    with context:
        return answers(**tensors)


@contextmanager
def stock_code_and_gradients():
    with dispatch.stock_code(), torch.enable_grad():
        yield


def compiled_in_stock_code():
    with dispatch.stock_code():
        return under_torch_compile()


WANTED = torch.nn.Parameter(torch.ones(2))
NEITHER, PLAIN, DIRECT = (True, False, False), (True, True, False), (True, True, True)
STOCK = (False, False, False)
CASES = {
    "plain": (answers, DIRECT),
    "inference-mode": (lambda: inside(torch.inference_mode()), DIRECT),
    "weight-frozen-by-no_grad": (lambda: inside(torch.no_grad(), weight=WANTED), DIRECT),
    "weight-wants-gradient": (lambda: answers(weight=WANTED), PLAIN),
    "input-wants-gradient": (lambda: answers(torch.ones(2, requires_grad=True)), PLAIN),
    "fp64": (lambda: answers(torch.ones(2, dtype=torch.float64)), STOCK),
    "input-of-a-subclass": (lambda: answers(torch.ones(2).as_subclass(Subclass)), NEITHER),
    "weight-of-a-subclass": (lambda: answers(weight=torch.ones(2).as_subclass(Subclass)), NEITHER),
    "stock_code": (lambda: inside(dispatch.stock_code()), STOCK),
    "stock_code-with-gradients": (lambda: inside(stock_code_and_gradients(), weight=WANTED), STOCK),
    "kernels-off": (lambda: inside(mock.patch.object(dispatch, "why_off", "no C compiler")), STOCK),
    "dispatch-mode": (lambda: inside(FlopCounterMode(display=False)), NEITHER),
    "function-mode": (lambda: inside(BaseTorchFunctionMode()), NEITHER),
    "vmap": (under_vmap, NEITHER),
    "forward-ad": (lambda: inside(forward_ad.dual_level()), NEITHER),
    "trace": (under_a_trace, NEITHER),
    "torch.compile": (under_torch_compile, NEITHER),
    # What is compiled must not depend on where it was compiled.
    "torch.compile-in-stock_code": (compiled_in_stock_code, NEITHER),
}


@pytest.mark.parametrize("case", CASES)
def test_what_decides(case):
    ask, expected = CASES[case]
    assert ask() == expected


@pytest.mark.parametrize("question", ["has_kernels", "is_plain", "is_plain_inference"])
def test_torch_compile_is_asked_once(question):
    """A UNet's step asks some hundred times, and without graphs the CPU decides how long it takes."""
    x = torch.ones(2)
    arguments = (x,) if question == "has_kernels" else (x, (x,))
    with mock.patch.object(torch.compiler, "is_dynamo_compiling", return_value=False) as asked:
        assert getattr(dispatch, question)(*arguments)
    assert asked.call_count == 1
