# Every target works from a fresh clone: most create .venv on first use, and renew it when pyproject.toml or constraints.txt change.
SHELL := /bin/bash
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PINS := $(VENV)/constraints.txt
# The documentation has an environment of its own, which needs no torch.
DOCS_VENV := .venv-docs
DOCS_STAMP := $(DOCS_VENV)/.installed
# Further options of make bench, such as --resume, or --budget with seconds.
BENCH_ARGS ?=
PYTEST_ARGS ?=
# A checkout of ComfyUI, from the environment or the command line.
COMFYUI ?=
# Packages among a checkout's requirements that are not installed. PyTorch is installed already.
# torchvision and torchaudio have no build for some releases of PyTorch, and kornia and spandrel
# need torchvision. If ComfyUI imports one of these four in a test, an empty module takes its place.
# No test needs the other packages.
COMFYUI_NOT := torch|torchvision|torchaudio|kornia|spandrel|pyopengl|comfy-angle|comfyui-workflow-templates|comfyui-embedded-docs
NO_GPU := import torch; print("" if torch.cuda.is_available() else "not gpu")
NOX_ARGS ?=

# The first interpreter that runs and has a supported version. Each is run to find out, because
# pyenv has a command (a shim) also for versions that are not installed.
SUPPORTED := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))
PYTHON ?= $(shell for p in python3 python3.11 python3.12; do $$p -c '$(SUPPORTED)' 2>/dev/null && { echo $$p; break; }; done)

define COMFYUI_REQUIREMENTS
grep -viE '^($(COMFYUI_NOT)) *([<>=~]|$$)' "$(COMFYUI)/requirements.txt" > $(VENV)/comfyui.txt && \
  $(PIP) install --quiet -c $(PINS) -r $(VENV)/comfyui.txt
endef

define CHECK_PYTHON
@test -n "$(PYTHON)" || { echo "make: no Python 3.11 or 3.12 found; name one: make PYTHON=/path/to/python3.11" >&2; exit 1; }
@$(PYTHON) -c '$(SUPPORTED)' || { echo "make: $(PYTHON) is not Python 3.11 or 3.12" >&2; exit 1; }
endef

TORCH_LACKS_TRITON := import importlib.metadata as m, sys; sys.exit(any(r.startswith("triton") for r in m.requires("torch") or []))

# A person's pip settings (index, certificates, proxies) are wanted; those that would send the packages elsewhere, or pin them
# otherwise, are not.
PIP_ENV := env -u PIP_TARGET -u PIP_PREFIX -u PIP_ROOT -u PIP_CONSTRAINT -u PIP_REQUIREMENT -u PIP_DRY_RUN -u PIP_NO_DEPS \
       -u PIP_REQUIRE_HASHES -u PYTHONPATH -u PYTHONHOME PIP_USER=0 PIP_DISABLE_PIP_VERSION_CHECK=1
PIP := $(PIP_ENV) $(BIN)/python -m pip

.PHONY: help demo test test-slow test-programs test-compile test-gpu test-comfyui comfyui-requirements comfyui-node test-serve matrix check docs package dist compiled hub-kernels bench \
  lint types format format-check install clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/^([a-z-]+):.*## */\1\t/' | expand -t 14

# torch is installed first, and by its exact version: with a range of versions, pip may pass over a
# build that is available. A CUDA build of torch requires the Triton that it was made for, and a CPU
# build requires none. So the line for Triton in constraints.txt is used only with a CPU build.
# Build isolation is off because an isolated build would fetch its own setuptools, whatever
# constraints.txt says.
$(STAMP): pyproject.toml constraints.txt
	$(CHECK_PYTHON)
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	@grep -v '^triton==' constraints.txt > $(PINS)
	@echo "installing into $(VENV): torch"
	@$(PIP) install --quiet -c $(PINS) setuptools "$$(grep '^torch==' constraints.txt)"
	@if $(BIN)/python -c '$(TORCH_LACKS_TRITON)'; then cp constraints.txt $(PINS); fi
	@echo "installing into $(VENV): the rest"
	@$(PIP) install --quiet -c $(PINS) --no-build-isolation -e '.[dev]'
	@touch $@

install: $(STAMP)  ## create .venv with what most other targets need

demo: $(STAMP)  ## draw digits with a small trained pipeline, stock and optimized, and compare; needs no GPU
	$(BIN)/sdfastgn demo --output demo-output

# One thread a worker: two workers share two cores, and torch would start two threads in each. No test may need the network.
# Bytecode is kept, whatever the person's settings: without it each process compiles all that it imports.
QUIET_PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -m pytest

test: $(STAMP)  ## the quick tests that need no GPU
	COMFYUI= $(QUIET_PYTEST) -m "not gpu and not every_gpu and not slow" -n 2 --dist worksteal --durations=10 $(PYTEST_ARGS)

test-slow: $(STAMP)  ## the tests that take longer, and all cases; need no GPU
	COMFYUI= $(QUIET_PYTEST) -m "slow and not gpu and not many_programs" -n 2 --dist worksteal $(PYTEST_ARGS)

test-programs: $(STAMP)  ## thousands of random programs, as plans and in eager PyTorch; needs no GPU
	$(QUIET_PYTEST) tests/plans/test_programs.py tests/plans/test_stress.py -m "not gpu" -n 2 --dist worksteal $(PYTEST_ARGS)

test-compile: $(STAMP)  ## compile every kernel for every generation of GPUs; needs no GPU
	$(QUIET_PYTEST) tests/kernels/test_compile_only.py -m every_gpu -n 2 $(PYTEST_ARGS)

test-gpu: $(STAMP)  ## the tests that need an NVIDIA GPU
	$(BIN)/python -m pytest -m gpu $(PYTEST_ARGS)

test-comfyui: $(STAMP)  ## the ComfyUI node beside a checkout: make test-comfyui COMFYUI=path
	@if [ -z "$(COMFYUI)" ] || [ ! -d "$(COMFYUI)/comfy" ]; then \
	  echo "skipped, no ComfyUI (COMFYUI=path names a checkout)"; exit; fi; \
	  $(COMFYUI_REQUIREMENTS) && \
	  COMFYUI="$(abspath $(COMFYUI))" $(QUIET_PYTEST) tests/patches/comfyui -n 2 --dist loadfile \
	    -m "$$($(BIN)/python -c '$(NO_GPU)')" $(PYTEST_ARGS)

comfyui-requirements: $(STAMP)  ## what a checkout of ComfyUI needs to be imported: COMFYUI=path
	@$(COMFYUI_REQUIREMENTS)

# The package is pure Python, so copying is enough. This needs no .venv.
comfyui-node:  ## the folder for ComfyUI's custom_nodes, with the package inside: build/comfyui/sdfastgn
	rm -rf build/comfyui && mkdir -p build/comfyui
	cp -r integrations/comfyui build/comfyui/sdfastgn
	mkdir build/comfyui/sdfastgn/package
	cp -r sdfastgn LICENSE build/comfyui/sdfastgn/package
	find build/comfyui -name __pycache__ -prune -exec rm -rf {} +

test-serve: $(STAMP)  ## the example for Ray Serve and the load scripts, after an install of Ray
	@$(PIP) install --quiet -c $(PINS) --no-build-isolation -e '.[serve]'
	$(QUIET_PYTEST) tests/test_ray_serve.py tests/scripts/publish/test_serving_load.py tests/scripts/publish/test_serving_replicas.py -n 2 --dist loadfile $(PYTEST_ARGS)

matrix: $(STAMP)  ## tests beside other releases of Python, torch and diffusers; an hour, and 40 GB of downloads
	@$(PIP) install --quiet 'nox[uv]==2026.10.20'
	$(BIN)/nox $(NOX_ARGS)

format-check: $(STAMP)
	$(BIN)/ruff format --check .

lint: $(STAMP)  ## ruff, and which room may import which
	$(BIN)/ruff check .
	PYTHONPATH=. $(BIN)/lint-imports --no-cache

types: $(STAMP)  ## mypy
	$(BIN)/mypy

format: $(STAMP)  ## rewrite the files in the house format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# What the package's extra `docs` asks for, without the package.
DOCS_NEEDS := import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"])

$(DOCS_STAMP): pyproject.toml constraints.txt
	$(CHECK_PYTHON)
	@$(DOCS_VENV)/bin/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(DOCS_VENV)
	@echo "installing into $(DOCS_VENV): mkdocs"
	@$(PIP_ENV) $(DOCS_VENV)/bin/python -m pip install --quiet -c constraints.txt $$($(PYTHON) -c '$(DOCS_NEEDS)')
	@touch $@

docs: $(DOCS_STAMP)  ## the documentation site, in build/site; stops at the first warning; needs no torch
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build
	@echo "open build/site/index.html"

# The wheel is built from the sdist. Build isolation is off because it would fetch its own setuptools.
package: $(STAMP)  ## the sdist and the wheel of a release, in dist, as PyPI accepts them
	rm -rf dist
	$(BIN)/python -m build --no-isolation --outdir dist .
	$(BIN)/python -m twine check --strict dist/*

dist: package  ## all files of a release, in dist: what package and compiled make; minutes
	$(MAKE) compiled
	$(BIN)/python -m twine check --strict dist/*

# The repository on the Hub that the card and build.toml name.
HUB_REPO ?= sdfastgn/sdfastgn

# Kernels are compiled for the Triton of .venv; those of another Triton in build/compiled are kept.
compiled: $(STAMP)  ## the optional wheel sdfastgn-compiled, in dist: kernels for six generations of GPUs; minutes
	$(BIN)/python -m scripts.build_compiled --output build/compiled
	$(BIN)/python -m build --no-isolation --wheel --outdir dist build/compiled

hub-kernels: $(STAMP)  ## the kernels as a package for Hugging Face's Kernel Hub, in build/hub-kernels
	$(BIN)/python scripts/build_hub_kernels.py --output build/hub-kernels --repo-id $(HUB_REPO)

check: format-check lint types docs package test test-slow test-compile test-serve  ## all that CI looks at

bench: $(STAMP)  ## measure most of what is published, on one GPU; JSON goes to build/renewal
	$(BIN)/python -m scripts.publish.renew --archive build/renewal.tar.gz $(BENCH_ARGS)

clean:  ## remove what the targets made
	rm -rf $(VENV) $(DOCS_VENV) .nox build dist demo-output *.egg-info .pytest_cache .ruff_cache .mypy_cache
