"""Transformer blocks with and without products in FP8, for the tests of ``precision="fp8"``."""

import copy

import torch
from diffusers.models.attention import BasicTransformerBlock

import sdfastgn
from tests.patches.cases import WHERE, noise
from tests.patches.samples import randomize

# ``DIM``, ``TEXT``: channels of the block's input and of the text. ``CALLS``: number of calls in which
# products learn (``few_calls`` in conftest.py).
DIM, TEXT, CALLS = 32, 16, 3


def made(dtype=torch.float16, **options):
    """A stock block."""
    options = {"num_attention_heads": 2, "attention_head_dim": 16, "cross_attention_dim": TEXT, **options}
    torch.manual_seed(2)
    return randomize(BasicTransformerBlock(DIM, **options)).to(WHERE["device"], dtype)


def twins(**options):
    """Returns three blocks with equal weights: with products in FP8, optimized without them, and stock."""
    stock = made(**options)
    fused = sdfastgn.optimize(copy.deepcopy(stock), precision="fp8")
    return fused, sdfastgn.optimize(copy.deepcopy(stock)), stock


def call(block, seed=0, factor=1.0):
    dtype = block.ff.net[2].weight.dtype
    x = factor * noise(2, 24, DIM, seed=seed, mean=0.0)
    return block(x.to(dtype), encoder_hidden_states=noise(2, 5, TEXT, seed=9, dtype=dtype))


def error(y, expected):
    return ((y.double() - expected.double()).norm() / expected.double().norm()).item()


def learn(block):
    for seed in range(CALLS):
        call(block, seed)


def state(block):
    (found,) = sdfastgn.report(block).fp8
    return found
