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

# The reference experiment, planned for about eight hours on 2 cores; what is done is not done again (python experiments/run.py list).
.PHONY: experiments
experiments:
	python experiments/run.py all
	python experiments/run.py results
