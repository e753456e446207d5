#!/usr/bin/env bash
# Runs a level of tests: test, race, large or programs. hack/progress prints how far they are at
# least every ten seconds, and closes with what ran. With CI=true a skipped test is a failure: it
# would hide that something was never tried. All other arguments go to go test.
# CANARYD_TEST_EVENTS names a file for all events of go test -json.
set -euo pipefail
cd "$(dirname "$0")/.."

export CGO_ENABLED=0 # as in the Makefile

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# Packages that test against the kernel mostly wait: for timers, and for canaryd to
# look again. So half as many again run at a time as there are processors; with
# more, a flush of several commands is healed before its last command.
atonce=$(($(nproc) * 3 / 2))

go build -o "$work/progress" ./hack/progress
progress=("$work/progress")
[ -z "${CANARYD_TEST_EVENTS:-}" ] || progress+=(-events "$CANARYD_TEST_EVENTS")
# A cached result would say nothing about this machine's kernel and iptables. make lint runs go vet.
common=(-count=1 -timeout=30m -vet=off -p="$atonce")

# The canaryd that packages try is linked once, not ten times.
link() { # FLAG-OF-GO-BUILD...
	mkdir -p "$work/builds"
	[ "${1:-}" != -race ] || local -x CGO_ENABLED=1
	go build "$@" -o "$work/builds/canaryd${1:-}" ./cmd/canaryd
	export CANARYD_TEST_BUILDS=$work/builds
}

# release links canaryd with the flags of a release, for levels that measure it or try it in packages.
# To compile all packages with them would be a tenth of make test.
release() {
	make -s build BIN="$work/builds"
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
# Where goroutines of ours meet, and the race detector costs seconds: make test has it there.
meeting=(./internal/control ./internal/copies ./internal/here ./internal/journal ./internal/metrics ./internal/sdnotify ./internal/serve ./internal/source ./internal/web ./pkg/conntrack ./pkg/watch)
# Some of their tests start goroutines next to the kernel's readers and writers (hack/meeting). The
# others have one goroutine, and executed programs take most of their time.
partly=(./pkg/iptables ./pkg/iptables/iptablestest ./pkg/native ./pkg/nft ./pkg/standby)
# test/levels_test.go: each package that starts a goroutine is on a list here or in make race.
# These drive canaryd as it is installed, or a goroutine of theirs only waits for a process.
# shellcheck disable=SC2034
alone=(./hack/picture ./test/cluster ./test/faults ./test/owners ./test/packets)

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
	link -race
	export CANARYD_TEST_LEAVE=1
	# By default a program with the race detector sleeps for a second before it ends.
	export GORACE="${GORACE:-} atexit_sleep_ms=0"
	# Of internal/daemon every third story, by its name: the same goroutines meet in all of them.
	stories=$(grep -ho '^func Test\w*' internal/daemon/*_test.go | awk '{
		sum = 0
		for (i = 1; i <= length($2); i++) sum += index("abcdefghijklmnopqrstuvwxyz", tolower(substr($2, i, 1)))
		if (sum % 3 == 0) print $2
	}' | paste -sd'|')
	# Stages are encoded in a goroutine ahead, which the code starts.
	meet=$(go run ./hack/meeting "${partly[@]}" -and TestSessionStages)
	# Of test/e2e the tests whose canaryd serves, watches and writes at once. The others would be
	# half of this level's work: documents, files, and commands that do one thing after the other.
	# Of the plugin one test of each command that asks several nodes at once. Of the interleavings
	# tests that look for a mistake of canaryd's, and not of the checker's.
	named=$(paste -sd'|' <<-END
		ATakenPort|StrangersAtTheSocket|RequestsAreBounded|Listeners|OutputWithoutAReader
		Status|StatusWatch|EveryFaceSaysTheSame|EveryFaceSaysOfADecision|FlushesAreEvents|NativeFlushesAreEvents
		Drill|Journal|Manifest|FirstWait|FirstWaitEnds|Trouble|StoppedProcess|MemoryOfTheControlGroup
		TwoFlushers|FlushesInNumbers|FlushBesideABusyOwner|JumpDeletedOnABusyNode|LegacyCulprit
		KeeperComesAndGoes|CommandsNextToTheStandby|NativeStandbyTranslates|StandbyComesAndGoes
		StatusIsJSON|Flushes|Detect|Pause|Sysdump|NoAnswerInTime|Progress
		Interleavings|InterleavingsOnTheKernel|CommitsBetweenReadAndWrite|SavedFilesThatAreFlushed|SavedFilesThatAreFlushedOnTheKernel
	END
	)
	# e2e has the processors to itself: a slow canaryd makes two flushes of one. In the tests behind
	# -skip another goroutine only has a thread for itself, and is waited for, or a helper's name
	# leads to one. In NativeStories the goroutines take turns by the bubble's clock, which the race
	# detector does not see.
	"${progress[@]}" "${common[@]}" -race -run="^Test($named)$" ./test/e2e -- \
		"${common[@]}" -race -run="^Test($named)$|^($stories)$|$meet" -skip='^Test(ChooseScenes|ChooseOnOtherKernels|EntriesFitTheirShape|Moved|NativeStories)$' \
		./internal/daemon "${partly[@]}" ./test/interleavings ./cmd/kubectl-canaryd -- \
		"${common[@]}" -race -skip='^Test(Bash|Fish|Zsh|LongFlushLine|LongLogLines)$' ./cmd/canaryd ./hack/progress ./internal/terminal ./internal/testkit ./internal/testkit/canaryd
	;;
large)
	release
	export CANARYD_TEST_LEAVE=1 CANARYD_TEST_LARGE=1
	# Of these packages only the tests that are larger here: make test runs the others.
	mapfile -t sized < <(git grep -lE 'testkit\.(Large|Size|IsLarge)\b' -- '*_test.go' ':!internal/testkit' ':!test/limits' ':!test/owners' | xargs -r -n1 dirname | sort -u | sed 's|^|./|')
	pattern=$(go run ./hack/sized "${sized[@]}" ./test/owners -whole "${measuring[@]}")
	# Those that wait for minutes begin first: the others need the processors meanwhile.
	"${progress[@]}" "${common[@]}" -run="$pattern" ./test/owners ./pkg/iptables "${measuring[@]}" "${sized[@]}" -- "${common[@]}" ./test/limits
	;;
programs)
	release
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
