.PHONY: demo test setup lock lint

demo: setup
	.venv/bin/vllm-qualify demo

test: setup lint
	bash infra/system-packages.sh
	.venv/bin/python -m pytest --numprocesses 2 --dist loadfile --durations 25

lint: setup
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/lint-imports

setup:
	bash infra/setup.sh

lock:
	bash infra/lock.sh
