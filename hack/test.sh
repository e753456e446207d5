#!/usr/bin/env bash
# Runs all tests, with the race detector, and closes with what ran. With
# CI=true a skipped test is a failure: it would hide that something was never
# tried. Arguments go to go test; without any it tests all that there is.
set -euo pipefail
cd "$(dirname "$0")/.."

events=$(mktemp -d)
trap 'rm -rf "$events"' EXIT

status=0
tested() { # MODULE-FOLDER NAME ARGUMENTS-OF-GO-TEST...
	local folder=$1 name=$2
	shift 2
	# A cached result would say nothing about this machine's kernel and iptables.
	(cd "$folder" && go tool -modfile="$OLDPWD/hack/tools/go.mod" gotestsum --format=pkgname --format-hide-empty-pkg \
		--jsonfile="$events/$name" -- -count=1 -timeout=30m "$@") || status=$?
}

if [ $# -gt 0 ]; then
	tested . canaryd -race "$@"
else
	tested . canaryd -race ./...
	# It reads files and runs nothing of canaryd's in its own process.
	tested test/kubernetes kubernetes ./...
fi

# Package level events have no Test.
skips=$(cat "$events"/* | grep -c '"Action":"skip".*"Test":' || true)
if [ "${CI:-}" = true ] && [ "$skips" -gt 0 ]; then
	echo "CI=true: $skips skipped tests (listed above) count as failures"
	status=1
fi
count() { cat "$events"/* | grep -c "\"Action\":\"$1\".*\"Test\":" || true; }
echo "$(count pass) passed, $(count fail) failed, $skips skipped"
exit $status
