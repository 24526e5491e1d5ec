"""Patched models under torch.compile, torch.export and diffusers' regional compilation: no graph
break, no layout copy, same results.
"""

from __future__ import annotations

import copy
import functools
import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.models.autoencoders.vae import Decoder
from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.unets.unet_2d_blocks import CrossAttnUpBlock2D
from functorch.compile import make_boxed_func
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd

import sdfastgn
from sdfastgn.bench.variants import VARIANTS
from sdfastgn.models.architectures import randomize
from tests.patches import samples

pytestmark = pytest.mark.fused_on_cpu

Call = Callable[[Any, int, int], Tensor]  # (model, N, H) -> output


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) + 0.5


def unet() -> tuple[nn.Module, Call]:
    """One level and no middle: more adds seconds of tracing and no new operation."""
    model = samples.one_level_unet(block_out_channels=(12,), norm_num_groups=3)
    step = torch.tensor(10)
    return model, lambda m, N, H: m(noise(N, 4, H, 8), step, noise(N, 3, 8, seed=1)).sample


def vae() -> tuple[nn.Module, Call]:
    model = samples.vae(block_out_channels=(8, 12), norm_num_groups=4)
    return model, lambda m, N, H: m(noise(N, 3, H, 4)).sample


def up_block() -> tuple[nn.Module, Call]:
    """A level of a UNet: what a whole one adds to its graph is more of the same."""
    model = CrossAttnUpBlock2D(
        in_channels=6,
        prev_output_channel=6,
        out_channels=6,
        temb_channels=8,
        num_layers=1,
        resnet_groups=3,
        num_attention_heads=2,
        cross_attention_dim=8,
    )

    def image(N: int, H: int, seed: int) -> Tensor:
        return noise(N, 6, H, 4, seed=seed).contiguous(memory_format=torch.channels_last)

    return model, lambda m, N, H: m(image(N, H, 0), (image(N, H, 1),), noise(N, 8), noise(N, 3, 8, seed=1))


def norm() -> tuple[nn.Module, Call]:
    module = sdfastgn.GroupNorm(3, 6, activation="silu")
    return module, lambda m, N, H: m(noise(N, 6, H, 5).contiguous(memory_format=torch.channels_last))


def encoder() -> tuple[nn.Module, Call]:
    return vae()[0].encoder, lambda m, N, H: m(noise(N, 3, H, 4))


def decoder() -> tuple[nn.Module, Call]:
    model = Decoder(
        up_block_types=("UpDecoderBlock2D",), block_out_channels=(8,), layers_per_block=1, norm_num_groups=4
    )
    return model, lambda m, N, H: m(noise(N, 3, H, 6))


BUILDERS = {
    "unet": unet,
    "up_block": up_block,
    "vae": vae,
    "encoder": encoder,
    "decoder": decoder,
    "group_norm": norm,
}


def built(name: str) -> tuple[nn.Module, Call]:
    model, call = BUILDERS[name]()
    randomize(model, 3)
    if name != "group_norm":
        sdfastgn.optimize(model, strict=True)
    return model.eval(), call


@dataclass
class Compiled:
    """What a model gave compiled and as it is, and the graphs that were compiled: the forward's,
    the backward's, ...
    """

    outputs: list[tuple[Tensor, Tensor]]
    gradients: list[tuple[dict[str, Tensor], dict[str, Tensor]]]
    graphs: list[fx.GraphModule]


def run(
    model: nn.Module, call: Call, f: Any, N: int, H: int, backward: bool
) -> tuple[Tensor, dict[str, Tensor]]:
    if not backward:
        with torch.no_grad():
            return call(f, N, H), {}
    model.zero_grad()
    y = call(f, N, H)
    y.square().mean().backward()
    return y.detach(), {k: p.grad.clone() for k, p in model.named_parameters() if p.grad is not None}


# What is run of each: sizes (N, H), and whether the backward too. Tracing a backward with symbols
# takes most of a minute for a model.
STATIC = ([(2, 8)], True)
DYNAMIC = {
    "group_norm": ([(2, 8), (3, 12)], True),
    "decoder": ([(2, 8), (3, 12)], False),
    "up_block": ([(2, 8)], False),
}


@functools.cache
def compiled(name: str, dynamic: bool) -> Compiled:
    """One model by a compiler that only looks at its graphs."""
    torch._dynamo.reset()
    graphs: list[fx.GraphModule] = []

    def keep(graph: fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return make_boxed_func(graph)

    model, call = built(name)
    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep)
    f = torch.compile(model, fullgraph=True, dynamic=dynamic, backend=backend)
    sizes, backward = DYNAMIC[name] if dynamic else STATIC
    pairs = [(run(model, call, f, N, H, backward), run(model, call, model, N, H, backward)) for N, H in sizes]
    return Compiled([(a[0], b[0]) for a, b in pairs], [(a[1], b[1]) for a, b in pairs], graphs)


# torch.Size.numel() in the backward fixes H and W, so that each size is compiled anew.
CASES = [
    pytest.param("group_norm", False, id="group_norm"),
    pytest.param("group_norm", True, id="group_norm-dynamic"),
    pytest.param("unet", False, id="unet", marks=pytest.mark.slow),
    pytest.param("up_block", True, id="up_block-dynamic"),
    pytest.param("encoder", False, id="encoder"),
    pytest.param("decoder", True, id="decoder-dynamic", marks=pytest.mark.slow),
]


@pytest.mark.drawn(1)
@pytest.mark.parametrize(("name", "dynamic"), CASES)
def test_one_graph_and_the_same_results(name: str, dynamic: bool) -> None:
    found = compiled(name, dynamic)
    for ours, plain in found.outputs:
        assert ours.stride() == plain.stride()
        torch.testing.assert_close(ours, plain, atol=1e-5, rtol=1e-5)
    for gradients, expected in found.gradients:
        assert gradients.keys() == expected.keys()
        for key, gradient in gradients.items():
            assert (gradient - expected[key]).norm() <= 1e-5 * expected[key].norm() + 1e-7, key


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "graphs"),
    [pytest.param("group_norm", 2, id="group_norm"), pytest.param("decoder", 1, id="decoder")],
)
def test_sizes_share_their_graphs(name: str, graphs: int) -> None:
    """Not so for an up block, whose stock upsampling is compiled anew for each size."""
    assert len(compiled(name, True).graphs) == graphs


# --- layout copies --------------------------------------------------------------------------------

OPS = "sdfastgn.group_norm"  # the forward's, and any op that its backward may have
VIEWS = (
    "view",
    "permute",
    "transpose",
    "expand",
    "unsqueeze",
    "squeeze",
    "slice",
    "alias",
    "getitem",
    "reshape",
    "t",
)
COPIES = ("clone", "contiguous", "_to_copy", "copy", "_reshape_copy")


def op_of(node: fx.Node) -> str:
    """``clone`` for ``aten.clone.default``."""
    parts = str(getattr(node.target, "__name__", node.target)).removeprefix("aten.").split(".")
    return parts[0].removeprefix("_unsafe_")


def layout(node: fx.Node) -> Any:
    value = node.meta["val"]
    return tuple(value.stride()), value.dtype


def is_layout_copy(node: fx.Node) -> bool:
    """A copy to other strides.

    Dropout leaves clones with the same strides in a graph, which no backend carries out.
    """
    return (
        node.op == "call_function"
        and op_of(node) in COPIES
        and layout(node) != layout(node.all_input_nodes[0])
    )


def neighbors(node: fx.Node, step: Callable[[fx.Node], Any]) -> Iterator[fx.Node]:
    """The nodes before or after ``node``, views seen through."""
    for other in step(node):
        if other.op == "call_function" and op_of(other) in VIEWS:
            yield from neighbors(other, step)
        else:
            yield other


def layout_copies(graph: fx.GraphModule) -> list[str]:
    return [
        f"{other.format_node()} beside {node.format_node()}"
        for node in graph.graph.nodes
        if str(node.target).startswith(OPS)
        for step in (lambda n: n.all_input_nodes, lambda n: list(n.users))
        for other in neighbors(node, step)
        if is_layout_copy(other)
    ]


def norms(graph: fx.GraphModule) -> int:
    return sum(str(node.target).startswith(OPS) for node in graph.graph.nodes)


@pytest.mark.drawn(1)
@pytest.mark.parametrize(("name", "dynamic"), CASES)
def test_no_layout_copy_beside_a_normalization(name: str, dynamic: bool) -> None:
    graphs = compiled(name, dynamic).graphs
    assert norms(graphs[0]) >= {"group_norm": 1, "up_block": 3}.get(name, 8)
    assert [copy for graph in graphs for copy in layout_copies(graph)] == []


def test_a_layout_copy_would_be_found() -> None:
    class Copies(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return sdfastgn.group_norm(x.contiguous(), 3).flatten(2).transpose(1, 2).contiguous()

    graphs: list[fx.GraphModule] = []

    def keep(graph: fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return make_boxed_func(graph)

    x = noise(2, 6, 4, 5).contiguous(memory_format=torch.channels_last)
    torch.compile(Copies(), fullgraph=True, backend=aot_autograd(fw_compiler=keep))(x)
    assert len(layout_copies(graphs[0])) == 2


# --- inductor -------------------------------------------------------------------------------------

_REASON = VARIANTS["compile"].available(torch.device("cpu"))


def resnet() -> nn.Module:
    block = randomize(ResnetBlock2D(in_channels=8, out_channels=12, groups=4, temb_channels=16), 3)
    return sdfastgn.optimize(block.to(memory_format=torch.channels_last), strict=True)


@pytest.mark.parametrize(
    ("device", "bound"),
    [
        pytest.param(
            "cpu",
            1e-4,
            marks=[pytest.mark.slow, pytest.mark.skipif(_REASON is not None, reason=str(_REASON))],
        ),
        pytest.param("cuda", 1e-2, marks=pytest.mark.gpu),  # convolutions may run in TF32
    ],
)
def test_inductor(device: str, bound: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward; and what Inductor makes kernels of holds no copy at all."""
    import torch._inductor.config as config

    seen: list[str] = []
    monkeypatch.setattr(config, "force_disable_caches", True)
    monkeypatch.setattr(
        config,
        "post_grad_custom_post_pass",
        lambda graph: seen.extend(op_of(node) for node in graph.nodes if node.op == "call_function"),
    )
    block = resnet().to(device).train()
    f = torch.compile(block, fullgraph=True)
    x, temb = (
        t.to(device) for t in (noise(2, 8, 4, 5).contiguous(memory_format=torch.channels_last), noise(2, 16))
    )
    results = []
    for module in (f, block):
        leaves = [t.clone().requires_grad_() for t in (x, temb)]
        y = module(*leaves)
        results.append([y, *torch.autograd.grad(y.square().mean(), [*leaves, *block.parameters()])])
    for ours, plain in zip(*results, strict=True):
        assert (ours - plain).norm() <= bound * plain.norm()
    assert "convolution_backward" in seen, "the backward's graph too"
    assert seen.count("group_norm") == 2
    assert not set(seen) & set(COPIES)


# --- export ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_export_of_a_vae_decoder_saved_and_loaded() -> None:
    decoder = built("vae")[0].decoder
    sizes = {"sample": {0: torch.export.Dim("N", max=8), 2: torch.export.Dim("H", max=64)}}
    with torch.no_grad():
        exported = torch.export.export(decoder, (noise(2, 4, 6, 4),), dynamic_shapes=sizes)
        assert any(str(node.target).startswith(OPS) for node in exported.graph.nodes)
        file = io.BytesIO()
        torch.export.save(exported, file)
        file.seek(0)
        loaded = torch.export.load(file)
        for latents in (noise(2, 4, 6, 4), noise(3, 4, 9, 4)):
            expected = decoder(latents)
            for program in (exported, loaded):
                actual = program.module()(latents)
                assert actual.stride() == expected.stride()
                torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


# --- compile() methods of modules -----------------------------------------------------------------


@pytest.mark.drawn(1)
@pytest.mark.parametrize("way", ["compile_repeated_blocks", "compile"])
def test_compiled_modules_can_be_optimized_and_restored(way: str) -> None:
    """Optimized before its blocks are compiled, and between two calls of a model compiled as a whole."""
    model, call = unet()
    if not hasattr(model, way):
        pytest.skip(f"this diffusers has no {way}")
    randomize(model, 3).eval()
    stock = copy.deepcopy(model)
    with torch.no_grad():
        expected = call(stock, 2, 8)
        if way == "compile_repeated_blocks":
            sdfastgn.optimize(model, strict=True)
        getattr(model, way)(fullgraph=True, backend="eager")
        if way == "compile":
            torch.testing.assert_close(call(model, 2, 8), expected, atol=1e-5, rtol=1e-5)
        sdfastgn.optimize(model, strict=True)
        torch.testing.assert_close(call(model, 2, 8), expected, atol=1e-5, rtol=1e-5)
        assert len(sdfastgn.report(model).fused) > 8
        sdfastgn.restore(model)
        assert not sdfastgn.report(model).fused
        torch.testing.assert_close(call(model, 2, 8), expected, atol=1e-6, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("eps", "fullgraph"), [(True, True), (np.float32(0.5), False), (torch.tensor(0.5), False)], ids=repr
)
def test_a_number_that_pytorch_takes_breaks_no_more_graphs_than_stock(eps, fullgraph):
    stock = nn.Sequential(nn.GroupNorm(2, 8, eps), nn.SiLU())
    model = sdfastgn.optimize(copy.deepcopy(stock))
    x = noise(2, 8, 4, 4)
    for module in (stock, model):
        compiled = torch.compile(module, backend="aot_eager", fullgraph=fullgraph)
        torch.testing.assert_close(compiled(x), stock(x))
