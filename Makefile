.PHONY: bench bench-gates demo test test-pythons setup lock lint

demo: setup
	.venv/bin/vllm-qualify demo

# How often the gates are wrong, and their peers': some minutes.
bench-gates: setup
	.venv/bin/python -m infra.bench.gates

# What a verdict costs, beside the same work by hand, and the orchestrator alone: 40 minutes, on slow cores an hour.
bench: setup
	.venv/bin/python -m infra.bench.verdict

test: setup lint
	bash infra/system-packages.sh
	.venv/bin/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder --durations 25

# What needs nothing but Python, on each supported Python of this machine.
test-pythons: setup
	bash infra/test_pythons.sh

lint: setup
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/lint-imports

setup:
	bash infra/setup.sh

lock:
	bash infra/lock.sh
