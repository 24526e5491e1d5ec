"""What the tests of packed weights share: an attention, and a description of its parameters."""

import torch
from diffusers.models.attention_processor import Attention

from sdfastgn.patches.layers import packed_weights as packing

DIM = 16
X = torch.randn((2, 7, DIM), generator=torch.Generator().manual_seed(0))
NAMES = ("to_q", "to_k", "to_v")


def attention(**options):
    torch.manual_seed(1)
    return Attention(DIM, **{"heads": 2, "dim_head": 8, "bias": True, **options}).eval()


def linears(model):
    return [getattr(model, name) for name in NAMES]


def is_packed(model):
    found = packing.plain_parameters(linears(model))
    return found is not None and packing.joined(model, found) is not None


def call(model, x=X):
    with torch.no_grad():
        return model(x)


def check(fused, stock, x=X):
    torch.testing.assert_close(call(fused, x), call(stock, x), atol=1e-5, rtol=1e-5)
    assert all(map(torch.equal, fused.state_dict().values(), stock.state_dict().values()))
    assert list(fused.state_dict()) == list(stock.state_dict())


def describe(model):
    """All properties of the parameters except their addresses."""
    return [
        (
            name,
            id(p),
            p.stride(),
            p.storage_offset(),
            p.untyped_storage().nbytes(),
            p.requires_grad,
            p.is_leaf,
        )
        for name, p in model.named_parameters()
    ]
