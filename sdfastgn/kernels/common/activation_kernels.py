"""The activations of ``common/activations.py`` in Triton, and functions that they are made of.

They are fp32 in and out, as exact as an instruction of the special-function unit: 2 units in the last
place of fp32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sdfastgn.kernels.common.tiles import PTX


@triton.jit
def exp2(x):
    """2^x in fp32, 0 below 2^-126, by an instruction: ``tl.exp2`` links a library, which takes long."""
    if PTX:
        power = tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        power = tl.exp2(x)
    return power


@triton.jit
def _reciprocal(x):
    return tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def _sigmoid(z, PAIRS: tl.constexpr):
    """Two special-function instructions an element, or three a pair: their rate is the bound in L2.

    ``PAIRS``: two neighbours share a reciprocal, 1/a = b/(ab). The exponential is cut at 2^60,
    so that ab stays finite: below z = -41 the result is 2^-60 instead of less, which 16-bit
    results of usual size do not show.
    """
    if not PTX:
        s = 1 / (1 + tl.exp(-z))
    elif PAIRS:
        e = 1 + exp2(tl.minimum(z * -1.4426950408889634, 60.0))
        if len(e.shape) == 2:
            a, b = tl.split(tl.reshape(e, (e.shape[0], e.shape[1] // 2, 2)))
        else:
            a, b = tl.split(tl.reshape(e, (e.shape[0], e.shape[1], e.shape[2], e.shape[3] // 2, 2)))
        r = _reciprocal(a * b)
        s = tl.reshape(tl.join(r * b, r * a), e.shape)
    else:
        s = _reciprocal(1 + exp2(z * -1.4426950408889634))
    return s


@triton.jit
def _sigmoid_and_rest(z, PAIRS: tl.constexpr):
    """(sigmoid, 1 - sigmoid). The latter is multiplied by powers of z, so in fp32 it is no difference."""
    if PAIRS or not PTX:
        s = _sigmoid(z, PAIRS)
        rest = 1 - s
    else:
        # log2(e) in two parts, and the rounding error of the first product: the exponent is
        # then exact to the last bit.
        t = tl.minimum(z * -1.4426950408889634, 126.0)
        low = tl.fma(z, -1.4426950216293335, -t) + z * -1.92596298909109e-08
        e = exp2(t)
        e = tl.where(t < 126.0, tl.fma(e, low * 0.6931471805599453, e), e)
        s = _reciprocal(1 + e)
        rest = e * s
    return s, rest


@triton.jit
def activate(z, ACTIVATION: tl.constexpr, PAIRS: tl.constexpr):
    if ACTIVATION == "relu":
        z = tl.where(z < 0, 0.0, z)  # keeps NaN
    elif ACTIVATION == "silu":
        z = z * _sigmoid(z, PAIRS)
    elif ACTIVATION == "gelu":
        z = 0.5 * z * (1 + tl.erf(z * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        # tanh(a) = 2 sigmoid(2a) - 1 turns 0.5 z (1 + tanh(a)) into z sigmoid(2a)
        z = z * _sigmoid(1.5957691216057308 * (z + 0.044715 * z * z * z), PAIRS)
    return z


@triton.jit
def activation_grad(dy, z, ACTIVATION: tl.constexpr, PAIRS: tl.constexpr):
    """Gradient of z where ``dy`` is that of activation(z)."""
    dz = dy
    if ACTIVATION == "relu":
        dz = tl.where(z <= 0, 0.0, dy)  # passes on where z is NaN, as PyTorch does
    elif ACTIVATION == "silu":
        s, rest = _sigmoid_and_rest(z, PAIRS)
        dz = dy * s * (1 + z * rest)
    elif ACTIVATION == "gelu":
        cdf = 0.5 * (1 + tl.erf(z * 0.7071067811865476))
        dz = dy * (cdf + z * 0.3989422804014327 * tl.exp(-0.5 * z * z))
    elif ACTIVATION == "gelu_tanh":
        s, rest = _sigmoid_and_rest(1.5957691216057308 * (z + 0.044715 * z * z * z), PAIRS)
        dz = dy * s * (1 + z * rest * (1.5957691216057308 + 0.2140644488078421 * z * z))
    return dz


@triton.jit
def normal_cdf(z, HALF: tl.constexpr):
    """(P(z), exp(-z * z / 2)), P being the normal distribution; the other is a multiple of P'.

    ``HALF``: for 16-bit results, in half the instructions, which bound a kernel that applies
    this to a matrix product at 40 an element. exp(z * z / 2) * P(-z) is a polynomial in 1 / (1
    + 0.3 z), fitted for 0 <= z <= 14 to a relative error of 8e-6: a thirtieth of a rounding to
    fp16, and unlike 1 + erf(z) no difference where the gate is closed.
    """
    if HALF:
        e, t = z * z * -0.7213475204444817, 1 + 0.3 * tl.abs(z)
        e, t = exp2(e), _reciprocal(t) if PTX else 1 / t
        tail = 0.21603576202407757 - 0.0770970478463818 * t
        tail = -0.016946425204208193 + tail * t
        tail = 0.14419541896976898 + tail * t
        tail = 0.11374218452563839 + tail * t
        tail = (0.12007420667994445 + tail * t) * t * e
        cdf = tl.where(z < 0, tail, 1 - tail)
    else:
        e = tl.exp(-0.5 * z * z)
        cdf = 0.5 * (1 + tl.erf(z * 0.7071067811865476))
    return cdf, e
