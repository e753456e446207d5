#!/usr/bin/env bash
# Runs a level of tests: test, race, large or programs. hack/progress prints how far they are at
# least every ten seconds, and closes with what ran. With CI=true a skipped test is a failure: it
# would hide that something was never tried. All other arguments go to go test.
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

# The canaryd that packages try is linked once, not ten times.
link() { # FLAG-OF-GO-BUILD...
	mkdir -p "$work/builds"
	go build "$@" -o "$work/builds/canaryd${1:-}" ./cmd/canaryd
	export CANARYD_TEST_BUILDS=$work/builds
}

# all lists the packages with tests, but those in the arguments. Those that take longest begin
# first, so that in the end nothing waits for them.
first=(./internal/daemon ./test/e2e ./pkg/iptables ./test/interleavings ./test/faults)
all() { # PACKAGE...
	local packages
	packages=$(go list -f '{{if or .TestGoFiles .XTestGoFiles}}{{.ImportPath}}{{end}}' ./... | grep -vxF "$(go list "$@")")
	go list "${first[@]}" | grep -xF "$packages"
	grep -vxF "$(go list "${first[@]}")" <<<"$packages"
}

# Packages of levels of their own: Makefile. The distribution's firewalls and the limits have the
# processors to themselves: a flush of many commands is not to be healed in the middle for want of
# time, and time and memory are measured.
elsewhere=(./test/alerts ./test/flushers ./test/kernels ./test/kubeproxy ./test/limits ./test/packaging ./test/page ./test/versions)
# Programs that measure for long, and their tests, which run them for a minute or two.
measuring=(./hack/soak ./hack/bench/heal ./hack/bench/detect)
# Where goroutines of ours meet, and the race detector costs seconds.
meeting=(./internal/control ./internal/journal ./internal/metrics ./internal/sdnotify ./internal/serve ./internal/source ./internal/web ./pkg/conntrack ./pkg/watch)
# These drive canaryd as it is installed, or have one goroutine: with the race detector they take
# several times the processor, and find nothing.
alone=(./pkg/native ./test/faults ./test/owners ./test/packets)

case ${1:-} in
test)
	link
	export CANARYD_TEST_LEAVE=1
	mapfile -t others < <(all "${elsewhere[@]}" "${measuring[@]}" "${meeting[@]}")
	# Modules of their own.
	"${progress[@]}" "${common[@]}" "${others[@]}" -- "${common[@]}" -race "${meeting[@]}" -- \
		-C test/kubernetes "${common[@]}" ./... -- -C hack/release "${common[@]}" ./...
	;;
race)
	link
	link -race
	export CANARYD_TEST_LEAVE=1
	mapfile -t others < <(all "${elsewhere[@]}" "${measuring[@]}" "${alone[@]}" ./test/e2e ./internal/daemon)
	# Of internal/daemon every third story: the same goroutines meet in all of them.
	stories=$(grep -ho '^func Test\w*' internal/daemon/*_test.go | awk 'NR % 3 == 0 { print $2 }' | paste -sd'|')
	# Of test/e2e the tests whose canaryd serves, watches and writes at once. The others would be
	# half of this level's work: documents, files, and commands that do one thing after the other.
	"${progress[@]}" "${common[@]}" -race -run="^Test($(paste -sd'|' <<-END
		ATakenPort|StrangersAtTheSocket|RequestsAreBounded|Listeners|OutputWithoutAReader
		Status|StatusWatch|EveryFaceSaysTheSame|EveryFaceSaysOfADecision|FlushesAreEvents|NativeFlushesAreEvents
		Drill|Journal|Manifest|FirstWait|FirstWaitEnds|Trouble|StoppedProcess|MemoryOfTheControlGroup
		TwoFlushers|TenFlushes|FlushBesideABusyOwner|JumpDeletedOnABusyNode|LegacyCulprit
		KeeperComesAndGoes|CommandsNextToTheStandby|NativeStandbyTranslates|StandbyComesAndGoes
	END
	))$" ./test/e2e -- "${common[@]}" -race -run="^($stories)$" ./internal/daemon -- \
		"${common[@]}" -race -skip='^Test(EachExtensionComesBack|MirrorRandomEdits|EntriesFitTheirShape|ChooseScenes)$' "${others[@]}" # they execute programs
	;;
large)
	link
	export CANARYD_TEST_LEAVE=1 CANARYD_TEST_LARGE=1
	# Of these packages only the tests that are larger here: make test runs the others.
	mapfile -t sized < <(git grep -lE 'testkit\.(Large|Size|IsLarge)\b' -- '*_test.go' ':!internal/testkit' ':!test/limits' ':!test/owners' | xargs -r -n1 dirname | sort -u | sed 's|^|./|')
	pattern=$(go run ./hack/sized "${sized[@]}" ./test/owners -whole "${measuring[@]}")
	# Those that wait for minutes begin first: the others need the processors meanwhile.
	"${progress[@]}" "${common[@]}" -run="$pattern" ./test/owners "${measuring[@]}" "${sized[@]}" -- "${common[@]}" ./test/limits
	;;
programs)
	link
	whole=(./test/packaging ./test/page ./test/alerts ./hack/dashboard)
	# Of these packages only tests that need more programs than make test has: test/levels_test.go
	# compares. All of them are one run, so that no package waits for the others' end.
	some=(./test/owners ./cmd/canaryd)
	named='^Test(Fish|Zsh|ManualIsWellFormed|ManualIsComplete|Netavark|PodsOfTheRealPluginsThatAreGone|RulesOfPodsThatAnAgentDeletes|HostPortsOfTheRealPlugins)$'
	every=$(go run ./hack/sized -whole "${whole[@]}")
	"${progress[@]}" "${common[@]}" -run="$every|$named" "${whole[@]}" "${some[@]}" -- \
		"${common[@]}" ./test/flushers
	;;
*)
	"${progress[@]}" "${common[@]}" "$@"
	;;
esac
