# Works from a fresh clone with python3 (3.11 or newer) and make; everything else goes into .venv.

PYTHON ?= python3
# Arguments for the command behind a target, e.g. make run ARGS="--port 6000".
ARGS ?=
# What make run installs: server, gpu (with torch), or run: gpu where there is an NVIDIA GPU.
PROFILE ?= run
DEMO_MODULE ?= examples.demo
BENCH_MODULE ?= benchmarks.compare
BENCH_ADVANTAGES_MODULE ?= benchmarks.advantages
# Through the interpreter, not the scripts beside it: their first line breaks on a path with spaces.
RUN := .venv/bin/python -m

.DEFAULT_GOAL := help
.PHONY: help run test test-long lint format sync proto demo bench bench-peers bench-setup bench-advantages bench-saturation bench-scale bench-growth bench-looking chaos soak fuzz docs install-run install-demo install-dev clean

help: ## List the targets.
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1	\2/p' Makefile

run: install-run ## Start the server on 127.0.0.1:50051, data in ./data, metrics on 127.0.0.1:9464.
	@exec $(RUN) experience_buffer_server serve $(ARGS)

test: lint ## Check style, types and contract, then run all tests.
	$(RUN) pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder $(ARGS)

test-long: install-dev ## Play random histories of a buffer a hundred times as long as make test does.
	NUM_STEPS=1200000 $(RUN) pytest tests/models $(ARGS)

lint: install-dev ## Check style, types and contract.
	$(RUN) ruff check
	$(RUN) ruff format --check
	$(RUN) mypy
	$(RUN) scripts.generate_sync --check
	@if [ -x .venv/bin/buf ]; then echo ".venv/bin/buf lint"; .venv/bin/buf lint; \
	else echo "buf lint: not available on this platform, left out"; fi

format: install-dev ## Reformat the code and fix what can be fixed safely.
	$(RUN) ruff check --fix
	$(RUN) ruff format

sync: install-dev ## Generate the sync client from the async one, after a change there.
	@$(RUN) scripts.generate_sync

proto: install-dev ## Generate the Python code after a change in proto/ (run and test do so too).

demo: install-demo ## Train a small model through a server; DEMO_KILL=1 kills it and the trainer, ARGS=--keep keeps it.
	@exec $(RUN) $(DEMO_MODULE) $(if $(filter-out 0,$(DEMO_KILL)),--kill) $(ARGS)

bench: install-dev ## Measure throughput and latency of this server alone, then what each push costs.
	@$(RUN) $(BENCH_MODULE) --systems ours ours-grpc echo --output bench-output/ours $(ARGS)
	@exec $(RUN) benchmarks.profile_push

bench-peers: install-dev ## Compare with Redis, Reverb and TransferQueue, in turns; ARGS=--quick for a look.
	@exec $(RUN) $(BENCH_MODULE) $(ARGS)

bench-setup: install-dev ## Install the systems that bench-peers compares with, under .peers; needs Python 3.11.
	@exec $(RUN) benchmarks.compare.setup $(ARGS)

bench-advantages: install-dev ## Measure advantages against plain loops, on a GPU too where there is one.
	@exec $(RUN) $(BENCH_ADVANTAGES_MODULE) $(ARGS)

bench-saturation: install-dev ## Measure what a push waits while advantages are computed.
	@exec $(RUN) benchmarks.saturation $(ARGS)

bench-scale: install-dev ## Measure start, memory and batches with a million experiences.
	@exec $(RUN) benchmarks.scale $(ARGS)

bench-growth: install-dev ## Measure what more experiences, buffers, connections cost; ARGS=--ten-million for the index.
	@exec $(RUN) benchmarks.growth $(ARGS)

bench-looking: install-dev ## Measure what looking costs with a million experiences; ARGS="--experiences 100000" for a look.
	@exec $(RUN) benchmarks.looking $(ARGS)

chaos: install-dev ## Kill servers under load 200 times; fail if anything is lost or comes back.
	@exec $(RUN) tests.chaos $(ARGS)

soak: install-dev ## Serve mixed load for ten minutes; fail unless everything stays flat.
	@exec $(RUN) tests.soak $(ARGS)

fuzz: install-dev ## Give every reader a million hostile inputs; ARGS="push --runs 10000" for less.
	@$(RUN) tests.fuzz.install
	@exec $(RUN) tests.fuzz $(ARGS)

docs: install-dev ## Build the documentation's site into ./site; ARGS=serve shows it while you write.
	@NO_MKDOCS_2_WARNING=1 $(RUN) mkdocs $(if $(ARGS),$(ARGS),build --quiet) && \
	if [ -z "$(ARGS)" ]; then echo "site/index.html is its first page; ARGS=serve shows it with its search"; fi

install-run:
	@$(PYTHON) scripts/install.py $(PROFILE)

install-demo:
	@$(PYTHON) scripts/install.py demo

install-dev:
	@$(PYTHON) scripts/install.py dev

clean: ## Remove .venv, generated code and caches; ./data stays.
	rm -rf .venv client/experience_buffer/v1 dist build site .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find client server tests examples benchmarks scripts -name __pycache__ -type d -exec rm -rf {} +
