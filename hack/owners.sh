#!/usr/bin/env bash
# Builds the programs of test/owners/program, which test/flushers runs as owners next to canaryd:
# flannel's package that writes its rules. It takes half a minute once. Without it its test is
# skipped; with CI=true that is a failure.
set -euo pipefail
cd "$(dirname "$0")/.."

root=/var/cache/canaryd-test/owners
done_so="1: $(cat test/owners/program/{go.mod,go.sum,main.go} | sha256sum)"
[ "$(cat $root/.built 2>/dev/null)" != "$done_so" ] || exit 0

echo "owners: building flanneld into $root"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
build() {
	go build -C test/owners/program -o "$work/flanneld" . && mkdir -p $root && cp "$work/flanneld" $root/flanneld || return
	echo "$done_so" >$root/.built
}
build >"$work/log" 2>&1 || {
	tail -n 20 "$work/log" >&2
	echo "owners: it cannot be built; its test in test/flushers is skipped." >&2
	[ "${CI:-}" != true ] || exit 1
}
