# `make` lists the targets. Each does its own set-up (Python 3.11+ and Java 17+ are all it needs).
SHELL := /bin/bash
DATA ?= world
export PORT ?= 8080
.DEFAULT_GOAL := help
.PHONY: help setup demo airflow test test-long s3 lint types check docs dist constraints clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | awk -F'\t' '{printf "  make %-12s %s\n", $$1, $$2}'

setup: .venv/.ready ## virtual environment, locked dependencies, Delta jars (the others call it)

.venv/.ready: setup.py constraints.txt scripts/setup.sh scripts/fetch_jars.py scripts/write_spark_defaults.py
	@scripts/setup.sh

demo: setup ## the whole pipeline and a report, on a simulated ad platform (DATA=movielens-100k: on that log)
	@.venv/bin/solaris demo --data $(DATA)

airflow: setup ## a local Airflow with the DAGs and demo data, on 127.0.0.1 (PORT=8080); Ctrl-C ends all of it
	@exec .venv/bin/python scripts/contained.py .venv/bin/python scripts/local_airflow.py

test: setup ## the test suite, in two processes
	@.venv/bin/python -m pytest -n 2 --dist loadfile $(ARGS)

test-long: setup s3 ## what takes minutes: Airflow in a browser, a Spark cluster whose workers die, a slice on S3
	@.venv/bin/python -m pytest -m long $(ARGS)

s3: .jars/s3 ## the jars of s3a://, for a storage root on S3

.jars/s3: scripts/fetch_jars.py | setup
	@echo "s3: resolving hadoop-aws and what it needs"
	@.venv/bin/python scripts/fetch_jars.py s3 >.cache/fetch_jars.log 2>&1 || \
		{ echo "s3: the jars could not be resolved; is there a network? see .cache/fetch_jars.log" >&2; exit 2; }
	@touch $@

lint: setup ## ruff: checks and formatting
	@.venv/bin/ruff check . && .venv/bin/ruff format --check --quiet .

types: setup ## mypy
	@.venv/bin/mypy

check: lint types test ## all that CI checks

docs: setup ## regenerate docs/tables.md and docs/config.md
	@.venv/bin/python scripts/generate_docs.py

dist: setup ## dist/solaris.zip for --py-files (ENVIRONMENT=1: also environment.tar.gz for --archives)
	@.venv/bin/python scripts/build_dist.py $(if $(ENVIRONMENT),--environment)

constraints: setup ## lock every dependency of every extra into constraints.txt
	@env -u UV_FIND_LINKS -u PIP_FIND_LINKS .venv/bin/python -m uv pip compile --quiet --universal --python-version 3.11 \
		--no-annotate --all-extras --custom-compile-command "make constraints" --upgrade --output-file constraints.txt setup.py

clean: ## remove what runs left behind; set-up stays
	@rm -rf .solaris spark-warehouse build dist
