#!/usr/bin/env bash
# Runs every fuzz target for a while, one after the other. What makes one fail is kept in
# the package's testdata/fuzz, to be committed with the fix.
# FUZZ is how long each runs, such as 30s; arguments are packages, all without any.
set -euo pipefail
cd "$(dirname "$0")/.."

time=${FUZZ:-30s}
[ $# -gt 0 ] || set -- ./...

status=0 ran=0
while read -r package; do
	# Comments of the test log go with the list of names.
	mapfile -t targets < <(go test -list '^Fuzz' "$package" | grep '^Fuzz' || true)
	for target in "${targets[@]}"; do
		echo "$package $target"
		ran=$((ran + 1))
		go test -run '^$' -fuzz "^$target\$" -fuzztime "$time" "$package" >"${log:=$(mktemp)}" 2>&1 || {
			cat "$log"
			status=1
		}
	done
done < <(go list -f '{{if or .TestGoFiles .XTestGoFiles}}{{.ImportPath}}{{end}}' "$@")
rm -f "${log:-}"
echo "$ran fuzz targets ran for $time each"
exit $status
