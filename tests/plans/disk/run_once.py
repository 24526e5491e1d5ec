"""Runs ``small.Net`` once as a plan, and prints the number of traces and of plans from disk."""

import importlib.util
import sys

import pytest
import torch

import sdfastgn
from tests.plugin import run_fused_on_cpu


def imported(path):
    """The Python module in the file ``path``, under the name "small_net"."""
    spec = importlib.util.spec_from_file_location("small_net", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["small_net"] = module
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    run_fused_on_cpu(pytest.MonkeyPatch())
    torch.manual_seed(0)
    model = imported(sys.argv[1]).Net().eval()
    x = torch.randn(1, 3, 8, 8)
    with torch.no_grad():
        expected = model(x)
        result = sdfastgn.optimize(model)(x)
        torch.testing.assert_close(result, expected)
    planned = vars(model)["forward"]
    assert not planned.own, planned.own
    print(planned.traces, planned.loads)
