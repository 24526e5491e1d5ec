"""Which upstream methods a fused module replaces, and whether they are the ones it was written and tested for.

A fused ``forward`` repeats what the stock one does. When upstream changes that, repeating the old one would change pixels; so the
source of each replaced (or relied upon) method is compared with the versions tested, and an unknown source means: skip, with a reason.
"""

from __future__ import annotations

import hashlib
import inspect
import textwrap
import types
import weakref
from typing import Any

__all__ = ["TESTED_SOURCES", "source_hash", "unknown_source"]

# "Class.method" -> the first 16 digits of the SHA-256 of its dedented source, for each diffusers release tested (0.42.1).
TESTED_SOURCES: dict[str, frozenset[str]] = {
    "ResnetBlock2D.__init__": frozenset({"310d2fb0306e4dc5"}),
    "ResnetBlock2D.forward": frozenset({"a30ae9277b79e8d2"}),
    "TemporalResnetBlock.__init__": frozenset({"b235523b2eb0d715"}),
    "TemporalResnetBlock.forward": frozenset({"9ee5cc0c501029a5"}),
    "TimestepEmbedding.__init__": frozenset({"13426e64f404ff7a"}),
    "TimestepEmbedding.forward": frozenset({"1a6552976377391f"}),
    "Transformer2DModel.forward": frozenset({"7a3829f24ddbfdf3"}),
    "Transformer2DModel._operate_on_continuous_inputs": frozenset({"c70791c2fc29f747"}),
    "Transformer2DModel._get_output_for_continuous_inputs": frozenset({"49624b91ccd36058"}),
    "BasicTransformerBlock.__init__": frozenset({"2312e74f52516ed7"}),
    "BasicTransformerBlock.forward": frozenset({"9cfc6111a7fd5580"}),
    "FeedForward.__init__": frozenset({"b58ae97ef816bb76"}),
    "FeedForward.forward": frozenset({"2534be46672c7017"}),
    "Attention.__init__": frozenset({"b7c2f3fbb206ac90"}),
    "Attention.forward": frozenset({"d3822449559212cb"}),
    "AttnProcessor2_0.__call__": frozenset({"d5a292e89ccd77a2"}),
    "UpBlock2D.__init__": frozenset({"353a0e9bf7f554a0"}),
    "UpBlock2D.forward": frozenset({"6bb70123f800ce81"}),
    "CrossAttnUpBlock2D.__init__": frozenset({"7672079edf682c68"}),
    "CrossAttnUpBlock2D.forward": frozenset({"adf5503c7fbaf510"}),
    "Downsample2D.__init__": frozenset({"bdf57d1e4f01ba9e"}),
    "Downsample2D.forward": frozenset({"b81e1b97c0f9597e"}),
    "Upsample2D.__init__": frozenset({"27a7eec34213dd30"}),
    "Upsample2D.forward": frozenset({"fde16958d16c179e"}),
    "AdaGroupNorm.__init__": frozenset({"0311e8286f88cd95"}),
    "AdaGroupNorm.forward": frozenset({"0e0820e88c21bd0c"}),
    "GEGLU.__init__": frozenset({"4b94d15defcdc9b3"}),
    "GEGLU.forward": frozenset({"dc945fffaaaf023e"}),
    "GEGLU.gelu": frozenset({"541c47f7b8e841f9"}),
    "UNet2DConditionModel.forward": frozenset({"5b3a99d99574b3bd"}),
    "UNet2DModel.forward": frozenset({"416dcd70b296edcf"}),
    "UNet3DConditionModel.forward": frozenset({"1384218106603cc9"}),
    "UNetMotionModel.forward": frozenset({"95182a44ff659fc6"}),
    "UNetSpatioTemporalConditionModel.forward": frozenset({"da12e98000e96d72"}),
    "I2VGenXLUNet.forward": frozenset({"9cdf621795dabf2b"}),
    "Encoder.forward": frozenset({"629b31442a1244ee"}),
    "Decoder.forward": frozenset({"f745d319263a350b"}),
    "TemporalDecoder.forward": frozenset({"109d26246c2932a4"}),
    "PNDMScheduler.set_timesteps": frozenset({"82554cf28f731599"}),
    "PNDMScheduler.step": frozenset({"f4ef1a7ef6a90faa"}),
    "PNDMScheduler.step_prk": frozenset({"aa9865595bcb7e75"}),
    "PNDMScheduler.step_plms": frozenset({"49dfef0b7069e861"}),
    "PNDMScheduler._get_prev_sample": frozenset({"4213d915533ae217"}),
    "DDIMScheduler.set_timesteps": frozenset({"0d1c6bcb6befbd3b"}),
    "DDIMScheduler.step": frozenset({"c6b192ed0006fc11"}),
    "DDIMScheduler._get_variance": frozenset({"9e4f55907bbb281d"}),
    "VaeImageProcessor.postprocess": frozenset({"bcc760d7b09d1403"}),
    "VaeImageProcessor._denormalize_conditionally": frozenset({"a3abcda15d2e5619"}),
    "VaeImageProcessor.denormalize": frozenset({"28a40648bfbf6129"}),
    "VaeImageProcessor.pt_to_numpy": frozenset({"4879b336bc4066c2"}),
    "VaeImageProcessor.numpy_to_pil": frozenset({"de0fda29bfeb858b"}),
    "DiffusionPipeline._execution_device": frozenset({"03415f5bde69ecd3"}),
    "DiffusionPipeline.device": frozenset({"6cc80d2c81042612"}),
}


# By the function itself: a class may get another one between two calls of ``optimize``.
_hashes: weakref.WeakKeyDictionary[types.FunctionType, str | None] = weakref.WeakKeyDictionary()


def source_hash(cls: type, method: str) -> str | None:
    """First 16 hexadecimal digits of the SHA-256 of the dedented source of a method or property.

    None if that is not upstream's or cannot be read.

    Below upstream's own decorators, whose lines are part of the source. Any other wrapper, as ``functools.wraps`` makes them look like
    what they wrap, is None.
    """
    function = getattr(cls, method, None)
    if isinstance(function, property):
        function = function.fget
    if not isinstance(function, types.FunctionType):
        return None
    if function not in _hashes:
        _hashes[function] = _hash_of(function)
    return _hashes[function]


def _hash_of(function: types.FunctionType) -> str | None:
    wrappers: list[Any] = []
    try:
        inner = inspect.unwrap(function, stop=wrappers.append)
        source = textwrap.dedent(inspect.getsource(inner))
    except (OSError, TypeError, ValueError):
        return None
    decorators = sum(line.startswith("@") for line in source.splitlines())
    if len(wrappers) > decorators or not all(map(_is_upstreams, (*wrappers, inner))):
        return None
    return hashlib.sha256(source.encode()).hexdigest()[:16]


def _is_upstreams(link: Any) -> bool:
    # Not its __module__, which functools.wraps copies.
    module = getattr(link, "__globals__", {}).get("__name__", "")
    return module.partition(".")[0] in ("diffusers", "torch")


def unknown_source(cls: type, *methods: str) -> str | None:
    """None if every method of ``cls`` is one that was tested, else the reason to leave the module alone."""
    for method in methods:
        name = f"{cls.__name__}.{method}"
        if source_hash(cls, method) not in TESTED_SOURCES.get(name, frozenset()):
            return f"{name} of this diffusers is not a version that sdfastgn was tested with"
    return None
