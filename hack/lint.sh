#!/usr/bin/env bash
# Everything that can be said about the sources without running them.
set -uo pipefail
cd "$(dirname "$0")/.."
export CGO_ENABLED=0 # as in the Makefile

failed=0
step() { # NAME COMMAND...: the command fails or prints something: a finding
	local name=$1 output
	shift
	# A fresh machine downloads modules first, and go says so.
	if ! output=$("$@" 2>&1 | sed '/^go: downloading /d') || [ -n "$output" ]; then
		printf -- '--- %s\n%s\n' "$name" "$output"
		failed=1
	fi
}

longest=450 # lines of a Go file that is no test

too_long() {
	find . -name '*.go' ! -name '*_test.go' -print0 | xargs -0 wc -l |
		awk -v max=$longest '$2 != "total" && $1 > max { printf "%s has %d lines, more than %d: split it by what its parts do\n", $2, $1, max }'
}

# Tests that are not run each time are to build all the same. None has the tag race: with it the
# standard library and all else would be compiled again.
tags=$(git grep -h '^//go:build [a-z]*$' -- '*.go' | sed 's/.* //' | sort -u | paste -sd, -)

# Modules of their own.
modules=(test/kubernetes hack/release)
in_module() { # FOLDER COMMAND...
	cd "$1" && shift && "$@"
}

scripts() {
	local all
	# One process for all files: two for each took 50 s.
	mapfile -t all < <(git grep -nI '^#!.*sh$' | sed -n 's/:1:#!.*//p')
	if command -v shellcheck >/dev/null; then
		shellcheck "${all[@]}"
	else
		local file
		for file in "${all[@]}"; do bash -n "$file" || return 1; done
	fi
}

# The others have the processor time that the two long steps leave. Packages that go vet has compiled,
# staticcheck finds in the cache.
others() {
	step gofmt gofmt -l .
	step 'shell scripts' scripts
	step 'long files' too_long
	step 'GitHub workflows' go tool -modfile=hack/tools/go.mod actionlint
	step 'imports run one way' go run ./hack/importcheck
	step 'words and wide lines' go run ./hack/prose
	step 'waits for time' go run ./hack/waits
	local module
	for module in "${modules[@]}"; do
		step "go vet of $module" go vet -C "$module" ./...
		step "staticcheck of $module" in_module "$module" go tool -modfile=../../hack/tools/go.mod staticcheck ./...
	done
	return $failed
}

said=$(mktemp)
trap 'rm -f "$said"' EXIT
others >"$said" 2>&1 &
step 'go vet' go vet -tags "$tags" ./...
step staticcheck go tool -modfile=hack/tools/go.mod staticcheck -tags "$tags" ./...
wait $! || failed=1
cat "$said"

[ $failed -eq 0 ] && echo 'lint: nothing found'
exit $failed
