"""``sdfastgn plan``: its steps are those of ``optimize``, and what it says of them."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.models.autoencoders import autoencoder_dc

import sdfastgn
from sdfastgn.models import architectures, configurations, video
from tests import small_video
from tests.command_line import invoke


def planned(path: Path, *arguments: str, code: int = 0) -> tuple[str, dict[str, Any]]:
    """What the command prints, and the JSON that it writes."""
    result = invoke("plan", *arguments, "--json", str(path), COLUMNS="60")
    assert result.exit_code == code, result.output
    return result.stdout, json.loads(path.read_text())


def what(step: dict[str, Any]) -> tuple[Any, ...]:
    return step["target"], tuple(step["shape"] or ()), step["dtype"], step["read"], step["written"]


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    ("arguments", "title", "call", "gets_plans"),
    [
        (["tiny"], "tiny unet, 64 x 64, batch 2, fp16", "UNet2DConditionModel, 1 call, trace", False),
        (["tiny_xl", "--batch", "3", "--dtype", "float32"], "batch 3, fp32", "UNet2DConditionModel", False),
        (
            ["tiny_xl", "--part", "vae", "--size", "128"],
            "vae, 128 x 128, batch 1",
            "decoder: Decoder, 1 call",
            True,
        ),
    ],
    ids=["unet", "options", "vae"],
)
def test_steps_totals_and_seconds(
    arguments: list[str], title: str, call: str, gets_plans: bool, tmp_path: Path
) -> None:
    text, content = planned(tmp_path / "plan.json", *arguments)
    lines = text.splitlines()
    assert title in lines[0]
    assert lines[0].startswith(arguments[0])
    assert call in text
    assert ("optimize gives this model no plans" in " ".join(lines)) != gets_plans
    assert content["gets_plans"] == gets_plans
    (found,) = content["calls"]
    # One line a step, which is never broken, then the totals.
    start = next(i for i, line in enumerate(lines) if line.startswith("name "))
    shown = lines[start + 1 : start + 1 + len(found["steps"])]
    assert [line.split()[:2] for line in shown] == [[s["name"], s["target"]] for s in found["steps"]]
    total = sum(step["read"] + step["written"] for step in found["steps"])
    assert lines[start + 1 + len(shown)] == f"{len(shown)} steps, {total / 1e6:.3f} MB"
    left = Counter(s["target"] for s in found["steps"] if s["kind"] == "upstream")
    assert all(f"  {count} x {target}" in lines for target, count in left.items())
    assert any(step["target"] == "group_norm" for step in found["steps"])
    assert min(found["trace_s"], found["rewrite_s"]) > 0


@pytest.mark.slow
@pytest.mark.fused_on_cpu
@pytest.mark.usefixtures("without_gradients")
@pytest.mark.parametrize(("model", "module"), [("dc_ae", "decoder"), ("qwen_image_21", "")])
def test_the_steps_are_those_of_an_optimized_model(
    model: str, module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_video.shrink(monkeypatch, height=32, width=32)
    text, content = planned(tmp_path / "plan.json", model, "--dtype", "fp32")
    assert content["gets_plans"]
    assert "gives this model no plans" not in text
    network = configurations.VIDEO_NETWORKS[model]["vae"]
    vae = sdfastgn.optimize(architectures.build_video_network(network, torch.float32, "cpu"))
    video.run(vae, video.inputs(vae, torch.randn, batch=1, frames=1, height=32, width=32))
    (planned_forward,) = vars(vae)["_decode"].planned if module == "" else [vars(vae.decoder)["forward"]]
    (plan,) = planned_forward.plans
    (call,) = content["calls"]
    assert (call["module"], call["calls"], call["reason"]) == (module, 1, "")
    expected = [what({**step._asdict(), "dtype": str(step.dtype)}) for step in plan.steps]
    assert [what(step) for step in call["steps"]] == expected


@pytest.mark.slow
def test_each_kind_of_call_has_a_plan(tmp_path: Path) -> None:
    """Five latent frames: the first one, the second, which finds no kept frames, and three others."""
    text, content = planned(tmp_path / "plan.json", "wan", "--size", "32")
    assert "wan vae, 17 x 32 x 32, batch 1, bf16" in " ".join(text.split())
    assert [(call["module"], call["calls"]) for call in content["calls"]] == [
        ("decoder", 1),
        ("decoder", 1),
        ("decoder", 3),
    ]
    frames = [call["steps"][-1]["shape"][2] for call in content["calls"]]
    assert frames == [1, 4, 4]


@pytest.mark.slow
def test_steps_that_depend_on_the_gpu_have_a_star(tmp_path: Path) -> None:
    steps: dict[str, list[dict[str, Any]]] = {}
    for gpu, other in (("hopper", "other"), ("other", "hopper")):
        text, content = planned(tmp_path / "plan.json", "wan", "--size", "32", "--gpu", gpu)
        steps[gpu] = [step for call in content["calls"] for step in call["steps"]]
        stars = sum(step["is_guess"] for step in steps[gpu])
        assert sum(line.endswith(" *") for line in text.splitlines()) == stars > 0
        note = " ".join(text.split()).partition("* ")[2]
        assert f"{stars} steps would be others on" in " ".join(text.split())
        assert f"--gpu {other}" in note
    assert {s["is_guess"] for s in steps["hopper"] if s["target"] == "conv_windows"} == {True}
    assert not any(step["target"] == "conv_windows" for step in steps["other"])
    same = [Counter(what(s) for s in found if not s["is_guess"]) for found in steps.values()]
    assert same[0] == same[1]
    text, content = planned(tmp_path / "plan.json", "tiny", "--gpu", "other")
    assert "on a GPU that is no Hopper GPU" in " ".join(text.split())
    assert not any(step["is_guess"] for call in content["calls"] for step in call["steps"])
    assert "*" not in text


def test_a_call_without_plan_has_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_video.shrink(monkeypatch)
    forward = autoencoder_dc.Decoder.forward

    def counts(self: Any, hidden_states: Any) -> Any:
        self.seen = getattr(self, "seen", 0) + 1
        return forward(self, hidden_states)

    monkeypatch.setattr(autoencoder_dc.Decoder, "forward", counts)
    text, content = planned(tmp_path / "plan.json", "dc_ae", code=1)
    assert "decoder: Decoder, 1 call\nno plan: the call changes Decoder.seen\n" in text
    (call,) = content["calls"]
    assert (call["steps"], call["reason"]) == ([], "the call changes Decoder.seen")
