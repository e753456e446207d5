#!/usr/bin/env bash
# Runs every fuzz target for a while. What makes one fail is kept in the package's testdata/fuzz, to
# be committed with the fix.
# FUZZ is how long each runs, such as 30s, or how many inputs each is given, such as 1000x.
# Arguments are packages, all without any.
#
# Each package is built once: "go test -fuzz" takes one target, and would link each time. The next
# package is built while targets run.
# With a time Go's fuzzer now and then fails with "context deadline exceeded" and no finding, when
# the time ends (golang/go#75804, until Go 1.27); with a number its context has no deadline.
set -euo pipefail
cd "$(dirname "$0")/.."

export time=${FUZZ:-30s}
[ $# -gt 0 ] || set -- ./...

work=$(mktemp -d)
export work
trap 'rm -rf "$work"' EXIT
# A number of inputs is for the same inputs everywhere: those that are committed, and what comes
# of them. Each target has one processor then: most of its time is beginning and ending. A time goes
# on with what earlier runs on this machine found worth keeping, and has all processors.
kept=$(go env GOCACHE)/fuzz atonce=1 workers=$(nproc)
[[ $time != *x ]] || kept=$work/found atonce=$(nproc) workers=1
export kept workers

# built builds the packages with fuzz targets one after the other, and prints for each target its
# package, its folder, the built test and its name.
built() {
	local package folder test started=$SECONDS
	go list -f '{{.ImportPath}} {{.Dir}}' "$@" >"$work/packages" || touch "$work/failed"
	while read -r package folder; do
		grep -qs '^func Fuzz' "$folder"/*_test.go || continue
		test=$work/${package//\//-}
		# Symbols for debuggers are a third of the linker's work.
		if ! go test -c -fuzz=. -ldflags='-s -w' -o "$test" "$package" >&2; then
			touch "$work/failed"
			continue
		fi
		(cd "$folder" && "$test" -test.list '^Fuzz') | sed -n "s|^Fuzz|$package $folder $test &|p" || touch "$work/failed"
	done <"$work/packages"
	echo $((SECONDS - started)) >"$work/building"
}

target() { # PACKAGE FOLDER TEST TARGET
	local package=$1 folder=$2 test=$3 name=$4 start=$SECONDS said log
	log=$work/log-${package//\//-}-$name said=''
	# Making an input smaller takes a minute by default, in which a slow target tries nothing else.
	(cd "$folder" && "$test" -test.run='^$' -test.fuzz="^$name\$" -test.fuzztime="$time" -test.fuzzminimizetime=100x \
		-test.fuzzcachedir="$kept/$package" -test.parallel="$workers" -test.timeout=0) >"$log" 2>&1 || {
		said="$(cat "$log")"$'\n'"FAILED: $package $name"
		touch "$work/failed"
	}
	if grep -q 'without coverage' "$log"; then
		said+=$'\n'"$package is not built for fuzzing"
		touch "$work/failed"
	fi
	# With a number all do the same, and one line says so.
	[[ $time == *x ]] || said+=${said:+$'\n'}"$package $name: $(sed -n 's/.*\(execs: [0-9]*\).*/\1/p' "$log" | tail -1) in $((SECONDS - start))s"
	[ -z "$said" ] || printf '%s\n' "$said"
}
export -f target

began=$SECONDS
# shellcheck disable=SC2016
built "$@" | xargs -r -P "$atonce" -L 1 bash -euo pipefail -c 'target "$@"' target || touch "$work/failed"
ran=$(find "$work" -maxdepth 1 -name 'log-*' | wc -l)
echo "$ran fuzz targets ran for $time each: $((SECONDS - began))s; the last package was built after $(<"$work/building")s"
[ "$ran" -gt 0 ] && [ ! -e "$work/failed" ]
