"""diffusers' VAE ``Decoder``: decodes a large batch in slices, so that it takes only the memory of one slice.

Every convolution and norm treats each image separately, so slices give the same result. One image of 1024^2
pixels already keeps a GPU busy: an H200 takes as long for it as for four images of 512^2 one by one
(``docs/benchmarks.md``). So decoding more images together saves no time, but each of them needs memory for
activations of 256 channels at full resolution. In a CUDA graph all slices use the same memory in turn.

Usually a VAE runs as a plan: a traced list of kernels that replaces the Python of the model's forward. A plan
decodes in slices by itself (``plans/rewrite/slices.py``). This fusion is for calls that no plan can run, for
instance because of a hook, and for ``optimize(..., plans=False)``.
"""

from __future__ import annotations

import torch
from diffusers.models.autoencoders.vae import Decoder
from torch import Tensor

from sdfastgn.kernels.common import dispatch
from sdfastgn.patches.swap.fusion import ClassSwap
from sdfastgn.patches.swap.tested_sources import tested

# Maximum number of pixels in a slice. Images with more pixels are decoded one by one.
MOST_PIXELS = 1024**2


class FusedDecoder(Decoder):
    """``Decoder`` that decodes a large batch in slices of a few images.

    sample: latents (N, C, H, W). The result is (N, 3, 8 H, 8 W) for a decoder with the usual four levels.
    """

    def forward(self, sample: Tensor, latent_embeds: Tensor | None = None) -> Tensor:
        most = None if latent_embeds is not None else self._images_at_once(sample)
        if most is None or most >= len(sample):
            return super().forward(sample, latent_embeds)
        return torch.cat([super(FusedDecoder, self).forward(part) for part in sample.split(most)])

    def _images_at_once(self, sample: Tensor) -> int | None:
        """Maximum number of images that are decoded at once; None if all images must be decoded together.

        No slices are made with gradients, under a compiler, in a trace, and where sdfastgn's kernels do not
        run.
        """
        if torch.compiler.is_compiling() or torch.jit.is_tracing() or torch.is_grad_enabled():
            return None
        if sample.dim() != 4 or sample.numel() == 0 or not dispatch.has_kernels(sample):
            return None
        scale = 2 ** (len(self.up_blocks) - 1)
        return max(1, MOST_PIXELS // (sample.shape[2] * sample.shape[3] * scale**2))


FUSION = ClassSwap(
    "decoder_slices",
    Decoder,
    FusedDecoder,
    sources=(tested(Decoder, "forward"),),
)
