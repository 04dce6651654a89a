# make demo    set up the library and run its main job on real attention inputs
# make test    set up and run everything that is checked: lint, types, tests, documentation
# make lab     open JupyterLab at the first lesson
# make lessons run the lessons' sources, and renew notebooks/*.ipynb with their outputs
# make docs    build the site into out/site
# make lock    renew requirements/*.txt
# make clean   remove what these made

PYTHON ?= python3
BIN := .venv/bin
COMPILE := uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header
SETUP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: demo test browser lab lessons docs lock clean

demo: .venv/.demo
	$(BIN)/flashlab compare --sample --out out

test: .venv/.test browser
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/basedpyright
	$(BIN)/python -m pytest -n 2 --dist loadgroup

lab: .venv/.lab
	$(BIN)/jupyter lab notebooks/00_memory.ipynb

lessons: .venv/.test
	$(BIN)/python notebooks/source/lessons.py build

docs: .venv/.test
	$(BIN)/sphinx-build --quiet --fail-on-warning --keep-going --fresh-env --doctree-dir build/doctrees docs out/site
	@echo "out/site/index.html"

# The stamps remember what was installed; pyproject.toml is the package's own, whose editable install it decides.
.venv/.demo: requirements/demo.txt pyproject.toml | .venv
	$(SETUP) --require-hashes --requirement $<
	$(SETUP) --no-deps --no-build-isolation --no-index --editable .
	@touch $@

.venv/.test: requirements/test.txt .venv/.demo
	$(SETUP) --require-hashes --requirement $<
	@touch $@

.venv/.lab: requirements/lab.txt .venv/.demo
	$(SETUP) --require-hashes --requirement $<
	@touch $@

# The player is tested in Chromium. As root on Debian, as in CI, it is installed; elsewhere a line says what is missing.
browser:
	@for name in chromium chromium-browser google-chrome google-chrome-stable chrome; do \
	    command -v $$name >/dev/null && exit 0; \
	done; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq --yes --no-install-recommends chromium >/dev/null; \
	else echo "no Chromium: the player's tests need one (on Debian or Ubuntu: apt-get install chromium)"; fi

.venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "$(PYTHON) is older than Python 3.11: name a newer one, as in  make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 2; }
	$(PYTHON) -m venv $@

lock:
	$(COMPILE) pyproject.toml requirements/demo.in --output-file requirements/demo.txt
	$(COMPILE) pyproject.toml requirements/demo.in requirements/test.in --extra docs --output-file requirements/test.txt
	$(COMPILE) pyproject.toml requirements/demo.in --extra lab -c requirements/test.txt --output-file requirements/lab.txt

clean:
	rm -rf .venv out build dist docs/lessons docs/measured .pytest_cache .ruff_cache .hypothesis
