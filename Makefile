# What CI runs, in the current environment: pip install -c constraints.txt -e '.[test]' first.
.PHONY: check test lint

check: test lint

test:
	python -m pytest -n 2 --dist loadfile

lint:
	ruff check .
	ruff format --check .
	pyright
	lint-imports
