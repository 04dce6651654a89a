# make demo       set up the library and run its main job on real attention inputs
# make test       set up and run what each change must pass: lint, types, tests, documentation
# make test-torch run, on a CPU, what needs torch; in an environment of its own
# make test-triton run, on a CPU, what needs Triton, by its interpreter; in the same environment
# make check      run what a change of one algorithm or folder wants: A=flash2, or A=tests/flashlab/views
# make test-long  run what takes too long for make test, and what needs JAX: hours on 2 cores (JOBS=16 where there are 16).
#                 PART=3/8 runs the third of eight parts
# make lab        open JupyterLab at the first lesson, in flashlab-lessons: copies that no cell has run in
# make lessons    renew notebooks/*.ipynb, which have no outputs, and run them into notebooks/outputs, for the site
# make docs       build the site into out/site, and make lite
# make lite       build out/site/lite: lessons 00 to 04, 11 to 15 in JupyterLite, whose Python (Pyodide) runs in the browser
# make figures    draw README, pages, tables and pictures anew from docs/results
# make stale      list what was measured of older kernels, with the commands that measure it again
# make lock       renew requirements/*.txt
# make clean      remove what these made

PYTHON ?= python3
BIN := .venv/bin
TORCH := .venv-torch/bin
LITE := .venv-lite/bin
COMPILE := uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header
INSTALL := -m pip install --quiet --disable-pip-version-check
WITH_THE_LOWEST := tests/simulator tests/flashlab/views tests/flashlab/cli/test_process.py
JOBS ?= 2
PYTEST := -m pytest -n $(JOBS) --dist loadgroup
PART ?= 1/1
# Tests start Python hundreds of times: what it has compiled is kept, also where the environment says otherwise.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo check test types tests test-torch test-triton test-long browser lab lessons docs lite figures stale lock clean

demo: .venv/.demo
	$(BIN)/flashlab compare --sample --out out
	@echo "next: . .venv/bin/activate"
	@echo "then: flashlab trace standard --tile 32x32 --against flash2 --html out/player.html"

test:
	@$(MAKE) --no-print-directory --jobs=2 .venv/.test browser
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	@$(MAKE) --no-print-directory --jobs=2 types tests

# It is one process for a minute, and tests have cores to spare while they begin and end.
types: .venv/.test
	$(BIN)/basedpyright

tests: .venv/.test
	$(BIN)/python $(PYTEST)

check: .venv/.test
	$(BIN)/ruff check
	$(BIN)/python $(PYTEST) $(if $(wildcard $(A)),$(A),-m "not long and not gpu" -k "$(A)")

# None asks for a GPU; on a machine with one, .venv-torch/bin/pytest -m torch runs what needs both.
test-torch: .venv-torch/.torch
	FLASHLAB_REQUIRE=compiler,torch,transformers $(TORCH)/python $(PYTEST) -m "(torch or transformers) and not triton and not gpu and not long"

test-triton: .venv-torch/.torch
	TRITON_INTERPRET=1 FLASHLAB_REQUIRE=torch,triton $(TORCH)/python $(PYTEST) -m "triton and not gpu and not long"

test-long: .venv/.test .venv-torch/.jax .venv-lowest/.lowest browser
	FLASHLAB_PART=$(PART) $(BIN)/python $(PYTEST) -m "long and not jax and not triton"
	FLASHLAB_PART=$(PART) HYPOTHESIS_PROFILE=long $(BIN)/python $(PYTEST) -m "hypothesis and not long and not jax and not triton"
	FLASHLAB_PART=$(PART) .venv-lowest/bin/python $(PYTEST) -W default -m "long or not long" $(WITH_THE_LOWEST)
	FLASHLAB_PART=$(PART) TRITON_INTERPRET=1 FLASHLAB_REQUIRE=torch,triton $(TORCH)/python $(PYTEST) -m "long and triton and not gpu"
	FLASHLAB_PART=$(PART) FLASHLAB_REQUIRE=compiler,jax $(TORCH)/python $(PYTEST) -m "jax and not gpu"

lab: .venv/.lab
	$(BIN)/flashlab lessons

lessons: .venv/.test
	$(BIN)/python notebooks/source/lessons.py build

docs: .venv/.test
	$(BIN)/sphinx-build --quiet --fail-on-warning --keep-going --fresh-env --doctree-dir build/doctrees docs out/site
	@$(MAKE) --no-print-directory lite || echo "without lessons in the browser: JupyterLite couldn't be built"
	@echo "out/site/index.html"

# It is built from what is here. A lesson that is opened then fetches Pyodide, and its NumPy and matplotlib, from a network.
lite: .venv/.test .venv-lite/.lite
	rm -rf build/lite
	$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir build/lite .
	$(BIN)/python -m docs._site.lite build/lite/files
	cd build/lite && ../../$(LITE)/jupyter lite build --contents files --piplite-wheels *.whl --output-dir site
	mkdir -p out/site && rm -rf out/site/lite && mv build/lite/site out/site/lite
	@echo "python -m http.server --directory out/site, and then http://localhost:8000/lite/lab/index.html"

figures: .venv/.test browser
	$(BIN)/python -m docs._site

stale: .venv/.test
	@$(BIN)/python -m docs._site.evidence

# The stamps remember what was installed; pyproject.toml is the package's own, whose editable install it decides.
%/.demo: requirements/demo.txt pyproject.toml | %
	$*/bin/python $(INSTALL) --require-hashes --requirement $<
	$*/bin/python $(INSTALL) --no-deps --no-build-isolation --no-index --editable .
	@touch $@

%/.test: requirements/test.txt %/.demo
	$*/bin/python $(INSTALL) --require-hashes --requirement $<
	@touch $@

.venv/.lab: requirements/lab.txt .venv/.demo
	$(BIN)/python $(INSTALL) --require-hashes --requirement $<
	@touch $@

.PRECIOUS: %/.demo %/.test

# Frameworks whose arrays the library takes are in no lock: they bring gigabytes, and a build for each kind of machine.
.venv-torch/.torch: requirements/torch.in .venv-torch/.test
	$(TORCH)/python $(INSTALL) --requirement $<
	@touch $@

.venv-torch/.jax: requirements/jax.in .venv-torch/.torch
	$(TORCH)/python $(INSTALL) --requirement $<
	@touch $@

.venv-lite/.lite: requirements/lite.in | .venv-lite
	$(LITE)/python $(INSTALL) --requirement $<
	@touch $@

# The lowest versions that pyproject.toml allows. Old libraries warn of new ones, which is no fault of ours.
.venv-lowest/.lowest: requirements/lowest.txt pyproject.toml | .venv-lowest
	.venv-lowest/bin/python $(INSTALL) --require-hashes --requirement $<
	@touch $@

# The player is tested in Chromium. As root on Debian, as in CI, it is installed; elsewhere a line says what is missing.
browser:
	@for name in chromium chromium-browser google-chrome google-chrome-stable chrome; do \
	    command -v $$name >/dev/null && exit 0; \
	done; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq --yes --no-install-recommends chromium >/dev/null; \
	else echo "no Chromium: the player's tests need one (on Debian or Ubuntu: apt-get install chromium)"; fi

# It begins as a copy of .venv, which takes seconds where installing all of that once more takes a minute.
.venv-torch: | .venv/.test
	rm -rf $@.part
	cp -a .venv $@.part
	grep -lI '^#!.*/\.venv/bin/' $@.part/bin/* | xargs sed -i.was '1s|/\.venv/bin/|/$@/bin/|'
	rm -f $@.part/bin/*.was
	mv $@.part $@

.venv .venv-lite .venv-lowest:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "$(PYTHON) is older than Python 3.11: name a newer one, as in  make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 2; }
	$(PYTHON) -m venv $@

lock:
	$(COMPILE) pyproject.toml requirements/demo.in --output-file requirements/demo.txt
	$(COMPILE) pyproject.toml requirements/demo.in requirements/test.in --extra docs --output-file requirements/test.txt
	$(COMPILE) pyproject.toml requirements/lowest.in --resolution lowest-direct --output-file requirements/lowest.txt
	$(COMPILE) pyproject.toml requirements/demo.in --extra lab -c requirements/test.txt --output-file requirements/lab.txt

clean:
	rm -rf .venv .venv-torch .venv-lite .venv-lowest out build dist docs/lessons docs/measured docs/commands docs/schemas docs/results/schema .pytest_cache .ruff_cache .hypothesis
