# `make demo` and `make test` do all the set-up that they need, in .venv.

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
OLDEST := .venv-oldest
NEWEST := $(VENV)/newest
NEWEST_TRANSFORMERS := 5.23.0

.PHONY: demo test test-oldest test-newest test-newest-calls test-newest-steps lint format docs bench figures supported-models clean

demo: $(VENV)/installed
	$(RUN) -m examples.demo

test: $(VENV)/installed $(VENV)/ecosystem
	$(RUN) -m pytest
	PYTHONPATH=$(VENV)/torchao $(RUN) -m pytest tests/ecosystem/test_quantized.py -k torchao

# On the oldest versions of everything that pyproject.toml allows. What is in tests/ecosystem
# follows the newest transformers, and neither trees nor what of the kernels runs on the CPU know
# torch or transformers.
test-oldest: $(OLDEST)/installed
	$(OLDEST)/bin/python -m pytest --ignore tests/ecosystem --ignore tests/test_tree.py \
	  --ignore tests/test_tree_history.py --ignore tests/test_softmax.py \
	  --ignore tests/test_work_list.py --ignore tests/test_partial_state.py

# The newest transformers that is supported, in front of the one in .venv, under what meets it: in
# two parts, for `make -j 2`.
test-newest: test-newest-calls test-newest-steps

test-newest-calls: $(NEWEST)/transformers-$(NEWEST_TRANSFORMERS).dist-info
	PYTHONPATH=$(NEWEST) $(RUN) -m pytest tests/test_cli.py tests/test_cli_endings.py \
	  tests/test_fallback.py tests/test_memory.py tests/test_own_generate.py \
	  tests/test_parity.py tests/test_patch.py tests/test_patch_threads.py \
	  tests/test_returned_cache.py tests/test_self_consistency.py tests/test_sharing.py \
	  tests/test_supported_models.py

test-newest-steps: $(NEWEST)/transformers-$(NEWEST_TRANSFORMERS).dist-info
	PYTHONPATH=$(NEWEST) $(RUN) -m pytest tests/test_columns.py tests/test_compile.py \
	  tests/test_draw.py tests/test_fuse_rope.py tests/test_gates.py

lint: $(VENV)/installed
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	git ls-files '*.cu' '*.cuh' '*.cpp' '*.h' | xargs -r $(VENV)/bin/clang-format --dry-run --Werror

format: $(VENV)/installed
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .
	git ls-files '*.cu' '*.cuh' '*.cpp' '*.h' | xargs -r $(VENV)/bin/clang-format -i

docs: $(VENV)/docs
	$(VENV)/bin/mkdocs build --strict

bench: $(VENV)/installed
	$(RUN) -m benchmarks.bench_generate

figures: $(VENV)/installed
	$(RUN) -m docs.figures
	$(RUN) -m docs.tree_figures
	$(RUN) -m docs.kernel_figure

supported-models: $(VENV)/installed
	$(RUN) -m docs.supported_models

clean:
	rm -rf $(VENV) $(OLDEST) build site *.egg-info

# torch first and by its exact version: a range would let pip choose a newer build.
$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("Python 3.10 or newer is needed" if sys.version_info < (3, 10) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --upgrade pip
	$(RUN) -m pip install --quiet --constraint constraints.txt "$$(grep '^torch==' constraints.txt)"
	$(RUN) -m pip install --quiet --constraint constraints.txt --editable ".[demo,test,lint]"
	touch $@

# What only tests/ecosystem needs. torchao lies apart: where it can be found, whoever imports
# transformers gets its warnings.
$(VENV)/ecosystem: $(VENV)/installed
	$(RUN) -m pip install --quiet --constraint constraints.txt --editable ".[ecosystem]"
	rm -rf $(VENV)/torchao
	$(RUN) -m pip install --quiet --constraint constraints.txt --no-deps --target $(VENV)/torchao torchao
	touch $@

# The docs are built from the sources: nothing of the package is imported.
$(VENV)/docs: $(VENV)/installed
	$(RUN) -m pip install --quiet --constraint constraints.txt --editable ".[docs]"
	touch $@

$(OLDEST)/installed: pyproject.toml constraints-oldest.txt
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install --quiet --upgrade pip
	$(OLDEST)/bin/python -m pip install --quiet --constraint constraints-oldest.txt --editable ".[cli,test]"
	touch $@

$(NEWEST)/transformers-$(NEWEST_TRANSFORMERS).dist-info: $(VENV)/installed
	rm -rf $(NEWEST)
	$(RUN) -m pip install --quiet --no-deps --target $(NEWEST) transformers==$(NEWEST_TRANSFORMERS)
	touch $@
