# Each target sets up what it needs in one virtual environment, .venv; a second run starts at once.
#
#   make demo          train the example on the lazy device
#   make test          run the tests, the slow ones left out, in two processes: WORKERS=2
#   make test-python   run the semantics and the models without the extension in C++
#   make test-asan     run what goes through the extension with AddressSanitizer and UBSan
#   make fuzz          compare random programs with eager in every mode, for a while: SECONDS=600 JOBS=2; goes on
#                      where the last run ended
#   make soak          10,000 steps of several workloads, with memory and caches watched: STEPS=10000
#   make test-slow     run the slow ones
#   make faults        let each call across an interface fail once, and write the matrix of docs/reliability_faults.md
#   make test-torch    run the tests with another PyTorch, in an environment of its own: TORCH=2.15.0
#   make test-pytorch  run PyTorch's own tests on the device: SOURCE=<a PyTorch source tree>; hours
#   make test-distributed  train on 2 and 4 processes, and let ranks fail
#   make test-browser  open reports in headless Chromium, which must be on the PATH
#   make test-backends run the tests of Inductor and XLA too, which compile for minutes
#   make test-ecosystem run transformers, accelerate, Lightning and others on the device, in an environment of its own
#   make audit         download every pinned package, and compare it with requirements/hashes.txt
#   make release-check install the wheel and the source distribution into an empty environment and use them from there
#   make conformance   run the conformance suite on a backend: BACKEND=inductor
#   make check         formatting, lint, types, architecture, documentation
#   make ops           compare every operator, module and optimizer of PyTorch's databases with eager
#   make bench-trace   measure what recording an operation costs
#   make bench         compare torch_ltc with eager, the original and torch.compile; hours
#   make bench-quick   a short form of it, under five minutes
#   make bench-gpu     the same on a CUDA device
#   make docs          build the documentation site into docs/_build/html; warnings are errors
#   make docs-examples write what the examples of the documentation print now into its pages
#   make screenshots   make the pictures of the report in docs/ anew

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check --quiet
RUN := $(VENV)/bin/python
BACKEND ?= torchscript
WORKERS ?= 2
SECONDS ?= 600
JOBS ?= 2
STEPS ?= 10000
CONSTRAINTS := requirements/constraints.txt
# Each of the processes has one core; the tests start hundreds more, which need not compile the package anew each time.
TEST_ENV := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=
# The extension in C++, where there is a compiler; whatever LTC_NATIVE asks of the tests, it need not be there yet.
BUILD := LTC_NATIVE=0 $(VENV)/bin/python -m torch_ltc build --if-possible
# What goes through the extension: tensors, storages, generators, threads, known calls and programs, replays, eager regions,
# interrupts, the end of a process.
ASAN_TESTS := tests/semantics/test_aliasing.py tests/semantics/test_random.py tests/semantics/test_serialization.py \
	tests/semantics/test_resize_and_views.py tests/semantics/test_threads.py tests/semantics/test_gradients.py \
	tests/semantics/test_native.py tests/semantics/test_native_hits.py tests/semantics/test_native_calls.py \
	tests/semantics/test_native_composites.py tests/semantics/test_steady.py tests/semantics/test_replay_here.py \
	tests/semantics/test_replays.py tests/semantics/test_eager_region.py tests/semantics/test_interrupts.py
# Build requirements are in the environment already: an isolated build would download its own.
INSTALL := $(PIP) install --no-build-isolation --constraint $(CONSTRAINTS)
# An environment with another PyTorch: TORCH is its version, PYTHON the interpreter.
TORCH ?= 2.15.0
ECOSYSTEM_VENV := .venv-ecosystem
TORCH_VENV := .venv-torch-$(TORCH)$(if $(filter file,$(origin PYTHON)),,-$(notdir $(PYTHON)))

.PHONY: demo test test-ecosystem audit release-check test-distributed test-python test-asan faults fuzz soak test-slow test-torch test-pytorch test-browser screenshots test-backends conformance check ops bench-trace bench bench-quick \
	bench-gpu docs docs-examples clean
.DELETE_ON_ERROR:

demo: $(VENV)/installed-demo
	$(BUILD)
	$(RUN) examples/digits.py

test: $(VENV)/installed-test
	$(BUILD)
	$(TEST_ENV) $(RUN) -m pytest -n $(WORKERS) --dist worksteal \
		-m "not slow and not compilers and not browser and not distributed" --durations=10 $(ARGS)

# The package without the extension in C++.
test-python: $(VENV)/installed-test
	LTC_NATIVE=0 $(TEST_ENV) $(RUN) -m pytest -n $(WORKERS) --dist worksteal \
		-m "not slow and not compilers and not browser and not distributed" tests/semantics tests/models $(ARGS)

# The extension with AddressSanitizer and UBSan, in a cache folder of its own. Python itself leaks at its end.
test-asan: $(VENV)/installed-test
	XDG_CACHE_HOME=$(CURDIR)/build/asan LTC_NATIVE=0 $(RUN) -m torch_ltc build --sanitize
	XDG_CACHE_HOME=$(CURDIR)/build/asan LTC_NATIVE=1 $(TEST_ENV) \
		LD_PRELOAD="$$($${CXX:-c++} -print-file-name=libasan.so) $$($${CXX:-c++} -print-file-name=libubsan.so)" \
		ASAN_OPTIONS=detect_leaks=0:handle_segv=0 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 \
		$(RUN) -m pytest $(or $(ARGS),$(ASAN_TESTS))

# Counts are kept in build/fuzz/journal.json, failing programs in build/fuzz/failures.
fuzz: $(VENV)/installed-test
	$(BUILD)
	$(TEST_ENV) $(RUN) -m tests.fuzz --seconds $(SECONDS) --jobs $(JOBS) $(ARGS)

soak: $(VENV)/installed-test
	$(BUILD)
	$(TEST_ENV) $(RUN) -m tests.fuzz.soak --steps $(STEPS) $(ARGS)

test-slow: $(VENV)/installed-test
	$(RUN) -m pytest -m "slow and not compilers and not browser" --durations=10 $(ARGS)

faults: $(VENV)/installed-test
	$(TEST_ENV) $(RUN) -m tests.faults.run --docs docs/reliability_faults.md $(ARGS)

test-torch: $(TORCH_VENV)/installed-test
	LTC_NATIVE=0 $(TORCH_VENV)/bin/python -m torch_ltc build --if-possible
	$(TEST_ENV) $(TORCH_VENV)/bin/python -m pytest -n $(WORKERS) --dist worksteal \
		-m "not slow and not compilers and not browser and not distributed" --durations=10 $(ARGS)

# Several processes at a time: one after the other.
test-distributed: $(VENV)/installed-test
	$(TEST_ENV) $(RUN) -m pytest --durations=10 tests/distributed $(ARGS)

# The libraries that people use, with what they cost in a table of the documentation.
test-ecosystem: $(ECOSYSTEM_VENV)/installed
	$(TEST_ENV) $(ECOSYSTEM_VENV)/bin/python -m pytest tests/ecosystem --figures build/ecosystem.json $(ARGS)
	$(if $(ARGS),,$(ECOSYSTEM_VENV)/bin/python -m tests.ecosystem.table build/ecosystem.json docs/ecosystem.md)

# What an index serves is what was looked at when the versions were pinned.
audit: $(VENV)/installed-check
	$(RUN) scripts/audit.py $(ARGS)

release-check: $(VENV)/installed-torch
	$(RUN) scripts/release_check.py

# Results are kept in build/pytorch: a run that was stopped goes on.
test-pytorch: $(VENV)/installed-test
	@test -f "$(SOURCE)/version.txt" || { echo "SOURCE=<a PyTorch source tree> is needed"; exit 2; }
	$(TEST_ENV) $(RUN) -m tests.pytorch.run --source $(SOURCE) --docs docs/conformance.md $(ARGS)

test-browser: $(VENV)/installed-browser
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null || \
		{ echo "no Chromium on the PATH; install it, on Debian and Ubuntu: apt-get install chromium"; exit 2; }
	$(RUN) -m pytest -m browser tests/browser $(ARGS)

screenshots: $(VENV)/installed-browser
	$(RUN) -m tests.browser.screenshots

test-backends: $(VENV)/installed-backends
	$(RUN) -m pytest -m "not slow" --durations=10 tests/backends tests/conformance tests/semantics/test_backends.py $(ARGS)

conformance: $(VENV)/installed-backends
	$(RUN) -m torch_ltc conformance $(BACKEND) $(ARGS)

check: $(VENV)/installed-check $(VENV)/installed-test
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports
	$(RUN) -m pytest --quiet tests/docs

ops: $(VENV)/installed-test
	$(RUN) -m tests.ops.sweep $(ARGS)
	$(if $(ARGS),,$(RUN) -m tests.ops.databases)

bench-trace: $(VENV)/installed-test
	$(RUN) -m benchmarks.trace $(ARGS)

bench: $(VENV)/installed-backends $(VENV)/installed-demo
	$(RUN) -m benchmarks.run $(ARGS)
	$(RUN) -m benchmarks.bars --from benchmarks/results/cpu.json

bench-quick: $(VENV)/installed-backends $(VENV)/installed-demo
	$(RUN) -m benchmarks.run --quick $(ARGS)

bench-gpu: $(VENV)/installed-backends $(VENV)/installed-demo
	$(RUN) -m benchmarks.gpu $(ARGS)

# The pages of modules are made anew each time: one of a module that is gone would be an error.
docs: $(VENV)/installed-docs
	rm -rf docs/generated
	$(RUN) -m sphinx --fail-on-warning --keep-going --jobs auto --doctree-dir docs/_build/doctrees docs docs/_build/html
	@echo "open docs/_build/html/index.html"

docs-examples: $(VENV)/installed-test
	$(RUN) scripts/run_examples.py

clean:
	rm -rf $(VENV) $(ECOSYSTEM_VENV) .venv-torch-* build docs/_build docs/generated .mypy_cache .ruff_cache .pytest_cache .import_linter_cache

$(VENV)/installed-torch: requirements/torch.txt $(CONSTRAINTS)
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --constraint $(CONSTRAINTS) setuptools --requirement requirements/torch.txt
	touch $@

# The package is installed with each group by itself, so that the demo does not wait for the test tools.
$(VENV)/installed-%: $(VENV)/installed-torch pyproject.toml
	$(INSTALL) --editable ".[$*]"
	touch $@

# Each PyTorch has its own wish for setuptools.
$(TORCH_VENV)/installed-test: pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -m venv $(TORCH_VENV)
	grep -vE '^(torch|setuptools)==' $(CONSTRAINTS) > $(TORCH_VENV)/constraints.txt
	$(TORCH_VENV)/bin/python -m pip --disable-pip-version-check --quiet install \
		--constraint $(TORCH_VENV)/constraints.txt setuptools torch==$(TORCH)
	$(TORCH_VENV)/bin/python -m pip --disable-pip-version-check --quiet install --no-build-isolation \
		--constraint $(TORCH_VENV)/constraints.txt --editable ".[test]"
	touch $@

$(ECOSYSTEM_VENV)/installed: requirements/ecosystem.txt requirements/vision.txt pyproject.toml
	$(PYTHON) -m venv $(ECOSYSTEM_VENV)
	$(ECOSYSTEM_VENV)/bin/python -m pip --disable-pip-version-check --quiet install --requirement requirements/ecosystem.txt
	$(ECOSYSTEM_VENV)/bin/python -m pip --disable-pip-version-check --quiet install --no-deps --upgrade \
		--target $(ECOSYSTEM_VENV)/vision --requirement requirements/vision.txt
	$(ECOSYSTEM_VENV)/bin/python -m pip --disable-pip-version-check --quiet install --no-build-isolation --no-deps --editable .
	touch $@

.PRECIOUS: $(VENV)/installed-torch $(VENV)/installed-demo $(VENV)/installed-test $(VENV)/installed-check \
	$(VENV)/installed-backends $(VENV)/installed-browser $(VENV)/installed-docs
