"""Small UNets for video with random weights, and their inputs."""

import functools

import torch
from diffusers import (
    I2VGenXLUNet,
    UNet3DConditionModel,
    UNetMotionModel,
    UNetSpatioTemporalConditionModel,
)

from tests.copies import Original

_TEXT = 32
_BLOCKS = {"block_out_channels": (32, 64), "layers_per_block": 1, "cross_attention_dim": _TEXT}
_PLAIN = {
    **_BLOCKS,
    "norm_num_groups": 8,
    "down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D"),
    "up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D"),
}
_MOTION = {
    **_BLOCKS,
    "norm_num_groups": 8,
    "down_block_types": ("CrossAttnDownBlockMotion", "DownBlockMotion"),
    "up_block_types": ("UpBlockMotion", "CrossAttnUpBlockMotion"),
    "num_attention_heads": 4,
    "motion_num_attention_heads": 4,
    "motion_max_seq_length": 8,
}
_SVD = {
    **_BLOCKS,
    "down_block_types": ("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
    "up_block_types": ("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"),
    "num_attention_heads": (2, 4),
    "addition_time_embed_dim": 8,
    "projection_class_embeddings_input_dim": 3 * 8,
}
# Name -> (class, configuration).
UNETS = {
    "svd": (UNetSpatioTemporalConditionModel, _SVD),
    "animatediff": (UNetMotionModel, _MOTION),
    "text_to_video": (UNet3DConditionModel, {**_PLAIN, "attention_head_dim": 8}),
    "i2vgen": (I2VGenXLUNet, {**_PLAIN, "attention_head_dim": 8, "num_attention_heads": None}),
}


def noise(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@functools.cache
def built(name):
    """A UNet, built once. Tests take copies of it."""
    cls, config = UNETS[name]
    torch.manual_seed(0)
    unet = cls(**config).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        # Layers that begin as zeros, and norms that begin as ones, would hide errors.
        for parameter in unet.parameters():
            if parameter.dim() == 1 or not parameter.any():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2 + 0.2)
    return unet


@functools.cache
def original(name):
    """``built(name)``, of which tests take quick copies."""
    return Original(built(name))


def inputs(name, batch=2, frames=3, size=(4, 6), seed=0):
    """Keyword arguments of a call of the UNet ``name``. ``size``: height and width of the latents."""
    draw = functools.partial(noise, seed=seed)
    found = {"timestep": torch.tensor(500), "encoder_hidden_states": draw(batch, 7, _TEXT)}
    if name == "svd":
        found["sample"] = draw(batch, frames, 8, *size)
        found["encoder_hidden_states"] = draw(batch, 1, _TEXT)
        found["added_time_ids"] = draw(batch, 3)
        return found
    found["sample"] = draw(batch, 4, frames, *size)
    if name == "animatediff":
        found["encoder_hidden_states"] = draw(batch * frames, 7, _TEXT)
    if name == "i2vgen":
        found["fps"] = torch.full((batch,), 16)
        found["image_latents"] = draw(batch, 4, frames, *size)
        found["image_embeddings"] = draw(batch, _TEXT)
    return found
