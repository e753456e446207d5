#!/usr/bin/env bash
# Runs make test's tests five times while 16 loops keep the processors busy, and twice with one
# processor for Go. A test that fails here measures time instead of waiting for a state. With an
# argument it runs that many times each.
set -uo pipefail
cd "$(dirname "$0")/.."

busy_runs=${1:-5} single_runs=${2:-2}
loops=()
end_loops() {
	[ ${#loops[@]} -eq 0 ] || kill "${loops[@]}" 2>/dev/null
	loops=()
}
trap end_loops EXIT

status=0
ran=()
run() { # WORDS
	local began=$SECONDS result=passed
	echo "== $1"
	hack/test.sh test || result=failed status=1
	ran+=("$(printf '%-40s %6d s  %s' "$1" $((SECONDS - began)) "$result")")
}

for _ in $(seq 16); do
	while :; do :; done &
	loops+=($!)
done
for i in $(seq "$busy_runs"); do run "16 busy loops, $i of $busy_runs"; done
end_loops
for i in $(seq "$single_runs"); do GOMAXPROCS=1 run "GOMAXPROCS=1, $i of $single_runs"; done

printf '%s\n' '' "${ran[@]}"
exit $status
