#!/usr/bin/env bash
# Runs every fuzz target for a while, one after the other. What makes one fail is kept in
# the package's testdata/fuzz, to be committed with the fix.
# FUZZ is how long each runs, such as 30s, or how many inputs each is given, such as 1000x.
# Arguments are packages, all without any.
#
# Each package is built once: "go test -fuzz" takes one target, and would link each time.
# With a time Go's fuzzer now and then fails with "context deadline exceeded" and no finding, when
# the time ends (golang/go#75804, until Go 1.27); with a number its context has no deadline.
set -euo pipefail
cd "$(dirname "$0")/.."

time=${FUZZ:-30s}
[ $# -gt 0 ] || set -- ./...

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# A number of inputs is for the same inputs everywhere: those that are committed, and what comes
# of them. A time goes on with what earlier runs on this machine found worth keeping.
kept=$(go env GOCACHE)/fuzz
[[ $time != *x ]] || kept=$work/found

status=0 ran=0 began=$SECONDS building=0
while read -r package folder; do
	grep -qs '^func Fuzz' "$folder"/*_test.go || continue
	start=$SECONDS
	go test -c -fuzz=. -o "$work/test" "$package"
	building=$((building + SECONDS - start))
	# Comments of the test log go with the list of names.
	mapfile -t targets < <(cd "$folder" && "$work/test" -test.list '^Fuzz' | grep '^Fuzz' || true)
	for target in "${targets[@]}"; do
		ran=$((ran + 1)) start=$SECONDS
		# Making an input smaller takes a minute by default, in which a slow target tries nothing else.
		(cd "$folder" && "$work/test" -test.run='^$' -test.fuzz="^$target\$" -test.fuzztime="$time" -test.fuzzminimizetime=100x \
			-test.fuzzcachedir="$kept/$package" -test.timeout=0) >"$work/log" 2>&1 || {
			cat "$work/log"
			echo "FAILED: $package $target"
			status=1
		}
		if grep -q 'without coverage' "$work/log"; then
			echo "$package is not built for fuzzing"
			status=1
		fi
		# With a number all do the same, and one line says so.
		[[ $time == *x ]] || echo "$package $target: $(sed -n 's/.*\(execs: [0-9]*\).*/\1/p' "$work/log" | tail -1) in $((SECONDS - start))s"
	done
done < <(go list -f '{{.ImportPath}} {{.Dir}}' "$@")
echo "$ran fuzz targets ran for $time each: $((SECONDS - began))s, of which building took ${building}s"
[ "$ran" -gt 0 ] || status=1
exit $status
