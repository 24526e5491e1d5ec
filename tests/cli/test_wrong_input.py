"""Wrong input of every command ends in one line and exit code 2, and makes and changes no file."""

from __future__ import annotations

import fnmatch
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from sdfastgn.bench.documents import SCHEMA
from sdfastgn.models import configurations
from sdfastgn.models.pipelines import build_pipeline
from tests.bench.tables.cases import row, save
from tests.cli.cases import SD15, SD21, SDXL
from tests.command_line import refusal

# As the entry point sets it. transformers would keep the first runner's standard error.
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

# ---- the folder in which every command runs: HERE stands for its path

# A pipeline's folder -> what its UNet's configuration and its index hold.
PIPELINES: dict[str, tuple[dict[str, Any] | None, str | None]] = {
    "sd15": (SD15, None),
    "sdxl": (SDXL, None),
    "sd21": (SD21, None),
    "distilled": ({**SD15, "time_cond_proj_dim": 256}, None),
    "pruned": ({**SDXL, "transformer_layers_per_block": [0, 2, 4]}, None),
    "inpainting": ({**SD15, "in_channels": 9}, None),
    "video": ({"_class_name": "UNet3DConditionModel"}, None),
    "of-images": ({**SD21, "addition_embed_type": "image"}, None),
    "img2img": (SD21, '{"_class_name": "StableDiffusionImg2ImgPipeline"}'),
    "no-prompt": (SD21, '{"_class_name": "LDMSuperResolutionPipeline"}'),
    "no-index": (None, "{ broken"),
    "no-class": (None, "{}"),
    "unknown-class": (None, '{"_class_name": "NoSuchPipeline"}'),
}
MACHINE = '"environment": {}, "kind": "profile", "config": {}'
NO_RESULT = "holds no result of sdfastgn: it"
UNSOUND = "holds no whole result of sdfastgn: a field is missing, unknown or of another type"
# A damaged result -> its text, and what is said of it.
DAMAGED = {
    "cut-off.json": ("{", f"{NO_RESULT} is no JSON (Expecting property name"),
    "deep.json": ("[" * 100_000, f"{NO_RESULT} is no JSON (maximum recursion depth"),
    "list.json": ("[1]", f"{NO_RESULT} is no JSON object"),
    "empty.json": ("{}", f"{NO_RESULT} has no 'kind' of type str"),
    "no-machine.json": (
        '{"kind": "profile", "config": {}, "rows": []}',
        "*it has no 'environment' of type dict",
    ),
    "no-rows.json": (f'{{{MACHINE}, "rows": 5}}', "*it has no 'rows' of type list"),
    "no-row.json": (f'{{{MACHINE}, "rows": [{{"a": 1}}]}}', UNSOUND),
    "odd-machine.json": ('{"environment": {"git": 5}, "kind": "profile", "config": {}, "rows": []}', UNSOUND),
    "no-parts.json": ('{"environment": {}, "kind": "warm_up", "config": {}, "rows": []}', UNSOUND),
}
SCHEMAS = {"newer": SCHEMA + 1, "zero": 0, "text": "1", "none": None}
DAMAGED_IMAGES = {"images-cut-off": "{", "images-list": "[1]", "images-no-text": '{"case": ["a"]}'}


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    here = tmp_path_factory.mktemp("wrong") / "here"
    (here / "folder").mkdir(parents=True)
    (here / "text").write_text("a cat\ntwo dogs\n")
    (here / "utf-16").write_text("a cat\ntwo dogs\n", encoding="utf-16")
    (here / "link.json").symlink_to("new/sub/a.json")
    (here / "link.png").symlink_to("a.png")
    for name, (unet, index) in PIPELINES.items():
        (here / name / "unet").mkdir(parents=True)
        if unet:
            (here / name / "unet" / "config.json").write_text(json.dumps(unet))
        if index:
            (here / name / "model_index.json").write_text(index)
    build_pipeline("tiny", dtype=torch.float32, device="cpu").save_pretrained(here / "model")
    eager = row("eager", 25.0)
    for name in ("b", "c", *DAMAGED_IMAGES):
        save(here, f"{name}.json", "end_to_end", [eager])
        (here / f"{name}.images").write_text(DAMAGED_IMAGES.get(name, "{}"))
    save(here, "nameless.json", "end_to_end", [{**vars(eager), "variant": None}])
    save(here, "ablation.json", "ablation", [])
    for name, schema in SCHEMAS.items():
        save(here, f"schema-{name}.json", "end_to_end", [eager], schema=schema)
    for name, (text, _) in DAMAGED.items():
        (here / name).write_text(text)
    for kind in ("txt", "png", "jpeg"):  # images of others, where the second prompt's would be
        (here / f"{kind}").mkdir()
        path = here / f"{kind}" / "00002.png"
        path.write_text("mine") if kind == "txt" else Image.new("RGB", (8, 8)).save(path, kind)
    return here


# ---- command -> what it says, behind "sdfastgn: ". A star stands for any text, also at the end.

BENCH = {
    "bench --model sd3": "--model: unknown value 'sd3'; choose from tiny, tiny_xl, sd15, sdxl",
    "bench --part text": "--part: unknown value 'text'; choose from unet, vae, pipeline",
    "bench --part transformer": "--part: 'transformer' needs --model with one of flux, flux2_klein, sd35",
    "bench --model wan --part pipeline": "--part: cannot time 'pipeline' of the model 'wan'; choose from vae",
    "bench --model wan --part vae --part unet": "--part: cannot time 'unet' of the model 'wan'; choose",
    "bench --model svd --part train": "--part: cannot time 'train' of the model 'svd'; choose from unet, vae",
    "bench --model animatediff --part vae": "--part: cannot time 'vae' of the model 'animatediff'; choose",
    "bench --model cogvideox --size 100": "--size: must be a positive multiple of 8",
    "bench --model hunyuan_video --dtype fp8": "--dtype: unknown value 'fp8'",
    "bench --model qwen_image --batch 0": "--batch: must be a positive whole number, got 0",
    "bench --preset fal --model svd": "--part: cannot time 'pipeline' of the model 'svd'; choose from unet",
    "bench --variants eager,fast": "--variants: unknown value 'fast'; choose from eager, channels_last",
    "bench --variants ,": "--variants: no value given; choose from eager",
    "bench --dtype fp8": "--dtype: unknown value 'fp8'; choose from fp16, bf16, fp32",
    "bench --size 100": "--size: must be a positive multiple of 8 (one latent covers 8x8 pixels), got 100",
    "bench --size -8": "--size: must be a positive multiple of 8",
    "bench --preset mine": "--preset: unknown value 'mine'; choose from fal, diffusion-fast, stable-fast",
    "bench --lora-rank 4": "--lora-rank: is for --part train, got --part unet",
    "bench --part train --lora-rank 0": "--lora-rank: must be a positive whole number, got 0",
    "bench --scheduler Euler": "--scheduler: diffusers has no scheduler 'Euler'; give a class such as Euler",
    "bench --steps 0": "--steps: must be a positive whole number, got 0",
    "bench --steps 1,-4": "--steps: must be a positive whole number, got -4",
    "bench --steps ,": "--steps: must be a positive whole number or a list such as 1,4, got ','",
    "bench --batch two": "--batch: must be a positive whole number or a list such as 1,4, got 'two'",
    "bench --batch 0": "--batch: must be a positive whole number, got 0",
    f"bench --batch {10**18}": "--batch: must be a positive whole number or a list such as 1,4, got",
    "bench --repeats -1": "--repeats: must be a positive whole number, got -1",
    "bench --repeats two": "Invalid value for '--repeats': Input should be a valid integer",
    "bench --device tpu": "--device: cannot use 'tpu'; choose from cpu",
    "bench --guidance inf": "Invalid value for '--guidance': inf is not finite",
    f"bench --seed {2**64}": f"Invalid value for '--seed': {2**64} is not a whole number of 64 bits",
    "bench --color": "No such option: --color",
    # An option that what is timed does not use.
    "bench --steps 4": "--steps: is for --part pipeline, got --part unet",
    "bench --part vae --part train --scheduler DDIMScheduler": "--scheduler: is for *, got --part vae, train",
    "bench --model wan --guidance 0": "--guidance: is for --part pipeline, got --part vae",
    "bench --prompt cat": "--prompt: is for --part pipeline, got --part unet",
    "bench --preset fal --part unet --steps 4": "--steps: is for --part pipeline, got --part unet",
    "bench --preset diffusers --prompt cat": "--prompt: is for --part pipeline, got --part unet",
    "bench --model lcm --part pipeline --guidance 0": "--guidance: the UNet of 'lcm' takes guidance as an",
    "bench --weights distilled --part pipeline --guidance 0": "--guidance: the UNet of 'lcm' takes guidance",
}
# Checked before anything is loaded.
WEIGHTS = {
    "bench --weights /no/such/folder": "--weights: no such path '/no/such/folder'",
    "bench --weights models": "--weights: no such path 'models'; give random, a path, or a Hub id",
    "bench --weights ''": "--weights: no such path ''; give random, a path, or a Hub id",
    f"bench --weights {'a' * 300}": "--weights: cannot look at 'a*a': File name too long",
    "bench --weights ~nobody-of-this-name/x": "--weights: cannot look at '~*/x': Could not determine home",
    "bench --weights folder": "--weights: no configuration of a UNet in 'folder': there is no unet/",
    "bench --weights sd15 --model sdxl": "--model: the UNet of 'sd15' is not 'sdxl''s: "
    "block_out_channels (320, 640, 1280, 1280), not (320, 640, 1280); --model sd15 fits",
    "bench --weights sdxl --model sd15": "--model: the UNet of 'sdxl' is not 'sd15''s: "
    "block_out_channels (320, 640, 1280), not (320, 640, 1280, 1280); --model sdxl fits",
    "bench --weights sd21 --model sd15": "--model: the UNet of 'sd21' is not 'sd15''s: "
    "cross_attention_dim (1024, 1024, 1024, 1024), not (768, 768, 768, 768)",
    "bench --weights pruned --model sdxl": "--model: the UNet of 'pruned' is not 'sdxl''s: "
    "transformer_layers_per_block (0, 2, 4), not (1, 2, 10)",
    "bench --weights video": "--weights: the UNet of 'video' cannot be timed: a UNet3DConditionModel takes",
    "bench --weights of-images": "--weights: the UNet of 'of-images' cannot be timed: its "
    "addition_embed_type 'image' takes",
    "bench --model wan --weights sd15": "--weights: there is no transformer of 'wan' in 'sd15'",
    "bench --part pipeline --weights img2img": "--part: 'pipeline' needs a text-to-image*, * takes 'image'",
    "bench --part pipeline --weights no-prompt": "--part: 'pipeline' needs * takes a prompt, * takes none",
    "bench --part pipeline --weights inpainting --model sd15": "--part: 'pipeline' needs * takes 9 channels",
}
NO_FOLDER = "there is no folder 'HERE/new/sub'; make it first"
FILES = {
    "bench --json new/sub/a.json": f"--json: {NO_FOLDER}",
    "bench --json link.json": f"--json: {NO_FOLDER}",
    "bench --html new/sub/a.html": f"--html: {NO_FOLDER}",
    "bench --profile --plot new/sub/a.png": f"--plot: {NO_FOLDER}",
    "kernels --json new/sub/a.json": f"--json: {NO_FOLDER}",
    "kernels --plot new/sub/a.png": f"--plot: {NO_FOLDER}",
    "inspect tiny --json new/sub/a.json": f"--json: {NO_FOLDER}",
    "report b.json --html new/sub/a.html": f"--html: {NO_FOLDER}",
    "demo --output new/sub/folder": f"--output: {NO_FOLDER}",
    "generate --model model --prompts text --out new/sub/folder": f"--out: {NO_FOLDER}",
    "bench --json folder": "--json: cannot write a file at 'folder': Is a directory",
    "bench --json /": "--json: cannot write a file at '/': Is a directory",
    "bench --json /proc/x.json": "--json: cannot write a file at '/proc/x.json': No such file or directory",
    "bench --json /proc/version": "--json: cannot write a file at '/proc/version': ",
    "bench --json text/a.json": "--json: cannot write a file at 'text/a.json': ",
    f"bench --json {'x' * 300}": "--json: cannot write a file at 'x*x': File name too long",
    "bench --profile --plot out.svg": "--plot: must end in .png, got 'out.svg'",
    "bench --plot out.png": "--plot: draws the breakdown of --profile, got 'out.png' without --profile",
    "kernels --dtype bf16,fp32 --json /proc/x.json": "--json: cannot write a file at '/proc/x_bf16.json'",
    "kernels --dtype bf16,fp32 --json .": "--json: cannot write a file at '.': Is a directory",
    "kernels --plot roof.svg": "--plot: must end in .png, got 'roof.svg'",
    "kernels --suite training --plot x.png": "--plot: only the suite inference has a picture, got 'x.png'",
    "demo --output ''": "--output: must be a folder, got ''; give . for the current one",
    "demo --output text": "--output: cannot make a folder at 'text': File exists",
    "demo --output /proc/x": "--output: cannot make a folder at '/proc/x': No such",
    # No file is written over another.
    "bench --json a --html a": "--html: 'a' is the file of --json too; give another path",
    "bench --json a --html ../here/a": "--html: '../here/a' is the file of --json too",
    "bench --json a.png --profile --plot link.png": "--plot: 'link.png' is the file of --json too",
    "bench --json a.json --html a.images": "--html: 'a.images' is the file of --json's images too",
    "kernels --json a.png --plot a.png": "--plot: 'a.png' is the file of --json too",
    "report b.json --html ./b.json": "--html: 'b.json' is the file of RESULTS too",
    "report c.json b.json --html b.images": "--html: 'b.images' is the file of RESULTS too",
}
KERNELS = {
    "kernels --shapes 2x320x64": "--shapes: cannot use shape '2x320x64'; give NxCxHxW with C divisible by 32",
    "kernels --shapes 2x33x8x8": "--shapes: cannot use shape '2x33x8x8'",
    "kernels --shapes 0x32x8x8": "--shapes: cannot use shape '0x32x8x8'",
    f"kernels --shapes {10**18}x32x8x8": f"--shapes: cannot use shape '{10**18}x32x8x8'",
    "kernels --suite instance_norm --shapes 2x32x8x8": "--shapes: cannot use shape '2x32x8x8'; give N",
    "kernels --providers cudnn": "--providers: unknown value 'cudnn'; choose from copy, eager_nchw",
    "kernels --suite layer_norm --providers sdpa": "--providers: unknown value 'sdpa'; choose from",
    "kernels --suite norms": "--suite: unknown value 'norms'; choose from inference, training",
    "kernels --dtype int8": "--dtype: unknown value 'int8'; choose from fp16",
    f"kernels --seed {-(2**64)}": f"Invalid value for '--seed': {-(2**64)} is not a whole number of 64 bits",
}
GENERATE = "generate --model model --prompts text --out out --device cpu"
MOVE = "choose another folder, or move it"
GENERATES = {
    f"{GENERATE} --model /no/such": "--model: no such path '/no/such'; give a path",
    f"{GENERATE} --model folder": "--model: no configuration of a UNet in 'folder'",
    f"{GENERATE} --out folder --variant fp16": "--model: cannot load",
    f"{GENERATE} --variant fp16": "--model: cannot load",
    f"{GENERATE} --prompts /no/such": "--prompts: cannot read '/no/such'",
    f"{GENERATE} --prompt cat": "--prompt: give --prompt TEXT or --prompts FILE, got both",
    "generate --model model --out out": "--prompt: give --prompt TEXT or --prompts FILE, got neither",
    f"{GENERATE} --prompts utf-16": "--prompts: 'utf-16' is in UTF-16; save it as UTF-8",
    f"{GENERATE} --prompts {os.devnull}": "--prompts: no prompt in '/dev/null'",
    f"{GENERATE} --out ''": "--out: must be a folder, got ''",
    f"{GENERATE} --out /proc/x": "--out: cannot make a folder at '/proc/x'",
    f"{GENERATE} --out txt": f"--out: 'txt/00002.png' cannot be read as an image; {MOVE}",
    f"{GENERATE} --out png": f"--out: 'png/00002.png' is a PNG without sdfastgn's settings; {MOVE}",
    f"{GENERATE} --out jpeg": f"--out: 'jpeg/00002.png' is a JPEG without sdfastgn's settings; {MOVE}",
    f"{GENERATE} --width 100": "--width: must be a positive multiple of 8",
    f"{GENERATE} --steps 0": "--steps: must be a positive whole number",
    f"{GENERATE} --batch-size 0": "--batch-size: must be a positive whole number",
    f"{GENERATE} --dtype fp8": "--dtype: unknown value 'fp8'",
    f"{GENERATE} --guidance nan": "Invalid value for '--guidance': nan is not",
}
# What names the model -> a command that reads one from the Hub while there is no network.
NO_NETWORK = {
    "--weights": "bench --weights some/model",
    "--model": "generate --model some/model --prompts text --out out --device cpu",
    "MODEL": "warm-up some/model",
}
MODELS = {
    "inspect /no/such/folder": "MODEL: no such path '/no/such/folder'; give tiny, tiny_xl,",
    "inspect folder": "MODEL: cannot load 'folder'",
    **{
        command: f"{option}: 'some/model' is not fully in the local cache, and the Hub cannot be reached "
        "(HF_HUB_OFFLINE is set)"
        for option, command in NO_NETWORK.items()
    },
    "verify tiny": "PATH: no such path 'tiny'; give a path, or a Hub id",
    "verify text": "PATH: 'text' is a file; expected",
    "verify no-index": "PATH: cannot load 'no-index': *not a valid JSON",
    "verify no-class": "PATH: cannot load 'no-class': *KeyError",
    "verify unknown-class": "PATH: cannot load 'unknown-class': *AttributeError*NoSuchPipeline",
    "warm-up sd3": f"MODEL: no such path 'sd3'; give {', '.join(configurations.TEXT_TO_IMAGE)}, a path, or",
    "warm-up sd_turbo": "MODEL: no such path 'sd_turbo'; give ",
    "warm-up": "MODEL: give the model whose kernels are compiled",
    **{
        f"warm-up --import a.zip {option} {value}": "MODEL: give the model whose kernels are compiled, for "
        f"{option}"
        for option, value in {"--export": "b.zip", "--size": 64, "--batch": 0, "--dtype": "fp16"}.items()
    },
    "warm-up tiny --export missing/a.zip": "--export: there is no folder",
    "warm-up folder": "MODEL: no configuration of a UNet in 'folder'",
    "warm-up tiny --dtype fp8": "--dtype: unknown value 'fp8'",
    "warm-up tiny --batch 0": "--batch: must be a positive whole number, got 0",
    "warm-up tiny --size 1,2": "--size: must be like 512 or 768x512 (width first), got '1,2'",
    f"warm-up tiny --size {10**18}": "--size: must be like 512 or 768x512 (width first), got",
    "warm-up tiny --size 64x60": "--size: must be a positive multiple of 8 (one latent * pixels), got 60",
    "warm-up tiny --device tpu": "--device: cannot use 'tpu'; give cuda, cuda:N or cpu",
    "warm-up tiny --device cpu": "--device: kernels can only be compiled on a CUDA GPU, got 'cpu'",
}
REPORT = {
    "report /no/such.json": "cannot read '/no/such.json': No such file or directory",
    "report text": f"'text' {NO_RESULT} is no JSON (Expecting value: ",
    "report ablation.json": "'ablation.json' has results of the kind 'ablation', which has",
    "report nameless.json": "'nameless.json' holds no whole result of sdfastgn: ",
    **{f"report {name}": f"'{name}' {says}" for name, (_, says) in DAMAGED.items()},
    **{
        f"report schema-{name}.json": f"'schema-{name}.json' has results in schema {schema!r}; this"
        for name, schema in SCHEMAS.items()
    },
    **{f"report {name}.json": f"*'{name}.images'" for name in DAMAGED_IMAGES},
}
PLAN = {
    "plan model": "MODEL: unknown value 'model'; choose from tiny, tiny_xl",
    "plan tiny --part pipeline": "--part: unknown value 'pipeline'; choose from unet, vae",
    "plan tiny --part ''": "--part: unknown value ''; choose from unet, vae",
    "plan dc_ae --part unet": "--part: unknown value 'unet'; choose from vae",
    "plan tiny --size 100": "--size: must be a positive multiple of 8",
    "plan dc_ae --size 0": "--size: must be a positive multiple of 8",
    "plan tiny --batch 0": "--batch: must be a positive whole number, got 0",
    "plan tiny --dtype fp8": "--dtype: unknown value 'fp8'; choose from fp16, bf16, fp32",
    "plan tiny --gpu h100": "--gpu: unknown value 'h100'; choose from hopper, other",
    "plan tiny --json new/sub/a.json": f"--json: {NO_FOLDER}",
    "plan tiny --json folder": "--json: cannot write a file at 'folder': Is a directory",
}
OTHERS = {
    "sources --against folder": "--against: no wheel or folder of diffusers or ComfyUI, got 'folder'",
    "sources --comfyui folder": "--comfyui: no checkout of ComfyUI, got 'folder'",
    f"sources --against {'a' * 300}": "--against: no wheel or folder of diffusers or ComfyUI, got",
    "paint": "No such command 'paint'.",
}
WRONG = BENCH | WEIGHTS | FILES | KERNELS | GENERATES | MODELS | REPORT | PLAN | OTHERS


@pytest.mark.drawn(12)
@pytest.mark.parametrize(("command", "message"), WRONG.items(), ids=WRONG)
def test_wrong_input_is_one_line(
    command: str,
    message: str,
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    arguments = ["" if word == "''" else word for word in command.split()]
    shown = refusal(monkeypatch, capsys, here, "sdfastgn", *arguments)
    said = message.replace("HERE", str(here))
    assert fnmatch.fnmatchcase(shown, f"sdfastgn: {said}*\n"), shown
    assert shown.count("\n") == 1
