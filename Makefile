# Every command makes the virtual environment .venv first, and starts at once if it is there already. The tests of
# SGLang need .venv-sglang as well: `make test` makes it, and skips these tests where it cannot be made.

# Container images often set this variable. With it, each of the hundreds of processes compiles all its modules again.
unexport PYTHONDONTWRITEBYTECODE

PYTHON ?= $(shell for p in python3 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' 2>/dev/null && echo $$p && break; done)
BIN := .venv/bin
ARGS ?=
VERL ?=
TRL := trl==1.16.0

.PHONY: help demo test test-sglang test-docs lint setup sglang trl docs reference docs-serve clean

help:  ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12
	@echo
	@echo 'make demo QUICK=1 is shorter; make demo ENGINE=vllm serves the reward model with vLLM;'
	@echo 'make demo ARGS="--help" lists the options of the demo.'
	@echo 'make test ARGS="-m fast" runs only the fast tests; ARGS="-n 0" uses one process.'
	@echo 'make test VERL=0.9.2 runs the tests of the verl integration with that release of verl.'

demo: setup  ## train a small policy with verl on rewards from a served reward model (five to ten minutes)
	@$(BIN)/python -m examples.arithmetic.demo $(if $(QUICK),--quick) $(if $(ENGINE),--engine $(ENGINE)) $(ARGS)

# SGLang and the site have environments of their own. Without them, their tests are skipped.
TEST_ENVIRONMENTS := $(if $(findstring fast,$(ARGS)),,$(if $(VERL),.venv/verl-$(VERL)) .venv/trl \
	$(if $(or $(VERL),$(findstring not integration,$(ARGS))),,test-sglang test-docs))

# Two processes: with three, two cores are a few minutes faster, and tests with deadlines fail more often.
test: setup  ## run all checks and tests
	@$(MAKE) --no-print-directory -j2 lint $(TEST_ENVIRONMENTS)
	@$(if $(VERL),PYTHONPATH=$(CURDIR)/.venv/verl-$(VERL)) $(BIN)/python -m pytest --numprocesses 2 --dist loadfile \
		--no-loadscope-reorder --max-worker-restart 0 $(if $(VERL),tests/verl tests/examples/test_scripts.py) $(ARGS)

test-sglang: setup
	@$(BIN)/python tools/bootstrap_sglang.py || echo 'The tests of SGLang are skipped.'

test-docs: setup
	@$(MAKE) --no-print-directory .venv-docs/reward-loop.stamp || echo 'The site is not built.'

# Another release of verl, for the same environment: its folder comes first on the path of modules.
.venv/verl-%: | setup
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $@ verl==$*

# TRL for the same environment, in a folder that only its own tests have on the path: verl cannot train beside it.
.venv/trl: | setup
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $@ $(TRL)

trl: .venv/trl  ## install TRL into .venv/trl; use it with PYTHONPATH=.venv/trl

lint: setup  ## check style and types
	@$(BIN)/ruff check --quiet
	@$(BIN)/ruff format --check --quiet
	@$(BIN)/mypy

setup:  ## make .venv and install everything into it
	@if [ -z "$(PYTHON)" ]; then \
		echo 'reward_loop needs Python 3.11 or 3.12: python3, python3.12 and python3.11 were tried.'; \
		echo 'Install one, or pass its path: make $(MAKECMDGOALS) PYTHON=/path/to/python3.12'; exit 1; fi
	@$(PYTHON) tools/bootstrap.py

sglang: setup  ## make .venv-sglang: SGLang on the CPU, for its tests
	@$(BIN)/python tools/bootstrap_sglang.py

docs: .venv-docs/reward-loop.stamp  ## build the documentation site in site/; warnings are errors
	@NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --quiet --strict && echo 'The site is in site/index.html.'

reference: setup  ## write the reference into docs/, and the defaults of options into their YAML file
	@$(BIN)/python -m tools.reference

docs-serve: .venv-docs/reward-loop.stamp  ## show the documentation site, and follow changes of its pages
	@NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs serve --no-strict --livereload

# An environment of its own: the tests do not see the packages of the site.
.venv-docs/reward-loop.stamp: pyproject.toml
	@$(PYTHON) -m venv .venv-docs
	@.venv-docs/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[docs]'
	@touch $@

clean:  ## remove environments, caches, outputs and the site
	rm -rf .venv .venv-sglang .venv-docs site .cache .mypy_cache .pytest_cache .ruff_cache outputs
