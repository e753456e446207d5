#!/usr/bin/env bash
# Runs all tests, with the race detector, prints how far they are at least every ten seconds, and
# closes with what ran. With CI=true a skipped test is a failure: it would hide that something was
# never tried. Arguments go to go test; without any it tests all that there is.
# CANARYD_TEST_EVENTS names a file for all events of go test -json.
set -euo pipefail
cd "$(dirname "$0")/.."

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# Packages that test against the kernel mostly wait: for timers, and for canaryd to
# look again. So half as many again run at a time as there are processors; with
# more, a flush of several commands is healed before its last command.
atonce=$(($(nproc) * 3 / 2))

go build -o "$work/progress" ./hack/progress
progress=("$work/progress")
[ -z "${CANARYD_TEST_EVENTS:-}" ] || progress+=(-events "$CANARYD_TEST_EVENTS")
# A cached result would say nothing about this machine's kernel and iptables.
common=(-count=1 -timeout=30m -p="$atonce")

if [ $# -gt 0 ]; then
	"${progress[@]}" "${common[@]}" -race "$@"
	exit
fi

# Ten packages try the built canaryd. It is linked once, not ten times.
mkdir "$work/builds"
go build -o "$work/builds/canaryd" ./cmd/canaryd
go build -race -o "$work/builds/canaryd-race" ./cmd/canaryd
export CANARYD_TEST_BUILDS=$work/builds
# test/versions runs other packages' tests once more, in other userlands: make versions.
# test/kernels runs them on other kernels, emulated: make kernels. test/kubeproxy needs a
# kube-proxy, which make kubeproxy builds.
# The distribution's firewalls have the processors to themselves: a flush of theirs
# is of many commands, and is not to be healed in the middle for want of time. So have
# the limits: time and memory are measured there, and 240,000 rules take both.
mapfile -t others < <(go list ./... | grep -v -e /test/flushers -e /test/kernels -e /test/kubeproxy -e /test/limits -e /test/versions)
# These drive canaryd as it is installed: a program with the race detector takes several times
# the processor, and test/e2e and test/faults run that one on the kernel.
# pkg/native is among them: one goroutine does all of it, and thousands of objects take long with
# the race detector.
driving=(./test/owners ./hack/soak ./test/packets ./pkg/native ./test/alerts ./test/page ./test/packaging ./hack/bench/...)
mapfile -t others < <(printf '%s\n' "${others[@]}" | grep -v -x -F "$(go list "${driving[@]}")")
# Those that take longest begin first, so that in the end nothing waits for them. The modules of
# their own read and write files, and run nothing of canaryd's in their own process.
"${progress[@]}" \
	"${common[@]}" -race ./internal/daemon ./test/e2e ./pkg/iptables ./test/interleavings ./test/faults "${others[@]}" -- \
	"${common[@]}" "${driving[@]}" -- \
	"${common[@]}" -race ./test/flushers -- \
	"${common[@]}" ./test/limits -- \
	-C test/kubernetes "${common[@]}" ./... -- \
	-C hack/release "${common[@]}" ./...
