"""An extension for SD.Next that optimizes the models of each pipeline.

Install sdfastgn into SD.Next's environment, and copy this file to SD.Next's extensions/sdfastgn/scripts/.
"""

import weakref

import torch
from diffusers import DiffusionPipeline
from modules import script_callbacks, shared
from modules.logger import log

import sdfastgn

# In all other modes SD.Next puts hooks on models or layers, which then run stock's code.
OFFLOAD_MODES = ("none", "model")

seen: "weakref.WeakSet[torch.nn.Module]" = weakref.WeakSet()


def optimize(pipe):
    """Optimize the models of ``pipe`` that are new. Pipelines share models."""
    if not isinstance(pipe, DiffusionPipeline):
        return
    new = {
        name: part
        for name, part in pipe.components.items()
        if isinstance(part, torch.nn.Module) and part not in seen
    }
    seen.update(new.values())
    mode = shared.opts.diffusers_offload_mode
    if new and mode not in OFFLOAD_MODES:
        log.warning(f"sdfastgn does nothing: the model offload mode is {mode}, and not none or model")
        return
    # Each model by itself: SD.Next compares the pipeline's class, which ``sdfastgn.optimize(pipe)`` changes.
    for name, model in new.items():
        try:
            sdfastgn.optimize(model, missing_ok=True)
            log.info(f"sdfastgn: {name} of {type(pipe).__name__}: {sdfastgn.report(model)}")
        except Exception:  # the model is as it was
            log.exception(f"sdfastgn could not optimize {name} of {type(pipe).__name__}")


def restore():
    for model in list(seen):
        sdfastgn.restore(model)


script_callbacks.on_model_loaded(optimize)
# SD.Next may have exchanged the VAE or the UNet, or added a ControlNet.
script_callbacks.on_before_process(lambda _: optimize(shared.sd_model))
script_callbacks.on_script_unloaded(restore)
