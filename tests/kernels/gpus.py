"""The GPUs that kernels are compiled and configured for; docs/gpus.md lists their generations."""

from typing import NamedTuple

__all__ = ["GPUS", "SHARED_KIB", "Gpu", "smallest"]

# What one program may have of shared memory, in KiB, by generation: as Triton names them.
SHARED_KIB = {
    "sm_75": 64,
    "sm_80": 163,
    "sm_86": 99,
    "sm_89": 99,
    "sm_90": 227,
    "sm_100": 227,
    "sm_120": 99,
    "gfx942": 64,
    "gfx1100": 64,
}


class Gpu(NamedTuple):
    generation: str
    multiprocessors: int


GPUS = {
    "T4": Gpu("sm_75", 40),
    "A100": Gpu("sm_80", 108),
    "RTX 3060": Gpu("sm_86", 28),
    "A10": Gpu("sm_86", 72),
    "RTX 4090": Gpu("sm_89", 128),
    "L40S": Gpu("sm_89", 142),
    "H100": Gpu("sm_90", 132),
    "H200": Gpu("sm_90", 132),
    "B200": Gpu("sm_100", 148),
    "RTX 5090": Gpu("sm_120", 170),
    "MI300X": Gpu("gfx942", 304),
    "RX 7900 XTX": Gpu("gfx1100", 48),
}


def smallest(generation):
    """The one with the fewest multiprocessors: its programs have the most to do."""
    return min((g for g in GPUS.values() if g.generation == generation), key=lambda g: g.multiprocessors)
