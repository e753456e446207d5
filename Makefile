# canaryd: `make help` lists what there is.

VERSION := $(shell git describe --tags --always --dirty 2>/dev/null || echo unknown)
COMMIT  := $(shell git rev-parse --short=12 HEAD 2>/dev/null || echo unknown)
LDFLAGS := -s -w -X main.version=$(VERSION) -X main.commit=$(COMMIT)

.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: build
build: ## build bin/canaryd
	CGO_ENABLED=0 go build -trimpath -ldflags '$(LDFLAGS)' -o bin/canaryd ./cmd/canaryd

# Folders of what is installed; DESTDIR goes before all of them. A package has PREFIX=/usr.
DESTDIR ?=
PREFIX  ?= /usr/local

.PHONY: install
install: build ## install program and unit under PREFIX (/usr/local), defaults under /etc; DESTDIR is honoured
	install -D -m 0755 bin/canaryd '$(DESTDIR)$(PREFIX)/bin/canaryd'
	install -d '$(DESTDIR)$(PREFIX)/lib/systemd/system'
	sed 's|/usr/local/bin/|$(PREFIX)/bin/|' deploy/systemd/canaryd.service >'$(DESTDIR)$(PREFIX)/lib/systemd/system/canaryd.service'
	chmod 0644 '$(DESTDIR)$(PREFIX)/lib/systemd/system/canaryd.service'
	test -e '$(DESTDIR)/etc/default/canaryd' || install -D -m 0644 deploy/systemd/canaryd.default '$(DESTDIR)/etc/default/canaryd'

.PHONY: uninstall
uninstall: ## remove what install installed, but not /etc/default/canaryd and what canaryd keeps in /var/lib
	rm -f '$(DESTDIR)$(PREFIX)/bin/canaryd' '$(DESTDIR)$(PREFIX)/lib/systemd/system/canaryd.service'

.PHONY: deps
deps: ## install the programs that test and demo need, where they are missing
	@hack/install-deps.sh

.PHONY: test
test: deps ## run all tests, against the kernel too, in network namespaces of their own
	@hack/test.sh

.PHONY: lint
lint: ## gofmt, go vet, staticcheck, and the rules of the house
	@hack/lint.sh

.PHONY: demo
demo: deps build ## flush a real kube-proxy rule set in every way and watch it come back
	@go run ./test/demo -canaryd bin/canaryd

# The profiler's names are in the program that is measured; make bench BENCH='-sizes 1000 -n 3' passes flags on.
.PHONY: bench
bench: deps ## measure heals, captures and generation beside iptables-restore, at 100, 1,000 and 5,000 services
	CGO_ENABLED=0 go build -trimpath -o bin/bench/canaryd ./cmd/canaryd
	go build -o bin/bench/heal ./test/bench/heal
	bin/bench/heal -canaryd bin/bench/canaryd -json bin/bench/heal.json $(BENCH)

.PHONY: bench-detect
bench-detect: deps build ## what noticing costs and how soon it is, beside an exec probe; 30 minutes
	@go run ./test/bench/detect -canaryd bin/canaryd

# make soak SOAK=2m for two minutes; SOAK_FLAGS='-healers monitor' and others are passed on (-help lists them).
SOAK ?= 10m
.PHONY: soak
soak: deps build ## packets to services while their rules are flushed, on both backends, for 10 minutes
	go build -o bin/soak ./test/soak
	bin/soak -canaryd bin/canaryd -for $(SOAK) -json bin/soak.json $(SOAK_FLAGS)

.PHONY: dashboard
dashboard: ## write deploy/grafana/canaryd.json anew
	go run ./hack/dashboard >deploy/grafana/canaryd.json.new
	mv deploy/grafana/canaryd.json.new deploy/grafana/canaryd.json

.PHONY: ci
ci: ## what continuous integration runs
	@.ci/run

.PHONY: clean
clean: ## remove what was built
	rm -rf bin
