# Two commands do everything on a fresh clone: `make demo` and `make test`.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/installed

.PHONY: setup demo test bench check format docs serve notebooks wheel hashes clean

setup: $(INSTALLED)

# torch goes first, alone and pinned: an open range would pull gigabytes of CUDA.
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: $(INSTALLED)
	$(BIN)/scalelong demo

# One thread for each of two workers: small tensors gain nothing from more.
test: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 -q $(ARGS)

# Takes about an hour; let nothing else run. OFFICIAL=PATH, a checkout of the authors' code, measures that too.
bench: $(INSTALLED)
	$(BIN)/scalelong lab bench --out bench.json $(if $(OFFICIAL),--official $(OFFICIAL)) $(ARGS)

check: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The site, in build/site: strict, so that a broken link or an unknown name fails, and without a network.
docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "build/site/index.html is there; make serve shows it"

serve: docs
	$(BIN)/python -m http.server --bind 127.0.0.1 --directory build/site 8000

# Runs the notebooks and keeps what they print and draw, for the site.
notebooks: $(INSTALLED)
	$(BIN)/python -m website.notebooks

# Wheel and sdist, in dist/, and the wheel tried in an empty environment with torch alone.
wheel: $(INSTALLED)
	rm -rf dist
	$(BIN)/python -m hatchling build -d dist
	OMP_NUM_THREADS=1 $(BIN)/pytest -q -m slow tests/test_packaging.py

# Everything that `scalelong[all]` installs on this machine, with versions and hashes, in build/requirements.txt.
hashes: $(INSTALLED)
	mkdir -p build
	$(BIN)/python -m pip install --quiet --dry-run --ignore-installed --constraint constraints.txt --report build/report.json '.[all]'
	$(BIN)/python -m website.hashes build/report.json > build/requirements.txt

clean:
	rm -rf .venv .pytest_cache .ruff_cache build dist
