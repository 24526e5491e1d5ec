"""Makes images with ComfyUI's nodes: plain, with a LoRA, and with a ControlNet."""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from scripts.publish import comfyui_models


class Images:
    """Makes images with one of ComfyUI's models, a LoRA and a ControlNet.

    The files of all three were written by ``comfyui_models.write_files``. ComfyUI must be imported before.

    Args:
        model: a name in ``comfyui_models.MODELS``.
        size: width and height in pixels.
        steps: steps of the sampler.
        files: folder with the model's files.
        is_optimized: True if sdfastgn optimizes the models and VAEs.
    """

    def __init__(self, model: str, size: int, steps: int, files: Path, is_optimized: bool) -> None:
        import comfy.sample

        config = comfyui_models.MODELS[model]
        self.steps, self.size, self.is_optimized = steps, size, is_optimized
        self.files = {name: files / f"{model}_{name}.safetensors" for name in comfyui_models.FILES}
        self.prompts = [comfyui_models.conditioning(config, seed) for seed in (5, 6)]
        self.empty = torch.zeros(1, 4, size // 8, size // 8)
        self.noise = comfy.sample.prepare_noise(self.empty, 3)

    @torch.inference_mode()
    def first(self) -> tuple[Tensor, Tensor]:
        """Load the checkpoint. Returns the latents and the pixels of the first image."""
        import comfy.sd

        self.loaded, _, self.vae, _ = comfy.sd.load_checkpoint_guess_config(
            str(self.files["checkpoint"]), output_clip=False
        )
        self.model = self._optimized(self.loaded)
        if self.is_optimized:
            from sdfastgn.plans.comfyui import optimize_vae

            self.vae = optimize_vae(self.vae)
        latents = self.sample(self.model)
        return latents, self.decode(latents)

    def _optimized(self, model: Any) -> Any:
        if not self.is_optimized:
            return model
        from sdfastgn.plans.comfyui import optimize_model

        return optimize_model(model)

    @torch.inference_mode()
    def sample(self, model: Any, prompts: Any = None) -> Tensor:
        """The latents that KSampler returns, on the CPU: (1, 4, size / 8, size / 8)."""
        import comfy.sample

        found = comfy.sample.sample(
            model, self.noise, self.steps, 4.0, "euler", "normal", *(prompts or self.prompts), self.empty,
            disable_pbar=True, seed=3,
        )  # fmt: skip
        end_of_node()
        return found

    @torch.inference_mode()
    def decode(self, latents: Tensor) -> Tensor:
        """The pixels of ``latents``, (1, size, size, 3) on the CPU, in [0, 1]."""
        found = self.vae.decode(latents)
        end_of_node()
        return found

    @torch.inference_mode()
    def with_control(self) -> None:
        """Load the ControlNet, and set ``controlled`` to the prompts with this ControlNet."""
        import comfy.controlnet

        hint = torch.rand(1, 3, self.size, self.size, generator=torch.Generator().manual_seed(4))
        net = comfy.controlnet.load_controlnet(str(self.files["control"])).copy()
        net.set_cond_hint(hint, 0.5, (0.0, 1.0))
        self.controlled = [
            [[tokens, {**rest, "control": net, "control_apply_to_uncond": False}] for tokens, rest in prompt]
            for prompt in self.prompts
        ]

    @torch.inference_mode()
    def with_lora(self, strength: float) -> None:
        """Read the LoRA, and set ``patched`` to the model with this LoRA."""
        import comfy.sd
        import comfy.utils

        lora = comfy.utils.load_torch_file(str(self.files["lora"]), safe_load=True)
        patched, _ = comfy.sd.load_lora_for_models(self.loaded, None, lora, strength, 0.0)
        self.patched = self._optimized(patched)

    def with_lora_changed(self, strength: float) -> Tensor:
        """Make an image with another strength of the LoRA. Returns its pixels, as ``decode`` does."""
        self.with_lora(strength)
        return self.decode(self.sample(self.patched))

    def text(self) -> str:
        """The text about the model and the VAE that sdfastgn's node shows in ComfyUI."""
        from sdfastgn.plans.comfyui import text_of

        return f"{text_of(self.model)}\n{text_of(self.vae.patcher)}"

    def eject(self) -> None:
        """Replace ``model`` and ``vae`` by ComfyUI's clones of them, from which sdfastgn was removed."""
        self.vae = copy.copy(self.vae)
        self.model, self.vae.patcher = _without(self.model), _without(self.vae.patcher)


def _without(patcher: Any) -> Any:
    plain = patcher.clone()
    for name in list(plain.injections):
        plain.remove_injections(name)
    for kind in plain.callbacks:
        plain.callbacks[kind].pop("sdfastgn", None)
    return plain


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """A context in which PyTorch's algorithms give the same bits each time.

    ComfyUI's option ``--deterministic`` does the same. Otherwise cuDNN may choose convolutions that add up
    their sums in any order.
    """
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def end_of_node() -> None:
    """Resets buffers and memory limits, as ComfyUI's executor does after each node under DynamicVRAM.

    Without DynamicVRAM it does nothing.
    """
    # Releases without DynamicVRAM do not have this module.
    memory = sys.modules.get("comfy.memory_management")
    if getattr(memory, "aimdo_enabled", False):
        import comfy.model_management
        import comfy.model_prefetch
        import comfy_aimdo.model_vbar

        comfy.model_management.reset_cast_buffers()
        comfy.model_prefetch.cleanup_prefetch_queues()
        comfy_aimdo.model_vbar.vbars_reset_watermark_limits()
