# Everything that a contributor or CI runs. A fresh machine needs Go, a C compiler (for the
# race detector and SPIN), make and git; the rest comes from the Go module proxy into ./.bin,
# and spin from Debian's packages. "make help" lists the targets.

GO        ?= go
FUZZTIME  ?= 10s
BENCH     ?= .
BENCHTIME ?= 0.1s
BENCHCPU  ?= 2
COUNT     ?= 1

# Pinned, so that a new release of the linter never breaks an old commit.
GOLANGCI_VERSION := v2.15.0
GOLANGCI         := .bin/golangci-lint-$(GOLANGCI_VERSION)

# Platforms that must build beside the one at hand: another word size, another byte order of
# struct fields in socket calls, and the systems that take the portable path.
CROSS := linux/arm64 linux/386 darwin/arm64 windows/amd64

# The packages with a fast path and a fallback; a missing one is simply not there yet.
PORTABLE := $(wildcard internal/udp internal/park transport)
PATHS    := gso gro spin buffers gso,gro,spin,buffers
MODELS   := $(wildcard docs/model/*.pml)

.DEFAULT_GOAL := all
.PHONY: all build vet test race yields portable paths cross peers fuzz bench gate compare compare-rxe cover arch lint model soak interop interop-full demo perf tools clean help

all: build vet test ## build, vet and test (the default)

build: ## compile every package
	$(GO) build ./...

vet: ## go vet
	$(GO) vet ./...

test: ## the test suite
	$(GO) test ./...

race: ## the test suite, in its short form, under the race detector
	$(GO) test -race -short -timeout 20m ./...

yields: ## the tests of what is lock-free, with a switch of threads at every point that matters
	$(GO) test -short -tags doorbellyield ./ring ./qp ./internal/park ./internal/role ./internal/wire
	$(GO) test -short -tags doorbellyield -run TestMessages -count 3 ./transport

portable: ## the tests of the socket layer on its fallback for systems other than Linux
	$(if $(PORTABLE),$(GO) test -tags doorbellportable $(PORTABLE:%=./%/...),@echo "portable: skipped, none of its packages exists yet")

paths: $(PATHS:%=paths/%) ## the tests of devices with one fast path switched off at a time, and with all

paths/%:
	$(GO) test -short ./transport -args -off $(*F)

cross: $(CROSS:%=cross/%) ## build and vet for the other platforms

cross/%:
	GOOS=$(*D) GOARCH=$(*F) $(GO) build ./...
	GOOS=$(*D) GOARCH=$(*F) $(GO) vet ./...

peers: ## vet and test bench/peers, a module of its own
	cd bench/peers && $(GO) vet ./... && $(GO) test ./...

fuzz: ## every fuzz target for FUZZTIME seconds (10s), one after the other
	GO="$(GO)" tools/fuzz.sh $(FUZZTIME)

bench: ## every benchmark in short form; BENCH, BENCHTIME, BENCHCPU and COUNT change it
	$(GO) test -run '^$$' -bench '$(BENCH)' -benchmem -benchtime $(BENCHTIME) -cpu $(BENCHCPU) -count $(COUNT) ./...

gate: perf ## compare the benchmarks with the last landed revision, see docs/gate.md: some minutes
	bin/perf gate --base-rev auto --rules bench/gate.toml --tolerate-noise --progress

compare: perf ## Doorbell beside bare sockets, TCP and other transports: the table of docs/performance.md
	bin/perf compare

cover: ## test coverage per package
	$(GO) test -coverprofile cover.out ./... | awk -f tools/cover.awk

arch: ## the import graph points one way
	$(GO) test -count 1 ./internal/arch

lint: $(GOLANGCI) ## golangci-lint and a tidy go.mod
	$(GOLANGCI) config verify
	$(GOLANGCI) run ./...
	$(GO) mod tidy -diff

model: ## check the models of docs/model with SPIN, and that their mutants fail
	@tools/model.sh $(MODELS)

soak: ## the long tests, up to an hour: a hundred seeds, and ten minutes over sockets
	$(GO) test -tags soak -count 1 -timeout 60m ./internal/netsim ./transport

interop: ## talk to Linux tools over Soft-RoCE in a QEMU guest, as root; interop-full takes longer
	$(GO) test -count 1 -tags interop -timeout 30m ./interop; code=$$?; cat interop/.cache/table 2>/dev/null; exit $$code

compare-rxe: ## Doorbell beside Linux's rxe between two QEMU guests, as root
	$(GO) test -count 1 -tags interop -timeout 60m ./interop -run TestCompareRxe -compare-rxe; code=$$?; cat interop/.cache/compare-rxe 2>/dev/null; exit $$code

interop-full: ## every tool with every MTU and every loss, about an hour
	$(GO) test -count 1 -tags interop -timeout 4h ./interop -full; code=$$?; cat interop/.cache/table 2>/dev/null; exit $$code

demo: ## show what this is about, on loopback
	$(GO) run ./cmd/perf demo

perf: ## build ./bin/perf
	$(GO) build -o bin/perf ./cmd/perf

tools: $(GOLANGCI) ## install the linter into ./.bin

$(GOLANGCI):
	GOBIN='$(CURDIR)/.bin' $(GO) install github.com/golangci/golangci-lint/v2/cmd/golangci-lint@$(GOLANGCI_VERSION)
	mv .bin/golangci-lint $@

clean: ## remove what the other targets have built
	rm -rf bin .bin cover.out

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
