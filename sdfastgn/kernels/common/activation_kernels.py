"""The activations of ``common/activations.py`` and their derivatives as Triton functions.

All functions take and return fp32 blocks. A block may have any shape. But if two neighboring elements share a
reciprocal (the constant ``PAIRS``), the block must have two or four axes. Exponentials and reciprocals are
computed by the GPU's special-function unit, whose error is at most 2 units in the last place.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sdfastgn.kernels.common.tiles import PTX


@triton.jit
def exp2(x):
    """Returns 2^x.

    On NVIDIA GPUs this is one PTX instruction, which returns 0 for results below 2^-126. ``tl.exp2`` would
    link a library, which makes compilation slower.
    """
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
    """Returns 1 / (1 + exp(-z)).

    ``PAIRS``: True if two neighbors on the last axis share one reciprocal. If a and b are the denominators of
    the two neighbors, then 1/a = b * (1/(ab)) and 1/b = a * (1/(ab)). So a pair takes three special-function
    instructions instead of four. These instructions limit the speed of kernels whose x comes from the L2
    cache. With ``PAIRS``, exp(-z) is cut off at 2^60, so that ab stays finite. For z < -41.6 the result is
    then 0 instead of a number below 2^-60. This error does not matter in 16-bit results.
    """
    if not PTX:
        s = 1 / (1 + tl.exp(-z))
    elif PAIRS:
        t = z * -1.4426950408889634
        e = 1 + exp2(tl.minimum(t, 60.0))
        if len(e.shape) == 2:
            a, b = tl.split(tl.reshape(e, (e.shape[0], e.shape[1] // 2, 2)))
        else:
            a, b = tl.split(tl.reshape(e, (e.shape[0], e.shape[1], e.shape[2], e.shape[3] // 2, 2)))
        r = _reciprocal(a * b)
        # Where exp(-z) is cut off, sigmoid(z) must be exactly 0: silu multiplies it by z, so z = -1e30 gives
        # -0, and z = -inf gives NaN, both as in PyTorch.
        s = tl.where(t < 60.0, tl.reshape(tl.join(r * b, r * a), e.shape), 0.0)
    else:
        s = _reciprocal(1 + exp2(z * -1.4426950408889634))
    return s


@triton.jit
def _sigmoid_and_rest(z, PAIRS: tl.constexpr):
    """Returns (sigmoid(z), 1 - sigmoid(z)).

    Where sigmoid(z) is close to 1, the subtraction 1 - sigmoid(z) loses digits, and callers multiply the
    difference by powers of z, which enlarges its error. So without ``PAIRS`` the second value is computed as
    exp(-z) * sigmoid(z).

    With ``PAIRS``, two neighbors share one reciprocal, and results have 16 bits. Then the subtraction is used
    for z < 17, where its error does not matter in 16-bit results. For z >= 17 the second value is set to 0;
    exactly, it is below 2^-24. Where there is no PTX, the second value is computed as with ``PAIRS``.
    """
    if PAIRS or not PTX:
        s = _sigmoid(z, PAIRS)
        rest = tl.where(z < 17.0, 1 - s, 0.0)
    else:
        # The exponent is -z * log2(e) = t + low: ``t`` is the rounded product, ``low`` is its rounding
        # error plus z times the digits of log2(e) that one fp32 number cannot hold. The factor
        # 2^low = 1 + low * ln(2) then corrects 2^t. Beyond 2^126 and 2^-126, 2^t is cut off: there ``low``
        # may be NaN, and sigmoid(z) must be 0 or 1, because callers multiply it by z.
        t = tl.minimum(z * -1.4426950408889634, 126.0)
        low = tl.fma(z, -1.4426950216293335, -t) + z * -1.92596298909109e-08
        e = exp2(t)
        e = tl.where(tl.abs(t) < 126.0, tl.fma(e, low * 0.6931471805599453, e), e)
        s = tl.where(t < 126.0, _reciprocal(1 + e), 0.0)
        rest = e * s
    return s, rest


@triton.jit
def _mish_parts(z):
    """Returns e = exp(z) and r = 1 / (e * (e + 2) + 2), where tanh(softplus(z)) = e * (e + 2) * r.

    exp(z) is cut off at 2^60, so that its square stays finite. There tanh(softplus(z)) rounds to 1.
    """
    if PTX:
        e = exp2(tl.minimum(z * 1.4426950408889634, 60.0))
        r = _reciprocal(e * (e + 2) + 2)
    else:
        e = tl.exp(tl.minimum(z, 41.5))
        r = 1 / (e * (e + 2) + 2)
    return e, r


@triton.jit
def activate(z, ACTIVATION: tl.constexpr, PAIRS: tl.constexpr):
    """Applies the activation named ``ACTIVATION`` to z.

    ``PAIRS``: True if two neighbors on the last axis share one reciprocal, for 16-bit results.
    """
    if ACTIVATION == "relu":
        z = tl.where(z < 0, 0.0, z)  # ``tl.maximum`` would turn NaN into 0
    elif ACTIVATION == "silu":
        z = z * _sigmoid(z, PAIRS)
    elif ACTIVATION == "gelu":
        z = 0.5 * z * (1 + tl.erf(z * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        # tanh(a) = 2 sigmoid(2a) - 1 turns 0.5 z (1 + tanh(a)) into z sigmoid(2a)
        z = z * _sigmoid(1.5957691216057308 * (z + 0.044715 * z * z * z), PAIRS)
    elif ACTIVATION == "mish":
        e, r = _mish_parts(z)
        z = z * (e * (e + 2) * r)
    return z


@triton.jit
def activation_grad(dy, z, ACTIVATION: tl.constexpr, PAIRS: tl.constexpr):
    """Returns the gradient of z. ``dy`` is the gradient of activation(z).

    ``PAIRS``: True if two neighbors on the last axis share one reciprocal, for 16-bit results.
    """
    dz = dy
    if ACTIVATION == "relu":
        dz = tl.where(z <= 0, 0.0, dy)  # as in PyTorch, ReLU's gradient is dy where z is NaN
    elif ACTIVATION == "silu":
        s, rest = _sigmoid_and_rest(z, PAIRS)
        dz = dy * s * (1 + z * rest)
    elif ACTIVATION == "gelu":
        cdf = 0.5 * (1 + tl.erf(z * 0.7071067811865476))
        dz = dy * (cdf + z * 0.3989422804014327 * tl.exp(-0.5 * z * z))
    elif ACTIVATION == "gelu_tanh":
        s, rest = _sigmoid_and_rest(1.5957691216057308 * (z + 0.044715 * z * z * z), PAIRS)
        # rest is 1 - s. For large z, s * rest is 0. It is multiplied by z, and then by the factor with z
        # squared. z cubed, computed first, may overflow to inf, and 0 * inf is NaN.
        dz = dy * (s + s * rest * z * (1.5957691216057308 + 0.2140644488078421 * z * z))
    elif ACTIVATION == "mish":
        e, r = _mish_parts(z)
        # Mish's derivative is t + z * sigmoid(z) * (1 - t * t), where t = tanh(softplus(z)). Where
        # ``_mish_parts`` cuts off exp(z), the product of the last two factors is 0, because z may be inf.
        factors = tl.where(z < 41.0, 4 * (e * r) * ((1 + e) * r), 0.0)
        dz = dy * (e * (e + 2) * r + z * factors)
    return dz


@triton.jit
def normal_cdf(z, HALF: tl.constexpr):
    """Returns (P(z), exp(-z * z / 2)), where P is the cumulative normal distribution.

    The second value is proportional to the derivative of P.

    ``HALF``: True for an approximation that is exact enough for 16-bit results and takes half the
    instructions. It approximates exp(z * z / 2) * P(-z) by a polynomial in 1 / (1 + 0.3 z), which is fitted
    for 0 <= z <= 14. The polynomial's relative error is 8e-6, a sixtieth of fp16's rounding error of
    2^-11. The approximation is accurate for large negative z too, where P(z) = (1 + erf(z / sqrt(2))) / 2
    would lose all digits.
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
