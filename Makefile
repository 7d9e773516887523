# make demo | quick | test | full | docs | faults | conformance | integrations | versions | check | compile | emulate | clean: each sets up what it needs, once.
# make gpu-check uses what the machine has: a GPU, torch, triton and pytest.
#
#   PYTHON=python3.12     the interpreter to build .venv with (default: the first fit one on PATH)
#   ARGS="--steps 20"     arguments for `fusedreduce demo`, tests/conformance/run.py, tests/integrations/run_pages.py or
#                         perf/gpu_check.py
#   GPU_PYTHON=python3.12 the interpreter of gpu-check (default: python3)

PYTHON ?=
ARGS ?=
GPU_PYTHON ?= python3

VENV := .venv
PY := $(VENV)/bin/python
# One install serves every target: the test extra contains the others, and a second set-up would save little.
STAMP := $(VENV)/.installed
# The frameworks of docs/frameworks, in an environment of their own: they bring many packages, with bounds of their own.
FRAMEWORKS := .venv-integrations
# A file's tests share what they start, so each file goes to one process, in the order of conftest.py.
PARALLEL := --dist loadfile --no-loadscope-reorder
FULL :=
PERF := $(if $(wildcard perf/*.py),perf)

SHELL := /bin/sh
.DEFAULT_GOAL := help
.PHONY: help demo quick quick-tests test full docs faults conformance integrations versions check compile emulate gpu-check clean
.DELETE_ON_ERROR:

# A caller's settings that would aim Python or pip past .venv.
# Without compiled files each of the tests' many processes would compile what it imports.
unexport PYTHONDONTWRITEBYTECODE
unexport PYTHONHOME PYTHONPATH PIP_PREFIX PIP_REQUIRE_VIRTUALENV PIP_TARGET PIP_USER
export PYTHON
export PIP_DISABLE_PIP_VERSION_CHECK := 1

# The stamp holds where the checkout lay: an editable install is void once that has moved.
ifneq ($(shell cat $(STAMP) 2>/dev/null),$(shell pwd -P))
.PHONY: $(STAMP)
endif

define FIT_PYTHON
import ensurepip, sys, venv
sys.exit(not (3, 11) <= sys.version_info < (3, 15))
endef
export FIT_PYTHON

define NO_PYTHON
error: no Python fit for $(VENV): it takes 3.11 to 3.14 with the venv and ensurepip modules
       (on Debian and Ubuntu: apt-get install python3-venv). Name one with: make PYTHON=/path/to/python3
endef
export NO_PYTHON

define TOTALS
import sys, xml.etree.ElementTree as tree
suites = [suite for path in sys.argv[1:] for suite in tree.parse(path).iter("testsuite")]
count = lambda *names: sum(int(suite.get(name)) for suite in suites for name in names)
failed, skipped = count("failures", "errors"), count("skipped")
print(f"total: {count('tests') - failed - skipped} passed, {failed} failed, {skipped} skipped")
endef
export TOTALS

help:
	@echo "make demo         install into $(VENV) and run the demo (ARGS=... are its arguments)"
	@echo "make quick        lint, types and the tests that are quick and start no ranks: about a minute"
	@echo "make test         install into $(VENV) and run every check, and every test but the longest"
	@echo "make full         make test with the longest tests, all examples of the sweeps, and make faults"
	@echo "make docs         build the documentation as a site, in out/site; a warning is an error"
	@echo "make faults       plant faults one by one, and see that tests find each (ARGS=\"kernels\", ARGS=\"--list\", ...)"
	@echo "make conformance  run torch's own DDP tests against ours (ARGS=\"--world 3\", ARGS=\"--hook bf16\", ...)"
	@echo "make integrations  run docs/frameworks with the real packages, in $(FRAMEWORKS) (ARGS=\"ray\", ARGS=\"accelerate trainer\", ...)"
	@echo "make versions     kernels with each Triton that is supported; ARGS=full: every test with the oldest and newest torch"
	@echo "make gpu-check    with this machine's python3, torch, triton and pytest: all that only an NVIDIA GPU can say, in 10 minutes"
	@echo "make check        lint, format and types only"
	@echo "make compile      every kernel compiled for every architecture, and its machine code checked"
	@echo "make emulate      every kernel as compiled for NVIDIA run by the emulator, and a table of docs/kernels.md written"
	@echo "make clean        remove $(VENV), $(FRAMEWORKS) and everything else that was made here"

$(STAMP): pyproject.toml constraints.txt Makefile
	@if ! $(PY) -c "$$FIT_PYTHON" 2>/dev/null || ! $(PY) -m pip --version >/dev/null 2>&1; then \
	  if [ -n "$$PYTHON" ]; then set -- "$$PYTHON"; \
	  else set -- python3 python3.14 python3.13 python3.12 python3.11; fi; \
	  found=; for p do if "$$p" -c "$$FIT_PYTHON" 2>/dev/null; then found=$$p; break; fi; done; \
	  if [ -z "$$found" ]; then printf '%s\n' "$$NO_PYTHON" >&2; exit 1; fi; \
	  echo "==> creating $(VENV) with $$found ($$("$$found" -c 'import platform; print(platform.python_version())'))"; \
	  rm -rf $(VENV) && "$$found" -m venv $(VENV); \
	fi
	@echo "==> installing fusedreduce and what its demo and tests need (once; this takes some minutes)"
	@$(PY) -m pip install --quiet --constraint constraints.txt pip setuptools
	@$(PY) -m pip install --quiet --constraint constraints.txt --no-build-isolation --editable '.[test]'
	@pwd -P >$@

demo: $(STAMP)
	@echo "==> fusedreduce demo $(ARGS)"
	@$(VENV)/bin/fusedreduce demo $(ARGS)

check: $(STAMP)
	@echo "==> ruff check"
	@$(PY) -m ruff check .
	@echo "==> ruff format --check"
	@$(PY) -m ruff format --check .
	@echo "==> mypy"
	@$(PY) -m mypy fusedreduce tests $(PERF)

docs: $(STAMP)
	@echo "==> building the documentation"
	@rm -rf out/site
	@env -u TRITON_INTERPRET $(PY) -m sphinx -q -W --keep-going -b html -d out/doctrees docs out/site
	@echo "the site: out/site/index.html"

faults: $(STAMP)
	@echo "==> planted faults $(ARGS)"
	@$(PY) tests/faults/plant.py $(ARGS)

compile: $(STAMP)
	@echo "==> compiling every kernel ahead of time, for each architecture"
	@env -u TRITON_INTERPRET PYTHONPATH=tests $(PY) -m support.machine_code

emulate: $(STAMP)
	@echo "==> running every kernel as compiled for NVIDIA, in the emulator, and recording it"
	@env -u TRITON_INTERPRET OMP_NUM_THREADS=1 PYTHONPATH=tests $(PY) -m support.emulator.record

quick: $(STAMP)
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=target check quick-tests

quick-tests: $(STAMP)
	@echo "==> quick tests, kernels interpreted"
	@OMP_NUM_THREADS=1 TRITON_INTERPRET=1 $(PY) -m pytest -n 2 $(PARALLEL) -q -m "not gpu and not slow and not ranks"

# The tests that most of the result is made of come last: who reads the log takes pytest's last line for it. They wait a
# fifth of the time for ranks and timeouts: of three processes two are at work.
test: $(STAMP)
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=target check compile docs
	@rm -rf out/test
	@if $(PY) -c "import sys, torch; sys.exit(not torch.cuda.is_available())"; then \
	  echo "==> tests with a GPU, kernels compiled"; \
	  env -u TRITON_INTERPRET OMP_NUM_THREADS=1 $(PY) -m pytest -m gpu --junit-xml=out/test/gpu.xml; \
	fi
	@echo "==> tests without a GPU, kernels interpreted; those with one are skipped where there is none"
	@set -- -m "not gpu"; [ -e out/test/gpu.xml ] || set --; \
	OMP_NUM_THREADS=1 TRITON_INTERPRET=1 $(PY) -m pytest -n 3 $(PARALLEL) $(FULL) "$$@" --junit-xml=out/test/cpu.xml
	@$(PY) -c "$$TOTALS" out/test/*.xml

full:
	@$(MAKE) --no-print-directory test FULL=--full
	@$(MAKE) --no-print-directory faults

conformance: $(STAMP)
	@echo "==> torch's own DDP tests $(ARGS)"
	@$(PY) tests/conformance/run.py $(ARGS)

# torch first, alone: asked for beside packages that depend on it, pip may look for it in their words, and find a build
# with CUDA.
$(FRAMEWORKS)/.installed: $(STAMP) $(wildcard tests/integrations/*.txt)
	@echo "==> installing the frameworks into $(FRAMEWORKS) (once; 2 GB and some minutes)"
	@rm -rf $(FRAMEWORKS) && $(PY) -m venv $(FRAMEWORKS)
	@$(FRAMEWORKS)/bin/python -m pip install --quiet --constraint tests/integrations/constraints.txt pip setuptools
	@$(FRAMEWORKS)/bin/python -m pip install --quiet $$(grep -o '^torch==.*' tests/integrations/constraints.txt)
	@$(FRAMEWORKS)/bin/python -m pip install --quiet --constraint tests/integrations/constraints.txt \
	  --requirement tests/integrations/requirements.txt
	@$(FRAMEWORKS)/bin/python -m pip install --quiet --constraint tests/integrations/constraints.txt \
	  --no-build-isolation --editable .
	@pwd -P >$@

integrations: $(FRAMEWORKS)/.installed
	@echo "==> frameworks $(ARGS)"
	@env -u TRITON_INTERPRET $(FRAMEWORKS)/bin/python tests/integrations/run_pages.py $(ARGS)

versions: $(STAMP)
	@echo "==> other versions of torch and Triton $(ARGS)"
	@env -u TRITON_INTERPRET $(PY) tests/versions/run.py $(ARGS)

gpu-check:
	@echo "==> what only a GPU can say $(ARGS)"
	@env -u TRITON_INTERPRET $(if $(PYTHONPATH),PYTHONPATH="$(PYTHONPATH)") $(GPU_PYTHON) perf/gpu_check.py $(ARGS)

clean:
	@echo "==> removing $(VENV), $(FRAMEWORKS), .versions/, out/, build outputs and caches"
	@rm -rf $(VENV) $(FRAMEWORKS) .versions out build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	@find . -path ./.git -prune -o -type d -name __pycache__ -prune -exec rm -rf {} +
