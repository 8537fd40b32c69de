# Two commands on a fresh machine: `make test` and `make demo`. Each sets itself up in .venv.
PYTHON ?= python3

.PHONY: demo test lint bench setup clean

demo: setup
	.venv/bin/regard demo $(if $(FULL),--full)

test: setup lint
	.venv/bin/pytest

lint: setup
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

# Speed beside others, in turn, on this machine: half an hour. Writes bench/RESULTS.md.
bench: setup
	.venv/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[bench]"
	.venv/bin/python bench/train.py --write
	.venv/bin/python bench/generate.py --write
	.venv/bin/python bench/translate.py --write

setup: .venv/ready

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("regard needs Python 3.11 or newer, not %d.%d" % sys.version_info[:2] if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv .venv
	.venv/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[dev]"
	touch $@

clean:
	rm -rf .venv
