#!/usr/bin/env bash
# Runs all tests, with the race detector, and closes with what ran. With
# CI=true a skipped test is a failure: it would hide that something was never
# tried. Arguments go to go test; without any it tests ./...
set -euo pipefail
cd "$(dirname "$0")/.."

[ $# -gt 0 ] || set -- ./...
events=$(mktemp)
trap 'rm -f "$events"' EXIT

status=0
# A cached result would say nothing about this machine's kernel and iptables.
go tool -modfile=hack/tools/go.mod gotestsum --format=pkgname --format-hide-empty-pkg --jsonfile="$events" -- \
	-race -count=1 -timeout=30m "$@" || status=$?

# Package level events have no Test.
skips=$(grep -c '"Action":"skip".*"Test":' "$events" || true)
if [ "${CI:-}" = true ] && [ "$skips" -gt 0 ]; then
	echo "CI=true: $skips skipped tests (listed above) count as failures"
	status=1
fi
count() { grep -c "\"Action\":\"$1\".*\"Test\":" "$events" || true; }
echo "$(count pass) passed, $(count fail) failed, $skips skipped"
exit $status
