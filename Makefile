.PHONY: bench bench-gates bench-paths bench-scale chaos demo test pytest test-quick test-pythons setup uv orchestrator engine packages lock bump lint sbom

# Both environments are built side by side, and so is what else needs only one of them.
MAKEFLAGS += --jobs=3

QUICK = not (engine or docker or s3 or browser or fleet or prefect or thorough)

# Some processes wait while others compute: with three of them two cores rest for a tenth of the time.
SIDE_BY_SIDE = --numprocesses 4 --dist loadfile --no-loadscope-reorder --durations 25 $(ENDS)

# A run that goes wrong in many tests, or hangs, ends by itself and says why, before somebody ends it and it says nothing.
ENDS = --maxfail 40 --session-timeout 5230

# pytest keeps the tests that it has compiled; where Python may not write bytecode, each process compiles them all, for ten seconds.
pytest test-quick bump: export PYTHONDONTWRITEBYTECODE =
test-quick bump: export TESTS_IN_MEMORY = true

demo: setup
	.venv/bin/vllm-qualify demo

# How often the gates are wrong, and how often other projects' gates are: three quarters of an hour on two cores.
bench-gates: setup
	.venv/bin/python -m infra.bench.gates

# How surely the paths show a fault of a busy server, and how often they refuse a healthy one: three quarters of an hour on two cores.
bench-paths: setup
	.venv/bin/python -m infra.bench.paths

# How long publishing, approving and finding take with 10,000 reports, over 100, in a directory and in radosgw: half an hour.
bench-scale: setup
	.venv/bin/python -m infra.bench.scale

# The cost of a verdict, compared with the same work by hand, and of the orchestrator alone: 40 minutes, on slow cores an hour.
bench: setup
	.venv/bin/python -m infra.bench.verdict

test: lint pytest

pytest: packages setup
	.venv/bin/python -m pytest $(SIDE_BY_SIDE)

# The tests that start no service, neither an engine nor a flow of Prefect's, and so need .venv alone. Thorough ones are left out.
test-quick: orchestrator
	.venv/bin/python -m pytest $(SIDE_BY_SIDE) -m "$(QUICK)"

# Random schedules of faults and kills, many more than the tests have, over decisions and over whole qualifications: an hour on
# two cores, some minutes on sixteen.
chaos: setup
	VLLM_QUALIFY_CHAOS=2000 .venv/bin/python -m pytest --numprocesses auto --dist worksteal --timeout 14400 tests/faults/test_chaos.py tests/faults/test_chaos_run.py

# The tests that need only Python, on each supported Python of this machine.
test-pythons: setup
	bash infra/test_pythons.sh

lint: orchestrator
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/lint-imports

setup: orchestrator engine

orchestrator engine: uv
	bash infra/setup.sh $@

uv:
	bash infra/setup.sh uv

packages:
	bash infra/system-packages.sh

lock:
	bash infra/lock.sh

# What we build on, in its newest versions: locks, tries and, if nothing breaks, leaves the locks in the tree. PACKAGE names some alone.
bump: orchestrator
	.venv/bin/python -m infra.bump --quick "$(QUICK)" --processes 4 $(PACKAGE)

# A bill of materials (CycloneDX) of the Python packages in the images.
sbom: orchestrator
	.venv/bin/cyclonedx-py requirements --pyproject pyproject.toml --mc-type application --output-reproducible \
	  --output-file sbom.cdx.json infra/requirements/orchestrator.txt
