# Two commands do all the set-up: `make demo` and `make test`. Both make .venv when it is missing or older than pyproject.toml.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# torch first and pinned: a resolver that meets only a range would fetch a CUDA build of several GB.
TORCH := torch==2.13.0
BENCH := .venv-bench
EXTRAS := .venv-extras

.PHONY: demo test test-full test-extras check bench clean

$(VENV)/.ready: pyproject.toml compat/pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH) numpy
	printf '$(TORCH)\n' > $(VENV)/constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(VENV)/constraints.txt -e '.[examples,test,dev]'
	touch $@

demo: $(VENV)/.ready
	$(BIN)/hasten launch --cpu --num_processes 2 examples/language_model.py

test: $(VENV)/.ready
	$(BIN)/python -m pytest -n 2 --dist loadfile -q

test-full: $(VENV)/.ready
	$(BIN)/python -m pytest -n 2 --dist loadfile -q --full

# With transformers, PEFT and the like, which .venv does without. PEFT asks for accelerate; hasten does not import it.
test-extras: $(EXTRAS)/.ready
	$(EXTRAS)/bin/python -m pytest -n 2 --dist loadfile -q tests/extras

$(EXTRAS)/.ready: pyproject.toml
	$(PYTHON) -m venv $(EXTRAS)
	$(EXTRAS)/bin/python -m pip install --quiet --disable-pip-version-check $(TORCH) numpy
	printf '$(TORCH)\n' > $(EXTRAS)/constraints.txt
	$(EXTRAS)/bin/python -m pip install --quiet --disable-pip-version-check -c $(EXTRAS)/constraints.txt -e '.[test,test-extras]'
	touch $@

check: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(BENCH)/.ready
	$(BENCH)/bin/python -m benchmarks

$(BENCH)/.ready: pyproject.toml
	$(PYTHON) -m venv $(BENCH)
	$(BENCH)/bin/python -m pip install --quiet --disable-pip-version-check $(TORCH) numpy
	printf '$(TORCH)\n' > $(BENCH)/constraints.txt
	$(BENCH)/bin/python -m pip install --quiet --disable-pip-version-check -c $(BENCH)/constraints.txt -e '.[benchmark,examples,test]'
	touch $@

clean:
	rm -rf $(VENV) $(BENCH) $(EXTRAS) build dist runs .pytest_cache .mypy_cache .ruff_cache .hypothesis
