"""More rows of the coverage table's transformers, and what the report says of transformers."""

from tests.coverage.networks import SIZE, flow, flux2, tiny, transformers, without_text
from tests.coverage.parts import image, model, noise, pipeline
from tests.coverage.relatives import embeds, small_vae
from tests.patches.transformers import FLUX

VALUE = "the call reads the value of a tensor"
# Row -> beginning of the reason why its transformer has no plan as a whole. Parts of it have plans.
IN_PARTS = {
    "Lumina2": "the call uses Tensor.tolist",
    "HunyuanVideo 1.5, text to video": VALUE,
    "HunyuanVideo 1.5, image to video": VALUE,
    "HunyuanImage": VALUE,
    "Mochi": VALUE,
}
# Beginnings of rows whose transformer has no plans, but fused attention, and graphs without plans.
WITHOUT = ("PixArt", "Sana")


def check_report(name, pipe, report):
    """Assert that the report on the row ``name`` says how its transformer runs, and why."""
    if "transformer" not in getattr(pipe, "components", ()):
        return
    found = [plans for plans in report.plans if plans.path == "transformer"]
    if name.startswith(WITHOUT):
        assert not found
        assert [each.path for each in (*report.left, *report.graphs) if each.path == "transformer"]
        return
    (whole,) = found
    (reason,) = whole.own or [""]
    assert reason.startswith(IN_PARTS.get(name, ""))
    assert bool(whole.plans) == (not reason) == (name not in IN_PARTS)
    assert whole.plans or any(each.calls for each in report.plans if each.path.startswith("transformer."))


MASKED = {"mask": True, "mask_name": "prompt_attention_mask"}


def latents():
    return small_vae(shift_factor=0.1)


def around(name, **options):
    """Components around the transformer ``name`` of ``TRANSFORMERS``."""
    return {"transformer": tiny(name, **options), "vae": latents(), "scheduler": flow()} | without_text("")


def alone(cls, **config):
    return {"transformer": model(cls, **config), "vae": latents(), "scheduler": flow()} | without_text("")


@transformers("Flux Kontext")
def _():
    (flux,) = (row for row in transformers if row.name == "Flux")
    parts = {**flux.build().obj.components, "image_encoder": None, "feature_extractor": None}
    states = {"prompt_embeds": noise(1, 5, 32), "pooled_prompt_embeds": noise(1, 32), "prompt": None}
    inputs = {"image": image(size=16), "_auto_resize": False, "max_area": 256}
    return pipeline("FluxKontextPipeline", parts, **states, **inputs, **SIZE)


@transformers("Flux2 Klein")
def _():
    parts = flux2().obj.components
    states = {"prompt": None, "prompt_embeds": noise(1, 5, 32), "negative_prompt_embeds": noise(1, 5, 32)}
    return pipeline("Flux2KleinPipeline", parts, **states, **SIZE)


@transformers("Chroma")
def _():
    parts = around("chroma") | {"image_encoder": None, "feature_extractor": None}
    mask = noise(1, 5).isfinite()
    inputs = embeds(prompt_attention_mask=mask, negative_prompt_attention_mask=mask)
    return pipeline("ChromaPipeline", parts, **inputs, **SIZE)


@transformers("Lumina2")
def _():
    return pipeline("Lumina2Pipeline", around("lumina2"), **embeds(**MASKED), **SIZE)


@transformers("Z-Image")
def _():
    states = {"prompt": None, "prompt_embeds": [noise(5, 32)], "negative_prompt_embeds": [noise(5, 32)]}
    return pipeline("ZImagePipeline", around("z_image"), **states, **SIZE)


@transformers("AuraFlow")
def _():
    parts = alone(
        "AuraFlowTransformer2DModel",
        sample_size=8,
        patch_size=1,
        num_mmdit_layers=1,
        num_single_dit_layers=1,
        attention_head_dim=8,
        num_attention_heads=4,
        joint_attention_dim=32,
        caption_projection_dim=32,
        pos_embed_max_size=64,
    )
    return pipeline("AuraFlowPipeline", parts, **embeds(**MASKED), **SIZE)


@transformers("CogView4")
def _():
    parts = alone(
        "CogView4Transformer2DModel",
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=1,
        attention_head_dim=8,
        num_attention_heads=4,
        text_embed_dim=32,
        time_embed_dim=8,
        condition_dim=4,
        pos_embed_max_size=16,
        sample_size=8,
        rope_axes_dim=(16, 16),
    )
    return pipeline("CogView4Pipeline", parts, **embeds(), **SIZE)


@transformers("Bria")
def _():
    changes = {"pooled_projection_dim": None, "axes_dims_rope": (0, 8, 8)}
    parts = alone("BriaTransformer2DModel", **{**FLUX, **changes})
    return pipeline("BriaPipeline", parts, **embeds(), **SIZE)


@transformers("Ovis-Image")
def _():
    parts = alone("OvisImageTransformer2DModel", **FLUX, out_channels=16)
    inputs = embeds(negative_prompt=None)
    return pipeline("OvisImagePipeline", parts, **inputs, **SIZE)
