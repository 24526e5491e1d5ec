"""One sample or more of each fusion: a small module that it claims, and how to call it."""

import copy
import pickle

import numpy as np
import pytest
import torch
from diffusers.models import AutoencoderKL, AutoencoderTiny, UNet2DConditionModel, UNet2DModel
from diffusers.models.activations import GEGLU
from diffusers.models.attention import BasicTransformerBlock, FeedForward
from diffusers.models.attention_processor import Attention
from diffusers.models.autoencoders.vae import Decoder, Encoder
from diffusers.models.normalization import AdaGroupNorm
from diffusers.models.resnet import (
    ResnetBlock2D,
    ResnetBlockCondNorm2D,
    SpatioTemporalResBlock,
    TemporalResnetBlock,
)
from diffusers.models.transformers.transformer_2d import Transformer2DModel
from diffusers.models.transformers.transformer_temporal import (
    TransformerSpatioTemporalModel,
    TransformerTemporalModel,
)
from diffusers.models.unets.unet_2d_blocks import AutoencoderTinyBlock, CrossAttnUpBlock2D, UpBlock2D
from diffusers.models.unets.unet_3d_blocks import CrossAttnUpBlockSpatioTemporal, UpBlockSpatioTemporal
from diffusers.models.unets.unet_motion_model import (
    AnimateDiffTransformer3D,
    CrossAttnUpBlockMotion,
    UpBlockMotion,
)
from diffusers.models.upsampling import Upsample2D
from torch import nn

from sdfastgn.patches.swap import tested_sources
from tests.patches.group_norm_32 import GroupNorm32


def image(*shape, seed=0):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).contiguous(
        memory_format=torch.channels_last
    )
    # Stock PyTorch crashes on a channels-last norm if only its weights need a gradient.
    return x.requires_grad_()


def randomize(module):
    """Give all norms and biases random values, so that a forgotten weight or bias shows."""
    g = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for p in module.parameters():
            if p.dim() == 1 or (p.dim() and p.numel() == len(p)):  # gammas of Wan's norms are (C, 1, 1, 1)
                p.copy_(torch.randn(p.shape, generator=g) * 0.5 + 0.5)
    return module.eval()


def _decoder():
    types = ("UpDecoderBlock2D",) * 2
    return Decoder(block_out_channels=(20, 40), up_block_types=types, layers_per_block=1, norm_num_groups=5)


def _resnet(**options):
    return ResnetBlock2D(
        **{"in_channels": 20, "out_channels": 30, "groups": 5, "temb_channels": 16, "eps": 1e-5, **options}
    )


def _block(**options):
    return BasicTransformerBlock(
        **{
            "dim": 20,
            "num_attention_heads": 2,
            "attention_head_dim": 10,
            "cross_attention_dim": 12,
            **options,
        }
    )


def _attention(**options):
    return Attention(16, **{"heads": 2, "dim_head": 8, **options})


def _up_block(cls, **options):
    sizes = {
        "in_channels": 10,
        "prev_output_channel": 30,
        "out_channels": 20,
        "temb_channels": 16,
        "resnet_groups": 5,
    }
    return cls(**{**sizes, "num_layers": 2, **options})


def _cross_up_block(**options):
    return _up_block(CrossAttnUpBlock2D, num_attention_heads=2, cross_attention_dim=12, **options)


def skips():
    """The skips that an up block gets, the last one first, and one more than it uses."""
    return image(2, 8, 4, 6), image(2, 10, 4, 6, seed=2), image(2, 20, 4, 6, seed=3)


def tokens(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) + 3


def unet(**options):
    sizes = {"block_out_channels": (20, 40), "norm_num_groups": 5, "layers_per_block": 1, "sample_size": 8}
    down, up = ("CrossAttnDownBlock2D", "DownBlock2D"), ("UpBlock2D", "CrossAttnUpBlock2D")
    attention = {"cross_attention_dim": 12, "attention_head_dim": 2}
    return UNet2DConditionModel(
        **{**sizes, **attention, "down_block_types": down, "up_block_types": up, **options}
    )


def one_level_unet(**options):
    blocks = {"down_block_types": ("CrossAttnDownBlock2D",), "up_block_types": ("UpBlock2D",)}
    return unet(**blocks, mid_block_type=None, cross_attention_dim=8, **options)


def vae(**options):
    sizes = {"block_out_channels": (8, 8), "norm_num_groups": 1}
    down, up = ("DownEncoderBlock2D",) * 2, ("UpDecoderBlock2D",) * 2
    return AutoencoderKL(**{**sizes, "down_block_types": down, "up_block_types": up, **options})


# AutoencoderTiny's halves, with channels that vectors do not divide.
_TINY = {
    "encoder_block_out_channels": (12, 12),
    "decoder_block_out_channels": (12, 12),
    "num_encoder_blocks": (1, 2),
    "num_decoder_blocks": (2, 1),
}


_TEMB = image(2, 16, 1, 1, seed=1)[:, :, 0, 0]


def _on_image(module):
    return module(image(2, 12, 5, 6))


def _with_temb(module):
    return module(image(2, 20, 6, 8), _TEMB)


def _with_states(module):
    return module(tokens(2, 7, 20), encoder_hidden_states=tokens(2, 5, 12))


# Two videos of three frames: which of the frames are images of their own.
_FRAMES = torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 1.0]])


_TEMB_OF_FRAMES = image(6, 16, 1, 1, seed=1)[:, :, 0, 0]


def _spatio_temporal(**options):
    return TransformerSpatioTemporalModel(2, 16, in_channels=32, cross_attention_dim=12, **options)


def _over_frames(cls, **options):
    return cls(2, 10, in_channels=20, norm_num_groups=5, **options)


def _on_frames(module):
    found = module(image(6, 20, 3, 2), num_frames=3)
    return getattr(found, "sample", found)


# (id, builder, call); the id starts with the fusion's name.
SAMPLES = [
    ("group_norm", lambda: nn.GroupNorm(3, 12), _on_image),
    ("group_norm-channels-first", lambda: nn.GroupNorm(3, 12), lambda m: m(image(2, 12, 5, 6).contiguous())),
    ("group_norm-no-affine", lambda: nn.GroupNorm(3, 12, affine=False), _on_image),
    ("group_norm-numpy", lambda: nn.GroupNorm(np.int64(3), np.int64(12), np.float32(0.5)), _on_image),
    ("group_norm-tensor-eps", lambda: nn.GroupNorm(3, 12, torch.tensor(0.5)), _on_image),
    ("group_norm_subclass", lambda: GroupNorm32(3, 12), lambda m: m(x=image(2, 12, 5, 6))),
    ("group_norm_subclass-sequential", lambda: nn.Sequential(GroupNorm32(3, 12), nn.SiLU()), _on_image),
    ("sequential", lambda: nn.Sequential(nn.GroupNorm(3, 12), nn.SiLU(), nn.Conv2d(12, 8, 3)), _on_image),
    (
        "sequential-two-pairs",
        lambda: nn.Sequential(
            nn.Conv2d(12, 8, 1), nn.GroupNorm(2, 8), nn.GELU("tanh"), nn.GroupNorm(4, 8), nn.ReLU()
        ),
        _on_image,
    ),
    ("resnet_block", _resnet, _with_temb),
    ("resnet_block-by-name", _resnet, lambda m: m(input_tensor=image(2, 20, 6, 8), temb=_TEMB)),
    ("resnet_block-scale-shift", lambda: _resnet(time_embedding_norm="scale_shift"), _with_temb),
    ("resnet_block-no-temb", lambda: _resnet(temb_channels=None), lambda m: m(image(2, 20, 6, 8), None)),
    ("resnet_block-up", lambda: _resnet(up=True), _with_temb),
    ("resnet_block-down", lambda: _resnet(down=True), _with_temb),
    ("resnet_block-skip-time-act", lambda: _resnet(skip_time_act=True), _with_temb),
    ("resnet_block-output-scale", lambda: _resnet(output_scale_factor=1.4), _with_temb),
    (
        "resnet_block-numpy",
        lambda: _resnet(groups=np.int64(5), eps=np.float32(0.5), output_scale_factor=np.float32(1.4)),
        _with_temb,
    ),
    ("resnet_block-gelu", lambda: _resnet(non_linearity="gelu"), _with_temb),
    (
        "resnet_block-batch-64",
        lambda: _resnet(up=True),
        lambda m: m(image(64, 20, 2, 2), _TEMB[:1].expand(64, -1)),
    ),
    (
        "temporal_resnet_block",
        lambda: TemporalResnetBlock(32, 64, temb_channels=16),
        lambda m: m(image(2, 32, 12, 5).reshape(2, 32, 3, 4, 5), image(2, 3, 16, 1)[..., 0]),
    ),
    (
        "spatio_temporal_res_block",
        lambda: SpatioTemporalResBlock(32, 64, temb_channels=16),
        lambda m: m(image(6, 32, 3, 2), image(6, 16, 1, 1, seed=1)[:, :, 0, 0], _FRAMES),
    ),
    (
        "spatio_temporal_res_block-of-a-vae",
        lambda: SpatioTemporalResBlock(
            32, None, None, merge_strategy="learned", switch_spatial_to_temporal_mix=True
        ),
        lambda m: m(image(6, 32, 3, 2), image_only_indicator=_FRAMES),
    ),
    (
        "transformer_spatio_temporal",
        _spatio_temporal,
        lambda m: m(image(6, 32, 3, 2), image(6, 1, 12, 1, seed=1)[..., 0], _FRAMES).sample,
    ),
    (
        "transformer_spatio_temporal-with-text",
        lambda: _spatio_temporal(num_layers=2),
        lambda m: m(image(6, 32, 3, 2), image(6, 5, 12, 1, seed=1)[..., 0], _FRAMES, False)[0],
    ),
    ("transformer_temporal", lambda: _over_frames(TransformerTemporalModel), _on_frames),
    (
        "transformer_temporal-self-only",
        lambda: _over_frames(TransformerTemporalModel, double_self_attention=False, num_layers=2),
        _on_frames,
    ),
    (
        "motion_module",
        lambda: _over_frames(
            AnimateDiffTransformer3D, positional_embeddings="sinusoidal", num_positional_embeddings=4
        ),
        _on_frames,
    ),
    (
        "transformer_2d-linear",
        lambda: Transformer2DModel(2, 10, in_channels=20, norm_num_groups=5, use_linear_projection=True),
        lambda m: m(image(2, 20, 4, 6)).sample,
    ),
    (
        "transformer_2d-conv",
        lambda: Transformer2DModel(2, 10, in_channels=20, norm_num_groups=5, cross_attention_dim=12),
        lambda m: m(image(2, 20, 4, 6), image(2, 3, 12, 1)[..., 0]).sample,
    ),
    ("ada_group_norm", lambda: AdaGroupNorm(16, 12, 3), lambda m: m(image(2, 12, 5, 6), _TEMB)),
    (
        "ada_group_norm-act",
        lambda: AdaGroupNorm(16, 12, 3, act_fn="silu"),
        lambda m: m(image(2, 12, 5, 6), _TEMB),
    ),
    (
        "ada_group_norm-numpy",
        lambda: AdaGroupNorm(16, 12, np.int64(3), eps=np.float32(0.5)),
        lambda m: m(image(2, 12, 5, 6), _TEMB),
    ),
    (
        "resnet_block_cond_norm",
        lambda: ResnetBlockCondNorm2D(
            in_channels=32, out_channels=64, temb_channels=4, time_embedding_norm="spatial"
        ),
        lambda m: m(image(2, 32, 8, 4), image(2, 4, 4, 2)),
    ),
    (
        "resnet_block_cond_norm-ada",
        lambda: ResnetBlockCondNorm2D(in_channels=12, temb_channels=16, groups=3, output_scale_factor=1.5),
        lambda m: m(image(2, 12, 5, 6), _TEMB),
    ),
    (
        "resnet_block_cond_norm-up",
        lambda: ResnetBlockCondNorm2D(in_channels=12, temb_channels=16, groups=3, up=True),
        lambda m: m(image(2, 12, 5, 6), _TEMB),
    ),
    ("attention", lambda: _attention(), lambda m: m(tokens(2, 7, 16))),
    (
        "attention-cross",
        lambda: _attention(cross_attention_dim=12),
        lambda m: m(tokens(2, 7, 16), tokens(2, 5, 12)),
    ),
    (
        "attention-by-name",
        lambda: _attention(bias=True),
        lambda m: m(hidden_states=tokens(2, 7, 16), encoder_hidden_states=None),
    ),
    ("attention-mask", lambda: _attention(), lambda m: m(tokens(2, 7, 16), None, -image(2, 1, 7, 1)[..., 0])),
    (
        "attention-vae",
        lambda: _attention(norm_num_groups=4, residual_connection=True, bias=True, rescale_output_factor=1.5),
        lambda m: m(image(2, 16, 3, 4), temb=None),
    ),
    ("geglu", lambda: GEGLU(12, 20), lambda m: m(tokens(2, 7, 12))),
    ("geglu-no-bias", lambda: GEGLU(12, 20, bias=False), lambda m: m(tokens(2, 7, 12))),
    ("geglu-rank-2", lambda: GEGLU(12, 5), lambda m: m(hidden_states=tokens(7, 12))),
    ("geglu-feed-forward", lambda: FeedForward(12, final_dropout=True), lambda m: m(tokens(2, 7, 12))),
    ("conv_norm_out-unet", unet, lambda m: m(image(2, 4, 8, 8), 10, image(2, 3, 12, 1)[..., 0]).sample),
    (
        "conv_norm_out-unet2d",
        lambda: UNet2DModel(
            sample_size=8,
            block_out_channels=(32, 64),
            layers_per_block=1,
            down_block_types=("DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        ),
        lambda m: m(image(2, 3, 8, 8), 10).sample,
    ),
    (
        "conv_norm_out-encoder",
        lambda: Encoder(
            block_out_channels=(20, 40), down_block_types=("DownEncoderBlock2D",) * 2, norm_num_groups=5
        ),
        lambda m: m(image(1, 3, 16, 16)),
    ),
    ("conv_norm_out-decoder", _decoder, lambda m: m(image(1, 3, 8, 8))),
    ("decoder_slices", _decoder, lambda m: m(image(2, 3, 4, 4))),
    ("tiled_decode", vae, lambda m: m(image(1, 3, 4, 4)).sample),
    ("autoencoder_tiny_block", lambda: AutoencoderTinyBlock(12, 20, "relu"), _on_image),
    ("autoencoder_tiny_block-no-skip", lambda: AutoencoderTinyBlock(12, 12, "relu"), _on_image),
    ("encoder_tiny", lambda: AutoencoderTiny(**_TINY).encoder, lambda m: m(image(2, 3, 16, 24))),
    ("decoder_tiny", lambda: AutoencoderTiny(**_TINY).decoder, lambda m: m(image(2, 4, 3, 5))),
    (
        "decoder_tiny-bilinear",
        lambda: AutoencoderTiny(**_TINY, upsample_fn="bilinear").decoder,
        lambda m: m(image(2, 4, 3, 5)),
    ),
    (
        "decoder_tiny-by-four",
        lambda: AutoencoderTiny(**_TINY, upsampling_scaling_factor=4).decoder,
        lambda m: m(image(2, 4, 3, 5)),
    ),
    ("up_block", lambda: _up_block(UpBlock2D), lambda m: m(image(2, 30, 4, 6), skips(), _TEMB)),
    (
        "up_block-by-name",
        lambda: _up_block(UpBlock2D, add_upsample=False, output_scale_factor=2**0.5),
        lambda m: m(
            hidden_states=image(2, 30, 4, 6), res_hidden_states_tuple=skips(), temb=_TEMB, upsample_size=None
        ),
    ),
    (
        "up_block-to-a-size",
        lambda: _up_block(UpBlock2D),
        lambda m: m(image(2, 30, 4, 6), skips(), _TEMB, upsample_size=(7, 11)),
    ),
    (
        "cross_attn_up_block",
        _cross_up_block,
        lambda m: m(image(2, 30, 4, 6), skips(), _TEMB, image(2, 3, 12, 1)[..., 0]),
    ),
    (
        "cross_attn_up_block-by-name",
        lambda: _cross_up_block(use_linear_projection=True),
        lambda m: m(
            hidden_states=image(2, 30, 4, 6),
            temb=_TEMB,
            res_hidden_states_tuple=skips(),
            upsample_size=(8, 12),
            encoder_hidden_states=image(2, 3, 12, 1)[..., 0],
            encoder_attention_mask=torch.tensor([[[0.0, 0.0, -1e4]]] * 2),
        ),
    ),
    (
        "up_block_spatio_temporal",
        lambda: UpBlockSpatioTemporal(24, 40, 32, 16),
        lambda m: m(image(6, 40, 2, 3), (image(6, 24, 2, 3, seed=2),), _TEMB_OF_FRAMES, _FRAMES),
    ),
    (
        "cross_attn_up_block_spatio_temporal",
        lambda: CrossAttnUpBlockSpatioTemporal(24, 32, 40, 16, num_attention_heads=2, cross_attention_dim=12),
        lambda m: m(
            hidden_states=image(6, 40, 2, 3),
            res_hidden_states_tuple=(image(6, 24, 2, 3, seed=2),),
            temb=_TEMB_OF_FRAMES,
            encoder_hidden_states=image(6, 1, 12, 1, seed=1)[..., 0],
            image_only_indicator=_FRAMES,
            upsample_size=(3, 5),
        ),
    ),
    (
        "up_block_motion",
        lambda: UpBlockMotion(8, 12, 20, 16, resnet_groups=5, temporal_num_attention_heads=2),
        lambda m: m(image(6, 12, 2, 3), (image(6, 8, 2, 3, seed=2),), _TEMB_OF_FRAMES, num_frames=3),
    ),
    (
        "cross_attn_up_block_motion",
        lambda: CrossAttnUpBlockMotion(
            8,
            20,
            12,
            16,
            resnet_groups=5,
            num_attention_heads=2,
            cross_attention_dim=12,
            temporal_num_attention_heads=2,
            add_upsample=False,
        ),
        lambda m: m(
            image(6, 12, 2, 3),
            (image(6, 8, 2, 3, seed=2),),
            _TEMB_OF_FRAMES,
            image(6, 3, 12, 1)[..., 0],
            num_frames=3,
        ),
    ),
    ("upsample_2d", lambda: Upsample2D(12, use_conv=True), _on_image),
    ("upsample_2d-no-conv", lambda: Upsample2D(12), _on_image),
    (
        "upsample_2d-more-channels",
        lambda: Upsample2D(12, use_conv=True, out_channels=20, bias=False),
        _on_image,
    ),
    ("upsample_2d-other-name", lambda: Upsample2D(12, use_conv=True, name="Conv2d_0"), _on_image),
    (
        "upsample_2d-size",
        lambda: Upsample2D(12, use_conv=True),
        lambda m: m(image(2, 12, 5, 6), output_size=(9, 11)),
    ),
    ("upsample_2d-batch-64", lambda: Upsample2D(12, use_conv=True), lambda m: m(image(64, 12, 2, 3))),
    ("transformer_block", _block, _with_states),
    ("transformer_block-by-position", _block, lambda m: m(tokens(2, 7, 20), None, tokens(2, 5, 12))),
    ("transformer_block-self-only", lambda: _block(cross_attention_dim=None), lambda m: m(tokens(2, 7, 20))),
    (
        "transformer_block-double-self",
        lambda: _block(double_self_attention=True),
        lambda m: m(tokens(2, 7, 20)),
    ),
    (
        "transformer_block-one-token",
        _block,
        lambda m: m(tokens(2, 7, 20), encoder_hidden_states=tokens(2, 1, 12)),
    ),
    ("transformer_block-numpy", lambda: _block(norm_eps=np.float32(0.5)), _with_states),
    ("transformer_block-only-cross", lambda: _block(only_cross_attention=True), _with_states),
    ("transformer_block-no-affine", lambda: _block(norm_elementwise_affine=False), _with_states),
]


def _each(samples):
    return pytest.mark.parametrize(("build", "call"), [pytest.param(b, c, id=i) for i, b, c in samples])


each_sample = _each(SAMPLES)
# The first sample of each fusion, for tests that do not depend on what the module computes.
_FIRST = {sample[0].split("-")[0]: sample for sample in reversed(SAMPLES)}
each_fusion = _each(_FIRST.values())
# Without whole models, which take most of a minute in Triton's interpreter.
each_part = _each(sample for name, sample in _FIRST.items() if name != "conv_norm_out")


# Without halves of autoencoders, whose blocks are among the samples too.
each_block = _each(
    sample for name, sample in _FIRST.items() if not name.endswith(("encoder", "decoder", "slices", "out"))
)


def sample(name):
    """(builder, call) of the first sample whose id begins with ``name``."""
    return next((build, call) for found, build, call in SAMPLES if found.startswith(name))


def pickled(module):
    return pickle.loads(pickle.dumps(module))


each_copy = pytest.mark.parametrize("copied", [copy.deepcopy, pickled], ids=["deepcopy", "pickle"])


def snapshot(root):
    """Everything that ``restore`` gives back: class, attributes, hooks and strides of every module."""
    state = {}
    for path, module in root.named_modules():
        attributes = {k: dict(v) if isinstance(v, dict) else v for k, v in vars(module).items()}
        strides = {k: (id(p), p.stride()) for k, p in module._parameters.items() if p is not None}
        state[path] = (type(module), attributes, strides)
    return state


def stock_and_output(build, call):
    module = randomize(build())
    return module, output(module, call)


def output(module, call):
    with torch.no_grad():
        return call(module)


def make_unknown(monkeypatch, name):
    """Make upstream's ``Class.method`` look as if its code was never tested."""
    known = tested_sources.source_hash

    def source_hash(cls, method):
        return "0" * 16 if f"{cls.__name__}.{method}" == name else known(cls, method)

    monkeypatch.setattr(tested_sources, "source_hash", source_hash)
