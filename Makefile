# canaryd: `make help` lists what there is.

# 0.1.0 on the tag of cmd/canaryd/VERSION, and else 0.1.0-dev+COMMIT.
VERSION := $(shell hack/version.sh)
COMMIT  := $(shell git rev-parse --short=12 HEAD 2>/dev/null || echo unknown)
LDFLAGS := -s -w -funcalign=1 -X main.linkedVersion=$(VERSION) -X main.linkedCommit=$(COMMIT)
BIN     := bin

# These flags keep canaryd within 16 MB; docs/release.md has the share of each. The compiler inlines
# calls only in the packages of INLINED, where a heal spends most of its own processor time. Names of
# generic functions have at most 40 letters of each type. Slices whose size is only known at run time
# are on the heap, as before Go 1.25. canaryd serves HTTP/1 on the node only.
INLINED := runtime/... internal/... bytes slices maps cmp iter encoding/binary math/bits \
	$(addprefix github.com/canaryd/canaryd/pkg/,nft ruleset)
SMALL   := -d=maxshapelen=40,variablemakethreshold=0
FLAGS   := -trimpath -tags nethttpomithttp2 '-gcflags=all=-l $(SMALL)' $(INLINED:%='-gcflags=%=$(SMALL)')

# No package has C. With cgo the tests would compile all packages once more, and try a canaryd that
# is linked in another way. The race detector needs it: hack/progress.
export CGO_ENABLED := 0

.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: build
build: ## build bin/canaryd
	go build $(FLAGS) -ldflags '$(LDFLAGS)' -o '$(BIN)/canaryd' ./cmd/canaryd

.PHONY: plugin
plugin: ## build bin/kubectl-canaryd, the plugin kubectl canaryd: docs/fleet.md
	go build $(FLAGS) -ldflags '$(LDFLAGS)' -o '$(BIN)/kubectl-canaryd' ./cmd/kubectl-canaryd

# Folders of what is installed; DESTDIR goes before all of them. A package has PREFIX=/usr.
DESTDIR ?=
PREFIX  ?= /usr/local

.PHONY: completion
completion: # by a program for this machine, whichever bin/canaryd is for
	mkdir -p '$(BIN)/completion'
	for shell in bash zsh fish; do GOOS= GOARCH= go run ./cmd/canaryd completion $$shell >'$(BIN)'/completion/$$shell || exit; done

UNIT := $(PREFIX)/lib/systemd/system/canaryd.service
MAN  := $(PREFIX)/share/man/man8/canaryd.8
BASH := $(PREFIX)/share/bash-completion/completions/canaryd
ZSH  := $(PREFIX)/share/zsh/site-functions/_canaryd
FISH := $(PREFIX)/share/fish/vendor_completions.d/canaryd.fish
NPD  := $(PREFIX)/share/canaryd/node-problem-detector

.PHONY: install
install: build completion ## install under PREFIX (/usr/local), flags into /etc/default; DESTDIR is honoured
	install -D -m 0755 '$(BIN)/canaryd' '$(DESTDIR)$(PREFIX)/bin/canaryd'
	install -D -m 0644 deploy/systemd/canaryd.service '$(DESTDIR)$(UNIT)'
	sed -i 's|/usr/local/bin/|$(PREFIX)/bin/|' '$(DESTDIR)$(UNIT)'
	install -D -m 0644 docs/canaryd.8 '$(DESTDIR)$(MAN)'
	install -d '$(DESTDIR)$(NPD)'
	install -m 0644 deploy/node-problem-detector/*.json deploy/node-problem-detector/*.sh '$(DESTDIR)$(NPD)'
	sed -i 's|/usr/local/bin/|$(PREFIX)/bin/|' '$(DESTDIR)$(NPD)/canaryd.json'
	install -D -m 0644 '$(BIN)/completion/bash' '$(DESTDIR)$(BASH)'
	install -D -m 0644 '$(BIN)/completion/zsh' '$(DESTDIR)$(ZSH)'
	install -D -m 0644 '$(BIN)/completion/fish' '$(DESTDIR)$(FISH)'
	test -e '$(DESTDIR)/etc/default/canaryd' || install -D -m 0644 deploy/systemd/canaryd.default '$(DESTDIR)/etc/default/canaryd'

.PHONY: uninstall
uninstall: ## remove what install installed, but not /etc/default/canaryd and what canaryd keeps in /var/lib
	rm -f $(foreach file,$(PREFIX)/bin/canaryd $(UNIT) $(MAN) $(BASH) $(ZSH) $(FISH),'$(DESTDIR)$(file)')
	rm -rf '$(DESTDIR)$(PREFIX)/share/canaryd'

ARCH := $(shell go env GOARCH)

.PHONY: packages
packages: ## build a .deb and, where rpmbuild is there, an .rpm into bin
	rm -rf bin/tree
	$(MAKE) -s install DESTDIR='$(CURDIR)/bin/tree' PREFIX=/usr
	@if command -v rpmbuild >/dev/null; then hack/rpm.sh bin/tree '$(VERSION)' '$(ARCH)' 'bin/canaryd_$(VERSION)_$(ARCH).rpm'; \
	else echo 'There is no rpmbuild (Debian: rpm), so no .rpm is built.'; fi
	hack/deb.sh bin/tree '$(VERSION)' '$(ARCH)' 'bin/canaryd_$(VERSION)_$(ARCH).deb'

# make release REPOSITORY=registry.example/canaryd: the image's name in manifests and chart.
REPOSITORY ?=
.PHONY: release
release: ## build all that is released into bin/release, reproducibly: docs/release.md
	rm -rf bin/release
	hack/release.sh bin/release '$(VERSION)' '$(COMMIT)' "$$(git log -1 --format=%ct)" '$(REPOSITORY)'

# make image IMAGE=registry.example/canaryd:0.1.0 GO=1.26 DEBIAN=trixie-slim BACKENDS=nft
IMAGE  ?= canaryd:$(subst +,-,$(VERSION))
ENGINE ?= $(shell command -v podman || command -v docker || echo podman)

.PHONY: image
image: ## build the container image, with podman or docker
	'$(ENGINE)' build -f deploy/image/Containerfile -t '$(IMAGE)' --build-arg VERSION='$(VERSION)' --build-arg COMMIT='$(COMMIT)' \
		$(if $(GO),--build-arg GO='$(GO)') $(if $(DEBIAN),--build-arg DEBIAN='$(DEBIAN)') \
		$(if $(BACKENDS),--build-arg BACKENDS='$(BACKENDS)') .

.PHONY: image-rootfs
image-rootfs: build ## assemble the image's root file system in bin/rootfs, from this machine's Debian
	rm -rf bin/rootfs
	BACKENDS='$(BACKENDS)' hack/image-rootfs.sh bin/canaryd bin/rootfs

.PHONY: deps
deps: ## install the programs that make test and demo need, where they are missing
	@hack/install-deps.sh

.PHONY: deps-browser
deps-browser: # Chromium too, which only tests and pictures of the page need
	@hack/install-deps.sh browser

.PHONY: deps-test
deps-test: # all that make test, make test-programs and make test-release need
	@hack/install-deps.sh programs browser flushers release
	@hack/netavark.sh
	@hack/owners.sh

# Levels of tests: test/README.md. Each installs what it needs and is missing.
.PHONY: test
test: ## the tests for each change, against the kernel too, in network namespaces of their own
	@hack/install-deps.sh optional
	@hack/test.sh test

.PHONY: race
race: ## with the race detector, the tests in which goroutines meet: test/README.md
	@hack/install-deps.sh optional
	@hack/test.sh race

.PHONY: test-large
test-large: ## the limits, and other tests at large sizes
	@hack/install-deps.sh optional
	@hack/test.sh large

.PHONY: test-programs
test-programs: ## tests with Chromium, Prometheus, firewalls, CNI plugins, netavark, packages and shells
	@hack/install-deps.sh programs browser flushers optional
	@hack/netavark.sh
	@hack/owners.sh
	@hack/test.sh programs

.PHONY: test-release
test-release: ## make a release twice, compare the bytes, and run its image (2 minutes)
	@hack/install-deps.sh release
	@hack/test.sh -tags=release -run=TestRelease ./test/packaging

.PHONY: test-busy
test-busy: ## make test five times while 16 loops keep the processors busy, and twice on one processor; an hour or two
	@hack/install-deps.sh
	@hack/busy.sh

# make fuzz FUZZ=5m for five minutes each, FUZZ=3000x for that many inputs each.
FUZZ ?= 30s
.PHONY: fuzz
fuzz: ## run every fuzz target for a while; what makes one fail is kept in testdata/fuzz
	@FUZZ=$(FUZZ) hack/fuzz.sh

.PHONY: lint
lint: ## gofmt, go vet, staticcheck, and the rules of the house
	@hack/lint.sh

.PHONY: demo
demo: deps build ## flush a real kube-proxy rule set in every way and watch it come back
	@go run ./hack/demo -canaryd bin/canaryd

# The profiler's names are in the program that is measured; make bench BENCH='-sizes 1000 -n 3' passes flags on.
.PHONY: bench
bench: deps ## measure heals, captures and generation next to iptables-restore, at 100, 1,000 and 5,000 services
	go build $(FLAGS) -ldflags -funcalign=1 -o bin/bench/canaryd ./cmd/canaryd
	go build -o bin/bench/heal ./hack/bench/heal
	bin/bench/heal -canaryd bin/bench/canaryd -json bin/bench/heal.json $(BENCH)

.PHONY: bench-detect
bench-detect: deps build ## what noticing costs and how soon it is, half an hour
	@go run ./hack/bench/detect -canaryd bin/canaryd

# make soak SOAK=2m for two minutes; SOAK_FLAGS='-healers monitor' and others are passed on (-help lists them).
# VIEW_FLAGS are for its last part, which is all of make view.
SOAK ?= 10m
VIEW_FLAGS ?= -services 5000
.PHONY: soak
soak: deps build ## packets to services while their rules are flushed, on both backends, and owners and flushers at random; 10 minutes each
	CANARYD_SOAK=$(SOAK) go test -count=1 -timeout=0 -v ./test/interleavings -run TestInterleavings
	CANARYD_SOAK=$(SOAK) go test -count=1 -timeout=0 -v ./internal/daemon -run 'TestNativeStories$$'
	go build -o bin/soak ./hack/soak
	bin/soak -canaryd bin/canaryd -for $(SOAK) -json bin/soak.json $(SOAK_FLAGS)
	bin/soak -view -canaryd bin/canaryd -json bin/view.json $(VIEW_FLAGS)

.PHONY: view
view: deps build ## what clients see of each kind of flush: connections reset, never made, refused, and for how long none was answered
	go build -o bin/soak ./hack/soak
	bin/soak -view -canaryd bin/canaryd -json bin/view.json $(VIEW_FLAGS)

# make standby STANDBY_FLAGS='-sizes 1000 -flushes-per-kind 4' for a part of it.
.PHONY: standby
standby: deps build ## what clients see of flushes with the standby and without, in turns, in both modes of kube-proxy; prints tables; an hour
	go build -o bin/soak ./hack/soak
	bin/soak -view -standby both -backends nft -modes iptables,nftables -sizes 100,1000,5000 -flushes-per-kind 20 -canaryd bin/canaryd -json bin/standby.json $(STANDBY_FLAGS)

.PHONY: prometheusrule
prometheusrule: ## write the PrometheusRule of deploy/kubernetes again from deploy/prometheus
	go test -C test/kubernetes -count=1 -run 'TestPrometheusRule' . -update

.PHONY: dashboard
dashboard: ## write deploy/grafana/canaryd.json
	go run ./hack/dashboard >deploy/grafana/canaryd.json.new
	mv deploy/grafana/canaryd.json.new deploy/grafana/canaryd.json

.PHONY: screenshot
screenshot: deps-browser build ## make the pictures of the page in docs/images, from a canaryd that is being flushed
	@go run ./hack/screenshot -canaryd bin/canaryd
	@go test -count=1 -run '^TestStates$$' ./test/page -args -of-docs -pictures "$$PWD/docs/images/states"

.PHONY: picture
picture: deps build ## record a flush, and draw docs/images/flush.svg from it
	@go run ./hack/picture -canaryd bin/canaryd -record

.PHONY: wars
wars: deps ## a process that flushes without end, on the kernel: what it costs, and how soon the rules are back after it
	go test -tags wars -count=1 -v -run 'WithoutEnd$$|InReplay$$|MemoryShort$$' ./test/limits

.PHONY: flushers
flushers: ## the firewalls of the distribution against canaryd, as test-programs runs them too; writes the matrix into docs/measured.md
	@hack/install-deps.sh flushers
	go test -count=1 -v -run 'TestFlushers' ./test/flushers -update

# make versions VERSIONS='bullseye|sid' for some of Debian's releases.
VERSIONS ?= .
.PHONY: versions
versions: ## the ways to flush, and what compares bytes and text, with the iptables and nft of four Debian releases; prints a table
	@hack/userlands.sh
	go test -count=1 -timeout=30m -v -run '^Test([^V]|V[^e])|TestVersions/($(VERSIONS))' ./test/versions
	go test -count=1 -v -run TestRulesOfANewerIptables ./test/e2e

# make kubeproxy KUBEPROXY=10m for ten minutes of flushes; KUBEPROXY_SEED=7 repeats a run.
.PHONY: kubeproxy
kubeproxy: deps ## a real kube-proxy in iptables and nftables mode next to canaryd, flushed at random while services change; prints tables
	@CANARYD_KUBEPROXY='$(KUBEPROXY)' CANARYD_KUBEPROXY_SEED='$(KUBEPROXY_SEED)' CANARYD_KUBEPROXY_SERVICES='$(KUBEPROXY_SERVICES)' hack/kubeproxy.sh

# make cluster CLUSTER=legacy for one backend; CLUSTER_KEEP=1 keeps the node's files.
CLUSTER ?= nft legacy
.PHONY: cluster
cluster: deps ## a whole node of Kubernetes with canaryd as its DaemonSet, in namespaces; builds Kubernetes for 20 minutes once; writes docs/measured.md
	@CLUSTER_BACKENDS='$(CLUSTER)' CLUSTER_KEEP='$(CLUSTER_KEEP)' hack/cluster.sh -update

# make kernels KERNELS='bullseye-amd64 sid-amd64' for some of them: a suite of Debian's and an architecture.
KERNELS ?= bullseye-amd64 bookworm-amd64 trixie-amd64 sid-amd64 trixie-arm64
.PHONY: kernels
kernels: ## flushes, native tables and restarts on the kernels of four Debian releases, in emulated machines; prints a table
	@hack/install-deps.sh kernels
	@hack/kernels.sh $(KERNELS)
	CANARYD_TEST_KERNELS='$(KERNELS)' go test -count=1 -timeout=2h -v -run TestKernels ./test/kernels

.PHONY: ci
ci: ## what continuous integration runs
	@.ci/run

.PHONY: clean
clean: ## remove what was built
	rm -rf bin
