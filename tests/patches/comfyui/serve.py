"""Starts ComfyUI's server. Unlike its ``main.py`` alone, this works without torchvision."""

import os
import runpy
import sys

from sdfastgn.cli.comfyui_checkout import stand_ins

if __name__ == "__main__":
    os.chdir(os.environ["COMFYUI"])
    sys.path.insert(0, os.getcwd())
    sys.argv[0] = "main.py"
    with stand_ins():
        runpy.run_path("main.py", run_name="__main__")
