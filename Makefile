# Ballast. `make help` lists the targets.
#
# Everything built or downloaded lies under $(BALLAST_CACHE), outside the clone, so that a second clone rebuilds only what is its own.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

export BALLAST_CACHE ?= $(HOME)/.cache/ballast
export CARGO_TARGET_DIR ?= $(BALLAST_CACHE)/target
export CARGO_TERM_COLOR ?= auto

export BALLAST_BIN ?= $(CARGO_TARGET_DIR)/release/ballast
# The dev build of the harness, which `check` needs anyway, is quick enough where nothing is measured.
E2E := $(CARGO_TARGET_DIR)/debug/ballast-e2e

MEMBERS ?= 1
ROUNDS ?= 3
KEYS ?= 1000000
SEEDS ?= 5
SIM_SEEDS ?= 200
OPS ?= 500
# Of the server in `make diff`; its own default when empty.
ENGINE ?=

.PHONY: help
help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

# ---- run ---------------------------------------------------------------------------------------------------------------------

.PHONY: up down status run
up: build ## a real Kubernetes stored in Ballast, the operator, and a store of its making under a second control plane
	$(E2E) up

down: build ## remove every trace of `make up`
	$(E2E) down

status: build ## what runs and where its kubeconfigs are
	$(E2E) status

run: build-server ## only a store on 127.0.0.1:2379, data in ./data, for etcdctl; MEMBERS=3 for a cluster on 2379, 12379, 22379
	exec ./.ci/run-members $(BALLAST_BIN) $(MEMBERS)

# ---- build -------------------------------------------------------------------------------------------------------------------

.PHONY: packages build build-server
packages: ## the Debian packages that builds and tests need; does nothing when they are there
	./.ci/packages

build-server: packages
	cargo build --release --locked -p ballast-server

build: packages
	cargo build --release --locked -p ballast-server -p ballast-operator
	cargo build --locked --workspace

# ---- check: the inner loop. Never writes into the tree -----------------------------------------------------------------------

.PHONY: check fix crds
check: packages ## format, lints, unit and integration tests: minutes
	cargo fmt --all --check
	cargo clippy --workspace --all-targets --locked -- -D warnings
	# The suites are no part of "all targets": a plain `cargo test` leaves them out. Here none may rot unseen.
	cargo clippy --workspace --test '*' --locked -- -D warnings
	./.ci/deny
	./.ci/layers
	cargo test --workspace --locked --no-fail-fast

fix: ## what `check` would complain of, where a tool can mend it
	cargo fmt --all
	cargo clippy --workspace --all-targets --fix --allow-dirty --allow-staged

crds: ## regenerate crds/ and the chart's copy from the Rust types
	cargo run --release --locked -p ballast-operator -- crds --write

# ---- test: check, then the wire, peer and Kubernetes suites ------------------------------------------------------------------

.PHONY: test test-full test-wire test-peers test-kube
test: check build ## everything that CI runs; under an hour cold
	$(E2E) test

test-full: check build ## everything, resumable; the result is written to docs/test-report.md
	$(E2E) test --full --report docs/test-report.md

test-wire: build ## etcdctl, snapshots, kill -9, differential
	$(E2E) test --only wire

test-peers: build ## the suites of others: Kubernetes' storage tests, etcd's own black-box tests
	$(E2E) test --only peers

test-kube: build ## the suites that need the Kubernetes of `make up`
	$(E2E) test --only kube

# ---- measure -----------------------------------------------------------------------------------------------------------------

LATENCY_TABLE ?= --write docs/latency.md

# The client takes part in what is measured on the same cores: it is optimised too.
MEASURE = BALLAST_BIN=$(CARGO_TARGET_DIR)/dist/ballast $(CARGO_TARGET_DIR)/release/ballast-e2e

.PHONY: bench latency build-measure diff nemesis planted sim
build-measure: packages
	cargo build --profile dist --locked -p ballast-server
	cargo build --release --locked -p ballast-e2e

bench: build-measure ## the ratio table against real etcd, ROUNDS interleaved rounds, to docs/bench.md; of clusters with MEMBERS=3, to docs/bench-members.md
	$(MEASURE) bench --rounds $(ROUNDS) --members $(MEMBERS) --write docs/bench$(if $(filter-out 1,$(MEMBERS)),-members).md

latency: build-measure ## what requests notice of compaction and defragmentation at KEYS keys, to docs/latency.md
	$(MEASURE) latency --keys $(KEYS) $(LATENCY_TABLE)

diff: build ## the same random scripts on etcd and on Ballast, SEEDS of them with OPS operations each
	$(E2E) diff --seeds $(SEEDS) --ops $(OPS) $(if $(ENGINE),--engine $(ENGINE))

MINUTES ?= 10
# Another build of the server, to upgrade to and back.
OTHER ?=
nemesis: build ## faults on three members under load, MINUTES of them; the report goes into docs/failure-modes.md
	$(E2E) nemesis --minutes $(MINUTES) $(if $(OTHER),--other $(OTHER)) --report docs/failure-modes.md

sim: packages ## the replicated store simulated from SIM_SEEDS seeds, the first drawn at random and printed
	BALLAST_SIM_SEEDS=$(SIM_SEEDS) cargo test --workspace --locked --test sim -- --nocapture

planted: build ## plant the bugs of e2e/planted, one at a time; the result is written to docs/planted.md
	$(E2E) planted --report docs/planted.md
