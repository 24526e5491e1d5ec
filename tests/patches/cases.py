"""What tests of fused modules share: inputs and comparisons."""

import copy
from collections import Counter

import torch
from diffusers.models.attention_processor import AttnProcessor2_0, IPAdapterAttnProcessor2_0
from diffusers.models.resnet import ResnetBlock2D
from torch import Tensor

import sdfastgn
from tests.kernels import samples as kernels
from tests.patches.samples import randomize

# The device of the tensors that are made here. The fixture ``on_each_device`` sets it.
WHERE = {"device": "cpu"}


def noise(*shape, seed=0, mean=1.0, dtype=torch.float32):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) + mean
    return x.to(WHERE["device"], dtype)


def image(*shape, seed=0, dtype=torch.float32, layout="channels_last"):
    """(N, C, H, W) with a mean that is larger than its spread."""
    return kernels.make(shape, dtype, WHERE["device"], layout, seed=seed)[0]


def agree(a, b, bound=2e-5):
    torch.testing.assert_close(a, b, atol=bound, rtol=bound)


def twins(stock, **options):
    """(optimized copy of ``stock``, ``stock``)"""
    return sdfastgn.optimize(copy.deepcopy(stock), **options), stock


def random_twins(module, dtype=torch.float32, **options):
    """``twins`` of ``module`` with random weights, on the device of ``WHERE``."""
    return twins(randomize(module).to(WHERE["device"], dtype), **options)


def resnet(**options):
    sizes = {"in_channels": 4, "out_channels": 6, "groups": 2, "temb_channels": 8, "eps": 1e-5}
    return ResnetBlock2D(**{**sizes, **options})


def resnet_inputs(dtype=torch.float32):
    return image(2, 4, 3, 4, dtype=dtype), noise(2, 8, dtype=dtype)


def gradients(model, *args, **options):
    """Gradients of the parameters, and of the tensors in ``args`` that require one."""
    leaves = [t for t in args if isinstance(t, Tensor) and t.requires_grad]
    leaves += [p for p in model.parameters() if p.requires_grad]
    with torch.enable_grad():
        return list(torch.autograd.grad(model(*args, **options).square().mean(), leaves))


def same_gradients(models, *args, bound=1e-5, **options):
    for a, b in zip(*(gradients(model, *args, **options) for model in models), strict=True):
        torch.testing.assert_close(a, b, atol=bound, rtol=1e-3)


def operations_of(graph):
    """The operations of a compiler's graph. Names of its inputs only say by which way it has found them."""
    return [str(node.target) for node in graph.graph.nodes if node.op != "placeholder"]


def compiles_to_stocks_graph(models, call):
    """Assert that torch.compile sees diffusers' own forward: the same operations, and on a CPU the same bits.

    On a GPU cuDNN may choose another algorithm for weights in another layout.
    """
    torch._dynamo.reset()
    targets = []

    def backend(graph, _):
        targets.append(operations_of(graph))
        return graph

    found = [call(torch.compile(model, backend=backend, fullgraph=True)) for model in models]
    assert targets[0] == targets[1]
    if WHERE["device"] == "cpu":
        assert torch.equal(*found)
    else:
        agree(*found)


def passes(launches):
    """Counts GroupNorm's passes over memory, and sums and concatenations with or without statistics."""
    names = Counter()
    uses = {"residual_ptr": "add", "tail_ptr": "cat", "bias_ptr": "bias"}
    for name, _, pointers in launches:
        if name == "statistics":
            name = next((use for p, use in uses.items() if pointers[p] is not None), name)
            name += "" if pointers["statistics_ptr"] is not None else " alone"
        names[name] += 1
    return names


class Tinted(AttnProcessor2_0):
    """A processor with an additional argument, such as IP-Adapter's and the regional ones."""

    def __call__(
        self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, temb=None, tint=0.0
    ):  # fmt: skip
        return super().__call__(attn, hidden_states, encoder_hidden_states, attention_mask, temb) + tint


def ip_adapter_processor(dim, text):
    torch.manual_seed(4)
    return IPAdapterAttnProcessor2_0(dim, cross_attention_dim=text, num_tokens=(3,), scale=[0.7])


def ip_adapter_weights(unet):
    """The weights that ``load_ip_adapter`` would read from a file.

    These are an image projection, and a key and value projection for each cross-attention.
    """
    keys = {}
    dim = unet.config.cross_attention_dim
    cross = [m for name, m in unet.attn_processors.items() if "attn2" in name]
    channels = [a.to_k.weight.shape[0] for n, a in unet.named_modules() if n.endswith("attn2")]
    assert len(cross) == len(channels)
    order = [n for n in unet.attn_processors if "attn2" in n]
    attention = dict(unet.named_modules())
    for i, name in enumerate(order):
        out = attention[name.removesuffix(".processor")].to_k.weight.shape[0]
        keys[f"{2 * i + 1}.to_k_ip.weight"] = noise(out, dim, seed=i, mean=0.0) * dim**-0.5
        keys[f"{2 * i + 1}.to_v_ip.weight"] = noise(out, dim, seed=i + 50, mean=0.0) * dim**-0.5
    projection = {
        "proj.weight": noise(4 * dim, 24, seed=98, mean=0.0) / 5,
        "proj.bias": noise(4 * dim, seed=97, mean=0.0),
        "norm.weight": torch.ones(dim),
        "norm.bias": torch.zeros(dim),
    }
    return {"image_proj": projection, "ip_adapter": keys}
