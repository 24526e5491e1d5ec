"""Where kernels run in tests: on a GPU, or in Triton's interpreter where there is none."""

import pytest
import torch

interpreted = pytest.mark.skipif(
    torch.cuda.is_available(), reason="kernels are compiled here, not interpreted"
)
DEVICES = [
    pytest.param("cpu", marks=interpreted, id="interpreter"),
    pytest.param("cuda", marks=pytest.mark.gpu, id="gpu"),
]
